"""Registers the GPU kernels that pack to blocks and to 2:4, transpose patterns, and round to FP8. The first CUDA tensor
loads them.
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
from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import Calls, Slot
from sparsek.engine.call.transforms import function_of, kernel_of
from sparsek.products.formats import convert
from sparsek.products.formats.bsr import BSR

_calls = Calls()


def _again(what: Hashable, tensors: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """`run()`, by a recorded call if there is one."""
    found = recorded_calls.repeat(_calls, what, tensors)
    return found.run(run) if found.__class__ is Slot else found


def _pack_bsr(w: Tensor, block: tuple[int, int], rule: convert.Rule) -> BSR | None:
    kernel = function_of("sparsek.products.kernels.pack.to_bsr", "pack_bsr", w, rule.mask)
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
    found = recorded_calls.repeat(_calls, what, (w,))
    # While the GPU works: True and 1.0 are found by the key of 1, which was checked.
    if found.__class__ is Slot or keep.__class__ is not float or {*map(type, sides)} != {int}:
        return None
    return _loaded("finished")(found, (w.shape[0], w.shape[1]), sides)


def _round_rows(x: Tensor, dtype: torch.dtype, together: bool) -> tuple[Tensor, Tensor] | None:
    kernel = function_of("sparsek.products.kernels.pack.to_fp8", "round_rows", x)
    if kernel is None or together:  # inside a product, which is a recorded call itself
        return None if kernel is None else kernel(x, dtype, together)
    return _again(("round_rows", dtype), (x,), lambda: kernel(x, dtype))


@cache
def _loaded(name: str) -> Callable[..., Any]:
    """A function of products/kernels/pack/to_bsr.py, which is loaded once a call is recorded."""
    return getattr(import_module("sparsek.products.kernels.pack.to_bsr"), name)


KERNELS.update(
    pack_bsr=_pack_bsr,
    pack_bsr_again=_pack_bsr_again,
    pack24=kernel_of("sparsek.products.kernels.pack.to_24", "pack24"),
    unpack24=kernel_of("sparsek.products.kernels.pack.to_24", "unpack24"),
    transposed_lists=kernel_of("sparsek.products.kernels.pack.transpose", "transposed_lists"),
    round_rows=_round_rows,
)
