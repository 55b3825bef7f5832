"""TokenLists: the blocks of keys that each query of each group of heads sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import index

import torch
from torch import Tensor

from sparsek.attn.mask.aligned import AlignedKeys
from sparsek.attn.mask.build.unions import FEWEST, token_mask
from sparsek.attn.mask.elements import DENSE_MOST
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.rule import MaskRule
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

INTS = (torch.int32, torch.int64)
LEAST, MOST = 4, 128  # keys of a block


@dataclass(frozen=True, eq=False, repr=False)
class TokenLists(MaskRule):
    """The blocks of keys that each query sees, for each head of k or of q: what selected-block attention chooses.

    A mask of `attention`, in memory that grows with the queries and the length of their lists. With T keys, query i of
    S stands at position T - S + i. It sees the keys of its blocks, the last `window` keys up to its own and the first
    `sinks` keys; if causal, only keys up to its own position. Entries below 0 or beyond the keys, and blocks behind a
    causal query, are skipped; a block that occurs twice counts once; the order does not matter.

    Args:
        indices: int32 or int64 [1 or B, heads, S, n], with 1 head, those of k, or those of q, which is slower: of each
            query up to n blocks, -1 for none. Block j has the keys j * block to (j + 1) * block - 1. Any strides; kept
            as it is, and later calls see what is written to it. The choice has no gradient.
        block: The keys of a block, a power of two from 4 to 128. 64 and 128 are fast.
        counts: int32 or int64 [1 or B, heads, S]: how many first entries of each list count, cut off at 0 and n. All n
            for None.
        causal: Whether a query sees no keys after its own.
        window: Keys up to its own that a query sees too; with `causal` only.
        sinks: First keys that every query sees too.

    Raises:
        InvalidInput: For other shapes, dtypes, devices and blocks. Values of the lists are never refused.

    Sources: NSA, Yuan et al., arXiv:2502.11089; MoBA, Lu et al., arXiv:2502.13189.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k, v = torch.randn(1, 8, 1000, 64), torch.randn(1, 2, 1000, 64), torch.randn(1, 2, 1000, 64)
        >>> scores = torch.randn(1, 2, 1000, 16)  # of each query and block of 64 keys
        >>> lists = sk.TokenLists(scores.topk(4).indices, 64, window=64)
        >>> sk.attention(q, k, v, lists).shape
        torch.Size([1, 8, 1000, 64])
    """

    indices: Tensor
    block: int
    counts: Tensor | None = None
    causal: bool = True
    window: int = 0
    sinks: int = 0

    def __post_init__(self) -> None:
        arguments.tensor("indices", self.indices, INTS, 4)
        if not self.indices.shape[1]:
            raise InvalidInput(f"indices is {list(self.indices.shape)}; it needs a head: [B, heads, S, n]")
        object.__setattr__(self, "block", arguments.power_of_two("block", self.block, LEAST, MOST))
        if self.counts is not None:
            arguments.tensor("counts", self.counts, INTS, 3)
            arguments.one_device("indices are", self.indices.device, "counts", self.counts.device)
            if self.counts.shape != self.indices.shape[:3]:
                raise InvalidInput(
                    f"counts is {list(self.counts.shape)}; indices {list(self.indices.shape)} need one for each list, "
                    f"{list(self.indices.shape[:3])}"
                )
        arguments.flag("causal", self.causal)
        for name in ("window", "sinks"):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name)))
        if self.window and not self.causal:
            raise InvalidInput(
                f"window is {self.window} and causal=False; a window ends at the query's own key and needs causal=True"
            )

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.indices.device

    @property
    def label(self) -> str:
        """The lists in words: "16 blocks of 128 per token, window=512"."""
        # Of lists that a compiled function is given, and which change, the numbers are symbols.
        n, block, window, sinks = map(index, (self.indices.shape[3], self.block, self.window, self.sinks))
        causal = [] if self.causal else ["causal=False"]
        near = [f"{name}={keys}" for name, keys in (("window", window), ("sinks", sinks)) if keys]
        return ", ".join([f"{n} blocks of {block} per token", *causal, *near])

    def to(self, device: str | torch.device) -> TokenLists:
        """Return these lists on another device; this object if they are there already.

        Args:
            device: "cpu", "cuda", "cuda:0" or a torch.device.

        Raises:
            InvalidInput: For a device that this machine does not have.
        """
        target = arguments.device("device", device)
        if target == self.device:
            return self
        counts = None if self.counts is None else self.counts.to(target)
        return replace(self, indices=self.indices.to(target), counts=counts)

    def to_dense(self, kv_len: int | None = None) -> Tensor:
        """Return which keys every query sees, bool [batch, heads, S, kv_len], by the definition. No sync.

        Args:
            kv_len: The keys; S for None.

        Raises:
            InvalidInput: Above 2^31 elements.

        Example:
            >>> import torch, sparsek as sk
            >>> lists = torch.tensor([[0], [0], [0], [0], [0], [1], [0]])
            >>> sk.TokenLists(lists[None, None], 4, window=1).to_dense()[0, 0].int()
            tensor([[1, 0, 0, 0, 0, 0, 0],
                    [1, 1, 0, 0, 0, 0, 0],
                    [1, 1, 1, 0, 0, 0, 0],
                    [1, 1, 1, 1, 0, 0, 0],
                    [1, 1, 1, 1, 1, 0, 0],
                    [0, 0, 0, 0, 1, 1, 0],
                    [1, 1, 1, 1, 0, 0, 1]], dtype=torch.int32)
        """
        batch, heads, queries, n = self.indices.shape
        keys = queries if kv_len is None else arguments.integer("kv_len", kv_len)
        size = batch * heads * queries * keys
        if size > DENSE_MOST:
            raise InvalidInput(
                f"to_dense: {batch} x {heads} x {queries} x {keys} are {size} elements; at most {DENSE_MOST} are made "
                "at once. Take fewer queries"
            )
        at, blocks, device = self.indices.long(), -(-keys // self.block), self.device
        there = (at >= 0) & (at < blocks)
        if self.counts is not None:
            there = there & (torch.arange(n, dtype=torch.int64, device=device) < self.counts[..., None])
        table = torch.zeros((batch, heads, queries, blocks + 1), dtype=torch.bool, device=device)
        table = table.scatter(3, torch.where(there, at, blocks), True)  # not in place: torch.func.vmap
        seen = table[..., :blocks].repeat_interleave(self.block, 3)[..., :keys]
        key = torch.arange(keys, dtype=torch.int64, device=device)
        seen |= key < self.sinks
        if not self.causal:
            return seen
        own = torch.arange(keys - queries, keys, dtype=torch.int64, device=device)[:, None]
        return (seen | (key > own - self.window)) & (key <= own)

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None = None) -> BlockMask:
        """Return the mask of these lists for q and k, on their device.

        Args:
            q: Queries [B, Hq, S, D]. Only its shape is read.
            k: Keys [B, Hkv, T, D]. Only its shape is read.
            scale: Not read.

        Raises:
            InvalidInput: For q and k that do not fit together, or not the lists.

        Example:
            >>> import torch, sparsek as sk
            >>> q, k = torch.randn(1, 8, 1000, 64), torch.randn(1, 2, 1000, 64)
            >>> lists = sk.TokenLists(torch.zeros(1, 2, 1000, 1, dtype=torch.int32), 64)
            >>> lists.mask_for(q, k).heads
            2
        """
        check_tensors(q, k, k)
        return mask_of(self, q, k)

    def __repr__(self) -> str:
        if not isinstance(self.indices, Tensor):
            return "TokenLists(lists not concrete)"
        batch, heads, queries, _ = self.indices.shape
        return f"TokenLists({self.label}, batch {batch}, heads {heads}, {queries} queries, {self.device})"


def mask_of(
    lists: TokenLists, q: Tensor, k: Tensor, documents: AlignedKeys | None = None, *, predicted: bool = False
) -> BlockMask:
    """The mask of lists for q [B, Hq, S, D] and k [B, Hkv, T, D], which fit together; with `documents`, for k at its
    places. `predicted`: q may be on another device. InvalidInput if the lists do not fit.
    """
    batch, heads, queries, _ = lists.indices.shape
    if not predicted:
        arguments.one_device("q is", q.device, "the lists", lists.device)
    q_heads, kv_heads = q.shape[1], k.shape[1]
    if batch not in (1, q.shape[0]) or heads not in (1, kv_heads, q_heads) or queries != q.shape[2]:
        raise InvalidInput(
            f"indices is {list(lists.indices.shape)}; q {list(q.shape)} and k {list(k.shape)} need lists of 1 or "
            f"{q.shape[0]} batch items, 1, {kv_heads} or {q_heads} heads, and {q.shape[2]} queries"
        )
    indices, counts = lists.indices, lists.counts
    if not batch:  # no batch item, and a mask has at least one
        indices, counts = indices.new_full((1, *indices.shape[1:]), -1), None
    group = 1 if heads not in (1, kv_heads) else q_heads // kv_heads
    bounds, kv_len = (None, k.shape[2]) if documents is None else (documents.bounds, documents.length)
    options = lists.causal, lists.window, lists.sinks
    label = lists.label if documents is None else f"{lists.label}, of documents"
    if lists.block < FEWEST:
        label = f"{label}, slower than blocks of {FEWEST}, because these have bits for every key"
    return token_mask(BlockMask, indices, counts, bounds, lists.block, kv_len, group, options, label)
