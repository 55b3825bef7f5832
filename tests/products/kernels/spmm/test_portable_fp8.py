"""The portable FP8 kernels without a GPU: in Triton's interpreter, and compiled for real cards."""

from typing import Any

import pytest
import torch

from sparsek.core.device import H200, Card
from tests.problems import RTX_4090, changed, fp8_problem
from tests.sampling import sampled

pytest.importorskip("triton")

from sparsek.products.kernels.pack import to_fp8 as round_fp8
from sparsek.products.kernels.spmm import portable_fp8 as spmm_fp8
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
