"""The floors of DESIGN.md, held by import-linter with the contracts in pyproject.toml."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need, run

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])")


def test_each_floor_imports_only_from_the_floors_below() -> None:
    need("importlinter")
    done = run(*LINT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from sparsek.kernels import load\n",
        "def late():\n    from sparsek.kernels import load\n    return load\n",
    ],
    ids=["at the top", "inside a function"],
)
def test_an_import_from_a_floor_above_is_found(tmp_path: Path, line: str) -> None:
    need("importlinter")
    shutil.copytree(ROOT / "sparsek", tmp_path / "sparsek")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sparsek/core/upward.py").write_text(line)
    done = run(*LINT, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "sparsek.core is not allowed to import sparsek.kernels" in done.stdout
