"""Plans that follow a pattern whose blocks move: the work list is made where the pattern is."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.spmm import plan_spmm, spmm
from sparsek.testing.budget import check_spmm

GPU = pytest.mark.gpu


def pair(device: str, seed: int, density: float = 0.3, dtype: torch.dtype = torch.float32) -> BSR:
    return random_bsr(320, 448, (32, 64), density, dtype=dtype, device=device, seed=seed, pattern="powerlaw")


@pytest.mark.parametrize("on_right", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_a_plan_follows_blocks_that_moved(device: str, on_right: bool) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    first, second = pair(device, 1, dtype=dtype), pair(device, 2, 0.2, dtype=dtype)
    assert second.nnzb < first.nnzb
    b = torch.randn((72, 320) if on_right else (448, 72), dtype=dtype, device=device)
    plan = plan_spmm(b, first) if on_right else plan_spmm(first, b)
    followed = plan.retarget(second)
    assert followed.kernel == plan.kernel
    out = followed(b, second) if on_right else followed(second, b)
    if on_right:
        assert check_spmm(second.T, b.T, out.T).passed
    else:
        assert check_spmm(second, b, out).passed
    with pytest.raises(InvalidInput, match="another pattern"):
        followed(b, first) if on_right else followed(first, b)


@pytest.mark.gpu
def test_following_waits_for_nothing(no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    first = random_bsr(2048, 2048, 128, 0.3, dtype=torch.bfloat16, device="cuda", seed=1)
    moved = random_bsr(2048, 2048, 128, 0.2, dtype=torch.bfloat16, device="cuda", seed=2)
    b = torch.randn(2048, 1024, dtype=torch.bfloat16, device="cuda")
    plan = plan_spmm(first, b, kernel="hopper.spmm")
    parts = moved.pattern.indptr.clone(), moved.pattern.indices.clone()
    unread = BSR.unchecked(BlockPattern.unchecked((2048, 2048), (128, 128), *parts), moved.values)
    with no_sync():
        out = plan.retarget(unread)(unread, b)
    assert torch.equal(out, spmm(moved, b, kernel="hopper.spmm"))


def test_what_a_plan_cannot_follow_is_said() -> None:
    first = pair("cpu", 1)
    plan = plan_spmm(first, torch.randn(448, 8))
    for other in (
        pair("cpu", 2, 0.6),
        random_bsr(320, 448, (64, 64), 0.1),
        random_bsr(352, 448, (32, 64), 0.1),
        pair("cpu", 2, 0.1, torch.float64),
    ):
        with pytest.raises(
            InvalidInput,
            match="this plan can be retargeted to fp32 matrices of 320x448 in blocks of 32x64, with",
        ):
            plan.retarget(other)
    with pytest.raises(InvalidInput, match="retargeted, to a BSR"):
        plan.retarget(first.values)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kernel", ["hopper.spmm", "hopper.spmm_paired", "hopper.spmm_mma"])
def test_rows_that_were_joined_are_apart_in_a_retargeted_plan(kernel: str) -> None:
    """As on a GPU, but that the host makes the schedule."""
    side = 16 if kernel == "hopper.spmm_mma" else 32
    first, moved = (random_bsr(1024, 1024, side, d, dtype=torch.bfloat16) for d in (0.2, 0.1))
    b = torch.empty(1024, 512, dtype=torch.bfloat16)
    joined = {"joined_rows": 2} if kernel == "hopper.spmm" else None
    plan = plan_spmm(first, b, kernel=kernel, config=joined, device="h200")
    followed = replace(plan, ready=True).retarget(moved)
    assert followed.kernel == "hopper.spmm"
    assert followed.config == load("hopper.spmm").default(followed.problem)
    assert (followed.config.joined_rows, followed.config.split) == (1, False)
    assert (followed.limit, followed.problem.nnzb, followed.problem.stats.unread) == (
        first.nnzb,
        moved.nnzb,
        True,
    )
    assert len(followed.work.tiles) == 2 + 1024 // side * -(-512 // followed.config.block_cols)
