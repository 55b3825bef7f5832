"""Tables from records, and the pages that show them."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import report as pages
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import records, report
from sparsek_bench.engine.bench import TABLES
from sparsek_bench.engine.records import Record
from sparsek_bench.suites import attention_grad, host, mlp
from sparsek_bench.suites.linear import LinearCase
from sparsek_bench.suites.spgemm import SPARSE
from sparsek_bench.suites.spmm import SpmmCase

Make = Callable[..., Record]

ROOT = Path(__file__).parents[2]


def beside(record: Record, peer: str, ratio: float) -> Record:
    """The record with one more peer, whose rate is that of the kernel over the ratio."""
    ms = dict.fromkeys(("median", "min", "max"), 0.2 * ratio) | {"rounds": 7}
    more = {"peers": {peer: {"ms": ms, "tflops": 687.0 / ratio}}, "ratio": {peer: ratio}}
    return record | {name: record[name] | more[name] for name in more}


def test_a_row_shows_case_kernel_time_rates_and_ratio(make_record: Make) -> None:
    lines = report.markdown([beside(make_record(), "torch_sparse", 1.3)], "spmm").splitlines()
    assert (
        lines[0] == "| case | ms | speedup over dense | useful TFLOPS | of the roofline | over torch.sparse |"
    )
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2] == "| 8192³ block 128 12.5 %, cpu.spmm | 0.200 ± 0.030 | 8.00x | 687 | 100 % | 1.30 |"
    assert lines[-1].startswith("Useful TFLOPS count stored blocks only.")
    assert (
        "Unless a row differs: bf16. NVIDIA H200, 700 W, driver 580.1, torch 2.11.0, triton 3.6.0; 2026-11-20; "
        "median of 7 interleaved rounds ± half of their range."
    ) in lines[-1]


def test_a_row_of_another_source_is_marked_earlier_version(make_record: Make) -> None:
    table = report.markdown([make_record(source_hash="0" * 16)], "spmm")
    assert "| 8192³ block 128 12.5 %, cpu.spmm (earlier version) |" in table
    assert "earlier version" not in report.markdown([make_record()], "spmm")


def test_rows_follow_the_suite_and_only_the_newest_counts(make_record: Make) -> None:
    half = make_record(SpmmCase(8192, 8192, 8192, (128, 128), 0.5))
    old = make_record(gbps=1.0, date="2020-01-01T00:00:00+00:00")
    stray = make_record(SpmmCase(64, 64, 64, (16, 16), 0.5))
    shown = report.ordered([stray, old, make_record(), half], TABLES["spmm"])
    assert shown == [half, make_record(), stray]


def test_a_peer_that_a_row_lacks_leaves_its_cell_empty(make_record: Make) -> None:
    without = make_record(SpmmCase(64, 64, 64, (16, 16), 0.5), peers={}, ratio={})
    table = report.markdown([beside(make_record(), "cusparse", 1.5), without], "spmm")
    assert "| 8.00x | 687 | 100 % | 1.50 |" in table
    assert "|  | 687 | 100 % |  |" in table


def test_peers_that_a_table_does_not_show_stay_in_the_records(make_record: Make) -> None:
    lines = report.markdown([beside(make_record(), "torch_dense", 1.3)], "spmm").splitlines()
    assert "over" not in lines[0].replace("speedup over dense", "")


@pytest.mark.parametrize("op", TABLES)
def test_a_table_is_narrow(op: str) -> None:
    table = TABLES[op]
    assert len(table.columns) + len(table.beside) <= 7
    assert set(table.beside) <= set(table.peers)
    assert not set(table.beside) & set(table.dense) or op == "planner"


def test_attention_has_its_own_table(make_record: Make, attention_record: Record) -> None:
    both = [make_record(), beside(attention_record, "fa4", 1.05)]
    lines = report.markdown(both, "attention").splitlines()
    assert lines[0] == (
        "| case | ms | speedup over dense | useful TFLOPS (of the roofline) | over FlashAttention-4 |"
    )
    assert lines[2] == ("| 32K window 2048, cpu.attention | 0.200 ± 0.030 | 8.00x | 687 (100 %) | 1.05 |")
    assert "Useful TFLOPS count the pairs that the mask admits" in lines[-1]
    assert "Unless a row differs: block 128, 16 heads, D 128, bf16." in lines[-1]
    assert report.markdown(both, "spmm") == report.markdown([make_record()], "spmm")
    assert report.measured(both) == ["spmm", "attention"]
    assert report.measured([]) == []
    assert report.measured([attention_record]) == ["attention"]


@pytest.mark.parametrize("op", TABLES)
def test_rows_follow_the_suite(make_record: Make, op: str) -> None:
    cases = [entry.case for entry in TABLES[op].suite if entry.case.op == op]
    found = [make_record(case) for case in dict.fromkeys(cases)]
    assert report.ordered(reversed(found), TABLES[op]) == found


@pytest.mark.parametrize("op", TABLES)
def test_every_table_says_how_its_records_are_made(op: str) -> None:
    table = TABLES[op]
    command, _, suite = table.command.partition(" --suite ")
    assert f"sparsek bench {table.command}` on an H200" in report.markdown([], op)
    assert suite in BENCHES[command].suites
    assert set(table.dense) <= set(table.peers)


def test_linear_is_shown_beside_the_plain_product(make_record: Make) -> None:
    ms = {"median": 0.195, "min": 0.19, "max": 0.2, "rounds": 7}
    plain = {"plain": {"ms": ms, "tflops": 700.0}}
    made = make_record(LinearCase(8192, 8192, 8192, (128, 128), 0.125, "bias+gelu"))
    made |= {"peers": made["peers"] | plain, "ratio": made["ratio"] | {"plain": 0.98}}
    lines = report.markdown([made], "linear").splitlines()
    assert lines[0] == (
        "| case | ms | speedup over dense | useful TFLOPS | of the roofline | time over the plain product |"
    )
    assert lines[2] == (
        "| 8192 tokens, 8192 to 8192, block 128 12.5 %, bias + gelu | 0.200 ± 0.030 | 8.00x | 687 | 100 % | +2.6 % |"
    )


def test_bsr_times_bsr_shows_the_symbolic_phase(make_record: Make) -> None:
    made = make_record(SPARSE[0], symbolic_ms=0.4567, symbolic_share=0.123)
    made |= {"symbolic_gpu_ms": 0.0521, "symbolic_gpu_share": 0.106}
    lines = report.markdown([made], "spgemm").splitlines()
    assert lines[0].endswith("| symbolic phase, ms (of a first call) | on the GPU, ms (of that call) |")
    assert lines[2].startswith("| 8192³ block 64 3 % to bsr, reference.spgemm |")
    assert "| 0.457 (12 %) | 0.052 (11 %) |" in lines[2]
    assert "| 100 % |  | 0.052 (11 %) |" in report.markdown([made | {"symbolic_ms": None}], "spgemm")
    assert "| 0.457 (12 %) |  |" in report.markdown([made | {"symbolic_gpu_ms": None}], "spgemm")


def test_the_ops_of_one_suite_have_their_own_tables(make_record: Make) -> None:
    train, *_, decode = [make_record(entry.case) for entry in mlp.PUBLISHED]
    assert report.measured([decode, train]) == ["mlp_train", "mlp_decode"]
    step = "| 4096 to 16384 to 4096 gelu, block 128 12.5 %, 8192 tokens | 0.200 ± 0.030 | 8.00x | 4.00x |"
    train = beside(train, "torch_dense_compiled", 4.0)
    assert step in report.markdown([train, decode], "mlp_train")
    assert "64 tokens | 0.200" in report.markdown([train, decode], "mlp_decode")
    assert "64 tokens" not in report.markdown([train, decode], "mlp_train")


def test_a_training_step_shows_its_peak(make_record: Make) -> None:
    case = attention_grad.TRAINING[1].case
    lines = report.markdown([make_record(case, peak_gb=4.321)], "attention_train").splitlines()
    assert lines[0] == "| case | ms | speedup over dense | useful TFLOPS (of the roofline) | peak GB |"
    assert lines[2] == "| 128K window 4096, 8 heads | 0.200 ± 0.030 | 8.00x | 687 (100 %) | 4.32 |"
    assert "| 687 (100 %) |  |" in report.markdown([make_record(case, peak_gb=None)], "attention_train")


def test_gradients_that_are_not_deterministic_have_rows_of_their_own(make_record: Make) -> None:
    free = next(row.case for row in attention_grad.PUBLISHED if not row.case.deterministic)
    fixed = replace(free, deterministic=True)
    table = report.markdown([make_record(free), make_record(fixed)], "attention_backward")
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:4]]
    kernel = "reference.attention_bwd"
    assert names == [f"32K random 12.5 %, {kernel}", f"32K random 12.5 %, not deterministic, {kernel}"]


def test_a_table_is_of_the_card_that_was_measured_last(make_record: Make) -> None:
    cases = [row.case for row in BENCHES["spmm"].suites["density"][:4]]

    def rows(gpu: str, *days: int) -> list[Any]:
        found = [make_record(case) for case in cases[: len(days)]]
        return [
            each | {"date": f"2026-11-0{day}T00:00:00+00:00", "env": each["env"] | {"gpu": gpu}}
            for each, day in zip(found, days, strict=True)
        ]

    # A row that was measured again does not make a card the last one.
    old, new, one = rows("NVIDIA H200", 2, 2, 2, 6), rows("NVIDIA H100", 1, 4), rows("NVIDIA H800", 7)
    assert report.of_one_card([*new, *old, *one]) == new, "half as many rows are enough, a quarter is not"
    assert "H200" not in report.markdown([*new, *old, *one], "spmm")
    assert report.of_one_card([]) == []


def test_without_records_the_table_says_how_to_make_them() -> None:
    assert "sparsek bench spmm --suite density" in report.markdown([], "spmm")
    assert "sparsek bench attention --suite published" in report.markdown([], "attention")
    assert "sparsek bench all" in pages.front([])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the pages, whose blocks are still empty."""
    blocks: dict[str, str] = {}
    for page, name, _ in pages.blocks([]):
        blocks[page] = (
            blocks.get(page, "# Title\n") + f"\n<!-- records:{name} -->\n<!-- /records -->\n\nafter\n"
        )
    for page, text in blocks.items():
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(text)
    return tmp_path


