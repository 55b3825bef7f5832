"""Plans that follow a pattern whose blocks move: the work list is made where the pattern is."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput
from sparsek.engine.table import load
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from sparsek.products.ops.spmm import plan_spmm, spmm
from sparsek.products.plan.schedule import deal_on_device
from sparsek.testing.budget import check_spmm
from tests.problems import spmm_problem

GPU = pytest.mark.gpu


def pair(device: str, seed: int, density: float = 0.3, dtype: torch.dtype = torch.float32) -> BSR:
    return random_bsr(320, 448, (32, 64), density, dtype=dtype, device=device, seed=seed, pattern="powerlaw")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(1, 300),
    st.sampled_from([(32, 64), (192, 64), (80, 16)]),
    st.integers(0, 99),
)
def test_the_list_made_on_the_device_has_every_tile_once(
    m: int, n: int, block: tuple[int, int], seed: int
) -> None:
    a = random_bsr(m, 320, block, 0.3, seed=seed)
    for rows, cols, workers in ((128, 64, 5), (64, 256, 132)):
        tiles, starts = deal_on_device(a.pattern, n, rows, cols, workers)
        assert starts[0] == 0
        assert starts[-1] == len(tiles)
        assert (starts.diff() >= 0).all()
        assert starts.diff().max() - starts.diff().min() <= 1
        indptr = a.pattern.host.indptr.tolist()
        bm = block[0]
        offsets = sorted({min(each, max(bm - rows, 0)) for each in range(0, bm, rows)})
        wanted = {
            (indptr[row], indptr[row + 1], row * bm + offset, col, offset)
            for row in range(a.grid[0])
            for offset in offsets
            for col in range(0, n, cols)
        }
        found = [tuple(each) for each in tiles.tolist()]
        assert len(found) == len(wanted)
        assert set(found) == wanted


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


def test_merged_and_split_rows_become_plain_ones() -> None:
    kernel = load("hopper.spmm")
    a = random_bsr(1024, 1024, 32, 0.2, dtype=torch.bfloat16, seed=0)
    p = spmm_problem(1024, 1024, 512, (32, 32), a.nnzb, "bf16", H200, row_max=32, merged=((2, a.nnzb),))
    merged = next(c for c in kernel.configs(p) if c.joined_rows == 2)
    config, work = kernel.adopt(p, merged, a)
    assert config.joined_rows == 1
    assert not config.split
    assert work.imbalance is None
    assert len(work.tiles) == 2 + 32 * -(-512 // config.block_cols)
