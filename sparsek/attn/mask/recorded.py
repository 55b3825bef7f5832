"""Masks that are new in every call: the launches of their builders are recorded and repeated, and so are calls with
such masks (engine/call/recorded_calls.py), which take the base as an operand; a schedule is made anew in each.
torch.compile traces builders (traced.py).

A mask that is used again and again gets a plan of its own instead, whose schedule is kept. So does one whose
predecessor of its layout was used so, and the first of a layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsek.attn.mask.data import MaskData
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.readback import DeferredSizes
from sparsek.attn.mask.traced import constant_of, node, register
from sparsek.core.operations import by_kernel
from sparsek.core.tracing import CONSTANT

FEW = 4  # attention calls with one mask; from the next one on it has a plan of its own
Given = ParamSpec("Given")
Made = TypeVar("Made", bound=MaskData)
_TENSORS = (Tensor, torch.nn.Parameter)
_compiling = torch.compiler.is_compiling
_inference = torch.is_inference_mode_enabled


def repeated(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """For builders that read tensors on a GPU. From the third call with the same options, and tensors of the same
    shapes, strides and dtypes, the launches of `make` are repeated, without its checks: see attn/ops/mask_calls.py.

    All arguments but tensors must be hashable, or the call is not repeated. Nor is one that reads values on the host.
    """
    name = make.__qualname__

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if _compiling():
            return make(*args, **kwargs) if CONSTANT else node(recipe, args, kwargs)
        tensors: list[Tensor] = []
        key = _key(args, kwargs, tensors)
        if key is None or not tensors or not tensors[0].is_cuda:
            return make(*args, **kwargs)
        return _recorded(name, tensors, key, lambda: make(*args, **kwargs))

    recipe = register(make, made)
    return made


def of_options(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """For builders that read no tensor, which `repeated` would do the same for. Inside torch.compile their masks are
    constants.
    """
    name = make.__qualname__

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if _compiling():
            return make(*args, **kwargs) if CONSTANT else constant_of(recipe, args, kwargs)
        device: Any = kwargs.get("device")
        on = None if device is None else _no_operand(device)
        tensors: list[Tensor] = []
        key = None if on is None else _key(args, kwargs, tensors)
        if on is None or key is None or tensors:
            return make(*args, **kwargs)
        return _recorded(name, [on], key, lambda: make(*args, **kwargs))

    recipe = register(make, made)
    return made


def _key(args: Sequence[Any], kwargs: dict[str, Any], tensors: list[Tensor]) -> Hashable | None:
    """The arguments but for tensors, which are added to `tensors`; None for a subclass of them, for what has no hash,
    and for a policy that may equal another one and choose differently.
    """
    options: list[Any] = [*kwargs]
    for each in (*args, *kwargs.values()):
        kind = each.__class__
        options.append(kind)
        if kind in _TENSORS:
            tensors.append(each)
        elif isinstance(each, Tensor) or (getattr(kind, "of_fields", False) and not is_determined(each)):
            return None
        else:
            options.append(each)
    key = tuple(options)
    try:
        hash(key)
    except Exception:  # an option's own hash may raise anything
        return None
    return key


def is_determined(policy: Any) -> bool:
    """Whether class and fields determine a policy, which cannot change: a frozen dataclass, or a class without
    attributes. Others may change between calls, or be equal and choose differently.
    """
    names = _fields_of(policy.__class__)
    if names is None or not policy.__dict__.keys() <= names:
        return False
    return all(is_determined(each) for each in policy.__dict__.values() if getattr(each, "of_fields", False))


@functools.lru_cache(maxsize=256)
def _fields_of(kind: type[Any]) -> frozenset[str] | None:
    """The names of the fields of a class; None if they may be written to, or == leaves some out."""
    if not is_dataclass(kind):
        return frozenset()
    params: Any = getattr(kind, "__dataclass_params__")  # noqa: B009
    found = fields(kind)
    fixed = params.frozen and params.eq and all(each.compare and each.hash is not False for each in found)
    return frozenset(each.name for each in found) if fixed else None


def _recorded(name: str, tensors: Sequence[Tensor], options: Hashable, build: Callable[[], Made]) -> Made:
    if not _inference():
        return by_kernel("mask_again", name, tensors, options, build)
    # No backward pass could save what is made in it, and no later call with a gradient repeat that.
    with torch.inference_mode(False):
        return by_kernel("mask_again", name, tensors, options, build)


def _no_operand(device: Any) -> Tensor | None:
    """A tensor without elements on a GPU, for recorded calls that read none; None for another device."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None  # which the builder refuses
    if found.type != "cuda" or not torch.cuda.is_available():
        return None
    return _empty_on(torch.cuda.current_device() if found.index is None else found.index)


@functools.lru_cache(maxsize=64)
def _empty_on(index: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.int32, device=torch.device("cuda", index))


def fresh_layout(mask: MaskData, *, counting: bool = False) -> MaskLayout | None:
    """The layout of a mask whose plan is not worth keeping; None for any other. `counting`: this is one more use."""
    uses, layout = mask._memo.get("uses"), mask._layout
    if uses is None or layout is None:
        return None
    if uses.passing is None:
        last, layout.last = layout.last, uses
        uses.passing = last is not None and last.count <= FEW
    if counting:
        uses.count += 1
        if uses.count == FEW + 1:
            for each in mask._memo.get("readbacks", ()):
                if isinstance(each, DeferredSizes):
                    each.begin(mask)
    # True sizes may have replaced the bounds by which calls of this layout allocate.
    passing = uses.passing and uses.count <= FEW
    return layout if passing and mask.sizes.exact == layout.fields["sizes"].exact else None
