"""Perplexity of a model on texts, and its hidden states to compare; one block on the device at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.models import stream
from sparsek.models.passes import evaluated
from sparsek.nn import SparseLinear
from sparsek.nn.replace import is_linear

WORDS = 128  # whose logits are in float32 at a time


def perplexity(model: Any, batches: Iterable[dict[str, Tensor]], device: torch.device | None = None) -> float:
    """exp of the mean loss of a model of transformers on the labels of batches, or on their next words."""
    lost, count = 0.0, 0
    with _running(model, device):
        for at, batch in enumerate(batches):
            logits, words = stream.run(model, (), batch, at).logits, batch.get("labels")
            if words is None:
                logits, words = logits[:, :-1], batch["input_ids"][:, 1:]
            words = words.flatten().to(logits.device)
            for part, wanted in zip(logits.flatten(0, 1).split(WORDS), words.split(WORDS), strict=True):
                lost += float(functional.cross_entropy(part.float(), wanted, reduction="sum"))
            count += int((words != stream.IGNORED).sum())
    mean = lost / max(1, count)
    return math.exp(mean) if mean < 700 else math.inf


def hidden_means(
    model: Any, batches: Iterable[dict[str, Tensor]], device: torch.device | None = None
) -> Tensor:
    """The mean last hidden state of each text, [texts, features], without padding."""
    found = []
    with _running(model, device):
        for at, batch in enumerate(batches):
            states = stream.run(getattr(model, "base_model", model), (), batch, at)[0].float()
            mask = batch["attention_mask"][..., None].to(states)
            found.append((states * mask).sum(1) / mask.sum(1).clamp(min=1))
    return torch.cat(found)


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
