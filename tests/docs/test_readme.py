"""The pages tell what the records say, and their examples run."""

import contextlib
import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from scripts import report
from sparsek_bench.engine import records
from tests.house.tools import need

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")] if path.is_file())
RESULTS = ROOT / "benchmarks" / "results"
# An example, and right below it what it prints, if the page shows that.
EXAMPLE = re.compile(r"^```python([^\n]*)\n(.*?)^```$(?:\n+^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """A Python example of a page: its line, the words after "python", its text, what it prints if that is shown."""

    line: int
    marks: list[str]
    source: str
    printed: str | None


def examples(page: Path) -> list[Example]:
    text = page.read_text(encoding="utf-8")
    return [
        Example(text[: found.start()].count("\n") + 1, found[1].split(), found[2], found[3])
        for found in EXAMPLE.finditer(text)
    ]


def test_tables_and_pictures_are_what_the_records_give() -> None:
    found = records.read(RESULTS) if RESULTS.is_dir() else []
    assert report.stale(ROOT, found) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_example_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples of one page share their names, as a reader would type them; one marked `new` is a new process. One
    marked `gpu` needs a GPU, and one marked by packages needs these.
    """
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__example__"}
    for example in examples(page):
        if "gpu" in example.marks and not torch.cuda.is_available():
            continue
        for package in example.marks:
            if package not in ("gpu", "new"):
                need(package)
        if "new" in example.marks:
            names = {"__name__": "__example__"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Padding keeps the line numbers of the page in a traceback.
            exec(compile("\n" * example.line + example.source, str(page), "exec"), names)
        if example.printed is not None:
            lines = [line.rstrip() for line in printed.getvalue().splitlines()]
            assert lines == example.printed.splitlines(), f"{page}, line {example.line}: prints otherwise"
