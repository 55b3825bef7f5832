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
MLP = [
    "--tokens",
    "24",
    "--width",
    "64",
    "--hidden",
    "96",
    "--block",
    "32",
    "--density",
    "0.5",
    "--dtype",
    "fp32",
]
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


def test_bench_takes_comma_lists_as_combinations(run, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    result = run(
        "bench", "spmm", *QUICK, "--m", "64,128", "--block", "32,16x32", "--peers", "none", "--out", out
    )
    assert result.exit_code == 0, result.output
    cases = [(record["case"]["m"], record["case"]["block"]) for record in records.read(out)]
    assert cases == [(64, [32, 32]), (64, [16, 32]), (128, [32, 32]), (128, [16, 32])]


def test_bench_says_which_peers_it_left_out_and_why(run) -> None:
    result = run("bench", "spmm", *QUICK, "--peers", "cublas,cusparse")
    assert "cublas not measured: runs on cuda" in result.output
    assert "cusparse not measured: runs on cuda, the case is on cpu" in result.output


def test_bench_with_no_kernel_that_runs_exits_1_and_says_why(run) -> None:
    result = run("bench", "spmm", *SMALL, "--kernel", "hopper.spmm", "--peers", "none", "--device", "cpu")
    assert result.exit_code == 1
    assert "hopper.spmm not measured: " in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--m", "64,a"], "--m '64,a'"),
        (["--kernel", "fast"], "is called 'fast'; known: hopper.spmm"),
        (["--peers", "mkl"], "no peer is called 'mkl'"),
        (["--pattern", "stripes"], "got 'stripes'"),
        (["--device", "cuda:99"], "device cuda:99 is not on this machine"),
    ],
)
def test_bench_answers_bad_input_with_one_line_and_exit_code_2(run, arguments, said) -> None:
    result = run("bench", "spmm", *QUICK, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "issue9"], "no suite is called 'issue9'"),
        (["--suite", "blocks", *SMALL], "leave out --m, --k, --n, --block, --density, --dtype, or"),
        (["--suite", "blocks", "--pattern", "uniform"], "leave out --pattern, or"),
        (["--suite", "blocks", "--kernel", "auto"], "leave out --kernel, or"),
    ],
)
def test_bench_of_a_suite_refuses_what_it_would_ignore(run, arguments, said) -> None:
    result = run("bench", "spmm", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr


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


def test_bench_spmm_takes_every_form_of_the_product(run, tmp_path: Path, quick) -> None:
    out = tmp_path / "r.jsonl"
    forms = ["--form", "A@B,A.T@B,B@A,B@A.T"]
    result = run("bench", "spmm", *QUICK, *forms, "--peers", "torch_dense", "--out", out)
    assert result.exit_code == 0, result.output
    assert [record["case"]["form"] for record in records.read(out)] == ["A@B", "A.T@B", "B@A", "B@A.T"]
    assert [list(record["peers"]) for record in records.read(out)] == [["torch_dense"]] * 4


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


@pytest.mark.parametrize(
    ("op", "arguments", "said"),
    [
        ("spmm", ["--form", "A@A"], "form is one of A@B"),
        ("sddmm", ["--kernel", "cpu.spmm", "--m", "64"], "no kernel of sddmm is called 'cpu.spmm'"),
        ("sddmm", ["--pattern", "stripes"], "pattern is one of uniform, banded, powerlaw, got 'stripes'"),
        ("spgemm", ["--block", "32:16"], "blocks of 32 meet blocks with 32 rows, not 16"),
        ("spgemm", ["--block", "16:16:16"], "for A and B, got '16:16:16'"),
        ("spgemm", ["--result", "coo"], "out is one of dense, bsr, got 'coo'"),
        ("linear", ["--epilogue", "tanh"], "an epilogue is bias, one of relu, gelu, gelu_tanh, silu"),
        ("semi24", ["--form", "A.T@B"], "form is one of x@W.T, A@B, got 'A.T@B'"),
        ("semi24", ["--suite", "forms"], "no suite is called 'forms'; known: published, story"),
        ("fp8", ["--dtype", "bf16"], "dtype is one of e4m3, e5m2, got 'bf16'"),
        ("pack", ["--to", "coo"], "to is one of semi24, bsr, got 'coo'"),
        ("mlp", ["--measure", "serve"], "measure is one of train, compiled, decode, got 'serve'"),
        (
            "mlp",
            ["--peers", "cublas"],
            "no peer is called 'cublas'; known: torch_dense, torch_dense_compiled",
        ),
        (
            "linear",
            ["--suite", "published", "--epilogue", "bias"],
            "leave out --epilogue, or leave out --suite",
        ),
        ("mlp", ["--suite", "published", "--measure", "train"], "leave out --measure, or leave out --suite"),
        ("spmm", ["--suite", "forms", "--form", "B@A"], "leave out --form, or leave out --suite"),
        ("spgemm", ["--suite", "blocks"], "no suite is called 'blocks'; known: published"),
    ],
)
def test_bench_of_a_product_answers_bad_input_with_one_line(run, op: str, arguments: Any, said: str) -> None:
    result = run("bench", op, *FEW, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measure", "forward"], "measure is one of backward, train, got 'forward'"),
        (["--mask", "diagonal"], "no mask is written 'diagonal'"),
        (
            ["--seq", "128", "--kernel", "cpu.attention"],
            "no kernel of attention_backward is called 'cpu.attention'",
        ),
        (
            ["--seq", "128", "--kernel", "cpu.attention_paged"],
            "cpu.attention_paged was removed: name one of hopper.attention_bwd, ",
        ),
        (["--peers", "fa3"], "no peer is called 'fa3'; did you mean 'fa4'? Known: cudnn, fa4"),
        (["--suite", "sweep"], "no suite is called 'sweep'; known: published, train"),
        (["--suite", "published", "--any-order"], "leave out --deterministic, or leave out --suite"),
        (
            ["--suite", "published"],
            "suite published needs a GPU; a CPU would take hours. Give sizes by hand: --seq",
        ),
        (["--suite", "train"], "suite train needs a GPU"),
    ],
)
def test_bench_attention_backward_answers_bad_input_with_one_line(run, arguments, said) -> None:
    result = run("bench", "attention-backward", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("command", "sizes"),
    [
        *((command, "--m 512 --k 512 --n 64") for command in ("spmm", "sddmm", "spgemm", "semi24")),
        ("linear", "--tokens 64 --k 512 --n 512"),
        ("mlp", "--tokens 64 --width 512 --hidden 512"),
        ("fp8", "--m 512 --k 512 --n 64"),
        ("planner", "--layers few --dtype fp32"),
        ("attention", "--seq 1K --heads 2 --dim 64 --dtype fp32"),
        ("attention-backward", "--seq 1K --heads 2 --dim 64 --dtype fp32"),
    ],
)
def test_a_cpu_is_not_given_the_sizes_of_a_gpu_unless_they_are_asked_for(run, command, sizes) -> None:
    for options in ((), ("--dtype", "e4m3" if command == "fp8" else "fp32"), ("--rounds", "1")):
        result = run("bench", command, "--device", "cpu", *options)
        assert result.exit_code == 2
        assert f"are a GPU's; a CPU would take hours. Give sizes by hand: {sizes}" in " ".join(
            result.stderr.split()
        )


