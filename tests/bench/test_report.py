"""Tables and charts from records."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sparsek.bench import charts
from sparsek.bench.benches import BENCHES
from sparsek.bench.engine import records, report
from sparsek.bench.engine.bench import TABLES
from sparsek.bench.engine.records import Record
from sparsek.bench.suites import (
    attention_grad,
    mlp,
)
from sparsek.bench.suites.attention import AttentionCase
from sparsek.bench.suites.linear import LinearCase
from sparsek.bench.suites.spgemm import SPARSE
from sparsek.bench.suites.spmm import SpmmCase
from sparsek.core.errors import InvalidFile

Make = Callable[..., Record]

PAGE = "# Title\n\n<!-- records:spmm -->\nold\n<!-- /records -->\n\nafter\n"


def test_a_row_shows_case_kernel_time_rates_and_ratio(make_record: Make) -> None:
    lines = report.markdown([make_record()], "spmm").splitlines()
    assert lines[0] == (
        "| case | kernel | ms (min to max) | speedup over dense | useful TFLOPS | GB/s | of the roofline "
        "| over cuBLAS |"
    )
    assert lines[2] == (
        "| 8192³ block 128 12.5 % bf16 | cpu.spmm | 0.200 (0.190 to 0.250) | 8.00x | 687 | 1500 | 100 % | 1.00 |"
    )
    assert lines[-1].startswith("NVIDIA H200, 700 W, driver 580.1, torch 2.11.0, triton 3.6.0; 2026-11-20;")


def test_a_row_of_another_source_is_marked_earlier_version(make_record: Make) -> None:
    table = report.markdown([make_record(source_hash="0" * 16)], "spmm")
    assert "| cpu.spmm (earlier version) |" in table
    assert "earlier version" not in report.markdown([make_record()], "spmm")


def test_rows_follow_the_suite_and_only_the_newest_counts(make_record: Make) -> None:
    half = make_record(SpmmCase(8192, 8192, 8192, (128, 128), 0.5))
    old = make_record(gbps=1.0, date="2020-01-01T00:00:00+00:00")
    stray = make_record(SpmmCase(64, 64, 64, (16, 16), 0.5))
    shown = report.ordered([stray, old, make_record(), half], TABLES["spmm"])
    assert shown == [half, make_record(), stray]


def test_a_peer_that_a_row_lacks_leaves_its_cell_empty(make_record: Make) -> None:
    without = make_record(SpmmCase(64, 64, 64, (16, 16), 0.5), peers={}, ratio={})
    table = report.markdown([make_record(), without], "spmm")
    assert "| 1.00 |" in table
    assert "|  |" in table


def test_attention_has_its_own_table(make_record: Make, attention_record: Record) -> None:
    both = [make_record(), attention_record]
    lines = report.markdown(both, "attention").splitlines()
    assert lines[0] == (
        "| case | kernel | ms (min to max) | speedup over dense | useful TFLOPS | of the roofline | extra memory "
        "| over cuDNN dense |"
    )
    assert lines[2] == (
        "| 32K window 2048, block 128, 16 heads, D 128, bf16 | cpu.attention | 0.200 (0.190 to 0.250) | 8.00x | 687 "
        "| 100 % | 1 % | 1.00 |"
    )
    assert "Useful TFLOPS count the pairs that the mask admits" in lines[-1]
    assert report.markdown(both, "spmm") == report.markdown([make_record()], "spmm")
    assert report.measured(both) == ["spmm", "attention"]
    assert report.measured([]) == list(TABLES)
    assert report.measured([attention_record]) == ["attention"]


@pytest.mark.parametrize("op", TABLES)
def test_rows_follow_the_suite(make_record: Make, op: str) -> None:
    cases = [entry.case for entry in TABLES[op].suite if entry.op == op]
    found = [make_record(case) for case in dict.fromkeys(cases)]
    assert report.ordered(reversed(found), TABLES[op]) == found


@pytest.mark.parametrize("op", TABLES)
def test_every_table_says_how_its_records_are_made_and_stands_on_two_pages(op: str) -> None:
    table = TABLES[op]
    command, _, suite = table.command.partition(" --suite ")
    assert f"sparsek bench {table.command}` on an H200" in report.markdown([], op)
    assert suite in BENCHES[command].suites
    assert table.pages[0] == "README.md"
    assert [page for page, name in report.pages() if name == op] == list(table.pages)
    assert set(table.dense) <= set(table.peers)


def test_linear_is_shown_beside_the_plain_product(make_record: Make) -> None:
    ms = {"median": 0.195, "min": 0.19, "max": 0.2, "rounds": 7}
    plain = {"plain": {"ms": ms, "tflops": 700.0}}
    made = make_record(LinearCase(8192, 8192, 8192, (128, 128), 0.125, "bias+gelu"))
    made |= {"peers": made["peers"] | plain, "ratio": made["ratio"] | {"plain": 0.98}}
    lines = report.markdown([made], "linear").splitlines()
    assert lines[0] == (
        "| case | kernel | ms (min to max) | time beside plain | speedup over dense | useful TFLOPS | of the roofline "
        "| over cuBLAS and torch | over the plain product |"
    )
    assert lines[2] == (
        "| 8192 tokens, 8192 to 8192, block 128 12.5 % bf16, bias + gelu | cpu.spmm | 0.200 (0.190 to 0.250) | +2.6 % "
        "| 8.00x | 687 | 100 % | 1.00 | 0.98 |"
    )


def test_bsr_times_bsr_shows_the_symbolic_phase(make_record: Make) -> None:
    made = make_record(SPARSE[0], symbolic_ms=0.4567, symbolic_share=0.123)
    made |= {"symbolic_gpu_ms": 0.0521, "symbolic_gpu_share": 0.106}
    lines = report.markdown([made], "spgemm").splitlines()
    assert "| symbolic ms (of a first call) | of it on the GPU (of the call's) |" in lines[0]
    assert "| 8192³ block 64 3 % bf16 to bsr | reference.spgemm |" in lines[2]
    assert "| 0.457 (12 %) | 0.052 (11 %) |" in lines[2]
    assert "| 100 % |  | 0.052 (11 %) |" in report.markdown([made | {"symbolic_ms": None}], "spgemm")
    assert "| 0.457 (12 %) |  | 1.00 |" in report.markdown([made | {"symbolic_gpu_ms": None}], "spgemm")


def test_the_ops_of_one_suite_have_their_own_tables(make_record: Make) -> None:
    train, *_, decode = [make_record(entry.case) for entry in mlp.PUBLISHED]
    assert report.measured([decode, train]) == ["mlp_train", "mlp_decode"]
    step = "| 4096 to 16384 to 4096 gelu, block 128 12.5 % bf16, 8192 tokens | cpu.spmm + reference.sddmm |"
    assert step in report.markdown([train, decode], "mlp_train")
    assert "64 tokens | cpu.spmm | 0.200" in report.markdown([train, decode], "mlp_decode")
    assert "64 tokens" not in report.markdown([train, decode], "mlp_train")


def test_a_training_step_shows_its_time_per_token_and_its_peak(make_record: Make) -> None:
    case = attention_grad.TRAINING[1].case
    ms = {"median": 13.1072, "min": 13.0, "max": 14.0, "rounds": 7}
    lines = report.markdown([make_record(case, ms=ms, peak_gb=4.321)], "attention_train").splitlines()
    assert "| us per token | speedup over dense | useful TFLOPS | of the roofline | peak GB |" in lines[0]
    assert lines[2].startswith("| 128K window 4096, block 128, 8 heads, D 128, bf16 | reference.attention + ")
    assert "| 13.107 (13.000 to 14.000) | 0.1 |" in lines[2]
    assert "| 4.32 |" in lines[2]
    assert "| 100 % |  | 1.00 |" in report.markdown([make_record(case, peak_gb=None)], "attention_train")


def test_gradients_that_are_not_deterministic_have_rows_of_their_own(make_record: Make) -> None:
    fixed, free = (entry.case for entry in (attention_grad.PUBLISHED[5], attention_grad.PUBLISHED[10]))
    table = report.markdown([make_record(free), make_record(fixed)], "attention_backward")
    name = "| 32K random 12.5 %, block 128, 16 heads, D 128, bf16"
    assert [line[: len(name) + 22] for line in table.splitlines()[2:4]] == [
        f"{name} | reference.attention",
        f"{name}, not deterministic | ",
    ]


def test_what_a_mask_costs_stands_under_the_table(attention_record: Record) -> None:
    unrated = {"tflops": None, "gbps": None, "roofline": None, "peers": {}, "ratio": {}}
    common = {name: value for name, value in attention_record.items() if name != "memory"}
    alone = {"kernel_alone": {"ms": attention_record["ms"] | {"median": 0.16}, "tflops": 1.0}}
    build = common | unrated | {"op": "mask_build", "kernel": "mask.structured", "source_hash": "0"}
    fresh = records.hash_of("attention_new_mask", common["kernel"])
    new = common | {
        "op": "attention_new_mask", "peers": alone, "ratio": {"kernel_alone": 0.8}, "source_hash": fresh
    }  # fmt: skip
    table = report.markdown([attention_record, build, new], "attention")
    case = "32K window 2048, block 128, 16 heads, D 128, bf16"
    assert f"A mask, built and ready: 0.200 ms ({case} (earlier version))." in table
    assert f"a new mask every call: 0.200 ms, 1.25 times the kernel alone ({case}, cpu.attention)." in table
    assert table.count("| cpu.attention |") == 1


def test_memory_that_was_not_measured_leaves_its_cell_empty(attention_record: Record) -> None:
    assert "| 100 % |  | 1.00 |" in report.markdown([attention_record | {"memory": None}], "attention")


def test_a_page_may_hold_both_tables(tmp_path: Path, make_record: Make, attention_record: Record) -> None:
    pages = [("README.md", "spmm"), ("README.md", "attention")]
    (tmp_path / "README.md").write_text(PAGE + PAGE.replace("spmm", "attention"))
    found = [make_record(), attention_record]
    assert report.write(tmp_path, found, pages) == [tmp_path / "README.md"]
    assert report.stale(tmp_path, found, pages) == []
    (wrong,) = report.stale(tmp_path, [make_record(), attention_record | {"memory": 0.5}], pages)
    assert "table of attention differs" in wrong


def test_a_page_that_is_missing_leaves_the_others_alone(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    with pytest.raises(InvalidFile, match="cannot be read"):
        report.write(tmp_path, [make_record()], [("README.md", "spmm"), ("docs/spmm.md", "spmm")])
    assert (tmp_path / "README.md").read_text() == PAGE


def test_without_records_the_table_says_how_to_make_them() -> None:
    assert "sparsek bench spmm --suite blocks" in report.markdown([], "spmm")
    assert "sparsek bench attention --suite published" in report.markdown([], "attention")


def test_the_table_goes_between_the_markers_and_nothing_else_moves(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    changed = report.write(tmp_path, [make_record()], [("README.md", "spmm")])
    assert changed == [tmp_path / "README.md"]
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- records:spmm -->\n| case |")
    assert text.endswith("\n<!-- /records -->\n\nafter\n")
    assert report.write(tmp_path, [make_record()], [("README.md", "spmm")]) == []
    assert report.stale(tmp_path, [make_record()], [("README.md", "spmm")]) == []


def test_a_page_that_tells_something_else_is_stale(tmp_path: Path, make_record: Make) -> None:
    (tmp_path / "README.md").write_text(PAGE)
    report.write(tmp_path, [make_record()], [("README.md", "spmm")])
    (wrong,) = report.stale(tmp_path, [make_record(gbps=2000.0)], [("README.md", "spmm")])
    assert "README.md: table of spmm differs" in wrong
    assert "2000" in wrong


@pytest.mark.parametrize("page", ["no marker", "<!-- records:spmm -->", PAGE + PAGE])
def test_a_page_without_its_markers_is_an_error(page: str) -> None:
    with pytest.raises(InvalidFile, match="marker"):
        report.replaced(page, "table", "spmm")


def test_charts_are_drawn_from_records(tmp_path: Path, make_record: Make) -> None:
    pytest.importorskip("matplotlib")
    found = [make_record(SpmmCase(8192, 8192, 8192, (b, b), d)) for b in (128, 64) for d in (0.5, 0.125)]
    drawn = charts.draw(found, tmp_path / "pictures")
    assert [path.name for path in drawn] == ["spmm-rate.png", "spmm-ratios.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert charts.draw([], tmp_path) == []
    forms = [make_record(SpmmCase(64, 64, 64, (32, 32), 0.5, form="B@A"))]
    drawn = charts.draw([*forms, make_record(SPARSE[0])], tmp_path)
    assert [path.name for path in drawn] == ["spmm-ratios.png", "spgemm-ratios.png"]


def test_no_chart_compares_where_a_table_shows_no_ratios(tmp_path: Path, make_record: Make) -> None:
    pytest.importorskip("matplotlib")
    record = make_record(BENCHES["host"].suites["host"][0].case)
    assert record["ratio"]
    assert charts.draw([record], tmp_path) == []


def test_attention_is_drawn_over_the_length(tmp_path: Path, make_record: Make) -> None:
    pytest.importorskip("matplotlib")
    sweep = [
        AttentionCase(1, 8, 8, length, length, 128, 128, "window:4096+sinks:128") for length in (1024, 2048)
    ]
    found = [make_record(case) for case in sweep]
    drawn = charts.draw([*found, found[0] | {"memory": None, "kernel": "cpu.spmm"}], tmp_path)
    assert [path.name for path in drawn] == ["attention-length.png", "attention-ratios.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert [path.name for path in charts.draw(found[:1], tmp_path)] == ["attention-ratios.png"]
