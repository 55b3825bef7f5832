"""XAttention's estimate of the softmax mass of blocks, in plain torch: the specification.

Queries and keys are taken in groups of `stride` neighbours, from the first on. A pair of groups has the sum of `stride`
of its stride^2 scores, those on the antidiagonal, and the softmax of a query group runs over key groups:

    s[i, j] = scale / stride * sum over a of q[i stride + stride - 1 - a] . k[j stride + a]
    mass of a block = sum over its query groups i and key groups j of softmax over j of s[i, :]

Lengths that are no multiple of `stride`: absent queries and keys count as zeros. A key group is visible if it has a
key; with `causal`, to those query groups whose last query stands at its first key or later. So the group at the
diagonal is visible whole. A query group that sees nothing has no mass. A row of blocks sums up to its query groups.

Source: XAttention, Xu et al., arXiv:2503.16428.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core import dtypes

E4M3 = torch.float8_e4m3fn


def block_mass(
    q: Tensor,
    k: Tensor,
    *,
    stride: int,
    block: tuple[int, int],
    causal: bool,
    q_offset: int,
    kv_lengths: Tensor | None = None,
    fp8: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Estimated softmax mass of every block, float32 [B, Hq, Mb, Nb] (float64 for float64).

    Args:
        q: [B, Hq, S, D].
        k: [B, Hkv, T, D], of q's dtype.
        stride: Queries or keys of a group; divides both sides of a block.
        block: Queries and keys of a block.
        causal: Whether a query sees no keys after its own.
        q_offset: The position of the first query among the keys.
        kv_lengths: int32 [1 or B, Nb]: how many keys of each block exist, its first ones.
        fp8: Whether q and k are rounded to e4m3, each group with its own scale, a power of two (`rounded`).
        scale: The factor of q @ k; D**-0.5 for None.
    """
    (_, heads, q_len, dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    tiles, blocks = -(-q_len // block[0]), -(-kv_len // block[1])
    if not tiles * blocks:
        return q.new_zeros((*q.shape[:2], tiles, blocks), dtype=torch.promote_types(q.dtype, torch.float32))
    exists = torch.arange(blocks * block[1], device=q.device) < kv_len
    if kv_lengths is not None:
        within = torch.arange(block[1], device=q.device) < kv_lengths[..., None]
        exists = exists & within.flatten(1)
    exists = exists.view(-1, blocks * block[1])
    with dtypes.as_given(q.device):
        q = grouped(q, tiles * block[0], stride).flip(3)
        k = grouped(k, blocks * block[1], stride)
        k = k.masked_fill(~exists.view(-1, 1, k.shape[2], stride, 1), 0)
        if fp8:
            q, k = rounded(q), rounded(k)
        k = k.repeat_interleave(heads // kv_heads, 1)
        s = q.flatten(3) @ k.flatten(3).mT * ((dim**-0.5 if scale is None else scale) / stride)
        i = torch.arange(q.shape[2], device=q.device)[:, None] * stride
        j = torch.arange(k.shape[2], device=q.device) * stride
        seen = exists.view(-1, 1, 1, k.shape[2], stride).any(-1) & (i < q_len)
        if causal:
            seen = seen & (j <= q_offset + (i + stride).clamp(max=q_len) - 1)
        mass = s.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
        return mass.unflatten(3, (blocks, -1)).sum(4).unflatten(2, (tiles, -1)).sum(3)


def grouped(x: Tensor, length: int, stride: int) -> Tensor:
    """[B, H, length / stride, stride, D] of x [B, H, L, D], zero from L on; at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.pad(wide, (0, 0, 0, length - x.shape[2])).unflatten(2, (-1, stride))


def rounded(groups: Tensor) -> Tensor:
    """Groups [.., stride, D] rounded to e4m3 after division by the power of two that brings the largest magnitude of
    the group to 128 or more and below 256. Scales below 2^-119 count as 2^-119.
    """
    largest = groups.abs().amax((-2, -1), keepdim=True).float()
    exponent = torch.frexp(largest).exponent - 8
    exponent = torch.where(largest > 0, exponent, 0).clamp(min=-119)
    return torch.ldexp(torch.ldexp(groups, -exponent).to(E4M3).to(groups.dtype), exponent)
