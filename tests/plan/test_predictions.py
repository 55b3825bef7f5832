"""Predictions for an H200 stay near what was measured on one.

The times are medians of 2026-11-20 (NVIDIA H200, torch 2.11, Triton 3.6.0), from docs/lab-notes.md.
A kernel that becomes faster brings its new time here with its new constants.
"""

import pytest
import torch

from sparsek.formats import BSR, random_bsr
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.select import Plan


def planned(side: tuple[int, int], n: int, block: tuple[int, int], density: float, kernel: str) -> Plan:
    """The plan of bf16 [m, k] @ [k, n] on the H200 card. Nothing writes values or B, so they cost no memory."""
    pattern = random_bsr(*side, block, density, dtype=torch.bfloat16, seed=0).pattern
    values = torch.empty((pattern.nnzb, *block), dtype=torch.bfloat16)
    b = torch.empty((side[1], n), dtype=torch.bfloat16)
    return plan_spmm(BSR.unchecked(pattern, values), b, kernel=kernel, device="h200")


SQUARE = (8192, 8192)
HOPPER = [
    (SQUARE, 8192, (128, 128), 0.0625, 127),
    (SQUARE, 8192, (128, 128), 0.125, 224),
    (SQUARE, 8192, (128, 128), 0.25, 420),
    (SQUARE, 8192, (128, 128), 0.5, 850),
    (SQUARE, 8192, (64, 64), 0.125, 268),
    (SQUARE, 8192, (32, 32), 0.125, 490),
    (SQUARE, 8192, (16, 16), 0.125, 990),
    ((8192, 7168), 8192, (512, 112), 0.25, 370),
    ((16384, 16384), 16, (64, 64), 0.25, 37),
    ((16384, 16384), 16, (128, 128), 0.25, 37),
]
PORTABLE = [((128, 128), 276), ((64, 64), 318), ((32, 32), 545), ((16, 16), 975)]


@pytest.mark.parametrize(("side", "n", "block", "density", "measured_us"), HOPPER)
def test_hopper_spmm_is_predicted_within_25_percent(
    side: tuple[int, int], n: int, block: tuple[int, int], density: float, measured_us: float
):
    plan = planned(side, n, block, density, "hopper.spmm")
    assert plan.seconds * 1e6 == pytest.approx(measured_us, rel=0.25), plan.explain()


@pytest.mark.parametrize(("block", "measured_us"), PORTABLE)
def test_portable_spmm_is_predicted_within_25_percent(block: tuple[int, int], measured_us: float):
    plan = planned(SQUARE, 8192, block, 0.125, "portable.spmm")
    assert plan.seconds * 1e6 == pytest.approx(measured_us, rel=0.25), plan.explain()


@pytest.mark.parametrize("kernel", ["hopper.spmm", "portable.spmm", "vendor.dense"])
def test_no_prediction_falls_below_the_roofline(kernel: str):
    for block, density in ((128, 0.25), (32, 0.0625)):
        for n in (16, 512):
            plan = planned((4096, 4096), n, (block, block), density, kernel)
            assert plan.seconds > plan.bound_seconds
