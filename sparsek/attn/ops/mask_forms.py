"""Registers the GPU kernels that make masks, and the one that rounds q, k and v to FP8. The first tensor on a GPU loads
them. Without Triton, or if calls are traced, numpy and torch make the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparsek.attn.mask.build.selection import Selection
from sparsek.core.operations import KERNELS
from sparsek.engine.call.transforms import function_of


def _registered(module: str, function: str) -> Callable[..., Any]:
    def make(*given: Any) -> Any:
        kernel = function_of(module, function)
        return None if kernel is None else kernel(*given)

    return make


def _choose_blocks(made: Sequence[Any], c: Selection) -> tuple[Tensor, ...] | None:
    tensors = (c.given, c.lengths, c.limit, c.always, c.counts)
    plain = [each for each in tensors if isinstance(each, Tensor)]
    kernel = function_of("sparsek.attn.kernels.mask.choose", "choose_blocks", *plain)
    return None if kernel is None else kernel(made, c)


def _round_heads(x: Tensor, scale: Tensor, rows: int, stored: int, turned: bool) -> Tensor | None:
    kernel = function_of("sparsek.attn.kernels.forward.heads_to_fp8", "round_heads", x, scale)
    return None if kernel is None else kernel(x, scale, rows, stored, turned)


KERNELS.update(
    mask_of_blocks=_registered("sparsek.attn.kernels.mask.forms", "blocks"),
    mask_of_band=_registered("sparsek.attn.kernels.mask.forms", "band"),
    mask_of_bigbird=_registered("sparsek.attn.kernels.mask.bigbird", "bigbird"),
    mask_of_documents=_registered("sparsek.attn.kernels.mask.documents", "documents"),
    choose_blocks=_choose_blocks,
    round_heads=_round_heads,
)
