"""The portable FP8 kernels without a GPU: in Triton's interpreter, and compiled for real cards."""

import re
from typing import Any

import pytest
import torch

from sparsek.core.device import H200, Card
from sparsek.engine.table import load
from tests.problems import RTX_4090, changed, fp8_problem
from tests.sampling import sampled

pytest.importorskip("triton")

from sparsek.products.kernels.pack import to_fp8 as round_fp8
from sparsek.products.kernels.spmm import portable_fp8 as spmm_fp8
from sparsek.products.kernels.spmm import portable_skinny_fp8
from sparsek.products.kernels.spmm.portable import Config
from tests.engine.launch.portable_code import Code, compiled
from tests.products.kernels.common.portable_code import NAMES, meta, spmm_code

BIG: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "dtype": "e4m3", "card": H200}
BLOCKS: dict[str, Any] = {"block": (128, 128), "nnzb": 512, "row_max": 8}
SPMM = fp8_problem(**BIG, **BLOCKS)
KERNEL: Any = spmm_fp8.KERNEL


def check(p: Any, c: Config, vectors: bool = True) -> None:
    code = spmm_code(p, c)
    what = f"{p} {c}"
    assert code.stack == 0, f"{what} spills {code.stack} bytes"
    assert code.shared <= p.card.smem_bytes, what
    assert code.copies or not vectors, f"{what}: 16-byte asynchronous copies are missing"
    if p.card.capability[0] == 9 and c.tile_m >= 64:
        assert f"k32.f32.{p.dtype}.{p.b.dtype}" in code.ptx, what
        assert "wgmma.mma_async" in code.ptx, what
    elif p.card.capability == (8, 9):
        assert f"m16n8k32.row.col.f32.{p.dtype}.{p.b.dtype}.f32" in code.ptx, what


def test_every_config_compiles_without_spills():
    configs = list(KERNEL.configs(SPMM))
    assert len(configs) >= 3
    for c in sampled(configs, 3):
        check(SPMM, c)
    other = changed(SPMM, card=RTX_4090)
    check(other, KERNEL.default(other))


LAYER: dict[str, Any] = {"out_layout": "col", "bias": True}


@pytest.mark.parametrize(
    "change",
    [
        LAYER | {"activation": "gelu", "combine": "add"},
        {"activation": "silu", "combine": "mul", "has_alpha": True, "out_dtype": "fp32"},
        {"a_scale": "tensor", "b_scale": "tensor", "out_dtype": "fp16", "b_dtype": "e5m2"},
        {"dtype": "e5m2", "n": 16, **LAYER},
    ],
    ids=["layer", "gate", "tensor scales", "decode"],
)
def test_what_products_may_be_compiles_without_spills(change: dict[str, Any]):
    p = changed(SPMM, **change)
    check(p, KERNEL.default(p))


@pytest.mark.parametrize(
    "change",
    [
        {"a_scale": "block"},
        {"block": (64, 64), "a_scale": "block"},
        {"block": (32, 32)},
        {"block": (48, 96)},
        {"transposed": True, "a_scale": "tensor", "out_layout": "col"},
        {"k": 8200, "n": 8200},
    ],
    ids=["scale per block", "block 64", "block 32", "no power of two", "view", "ragged"],
)
def test_blocks_and_views_compile_without_spills(change: dict[str, Any]):
    p = changed(SPMM, **change)
    check(p, KERNEL.default(p), vectors=p.k % 16 == 0)


SKINNY: Any = portable_skinny_fp8.KERNEL
DECODE = fp8_problem(
    m=14336,
    k=4096,
    n=1,
    dtype="e4m3",
    card=H200,
    block=(128, 128),
    nnzb=896,
    row_max=8,
    rounds="bf16",
    **LAYER,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n": 8, "activation": "gelu", "combine": "add"},
        {"n": 5, "rounds": "fp32", "out_dtype": "fp32"},
        {"n": 8, "card": RTX_4090, "rounds": "fp16", "out_dtype": "fp16"},
        {"n": 7, "transposed": True, "a_scale": "tensor"},
        {"n": 4, "block": (48, 96), "a_scale": "block", "dtype": "e5m2", "b_layout": "row"},
    ],
    ids=["one token", "tokens", "fp32", "sm_89", "view", "block 48x96"],
)
def test_a_kernel_that_rounds_b_divides_once(change: dict[str, Any]):
    p = changed(DECODE, **change)
    assert SKINNY.why_not(p) == []
    for c in sampled(SKINNY.configs(p), 2, of=str(change)):
        code = spmm_code(p, c, rounds=True)
        what = f"{p} {c}: {code.registers} registers"
        # 8 bytes in one config of sm_89, which converts to FP8 by instructions of its own
        assert code.stack <= (0 if p.card is H200 else 8), what
        assert code.shared <= p.card.smem_bytes, what
        assert code.copies, what
        dividing = [part for part in re.split(r"(?m)^(?=\$L__BB)", code.ptx) if "div.rn.f32" in part]
        assert dividing, what
        assert not any("Loop" in part[:200] for part in dividing), f"{what}: a reciprocal in a loop"
        assert "div.full" not in code.ptx, what
        assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx or p.card is not H200, what
        assert code.wgmma == (p.card is H200 and c.tile_m >= 64), what


