"""spmm under torch.compile, and the torch.library op behind it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops import library_args
from tests.ops.operands import calls, pair
from tests.ops.operands import op_args as args


@pytest.mark.parametrize("kept", [False, True], ids=["never transposed", "transposed before"])
def test_compiled_a_transposed_view_costs_no_node_and_no_second_graph(kept: bool, recorder: Any):
    a, _ = pair(dtype=torch.float32)
    if kept:
        _ = a.T
    b = torch.randn(128, 40)
    compiled = torch.compile(lambda a, b: (a.T @ b, a.T.T.T @ b), fullgraph=True, backend=recorder)
    for _ in range(3):
        for got in compiled(a, b):
            assert torch.equal(got, a.T @ b)
    (graph,) = map(calls, recorder.fw_graphs)
    assert [call.split(".")[0] for call in graph] == ["sparsek", "sparsek"]


def test_compiled_a_view_may_come_in_and_go_out(recorder: Any):
    a, _ = pair(dtype=torch.float32)
    view, b = a.T, torch.randn(96, 40)
    compiled = torch.compile(lambda view, b: (view.T @ b, view.T.T), fullgraph=True, backend=recorder)
    product, back = compiled(view, b)
    assert torch.equal(product, a @ b)
    assert torch.equal(back.to_dense(), view.to_dense())
    made = torch.compile(lambda a: a.T, fullgraph=True, backend=recorder)(a)
    assert torch.equal(made.to_dense(), a.to_dense().T)
    assert torch.equal(made.T.to_dense(), a.to_dense())
    c = torch.randn(128, 40)
    assert torch.equal(made @ c, a.T @ c)


@pytest.mark.parametrize("shape", [(40, 96), (2, 40, 96)], ids=str)
def test_compiled_a_bsr_on_the_right_is_one_node_and_views(shape: tuple[int, ...], recorder: Any):
    a, _ = pair(dtype=torch.float32)
    x = torch.randn(shape)
    compiled = torch.compile(lambda x, a: (x @ a.T, sk.spmm(x, a.T)), fullgraph=True, backend=recorder)
    for got in compiled(x, a):
        assert torch.equal(got, x @ a.T)
    (graph,) = map(calls, recorder.fw_graphs)
    assert sum("sparsek" in call for call in graph) == 2
    assert {call.split(".")[0] + "." + call.split(".")[1] for call in graph} <= {
        "sparsek.spmm",
        "aten.transpose",
        "aten.view",
    }


def test_the_op_plans_once_and_forgets_a_pattern_with_its_matrix(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    gc.collect()
    kept = len(library_args._PATTERNS)
    given = args(a, b)
    torch.ops.sparsek.spmm(*given)
    torch.ops.sparsek.spmm(*given)
    assert a @ b is not None
    assert len(plans_made) == 1
    assert len(library_args._PATTERNS) == kept + 1
    del a, given
    gc.collect()
    assert len(library_args._PATTERNS) == kept


def test_the_op_finds_its_pattern_after_the_object_that_held_it_is_gone(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    given, expected = args(a, b), a.to_dense() @ b
    del a
    gc.collect()
    for _ in range(3):
        torch.testing.assert_close(torch.ops.sparsek.spmm(*given), expected)
    assert len(plans_made) == 1


def test_one_index_list_may_serve_matrices_of_other_blocks():
    a, b = pair(64, 64, 8, 32, torch.float32)
    big = BlockPattern((128, 128), (64, 64), a.pattern.indptr, a.pattern.indices)
    wide = BSR(big, torch.randn(a.nnzb, 64, 64))
    for matrix, dense in ((a, b), (wide, torch.randn(128, 8)), (a, b)):
        got = torch.ops.sparsek.spmm(*args(matrix, dense))
        torch.testing.assert_close(got, matrix.to_dense() @ dense)


@pytest.mark.parametrize(
    ("shape", "view"), [((96, 40), True), ((2, 96, 7), False), ((2, 96, 7), True), ((96, 0), False)], ids=str
)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], view: bool):
    a, _ = pair(dtype=torch.float32)
    a = pair(96, 128, dtype=torch.float32)[0].T if view else a
    learning = BSR.unchecked(a.pattern, a.values.clone().requires_grad_(), a.order)
    for given in (
        args(a, torch.randn(shape)),
        args(learning, torch.randn(shape).requires_grad_(), alpha=2.0),
    ):
        torch.library.opcheck(torch.ops.sparsek.spmm.default, tuple(given))


def test_the_op_has_no_gradient_with_an_epilogue_whose_input_is_not_kept():
    a, b = pair(dtype=torch.float32)
    b.requires_grad_()
    cases: list[dict[str, Any]] = [{"act": "gelu"}, {"act": "relu", "other": torch.ones(128, 40)}]
    for fused in cases:
        c = torch.ops.sparsek.spmm(*args(a, b, **fused))
        with pytest.raises(
            InvalidInput, match=r"no gradient with this epilogue; sparsek.linear and sparsek.swiglu"
        ):
            c.sum().backward()


def fails_to_compile(run: Callable[[Tensor], Any], b: Tensor, text: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(run, fullgraph=True, backend="aot_eager")(b)


def test_compiled_a_product_that_could_be_either_side_asks_for_spmm():
    a, _ = pair(dtype=torch.float32)
    both = torch.randn(96, 128)
    fails_to_compile(
        lambda b: a @ b, both, r"cannot distinguish A @ B from B @ A here; write sparsek.spmm\(A, B\)"
    )
    compiled = torch.compile(lambda b: sk.spmm(a, b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(both), a @ both)


def test_compiled_wrong_operands_are_told_as_eagerly():
    a, _ = pair(dtype=torch.float32)
    fails_to_compile(lambda b: a @ b, torch.randn(95, 40), r"B \[95, 40\]: B needs 96 rows")
    fails_to_compile(lambda b: b.double() @ a, torch.randn(40, 128), "B is torch.float32 and A torch.float64")
    fails_to_compile(
        lambda b: sk.spmm(a, b, out=torch.empty(128, 40)),
        torch.randn(96, 40),
        "do not go through torch.compile",
    )
    plan = sk.plan_spmm(a, torch.randn(96, 40))
    fails_to_compile(lambda b: plan(a, b), torch.randn(96, 40), "do not go through torch.compile")


@pytest.mark.parametrize("dynamic", [None, True])
def test_alpha_may_be_a_symbol(dynamic: bool | None) -> None:
    a, b = pair(dtype=torch.float32)
    torch._dynamo.reset()
    scaled = torch.compile(
        lambda b, alpha: sk.spmm(a, b, alpha=alpha), backend="eager", fullgraph=True, dynamic=dynamic
    )
    for alpha in (2, 3, 5):
        assert torch.equal(scaled(b, alpha), sk.spmm(a, b, alpha=alpha))
