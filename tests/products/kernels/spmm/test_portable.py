"""portable.spmm without a GPU: arithmetic in Triton's interpreter, code by compiling for real cards."""

import math
from itertools import product

import pytest

from sparsek.core.device import H200
from tests.problems import CARDS, spmm_problem

pytest.importorskip("triton")

from sparsek.engine.launch.tensors import tile_side
from sparsek.products.kernels.spmm import portable
from tests.engine.launch.covering import once
from tests.products.kernels.common.portable_code import spmm_code


def problem(card, block, n=8192, dtype="bf16", m=8192, k=8192, **more):
    cells = -(-m // block[0]) * -(-k // block[1])
    row = max(1, -(-k // block[1]) // 8)
    return spmm_problem(m, k, n, block, max(1, cells // 8), dtype, card, row_max=row, **more)


def check_code(p, c):
    code = spmm_code(p, c)
    what = f"{p.block} n={p.n} {p.dtype} {c}"
    stage = c.tile_k * (c.tile_m + c.tile_n) * (4 if p.dtype == "fp32" else 2)
    assert code.stack == 0, f"{what} spills {code.stack} bytes"
    assert code.shared <= p.card.smem_bytes, what
    assert code.copies, f"{what}: 16-byte asynchronous copies are missing"
    words = min(4, c.tile_m * c.tile_n * (4 if p.dtype == "fp32" else 2) // (128 * c.num_warps))
    assert code.stores == {f"v{words}.b32".replace("v1.", "")}, what
    if p.card.capability[0] == 9 and p.dtype != "fp32" and c.tile_m >= 64:
        assert "wgmma.mma_async" in code.ptx, what
        assert "wgmma.wait_group.sync.aligned 1" in code.ptx, f"{what}: no wgmma stays in flight"
        assert code.shared >= c.num_stages * stage, f"{what}: fewer buffers than stages"
    elif p.dtype != "fp32" or p.tf32:
        assert "mma" in code.ptx, what
        assert code.shared >= (c.num_stages - 1) * stage, f"{what}: fewer buffers than stages"


BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (512, 112), (48, 96))


@pytest.mark.parametrize(("card", "block"), once(product(CARDS, BLOCKS), most=3), ids=str)
def test_every_config_compiles_without_spills_into_shared_memory(card, block):
    p = problem(CARDS[card], block)
    configs = list(portable.KERNEL.configs(p))
    assert len(configs) >= 3
    for c in configs:
        check_code(p, c)


NARROW = (((128, 128), 16), ((64, 64), 64), ((16, 16), 16))


@pytest.mark.parametrize(("card", "sides"), once(product(("sm_90", "sm_80"), NARROW)), ids=str)
def test_every_narrow_config_compiles_without_spills(card, sides):
    block, n = sides
    p = problem(CARDS[card], block, n=n)
    for c in portable.KERNEL.configs(p):
        check_code(p, c)


@pytest.mark.parametrize(
    ("card", "tf32", "block"), once(product(CARDS, (False, True), ((128, 128), (16, 16)))), ids=str
)
def test_every_fp32_config_compiles_without_spills(card, tf32, block):
    p = problem(CARDS[card], block, dtype="fp32", tf32=tf32)
    for c in portable.KERNEL.configs(p):
        check_code(p, c)


CHANGES = {
    "view": {"transposed": True},
    "col": {"b_layout": "col"},
    "ragged_n": {"n": 8200},
    "ragged_all": {"k": 8200, "m": 8200, "n": 8200, "dtype": "fp16"},
    "linear": {"out_layout": "col", "b_layout": "col"},
    "linear_gelu_residual": {
        "out_layout": "col",
        "b_layout": "col",
        "bias": True,
        "activation": "gelu",
        "combine": "add",
    },
    "swiglu": {"bias": True, "activation": "silu", "combine": "mul", "has_alpha": True},
}


@pytest.mark.parametrize(("change", "block"), once(product(CHANGES, BLOCKS[:5])), ids=str)
def test_views_and_ragged_sides_keep_wide_copies_and_full_pipelines(change, block):
    p = problem(H200, block, **CHANGES[change])
    check_code(p, portable.KERNEL.default(p))


def test_the_default_is_the_first_config_unless_tiles_are_fewer_than_sms():
    p = problem(H200, (128, 128))
    assert portable.KERNEL.default(p) == next(iter(portable.KERNEL.configs(p)))
    small = problem(H200, (128, 128), m=1024, n=512)
    c = portable.KERNEL.default(small)
    assert math.prod(portable.tiles(small, c)) >= 64
    assert c.tile_m * c.tile_n < 128 * 128


def test_tile_heights_waste_few_rows():
    heights = {bm: tile_side(bm, 256) for bm in (16, 32, 48, 64, 96, 112, 128, 256, 512)}
    assert heights == {16: 16, 32: 32, 48: 64, 64: 64, 96: 128, 112: 128, 128: 128, 256: 128, 512: 128}


def test_config_sides_that_are_no_power_of_two_are_refused():
    with pytest.raises(ValueError, match="tile_k of a portable"):
        portable.Config(64, 64, 48, 4, 3)
