"""`sparsek bench`: what it prints, how it fails, what it writes."""

import re
from pathlib import Path
from typing import Any

import pytest

from sparsek_bench.engine import records
from sparsek_bench.engine.case import SuiteRow

SMALL = ["--m", "64", "--k", "96", "--n", "32", "--block", "32", "--density", "0.5", "--dtype", "fp32"]
QUICK = [*SMALL, "--kernel", "cpu.spmm", "--rounds", "2", "--device", "cpu"]
PRODUCT = ["--m", "64", "--k", "96", "--n", "80", "--block", "16", "--density", "0.5", "--dtype", "fp32"]
LINEAR = ["--tokens", "24", "--k", "64", "--n", "96", "--block", "32", "--density", "0.5", "--dtype", "fp32"]
MLP = ["--tokens", "24", "--width", "64", "--hidden", "96", *LINEAR[6:]]
FEW = ["--rounds", "2", "--device", "cpu"]
ATTENTION = ["--seq", "128", "--block", "64", "--heads", "2:1", "--dim", "32", "--dtype", "fp32"]
ATTENTION += ["--kernel", "cpu.attention", "--rounds", "2", "--device", "cpu"]


def test_bench_prints_a_table_and_appends_records(run, tmp_path: Path) -> None:
    out = tmp_path / "cpu" / "spmm.jsonl"
    arguments = [*QUICK, "--peers", "torch_dense, torch_sparse", "--out", out]
    result = run("bench", "spmm", *arguments)
    assert result.exit_code == 0, result.output
    assert "BSR x dense on cpu" in result.output
    headings = " ".join(result.stdout.split("64×96×32")[0].split())
    assert headings.count("over") == 3  # over dense, and over each peer
    assert "Over a peer: 1.50 means 1.5 times as fast." in result.output
    assert re.search(r"^64×96×32 block 32 50 % fp32 +cpu\.spmm ", result.stdout, re.MULTILINE)
    assert f"1 records appended to {out}" in result.output
    (record,) = records.read(out)
    assert set(record["peers"]) == {"torch_dense", "torch_sparse"}
    run("bench", "spmm", *arguments)
    assert len(records.read(out)) == 2


