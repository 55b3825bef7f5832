"""hopper.semi24 and hopper.bsr24 without a GPU: machine code, the kernel's roles on the CPU, its limits.

The machine code needs NVRTC, which nvidia-cuda-nvrtc brings, and the roles g++.
"""

import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.products.reference.epilogue import Epilogue
from sparsek.testing.budget import check_spmm
from tests.problems import changed, spmm_problem
from tests.products.cases import Case
from tests.sampling import sampled

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.memo import Memo
from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm import hopper_bsr24 as bsr24
from sparsek.products.kernels.spmm.hopper_24 import PROGRAM, Config, in_wgmma_order
from tests.attn.kernels.planned import problem
from tests.products.kernels.spmm import hopper_24_code as code
from tests.products.kernels.spmm import hopper_24_emulated as emulated

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not here")
SEMI24, BSR24 = semi24.KERNELS["hopper.semi24"], bsr24.KERNELS["hopper.bsr24"]
BIG: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "dtype": "bf16", "card": H200}
LAYER: dict[str, Any] = {"b_layout": "col", "out_layout": "col"}
BLOCKS: dict[str, Any] = {"block": (128, 128), "nnzb": 512, "row_max": 8}
SEMI, BSR = spmm_problem(two_four=True, **BIG), spmm_problem(two_four=True, **BIG, **BLOCKS)
FORMS: tuple[dict[str, Any], ...] = (
    {},
    LAYER,
    LAYER | {"bias": True},
    LAYER | {"bias": True, "activation": "gelu", "dtype": "fp16"},
    {"b_layout": "col", "has_alpha": True, "activation": "relu"},
    {"out_layout": "col", "bias": True, "activation": "gelu_tanh", "dtype": "fp16"},
    {"has_alpha": True, "bias": True, "activation": "silu"},
    LAYER | {"combine": "add", "bias": True, "activation": "gelu"},
    {"has_alpha": True, "combine": "add", "dtype": "fp16", "activation": "gelu_tanh"},
    LAYER | {"combine": "mul"},
)


def every_config() -> Iterator[Config]:
    for form in FORMS:
        yield from SEMI24.configs(changed(SEMI, **form))
        yield from BSR24.configs(changed(BSR, **form))


# The tile that large problems get in every form, and some of the others.
COMPILED = list(
    dict.fromkeys(
        [*(SEMI24.default(changed(SEMI, **form)) for form in FORMS[1::2]), *list(every_config())[::17]]
    )
)


def check_code(c: Config) -> None:
    made = code.compiled(c)
    kind = "" if c.half else ".BF16"
    wanted = f"QGMMA.SP.64x{c.tn}x64.F32{c.fp8.upper()}" if c.fp8 else f"HGMMA.SP.64x{c.tn}x32.F32{kind}"
    assert made.wgmma == {wanted}
    assert {"UTMALDG", "UTMASTG", "UBLKCP"} <= made.copies
    assert (made.stack, made.local) == ((0, 0, 0), 0), made.log
    assert made.overwritten == []
    assert made.unwritten == []
    assert made.mixed == []
    assert "warning" not in made.log.lower(), made.log
    assert c.smem <= H200.smem_bytes


@needs_nvrtc
@pytest.mark.parametrize("c", sampled(COMPILED, 3), ids=str)
def test_configs_compile_to_sparse_wgmma_without_spills(c: Config) -> None:
    check_code(c)


@needs_nvrtc
def test_the_code_that_lets_two_steps_share_registers_is_found() -> None:
    """On a GPU it multiplied by the nibbles of the next step (2026-11-22)."""
    shared = edited("multiply_step(d, nibbles[1], step, keep);", "multiply_step(d, nibbles[0], step, keep);")
    found = code.compiled(Config(), shared).overwritten
    assert any("LDS" in each for each in found), found


def edited(old: str, new: str) -> str:
    """hopper_24.cu with one place changed."""
    text = PROGRAM.source
    assert text.count(old) == 1, old
    return text.replace(old, new)


