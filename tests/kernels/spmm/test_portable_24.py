"""portable.semi24 and portable.bsr24 without a GPU: in Triton's interpreter, and compiled for real cards."""

import re
from itertools import product
from typing import Any

import pytest

from sparsek.core.device import CPU, H200
from tests.kernels.lang.covering import once
from tests.problems import CARDS, T4, changed, spmm_problem
from tests.sampling import sampled

pytest.importorskip("triton")

from sparsek.kernels.spmm import portable_24 as semi24
from sparsek.kernels.spmm import portable_bsr24 as bsr24
from sparsek.kernels.spmm.unpack_24 import COLUMN_LIMIT, Config, column_unit, tiles
from tests.kernels.spmm.portable_24_code import bsr24_code, semi24_code

BIG: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "dtype": "bf16", "card": H200}
BLOCKS: dict[str, Any] = {"block": (128, 128), "nnzb": 512, "row_max": 8}


def check(p: Any, c: Config) -> None:
    code = semi24_code(p, c) if p.a.blocks is None else bsr24_code(p, c)
    what = f"{p} {c}"
    assert code.stack == 0, f"{what} spills {code.stack} bytes"
    assert code.shared <= p.card.smem_bytes, what
    assert code.copies, f"{what}: 16-byte asynchronous copies are missing"
    if p.card.capability[0] == 9 and p.dtype != "fp32" and c.tile_m >= 64:
        assert "wgmma.mma_async" in code.ptx, what
        # Unpacked tiles stay in registers, which the next step writes: no product may still be reading them then.
        assert set(re.findall(r"pendings = (\d+)", code.ttgir)) == {"0"}, what
    else:
        assert "mma" in code.ptx or p.dtype == "fp32", what


@pytest.mark.parametrize(("card", "transposed"), once(product(("sm_90", "sm_80"), (False, True))))
def test_every_config_of_both_compiles_without_spills(card: str, transposed: bool):
    sides = BIG | {"card": CARDS[card], "transposed": transposed}
    p = spmm_problem(two_four=True, **sides)
    configs = list(semi24.KERNEL.configs(p))
    assert len(configs) >= 8
    for c in sampled(configs, 5):
        check(p, c)
    q = spmm_problem(two_four=True, **sides, **BLOCKS)
    assert list(bsr24.KERNEL.configs(q)) == configs
    for c in sampled(configs[:4], 2):
        check(q, c)


LAYER = {"out_layout": "col", "b_layout": "col"}


@pytest.mark.parametrize(
    "change",
    [
        LAYER,
        LAYER | {"bias": True, "activation": "gelu", "combine": "add", "in_place": True},
        {"bias": True, "activation": "silu", "combine": "mul", "has_alpha": True, "transposed": True},
        {"dtype": "fp32"},
        {"dtype": "fp32", "tf32": True},
        {"dtype": "fp16", "m": 8200, "k": 8200, "n": 8200},
        {"n": 16},
        {"m": 64, "n": 1024, "batch": 4},
    ],
    ids=[
        "linear",
        "linear gelu residual",
        "transposed silu gate",
        "fp32",
        "tf32",
        "ragged",
        "decode",
        "short",
    ],
)
def test_what_products_may_be_compiles_without_spills(change: dict[str, Any]):
    p = spmm_problem(two_four=True, **BIG | change)
    check(p, semi24.KERNEL.default(p))
    if "m" not in change:
        for block in sampled([(128, 128), (192, 64)], 1, of=change):
            q = changed(spmm_problem(two_four=True, **BIG, **BLOCKS), **change, block=block)
            check(q, bsr24.KERNEL.default(q))


def test_reasons_name_what_is_wrong():
    for kernel, p in (
        (semi24.KERNEL, spmm_problem(two_four=True, **BIG)),
        (bsr24.KERNEL, spmm_problem(two_four=True, **BIG, **BLOCKS)),
    ):
        assert kernel.why_not(p) == []
        old = T4
        assert "8.0 or newer" in kernel.why_not(changed(p, card=old))[0]
        assert "fp64" in kernel.why_not(changed(p, dtype="fp64"))[0]
        assert "TRITON_INTERPRET=1" in kernel.why_not(changed(p, card=CPU))[0]
        assert f"at most {COLUMN_LIMIT}" in kernel.why_not(changed(p, k=COLUMN_LIMIT + 8))[0]


def test_items_of_a_batch_run_side_by_side():
    small = changed(spmm_problem(two_four=True, **BIG), m=128, k=4096, n=16)
    c = semi24.KERNEL.default(small)
    one = semi24.KERNEL.seconds(small, c)
    assert semi24.KERNEL.seconds(changed(small, batch=8), c) < 1.5 * one
    assert semi24.KERNEL.seconds(changed(small, batch=512), c) > 4 * one
    few = changed(spmm_problem(two_four=True, **BIG, **BLOCKS), m=128, k=4096, n=16, nnzb=8)
    c = bsr24.KERNEL.default(few)
    assert bsr24.KERNEL.seconds(changed(few, batch=8), c) < 2 * bsr24.KERNEL.seconds(few, c)


def test_defaults_fill_the_card_where_they_can():
    p = spmm_problem(two_four=True, **BIG)
    assert semi24.KERNEL.default(p).tile_m == 128
    assert bsr24.KERNEL.default(spmm_problem(two_four=True, **BIG, **BLOCKS)).tile_m == 128
    assert (
        bsr24.KERNEL.default(changed(spmm_problem(two_four=True, **BIG, **BLOCKS), block=(192, 64))).tile_m
        == 64
    )
    small = changed(p, m=1024, n=512)
    c = semi24.KERNEL.default(small)
    assert tiles(c, small.m, small) >= H200.sm_count
    assert c.tile_m * c.tile_n < 128 * 128
    for each in semi24.KERNEL.configs(changed(p, m=5)):
        assert each.tile_m == 16


def test_predictions_grow_with_work_and_never_beat_the_roofline():
    for kernel, p in (
        (semi24.KERNEL, spmm_problem(two_four=True, **BIG)),
        (bsr24.KERNEL, spmm_problem(two_four=True, **BIG, **BLOCKS)),
    ):
        for c in kernel.configs(p):
            seconds = kernel.seconds(p, c)
            assert kernel.seconds(changed(p, n=2 * p.n), c) > 1.8 * seconds
            assert seconds > p.useful_flops / (H200.tflops["bf16"] * 1e12)
            assert kernel.seconds(changed(p, n=8), c) > p.stored * 2 / H200.bandwidth
    q = spmm_problem(two_four=True, **BIG, **BLOCKS)
    c = bsr24.KERNEL.default(q)
    assert bsr24.KERNEL.seconds(changed(q, row_max=4096), c) > bsr24.KERNEL.seconds(q, c)


def test_config_sides_that_do_not_fit_are_refused():
    for sides in ((64, 64, 48), (8, 64, 64), (64, 64, 16)):
        with pytest.raises(ValueError, match="of a 2:4 kernel must be a power of two from"):
            Config(*sides, 4, 3)


def test_the_compiler_is_told_no_more_of_a_width_than_holds():
    for columns in range(8, 520, 8):
        unit = column_unit(columns)
        assert columns % unit == 0
        assert unit == 128 or columns % (2 * unit)