def test_bench_goes_on_after_a_case_that_memory_cannot_hold(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entry: SuiteRow, **options: Any) -> Any:
        raise MemoryError(f"Unable to allocate {entry.case.m}")

    monkeypatch.setattr("sparsek_bench.commands.bench_run.measure", fail)
    result = run("bench", "spmm", *QUICK, "--m", "64,128", "--peers", "none")
    assert result.exit_code == 1
    assert re.findall(r"Unable to allocate (\d+)", result.stderr) == ["64", "128"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operand sets, and fewer calls of the symbolic phase of BSR x BSR."""
    monkeypatch.setattr("sparsek_bench.engine.data.MAX_SETS", 2)
    monkeypatch.setattr("sparsek.core.clock.WALL_CALLS", 2)
    monkeypatch.setattr("sparsek_bench.suites.spgemm.SYMBOLIC_ROUNDS", 2)


@pytest.mark.parametrize(
    ("op", "arguments", "title", "rows"),
    [
        ("sddmm", PRODUCT, "SDDMM", ["64×96×80 block 16 50 % fp32 reference.sddmm"]),
        (
            "spgemm",
            [*PRODUCT, "--block", "32x48:48x16", "--result", "dense,bsr"],
            "BSR x BSR",
            [f"64×96×80 block 32x48·48x16 50 % fp32 to {out} reference.spgemm" for out in ("dense", "bsr")],
        ),
        (
            "linear",
            [*LINEAR, "--epilogue", "bias+silu"],
            "linear",
            ["24 tokens, 64 to 96, block 32 50 % fp32, bias + silu cpu.spmm"],
        ),
        (
            "semi24",
            [*PRODUCT[:6], "--k", "128", "--block", "none,64", "--density", "0.5,1", "--dtype", "fp32"],
            "2:4",
            [
                "x @ W.T 64×128×80 2:4 fp32 reference.semi24",
                "x @ W.T 64×128×80 2:4 in block 64 50 % fp32 cpu.bsr24",
                "x @ W.T 64×128×80 2:4 in block 64 100 % fp32 cpu.bsr24",
            ],
        ),
        (
            "fp8",
            [*PRODUCT[:6], "--block", "32", "--density", "0.5", "--stored", "bsr,semi24", "--form", "A@B"],
            "FP8",
            [
                "A @ B 64×96×80 block 32 50 % e4m3 reference.spmm_fp8",
                "A @ B 64×96×80 2:4 e4m3 reference.spmm_fp8",
            ],
        ),
        (
            "mlp",
            [*MLP, "--measure", "train"],
            "training step of an MLP",
            ["64 to 96 to 64 gelu, block 32 50 % fp32, 24 tokens cpu.spmm + reference.sddmm"],
        ),
    ],
)
def test_bench_of_every_product_prints_a_table_and_appends_records(
    run, monkeypatch, tmp_path: Path, quick, op: str, arguments: Any, title: str, rows: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / f"{op}.jsonl"
    result = run("bench", op, *arguments, *FEW, "--peers", "torch_dense", "--out", out)
    assert result.exit_code == 0, result.output
    assert f"{title} on cpu" in result.output
    printed = [re.sub(r" +", " ", line) for line in result.stdout.splitlines()]
    assert [any(line.startswith(row) for line in printed) for row in rows] == [True] * len(rows)
    assert f"{len(rows)} records appended to {out}" in result.output
    assert [list(record["peers"]) for record in records.read(out)] == [["torch_dense"]] * len(rows)


def test_bench_pack_shows_bytes_and_no_flops(run, monkeypatch, tmp_path: Path, quick) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "r.jsonl"
    result = run(
        "bench", "pack", "--m", "64", "--k", "96", "--block", "32", "--keep", "0.5", *FEW, "--out", out
    )
    assert result.exit_code == 0, result.output
    printed = [re.sub(r" +", " ", line) for line in result.stdout.splitlines()]
    for start in (
        "64×96 bf16 to 2:4 matrix.two_four",
        "64×96 bf16 to BSR, block 32, 50 % kept matrix.convert",
    ):
        assert len([line for line in printed if re.match(rf"{start} .+ 0\.\d+ ?$", line)]) == 1
    assert [(record["tflops"], list(record["peers"])) for record in records.read(out)] == [
        (None, ["copy"])
    ] * 2


def test_bench_mlp_says_that_decoding_needs_a_gpu(run, quick) -> None:
    result = run("bench", "mlp", *MLP, *FEW, "--measure", "train,decode", "--peers", "none")
    assert result.exit_code == 0, result.output
    assert (
        "auto not measured: its calls are replayed in a CUDA graph, which needs an NVIDIA GPU"
        in result.output
    )
    assert run("bench", "mlp", *MLP, *FEW, "--measure", "decode").exit_code == 1


def test_bench_attention_prints_a_table_and_appends_records(run, tmp_path: Path) -> None:
    out = tmp_path / "cpu" / "attention.jsonl"
    masks = ["--mask", "window:64+sinks:16,causal"]
    result = run("bench", "attention", *ATTENTION, *masks, "--peers", "all", "--out", out)
    assert result.exit_code == 0, result.output
    assert "attention on cpu" in result.output
    assert re.search(r"^128 window 64 \+ sinks 16, block 64, 2:1", result.stdout, re.MULTILINE)
    assert "sdpa: causal (every case)" in result.stdout
    assert f"2 records appended to {out}" in result.output
    assert [list(record["peers"]) for record in records.read(out)] == [["sdpa"], ["sdpa"]]
    assert records.read(out)[0]["case"]["mask"] == "window:64+sinks:16"


def test_bench_attention_backward_measures_gradients_and_steps(
    run, monkeypatch, tmp_path: Path, quick
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    out = tmp_path / "gradients.jsonl"
    shape = [*ATTENTION[: ATTENTION.index("--kernel")], "--rounds", "2", "--device", "cpu", "--out", out]
    masks = ["--mask", "causal,blocks:0.5"]
    alone = run("bench", "attention-backward", *shape, *masks, "--kernel", "reference.attention_bwd")
    assert alone.exit_code == 0, alone.output
    assert "gradients of attention on cpu" in alone.output
    step = ["--measure", "train", "--any-order", "--kernel", "reference.attention", "--peers", "sdpa"]
    result = run("bench", "attention-backward", *shape, *step, "--mask", "full")
    assert result.exit_code == 0, result.output
    assert "training step of attention on cpu" in result.output
    assert "128 full, block 64, 2:1 heads, D 32, fp32, not deterministic" in result.output
    found = records.read(out)
    assert [(r["op"], r["case"]["mask"], r["case"]["deterministic"]) for r in found] == [
        ("attention_backward", "causal", True),
        ("attention_backward", "blocks:0.5", True),
        ("attention_train", "full", False),
    ]
    assert [list(record["peers"]) for record in found] == [["sdpa"]] * 3


def test_bench_host_times_calls_by_hand(run, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("sparsek_bench.suites.host.CALLS_EACH", 2)
    out = tmp_path / "host.jsonl"
    given = ["--call", "linear", "--sides", "8x64x128", "--storage", "bsr,semi24", "--block", "32"]
    result = run("bench", "host", *given, "--dtype", "fp32", *FEW, "--out", out)
    assert result.exit_code == 0, result.output
    assert "host time on cpu" in result.output
    assert re.search(
        r"^linear \+ bias \+ gelu, 8 tokens, 64 to 128, block 32 25 % fp32", result.stdout, re.MULTILINE
    )
    assert [record["case"]["storage"] for record in records.read(out)] == ["bsr", "semi24"]
