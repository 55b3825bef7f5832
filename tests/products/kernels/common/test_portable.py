"""portable.spmm_skinny, portable.sddmm and portable.spgemm without a GPU: arithmetic in Triton's interpreter, code by
compiling for real cards.
"""

import pytest

from sparsek.core.device import H200
from sparsek.products.plan.problems import SddmmProblem, SpgemmProblem
from tests.problems import CARDS, changed, spmm_problem

pytest.importorskip("triton")

from sparsek.products.kernels.sddmm import portable as sddmm
from sparsek.products.kernels.spgemm import portable as spgemm
from sparsek.products.kernels.spmm import portable_skinny as spmm_skinny
from tests.products.kernels.common.portable_code import sddmm_code, spgemm_code, spmm_code

WHOLE = {"v4.b32"}


def decode(m=16384, k=4096, n=16, block=(128, 128), card=H200, **more):
    cells = -(-m // block[0]) * -(-k // block[1])
    row = max(1, -(-k // block[1]) // 8)
    return spmm_problem(
        m, k, n, block, cells // 8, "bf16", card, b_layout="col", out_layout="col", row_max=row, **more
    )


def sampling(block=(128, 128), card=H200, **more):
    cells = (8192 // block[0]) * (8192 // block[1])
    return SddmmProblem(8192, 8192, 8192, block, cells // 8, "bf16", card, row_max=1024 // block[1], **more)


def pairing(a_block=(128, 128), b_block=(128, 128), card=H200, **more):
    of_a, of_b = ((8192 // each[0]) * (8192 // each[1]) // 8 for each in (a_block, b_block))
    cells = (8192 // a_block[0]) * (8192 // b_block[1])
    pairs = of_a * of_b * a_block[1] // 8192
    return SpgemmProblem(
        8192, 8192, 8192, a_block, b_block, of_a, of_b, cells, pairs, pairs // cells + 1, "bf16", card, **more
    )


@pytest.mark.parametrize(
    ("card", "change"),
    [
        ("sm_90", {"m": 1024, "k": 16384, "n": 64, "bias": True, "activation": "gelu", "combine": "add"}),
        ("sm_90", {"n": 1}),
        ("sm_90", {"block": (16, 16)}),
        ("sm_90", {"transposed": True}),
        ("sm_80", {"m": 1024, "k": 16384}),
    ],
    ids=str,
)
def test_skinny_products_copy_asynchronously_and_do_not_spill(card, change):
    p = decode(card=CARDS[card], **change)
    c = spmm_skinny.KERNEL.default(p)
    code = spmm_code(p, c)
    what = f"{p} {c}: {code.registers} registers"
    assert code.stack == 0, what
    assert code.copies, what
    assert code.shared <= p.card.smem_bytes, what
    assert ("wgmma" in code.ptx) == (card == "sm_90" and c.tile_m >= 64), what
    ring = c.num_stages - ("wgmma" not in code.ptx)  # a wgmma reads its stage while the next one is filled
    assert code.shared >= ring * c.tile_k * (c.tile_m + max(16, p.n)) * 2, what
    _, slots = spmm_skinny._counts(p, c)
    assert (slots > 0) == (p.k == 16384)
    # One thread's release and acquire stand between the parts' sums and the sum of all.
    assert ("atom.global.gpu.acq_rel" in code.ptx or "atom.acq_rel.gpu" in code.ptx) == (slots > 0), what
    assert code.stores - {"b32"} <= {"v4.b32", "v2.b32"}, what


@pytest.mark.parametrize("change", [{"n": 16}, {"n": 64}, {"m": 1024, "k": 16384}], ids=str)
def test_one_wave_of_programs_keeps_enough_bytes_under_way(change):
    p = decode(**change)
    c = spmm_skinny.KERNEL.default(p)
    parts, _ = spmm_skinny._counts(p, c)
    programs = parts * spmm_skinny._subs(p, c)
    resident = spmm_skinny._resident(p, c)
    assert programs >= 0.9 * p.card.sm_count
    assert resident * c.num_stages * c.tile_k * c.tile_m * 2 > 64 * 1024
    assert p.nnzb * spmm_skinny._subs(p, c) / programs <= 8


@pytest.mark.parametrize(
    ("card", "block", "x_layout", "y_layout"),
    [
        ("sm_90", (128, 128), "row", "col"),
        ("sm_90", (64, 64), "col", "row"),
        ("sm_90", (512, 112), "row", "row"),
        ("sm_90", (16, 16), "row", "col"),
        ("sm_80", (48, 96), "col", "row"),
    ],
    ids=str,
)
def test_sddmm_compiles_to_wide_copies_without_spills(card, block, x_layout, y_layout):
    p = sampling(block, CARDS[card], x_layout=x_layout, y_layout=y_layout)
    c = sddmm.KERNEL.default(p)
    code = sddmm_code(p, c)
    assert code.stack == 0
    assert code.copies
    assert code.shared <= p.card.smem_bytes
    assert code.stores == WHOLE
    assert ("wgmma" in code.ptx) == (card == "sm_90" and c.tile_m >= 64)


@pytest.mark.parametrize(
    ("card", "a_block", "b_block", "change"),
    [
        ("sm_90", (128, 128), (128, 128), {"a_transposed": True, "b_transposed": True}),
        ("sm_90", (512, 112), (112, 128), {}),
        ("sm_90", (64, 64), (64, 64), {"dense_out": False}),
        ("sm_80", (128, 128), (128, 128), {"b_transposed": True}),
        ("sm_80", (16, 16), (16, 16), {"dense_out": False}),
    ],
    ids=str,
)
def test_spgemm_compiles_to_wide_copies_without_spills(card, a_block, b_block, change):
    p = pairing(a_block, b_block, CARDS[card], **change)
    c = spgemm.KERNEL.default(p)
    code = spgemm_code(p, c)
    assert code.stack == 0
    assert code.copies
    assert code.shared <= p.card.smem_bytes
    assert code.stores == WHOLE
    assert ("wgmma" in code.ptx) == (card == "sm_90" and c.tile_m >= 64)


PROBLEMS = {
    "skinny": (spmm_skinny.KERNEL, decode()),
    "sddmm": (sddmm.KERNEL, sampling()),
    "spgemm": (spgemm.KERNEL, pairing()),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("card", CARDS)
def test_the_default_is_among_distinct_configs_that_fit(name, dtype, card):
    kernel, p = PROBLEMS[name]
    p = changed(p, dtype=dtype, card=CARDS[card])
    configs = list(kernel.configs(p))
    assert len(set(configs)) == len(configs) >= 2
    assert kernel.default(p) in configs
    size = 4 if dtype == "fp32" else 2
    for c in configs:
        columns = getattr(c, "tile_n", 16)
        assert c.num_stages * c.tile_k * (c.tile_m + columns) * size < p.card.smem_bytes


@pytest.mark.parametrize("config", [sddmm.Config, spgemm.Config])
def test_config_sides_that_are_no_power_of_two_are_refused(config):
    with pytest.raises(ValueError, match="must be a power of two"):
        config(48, 64, 64, 4, 3)
