"""Records as one HTML file."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sparsek_bench.engine import html, records, report
from sparsek_bench.engine.bench import TABLES

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SVG = '<?xml version="1.0"?>\n<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>'


class Reader(HTMLParser):
    """The cells of each row, the headings, and the attributes that would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.heads: list[str] = []
        self.loads: list[tuple[str, str | None]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.loads += [each for each in attrs if each[0] in ("src", "href", "data")]
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self.open and self.open[-1] == "h2":
            self.heads.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def test_a_page_has_the_environment_the_pictures_and_every_cell_of_the_tables() -> None:
    found = records.read(RESULTS / "h200" / "sddmm.jsonl")
    text = html.page(found, [("Speed <over> density", SVG)], "a & b")
    page = read(text)
    assert page.heads == ["Environment", "Pictures", TABLES["sddmm"].title]
    assert ["card", "NVIDIA H200"] in page.rows
    assert page.loads == []
    assert (
        'Speed &lt;over&gt; density</figcaption><svg viewBox="0 0 1 1"><path d="M0 0"/></svg></figure>'
        in text
    )
    assert "<?xml" not in text
    assert "<title>a &amp; b</title>" in text
    cells = {cell for row in page.rows for cell in row}
    table = TABLES["sddmm"]
    for record in report.ordered(found, table):
        assert {column.cell(record) for column in table.columns} <= cells


def test_a_page_without_records_says_so() -> None:
    page = html.page([], [], "nothing")
    assert "No records." in page
    assert read(page).heads == ["Environment"]


def test_text_of_records_is_escaped() -> None:
    assert html.from_markdown("| a | <b> |\n| --- | ---: |\n| 1 < 2 | & |\n\ntext <i>") == (
        '<div class="wide"><table><thead><tr><th>a</th><th class=n>&lt;b&gt;</th></tr></thead><tbody>\n'
        "<tr><td>1 &lt; 2</td><td class=n>&amp;</td></tr>\n</tbody></table></div>\n<p>text &lt;i&gt;</p>"
    )


def test_every_record_of_the_checkout_fits_a_page() -> None:
    found = records.read(RESULTS)
    page = read(html.page(found, [], "all"))
    assert len(page.heads) == 1 + len(
        {TABLES[op].title for op in TABLES if any(r["op"] == op for r in found)}
    )
    json.dumps(page.rows)
