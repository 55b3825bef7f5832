"""match: every pair of blocks that meet once, in the order of A's columns, and C's pattern, against loops over sets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsek as sk
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.matches import Matches, match
from tests.products.pattern_cases import pattern_of

SIDES = (16, 32, 48)  # of blocks: bm, bk, bn


@st.composite
def masks(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of A [Mb, Kb], B [Kb, Nb] and a wanted C [Mb, Nb]."""
    rows, inner, columns = (draw(st.integers(0, 6)) for _ in range(3))
    random = np.random.default_rng(draw(st.integers(0, 999)))
    shapes = ((rows, inner), (inner, columns), (rows, columns))
    a, b, c = (random.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0])) for shape in shapes)
    return a, b, c


def listed(mask: np.ndarray) -> dict[tuple[int, int], int]:
    """Position of each stored cell."""
    return {(int(i), int(j)): at for at, (i, j) in enumerate(zip(*np.nonzero(mask), strict=True))}


def found(matches: Matches) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The pairs of every block of C, by its cell."""
    ends = matches.indptr.tolist()
    pairs = list(zip(matches.left.tolist(), matches.right.tolist(), strict=True))
    rows, columns = matches.pattern.block_rows.tolist(), matches.pattern.indices.tolist()
    return {(i, j): pairs[ends[r] : ends[r + 1]] for r, (i, j) in enumerate(zip(rows, columns, strict=True))}


@given(masks(), st.booleans())
def test_pairs_are_those_of_the_sum_over_k_in_its_order(
    drawn: tuple[np.ndarray, np.ndarray, np.ndarray], wanted: bool
) -> None:
    a, b, of_c = drawn
    bm, bk, bn = SIDES
    left, right, into = pattern_of(a, (bm, bk)), pattern_of(b, (bk, bn)), pattern_of(of_c, (bm, bn))
    matches = match(left, right, into if wanted else None)
    of_a, of_b = listed(a), listed(b)
    expected = {
        (i, j): [(of_a[i, k], of_b[k, j]) for k in range(a.shape[1]) if a[i, k] and b[k, j]]
        for i in range(a.shape[0])
        for j in range(b.shape[1])
    }
    kept = {cell: pairs for cell, pairs in expected.items() if (of_c[cell] if wanted else pairs)}
    assert found(matches) == kept
    assert matches.pairs == sum(map(len, kept.values()))
    assert matches.longest == max(map(len, kept.values()), default=0)
    assert (matches.pattern.shape, matches.pattern.block) == ((a.shape[0] * bm, b.shape[1] * bn), (bm, bn))
    assert (matches.pattern is into) == wanted
    c = matches.pattern
    BlockPattern(c.shape, c.block, c.indptr, c.indices)  # checks all of it
    lists = matches.indptr, matches.left, matches.right
    assert {x.dtype for x in lists} == {torch.int32}
    assert matches.indptr[0] == 0
    assert matches.indptr[-1] == matches.pairs


def test_a_transposed_product_has_the_same_pairs_the_other_way_round() -> None:
    a = sk.random_bsr(320, 256, 32, 0.4, seed=1).pattern
    b = sk.random_bsr(256, 192, 32, 0.4, seed=2).pattern
    there, back = found(match(a, b)), found(match(b.T, a.T))
    # b.T lists blocks by the columns of b.
    at_a, at_b = a.transposed[1].tolist(), b.transposed[1].tolist()
    turned = {(j, i): [(at_a[y], at_b[x]) for x, y in pairs] for (i, j), pairs in back.items()}
    assert turned == there


def test_ragged_sides_are_those_of_c() -> None:
    a = sk.random_bsr(100, 70, (32, 16), 0.5, seed=1).pattern
    b = sk.random_bsr(70, 45, (16, 16), 0.5, seed=2).pattern
    assert match(a, b).pattern.shape == (100, 45)


@pytest.mark.parametrize(
    ("a", "b", "wanted", "said"),
    [
        ((64, 96), (64, 64), None, "B needs 96 rows"),
        ((64, 64, (32, 16)), (64, 64, (32, 32)), None, "those of B need 16 rows"),
        ((64, 64), (64, 64), (64, 96), "C is 64x64 in blocks of 32x32; the pattern is 64x96"),
        ((64, 64), (64, 64), (64, 64, (16, 32)), "in blocks of 16x32"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(a: tuple, b: tuple, wanted: "tuple | None", said: str) -> None:
    def made(m: int, n: int, block: tuple[int, int] = (32, 32)) -> BlockPattern:
        return sk.random_bsr(m, n, block, 0.5, seed=0).pattern

    with pytest.raises(sk.InvalidInput, match=said):
        match(made(*a), made(*b), None if wanted is None else made(*wanted))


def test_patterns_of_two_devices_are_refused() -> None:
    a = sk.random_bsr(64, 64, 32, 0.5, seed=0).pattern
    meta = BlockPattern.unchecked(a.shape, a.block, a.indptr.to("meta"), a.indices.to("meta"))
    for others in ((meta, None), (a, meta)):
        with pytest.raises(sk.InvalidInput, match="on one device"):
            match(a, *others)
