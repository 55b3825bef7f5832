"""Builders of masks that are called with other numbers at every step: their launches are recorded and repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsek.core.operations import by_kernel
from sparsek.core.tracing import CONSTANT
from sparsek.mask.traced import node, register

if TYPE_CHECKING:
    from sparsek.mask.mask import BlockMask

Given = ParamSpec("Given")
Made = TypeVar("Made")
_TENSORS = (Tensor, torch.nn.Parameter)
_compiling = torch.compiler.is_compiling
_inference = torch.is_inference_mode_enabled


def may_repeat(x: Tensor) -> bool:
    """Whether a call that reads `x` may be recorded now."""
    return x.__class__ in _TENSORS and x.is_cuda and not _compiling()


def recorded(name: str, tensors: Sequence[Tensor], options: Hashable, build: Callable[[], Made]) -> Made:
    """What `build()` makes of these tensors on a GPU, and of `options`; from the third such call by the launches of the
    second one.
    """
    if not _inference():
        return by_kernel("mask_again", name, tensors, options, build)
    # No backward pass could save what is made in it, and no later call with a gradient repeat that.
    with torch.inference_mode(False):
        return by_kernel("mask_again", name, tensors, options, build)


def repeated(make: Callable[Given, BlockMask]) -> Callable[Given, BlockMask]:
    """For builders that read tensors on a GPU. From the third call with the same options, and tensors of the same
    shapes, strides and dtypes, the launches of `make` are repeated, without its checks: see ops/mask_calls.py.

    All arguments but tensors must be hashable, or the call is not repeated.
    """
    name = make.__qualname__

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> BlockMask:
        if _compiling():
            return make(*args, **kwargs) if CONSTANT else node(recipe, args, kwargs)
        tensors: list[Any] = []
        options: list[Any] = [*kwargs]
        for each in (*args, *kwargs.values()):
            kind = each.__class__
            options.append(kind)
            if kind in _TENSORS:
                tensors.append(each)
            elif isinstance(each, Tensor):
                return make(*args, **kwargs)
            else:
                options.append(each)
        if not tensors or not tensors[0].is_cuda:
            return make(*args, **kwargs)
        key = tuple(options)
        try:
            hash(key)
        except TypeError:
            return make(*args, **kwargs)
        return recorded(name, tensors, key, lambda: make(*args, **kwargs))

    recipe = register(make, made)
    return made