COL = ("col", "col", "col")
RUNS: dict[str, tuple[Config, Case, int]] = {
    "layer": (
        Config(c_col=True, bias=True, has_alpha=True, activation="gelu"),
        Case(296, 272, 300, None, "layer", alpha=0.5, bias=True, activation="gelu", layouts=COL),
        4,
    ),
    "four CTAs and a gate": (
        Config(1, 2, 64, 3, 4, 2, b_row=True, half=True, bias=True, activation="silu", combine="mul"),
        Case(300, 400, 72, None, "four", bias=True, activation="silu", combine="mul"),
        4,
    ),
    "fewer columns than a tile": (
        Config(2, 1, 64, 3, 2, 1, c_col=True, bias=True),
        Case(296, 272, 13, None, "few", bias=True, layouts=COL),
        4,
    ),
    "rows without blocks": (
        Config(2, 1, 64, 3, 1, 1, lists=True, b_row=True),
        Case(1280, 512, 136, (128, 64), "powerlaw", 0.1, two_four=True, pattern="powerlaw"),
        3,
    ),
    "blocks added in place": (
        Config(2, 1, 128, 3, 1, 2, lists=True, c_col=True, has_alpha=True, combine="add"),
        Case(
            248,
            500,
            264,
            (128, 128),
            "layer",
            0.3,
            two_four=True,
            alpha=2.0,
            combine="add",
            beta=-0.5,
            layouts=COL,
        ),
        3,
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", sampled(list(RUNS), 2))
def test_the_roles_multiply_whatever_comes_first(name: str) -> None:
    c, case, ctas = RUNS[name]
    for order in (emulated.MIXED, emulated.LATE):
        a, b, epilogue, out = case.make("cpu", c.dtype, order)
        given = epilogue
        if "in place" in name and epilogue.other is not None:
            given = replace(epilogue, other=out.copy_(epilogue.other))
        assert emulated.multiply(c, a, b, out, given, order=order, ctas=ctas) == ""
        gate = check_spmm(a, b, out, epilogue)
        assert gate.passed, f"{c} {order}: {gate}"


MISTAKES = {
    "two steps share registers": (
        "multiply_step(d, nibbles[1], step, keep);",
        "multiply_step(d, nibbles[0], step, keep);",
    ),
    "bits of the cluster in a descriptor": ("(at & 0x3FFFF) >> 4", "at >> 4"),
    "the other matrix is not waited for": (
        "          barrier_wait(ring.full(), ring.phase);\n          if (w == wg)",
        "          if (w == wg)",
    ),
    "no block for the first step behind a tile without steps": (
        "if (tile.first == tile.end) prefetch(next.first, next.end);",
        "",
    ),
    "the first block of a tile is that of the tile before": ("else prefetch(next.first, next.end);", ""),
    "the other matrix comes into a slot in use": (
        "barrier_wait(ring.empty(), ring.phase);  // as above:",
        "//",
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", sampled(list(MISTAKES), 2))
def test_mistakes_in_the_roles_are_seen(name: str) -> None:
    c = Config(1, 1, 64, 3, 2, 1, b_row=True)
    source = edited(*MISTAKES[name])
    if "descriptor" in name:
        c = replace(c, tn=128, boxes=2)  # of more panels than one, whose distance stands beside the address
    c = replace(c, combine="mul" if "other" in name else "")
    case = Case(128, 400, 128, None, "small", combine="mul" if c.combine else "")
    if "first" in name:
        c, case, _ = RUNS["rows without blocks"]
    a, b, epilogue, out = case.make("cpu", torch.bfloat16)
    found = []
    for order in (emulated.MIXED, emulated.LATE):
        said = emulated.multiply(c, a, b, out, epilogue, order=order, source=source)
        found.append(said or not check_spmm(a, b, out, epilogue).passed)
    assert any(found)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_matrix_without_rows_has_no_nibbles(fp8: bool) -> None:
    meta = sk.Semi24.from_dense(torch.zeros(0, 144)).meta
    assert in_wgmma_order(meta, fp8).shape == (0, 4, 128)


def test_threads_share_the_nibbles_that_one_of_them_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def slowly(meta: torch.Tensor, fp8: bool = False) -> torch.Tensor:
        sleep(0.05)
        made.append(in_wgmma_order(meta, fp8))
        return made[-1]

    monkeypatch.setattr(semi24, "in_wgmma_order", slowly)
    a = sk.Semi24.from_dense(torch.randn(64, 64).bfloat16())
    work = semi24.Work(132, False, lambda: None, lambda: None)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: work.nibbles(a), range(4)))
    assert len(made) == 1
    assert all(each is made[0] for each in found)


def test_a_plan_keeps_no_nibbles_alive() -> None:
    a, other = (sk.Semi24.from_dense(torch.randn(64, 64).bfloat16()) for _ in range(2))
    work = semi24.prepared(changed(SEMI, m=64, k=64), Config(), a)
    kept = [weakref.ref(work.nibbles(each)) for each in (a, other)]
    assert all(ref() is work.nibbles(each) for ref, each in zip(kept, (a, other), strict=True))
    del a
    assert kept[0]() is None
    assert kept[1]() is work.nibbles(other)


def test_what_is_kept_is_renewed_when_torch_counted_a_write() -> None:
    x, kept, made = torch.zeros(4), Memo(), []

    def make() -> torch.Tensor:
        made.append(x.sum())
        return made[-1]

    assert kept.of(make, x) is kept.of(make, x)
    x.add_(1)
    assert kept.of(make, x).item() == 4
    x.data = torch.full((4,), 2.0)  # torch counts no write
    assert kept.of(make, x).item() == 8
    assert kept.of(make, torch.zeros(4)) is made[-1]
    with torch.inference_mode():
        y = torch.zeros(4)
    before = len(made)
    kept.of(make, y)
    kept.of(make, y)
    assert len(made) == before + 2


def test_tiles_follow_the_problem() -> None:
    c = SEMI24.default(SEMI)
    assert (c.tm, c.tn, c.cluster) == (128, 256, 2)
    small = SEMI24.default(changed(SEMI, m=1024, n=1024))
    assert small.tm * small.tn < 128 * 128
    assert SEMI24.default(changed(SEMI, n=16)).tn == 64
    for block in (64, 128, 192, 256):
        for c in BSR24.configs(changed(BSR, block=(block, 64))):
            assert block % c.tm == 0
            assert c.cluster == 1
    assert BSR24.default(BSR).tm == 128


def test_one_row_gets_a_stride_that_tma_takes() -> None:
    c = Config(c_col=True)
    w = sk.Semi24.from_dense(torch.randn(64, 32).bfloat16())
    x = torch.randn(1, 32).bfloat16()
    out = torch.empty(1, 64, dtype=torch.bfloat16).as_strided((64, 1), (1, 3))
    a, b, made = semi24.boxes(c, w.values, x.mT, out)
    assert (a.size, a.stride, a.box) == ((16, 64), 16, (32, 128))
    assert (b.size, b.stride, b.box) == ((32, 1), 32, (64, 8))
    assert (made.size, made.stride, made.box) == ((64, 1), 64, (64, 64))


def test_a_row_that_stands_for_all_rows_is_no_matrix_for_tma() -> None:
    w, x = sk.Semi24.from_dense(torch.randn(64, 32).bfloat16()), torch.randn(8, 32).bfloat16()
    row, out = torch.randn(64).bfloat16(), torch.empty(8, 64, dtype=torch.bfloat16)
    for other, aligned in ((row.repeat(8, 1), True), (row.expand(8, 64), False)):
        assert problem(w, x.mT, out.mT, Epilogue(other=other.mT)).aligned == aligned


def test_a_group_has_a_row() -> None:
    with pytest.raises(sk.InvalidInput, match="1 or more, not 0"):
        Config(group=0)
