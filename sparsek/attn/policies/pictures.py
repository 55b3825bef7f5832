"""A policy's mask beside the softmax mass of the blocks."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.policies.mass import mask_and_first, true_mass
from sparsek.core import arguments
from sparsek.core.tracing import not_traced
from sparsek.pictures.mass import beside

QUERIES = 8  # of each tile, whose mass is computed


@not_traced("a picture")
@torch.no_grad()
def plot(
    mask: BlockMask | MaskRule,
    q: Tensor,
    k: Tensor,
    head: int = 0,
    batch: int = 0,
    path: str | os.PathLike[str] | None = None,
    *,
    scale: float | None = None,
    causal: bool | None = None,
    q_offset: int | None = None,
    kv_lengths: Tensor | None = None,
    max_pixels: int = 1024,
) -> str:
    """Return a text picture of the mask of one head beside the softmax mass of its blocks, and the share kept. Syncs.

    The mass is that of 8 queries of each tile, so the share differs slightly from `recall`.

    Args:
        mask: A BlockMask, or a policy, whose mask for q and k is made.
        q: Queries [B, Hq, S, D].
        k: Keys [B, Hkv, T, D].
        head: The head of q to draw.
        batch: The batch item to draw.
        path: Where to write an SVG picture as well.
        scale: The factor of q @ k.T; D**-0.5 by default.
        causal: As in `recall`.
        q_offset: As in `recall`.
        kv_lengths: As in `recall`.
        max_pixels: The pixels of the longer side of each of its two panels, 64 to 4096.

    Raises:
        InvalidInput: For operands that do not fit together, and for a head or batch item out of range.

    Example:
        >>> import torch, sparsek as sk
        >>> q = torch.linspace(0, 3, 512)[:, None] * torch.tensor([1.0, 2.0])
        >>> q = torch.cat((q.sin(), q.cos()), 1).mul(6)[None, None]
        >>> print(sk.policies.plot(sk.policies.VSA(topk=3), q, q))
        ┌────────┐  ┌────────┐
        │███     │  │█░      │
        │███     │  │▒█░     │
        │ ███    │  │ ▒█░    │
        │  ███   │  │  ▒█░   │
        │   ███  │  │   ▒█░  │
        │    ███ │  │    ▒█░ │
        │     ███│  │     ▒█░│
        │     ███│  │      ▒█│
        └────────┘  └────────┘
        VSA(topk=3)
        24 of 64 blocks, 37.5 %, hold 100 % of the mass
        left: the mask, █ full, ▒ partial; right: the cells that hold 50 █, 75 ▓, 90 ▒, 95 ░ % of each row's mass
    """
    found, first = mask_and_first(mask, q, k, scale, causal, q_offset, kv_lengths)
    batch = arguments.integer("batch", batch, 0, max(q.shape[0] - 1, 0))
    head = arguments.integer("head", head, 0, q.shape[1] - 1)
    lengths = (
        None if kv_lengths is None or kv_lengths.ndim == 1 else kv_lengths[-kv_lengths.shape[0] + batch :][:1]
    )
    kv_head = head * k.shape[1] // q.shape[1]
    mass = true_mass(
        q[batch : batch + 1, head : head + 1], k[batch : batch + 1, kv_head : kv_head + 1], found.block,
        scale=scale, causal=first is not None, q_offset=first,
        kv_lengths=kv_lengths if lengths is None else lengths, queries=QUERIES,
    )[0, 0].double().cpu().numpy()  # fmt: skip
    of_head, of_batch = head * found.heads // q.shape[1], batch * found.batch // q.shape[0]
    drawn, stored = found.drawn(of_head, of_batch), np.zeros(found.grid, bool)
    for lists in (drawn.full, drawn.partial):
        for row, (start, count) in enumerate(zip(lists.starts, lists.counts, strict=True)):
            stored[row, lists.indices[start : start + count]] = True
    held = 100 * float(mass[stored].sum() / max(mass.sum(), 1e-30))
    share = 100 * stored.mean() if stored.size else 0.0
    facts = [
        mask.label or "mask",
        f"{stored.sum()} of {stored.size} blocks, {share:.3g} %, hold {held:.3g} % of the mass",
    ]
    return beside(found, mass, facts, path, of_head, of_batch, max_pixels=max_pixels)
