"""Arithmetic on stored blocks, against the same on dense matrices."""

import io
import operator
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput
from sparsek.files.io import load, save
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
VIEWS = pytest.mark.parametrize("view", [False, True], ids=["stored", "view"])


def make(m: int = 100, k: int = 70, view: bool = False, **more: Any) -> BSR:
    """Ragged on both sides, a row of blocks longer than the others; as a view still [m, k]."""
    options = {"density": 0.4, "pattern": "powerlaw", "seed": 3, **more}
    if view:
        return random_bsr(k, m, **{"block": (16, 32), **options}).T
    return random_bsr(m, k, **{"block": (32, 16), **options})


def like(a: BSR, seed: int = 7) -> BSR:
    """Another matrix on the pattern of `a`, zero where `a` has no elements."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(a.values.shape, generator=draw, dtype=a.dtype)
    return BSR(a.pattern, noise.masked_fill(a.values == 0, 0), a.order)


def is_ok(a: BSR) -> BSR:
    """The same matrix after every check that construction makes, its padding among them."""
    return BSR(BlockPattern(a.shape, a.block, a.pattern.indptr, a.pattern.indices), a.logical_values())


@VIEWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_is_that_of_the_dense_matrix_bit_by_bit(view: bool, dtype: torch.dtype):
    a = make(view=view, dtype=dtype)
    dense = a.to_dense()
    tensor = torch.tensor(1.7)
    for got, right in (
        (a * 3, dense * 3),
        (1.7 * a, dense * 1.7),
        (a * tensor, dense * tensor),
        (tensor * a, dense * tensor),
        (a * torch.tensor(2), dense * 2),
        (np.float64(1.7) * a, dense * 1.7),
        (np.float32(0.5) * a, dense * 0.5),
        (a / 3, dense / 3),
        (a / tensor, dense / tensor),
        (-a, -dense),
    ):
        assert torch.equal(got.to_dense(), right)
        assert (got.dtype, got.pattern, got.order) == (dtype, a.pattern, a.order)
        is_ok(got)


@VIEWS
@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 1e300])
def test_what_is_not_stored_stays_zero_whatever_the_factor(view: bool, factor: float):
    a = make(view=view)
    stored = make(view=view).to_dense() != 0
    for got in (a * factor, a * torch.tensor(factor), a / (1 / factor)):
        got = is_ok(got).to_dense()
        assert not got[stored].isfinite().any()
        assert (got[~stored] == 0).all()
    assert is_ok(a / 0).to_dense()[stored].isinf().all()


@VIEWS
def test_sums_and_differences_are_those_of_the_dense_matrices(view: bool):
    a = make(view=view)
    b = like(a)
    x, y = a.to_dense(), b.to_dense()
    assert (y != 0).any()
    for got, right in ((a + b, x + y), (a - b, x - y), (b - a, y - x), (a + 0, x), (a - 0, x), (0 - a, -x)):
        assert torch.equal(got.to_dense(), right)
        assert (got.pattern, got.order) == (a.pattern, a.order)
    assert torch.equal(sum([b, a], start=a).to_dense(), x + y + x)
    assert a + 0 is a
    total = sum([a, b])
    assert isinstance(total, BSR)
    assert torch.equal(total.to_dense(), x + y)


def test_a_view_and_a_stored_matrix_are_added_block_by_block():
    a = make()
    view = make().T
    stored = BSR(
        BlockPattern(view.shape, view.block, *map(torch.clone, _pytree.tree_leaves(view.pattern))),
        like(view).logical_values(),
    )
    assert view.order is not None
    assert stored.order is None
    for got, right in (
        (view + stored, view.to_dense() + stored.to_dense()),
        (stored + view, view.to_dense() + stored.to_dense()),
        (view - stored, view.to_dense() - stored.to_dense()),
        (stored - view, stored.to_dense() - view.to_dense()),
    ):
        assert torch.equal(got.to_dense(), right)
        assert got.order is None
        is_ok(got)
    assert torch.equal((a.T + view).to_dense(), 2 * view.to_dense())


def test_patterns_of_one_object_are_not_looked_at(monkeypatch: pytest.MonkeyPatch):
    a = make()
    b = like(a)
    mapped = _pytree.tree_map_only(Tensor, lambda t: t, b)
    assert mapped.pattern is not a.pattern

    def refuse(pattern: BlockPattern) -> None:
        raise AssertionError("looked at the indices")

    monkeypatch.setattr(BlockPattern, "host", property(refuse))
    for other in (b, mapped):
        assert torch.equal((a + other).values, a.values + b.values)
        assert torch.equal((a.T - b.T).values, a.values - b.values)


def pattern(cells: str, m: int = 64, k: int = 48, block: tuple[int, int] = (32, 16)) -> BSR:
    """Ones in the blocks that are "x" in a row by row picture."""
    mask = torch.tensor([[cell == "x" for cell in row] for row in cells.split()])
    return BSR.from_dense(torch.ones(m, k), block, mask=mask)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (pattern("x.. .x."), pattern("x.. .x. ...", 96), "A is 64x48 and B 96x48; .* union, such as BSR.from_dense"),
        (pattern("x.. .x."), pattern("x.. .x. ... ...", block=(16, 16)), "blocks of 32x16 and B of 16x16"),
        (pattern("x.. .x."), pattern("x.. .xx"), "A stores 2 blocks and B 3"),
        (pattern("x.. .x."), pattern("x.. ..x"), "A stores the block at block row 1, block column 1 and B does not"),
        (pattern("..x .x."), pattern(".x. .x."), "B stores the block at block row 0, block column 1 and A does not"),
        (pattern("x.. .x."), pattern("x.. .x.").to(dtype=torch.float64), r"fp32 on cpu and B fp64 on cpu; use B\.to"),
        (pattern("x.. .x."), 1, r"a BSR and 1 do not add up.* Write A.to_dense\(\) [+-]"),
        (pattern("x.. .x."), True, "a BSR and True do not add up"),
        (pattern("x.. .x."), torch.ones(64, 48), r"a BSR and a torch.Tensor, torch.float32 \[64, 48\] do not add up"),
        (pattern("x.. .x."), np.zeros(2), "a BSR and a numpy.ndarray, float64 "),
    ],
)  # fmt: skip
def test_what_does_not_add_up_is_told(left: BSR, right: Any, message: str):
    for join in (lambda: left + right, lambda: left - right):
        with pytest.raises(InvalidInput, match=message):
            join()
    if not isinstance(right, BSR):
        for join in (lambda: right + left, lambda: right - left):
            with pytest.raises(InvalidInput, match=message):
                join()


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (
            make(),
            r"A [*/] B of two BSR is not defined. A @ B is their product; .*A.logical_values\(\) [*/] B",
        ),
        (
            torch.ones(3),
            r"a torch.Tensor, torch.float32 \[3\]: use a number or a 0-dim tensor; A @ B is the product",
        ),
        (torch.ones(1, 1), r"a torch.Tensor, torch.float32 \[1, 1\]: use"),
        (torch.tensor(1j), r"A . a torch.Tensor, torch.complex64 \[\]: use a dense one of a real dtype"),
        (torch.tensor(True), r"A . a torch.Tensor, torch.bool \[\]: use a dense one of a real dtype"),
        (torch.ones((), device="meta"), "A is on cpu and the 0-dim tensor on meta; move it"),
        (1j, "1j: use a real number or a 0-dim tensor"),
        (True, "True: use a real number"),
        ("2", "'2': use a real number"),
        (None, "None: use a real number"),
    ],
    ids=repr,
)
def test_factors_that_are_none_are_refused(factor: Any, message: str):
    for run in (lambda: make() * factor, lambda: factor * make(), lambda: make() / factor):
        with pytest.raises(InvalidInput, match=message):
            run()


@pytest.mark.parametrize("number", [2, torch.tensor(2.0)], ids=repr)
def test_nothing_is_divided_by_a_matrix(number: Any):
    with pytest.raises(TypeError, match="unsupported operand"):
        operator.truediv(number, make())


@VIEWS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [None, 0, 1, -1, -2])
def test_sums_round_once(view: bool, dtype: torch.dtype, dim: int | None):
    a = make(view=view, dtype=dtype)
    dense = a.to_dense().double()
    exact, size = (each.sum() if dim is None else each.sum(dim) for each in (dense, dense.abs()))
    in_sum = 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * size
    got, wide = a.sum(dim), a.sum(dim, dtype=torch.float64)
    assert (got.dtype, wide.dtype) == (dtype, torch.float64)
    assert got.is_contiguous()
    assert ((wide - exact).abs() <= in_sum).all()
    assert ((got.double() - exact).abs() <= in_sum + torch.finfo(dtype).eps / 2 * exact.abs() * 1.01).all()
    assert torch.equal(a.sum(dim), got)


@given(
    grid=st.tuples(st.integers(0, 6), st.integers(0, 9)),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    cells=st.data(),
)
def test_sums_over_drawn_patterns_are_exact_for_small_whole_numbers(
    grid: tuple[int, int], cut: tuple[int, int], cells: Any
):
    rows, columns = grid
    m, k = (max(0, side * 16 - less) for side, less in zip(grid, cut, strict=True))
    stored = cells.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    mask = torch.tensor(stored, dtype=torch.bool).view(rows, columns)
    dense = torch.arange(m * k, dtype=torch.float32).remainder(23).view(m, k) - 9
    a = BSR.from_dense(dense, 16, mask=mask)
    for each in (a, a.T):
        dense = each.to_dense()
        assert torch.equal(each.sum(0), dense.sum(0))
        assert torch.equal(each.sum(1), dense.sum(1))
        assert each.sum() == dense.sum()
        torch.testing.assert_close(each.norm(), dense.norm())
        torch.testing.assert_close(each.block_norms(), each.logical_values().flatten(1).norm(dim=1))


def test_a_nan_reaches_the_sums_of_its_own_row_and_column_only():
    a = make(160, 160, block=16, density=0.5)
    at = int(a.pattern.host.indptr[3]) + 1
    a.values[at, 5, 2] = torch.nan
    row, column = 3 * 16 + 5, int(a.pattern.host.indices[at]) * 16 + 2
    for each, (x, y) in ((a, (row, column)), (a.T, (column, row))):
        assert each.sum(1).isnan().nonzero().flatten().tolist() == [x]
        assert each.sum(0).isnan().nonzero().flatten().tolist() == [y]


def test_a_long_row_is_summed_as_exactly_as_a_tree_is():
    a = make(16, 16 * 300, block=16, density=1.0)
    a.values.copy_(torch.full_like(a.values, 0.1))
    assert (a.sum(1).double() - a.to_dense().double().sum(1)).abs().max() < 2e-7 * 480


@VIEWS
def test_norms_are_those_of_the_dense_matrix_and_of_its_blocks(view: bool):
    a = make(view=view)
    torch.testing.assert_close(a.norm(), a.to_dense().norm())
    blocks = a.logical_values()
    torch.testing.assert_close(a.block_norms(), blocks.flatten(1).norm(dim=1))
    low = a.to(dtype=torch.bfloat16)
    assert low.norm().dtype == low.block_norms().dtype == torch.bfloat16
    exact = low.to_dense().double().norm()
    torch.testing.assert_close(low.norm(dtype=torch.float32).double(), exact, rtol=1e-6, atol=0)
    assert low.block_norms(dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", ["sum", "norm", "block_norms"])
def test_a_dtype_for_results_that_is_none_is_refused(name: str):
    with pytest.raises(InvalidInput, match=r"is torch.int32; use one of"):
        getattr(make(), name)(dtype=torch.int32)


@pytest.mark.parametrize("dim", [2, -3, True, "rows", 1.5])
def test_a_dim_that_is_none_is_refused(dim: Any):
    with pytest.raises(InvalidInput, match=r"dim is .*; it must be an int from -2 to 1"):
        make().sum(dim)


LINEAR: dict[str, Callable[[BSR], Tensor]] = {
    "scale": lambda a: (a * torch.tensor(3.0, dtype=torch.float64) / 7).to_dense(),
    "join": lambda a: (2 * a - (-a) + a.T.T).to_dense(),
    "view and stored": lambda a: (BSR.unchecked(a.pattern, a.logical_values()) + a).to_dense(),
    "total": lambda a: a.sum(),
    "columns": lambda a: a.sum(0),
    "rows": lambda a: a.sum(1),
    "norm": lambda a: a.norm(),
    "block norms": lambda a: a.block_norms(),
    "block rows": lambda a: a.block_row_slice(1, 3).to_dense(),
}


@VIEWS
@pytest.mark.parametrize("name", LINEAR)
def test_gradients_hold_once_and_twice_and_are_zero_in_the_padding(view: bool, name: str):
    run = LINEAR[name]
    a = make(37, 50, view=view, block=16, dtype=torch.float64)
    values = a.values.requires_grad_()

    def of(values: Tensor) -> Tensor:
        return run(BSR.unchecked(a.pattern, values, a.order))

    outside = BSR.unchecked(a.pattern, torch.ones_like(values), a.order)
    is_inside = BSR.from_dense(
        torch.ones(a.shape, dtype=torch.float64), a.block, mask=_mask(a)
    ).logical_values()
    assert (outside.logical_values() != is_inside).any()
    (grad,) = torch.autograd.grad(of(values).square().sum() + of(values).sum(), values)
    assert grad.shape == values.shape
    assert ((BSR.unchecked(a.pattern, grad, a.order).logical_values() != 0) <= (is_inside != 0)).all()
    # The padding is no variable: what goes through gradcheck are the elements of the matrix.
    free = (a.values != 0).detach()
    inner = a.values.detach()[free].requires_grad_()

    def spread(inner: Tensor) -> Tensor:
        return of(torch.zeros_like(values).masked_scatter(free, inner)).flatten()[:40].square()

    assert torch.autograd.gradcheck(spread, (inner,), fast_mode=True)
    assert torch.autograd.gradgradcheck(spread, (inner,), fast_mode=True)


def _mask(a: BSR) -> Tensor:
    mask = torch.zeros(a.grid, dtype=torch.bool)
    mask[a.pattern.block_rows, a.pattern.indices] = True
    return mask


def test_a_tensor_factor_gets_its_gradient():
    a = make(dtype=torch.float64)
    factor = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    ((a * factor).sum() + (a / factor).sum()).backward()
    right = a.to_dense().sum() * (1 - 1 / 1.5**2)
    assert factor.grad is not None
    torch.testing.assert_close(factor.grad, right)


def test_the_gradient_is_a_matrix_that_follows_the_view():
    a = make().requires_grad_()
    assert a.requires_grad
    assert a.T.requires_grad
    assert a.grad is None
    weights = torch.randn(a.shape)
    (a.to_dense() * weights).sum().backward()
    grad = a.grad
    assert grad is not None
    assert grad.values is a.values.grad
    assert grad.pattern is a.pattern
    mask = _mask(a).repeat_interleave(32, 0)[:100].repeat_interleave(16, 1)[:, :70]
    assert torch.equal(is_ok(grad).to_dense(), weights * mask)
    assert a.T.grad is not None
    assert torch.equal(a.T.grad.to_dense(), grad.to_dense().T)
    step = a.detach() - 0.1 * grad
    assert torch.equal(step.to_dense(), a.to_dense() - 0.1 * grad.to_dense())


def test_asking_for_gradients_and_detaching():
    a = make()
    assert a.requires_grad_() is a
    plain = a.T.detach()
    assert not plain.requires_grad
    assert plain.values.data_ptr() == a.values.data_ptr()
    assert torch.equal(plain.to_dense(), a.to_dense().T)
    assert not a.requires_grad_(False).requires_grad


def test_an_optimizer_trains_the_values_and_leaves_the_padding_zero():
    a = make(37, 50, block=16).requires_grad_()
    goal = make(37, 50, block=16, seed=3).to_dense() * 2
    optimizer = torch.optim.AdamW([a.values], lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss = (a.to_dense() - goal).square().sum() + 1e-3 * (a.sum() + a.sum(0).sum() + a.norm())
        loss.backward()
        optimizer.step()
    assert (is_ok(a).to_dense() - goal).abs().max() < 0.1


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 3), (3, 4), (2, 2), (0, 0), (4, 4)])
@VIEWS
def test_block_rows_are_the_rows_of_the_matrix(view: bool, start: int, stop: int):
    a = make(view=view)
    cut = a.block_row_slice(start, stop)
    right = a.to_dense()[start * 32 : stop * 32]
    assert cut.shape == tuple(right.shape)
    assert torch.equal(is_ok(cut).to_dense(), right)
    assert cut.pattern.host.indptr.tolist() == cut.pattern.indptr.tolist()
    assert cut.pattern.host.indices.tolist() == cut.pattern.indices.tolist()
    assert torch.equal(cut.T.to_dense(), right.T)
    assert cut.order is None


def test_block_rows_share_memory_and_their_pattern():
    a = make()
    cut = a.block_row_slice(1, 3)
    first = int(a.pattern.host.indptr[1])
    assert cut.nnzb > 0
    assert cut.values.untyped_storage().data_ptr() == a.values.untyped_storage().data_ptr()
    assert cut.values.data_ptr() == a.values[first].data_ptr()
    cut.values.fill_(2)
    assert (a.values[first : first + cut.nnzb] == 2).all()
    assert a.block_row_slice(1, 3).pattern is cut.pattern
    view = a.T.block_row_slice(0, 2)
    assert view.values.untyped_storage().data_ptr() != a.values.untyped_storage().data_ptr()


def test_block_rows_of_block_rows():
    a = make()
    assert torch.equal(a.block_row_slice(1, 4).block_row_slice(1, 3).to_dense(), a.to_dense()[64:])


@pytest.mark.parametrize("given_", [(-1, 2), (3, 2), (0, 5), (0, 1.0), (False, 2), (None, 2)], ids=repr)
def test_block_rows_that_are_not_there_are_refused(given_: tuple[Any, Any]):
    with pytest.raises(InvalidInput, match=r"(start|stop) is .*; it must be an int from . to 4"):
        make().block_row_slice(*given_)


@VIEWS
def test_a_state_dict_goes_through_torch_save_and_back(view: bool):
    a = make(view=view, dtype=torch.bfloat16).requires_grad_()
    state = a.state_dict()
    assert all(isinstance(part, Tensor) and not part.requires_grad for part in state.values())
    assert state["values"].data_ptr() == a.values.data_ptr()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    again = BSR.from_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again.to_dense(), a.to_dense())
    assert torch.equal(again.values, a.values)
    assert (again.dtype, again.shape, again.block) == (a.dtype, a.shape, a.block)
    assert (again.order is None) == (not view)
    assert again.pattern.same_as(a.pattern)
    shared = BSR.from_state_dict(state)
    assert shared.values.data_ptr() == a.values.data_ptr()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": None}, "lacks values; a BSR's has values, indptr, indices, shape, block, transposed"),
        ({"bias": torch.ones(1)}, "the state dict also has bias"),
        ({"block": None, "weight": torch.ones(1)}, "lacks block and also has weight"),
        ({"shape": torch.tensor([100])}, r"'shape' in .* must be a tensor of 2 whole numbers, not .* \[1\]"),
        ({"shape": torch.tensor([100.0, 70.0])}, "whole numbers, not a torch.Tensor, torch.float32"),
        ({"block": (32, 16)}, r"'block' in the state dict must be a dense torch.Tensor, got tuple"),
        ({"shape": torch.tensor([200, 70])}, "indptr has 5 entries; 200 rows"),
        ({"block": torch.tensor([32, 32])}, "indices"),
        ({"values": torch.ones(8, 32, 16)}, "values in the padding"),
        ({"values": torch.ones(7, 32, 16)}, r"values have shape \(7, 32, 16\)"),
    ],
)  # fmt: skip
def test_a_wrong_state_dict_is_told(change: Mapping[str, Any], message: str):
    state = {**make().state_dict(), **change}
    with pytest.raises(InvalidInput, match=message):
        BSR.from_state_dict({name: part for name, part in state.items() if part is not None})


def test_a_state_dict_that_is_none_is_refused():
    with pytest.raises(InvalidInput, match=r"a mapping of names to tensors, as A\.state_dict"):
        BSR.from_state_dict(torch.ones(3))  # type: ignore[arg-type]


def test_torch_save_of_a_matrix_is_refused_with_both_ways_out():
    for write in (pickle.dumps, lambda a: torch.save(a, io.BytesIO())):
        with pytest.raises(
            InvalidInput, match=r"sparsek\.save.*torch\.save\(A\.state_dict\(\), .*from_state_dict"
        ):
            write(make())


@VIEWS
def test_compiled_it_gives_the_same(view: bool):
    torch._dynamo.reset()
    a = make(view=view)
    b = like(a)

    def run(a: BSR, b: BSR, t: Tensor) -> tuple[Tensor, ...]:
        c = (a * t + b / t - t * (-a)) * 2 - b
        return c.values, c.sum(1), c.sum(0), c.sum(), c.norm(), c.block_norms()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for t in (torch.tensor(3.0), torch.tensor(0.7)):
        for got, right in zip(compiled(a, b, t), run(a, b, t), strict=True):
            torch.testing.assert_close(got, right)
    torch._dynamo.reset()


def test_compiled_the_same_is_refused_as_eagerly():
    t: Any = torch.tensor(2.0)
    a, other = make(), make()
    for run, message in (
        (lambda: t - a, "do not add up"),
        (lambda: a - t, "do not add up"),
        (lambda: a + t, "do not add up"),
        (lambda: a * cast(Any, a), "is not defined"),
        (lambda: a + other, "make both matrices of one pattern object"),
        (lambda: a.block_row_slice(0, 1), "slice outside and hand the slice"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(run, fullgraph=True, backend="aot_eager")()
    torch._dynamo.reset()


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_bits_repeat(no_sync: Callable[[], Any]):
    a = random_bsr(
        1000, 1500, 64, 0.4, pattern="powerlaw", dtype=torch.bfloat16, device="cuda"
    ).requires_grad_()
    b = BSR.unchecked(a.pattern, a.values.detach().clone())

    def run() -> list[Tensor]:
        c = a * 2 + b / 3 - (-a)
        got = [c.sum(), c.sum(0), c.sum(1), c.T.sum(1), c.norm(), c.block_norms(), c.T.block_norms()]
        (grad,) = torch.autograd.grad(torch.cat([each.float().flatten() for each in got]).sum(), a.values)
        return [*got, grad]

    first = run()
    with no_sync():
        second = run()
    assert all(map(torch.equal, first, second))
    dense = (a.to_dense() * 2 + b.to_dense() / 3 + a.to_dense()).double()
    torch.testing.assert_close(first[1].double(), dense.sum(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(first[2].double(), dense.sum(1), rtol=0.02, atol=0.02)


def test_values_written_outside_the_matrix_are_refused_by_save_until_they_are_zeroed(tmp_path: Path) -> None:
    a = BSR.from_dense(torch.ones(40, 24), 16, threshold=0)
    with torch.no_grad():
        a.values.add_(1.0)
    with pytest.raises(InvalidInput, match=r"values outside the 40x24 matrix are not zero.*zero_padding_"):
        save(a, tmp_path / "a.safetensors")
    assert a.T.zero_padding_().norm() == pytest.approx((40 * 24 * 4) ** 0.5)
    save(a, tmp_path / "a.safetensors")
    assert torch.equal(load(tmp_path / "a.safetensors").to_dense(), torch.full((40, 24), 2.0))
