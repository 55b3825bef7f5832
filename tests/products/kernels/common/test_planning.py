"""What every kernel of a product tells the planner: what it refuses and takes, its configs, its predictions."""

import re
from dataclasses import replace
from typing import Any

import pytest

from sparsek.core.device import CPU, H200
from sparsek.products.formats.storage import FP8, TITLES
from sparsek.products.kernels import KERNELS
from sparsek.products.plan.problems import SddmmProblem, SpgemmProblem, SpmmProblem
from sparsek.products.plan.sddmm_schedule import OUTSIDE
from tests.problems import A100, B200, RTX_4090, T4, changed, fp8_problem, spmm_problem

pytest.importorskip("triton")

from sparsek.engine.table import load, names_for

SIDES: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "card": H200}
BLOCKS: dict[str, Any] = {"block": (128, 128), "nnzb": 512, "row_max": 8}
LOW: dict[str, Any] = {"block": (64, 64), "nnzb": 2048, "row_max": 16}
IN_FP8: dict[str, Any] = {**SIDES, "dtype": "e4m3"}
COLUMNS: dict[str, Any] = {"b_layout": "col", "out_layout": "col"}
PAIRS: dict[str, Any] = {"a_block": (64, 64), "b_block": (64, 64), "nnzb_a": 512, "nnzb_b": 512}
WHOLE = spmm_problem(**SIDES, two_four=True)
WHOLE_FP8 = fp8_problem(**IN_FP8, two_four=True)
PROBLEMS: dict[str, Any] = {
    "hopper.spmm": spmm_problem(**SIDES | {"n": 64}, **LOW, merged=((2, 1925),)),
    "hopper.spmm_fp8": fp8_problem(**IN_FP8 | {"n": 64}, **LOW),
    "hopper.spmm_paired": spmm_problem(1024, 1024, 1024, (32, 32), 200, "bf16", H200),
    "hopper.spmm_mma": spmm_problem(1024, 1024, 1024, (16, 16), 800, "bf16", H200),
    "hopper.semi24": WHOLE,
    "hopper.bsr24": spmm_problem(**SIDES, **BLOCKS, two_four=True),
    "hopper.semi24_skinny": changed(WHOLE, n=16, **COLUMNS),
    "hopper.semi24_fp8": WHOLE_FP8,
    "hopper.bsr24_fp8": fp8_problem(**IN_FP8, **BLOCKS, two_four=True),
    "hopper.sddmm": SddmmProblem(**SIDES, **LOW, dtype="bf16", x_layout="row", y_layout="row"),
    "hopper.spgemm": SpgemmProblem(
        **SIDES, **PAIRS, nnzb_out=2600, pairs=2600, pairs_max=8, dtype="bf16", dense_out=True
    ),
    "portable.spmm": spmm_problem(**SIDES, **BLOCKS),
    "portable.spmm_skinny": spmm_problem(**SIDES | {"n": 16}, **BLOCKS, **COLUMNS),
    "portable.spmm_fp8": fp8_problem(**IN_FP8, **BLOCKS),
    "portable.spmm_skinny_fp8": fp8_problem(**IN_FP8 | {"n": 8}, **BLOCKS, **COLUMNS),
    "portable.sddmm": SddmmProblem(**SIDES, **BLOCKS, dtype="bf16"),
    "portable.spgemm": SpgemmProblem(**SIDES, **PAIRS, nnzb_out=2600, pairs=2600, pairs_max=8, dtype="bf16"),
    "unpacked.semi24": WHOLE,
    "unpacked.bsr24": spmm_problem(**SIDES, **BLOCKS, two_four=True),
    "unpacked.semi24_fp8": WHOLE_FP8,
    "unpacked.bsr24_fp8": fp8_problem(**IN_FP8, **BLOCKS, two_four=True),
    "cpu.spmm": spmm_problem(**SIDES | {"card": CPU}, **BLOCKS),
    "cpu.bsr24": spmm_problem(**SIDES | {"card": CPU}, **BLOCKS, two_four=True),
}
HOPPER = tuple(name for name in PROBLEMS if name.startswith("hopper"))
ANY_GPU = tuple(name for name in PROBLEMS if name.startswith(("portable", "unpacked")))
OF_24 = ("hopper.semi24", "hopper.bsr24")
OF_24_FP8 = ("hopper.semi24_fp8", "hopper.bsr24_fp8")
SMALL = ("hopper.spmm_paired", "hopper.spmm_mma")
BY_TMA = ("hopper.spmm", "hopper.sddmm", "hopper.spgemm")
ACCUMULATING = {"combine": "add", "in_place": True}