@pytest.mark.parametrize(
    ("m", "k", "most"),
    [(14336, 4096, 4), (4096, 14336, 2), (8192, 8192, 1), (2048, 2048, 8), (28672, 8192, 0)],
)
def test_few_tokens_of_short_rows_are_rounded_by_the_kernel(m: int, k: int, most: int):
    """Up to the tokens from which one of the other kernels, which need a launch before, took no longer."""
    others = [load("hopper.spmm_fp8"), KERNEL]
    for n in (1, 2, 4, 8):
        p = changed(DECODE, m=m, k=k, n=n, nnzb=m * k // 65536, row_max=k // 512)
        best = min(other.seconds(p, other.default(p)) for other in others)
        assert (SKINNY.seconds(p, SKINNY.default(p)) < best) == (n <= most), f"{n} columns"
    assert "up to 8 columns" in SKINNY.why_not(changed(DECODE, n=9))[0]


# Cold weights in a graph on an H200, us: m, k, c.part for 1, 2, 4 and 8 tokens, and their times (2026-11-30).
@pytest.mark.parametrize(
    ("m", "k", "parts", "times"),
    [
        (14336, 4096, (0, 0, 0, 0), (8.27, 8.57, 9.48, 10.32)),
        (4096, 14336, (5, 5, 5, 10), (10.59, 11.71, 14.74, 18.17)),
        (8192, 8192, (6, 6, 0, 0), (10.56, 11.29, 13.14, 14.21)),
        (2048, 2048, (0, 0, 0, 0), (4.80, 4.91, 5.63, 5.81)),
    ],
)
def test_few_tokens_are_predicted_as_launches_that_are_queued(
    m: int, k: int, parts: tuple[int, ...], times: tuple[float, ...]
):
    """Predictions are of launches outside a graph, one after another, which cost 1.2 us more."""
    for n, part, us in zip((1, 2, 4, 8), parts, times, strict=True):
        p = changed(DECODE, m=m, k=k, n=n, nnzb=m * k // 65536, row_max=k // 512)
        c = SKINNY.default(p)
        assert (c.tile_m, c.part) == (64, part)
        assert SKINNY.seconds(p, c) == pytest.approx((us + 1.2) * 1e-6, rel=0.1), f"{n} tokens"


def round_code(rows: int, k: int, turned: bool, dtype: str, card: Card) -> Code:
    """The rounding of x [rows, k], or of the transpose of a [k, rows]."""
    x = meta(rows, k, "col" if turned else "row", dtype)
    values, warps = round_fp8._constants(x, torch.float8_e4m3fn)
    kernel = round_fp8._round_rows
    constants = dict(zip(kernel.arg_names[-len(values) :], values, strict=True))
    types = {"x": NAMES[dtype], "values": NAMES["e4m3"], "scale": "*fp32"}
    return compiled(kernel, types, constants, card, warps, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_rounding_reads_and_writes_whole_vectors_and_converts_in_hardware(dtype: str):
    for rows, k, turned in ((8192, 8192, False), (8192, 1024, False), (64, 28672, False), (8192, 8192, True)):
        code = round_code(rows, k, turned, dtype, H200)
        assert code.stack == 0
        assert "v4.b32" in code.stores
        assert "ld.global.v4.b32" in code.ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in code.ptx
        assert "div.rn.f32" in code.ptx
        assert "div.full" not in code.ptx


def test_the_rounding_of_b_knows_strides_of_more_than_31_bits():
    whole = torch.empty(2, 262144, 8192, dtype=torch.bfloat16, device="meta")
    for x, wide in (
        (whole[:, -1:], True),
        (whole[:, :16, :4096], True),
        (whole[:1, :4096, :4096], False),  # one item, whose stride is nothing
        (whole[:, -1, None], True),
        (whole[0, None, :16].mT, False),
    ):
        constants, _ = round_fp8._constants(x, torch.float8_e4m3fn)
        assert constants.wide is wide, x.shape
        assert max(round_fp8.tensors.strides(x)) < 2**31 or wide


def test_defaults_fill_the_card_where_they_can():
    c = KERNEL.default(SPMM)
    assert c.tile_m == c.tile_n == 128
    c = KERNEL.default(changed(SPMM, m=1024, n=512))
    assert c.tile_m * c.tile_n < 128 * 128
    assert KERNEL.default(changed(SPMM, block=(16, 16))).tile_k == 32
    assert KERNEL.default(changed(SPMM, n=3)).tile_n == 16
