"""The reference of spgemm: against dense products, its gradients, and what may never reach its result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsek.products.formats.bsr import BSR, padding_nonzeros
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import PATTERNS, Spread, random_bsr
from sparsek.products.plan.matches import match
from sparsek.products.reference.spgemm import pairs, spgemm
from tests.refusals import refused

SQUARES = ((16, 16, 16), (32, 16, 48), (16, 48, 16), (64, 16, 128))


def matrix(m: int, k: int, block, density: float = 0.5, kind: Spread = "uniform", **rest) -> BSR:
    options = {"dtype": torch.float64, "device": "cpu", "seed": m + 1000 * k, **rest}
    return random_bsr(m, k, block, density, pattern=kind, **options)


def sampled(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """`dense` [M, N] with 0 outside the stored blocks."""
    return dense * BSR.unchecked(pattern, torch.ones(pattern.nnzb, *pattern.block).double()).to_dense()


def drawn(m, k, n, blocks, density, kind, views):
    bm, bk, bn = blocks
    a = matrix(k, m, (bk, bm), density, kind).T if views[0] else matrix(m, k, (bm, bk), density, kind)
    b = matrix(n, k, (bn, bk), density, kind).T if views[1] else matrix(k, n, (bk, bn), density, kind)
    return a, b


OPERANDS = {
    "m": st.integers(0, 130),
    "k": st.integers(0, 130),
    "n": st.integers(0, 130),
    "blocks": st.sampled_from(SQUARES),
    "density": st.sampled_from((0.0, 0.2, 0.6, 1.0)),
    "kind": st.sampled_from(tuple(PATTERNS)),
    "views": st.tuples(st.booleans(), st.booleans()),
}


@given(**OPERANDS)
def test_it_is_the_dense_product(m, k, n, blocks, density, kind, views):
    a, b = drawn(m, k, n, blocks, density, kind, views)
    c = spgemm(a, b)
    torch.testing.assert_close(c.to_dense(), a.to_dense() @ b.to_dense(), rtol=1e-12, atol=1e-12)
    BSR(BlockPattern(c.shape, c.block, c.pattern.indptr, c.pattern.indices), c.values)  # every check holds


@given(**OPERANDS, wanted=st.sampled_from((0.0, 0.4, 1.0)))
def test_of_a_pattern_only_its_blocks_are_computed(m, k, n, blocks, density, kind, views, wanted):
    a, b = drawn(m, k, n, blocks, density, kind, views)
    pattern = matrix(m, n, (blocks[0], blocks[2]), wanted).pattern
    c = spgemm(a, b, pattern)
    assert c.pattern is pattern
    dense = sampled(a.to_dense() @ b.to_dense(), pattern)
    torch.testing.assert_close(c.to_dense(), dense, rtol=1e-12, atol=1e-12)
    assert padding_nonzeros(c) == 0


@given(**OPERANDS, wanted=st.sampled_from((None, 0.0, 0.4, 1.0)))
def test_its_pairs_are_those_of_the_symbolic_phase(m, k, n, blocks, density, kind, views, wanted):
    a, b = (each.pattern for each in drawn(m, k, n, blocks, density, kind, views))
    pattern = None if wanted is None else matrix(m, n, (blocks[0], blocks[2]), wanted).pattern
    found, matches = pairs(a, b, pattern), match(a, b, pattern)
    assert found.pattern.same_as(matches.pattern)
    assert found.left.tolist() == matches.left.tolist()
    assert found.right.tolist() == matches.right.tolist()
    lengths = (matches.indptr[1:] - matches.indptr[:-1]).long()
    assert found.target.tolist() == torch.repeat_interleave(torch.arange(lengths.numel()), lengths).tolist()
    assert matches.longest == (int(lengths.max()) if lengths.numel() else 0)


def test_sums_of_half_precision_are_float32():
    a = BSR.from_dense(torch.ones(16, 4096, dtype=torch.float16), 16, threshold=0)
    assert (spgemm(a, a.T).values == 4096).all()
    a = BSR.from_dense(torch.full((16, 32), 300.0, dtype=torch.float16), 16, threshold=0)
    b = torch.full((32, 16), 300.0, dtype=torch.float16)
    b[16:] *= -1
    assert (spgemm(a, BSR.from_dense(b, 16, threshold=0)).values == 0).all()


@pytest.mark.parametrize("views", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sides", [(32, 48, 64), (20, 35, 51)], ids=str)
@pytest.mark.parametrize("fixed", [False, True])
def test_gradients_are_right(views, sides, fixed: bool):
    a, b = drawn(sides[0], sides[1], sides[2], (16, 32, 16), 0.6, "powerlaw", views)
    pattern = matrix(sides[0], sides[2], 16, 0.5).pattern if fixed else None

    def product(left: Tensor, right: Tensor) -> Tensor:
        of_a, of_b = BSR.unchecked(a.pattern, left, a.order), BSR.unchecked(b.pattern, right, b.order)
        return spgemm(of_a, of_b, pattern).values

    parts = (a.values.requires_grad_(), b.values.requires_grad_())
    assert torch.autograd.gradcheck(product, parts, fast_mode=True)
    assert torch.autograd.gradgradcheck(product, parts, fast_mode=True)


def test_gradients_are_zero_without_pairs():
    a, b = matrix(32, 32, 16, 1.0), matrix(32, 32, 16, 0.0)
    a.values.requires_grad_()
    pattern = matrix(32, 32, 16, 1.0).pattern
    c = spgemm(a, b, pattern).values
    assert (c == 0).all()
    c.sum().backward()
    assert a.values.grad is not None
    assert (a.values.grad == 0).all()


def _cells(rows: int, columns: int, *stored: tuple[int, int]) -> Tensor:
    cells = torch.zeros(rows, columns, dtype=torch.bool)
    cells[tuple(zip(*stored, strict=True))] = True
    return cells


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sides", [(48, 48, 48), (40, 41, 42)])
def test_blocks_that_have_no_pair_never_reach_the_result(bad: float, sides, device: str):
    m, k, n = sides
    a = BSR.from_dense(torch.ones(m, k), 16, mask=_cells(3, 3, (0, 0), (0, 1), (2, 2))).to(device)
    b = BSR.from_dense(torch.ones(k, n), 16, mask=_cells(3, 3, (0, 1), (0, 2), (2, 0))).to(device)
    pattern = BSR.from_dense(torch.ones(m, n), 16, mask=_cells(3, 3, (0, 1), (1, 1), (2, 0))).pattern.to(
        device
    )
    clean = spgemm(a, b, pattern).values
    whole = spgemm(a, b).values
    a.values[1] = bad  # (0, 1): row 1 of B has no block
    assert torch.equal(spgemm(a, b).values, whole)
    b.values[1] = bad  # (0, 2): adds to block (0, 2) alone, which is not wanted
    assert torch.equal(spgemm(a, b, pattern).values, clean)
    assert not spgemm(a, b).values.isfinite().all()


def test_nan_stays_in_its_row_and_its_column():
    a, b = matrix(20, 40, 16, 1.0), matrix(40, 50, 16, 1.0)
    a.values[4, 1, 3] = torch.nan  # block (1, 1): row 17
    b.values[2, 3, 1] = torch.inf  # block (0, 2): column 33
    c = spgemm(a, b)
    wrong = ~c.to_dense().isfinite()
    right = torch.zeros_like(wrong)
    right[17] = right[:, 33] = True
    assert torch.equal(wrong, right)
    assert padding_nonzeros(c) == 0


def test_bits_repeat(device: str):
    a, b = (matrix(512, 512, 16, 0.1, "powerlaw", dtype=torch.float32, device=device, seed=i) for i in (1, 2))
    first = spgemm(a, b).values
    assert all(torch.equal(spgemm(a, b).values, first) for _ in range(5))


@pytest.mark.parametrize(
    ("b", "pattern", "message"),
    [
        (torch.ones(32, 32), None, "got BSR and Tensor"),
        (random_bsr(48, 32, 16, 0.5), None, "A is 32x32 in blocks of 16x16 and B 48x32 .* B needs 32 rows"),
        (random_bsr(32, 32, 32, 0.5), None, "in blocks of 16 rows"),
        (
            random_bsr(32, 32, 16, 0.5, dtype=torch.float64),
            None,
            "A is torch.float32 on cpu and B torch.float64",
        ),
        (
            random_bsr(32, 64, 16, 0.5),
            random_bsr(32, 32, 16, 0.5).pattern,
            "the pattern is 32x32 .* C is 32x64",
        ),
        (random_bsr(32, 64, 16, 0.5), random_bsr(32, 64, 16, 0.5), "must be a BlockPattern or None, got BSR"),
    ],
)
def test_what_does_not_fit_is_refused(b, pattern, message: str):
    refused(message, spgemm, random_bsr(32, 32, 16, 0.5), b, pattern)
