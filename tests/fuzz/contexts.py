"""Contexts in which the fuzz makes calls, and tensors that are not plain.

A context is a mode of autograd or autocast, a dispatch mode or a transform of torch.func; it runs a call.
A transform maps over, or differentiates, one float tensor of the arguments and all float tensors of the result; without
such an argument the call is made as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from sparsek.core.arguments import is_ended, is_fake

UNINITIALIZED: Any = torch.nn.UninitializedParameter
Called = Callable[..., Any]
Arguments = dict[str, Any]


class Watching(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "a dispatch mode": Watching,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
}
QUIET: tuple[Callable[[], Any], ...] = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)


def _pulled_back(f: Called, x: Tensor, quiet: Callable[[], Any]) -> None:
    out, back, *_ = torch.func.vjp(f, x)
    with quiet():
        back([torch.ones_like(each) for each in out])


TRANSFORMS: dict[str, Callable[[Called, Tensor, Callable[[], Any]], Any]] = {
    "vjp": _pulled_back,
    "grad": lambda f, x, quiet: torch.func.grad(lambda x: sum(each.sum() for each in f(x)))(x),
    "vmap": lambda f, x, quiet: torch.func.vmap(f, randomness="same")(torch.stack((x, x))),
    "jvp": lambda f, x, quiet: torch.func.jvp(f, (x,), (x,)),
    "vjp of vmap": lambda f, x, quiet: _pulled_back(torch.func.vmap(f, randomness="same"), x[None], quiet),
    "vmap of vjp": lambda f, x, quiet: torch.func.vmap(
        lambda x: _pulled_back(f, x, quiet) or x, randomness="same"
    )(x[None]),
    "vjp in a dispatch mode": lambda f, x, quiet: _watched(lambda: _pulled_back(f, x, quiet)),
}


def _watched(run: Callable[[], Any]) -> Any:
    with Watching():
        return run()


def drawn(random: Random) -> str:
    """The name of a context: "" for none, half of the time."""
    return random.choice(("", random.choice((*MODES, *TRANSFORMS))))


def run(context: str, random: Random, called: Called, arguments: Arguments) -> Any:
    """The result of the call in a context; None in a transform, which wraps it."""
    if context == "inference_mode" and any(isinstance(x, TwoTensor) for x in arguments.values()):
        context = "no_grad"  # torch makes none there
    if context in MODES:
        with MODES[context]():
            return called(**arguments)
    at = _differentiable(arguments)
    if any(isinstance(x, Tensor) and (is_ended(x) or is_fake(x)) for x in arguments.values()):
        at = []  # inside a transform nothing tells what is mapped by an ended one, and torch fails on fakes
    if context not in TRANSFORMS or not at:
        return called(**arguments)
    name, quiet = random.choice(at), random.choice(QUIET)

    def f(x: Tensor) -> list[Tensor]:
        found = _pytree.tree_leaves(called(**{**arguments, name: x}))
        return [each for each in found if isinstance(each, Tensor) and each.is_floating_point()] or [x.sum()]

    TRANSFORMS[context](f, arguments[name].detach(), quiet)
    return None


def _differentiable(arguments: Arguments) -> list[str]:
    return [
        name
        for name, x in sorted(arguments.items())
        if type(x) is Tensor and not x.is_nested and x.layout == torch.strided and x.is_floating_point()
    ]


def _nested(layout: torch.layout = torch.strided) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(64, 64), torch.ones(128, 64)], layout=layout)


def _ended(transform: Any, x: Tensor) -> Tensor:
    """A tensor that was made inside a transform of torch.func and outlives it."""
    kept: list[Tensor] = []
    transform(lambda x: kept.append(x * 1) or x)(x)
    return kept[0]


@functools.cache  # garbage collection looks at all that there is, again and again, while it is made
def _deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(10**5):
        made = [made]
    return made


ODD: dict[str, Callable[[], Any]] = {
    "tensor nested": _nested,
    "tensor jagged": lambda: _nested(torch.jagged),
    "tensor mkldnn": lambda: torch.ones(64, 64).to_mkldnn(),
    "tensor fake": lambda: FakeTensorMode().from_tensor(torch.ones(64, 64)),
    "tensor of an ended vjp": lambda: _ended(lambda f: lambda x: torch.func.vjp(f, x), torch.ones(64, 64)),
    "tensor of an ended vmap": lambda: _ended(torch.func.vmap, torch.ones(2, 64, 64)),
    "tensor of two": lambda: TwoTensor(torch.ones(64, 64), torch.ones(64, 64)),
    "masked tensor": lambda: torch.masked.masked_tensor(torch.ones(64, 64), torch.ones(64, 64) > 0),
    "LazyLinear.weight": lambda: torch.nn.LazyLinear(8).weight,
    "UninitializedBuffer": torch.nn.UninitializedBuffer,
    "LazyLinear": lambda: torch.nn.LazyLinear(8),
    "a deep list": _deep,
    "a 0-dim array": lambda: np.array(64),
}


def odd_forms(x: Tensor) -> dict[str, Callable[[], Any]]:
    """Tensors that are not plain, of the shape and dtype of x where they have one."""
    return {
        "nested": lambda: torch.nested.nested_tensor([x, x]),
        "jagged": lambda: torch.nested.nested_tensor([x, x], layout=torch.jagged),
        "mkldnn": lambda: x.float().to_mkldnn(),
        "fake": lambda: FakeTensorMode().from_tensor(x),
        "quantized": lambda: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        "of an ended vjp": lambda: _ended(lambda f: lambda x: torch.func.vjp(f, x), x),
        "of an ended vmap": lambda: _ended(torch.func.vmap, x[None]),
        "of two": lambda: TwoTensor(x, x.clone()),
        "uninitialized": lambda: UNINITIALIZED(requires_grad=False, dtype=x.dtype),
    }
