"""Attention with a dense mask in float64, from which the calls that stand in for others are held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def operands(
    q: tuple[int, ...], k: tuple[int, ...] | None = None, v: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """N(0, 1) leaves q, k and v of these shapes, by default that of q, which require a gradient."""
    made = [randn(*shape, seed=at).requires_grad_() for at, shape in enumerate((q, k or q, v or k or q))]
    return made[0], made[1], made[2]


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S, Dv] and lse [B, Hq, S] for a bool mask that broadcasts to [B, Hq, S, T]."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    sees = seen.any(-1, keepdim=True).expand(*scores.shape[:3], 1)
    weights = torch.where(sees, scores, 0.0).softmax(-1) * sees
    return weights @ v, torch.where(sees[..., 0], scores.logsumexp(-1), -torch.inf)


def same(found: Any, right: Tensor) -> None:
    """Equal up to the rounding of float64, or of float32 for an lse."""
    torch.testing.assert_close(found, right.to(found.dtype), rtol=1e-6, atol=1e-6)


def same_gradients(found: Tensor, right: Tensor, leaves: Sequence[Tensor]) -> None:
    """Equal gradients of a random weighting of both."""
    weight = randn(*right.shape, seed=99)
    ours = torch.autograd.grad((found * weight).sum(), list(leaves))
    theirs = torch.autograd.grad((right * weight).sum(), list(leaves))
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)


def expanded(blocks: Tensor, block: tuple[int, int], lengths: tuple[int, int]) -> Tensor:
    """The elements [..., S, T] of a block map [..., Mb, Nb]."""
    wide = blocks.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return wide[..., : lengths[0], : lengths[1]]


def of_mask_mod(mask_mod: Callable[..., Tensor], shape: tuple[int, int, int, int]) -> Tensor:
    """A mask_mod at every place, bool [B, H, S, T]."""
    places = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    return mask_mod(*places)


def coin(*shape: int, share: float = 0.5, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
