"""torch.autograd.grad(..., is_grads_batched=True), by which jacobian(vectorize=True) works too."""

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.ops.attention_op import through_op as op
from sparsek.attn.plan.attention import Attended
from tests.ops.gradients import FORMS, inputs_of
from tests.ops.test_gradients import SIZES, takes_slopes
from tests.sums import alike


def leaves_and_result(name: str) -> tuple[list[Tensor], Tensor]:
    form = FORMS[name]
    matrices, tensors = inputs_of(form, SIZES, torch.float64)
    matrices = [a.requires_grad_() for a in matrices]
    tensors = [x.requires_grad_() for x in tensors]
    return [*(a.values for a in matrices), *tensors], form.mine(*matrices, *tensors, kernel=None)


def check(y: Tensor, leaves: list[Tensor]) -> None:
    """Gradients of many items at once are those of each, and have gradients that flow to all items."""
    many = torch.randn(3, *y.shape, dtype=y.dtype, requires_grad=True)
    batched = torch.autograd.grad(y, leaves, many, is_grads_batched=True, create_graph=True)
    each = [torch.autograd.grad(y, leaves, one, create_graph=True) for one in many]
    exact = [torch.stack(of_leaf) for of_leaf in zip(*each, strict=True)]
    for found, right in zip(batched, exact, strict=True):
        assert alike(found, right)
    ones = [torch.ones_like(x) for x in exact]
    of_many, of_each = (torch.autograd.grad(found, many, ones)[0] for found in (batched, exact))
    assert alike(of_many, of_each)


@pytest.mark.parametrize("name", FORMS)
def test_a_product_has_gradients_of_many_items_at_once(name: str):
    leaves, y = leaves_and_result(name)
    check(y, leaves)


@pytest.mark.parametrize("name", ["linear gelu", "mlp silu"])
def test_so_have_layers_that_write_slopes(name: str, monkeypatch: pytest.MonkeyPatch):
    takes_slopes(monkeypatch)
    leaves, y = leaves_and_result(name)
    check(y, leaves)


@pytest.mark.parametrize("through_op", [False, True])
def test_so_has_attention_with_lse_and_without(through_op: bool):
    q, k, v = leaves = [torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = sk.BlockMask.causal(64)
    run: Any = sk.attention
    out, lse = run(q, k, v, mask, return_lse=True)
    if through_op:
        out, lse = op(Attended(q, k, v, mask, return_lse=True))
    for results in ((out,), (lse,), (out, lse)):
        many = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]
        batched = torch.autograd.grad(results, leaves, many, is_grads_batched=True, retain_graph=True)
        for i, one in enumerate(zip(*many, strict=True)):
            for found, exact in zip(
                batched, torch.autograd.grad(results, leaves, one, retain_graph=True), strict=True
            ):
                assert alike(found[i], exact)


@pytest.mark.parametrize("create_graph", [False, True])
def test_vmap_maps_over_gradients_of_attention(create_graph: bool):
    """torch.vmap of torch.autograd.grad (2026-11-26: without create_graph, wrapped tensors came to the kernel)."""
    q, k, v = leaves = [torch.randn(2, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    results: Any = sk.attention(q, k, v, sk.BlockMask.causal(64), return_lse=True)
    many = [torch.randn(3, *x.shape, dtype=x.dtype) for x in results]

    def gradients(*one: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, leaves, one, retain_graph=True, create_graph=create_graph)

    for found, *exact in zip(torch.vmap(gradients)(*many), *map(gradients, *many), strict=True):
        assert alike(found, torch.stack(exact))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", ["attention", *FORMS])
def test_gradients_of_many_items_at_once_go_inside_vmap(name: str):
    if name in FORMS:
        leaves, y = leaves_and_result(name)
    else:
        q, k, v = (torch.randn(1, 2, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
        leaves, y = [q, k, v], sk.attention(q, k, v, sk.BlockMask.causal(64))
    many = torch.randn(2, 3, *y.shape, dtype=y.dtype)

    def batched(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, leaves, grad, is_grads_batched=True, retain_graph=True)

    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in many.flatten(0, 1)]
    for found, *exact in zip(torch.vmap(batched)(many), *each, strict=True):
        assert alike(found.flatten(0, 1), torch.stack(exact))


def test_a_jacobian_may_be_vectorized():
    w = sk.random_bsr(32, 48, 16, 0.5, dtype=torch.float64).requires_grad_()
    x = torch.randn(2, 48, dtype=torch.float64)
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: sk.linear(x, w), x, vectorize=True)
    torch.testing.assert_close(jacobian[1, :, 1], w.to_dense().detach())