def around(page: str) -> str:
    """A page without what stands between its markers."""
    return re.sub(r"(<!-- records:\w+ -->).*?(<!-- /records -->)", r"\1\2", page, flags=re.DOTALL)


def test_blocks_are_filled_and_nothing_else_moves(checkout: Path, make_record: Make) -> None:
    found = [make_record()]
    before = around((checkout / pages.PAGE).read_text())
    assert set(pages.write(checkout, found)) == {
        checkout / pages.PAGE, checkout / pages.ATTENTION_PAGE, checkout / pages.README
    }  # fmt: skip
    after = (checkout / pages.PAGE).read_text()
    assert around(after) == before
    assert "\n| 8192³ block 128 12.5 %, cpu.spmm | 0.200 ± 0.030 | 8.00x | 687 | 100 % |\n" in after
    assert pages.write(checkout, found) == []
    assert pages.stale(checkout, found) == []


def test_files_that_are_made_of_records_are_written_too(checkout: Path, make_record: Make) -> None:
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    ms = {"median": 0.0123, "min": 0.012, "max": 0.013, "rounds": 21}
    record = make_record(host.EAGER, ms=ms, peers={}, ratio={}, **nulls)
    file = checkout / "sparsek/engine/plan/host.json"
    file.parent.mkdir(parents=True)
    assert str(file) in pages.stale(checkout, [record])[0]
    assert file in pages.write(checkout, [record])
    (told,) = json.loads(file.read_text()).items()
    assert told == ("NVIDIA H200", {"seconds": 1.23e-5, "case": host.EAGER.name, "date": record["date"]})
    assert pages.stale(checkout, [record]) == []
    assert host.host_table([make_record()]) == ""


