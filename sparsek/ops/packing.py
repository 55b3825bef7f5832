"""Registers the GPU kernels that pack to blocks and to 2:4, round to FP8, and make masks.

The first CUDA tensor loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsek.core.arguments import TENSORS
from sparsek.core.operations import KERNELS
from sparsek.mask.choice import Choice, Parts
from sparsek.matrix import convert
from sparsek.matrix.bsr import BSR
from sparsek.ops import bound, library_args
from sparsek.ops.bound import Calls, Slot

_calls = Calls()


def _kernel(
    name: str, function: str, *tensors: Tensor | None, room: str = "pack"
) -> Callable[..., Any] | None:
    """A function of a folder of kernels; None, for a fallback to torch, without Triton or if calls are traced."""
    if library_args.traced() or not library_args.are_plain(*tensors):
        return None
    try:
        return getattr(import_module(f"sparsek.kernels.{room}.{name}"), function)
    except ImportError:
        return None


def _again(what: Hashable, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """`run()`, by a recorded call if there is one."""
    found = bound.repeat(_calls, what, tensors)
    return found.run(run) if found.__class__ is Slot else found


def _pack_bsr(w: Tensor, block: tuple[int, int], rule: convert.Rule) -> BSR | None:
    kernel = _kernel("to_bsr", "pack_bsr", w, rule.mask)
    return None if kernel is None else kernel(w, block, rule, _again)


def _pack_bsr_again(w: Tensor, block: Any, keep: Any, scope: Any) -> BSR | None:
    """What a recorded call with the same options gives, which had them checked; None if there is none."""
    sides = (block, block) if block.__class__ is int else block
    what = sides, keep, scope
    try:
        if what not in _calls.recent or w.__class__ not in TENSORS:
            return None
    except TypeError:  # they are not what was checked
        return None
    found = bound.repeat(_calls, what, (w,))
    # While the GPU works: True and 1.0 are found by the key of 1, which was checked.
    if found.__class__ is Slot or keep.__class__ is not float or {*map(type, sides)} != {int}:
        return None
    return _loaded("finished")(found, (w.shape[0], w.shape[1]), sides)


@cache
def _loaded(name: str) -> Callable[..., Any]:
    """A function of kernels/pack/to_bsr.py, which is loaded once a call is recorded."""
    return getattr(import_module("sparsek.kernels.pack.to_bsr"), name)


def _pack24(w: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    kernel = _kernel("to_24", "pack24", w, mask)
    return None if kernel is None else kernel(w, mask)


def _unpack24(values: Tensor, meta: Tensor) -> Tensor | None:
    kernel = _kernel("to_24", "unpack24", values, meta)
    return None if kernel is None else kernel(values, meta)


def _round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    kernel = _kernel("to_fp8", "round_rows", x)
    return None if kernel is None else kernel(x, dtype)


def _round_heads(x: Tensor, scale: Tensor, rows: int, stored: int, turned: bool) -> Tensor | None:
    kernel = _kernel("heads_to_fp8", "round_heads", x, scale)
    return None if kernel is None else kernel(x, scale, rows, stored, turned)


def _choose_blocks(c: Choice) -> Parts | None:
    tensors = (c.given, c.lengths, c.limit, c.always, c.counts)
    plain = [each for each in tensors if isinstance(each, Tensor)]
    kernel = _kernel("choose", "choose_blocks", *plain, room="mask")
    return None if kernel is None else kernel(c)


KERNELS.update(
    pack_bsr=_pack_bsr,
    pack_bsr_again=_pack_bsr_again,
    pack24=_pack24,
    unpack24=_unpack24,
    round_rows=_round_rows,
    round_heads=_round_heads,
    choose_blocks=_choose_blocks,
)