def test_bench_attention_takes_lengths_and_heads_as_people_write_them(run, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    lists = ["--seq", "128,100x192", "--heads", "1,2:1", "--mask", "full", "--peers", "none", "--out", out]
    result = run("bench", "attention", *ATTENTION, *lists)
    assert result.exit_code == 0, result.output
    cases = [record["case"] for record in records.read(out)]
    assert [(case["heads"], case["kv_heads"], case["q_len"], case["kv_len"]) for case in cases] == [
        (1, 1, 128, 128),
        (1, 1, 100, 192),
        (2, 1, 128, 128),
        (2, 1, 100, 192),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--mask", "diagonal"], "no mask is written 'diagonal'; known"),
        (["--mask", "window"], "window:W+sinks:S"),
        (["--seq", "8M"], "a length is written as 8192"),
        (["--heads", "2:3"], "2 query heads do not divide among 3"),
        (["--heads", "1:2:3"], "heads and head sizes are written"),
        (["--block", "32"], "a mask's block sides are 64 or 128, got 32"),
        (["--peers", "cublas"], "no peer is called 'cublas'; known: cudnn, fa4, flex"),
        (["--suite", "published"], "leave out --heads, --seq, --dim, --mask, --block, --dtype, --kernel, or"),
    ],
)
def test_bench_attention_answers_bad_input_with_one_line(run, arguments, said) -> None:
    result = run("bench", "attention", *ATTENTION, "--mask", "full", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_bench_attention_has_its_own_suites(run) -> None:
    result = run("bench", "attention", "--suite", "blocks", "--device", "cpu")
    assert result.exit_code == 2
    assert "no suite is called 'blocks'; known: published, length, density" in result.stderr
    for suite in ("published", "length"):
        refused = run("bench", "attention", "--suite", suite, "--device", "cpu")
        assert refused.exit_code == 2
        assert f"suite {suite} needs a GPU" in refused.stderr


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "suite host needs a GPU"),
        (["--rounds", "1"], "suite host needs a GPU"),
        (["--call", "A - B"], "call is one of A @ B"),
        (["--sides", "64-64"], "sides are written as 64x1024x1024"),
        (["--suite", "host", "--call", "linear"], "leave out --call, or leave out --suite"),
    ],
)
def test_bench_host_answers_bad_input_with_one_line(run, arguments: Any, said: str) -> None:
    result = run("bench", "host", *FEW, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
