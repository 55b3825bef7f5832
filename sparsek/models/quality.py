"""Perplexity of a model on texts, its hidden states, and its times to compare."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.core.clock import time_rounds
from sparsek.core.errors import InvalidInput, first_line
from sparsek.models import stream
from sparsek.models.passes import evaluated
from sparsek.nn import SparseLinear
from sparsek.nn.replace import is_linear

TIMED = 3  # rounds in which modules are timed
WORDS = 128  # whose logits are in float32 at a time


def perplexity(model: Any, batches: Iterable[dict[str, Tensor]], device: torch.device | None = None) -> float:
    """exp of the mean loss of a model of transformers on the labels of batches, or on their next words."""
    lost, count = 0.0, 0
    with _running(model, device):
        for at, batch in enumerate(batches):
            logits, words = stream.run(model, (), batch, f"batch {at}").logits, batch.get("labels")
            if words is None:
                logits, words = logits[:, :-1], batch["input_ids"][:, 1:]
            words = words.flatten().to(logits.device)
            for part, wanted in zip(logits.flatten(0, 1).split(WORDS), words.split(WORDS), strict=True):
                lost += float(functional.cross_entropy(part.float(), wanted, reduction="sum"))
            count += int((words != stream.IGNORED).sum())
    mean = lost / max(1, count)
    return math.inf if mean >= 700 else math.exp(mean)


def hidden_means(
    model: Any, batches: Iterable[dict[str, Tensor]], device: torch.device | None = None
) -> Tensor:
    """The mean last hidden state of each text, [texts, features], without padding."""
    found = []
    with _running(model, device):
        for at, batch in enumerate(batches):
            states = stream.run(getattr(model, "base_model", model), (), batch, f"batch {at}")[0].float()
            mask = batch["attention_mask"][..., None].to(states)
            found.append((states * mask).sum(1) / mask.sum(1).clamp(min=1))
    return torch.cat(found)


def seconds_of(dense: nn.Module, sparse: nn.Module, given: stream.Batch) -> tuple[float, float]:
    """The seconds of a dense module and of the sparse one on the same arguments, in interleaved rounds."""
    args, kwargs = given
    calls = {"dense": lambda: dense(*args, **kwargs), "sparse": lambda: sparse(*args, **kwargs)}
    times = time_rounds(calls, device=stream.device_of(sparse), rounds=TIMED, inner_ms=5.0, settle_ms=50.0)
    return times["dense"].median / 1e3, times["sparse"].median / 1e3


def copied(name: str, module: nn.Module, shared: bool = False) -> nn.Module:
    """A copy of a module, or one on the same tensors, whose layers may be replaced alone."""
    tensors = (*module.parameters(), *module.buffers()) if shared else ()
    try:
        return copy.deepcopy(module, {id(each): each for each in tensors})
    except (RuntimeError, TypeError) as error:  # weights that old parametrizations compute, locks, files
        raise InvalidInput(f"{name} cannot be copied: {first_line(error)}") from error


def inputs_of(model: nn.Module, layers: Mapping[str, nn.Module], batch: stream.Batch) -> dict[str, Tensor]:
    """Inputs like those that layers get first in a run of the model on a batch, normally distributed."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def see(_: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            found.setdefault(name, torch.randn(x.shape, dtype=x.dtype, device=x.device))

        return see

    hooks = [layer.register_forward_pre_hook(note(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        stream.run(model, *batch, "the batch of measure=")
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _running(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """The model without gradients, its repeated blocks and other linear layers on a device while they run."""
    home = stream.device_of(model)
    moving: list[nn.Module] = []
    if device is not None and device != home:
        stacks = stream.stacks_of(model)
        moving = [block for stack in stacks for block in stack.blocks.values()]
        moving += [
            layer
            for name, layer in model.named_modules()
            if (is_linear(layer) or isinstance(layer, SparseLinear))
            and not any(stack.has(name) for stack in stacks)
        ]
    hooks = []
    for module in moving:
        hooks.append(module.register_forward_pre_hook(_enter(device), with_kwargs=True))
        hooks.append(module.register_forward_hook(_leave(home)))
    try:
        with evaluated(model), torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in moving:
            module.to(home)


def _enter(device: Any) -> Callable[..., Any]:
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        module.to(device)
        return stream.moved((args, kwargs), device)

    return enter


def _leave(home: torch.device) -> Callable[..., Any]:
    def leave(module: nn.Module, args: Any, returned: Any) -> Any:
        module.to(home)
        return stream.moved(returned, home)

    return leave
