"""Tables and charts from records."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsek.bench import charts, report
from sparsek.bench.cases import Case
from sparsek.bench.records import Record
from sparsek.core.errors import InvalidFile

Make = Callable[..., Record]

PAGE = "# Title\n\n<!-- records:spmm -->\nold\n<!-- /records -->\n\nafter\n"


def test_a_row_shows_case_kernel_time_rates_and_ratio(make_record: Make) -> None:
    lines = report.markdown([make_record()]).splitlines()
    assert lines[0] == (
        "| case | kernel | ms (min to max) | speedup over dense | useful TFLOPS | GB/s | of the roofline "
        "| over cuBLAS |"
    )
    assert lines[2] == (
        "| 8192³ block 128 12.5 % bf16 | cpu.spmm | 0.200 (0.190 to 0.250) | 8.00x | 687 | 1500 | 100 % | 1.00 |"
    )
    assert lines[-1].startswith("NVIDIA H200, 700 W, driver 580.1, torch 2.11.0, triton 3.6.0; 2026-11-20;")


def test_a_row_of_another_source_is_marked_earlier_version(make_record: Make) -> None:
    table = report.markdown([make_record(source_hash="0" * 16)])
    assert "| cpu.spmm (earlier version) |" in table
    assert "earlier version" not in report.markdown([make_record()])


def test_rows_follow_the_suite_and_only_the_newest_counts(make_record: Make) -> None:
    half = make_record(Case(8192, 8192, 8192, (128, 128), 0.5))
    old = make_record(gbps=1.0, date="2020-01-01T00:00:00+00:00")
    stray = make_record(Case(64, 64, 64, (16, 16), 0.5))
    shown = report.ordered([stray, old, make_record(), half])
    assert shown == [half, make_record(), stray]


def test_a_peer_that_a_row_lacks_leaves_its_cell_empty(make_record: Make) -> None:
    without = make_record(Case(64, 64, 64, (16, 16), 0.5), peers={}, ratio={})
    table = report.markdown([make_record(), without])
    assert "| 1.00 |" in table
    assert "|  |" in table


def test_host_time_stands_under_the_table(make_record: Make) -> None:
    ms = {"median": 0.018, "min": 0.017, "max": 0.02, "rounds": 7}
    host = make_record(op="spmm_host", tflops=None, gbps=None, roofline=None, peers={}, ratio={}, ms=ms)
    table = report.markdown([make_record(), host])
    assert "Host time of an eager call with a cached plan: 18.0 us (8192³ block 128 12.5 % bf16)." in table
    assert table.count("| cpu.spmm |") == 1


def test_without_records_the_table_says_how_to_make_them() -> None:
    assert "sparsek bench spmm --suite issue2" in report.markdown([])


def test_the_table_goes_between_the_markers_and_nothing_else_moves(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    changed = report.write(tmp_path, [make_record()], ["README.md"])
    assert changed == [tmp_path / "README.md"]
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- records:spmm -->\n| case |")
    assert text.endswith("\n<!-- /records -->\n\nafter\n")
    assert report.write(tmp_path, [make_record()], ["README.md"]) == []
    assert report.stale(tmp_path, [make_record()], ["README.md"]) == []


def test_a_page_that_tells_something_else_is_stale(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    report.write(tmp_path, [make_record()], ["README.md"])
    (wrong,) = report.stale(tmp_path, [make_record(gbps=2000.0)], ["README.md"])
    assert "README.md: table differs" in wrong
    assert "2000" in wrong


@pytest.mark.parametrize("page", ["no marker", "<!-- records:spmm -->", PAGE + PAGE])
def test_a_page_without_its_markers_is_an_error(page: str) -> None:
    with pytest.raises(InvalidFile, match="marker"):
        report.replaced(page, "table")


def test_charts_are_drawn_from_records(tmp_path: Path, make_record: Make) -> None:
    pytest.importorskip("matplotlib")
    found = [make_record(Case(8192, 8192, 8192, (b, b), d)) for b in (128, 64) for d in (0.5, 0.125)]
    drawn = charts.draw(found, tmp_path / "pictures")
    assert [path.name for path in drawn] == ["spmm-rate.png", "spmm-ratios.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert charts.draw([], tmp_path) == []
