"""spmm under torch.compile, and the torch.library op behind it."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import AotEagerAndRecordGraphs

import sparsek as sk
from sparsek.formats import BSR, BlockPattern
from sparsek.ops import spmm as ops
from tests.ops.operands import pair


@pytest.fixture
def recorder() -> Any:
    """A backend: aot_eager that keeps the graphs it is given."""
    torch._dynamo.reset()
    yield AotEagerAndRecordGraphs()
    torch._dynamo.reset()


def calls(graph: Any) -> list[str]:
    """Names of the operations in a graph."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


COMPILED: dict[str, tuple[Callable[[BSR, Tensor], Tensor], int]] = {
    "A @ B": (lambda a, b: a @ b, 96),
    "spmm(A, B)": (sk.spmm, 96),
    "A.T @ B": (lambda a, b: a.T @ b, 128),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_is_one_node_of_one_graph(name: str, recorder: Any):
    run, k = COMPILED[name]
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(k, 40)
    expected = run(a, b)
    compiled = torch.compile(run, fullgraph=True, backend=recorder)
    assert torch.equal(compiled(a, b), expected)
    assert torch.equal(compiled(a, 2 * b), run(a, 2 * b))
    assert [len(calls(graph)) for graph in recorder.fw_graphs] == [1]
    assert "sparsek.spmm" in calls(recorder.fw_graphs[0])[0]


def test_compiled_the_transposed_index_is_made_in_the_first_call_and_found_by_the_later_ones(recorder: Any):
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(128, 40)
    compiled = torch.compile(lambda a, b: a.T @ b, fullgraph=True, backend=recorder)
    for _ in range(4):
        torch.testing.assert_close(compiled(a, b), a.to_dense().T @ b)
    first, later = map(calls, recorder.fw_graphs)
    assert sum("sparsek.spmm" in call for call in first) == 1
    assert any("sort" in call for call in first)
    assert len(later) == 1


@pytest.mark.parametrize("shape", [(96, 40), (2, 96, 40)], ids=str)
def test_compiled_by_aot_eager_it_gives_the_same(shape: tuple[int, ...]):
    torch._dynamo.reset()
    a, _ = pair(dtype=torch.float32)
    b = torch.randn(shape)
    assert torch.equal(torch.compile(lambda b: a @ b, fullgraph=True, backend="aot_eager")(b), a @ b)


def test_compiled_once_for_every_n(recorder: Any):
    a, _ = pair(dtype=torch.float32)
    compiled = torch.compile(lambda b: a @ b, fullgraph=True, backend=recorder)
    for n in (40, 56, 200):
        b = torch.randn(96, n)
        torch._dynamo.mark_dynamic(b, 1)
        torch.testing.assert_close(compiled(b), a @ b)
    assert len(recorder.fw_graphs) == 1


def test_the_op_plans_once_and_forgets_a_pattern_with_its_matrix(plans_made: list[str]):
    a, b = pair(dtype=torch.float32)
    gc.collect()
    kept = len(ops._PATTERNS)
    args = (a.values, a.pattern.indptr, a.pattern.indices, None, b, list(a.shape), list(a.block), None)
    torch.ops.sparsek.spmm(*args)
    torch.ops.sparsek.spmm(*args)
    assert len(plans_made) == 1
    assert len(ops._PATTERNS) == kept + 1
    del a, args
    gc.collect()
    assert len(ops._PATTERNS) == kept


def test_one_index_list_may_serve_matrices_of_other_blocks():
    a, b = pair(64, 64, 8, 32, torch.float32)
    big = BlockPattern((128, 128), (64, 64), a.pattern.indptr, a.pattern.indices)
    wide = BSR(big, torch.randn(a.nnzb, 64, 64))
    for matrix, dense in ((a, b), (wide, torch.randn(128, 8)), (a, b)):
        p = matrix.pattern
        got = torch.ops.sparsek.spmm(
            matrix.values, p.indptr, p.indices, None, dense, list(matrix.shape), list(matrix.block), None
        )
        torch.testing.assert_close(got, matrix.to_dense() @ dense)


@pytest.mark.parametrize("view", [False, True], ids=["stored", "view"])
@pytest.mark.parametrize("shape", [(96, 40), (2, 96, 7), (96, 0)], ids=str)
def test_the_op_passes_torchs_own_checks(shape: tuple[int, ...], view: bool):
    a, _ = pair(dtype=torch.float32)
    a = pair(96, 128, dtype=torch.float32)[0].T if view else a
    p = a.pattern
    args = (a.values, p.indptr, p.indices, a.order, torch.randn(shape), list(a.shape), list(a.block), None)
    torch.library.opcheck(torch.ops.sparsek.spmm.default, args)


def fails_to_compile(run: Callable[[Tensor], Any], b: Tensor, text: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text):
        torch.compile(run, fullgraph=True, backend="aot_eager")(b)


def test_compiled_a_product_that_could_be_either_side_asks_for_spmm():
    a, _ = pair(dtype=torch.float32)
    both = torch.randn(96, 128)
    fails_to_compile(
        lambda b: a @ b, both, r"does not tell A @ B from B @ A here; write sparsek.spmm\(A, B\)"
    )
    compiled = torch.compile(lambda b: sk.spmm(a, b), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(both), a @ both)


def test_compiled_wrong_operands_are_told_as_eagerly():
    a, _ = pair(dtype=torch.float32)
    fails_to_compile(lambda b: a @ b, torch.randn(95, 40), r"B \[95, 40\]: B needs 96 rows")
    fails_to_compile(lambda b: a @ b, torch.randn(96), "for a vector use B.unsqueeze")
    fails_to_compile(lambda b: b @ a, torch.randn(40, 128), r"use \(A.T @ B.T\).T")
    fails_to_compile(
        lambda b: sk.spmm(a, b, out=torch.empty(128, 40)),
        torch.randn(96, 40),
        "do not go through torch.compile",
    )


@pytest.mark.filterwarnings("ignore:Error detected in GeneratedBackwardFor_sparsek_spmm:UserWarning")
def test_compiled_gradients_are_refused_with_the_same_hint():
    a, b = pair(dtype=torch.float32)
    fails_to_compile(lambda b: a @ b, b.requires_grad_(), "spmm has no gradient yet")
