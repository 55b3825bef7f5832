"""The pages tell what the records say, and their examples run."""

import re
from pathlib import Path

import pytest
import torch

from sparsek.bench import records, report

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")] if path.is_file())
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: Path) -> list[tuple[int, str, str]]:
    """Line, words after "python", and text of every Python example of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 1, found[1].strip(), found[2]) for found in BLOCK.finditer(text)
    ]


def test_the_tables_of_the_pages_are_what_the_records_give() -> None:
    found = records.read(RESULTS) if RESULTS.is_dir() else []
    assert report.stale(ROOT, found) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_example_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples of one page share their names, as a reader would type them. One marked `gpu` needs a GPU."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "__example__"}
    for line, marks, source in examples(page):
        if "gpu" in marks.split() and not torch.cuda.is_available():
            continue
        # Padding keeps the line numbers of the page in a traceback.
        exec(compile("\n" * line + source, str(page), "exec"), names)
