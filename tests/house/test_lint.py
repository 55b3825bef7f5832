"""Rules about the text of the tree that a machine can hold."""

import ast
import re
import sys
from collections import Counter

import pytest

from tests.house.tools import PYRIGHT, ROOT, need, run, tree

CODE = ("sparsek", "sparsek_bench", "tests", "scripts", "benchmarks", "examples")
TEXT = (".py", ".md", ".toml", ".txt", ".sh", ".cu", ".json", ".jsonl", "Makefile", "run")
# Folders of the machines this was written on, put together so that this file does not name them itself.
MACHINE_PATHS = re.compile(
    "|".join(("/" + "work/", "/" + "root/", "/" + r"home/\w", "/" + r"Users/\w", "/" + "opt/"))
)

LINES_AT_MOST = 600
ROLES = {"Config", "Tile", "Work"}  # of each kernel: its config, that of its tile, and what `prepare` makes


def test_ruff_finds_nothing() -> None:
    need("ruff")
    done = run(sys.executable, "-m", "ruff", "check", "--no-cache", *CODE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_code_is_formatted() -> None:
    need("ruff")
    done = run(sys.executable, "-m", "ruff", "format", "--check", "--no-cache", *CODE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types_hold() -> None:
    need("pyright")
    done = run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--warnings", env=PYRIGHT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_class_name_has_one_meaning() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "sparsek").rglob("*.py"))
    names = Counter(node.name for each in trees for node in ast.walk(each) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == ROLES


@pytest.mark.parametrize("suffix", [".py", ".md", ".toml", ".cu", ".sh"])
def test_no_file_is_longer_than_600_lines(suffix: str) -> None:
    long = {
        str(path.relative_to(ROOT)): count for path in tree(suffix) if (count := _lines(path)) > LINES_AT_MOST
    }
    assert long == {}


def test_no_file_is_called_utils() -> None:
    assert [
        str(path) for path in tree(".py") if path.stem in ("utils", "util", "helpers", "misc", "common")
    ] == []


def test_no_text_names_a_folder_of_one_machine() -> None:
    named = []
    for path in tree(*TEXT):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATHS.search(line):
                named.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert named == []


def test_every_package_has_an_init_file() -> None:
    packages = ROOT / "sparsek", ROOT / "sparsek_bench"
    folders = {path.parent for path in tree(".py") if any(map(path.is_relative_to, packages))}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def _lines(path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
