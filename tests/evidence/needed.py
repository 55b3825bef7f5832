"""The files that a test file needs by its imports, for `make check`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from sparsek_bench.engine import sources

# Of a text: many test files need the same ones.
imports = lru_cache(maxsize=None)(sources.imports)

# A file of tests/ named in another, as a script that a test runs in a process of its own.
BESIDE = re.compile(r"""["'](\w+\.(?:py|h|cu))["']""")
# A module, or a folder of them, that is loaded by its name: f"sparsek_bench.suites.{stem}".
LATE = re.compile(r"""["'](sparsek(?:_bench|\.tools\.cli)\.\w+(?:\.\w+)*)""")
FOLLOWED = ("tests.", "sparsek_bench", "sparsek.tools.cli")


def needed(file: Path, root: Path, named: dict[Path, list[Path]] | None = None) -> set[Path]:
    """A test file, the conftest.py files above it, and the files of FOLLOWED that these import or name.

    `named` is what each file names, for a caller that asks of many files and keeps it.
    """
    named = {} if named is None else named
    folders = [folder for folder in file.parents if folder.is_relative_to(root / "tests")]
    waiting = [file, *(folder / "conftest.py" for folder in folders)]
    found: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file not in found and file.is_file():
            found.add(file)
            if file not in named:
                named[file] = [path for path in _named(file, root) if path.is_file()]
            waiting += named[file]
    return found


def _named(file: Path, root: Path) -> Iterator[Path]:
    """The files that a file names itself, whether they exist or not."""
    if file.suffix == ".py":
        source = file.read_text(encoding="utf-8")
        yield from (file.with_name(name) for name in BESIDE.findall(source))
        late = [] if file.is_relative_to(root / "tests") else LATE.findall(source)
        for name in {*imports(source), *late}:
            if name.startswith(FOLLOWED):
                module = root / name.replace(".", "/")
                yield from (module.with_suffix(".py"), module / "__init__.py")
                yield from module.glob("*.py") if name in late else ()
