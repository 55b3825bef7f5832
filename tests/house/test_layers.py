"""The layers of DESIGN.md, held by import-linter with the contracts in pyproject.toml, and no circle inside a room."""

import ast
import shutil
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house.tools import ROOT, need, run

LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])")


def test_each_room_imports_only_from_the_rooms_below() -> None:
    need("importlinter")
    done = run(*LINT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "from sparsek.kernels.table import load\n",
        "def late():\n    from sparsek.kernels.table import load\n    return load\n",
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


# import-linter (2.15) knows no contract for circles between modules.
ROOMS = sorted(path.parent for path in (ROOT / "sparsek").rglob("__init__.py"))
TO_BE_SOLVED: set[str] = set()


def imports_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports, also inside functions; not what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node = ast.Module(node.orelse, [])
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        yield from imports_of(node)


def circle_in(room: Path, package: str) -> list[str]:
    """Modules of a folder that import each other in a circle; none if there is no circle."""
    names = {f"{package}.{path.stem}": path for path in room.glob("*.py") if path.stem != "__init__"}
    graph = {
        name: set(imports_of(ast.parse(path.read_text()))) & names.keys() for name, path in names.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_no_modules_of_a_room_import_each_other_in_a_circle(room: Path) -> None:
    package = ".".join(room.relative_to(ROOT).parts)
    found = circle_in(room, package)
    assert bool(found) == (package in TO_BE_SOLVED), (
        " -> ".join(found) or "solved: take it out of TO_BE_SOLVED"
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("def late():\n    from room import a\n", True),
        ("import room.a\n", True),
        ("if TYPE_CHECKING:\n    from room.a import A\n", False),
    ],
)
def test_a_circle_is_found(tmp_path: Path, line: str, found: bool) -> None:
    (tmp_path / "a.py").write_text("from room.b import B\n")
    (tmp_path / "b.py").write_text(line)
    assert bool(circle_in(tmp_path, "room")) == found
