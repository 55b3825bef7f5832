"""Scores of blocks for policies: by kernels on a GPU, else by attn/reference/estimates.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.policies.maps import kernels
from sparsek.attn.policies.policy import Policy, PolicyInputs
from sparsek.attn.reference import estimates as reference
from sparsek.attn.reference import line_blocks
from sparsek.attn.reference.line_blocks import Grid
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import watched

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def block_scores(
    given: PolicyInputs,
    parts: tuple[int, int] = (1, 1),
    causal: bool = False,
    q_lengths: Tensor | None = None,
) -> Tensor:
    """float32 [B, Hq, Mb, Nb]: see attn/reference/estimates.py. With `causal`, blocks that no query of a tile sees may
    have any score. `q_lengths` is for tiles of one part.
    """
    q, k, place, lengths, scale = given
    found = kernels("scores", q, k) if q.dtype in KERNEL_DTYPES else None
    if found is None:
        return reference.block_scores(q, k, place.block, parts, scale, lengths, q_lengths)
    start = place.q_offset if causal else None
    return found.block_scores(q, k, place.block, parts, scale, lengths, start, q_lengths)


def blocks_of_lines(policy: Policy, given: PolicyInputs, choose: Callable[[Any, Grid], Tensor]) -> BlockMask:
    """The mask of a policy for prompts, of the map that `choose` makes with kernels/estimate/line_blocks.py, or with
    attn/reference/line_blocks.py.
    """
    q, k, place, lengths, _ = given
    if lengths is not None:
        raise InvalidInput(
            f"kv_lengths is given; {type(policy).__name__} is for prompts, whose blocks have no padding"
        )
    if is_fake(q):
        return given.from_map(given.blank_map(), True)
    grid = Grid(place.q_len, place.kv_len, place.block, place.q_offset)
    found = kernels("line_blocks", q, k) if q.dtype in KERNEL_DTYPES else None
    return given.from_map(choose(found or line_blocks, grid), True)


def check_parts(parts: tuple[int, int], block: tuple[int, int]) -> None:
    """InvalidInput unless parts are powers of two, of 8 rows or more."""
    for name, split, side in zip(("parts[0]", "parts[1]"), parts, block, strict=True):
        if split & (split - 1) or split * 8 > side:
            raise InvalidInput(f"{name} is {split}; a block of {side} has 1, 2, 4, ... or {side // 8} parts")


def block_means(x: Tensor, side: int, lengths: Tensor | None = None) -> Tensor:
    """The mean of each `side` rows of x [B, H, L, D]: see attn/reference/estimates.py. Differentiable."""
    if x.dtype not in KERNEL_DTYPES or watched(x) or kernels("means", x) is None:
        return reference.block_means(x, side, lengths)
    return _Means.apply(x, side, lengths)


class _Means(torch.autograd.Function):
    """Means by a kernel, one pass over x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, side: int, lengths: Tensor | None) -> Tensor:
        ctx.side, ctx.rows, ctx.dtype, ctx.lengths = side, x.shape[2], x.dtype, lengths
        held = None if lengths is None else lengths.contiguous()
        high, low = kernels("means", x).split_means(x.detach(), None, (side, side), lengths=(held, None))[0]
        return high.float() + low

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad, side, rows = grads[0], ctx.side, ctx.rows
        counts = reference.rows_of_blocks(rows, side, ctx.lengths, grad.device)
        share = (grad / counts.clamp(min=1)[:, None, :, None]).to(ctx.dtype)
        spread = share.repeat_interleave(side, 2)[:, :, :rows]
        if ctx.lengths is None:
            return spread, None, None
        row = torch.arange(rows, device=grad.device)
        there = row % side < counts[:, row // side]
        return torch.where(there[:, None, :, None], spread, 0), None, None


def block_mass(given: PolicyInputs, scores: Tensor, causal: bool = False) -> Tensor:
    """The softmax of each row of scores, float32 [B, H, Mb, Nb]; it may be written to `scores`. With `causal`, blocks
    after the last query of a tile have mass 0.
    """
    place, start = given.place, given.place.q_offset if causal else None
    found = kernels("mass", scores)
    if found is None:
        return reference.block_mass(scores, place.block, place.q_len, start)
    return found.to_mass(scores, place.block, place.q_len, start)