REFUSED: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
    (HOPPER, {"card": A100}, "Hopper card"),
    (HOPPER, {"card": B200}, "Hopper card"),
    (HOPPER, {"card": CPU}, "Hopper card"),
    (BY_TMA, {"card": A100}, "needs a Hopper card .* NVIDIA A100"),
    ((*BY_TMA, "hopper.spmm_fp8"), {"card": B200}, "needs a Hopper card .* NVIDIA B200"),
    ((*BY_TMA, "hopper.spmm_fp8"), {"card": CPU}, "needs a Hopper card .* cpu"),
    (BY_TMA, {"dtype": "fp32"}, "multiplies bf16 and fp16, not fp32"),
    (BY_TMA, {"dtype": "fp64"}, "multiplies bf16 and fp16, not fp64"),
    ((*OF_24, "hopper.semi24_skinny"), {"dtype": "fp32"}, "C must be bf16 or fp16, not fp32"),
    (OF_24_FP8, {"out_dtype": "fp32"}, "C must be bf16 or fp16, not fp32"),
    ((*BY_TMA, "hopper.spmm_fp8", *OF_24), {"aligned": False}, "multiples of 16 bytes"),
    (OF_24, {"combine": "add", "aligned": False}, "another matrix with C's layout"),
    (OF_24_FP8, {"combine": "mul", "aligned": False}, "another matrix with C's layout"),
    (("hopper.spmm", *SMALL, *OF_24), {"b_layout": "strided"}, "gaps between its elements"),
    (("hopper.sddmm",), {"x_layout": "strided"}, "row-major X .* gaps between its elements"),
    (("hopper.sddmm",), {"y_layout": "strided"}, "row-major Y .* gaps between its elements"),
    (("hopper.spmm", "hopper.spmm_fp8"), {"nnzb": 2**31 // 64}, "32 bits"),
    (("hopper.spmm",), {"m": 2**31 - 1}, "32 bits"),
    (("hopper.spmm",), {"k": 2**31 - 1}, "32 bits"),
    (("hopper.spmm", "hopper.spmm_fp8", "hopper.spgemm"), {"n": 2**31 - 8}, "32 bits"),
    (OF_24, {"n": 2**31}, "32 bits"),
    (("hopper.semi24_skinny",), {"m": 2**31}, "32 bits"),
    *((("hopper.spgemm",), {name: 2**31 // 64}, "32 bits") for name in ("nnzb_a", "nnzb_b", "nnzb_out")),
    (("hopper.spgemm",), {"m": 2**31 - 8}, "32 bits"),
    (("hopper.sddmm",), {"nnzb": OUTSIDE // 64}, "32 bits"),
    *((("hopper.sddmm",), {name: OUTSIDE}, "32 bits") for name in "mnk"),
    (SMALL, {"nnzb": 2**31}, r"2\^31"),
    (SMALL, {"m": 2**31}, r"2\^31"),
    (ANY_GPU, {"k": 2**31 - 8}, "at most"),
    (("portable.spmm_skinny", "portable.sddmm", "portable.spgemm"), {"m": 2**31}, "at most"),
    (("hopper.sddmm",), {"k": 0}, "K is 0"),
    (("hopper.spmm",), {"n": 7}, "a row of C must hold a multiple of 8, not 7"),
    (("hopper.spmm",), {"m": 7, "out_layout": "col"}, "a row of C must hold a multiple of 8, not 7"),
    (("hopper.spmm_fp8", *OF_24_FP8), {"n": 12}, "a multiple of 8, not 12"),
    (("hopper.spmm_fp8",), {"n": 6, "out_dtype": "fp32"}, "a row of C must hold a multiple of 4, not 6"),
    (("hopper.spmm_fp8",), {"m": 12, "out_layout": "col"}, "a row of C must hold a multiple of 8, not 12"),
    (("hopper.spgemm",), {"n": 8190}, "a row of C must hold a multiple of 8, not 8190"),
    (OF_24, {"n": 100}, "a multiple of 8, not 100"),
    (OF_24, {"m": 100, "out_layout": "col"}, "a multiple of 8, not 100"),
    (SMALL, {"n": 1028, "b_layout": "col"}, "multiple of 8"),
    (("hopper.spmm_paired",), {"n": 1032}, "panels of 64"),
    (("hopper.semi24_skinny",), {"n": 33}, "up to 32 columns of B, not 33"),
    (("portable.spmm_skinny",), {"n": 65}, "up to 64 columns"),
    (("hopper.spmm", "hopper.spmm_fp8"), {"block": (144, 64), **ACCUMULATING}, "blocks of 144 rows overlap"),
    (("hopper.spmm_paired",), {"block": (128, 128)}, "16, 32 or 64, not"),
    (("hopper.spmm_paired",), {"block": (32, 48)}, "16, 32 or 64, not"),
    (("hopper.spmm_mma",), {"block": (16, 32)}, "blocks of 16x16, not 16x32"),
    (("hopper.spmm_fp8",), {"block": (64, 48)}, "32 deep, and blocks are 48 wide"),
    (("hopper.bsr24_fp8",), {"block": (128, 64)}, "not 64"),
    (("hopper.spmm_paired",), {"transposed": True}, "transposed"),
    (
        ("hopper.spmm_fp8",),
        {"transposed": True},
        "along K, and the blocks of an A.T are contiguous across it",
    ),
    ((*OF_24, "hopper.semi24_skinny"), {"transposed": True}, "which sparse tensor cores do not support"),
    (SMALL, {"combine": "add"}, "joins"),
    (("hopper.spmm_fp8",), {"out_dtype": "fp32", "activation": "gelu"}, "a C in fp32 takes a bias and relu"),
    (("hopper.spmm_fp8",), {"out_dtype": "fp32", "combine": "add"}, "a C in fp32 takes a bias and relu"),
    (OF_24_FP8, {"a_scale": "block"}, "belongs inside the sums"),
    ((*SMALL, "hopper.bsr24", "hopper.bsr24_fp8"), {"nnzb": 0}, "no stored blocks"),
    (("hopper.bsr24",), {"nnzb": 2**24}, "rows of all stored blocks"),
    (("hopper.semi24",), {"k": 8200}, "K a multiple of 16, not 8200"),
    (("hopper.semi24",), {"k": 0}, "not 0"),
    (("hopper.semi24_skinny",), {"k": 8256}, "K a multiple of 128, not 8256"),
    (("hopper.semi24_skinny",), {"k": 0}, "not 0"),
    (("hopper.semi24_fp8",), {"k": 8208}, "K a multiple of 32, not 8208"),
    (OF_24_FP8, {"card": RTX_4090}, "Hopper card"),
    (tuple(name for name in ANY_GPU if "fp8" not in name), {"card": T4}, "8.0 or newer"),
    (tuple(name for name in ANY_GPU if "fp8" not in name), {"dtype": "fp64"}, "fp64"),
    (tuple(name for name in ANY_GPU if "fp8" in name), {"card": A100}, "8.9; NVIDIA A100 has 8.0"),
    (ANY_GPU, {"card": CPU}, "TRITON_INTERPRET=1"),
    (("cpu.spmm", "cpu.bsr24"), {"card": H200}, "^runs on CPU tensors only$"),
)
TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("hopper.spmm", {"n": n, **COLUMNS}) for n in (7, 8, 61)),
    ("hopper.spmm_paired", {"n": 1032, "b_layout": "col"}),
    *(("hopper.spmm_mma", {"n": 1032, **options}) for options in ({}, COLUMNS, {"transposed": True})),
    ("hopper.spmm_paired", {"nnzb": 2**27}),  # A does not come by TMA: 2^32 stored rows have no coordinates
    ("hopper.semi24", {"combine": "mul"}),
    ("hopper.bsr24", {"k": 8200}),
    ("hopper.semi24_skinny", {"b_layout": "strided"}),
    ("hopper.semi24_skinny", {"aligned": False, "m": 1001}),
    ("hopper.semi24_skinny", {"combine": "mul", "batch": 3}),
    ("hopper.semi24_skinny", {"n": 1}),
    ("hopper.spgemm", {"dense_out": False, "n": 8190, "m": 77}),
    ("portable.spmm_skinny", {"n": 64}),
)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [(name, change, reason) for names, change, reason in REFUSED for name in names],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_a_reason_names_what_is_in_the_way(name: str, change: dict[str, Any], reason: str) -> None:
    found = load(name).why_not(changed(PROBLEMS[name], **change))
    assert re.search(reason, found[0]), found
    assert len(found) == 1 or name not in HOPPER, found


@pytest.mark.parametrize(("name", "change"), [*((name, {}) for name in PROBLEMS), *TAKEN])
def test_what_is_not_in_the_way_is_taken(name: str, change: dict[str, Any]) -> None:
    assert load(name).why_not(changed(PROBLEMS[name], **change)) == []


@pytest.mark.parametrize(
    ("name", "change", "count"),
    [
        ("hopper.spmm", {"n": 9, "b_layout": "strided", "m": 2**31 - 1}, 6),
        ("hopper.sddmm", {"x_layout": "strided", "y_layout": "strided", "k": 0, "m": 2**31}, 7),
        ("hopper.spgemm", {"m": 2**31}, 4),
    ],
)
def test_every_reason_is_given_at_once(name: str, change: dict[str, Any], count: int) -> None:
    p = changed(PROBLEMS[name], card=CPU, dtype="fp32", aligned=False, **change)
    assert len(load(name).why_not(p)) == count


ON_A_GPU = [*HOPPER, *ANY_GPU]
IN_24 = (*OF_24, *OF_24_FP8)
ON_THE_WHOLE = ("portable.spmm", "portable.spmm_fp8", *(name for name in ANY_GPU if "unpacked" in name))


@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_default_is_among_distinct_configs_that_never_beat_the_card(name: str) -> None:
    kernel, p = load(name), PROBLEMS[name]
    configs = list(kernel.configs(p))
    assert len(set(configs)) == len(configs) >= (1 if name == "hopper.spmm_mma" else 2)
    assert kernel.default(p) in configs
    if name in BY_TMA:
        assert kernel.rank(p, kernel.default(p)) == min(kernel.rank(p, c) for c in configs)
    rate = H200.tflops["fp8" if "fp8" in name else "bf16"] * 1e12
    for c in configs:
        assert kernel.seconds(p, c) > max(p.compulsory_bytes / H200.bandwidth, p.useful_flops / rate)


@pytest.mark.parametrize(
    ("name", "change", "least"),
    [
        *((name, {"n": 16384}, 1.8) for name in (*IN_24, *ON_THE_WHOLE)),
        *((name, {"nnzb": 1024, "row_max": 16}, 1.5) for name in ("portable.spmm", "portable.spmm_fp8")),
        *(
            (name, {"nnzb": 8 * 512, "row_max": 64}, 1.5)
            for name in ("portable.spmm_skinny", "portable.spmm_skinny_fp8", "portable.sddmm")
        ),
        ("hopper.sddmm", {"nnzb": 8 * 2048, "row_max": 128}, 1.5),
        *((f"{name}.spgemm", {"pairs": 20800, "pairs_max": 64}, 1.4) for name in ("hopper", "portable")),
        ("hopper.semi24_skinny", {"m": 8 * 8192}, 4.0),
        *((name, {"batch": 3}, 2.97) for name in (*IN_24, "hopper.semi24_skinny")),
        *(
            (name, {"rounds": "bf16"}, 1.01)
            for name in (*OF_24_FP8, "portable.spmm_fp8", "portable.spmm_skinny_fp8")
        ),
        *((name, {"row_max": 4096}, 2.0) for name in ("hopper.bsr24", "portable.spmm_fp8")),
    ],
)
def test_predictions_grow_with_work(name: str, change: dict[str, Any], least: float) -> None:
    kernel, p = load(name), PROBLEMS[name]
    for c in [kernel.default(p)] if "skinny" in name else kernel.configs(p):
        assert kernel.seconds(changed(p, **change), c) > least * kernel.seconds(p, c)


@pytest.mark.parametrize("name", OF_24)
def test_another_matrix_costs_what_it_takes_to_read_it(name: str) -> None:
    kernel, p = load(name), PROBLEMS[name]
    for c in kernel.configs(p):
        joined = kernel.seconds(changed(p, combine="add"), replace(c, combine="add"))
        assert joined > kernel.seconds(p, c) + 2 * p.m * p.n / (H200.fabric * 2)


@pytest.mark.parametrize("n", [1, 16, 256, 1024])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("kind", ["spmm", "bsr24"])
def test_a_kernel_of_a_cpu_is_predicted_faster_than_the_reference(kind: str, dtype: str, n: int) -> None:
    p = changed(PROBLEMS[f"cpu.{kind}"], m=2048, k=2048, n=n, dtype=dtype, block=(64, 64), nnzb=256)
    fast, slow = load(f"cpu.{kind}"), load(f"reference.{kind}")
    assert slow.seconds(p, slow.default(p)) > fast.seconds(p, fast.default(p)) > 0


FACTS: dict[str, dict[str, Any]] = {
    "bsr": {"block": (128, 128), "nnzb": 3},
    "semi24": {"two_four": True},
    "bsr24": {"block": (128, 128), "nnzb": 3, "two_four": True},
}
ROWS = [(name, kind) for op, name, _, kind in KERNELS if op == "spmm"]


def plain(kind: str, card: Any) -> SpmmProblem:
    """A @ B of 256 x 256 x 256 and that storage, as every kernel would have it."""
    facts = {"m": 256, "k": 256, "n": 256, "card": card, **FACTS[kind.removesuffix("_fp8")]}
    return fp8_problem(**facts, dtype="e4m3") if kind in FP8 else spmm_problem(**facts, dtype="bf16")


@pytest.mark.parametrize(("name", "kind"), ROWS)
def test_a_kernel_refuses_exactly_the_storages_that_it_is_not_listed_for(name: str, kind: str) -> None:
    kernel, own = load(name), FP8 if kind == "fp8" else (kind,)
    for each in TITLES:
        for card in (H200, CPU):
            p = plain(each, card)
            assert p.a.kind == each
            foreign, found = p.a.unless(*own), kernel.why_not(p)
            if each in own:
                assert foreign == []
                assert not any(f"not {TITLES[each]}" in reason for reason in found), found
                assert name in names_for("spmm", each)
            else:
                assert found == foreign
                assert name not in names_for("spmm", each)


@pytest.mark.parametrize("kind", TITLES)
def test_every_storage_has_kernels_on_a_gpu_and_on_a_cpu(kind: str) -> None:
    for card, family in ((H200, "hopper"), (CPU, "cpu" if kind in ("bsr", "bsr24") else "reference")):
        able = [name for name in names_for("spmm", kind) if not load(name).why_not(plain(kind, card))]
        assert any(name.startswith(family) for name in able), able
        assert any(name.startswith("reference") for name in able), able


def test_the_column_is_for_spmm_alone() -> None:
    kinds = {kind for op, _, _, kind in KERNELS if op == "spmm"}
    assert kinds == {*TITLES, "fp8"}
    assert {kind for op, _, _, kind in KERNELS if op != "spmm"} == {""}
