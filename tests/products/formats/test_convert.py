"""Conversions: from dense by every rule, and there and back through torch, SciPy and lists of blocks."""

import builtins
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse

from sparsek import BSR24, Semi24, choose_format, nn, quantize
from sparsek.core.dtypes import FLOATS
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import KERNELS
from sparsek.products.formats import convert
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr

BLOCKS = ((16, 16), (32, 16), (48, 96))


def normal(m: int, k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block_norms(w: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Frobenius norms [Mb, Kb] one block at a time."""
    rows = [w.double()[i : i + block[0]] for i in range(0, w.shape[0], block[0])]
    return torch.tensor(
        [[float(r[:, j : j + block[1]].norm()) for j in range(0, w.shape[1], block[1])] for r in rows]
    )


def stored(a: BSR) -> torch.Tensor:
    cells = torch.zeros(a.grid, dtype=torch.bool)
    cells[a.pattern.block_rows.cpu(), a.pattern.indices.cpu()] = True
    return cells


def by_cells(w: torch.Tensor, cells: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """w with every block outside `cells` set to 0."""
    elements = cells.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return w * elements[: w.shape[0], : w.shape[1]]


def recheck(a: BSR) -> None:
    """What a builder left unchecked holds."""
    p = BlockPattern(a.pattern.shape, a.pattern.block, a.pattern.indptr, a.pattern.indices)
    BSR(p, a.values.detach())


@given(
    m=st.integers(0, 100),
    k=st.integers(0, 200),
    block=st.sampled_from(BLOCKS),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_everything_survives_dense_and_back(
    m: int, k: int, block: tuple[int, int], dtype: torch.dtype, seed: int
):
    w = normal(m, k, dtype, seed)
    cells = (
        torch.rand(-(-m // block[0]), -(-k // block[1]), generator=torch.Generator().manual_seed(seed)) < 0.5
    )
    w = by_cells(w, cells, block)
    a = BSR.from_dense(w, block, threshold=0)
    recheck(a)
    assert torch.equal(stored(a), cells)
    assert torch.equal(a.to_dense(), w)
    assert a.to_dense().is_contiguous()
    assert torch.equal(a.T.to_dense(), w.T)


@pytest.mark.parametrize("shape", [(96, 96), (100, 90)])
@pytest.mark.parametrize("block", BLOCKS)
def test_threshold_keeps_blocks_of_greater_norm(shape: tuple[int, int], block: tuple[int, int], device: str):
    w = normal(*shape)
    norms = block_norms(w, block)
    threshold = float(norms.median()) + 1e-3
    a = BSR.from_dense(w.to(device), block, threshold=threshold)
    recheck(a)
    assert torch.equal(stored(a), norms > threshold)
    assert torch.equal(a.to_dense().cpu(), by_cells(w, norms > threshold, block))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep", [0, 1e-9, 0.3, 1])
def test_keep_takes_the_largest_of_the_whole_matrix(dtype: torch.dtype, keep: float, device: str):
    w = normal(100, 90, dtype)
    a = BSR.from_dense(w.to(device), (16, 32), keep=keep, scope="global")
    recheck(a)
    norms = block_norms(w, (16, 32))
    count = max(1, round(keep * 21)) if keep else 0
    largest = torch.zeros(21, dtype=torch.bool)
    largest[norms.flatten().argsort(descending=True)[:count]] = True
    assert torch.equal(stored(a), largest.view(7, 3))
    assert torch.equal(a.to_dense().cpu(), by_cells(w, stored(a), (16, 32)))


def test_keep_by_row_takes_the_largest_of_each_block_row():
    w = normal(64, 160) * torch.arange(1, 65)[:, None]
    a = BSR.from_dense(w, 16, keep=0.4)
    assert a.pattern.row_lengths.tolist() == [4, 4, 4, 4]
    kept = torch.where(stored(a), block_norms(w, (16, 16)), torch.inf).min(1).values
    left = torch.where(stored(a), -torch.inf, block_norms(w, (16, 16))).max(1).values
    assert (kept >= left).all()


@pytest.mark.parametrize("grid", [(1, 1), (4, 1), (1, 5), (2, 3), (8, 3), (3, 8), (5, 7), (3, 0)])
@pytest.mark.parametrize("keep", [0.0, 1e-9, 0.1, 1 / 3, 0.5, 0.99, 1.0])
def test_keep_by_row_stores_the_same_share_where_rows_do_not_come_out_even(
    grid: tuple[int, int], keep: float, device: str
):
    w = normal(grid[0] * 16, grid[1] * 16)
    a, cells = BSR.from_dense(w.to(device), 16, keep=keep), grid[0] * grid[1]
    recheck(a)
    assert a.nnzb == BSR.from_dense(w, 16, keep=keep, scope="global").nnzb
    assert a.nnzb == (min(cells, max(1, round(keep * cells))) if keep else 0)
    assert a.pattern.same_as(BSR.from_dense(w.to(device), 16, keep=keep, scope="row").pattern)
    ranked = [sorted(row, reverse=True) for row in block_norms(w, (16, 16)).tolist()]
    each, more = divmod(a.nnzb, max(grid[0], 1))
    ahead = sorted(range(grid[0]), key=lambda i: ranked[i][each], reverse=True)[:more] if more else []
    norms = block_norms(w, (16, 16)).where(stored(a), -1).tolist()
    for i, row in enumerate(norms):
        assert sorted((x for x in row if x >= 0), reverse=True) == ranked[i][: each + (i in ahead)]


def test_ties_go_to_the_first_position():
    a = BSR.from_dense(torch.ones(64, 64), 16, keep=0.25, scope="global")
    assert stored(a).flatten().nonzero().flatten().tolist() == [0, 1, 2, 3]
    a = BSR.from_dense(torch.ones(64, 64), 16, keep=0.5, scope="row")
    assert a.pattern.indices.tolist() == [0, 1] * 4


def test_a_mask_of_blocks_stores_them_even_if_zero(device: str):
    cells = torch.rand(4, 3, generator=torch.Generator().manual_seed(0)) < 0.5
    a = BSR.from_dense(torch.zeros(60, 40, device=device), 16, mask=cells.to(device))
    assert torch.equal(stored(a), cells)
    assert a.values.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(64, 64), (60, 41)])
def test_a_mask_of_elements_zeroes_what_is_outside_it(shape: tuple[int, int], device: str):
    w = normal(*shape)
    w[0, 0] = torch.nan
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.01
    mask[0, 0] = False
    a = BSR.from_dense(w.to(device), 16, mask=mask.to(device))
    recheck(a)
    assert 0 < a.nnzb < 16
    assert torch.equal(a.to_dense().cpu(), w.where(mask, torch.zeros(())))


@pytest.mark.parametrize("block", [16, 32])
def test_a_mask_without_any_element_stores_nothing(block: int, device: str):
    w = normal(64, 64).to(device)
    for mask in (torch.zeros(64, 64), torch.zeros(64 // block, 64 // block)):
        a = BSR.from_dense(w, block, mask=mask.bool().to(device))
        recheck(a)
        assert a.nnzb == 0


def of_blocks(*sizes: float, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    """One 16x16 block below the other, every element of each as large as given."""
    return torch.tensor(sizes, dtype=dtype, device=device).repeat_interleave(16)[:, None].repeat(1, 16)


def rows_kept(w: torch.Tensor, **rule: object) -> list[int]:
    return BSR.from_dense(w, 16, **rule).pattern.block_rows.tolist()  # type: ignore[arg-type]


# Sizes whose squares leave the range in which norms are summed: too small, or also too large.
BEYOND = [
    (torch.float16, (0, 6e-8, 6e4)),
    (torch.bfloat16, (0, 1e-39, 1e-25, 1e-24, 1)),
    (torch.bfloat16, (0, 1e-39, 1e-25, 1, 1e38, 2e38)),
    (torch.float32, (0, 3e-45, 1e-25, 1e-24, 1e-12, 1)),
    (torch.float32, (0, 3e-45, 1e-25, 1, 1e38, 2e38)),
    (torch.float64, (0, 1e-323, 1e-200, 1e-199, 1e-25, 1)),
    (torch.float64, (0, 1e-323, 1e-200, 1, 1e200, 2e200)),
]


@pytest.mark.parametrize(("dtype", "sizes"), BEYOND)
def test_blocks_of_any_magnitude_are_told_from_zero_and_ranked(
    dtype: torch.dtype, sizes: tuple[float, ...], device: str
):
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(1)).tolist()
    w = of_blocks(*(sizes[i] for i in order), dtype=dtype, device=device)
    assert rows_kept(w, threshold=0) == [at for at, i in enumerate(order) if i > 0]
    for count in range(1, len(sizes) + 1):
        largest = [at for at, i in enumerate(order) if i >= len(sizes) - count]
        assert rows_kept(w, keep=count / len(sizes)) == largest
        assert (
            BSR.from_dense(w.T, 16, keep=count / len(sizes), scope="row").pattern.indices.tolist() == largest
        )
    for i in range(1, len(sizes)):
        between = 16 * max(sizes[i - 1], sizes[i] / 4)
        assert rows_kept(w, threshold=between) == [at for at, j in enumerate(order) if j >= i]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(64, 64), (50, 41)])
def test_one_tiny_element_outranks_every_block_of_zeros(dtype: torch.dtype, shape: tuple[int, int]):
    w = torch.zeros(shape, dtype=dtype)
    w[40, 40] = {torch.float16: 6e-8, torch.float64: 1e-200}.get(dtype, 1e-24)
    for rule in ({"keep": 1 / 16}, {"threshold": 0}):
        assert BSR.from_dense(w, 16, **rule).to_dense().equal(w)  # type: ignore[arg-type]


def test_blocks_of_zeros_that_are_not_picked_cost_no_second_look(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(convert, "_scaled_norms")
    w = of_blocks(1, 0, 2, 1e-30, 3)
    assert rows_kept(w, keep=0.6) == rows_kept(w, threshold=1e-3) == [0, 2, 4]
    assert BSR.from_dense(w.T, 16, keep=0.6, scope="row").nnzb == 3


EVERY = torch.ones(128, 128, dtype=torch.bool)
QUARTERS = torch.ones(2, 2, dtype=torch.bool)
MAKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "BSR keep": lambda w: BSR.from_dense(w, 64, keep=0.5),
    "BSR keep in rows": lambda w: BSR.from_dense(w, 64, keep=0.5, scope="row"),
    "BSR threshold": lambda w: BSR.from_dense(w, 64, threshold=1.0),
    "BSR every nonzero": lambda w: BSR.from_dense(w, 64, threshold=0),
    "BSR mask": lambda w: BSR.from_dense(w, 64, mask=QUARTERS),
    "BSR mask of elements": lambda w: BSR.from_dense(w, 64, mask=EVERY),
    "Semi24": Semi24.from_dense,
    "Semi24 mask": lambda w: Semi24.from_dense(w, torch.tensor([True, True, False, False]).repeat(128, 32)),
    "Semi24 exact": lambda w: Semi24.from_dense(w.masked_fill(torch.arange(128) % 4 > 1, 0), exact=True),
    "BSR24": lambda w: BSR24.from_dense(w, 64, keep=0.5),
    "BSR24 every nonzero": lambda w: BSR24.from_dense(w, 64, threshold=0),
    "BSR24 mask": lambda w: BSR24.from_dense(w, 64, mask=QUARTERS),
    "BSR24 of a BSR": lambda w: BSR24.from_bsr(
        BSR.from_dense(w * 0, 64, mask=QUARTERS)._each(lambda v: v + w[0, 0])
    ),
    "layer": lambda w: nn.BlockSparseLinear.from_dense(w, 64, keep=0.5),
    "layer mask": lambda w: nn.BlockSparseLinear.from_dense(w, 64, mask=QUARTERS),
    "choose_format": lambda w: choose_format((4, 128), w, min_norm=0),
    "choose_format 2:4": lambda w: choose_format((4, 128), w, formats="semi24", min_norm=0.5),
    "quantize": quantize,
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nan_and_inf_are_refused_whatever_chooses(make: Callable[[torch.Tensor], Any], bad: float):
    w = normal(128, 128)
    w[0, 0] = bad
    with pytest.raises(InvalidInput, match="NaN or Inf"):
        make(w)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", [{"keep": 0.5}, {"keep": 0}, {"threshold": 1.0}, {"threshold": 1e-9}])
def test_norms_of_nan_and_inf_are_refused(bad: float, rule: dict[str, float]):
    w = normal(50, 50)
    w[49, 49] = w[3, 3] = bad
    with pytest.raises(InvalidInput, match="2 elements that are NaN or Inf"):
        BSR.from_dense(w, 16, **rule)  # type: ignore[arg-type]


def test_a_registered_packer_is_not_asked_for_a_matrix_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KERNELS, "pack_bsr", lambda w, block, rule: pytest.fail("asked"))
    assert BSR.from_dense(normal(32, 32), 16, keep=0.5).nnzb == 2


@pytest.mark.gpu
def test_a_registered_packer_is_asked_on_a_gpu_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setitem(
        KERNELS, "pack_bsr", lambda w, block, rule: asked.append((tuple(w.shape), block, rule))
    )
    w = normal(32, 64).cuda()
    right = BSR.from_dense(w.cpu(), 16, keep=0.5)
    made = BSR.from_dense(w, 16, keep=0.5)  # the packer answered None, so torch packed
    assert torch.equal(made.values.cpu(), right.values)
    BSR.from_dense(w.requires_grad_(), 16, keep=0.5)
    assert asked == [((32, 64), (16, 16), convert.Rule(None, None, 0.5, "row"))]
    monkeypatch.setitem(KERNELS, "pack_bsr", lambda w, block, rule: made)
    assert BSR.from_dense(w.detach(), 16, threshold=1.0) is made


@pytest.mark.parametrize(
    ("w", "rule", "message"),
    [
        (torch.ones(4), {}, "it must be 2-D"),
        (torch.ones(4, 4).to_sparse(), {}, "layout torch.sparse_coo"),
        ([[1.0]], {}, r"w must be a dense torch.Tensor, got list"),
        (torch.ones(4, 4, dtype=torch.int32), {}, "is torch.int32; use one of"),
        (torch.ones(4, 4), {}, r"needs one rule .* keep=0.25 .*, threshold=t .*threshold=0 .* or mask="),
        (torch.ones(4, 4), {"scope": "row"}, "needs one rule that chooses blocks"),
        (torch.ones(4, 4), {"keep": 0.5, "threshold": 1}, "threshold and keep are given"),
        (torch.ones(4, 4), {"keep": 1.5}, "keep is 1.5"),
        (torch.ones(4, 4), {"keep": float("nan")}, "keep is nan"),
        (torch.ones(4, 4), {"keep": "0.1"}, "keep is '0.1'; it must be a finite number from 0 to 1"),
        (torch.ones(4, 4), {"keep": True}, "keep is True; it must be a finite number"),
        (torch.ones(4, 4), {"keep": [0.1]}, r"keep is \[0.1\]; it must be a finite number"),
        (torch.ones(4, 4), {"threshold": -1}, "threshold is -1; it must be a finite number, 0 or greater"),
        (torch.ones(4, 4), {"threshold": "1"}, "threshold is '1'; it must be a finite number, 0 or greater"),
        (torch.ones(4, 4), {"threshold": 10**400}, r"threshold is a int \(1000"),
        (
            torch.ones(4, 4),
            {"threshold": torch.ones(2)},
            r"threshold is a torch.Tensor.*; write float\(threshold\)",
        ),
        (torch.ones(4, 4), {"keep": 0.5, "scope": "column"}, "scope is 'column'; use one of global, row"),
        (torch.ones(4, 4), {"keep": 0.5, "scope": np.array(["row", "row"])}, "use one of global, row"),
        (torch.ones(4, 4), {"scope": "row", "threshold": 1}, "belongs to keep"),
        (
            torch.ones(4, 4),
            {"mask": torch.ones(4, 4)},
            "dtype of mask is torch.float32; it must be torch.bool",
        ),
        (
            torch.ones(4, 4),
            {"mask": torch.ones(2, 1, dtype=torch.bool)},
            r"of blocks \(1, 1\) or of elements \(4, 4\)",
        ),
        (torch.ones(4, 4), {"mask": torch.ones(4, 4, dtype=torch.bool, device="meta")}, "mask is on meta"),
    ],
)
def test_from_dense_says_what_is_wrong(w: object, rule: dict[str, object], message: str):
    with pytest.raises(InvalidInput, match=message):
        BSR.from_dense(w, 16, **rule)  # type: ignore[arg-type]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_torch_and_back(dtype: torch.dtype, view: bool, device: str):
    a = random_bsr(96, 64, (32, 16), 0.4, dtype=dtype, device=device)
    a = a.T if view else a
    t = a.to_torch()
    assert t.layout == torch.sparse_bsr
    assert torch.equal(t.to_dense(), a.to_dense())
    b = BSR.from_torch(t)
    assert b.pattern.same_as(a.pattern)
    assert torch.equal(b.values, a.logical_values())
    if not view:
        assert b.values.data_ptr() == a.values.data_ptr()


def test_torch_makes_int64_indices_and_they_become_int32():
    w = normal(64, 64)
    a = BSR.from_torch(w.to_sparse_bsr((16, 32)))
    assert a.pattern.indices.dtype == torch.int32
    assert torch.equal(a.to_dense(), w)


def test_from_torch_refuses_what_is_not_bsr():
    for t in (torch.ones(16, 16), torch.ones(16, 16).to_sparse_csr(), 3):
        with pytest.raises(InvalidInput, match=r"expected a torch\.sparse_bsr tensor"):
            BSR.from_torch(t)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="multiples of 16"):
        BSR.from_torch(torch.ones(16, 16).to_sparse_bsr((8, 8)))
    wrong = torch.sparse_bsr_tensor(
        torch.tensor([0, 1]),
        torch.tensor([2**32]),
        torch.ones(1, 16, 16),
        size=(16, 16),
        check_invariants=False,
    )
    with pytest.raises(InvalidInput, match=r"indices\[0\] is 2147483647"):
        BSR.from_torch(wrong)


def test_ragged_sides_are_refused_where_they_cannot_be():
    a = random_bsr(100, 64, 32, 0.5)
    with pytest.raises(InvalidInput, match=r"torch.sparse_bsr needs sides .* \(128, 64\)"):
        a.to_torch()
    with pytest.raises(InvalidInput, match="bsr_array needs sides"):
        a.to_scipy()


@pytest.mark.parametrize("dtype", FLOATS)
def test_scipy_and_back(dtype: torch.dtype):
    a = random_bsr(96, 64, (32, 16), 0.4, dtype=dtype)
    s = a.to_scipy()
    assert s.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert np.array_equal(s.toarray(), a.to_dense().to(torch.promote_types(dtype, torch.float32)).numpy())
    b = BSR.from_scipy(s)
    assert b.pattern.same_as(a.pattern)
    assert torch.equal(b.values.to(dtype), a.values)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil", "dok", "dia", "bsr"])
@pytest.mark.parametrize("shape", [(96, 64), (70, 45), (0, 16), (16, 0)])
def test_any_scipy_format_becomes_blocks(kind: str, shape: tuple[int, int]):
    draw = np.random.default_rng(0)
    s = sparse.csr_array(draw.random(shape) * (draw.random(shape) < 0.02)).asformat(kind)
    a = BSR.from_scipy(s, (32, 16))
    recheck(a)
    assert a.dtype == torch.float64
    assert np.array_equal(a.to_dense().numpy(), s.toarray())


def test_scipy_repeats_are_added_up():
    s = sparse.coo_array((np.array([1.0, 2.0]), (np.array([3, 3]), np.array([5, 5]))), shape=(16, 16))
    assert BSR.from_scipy(s, 16).to_dense()[3, 5] == 3
    twice = (np.ones((3, 16, 16)), np.array([1, 0, 1]), np.array([0, 3]))
    a = BSR.from_scipy(sparse.bsr_array(twice, shape=(16, 32)))
    assert a.pattern.indices.tolist() == [0, 1]
    assert a.values[:, 0, 0].tolist() == [1, 2]


def test_from_scipy_says_what_is_wrong():
    s = sparse.eye_array(32, format="csr")
    with pytest.raises(InvalidInput, match=r"pass block=\(bm, bk\)"):
        BSR.from_scipy(s)
    with pytest.raises(InvalidInput, match=r"expected a 2-D SciPy sparse matrix, got a numpy.ndarray"):
        BSR.from_scipy(np.eye(4), 16)
    with pytest.raises(InvalidInput, match="dtype int64"):
        BSR.from_scipy(s.astype(np.int64), 16)
    s = sparse.csr_array((np.ones(1), np.array([0]), np.array([0, 1, *([1] * 31)])), shape=(32, 32))
    s.indices[0] = 99
    with pytest.raises(InvalidInput, match="SciPy finds its csr matrix invalid"):
        BSR.from_scipy(s, 16)


def test_to_scipy_without_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without_scipy(name: str, *more):
        if name.startswith("scipy"):
            raise ModuleNotFoundError(name)
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with pytest.raises(InvalidInput, match=r"sparsek\[scipy\]"):
        random_bsr(32, 32, 16, 0.5).to_scipy()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_blocks_in_any_order_are_sorted_and_trimmed(kind: torch.dtype, device: str):
    blocks = torch.arange(1.0, 4)[:, None, None].expand(3, 32, 16).to(device)
    rows, cols = torch.tensor([3, 0, 3], dtype=kind), torch.tensor([4, 2, 0], dtype=kind)
    a = BSR.from_coo_blocks(rows.to(device), cols.to(device), blocks, (100, 70))
    recheck(a)
    assert a.pattern.block_rows.tolist() == [0, 3, 3]
    assert a.pattern.indices.tolist() == [2, 0, 4]
    assert a.to_dense().sum().item() == 2 * 512 + 3 * 4 * 16 + 1 * 4 * 6
    assert blocks.min() == 1


def test_from_coo_blocks_says_what_is_wrong():
    blocks, zero = torch.ones(2, 16, 16), torch.zeros(2, dtype=torch.int64)
    for rows, cols, message in (
        (zero, zero, r"block \(0, 0\) is given twice, at 0 and 1"),
        (zero + 2, zero, r"rows\[0\] is 2; the grid has 2 x 2 blocks"),
        (zero, torch.tensor([0, -1]), r"cols\[1\] is -1"),
        (zero[:1], zero, "rows has 1 entries"),
        (zero.float(), zero, "dtype of rows is torch.float32; use one of torch.int32, torch.int64"),
    ):
        with pytest.raises(InvalidInput, match=message):
            BSR.from_coo_blocks(rows, cols, blocks, (32, 32))
    with pytest.raises(InvalidInput, match=r"blocks has shape .*; it must be 3-D"):
        BSR.from_coo_blocks(zero, zero, blocks[0], (32, 32))


@pytest.mark.gpu
def test_to_dense_does_not_sync(no_sync):
    a = random_bsr(256, 256, 64, 0.5, device="cuda")
    with no_sync():
        dense = a.T.to_dense()
    assert torch.equal(dense.T, a.to_dense())


def test_to_dense_is_traced_in_one_graph():
    a = random_bsr(96, 64, 16, 0.4)

    @torch.compile(fullgraph=True, backend="eager")
    def both(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        traced = BSR.unchecked(a.pattern, values)
        return traced.to_dense(), traced.T.to_dense()

    dense, flipped = both(a.values)
    assert torch.equal(dense, a.to_dense())
    assert torch.equal(flipped, a.to_dense().T)
    assert torch.equal(a.T.to_dense(), a.to_dense().T)
