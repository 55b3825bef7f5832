"""BlockSparseLinear.load_state_dict with another pattern, whatever of the old one is still alive."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsek as sk
from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
# Beside 8 stored blocks: fewer, as many at other places, more.
DENSITIES = {"fewer": 0.2, "as many": 0.4, "more": 0.8}


def layer(density: float = 0.4, seed: int = 5, **more: Any) -> BlockSparseLinear:
    """70 -> 100 features in blocks of 32 x 16, ragged on both sides."""
    return BlockSparseLinear.random(70, 100, (32, 16), density, seed=seed, **more)


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(6, 70, generator=torch.Generator().manual_seed(seed))


def gradients(made: nn.Module) -> list[Tensor]:
    made.zero_grad()
    made(inputs(2)).square().sum().backward()
    return [p.grad for p in made.parameters() if p.grad is not None]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
@pytest.mark.parametrize("learns", [False, True], ids=["x fixed", "x learns"])
def test_another_pattern_learns_while_an_old_loss_lives(
    density: float, mode: str, assign: bool, learns: bool
) -> None:
    made, source = layer(), layer(density, seed=8)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(inputs()).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x = inputs().requires_grad_(learns)
    y = made(x)
    loss = y.square().sum()
    made(inputs()).square().sum().backward()  # and a gradient of the old blocks is there
    with MODES[mode]():
        made.load_state_dict(source.state_dict(), assign=assign)
    assert made.values.grad is None
    assert made.pattern.same_as(source.pattern)
    right = gradients(source)
    for got, wanted in zip(gradients(made), right, strict=True):
        assert torch.equal(got, wanted)
    if not assign:
        before = made.values.detach().clone()
        optimizer.step()
        torch.testing.assert_close(made.values.detach(), before - 0.1 * right[0])
    assert loss.grad_fn is not None


@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
@pytest.mark.parametrize("learns", [False, True], ids=["x fixed", "x learns"])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_an_old_loss_gives_the_new_pattern_no_gradient(density: float, learns: bool, frozen: bool) -> None:
    made = layer()
    loss = made(inputs().requires_grad_(learns)).square().sum()
    if frozen:
        made.values.requires_grad_(False)
    made.load_state_dict(layer(density, seed=8).state_dict())
    assert made.values.requires_grad != frozen
    # Values that the backward pass reads were written to, which torch refuses by itself.
    text = "modified by an inplace operation" if learns else "another pattern.*compute the loss again"
    with pytest.raises(RuntimeError if learns else InvalidInput, match=text):
        loss.backward()
    assert made.values.grad is None
    if not frozen:
        made(inputs()).sum().backward()
        assert made.values.grad is not None


@pytest.mark.parametrize("density", DENSITIES.values(), ids=DENSITIES)
def test_an_assigned_layer_leaves_the_old_parameter_to_its_loss(density: float) -> None:
    made = layer()
    parameter, before = made.values, made.values.detach().clone()
    loss = made(inputs()).square().sum()
    right = gradients(made)[0].clone()
    made.zero_grad()
    loss = made(inputs(2)).square().sum()
    made.load_state_dict(layer(density, seed=8).state_dict(), assign=True)
    assert torch.equal(parameter, before)
    loss.backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, right)
    assert made.values.grad is None


def test_the_same_pattern_keeps_gradient_and_loss_as_torch_does() -> None:
    made = layer()
    made(inputs()).sum().backward()
    gradient, loss = made.values.grad, made(inputs()).sum()
    made.load_state_dict(layer(seed=5).state_dict())
    assert made.values.grad is gradient
    loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_patterns_are_loaded_again_and_again(mode: str) -> None:
    made, losses = layer(), []
    parameter = made.values
    for seed, density in enumerate((0.2, 0.8, 0.4, 0.4, 1.0, 0.2)):
        source = layer(density, seed=seed)
        with MODES[mode]():
            made.load_state_dict(source.state_dict())
        for got, wanted in zip(gradients(made), gradients(source), strict=True):
            assert torch.equal(got, wanted)
        losses.append(made(inputs()).sum())
    assert made.values is parameter


@pytest.mark.parametrize("density", [0.2, 0.4, 0.8])
def test_a_step_that_hooks_into_gradients_goes_on_after_loading(density: float) -> None:
    made, seen = layer(), []
    made.values.register_hook(lambda g: seen.append(tuple(g.shape)))
    made.values.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.shape)))
    loss = made(inputs()).sum()
    source = layer(density, seed=8)
    made.load_state_dict(source.state_dict())
    made(inputs()).sum().backward()
    assert seen == [tuple(source.values.shape)] * 2
    assert loss.requires_grad


def test_a_layer_in_float64_and_on_meta_takes_another_pattern() -> None:
    made, source = layer(dtype=torch.float64), layer(0.8, seed=8, dtype=torch.float64)
    loss = made(inputs().double()).sum()
    made.load_state_dict(source.state_dict())
    made(inputs().double()).sum().backward()
    assert made.values.grad is not None
    assert (made.values.dtype, made.values.grad.shape) == (torch.float64, source.values.shape)
    assert loss.requires_grad
    away = layer().to("meta")
    away.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(away(inputs().double()), source(inputs().double()))


def test_what_is_missing_is_told_if_torch_is_strict() -> None:
    made, source = layer(), layer(0.8, seed=8)
    state = source.state_dict()
    del state["bias"]
    with pytest.raises(RuntimeError, match=r'Missing key.* "bias"'):
        made.load_state_dict(state)
    found = made.load_state_dict(state, strict=False)
    assert found.missing_keys == ["bias"]
    assert torch.equal(made.weight.to_dense(), source.weight.to_dense())


@pytest.mark.parametrize("blocks", [(16, 8), (8, 16)], ids=str)
def test_a_weight_of_an_old_pattern_is_refused(blocks: tuple[int, int]) -> None:
    """Its pattern would be read beyond its values."""
    old, new = (sk.random_bsr(64, 64, 16, count / 16, seed=count) for count in blocks)
    layer = BlockSparseLinear.from_bsr(old)
    weight = layer.weight
    layer.load_state_dict(BlockSparseLinear.from_bsr(new).state_dict())
    x = torch.randn(4, 64)
    for use in (
        lambda: weight @ x.T,
        lambda: x @ weight,
        lambda: weight.T @ x.T,
        lambda: sk.linear(x, weight),
        lambda: sk.spgemm(weight, weight),
        weight.to_dense,
    ):
        with pytest.raises(InvalidInput, match=r"take layer\.weight again"):
            use()
    assert torch.equal(layer.weight.to_dense(), new.to_dense())


@pytest.mark.parametrize("part", ["values", "indptr", "indices"])
@pytest.mark.parametrize("odd", [5, "a", torch.zeros(2).to_sparse(), torch.zeros(2, device="meta")], ids=type)
def test_odd_parts_of_a_state_dict_change_nothing(part: str, odd: Any) -> None:
    layer = BlockSparseLinear.from_bsr(sk.random_bsr(64, 64, 16, 0.5, seed=1))
    before = layer.weight.to_dense()
    state = BlockSparseLinear.from_bsr(sk.random_bsr(64, 64, 16, 1.0, seed=2)).state_dict()
    with pytest.raises(RuntimeError, match=part):
        layer.load_state_dict({**state, part: odd})
    assert torch.equal(layer.weight.to_dense(), before)
