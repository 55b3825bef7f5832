"""Optimizers of a BlockSparseLinear whose pattern changes: gradients and moments of old blocks are not used."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsek.core.errors import InvalidInput
from sparsek.nn import BlockSparseLinear
from tests.nn.test_loading import gradients, inputs, layer, other, write
from tests.sums import alike


def step(made: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradients(made)
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("loader", ["load_state_dict", "written to"])
@pytest.mark.parametrize("density", [0.4, 0.8], ids=["as many", "more"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_of_other_blocks_are_refused(kind: str, density: float, loader: str) -> None:
    made, right = layer(), other(density=density)
    optimizer = OPTIMIZERS[kind](made.parameters())
    step(made, optimizer)
    if loader == "written to" and density == 0.4:
        write(made, right)
    else:
        made.load_state_dict(right.state_dict())
    before = made.values.detach().clone()
    for _ in range(2):
        with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop\(layer\.values\)"):
            step(made, optimizer)
    assert torch.equal(made.values, before)
    optimizer.state.pop(made.values)
    step(made, optimizer)
    step(made, optimizer)


def even(seed: int) -> BlockSparseLinear:
    """A layer whose values fit any pattern of as many blocks."""
    return BlockSparseLinear.random(96, 64, 32, 0.5, seed=seed)


def learn(made: nn.Module) -> None:
    made(torch.ones(2, 96)).square().sum().backward()


GRADIENTS = {"SGD": lambda p: torch.optim.SGD(p, lr=0.1), **OPTIMIZERS}


@pytest.mark.parametrize("called", [False, True], ids=["", "called again"])
@pytest.mark.parametrize("more", ["added to", "clipped", "replaced"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_call_with_other_buffers_leaves_gradient_and_moments(kind: str, more: str, called: bool) -> None:
    made, right = even(1), even(1)
    buffers = dict(even(2).named_buffers())
    optimizers = [GRADIENTS[kind](each.parameters()) for each in (made, right)]
    for _ in range(2):
        for each in (made, right):
            each.zero_grad()
            learn(each)
        torch.func.functional_call(made, buffers, (torch.ones(2, 96),))
        if called:
            made(torch.ones(2, 96))
        for each in (made, right):
            if more == "clipped":
                nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            elif more == "replaced":
                each.values.grad = each.values.grad * 2  # type: ignore[operator]
            else:
                learn(each)
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(made.values, right.values)


@pytest.mark.parametrize("begin", ["zero_grad", "zeros", "backward", "closure", "converted"])
def test_a_gradient_of_other_blocks_is_neither_used_nor_added_to(begin: str) -> None:
    made, right = even(1), even(2)
    optimizers = [GRADIENTS["SGD"](each.parameters()) for each in (made, right)]
    old = copy.deepcopy(made)
    learn(made)
    for source in (right, old):  # and back
        write(made, source)
        made(torch.ones(2, 96))
    gradient = made.values.grad
    write(made, right)
    made(torch.ones(2, 96))
    assert made.values.grad is gradient
    nn.utils.clip_grad_norm_(made.parameters(), 0.1)
    with pytest.raises(InvalidInput, match=r"is of its old blocks.* optimizer\.zero_grad\(\)"):
        optimizers[0].step()
    assert torch.equal(made.values, right.values)
    if begin == "converted":
        made.double().float()
        assert made.values.grad is None
    elif begin != "backward":
        made.zero_grad(set_to_none=begin != "zeros")
    made.bias.grad = None  # type: ignore[union-attr]
    for each, optimizer in zip((made, right), optimizers, strict=True):
        if begin == "closure":
            learn(each)
            each.zero_grad()
            optimizer.step(lambda each=each: learn(each))
        else:
            learn(each)
            optimizer.step()
    assert torch.equal(made.values, right.values)


def test_a_compiled_step_refuses_moments_of_other_blocks() -> None:
    torch._dynamo.reset()
    made = even(1)
    optimizer = OPTIMIZERS["AdamW"](made.parameters())
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        learn(made)
        compiled()
    made.load_state_dict(even(2).state_dict())
    learn(made)
    with pytest.raises(InvalidInput, match=r"optimizer\.state\.pop"):
        compiled()
    optimizer.state.pop(made.values)
    compiled()
    torch._dynamo.reset()


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_resumed_run_goes_on_in_whatever_order_it_loads(first: str, stepped: bool) -> None:
    saved, made = other(), layer()
    trained, optimizer = (OPTIMIZERS["AdamW"](each.parameters()) for each in (saved, made))
    step(saved, trained)
    if stepped:
        step(made, optimizer)
    states = copy.deepcopy((saved.state_dict(), trained.state_dict()))
    loads = [lambda: made.load_state_dict(states[0]), lambda: optimizer.load_state_dict(states[1])]
    for load in loads if first == "model" else loads[::-1]:
        load()
    for _ in range(2):
        step(made, optimizer)
        step(saved, trained)
    assert torch.equal(made.values, saved.values)


def test_moments_that_are_carried_over_and_patterns_that_come_back_are_taken() -> None:
    made = layer()
    state, optimizer = copy.deepcopy(made.state_dict()), OPTIMIZERS["AdamW"](made.parameters())
    step(made, optimizer)
    made.load_state_dict(other().state_dict())
    made.load_state_dict(state)
    step(made, optimizer)
    made.load_state_dict(other().state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[made.values][name].zero_()
    step(made, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_distributed_restores_pattern_and_moments(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    saved, made = nn.Sequential(other()), nn.Sequential(layer())
    trained, optimizer = (OPTIMIZERS["AdamW"](each.parameters()) for each in (saved, made))
    step(saved, trained)
    step(made, optimizer)
    dcp.save(dict(zip("mo", get_state_dict(saved, trained), strict=True)), checkpoint_id=tmp_path)
    parts = get_state_dict(made, optimizer)
    dcp.load(dict(zip("mo", parts, strict=True)), checkpoint_id=tmp_path)
    set_state_dict(made, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])
    assert alike(made(inputs()), saved(inputs()))
    step(saved, trained)
    step(made, optimizer)
    assert torch.equal(made[0].values, saved[0].values)  # type: ignore[arg-type]
