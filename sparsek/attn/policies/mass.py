"""How much softmax mass a mask keeps, and how much any mask of as many blocks could."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.elements import elements_of, stored_entries
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskRule
from sparsek.attn.plan.attention_operands import checked_scale
from sparsek.attn.policies.policy import Policy, block_lengths
from sparsek.core import arguments, dtypes
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced

ELEMENTS = 2**25  # scores that are in memory at once, float32


class FullAttention(NamedTuple):
    """The attention that a mask leaves parts of: q, k, the factor of q @ k.T, and which keys exist.

    first: the position of the first query if a query sees no keys after its own, else None. ends: int64 [1 or B, Nb]
    or None: where the keys of each block of `side` end.
    """

    q: Tensor
    k: Tensor
    scale: float
    first: int | None
    ends: Tensor | None
    side: int

    def weights(self, batch: int, head: int, rows: Tensor) -> Tensor:
        """float32 [n, T]: the softmax of these queries of one head; 0 for a query without a key."""
        q = self.q[batch, head, rows].float()
        k = self.k[batch, head * self.k.shape[1] // self.q.shape[1]].float()
        with dtypes.as_given(q.device):
            scores = self.scale * (q @ k.mT)
        key = torch.arange(k.shape[0], device=k.device)
        if self.first is not None:
            scores = scores.masked_fill(key > (rows + self.first)[:, None], -torch.inf)
        if self.ends is not None:
            ends = self.ends[batch if self.ends.shape[0] > 1 else 0]
            scores = scores.masked_fill(key >= ends[key // self.side], -torch.inf)
        nothing = (scores == -torch.inf).all(-1, keepdim=True)
        return torch.where(nothing, 0, scores.masked_fill(nothing, 0).softmax(-1))

    def chunks(self, rows: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Batch item, head and some of the rows, so few that their scores fit into ELEMENTS."""
        step = max(ELEMENTS // max(self.k.shape[2], 1), 1)
        for batch in range(self.q.shape[0]):
            for head in range(self.q.shape[1]):
                for some in rows.split(step):
                    yield batch, head, some


@not_traced("a recall")
@torch.no_grad()
def recall(
    mask: BlockMask | MaskRule,
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    samples: int = 64,
    seed: int = 0,
    causal: bool | None = None,
    q_offset: int | None = None,
    kv_lengths: Tensor | None = None,
) -> Tensor:
    """Return the share of the softmax mass that a mask keeps, float32 [B, Hq]: a mean over sampled queries. Syncs.

    1 means that attention with the mask equals dense attention. Memory is bounded; time grows with samples * T.

    Args:
        mask: A BlockMask, or a policy, whose mask for q and k is made.
        q: Queries [B, Hq, S, D].
        k: Keys [B, Hkv, T, D].
        scale: The factor of q @ k.T; D**-0.5 by default.
        samples: Queries, drawn without replacement, the same for all heads; all S if there are fewer.
        seed: Of the draw.
        causal: Whether the dense attention is causal. None: as the policy is; for a BlockMask, as its form shows, which
            those of `BlockMask.causal` and `BlockMask.topk` have, and all in which a query sees keys after its own.
        q_offset: The position of the first query among the keys, for which a policy's mask is made too. None: that of
            a causal BlockMask, else T - S, where the last query stands at the last key.
        kv_lengths: int32 [Nb] or [1 or B, Nb]: the keys that exist of each block, as for `Policy.mask`.

    Raises:
        InvalidInput: For operands that do not fit together, and for causal=None with a BlockMask that may be either.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 4, 1024, 64).unbind()
        >>> sk.policies.recall(sk.BlockMask.full(1024), q, k)
        tensor([[1., 1., 1., 1.]])
        >>> bool((sk.policies.recall(sk.policies.MeanTopK(density=0.5, causal=False), q, k) > 0.45).all())
        True
    """
    found, first = mask_and_first(mask, q, k, scale, causal, q_offset, kv_lengths)
    samples, seed = arguments.integer("samples", samples, 1), arguments.integer("seed", seed)
    draw = torch.Generator("cpu").manual_seed(seed)
    rows = torch.randperm(q.shape[2], generator=draw, device="cpu")[:samples].sort().values
    rows = rows.to(q.device)
    dense = dense_of(q, k, found.block[1], scale, first, kv_lengths)
    kept = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
    for batch, head, some in dense.chunks(rows):
        weights = dense.weights(batch, head, some)
        group = batch * found.batch // q.shape[0] * found.heads + head * found.heads // q.shape[1]
        share = (weights * seen_by(found, group, some)).sum(1)
        kept[batch, head] += torch.where(weights.any(1), share, 1).sum()
    return kept / max(rows.numel(), 1) if rows.numel() else torch.ones_like(kept)


def mask_and_first(
    mask: BlockMask | MaskRule,
    q: Tensor,
    k: Tensor,
    scale: float | None,
    causal: bool | None,
    q_offset: int | None,
    kv_lengths: Tensor | None,
) -> tuple[BlockMask, int | None]:
    """The mask for q and k, checked, and the position of the first query in the dense attention that it leaves parts
    of, if that is causal; else None.
    """
    check_tensors(q, k, k)
    if q_offset is not None:
        q_offset = arguments.integer("q_offset", q_offset, -INT32_MAX, INT32_MAX)
    last = k.shape[2] - q.shape[2]
    found = mask
    if isinstance(mask, Policy):
        found = mask.mask(q, k, scale=scale, q_offset=q_offset, kv_lengths=kv_lengths)
    elif isinstance(mask, MaskRule):
        found = mask.mask_for(q, k)
        if q_offset not in (None, last):
            raise InvalidInput(
                f"q_offset is {q_offset}; {type(mask).__name__} puts the last query at the last key, so that the first "
                f"is at {last}"
            )
    if not isinstance(found, BlockMask):
        raise InvalidInput(f"mask is {arguments.shown(mask)}; it must be a BlockMask or a policy")
    _check_fits(found, q, k)
    found.verify(wait=True)
    if isinstance(mask, MaskRule):
        causal = bool(getattr(mask, "causal", False)) if causal is None else arguments.flag("causal", causal)
        return found, (last if q_offset is None else q_offset) if causal else None
    diagonal = _diagonal(found)
    causal = _is_causal(found, diagonal, q_offset) if causal is None else arguments.flag("causal", causal)
    own = last if diagonal is None else diagonal[0]
    return found, (own if q_offset is None else q_offset) if causal else None


def _diagonal(mask: BlockMask) -> tuple[int, bool] | None:
    """The offset by which the interval of every query ends with its own position, up to that of the last query at the
    last key, and whether all intervals begin at the first key. None if there is no such offset. Syncs.
    """
    if mask.lo is None or mask.hi is None or not mask.q_len:
        return None
    query, (lo, hi) = torch.arange(mask.q_len, device=mask.device), (mask.lo, mask.hi)
    inside = (hi > 0) & (hi < mask.kv_len)
    offset = int(torch.where(inside, hi - 1 - query, -INT32_MAX).max())
    last = mask.kv_len - mask.q_len
    if not bool(inside.any()):
        offset = last
    if offset > last or not bool((hi == (query + offset + 1).clamp(0, mask.kv_len)).all()):
        return None
    return offset, not bool(lo.any())


def _is_causal(mask: BlockMask, diagonal: tuple[int, bool] | None, q_offset: int | None) -> bool:
    """Whether a mask is causal. InvalidInput if its form fits both."""
    last = mask.kv_len - mask.q_len
    if mask.q_len == 1 and q_offset in (None, last):
        return False  # one query at the last key: both are the same
    if diagonal is not None:
        offset, whole = diagonal
        if whole or offset == (0 if q_offset is None and last == 0 else q_offset):
            return True
    if mask.pure and (mask.lo is None or mask.hi is None):
        return False  # whole blocks, none cut at a diagonal
    if _sees_later(mask, last if q_offset is None else q_offset):
        return False
    raise InvalidInput(
        f"mask is {mask.label or 'a BlockMask'} of {mask.q_len} queries and {mask.kv_len} keys, which may be of causal "
        "attention or not; pass causal=True or causal=False, and q_offset= unless the last query is at the last key"
    )


def dense_of(
    q: Tensor, k: Tensor, side: int, scale: float | None, first: int | None, kv_lengths: Tensor | None
) -> FullAttention:
    """The dense attention of q and k, with blocks of `side` keys; `first` as in `FullAttention`."""
    factor = checked_scale(scale, q.shape[3])
    ends, blocks = None, -(-k.shape[2] // side)
    if kv_lengths is not None:
        lengths = block_lengths("kv_lengths", kv_lengths, q.shape[0], blocks, q.device).long()
        ends = lengths.clamp(0, side) + torch.arange(blocks, device=q.device) * side
    return FullAttention(q.detach(), k.detach(), factor, first, ends, side)


def seen_by(mask: BlockMask, group: int, queries: Tensor) -> Tensor:
    """bool [n, kv_len]: the keys that each query of one batch item and head of the mask sees. Syncs."""
    (bq, bk), (tiles, columns) = mask.block, mask.grid
    rows = group * tiles + queries // bq
    seen = torch.zeros((queries.numel(), columns, bk), dtype=torch.bool, device=mask.device)
    at, entries = stored_entries(mask.full, rows)
    seen[at, mask.full.indices[entries].long()] = True
    at, entries = stored_entries(mask.partial, rows)
    admitted = elements_of(mask, rows[at], entries, queries[at, None])
    seen[at, mask.partial.indices[entries].long()] = admitted[:, 0]
    return seen.flatten(1)[:, : mask.kv_len]


def _sees_later(mask: BlockMask, first: int) -> bool:
    """Whether one of 64 queries sees a key after its own, where the first query is at the position `first`."""
    count = min(64, mask.q_len)
    rows = torch.arange(count, device=mask.device) * mask.q_len // max(count, 1)
    after = torch.arange(mask.kv_len, device=mask.device) > rows[:, None] + first
    return any(bool((seen_by(mask, group, rows) & after).any()) for group in range(mask.batch * mask.heads))


def _check_fits(mask: BlockMask, q: Tensor, k: Tensor) -> None:
    """InvalidInput unless a mask is for q and k."""
    arguments.one_device("mask is", mask.device, "q", q.device)
    if (mask.q_len, mask.kv_len) != (q.shape[2], k.shape[2]):
        raise InvalidInput(
            f"mask is for {mask.q_len} queries and {mask.kv_len} keys; q and k have {q.shape[2]} and {k.shape[2]}"
        )
    if mask.batch not in (1, q.shape[0]) or q.shape[1] % mask.heads:
        raise InvalidInput(
            f"mask has {mask.batch} batch items and {mask.heads} heads; q has {q.shape[0]} and {q.shape[1]}"
        )


@torch.no_grad()
def true_mass(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    *,
    scale: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    kv_lengths: Tensor | None = None,
    queries: int | None = None,
) -> Tensor:
    """float32 [B, Hq, Mb, Nb]: the softmax mass of each block, a mean over the queries of its tile. Memory is bounded.

    queries: how many of each tile are looked at, spread without a period that a layout of tokens may have; None: all.
    """
    (side, keys), (batch, heads, length), kv_len = block, q.shape[:3], k.shape[2]
    first = (kv_len - length if q_offset is None else q_offset) if causal else None
    dense = dense_of(q, k, keys, scale, first, kv_lengths)
    tiles, columns = -(-length // side), -(-kv_len // keys)
    inner = torch.arange(side, device=q.device)
    if queries is not None and queries < side:
        step = int(0.618 * side) | 1  # odd, so that no query comes twice in a power of two
        inner = torch.arange(queries, device=q.device) * step % side
    rows = (torch.arange(tiles, device=q.device)[:, None] * side + inner).flatten()
    rows = rows[rows < length]
    count = torch.bincount(rows // side, minlength=tiles)
    mass = torch.zeros((batch, heads, tiles, columns), dtype=torch.float32, device=q.device)
    for b, h, some in dense.chunks(rows):
        weights = torch.nn.functional.pad(dense.weights(b, h, some), (0, columns * keys - kv_len))
        mass[b, h].index_add_(0, some // side, weights.unflatten(1, (columns, keys)).sum(2))
    return mass / count[:, None]
