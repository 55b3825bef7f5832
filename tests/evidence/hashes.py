"""Which code a run of tests was of: hashes of sparsek/ and of test files, without comments, docstrings and layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from sparsek.plan import sources

# A file of tests/ named in another, as a script that a test runs in a process of its own.
BESIDE = re.compile(r"""["'](\w+\.(?:py|h|cu))["']""")
# Only such a file can hold tests marked `gpu`: by the mark, or by the fixture `device`.
MARKED = re.compile(r"mark\.gpu\b|[(,]\s*device\b\s*[:,)]|^\s+device: ", re.MULTILINE)


def source_hashes(root: Path, *, bench: bool) -> dict[str, str]:
    """The hash of each folder of sparsek/ that the kernels, plans and operations are made of, and of the files beside
    them. `bench`: that folder's too.
    """
    top = root / "sparsek"
    found = {"sparsek": sources.files_hash(top.glob("*.py"), top)}
    for folder in sorted(path for path in top.iterdir() if (path / "__init__.py").exists()):
        if folder.name == "cli" or (folder.name == "bench" and not bench):
            continue
        files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
        found[folder.name] = sources.files_hash(files, top)
    return found


def test_hash(path: str, root: Path) -> str:
    """The hash of a test file and of what it needs of tests/."""
    return sources.files_hash(_needed(root / path, root), root)


def needs_bench(paths: Iterable[str], root: Path) -> bool:
    """Whether any of the test files runs code of sparsek/bench, or of the command line, which calls it."""
    return any(
        module.startswith(("sparsek.bench", "sparsek.cli"))
        for path in paths
        for file in _needed(root / path, root)
        if file.suffix == ".py"
        for module in _names(file)[0]
    )


def may_hold_gpu_tests(path: str, root: Path) -> bool:
    """False where a look at the file shows that none of its tests is marked `gpu`."""
    return MARKED.search((root / path).read_text(encoding="utf-8")) is not None


def _needed(file: Path, root: Path) -> set[Path]:
    """A test file, the conftest.py files above it, and the files of tests/ that these import or name."""
    folders = [folder for folder in file.parents if folder.is_relative_to(root / "tests")]
    waiting = [file, *(folder / "conftest.py" for folder in folders)]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found.add(file)
        if file.suffix == ".py":
            modules, beside = _names(file)
            waiting += [file.with_name(name) for name in beside]
            waiting += [
                root / (name.replace(".", "/") + ".py") for name in modules if name.startswith("tests.")
            ]
    return found


def _names(file: Path) -> tuple[list[str], list[str]]:
    """The modules that a file imports, and the names in it that may be files beside it."""
    source = file.read_text(encoding="utf-8")
    return sources.imports(source), BESIDE.findall(source)
