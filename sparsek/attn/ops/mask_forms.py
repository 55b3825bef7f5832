"""Registers the GPU kernels that make masks, and the one that rounds q, k and v to FP8. The first tensor on a GPU loads
them. Without Triton, or if calls are traced, numpy and torch make the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparsek.attn.mask.build.selection import Selection
from sparsek.attn.mask.build.unions import UnionInputs
from sparsek.core.operations import KERNELS
from sparsek.engine.call.transforms import function_of, kernel_of


def _choose_blocks(made: Sequence[Any], c: Selection) -> tuple[Tensor, ...] | None:
    tensors = (c.given, c.lengths, c.limit, c.always, c.counts)
    plain = [each for each in tensors if isinstance(each, Tensor)]
    kernel = function_of("sparsek.attn.kernels.mask.choose", "choose_blocks", *plain)
    return None if kernel is None else kernel(made, c)


def _token_unions(made: Sequence[Any], c: UnionInputs) -> bool:
    plain = [each for each in (c.indices, c.counts, c.bounds) if each is not None]
    kernel = function_of("sparsek.attn.kernels.mask.unions", "token_unions", *plain)
    return kernel is not None and kernel(made, c)


KERNELS.update(
    mask_of_blocks=kernel_of("sparsek.attn.kernels.mask.forms", "blocks"),
    mask_of_band=kernel_of("sparsek.attn.kernels.mask.forms", "band"),
    mask_of_bigbird=kernel_of("sparsek.attn.kernels.mask.bigbird", "bigbird"),
    mask_of_documents=kernel_of("sparsek.attn.kernels.mask.documents", "documents"),
    choose_blocks=_choose_blocks,
    token_unions=_token_unions,
    page_lists=kernel_of("sparsek.attn.kernels.mask.pages", "page_lists"),
    round_heads=kernel_of("sparsek.attn.kernels.forward.heads_to_fp8", "round_heads"),
)
