"""Scores of blocks for policies: by kernels on a GPU, else by reference/estimates.py."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.policies.maps import kernels
from sparsek.policies.policy import Given
from sparsek.reference import estimates as reference

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def block_scores(given: Given, parts: tuple[int, int] = (1, 1), causal: bool = False) -> Tensor:
    """float32 [B, Hq, Mb, Nb]: see reference/estimates.py. With `causal`, blocks that no query of a tile sees may have
    any score.
    """
    q, k, place, lengths = given
    found = kernels("scores", q, k) if q.dtype in KERNEL_DTYPES else None
    if found is None:
        return reference.block_scores(q, k, place.block, parts, given.scale, lengths)
    start = place.q_offset if causal else None
    return found.block_scores(q, k, place.block, parts, given.scale, lengths, start)


def check_parts(parts: tuple[int, int], block: tuple[int, int]) -> None:
    """InvalidInput unless parts are powers of two, of 8 rows or more."""
    for name, split, side in zip(("parts[0]", "parts[1]"), parts, block, strict=True):
        if split & (split - 1) or split * 8 > side:
            raise InvalidInput(f"{name} is {split}; a block of {side} has 1, 2, 4, ... or {side // 8} parts")


def block_mass(given: Given, scores: Tensor, causal: bool = False) -> Tensor:
    """The softmax of each row of scores, float32 [B, H, Mb, Nb]; it may be written to `scores`. With `causal`, blocks
    after the last query of a tile have mass 0.
    """
    place, start = given.place, given.place.q_offset if causal else None
    found = kernels("mass", scores)
    if found is None:
        return reference.block_mass(scores, place.block, place.q_len, start)
    return found.to_mass(scores, place.block, place.q_len, start)