def test_a_page_that_tells_something_else_is_stale(checkout: Path, make_record: Make) -> None:
    pages.write(checkout, [make_record()])
    ms = {"median": 0.3, "min": 0.29, "max": 0.31, "rounds": 7}
    wrong = pages.stale(checkout, [make_record(ms=ms)])
    assert [line.partition(":")[0] for line in wrong] == [
        str(checkout / pages.README),
        str(checkout / pages.PAGE),
    ]
    assert all("0.300 ± 0.010" in line for line in wrong)


def test_the_front_table_names_the_fastest_peer(make_record: Make) -> None:
    slow, fast = beside(make_record(), "cusparse", 3.0), beside(make_record(), "torch_sparse", 1.3)
    both = slow | {name: slow[name] | fast[name] for name in ("peers", "ratio")}
    lines = pages.front([both, make_record(SpmmCase(8192, 8192, 8192, (16, 16), 0.125))]).splitlines()
    assert lines[0].count("|") == 7
    assert lines[2] == (
        "| A @ B, 8192³ block 128 12.5 % | 0.200 ± 0.030 | 8.00x | 687 | 100 % | 1.30, torch.sparse |"
    )
    assert lines[3] == ""
    assert "1.30" not in pages.front([slow])


def test_the_front_table_has_eight_rows_that_are_measured() -> None:
    assert len(pages.FRONT) == 8
    for row in pages.FRONT:
        assert row.case in [entry.case for entry in TABLES[row.case.op].suite]
        assert set(row.peers) <= set(TABLES[row.case.op].peers)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no marker", "expected the marker <!-- records:spmm --> once, found it 0 times"),
        ("<!-- records:spmm -->", "has no <!-- /records --> after it"),
        ("<!-- records:spmm --><!-- /records -->" * 2, "found it 2 times"),
    ],
)
def test_a_page_without_its_markers_is_an_error(text: str, said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        pages.section(text, "spmm")


def test_the_script_writes_and_checks(
    checkout: Path, make_record: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkout / "spmm.jsonl"
    records.append(source, [make_record()])
    given = ["--records", str(source), "--root", str(checkout)]
    assert pages.main(["check", *given]) == 1
    assert "run `make readme`" in capsys.readouterr().out
    assert pages.main(["write", *given]) == 0
    assert pages.main(["check", *given]) == 0
    (checkout / pages.PAGE).unlink()
    with pytest.raises(SystemExit, match="cannot be read"):
        pages.main(["check", *given])
    source.write_text(json.dumps({"op": "spmm"}) + "\n")
    with pytest.raises(SystemExit, match=r"spmm.jsonl:1: field case is missing"):
        pages.main(["check", *given])


def test_every_table_stands_once() -> None:
    both = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in (pages.PAGE, pages.ATTENTION_PAGE))
    for op in TABLES:
        assert both.count(f"\n<!-- records:{op} -->\n") == 1
        assert f"\n<!-- records:{op} -->\n" in (ROOT / pages.page_of(op)).read_text(encoding="utf-8")
