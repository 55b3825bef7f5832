"""The layers of DESIGN.md, held by import-linter with the contracts in pyproject.toml; floors, arrows and circles."""

import shutil
import sys
from pathlib import Path

import pytest

from scripts import house
from tests.house.tools import ROOT, need, run

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])")


def test_each_room_imports_only_from_the_rooms_below() -> None:
    need("importlinter")
    done = run(*LINT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from sparsek.engine.table import load\n",
        "def late():\n    from sparsek.engine.table import load\n    return load\n",
    ],
    ids=["at the top", "inside a function"],
)
def test_an_import_from_a_floor_above_is_found(tmp_path: Path, line: str) -> None:
    need("importlinter")
    for name in ("sparsek", "sparsek_bench"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sparsek/core/upward.py").write_text(line)
    done = run(*LINT, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sparsek.core is not allowed to import sparsek.engine" in done.stdout


def test_floors_arrows_and_circles_stay_within_their_limits() -> None:
    graph = house.files(house.modules())
    found = house.numbers(graph)
    assert all(found[name] <= most for name, most in house.LIMITS.items()), "\n".join(house.lines(graph))


IMPORTS = {
    "at the top": "from sparsek.above.verbs import multiply\n",
    "inside a function": "def late():\n    from sparsek.above import verbs\n",
    "by its name": "import importlib\nVERBS = importlib.import_module('sparsek.above.verbs')\n",
    "by a name in parts": "from importlib import import_module\nVERBS = import_module(f'sparsek.above.{STEM}')\n",
    "for type checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sparsek.above.verbs\n",
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=list(IMPORTS))
def test_every_way_to_import_is_an_arrow_and_may_close_a_circle(tmp_path: Path, text: str) -> None:
    for name, source in {
        "sparsek/__init__.py": "",
        "sparsek/above/__init__.py": "",
        "sparsek/above/verbs.py": "from sparsek.below import data\n",
        "sparsek/below/__init__.py": '"""Below."""\n',
        "sparsek/below/data.py": text,
        "scripts/run.py": "import sparsek.below.data\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    graph = house.files(house.modules(tmp_path))
    assert house.rooms(graph) == {"above": {"below"}, "below": {"above"}, "scripts": {"below"}}
    in_circles = 0 if "{" in text else 2  # a name in parts is that of a package
    assert house.numbers(graph) == {"floors": 2, "arrows": 3, "files in circles": in_circles}
