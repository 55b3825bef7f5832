"""What the calls that stand in for others share: options that SparseK does not have, tiles of other sizes."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.attn.mask.cache import values_of
from sparsek.core import arguments
from sparsek.core.arguments import faking, is_fake
from sparsek.core.errors import InvalidInput

PLAIN = (bool, int, float, str, tuple)  # a tensor has no one truth
IMPORT_FROM = dis.opmap["IMPORT_FROM"]
Given = ParamSpec("Given")
Made = TypeVar("Made")


def refusing(
    call: str, **others: tuple[Any, str]
) -> Callable[[Callable[Given, Made]], Callable[Given, Made]]:
    """Makes unknown keyword arguments of a call InvalidInput with their name, where Python raises TypeError.

    Args:
        call: The name of the call in messages.
        **others: Options that SparseK does not have, of this version of the call or of others: the value that changes
            nothing, and what to do instead of others. With that value or None they are accepted, where it is ()
            with an empty list too.
    """

    def wrap(made: Callable[Given, Made]) -> Callable[Given, Made]:
        names = tuple(inspect.signature(made).parameters)
        known = tuple(name for name in names if name != "self")
        refused = tuple((at, name, others[name]) for at, name in enumerate(names) if name in others)

        @functools.wraps(made)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Made:
            for name in [each for each in kwargs if each not in known]:
                if name not in others:
                    raise InvalidInput(f"{call} has no argument {name}; it has {', '.join(known)}")
                require_neutral(call, name, kwargs.pop(name), *others[name])
            for at, name, other in refused:
                require_neutral(call, name, args[at] if at < len(args) else kwargs.get(name), *other)
            return made(*args, **kwargs)

        return called

    return wrap


def absent(module: str, **cures: str) -> Callable[[str], Any]:
    """A module's `__getattr__` for names of the other library that it lacks: ImportError in an import of the name, else
    AttributeError, with what to use instead.
    """

    def look_up(name: str) -> Any:
        text = f"module {module!r} has no attribute {name!r}"
        if name not in cures:
            raise AttributeError(text)
        caller = sys._getframe(1)
        if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == IMPORT_FROM:
            # Python replaces the text of an AttributeError here.
            raise ImportError(f"cannot import name {name!r} from {module!r}: {cures[name]}", name=name)
        raise AttributeError(f"{text}: {cures[name]}")

    return look_up


def readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be checked on the host: it is on the CPU, and has values of its own."""
    traced = torch.compiler.is_compiling() or faking() or is_fake(x)
    return x.device.type == "cpu" and not (traced or is_functorch_wrapped_tensor(x))


def require_neutral(call: str, name: str, value: Any, neutral: Any = None, instead: str = "") -> None:
    """InvalidInput unless an option that `call` does not have is None or has the value that changes nothing."""
    truth = isinstance(value, bool) and not isinstance(neutral, bool)  # False is no 0.0
    if value is None or (isinstance(value, PLAIN) and value == neutral and not truth):
        return
    if neutral == () and isinstance(value, list) and not value:
        return
    right = "None" if neutral in (None, ()) else f"{neutral!r} or None"
    raise InvalidInput(
        f"{call} has no {name}, got {arguments.shown(value)}; it must be {right}{instead and f': {instead}'}"
    )


def ints_on(name: str, value: Any, device: torch.device, ndim: int) -> Tensor:
    """An int32 or int64 tensor [..] of `ndim` dims on this device, without the wrappers of torch.func."""
    arguments.tensor(name, value, (torch.int32, torch.int64), ndim)
    arguments.one_device(name + " is", value.device, "q is", device)
    return values_of(value, name)


def check_shape(name: str, x: Tensor, shape: tuple[int, ...], of: str) -> None:
    """InvalidInput unless a tensor has this shape; `of` describes it."""
    if tuple(x.shape) != shape:
        raise InvalidInput(f"{name} is {list(x.shape)}; it must be {list(shape)}, {of}")


def check_values(name: str, x: Tensor, wrong: Tensor, right: str) -> None:
    """InvalidInput with the first of the wrong values, and what is right."""
    found = torch.nonzero(wrong)
    if found.numel():
        at = found[0].tolist()
        raise InvalidInput(f"{name}{at} is {int(x[tuple(at)])}; {right}")


def check_operands(q: Any, k: Any, v: Any, dims: str) -> None:
    """InvalidInput unless q, k and v are dense tensors of as many dims as "[B, H, S, D]" names."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if arguments.dense(name, x).ndim != dims.count(",") + 1:
            raise InvalidInput(f"{name} is {list(x.shape)}; it must be {dims}")


def cut_side(side: int) -> tuple[int, int] | None:
    """(block, parts) with side = block * parts and block 128 or 64; None where no such block divides it."""
    for block in (128, 64):
        if side % block == 0:
            return block, side // block
    return None


def cut_map(block_map: Tensor, parts: tuple[int, int]) -> Tensor:
    """A block map [..., Mb, Nb] in which each block is parts[0] x parts[1] smaller ones."""
    for dim, times in zip((-2, -1), parts, strict=True):
        if times > 1:
            block_map = block_map.repeat_interleave(times, dim)
    return block_map


def cut_lengths(lengths: Tensor, block: int, parts: int) -> Tensor:
    """Valid keys [..., Nb] of blocks of block * parts keys, as those of blocks of `block`."""
    if parts == 1:
        return lengths
    first = torch.arange(parts, dtype=lengths.dtype, device=lengths.device) * block
    return (lengths[..., None] - first).clamp(0, block).flatten(-2)
