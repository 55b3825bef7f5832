"""hopper.spmm_small on a GPU: right on ragged and uneven matrices, the same bits, and NaN where it may be."""

from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek import kernels
from sparsek.testing.budget import check_spmm
from sparsek.testing.poison import poisoned
from tests.kernels.lang.drawn import fresh
from tests.kernels.planned import problem

pytestmark = pytest.mark.gpu
KERNEL: Any = kernels.load("hopper.spmm_small")
LAYOUTS = ("row", "col")
# m, k, n, density, pattern
SIDES = (
    (256, 512, 128, 0.5, "uniform"),
    (1000, 1016, 264, 0.2, "powerlaw"),
    (4096, 2048, 2048, 0.02, "powerlaw"),
    (1024, 2048, 1024, 0.9, "uniform"),
    (2048, 1000, 520, 0.004, "powerlaw"),
    (2048, 2048, 8, 0.1, "banded"),
)


def multiplied(a: Any, b: torch.Tensor) -> torch.Tensor:
    """A @ B in a tensor that was full of NaN, in B's layout, inside one that must stay so."""
    col = b.stride(0) == 1
    rows, columns = (b.shape[1], a.shape[0]) if col else (a.shape[0], b.shape[1])
    whole = poisoned((rows, columns + 8), b.dtype, "cuda")
    out = whole[:, :columns].mT if col else whole[:, :columns]
    p = problem(a, b, out)
    assert KERNEL.why_not(p) == []
    c = KERNEL.default(p)
    KERNEL.launch(c, KERNEL.prepare(p, c, a), a, b, out)
    assert bool(whole[:, columns:].isnan().all()), "wrote beside C"
    return out


def drawn(k: int, n: int, layout: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    b = torch.randn(k, n, device="cuda", dtype=dtype)
    return b.mT.contiguous().mT if layout == "col" else b


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("block", [(16, 16), (32, 32), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_right_and_nothing_beside_c(sides: Any, block: tuple[int, int], layout: str) -> None:
    m, k, n, density, spread = sides
    if layout == "col":
        m, k = -(-m // 8) * 8, -(-k // 8) * 8
    seed = fresh()
    for dtype in (torch.bfloat16, torch.float16):
        a = sk.random_bsr(m, k, block, density, pattern=spread, dtype=dtype, device="cuda", seed=seed)
        b = drawn(k, n, layout, dtype)
        gate = check_spmm(a, b, multiplied(a, b))
        assert gate.passed, (seed, dtype, gate)


@pytest.mark.parametrize("side", [16, 32])
def test_nan_stays_in_the_64_rows_around_a_block_and_untouched_rows_of_b_do_not_count(side: int) -> None:
    a = sk.random_bsr(1024, 1024, side, 0.02, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=3)
    b = drawn(1024, 256, "row")
    met = torch.zeros(a.grid[1], dtype=torch.bool, device="cuda")
    met[a.pattern.indices.long()] = True
    assert not bool(met.all())
    b[~met.repeat_interleave(side)] = torch.nan
    clean = multiplied(a, b)
    assert check_spmm(a, b, clean).passed
    column = int(a.pattern.indices[0])
    b[column * side] = torch.nan
    spoiled = multiplied(a, b).isnan().any(1)
    rows = a.pattern.block_rows[a.pattern.indices == column].long() * side // 64
    expected = torch.zeros(1024 // 64, dtype=torch.bool, device="cuda")
    expected[rows] = True
    assert torch.equal(spoiled, expected.repeat_interleave(64))


@pytest.mark.parametrize("side", [16, 32])
def test_ten_thousand_launches_on_uneven_rows_give_the_same_bits(side: int) -> None:
    a = sk.random_bsr(
        2048, 2048, side, 0.1, pattern="powerlaw", dtype=torch.bfloat16, device="cuda", seed=fresh()
    )
    b = drawn(2048, 1024, "row")
    first, again = torch.empty(2048, 1024, dtype=b.dtype, device="cuda"), torch.empty(2048, 1024, dtype=b.dtype, device="cuda")
    p = problem(a, b, first)
    c = KERNEL.default(p)
    work = KERNEL.prepare(p, c, a)
    KERNEL.launch(c, work, a, b, first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(10_000):
        KERNEL.launch(c, work, a, b, again)
        differing += (first != again).any()
    assert int(differing) == 0
