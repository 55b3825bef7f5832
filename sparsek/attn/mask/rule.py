"""MaskRule: anything that makes a mask for given q and k. MaskPolicy: a rule that applies to any sequence length and to
packed documents.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.attn.mask.build.scored import best_blocks, best_near
from sparsek.attn.mask.build.selection import LocalBlocks
from sparsek.attn.mask.cache import edges_of, kept_mask, values_of
from sparsek.attn.mask.lists import Frame, Place, as_device, mask_block
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.operands import check_tensors
from sparsek.attn.mask.traced import decoded, encoded, traceable
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant, not_traced, untransformed


class ResolvedRule(NamedTuple):
    """A policy at given lengths: the mask `within`.

    With `k` it is reduced to the `k` blocks of each tile with the highest scores, among them those of `always`.
    """

    within: BlockMask
    always: BlockMask | None = None
    k: int = 0

    def mask_for(self, q: Tensor, k: Tensor) -> BlockMask:
        """The mask for q [B, Hq, S, D] and k [B, Hkv, T, D]. Heads of q that share a head of k share the mask."""
        within = self.within
        if self.always is None:
            return within
        q, k = values_of(q, "q"), values_of(k, "k")
        if not q.shape[0]:  # no batch item to choose for, and a mask has at least one
            return within
        return untransformed(lambda: self.chosen(block_scores(q, k, within.block)))

    def chosen(self, scores: Tensor) -> BlockMask:
        """The mask by `block_scores`."""
        return best_blocks(self.within, scores, self.k, self.always)


class MaskRule:
    """Makes a mask for given q and k. `attention` takes a rule in place of a mask: `MaskPolicy`, or one of
    `sk.policies`.

    `of_fields`: whether an object is determined by its class and `__match_args__`, as a dataclass is. `by_token`:
    whether it has a method `lists`, which returns TokenLists for q and k.
    """

    of_fields = False
    by_token = False

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None = None) -> BlockMask:
        """The mask for q [B, Hq, S, D] and k [B, Hkv, T, D], on their device. scale: the factor of q @ k.T."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """The rule in words."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskPolicy(MaskRule):
    """A mask rule that applies to any sequence length. Frozen and hashable; it makes one mask for each pair of lengths.

    The last query stands at the last key. By default a query sees every key up to its own.

    Args:
        window: A query sees the last `window` keys, its own included; not causal: also window - 1 after it. In tokens.
            None: all keys.
        sinks: First keys that every query sees too, in tokens. With a window or `topk` only.
        stride: Every (stride / bk)-th block before the window is seen too, as in `BlockMask.strided`. In tokens, a
            multiple of bk; with a window, and without sinks and `topk`.
        topk: For each tile of queries, the `topk` blocks of keys with the highest scores, whose masks depend on q and
            k. The blocks of the window (the tile's own by default) and of the sinks are always among them. The score of
            a block is the mean of the tile's queries times the mean of the block's keys, summed over the heads of q
            that share a head of k.
        causal: Whether a query sees no keys after its own.
        block: The block in tokens: 64, 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For options that are out of range or do not go together.

    Sources: sinks: StreamingLLM, Xiao et al., arXiv:2309.17453; block scores by means: MoBA, Lu et al.,
    arXiv:2502.13189.

    Example:
        >>> import torch, sparsek as sk
        >>> policy = sk.MaskPolicy(window=256, sinks=64)
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> sk.attention(q, k, v, policy).shape
        torch.Size([1, 4, 1000, 64])
        >>> sk.MaskPolicy(causal=False).label, sk.MaskPolicy(topk=16, window=256, sinks=1).label
        ('causal=False', 'window=256, sinks=1, topk=16')
    """

    window: int | None = None
    sinks: int = 0
    stride: int | None = None
    topk: int | None = None
    causal: bool = True
    block: int | tuple[int, int] = 128
    of_fields = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", mask_block(self.block))
        for name in ("window", "stride", "topk"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, arguments.integer(name, value, 1))
        object.__setattr__(self, "sinks", arguments.integer("sinks", self.sinks))
        arguments.flag("causal", self.causal)
        if self.stride is not None:
            if self.window is None or self.sinks or self.topk is not None:
                raise InvalidInput("stride goes with a window, and neither with sinks nor with topk")
            BlockMask.strided(0, self.stride, self.window, block=self.block, device="cpu")
        if self.sinks and self.window is None and self.topk is None:
            raise InvalidInput("sinks without a window: every query sees every key anyway")

    def mask(
        self, q_len: int, kv_len: int | None = None, device: str | torch.device | None = None
    ) -> BlockMask:
        """Return the mask for these lengths: the same object each time. The 32 masks used last are kept, with plans.

        Args:
            q_len: Queries, in tokens. Under torch.compile the lengths become constants of the graph.
            kv_len: Keys, in tokens; q_len by default. The last query stands at the last key.
            device: Where the mask is made; torch's default device for None.

        Raises:
            InvalidInput: For a top-k policy, whose masks depend on q and k; and for lengths that no mask has.

        Example:
            >>> import sparsek as sk
            >>> policy = sk.MaskPolicy(window=128, sinks=4)
            >>> policy.mask(1024) is policy.mask(1024)
            True
        """
        # A compiled graph is for one mask, so the lengths are no symbols there.
        q_len = arguments.integer("q_len", q_len)
        kv_len = q_len if kv_len is None else arguments.integer("kv_len", kv_len)
        self._refuse_topk("mask_for(q, k) makes one")
        if torch.compiler.is_compiling():
            rule = self.window, self.sinks, self.stride, self.causal, self.block
            return _constant_mask(encoded(rule, []), q_len, kv_len, device)
        return self._mask(q_len, kv_len, as_device(device))

    def mask_for(self, q: Tensor, k: Tensor, scale: float | None = None) -> BlockMask:
        """Return the mask for q and k, on their device. Only top-k reads more than their shapes.

        Args:
            q: Queries [B, Hq, S, D].
            k: Keys [B, Hkv, T, D].
            scale: Not read: the order of products is that of any multiple of them.

        Raises:
            InvalidInput: For q and k that do not fit together.

        Example:
            >>> import torch, sparsek as sk
            >>> q, k = torch.randn(1, 8, 1024, 64), torch.randn(1, 2, 1024, 64)
            >>> mask = sk.MaskPolicy(topk=4, window=128, sinks=1).mask_for(q, k)
            >>> mask.heads, mask.stored_blocks
            (2, 52)
        """
        check_tensors(q, k, k)
        if self.topk is None:
            return self.mask(q.shape[2], k.shape[2], q.device)
        return _chosen(self, q, k)

    def packed(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        device: str | torch.device | None = None,
        *,
        seq_len: int | None = None,
        max_seqlen: int | None = None,
    ) -> BlockMask:
        """Return the mask of packed documents, each masked by itself: the same object for the same lengths.

        With `seq_len` it is a new mask by `BlockMask.documents`, which reads no cu_seqlens on a GPU back, and which a
        CUDA graph may capture.

        Args:
            cu_seqlens_q: int32 or int64 [documents + 1]: 0, then the end of each document in tokens. On a GPU it is
                read with one sync, once for a tensor and again after a write to it.
            cu_seqlens_k: The same for the keys, if their lengths differ.
            device: Where the mask is made; that of cu_seqlens_q for None.
            seq_len: Queries and keys, in tokens. Without sinks, stride and cu_seqlens_k only.
            max_seqlen: With seq_len, the longest document in tokens, which makes the mask's `sizes` tight.

        Raises:
            InvalidInput: For a top-k policy, for a stride whose documents have other numbers of queries than of keys,
                for cu_seqlens that are not ascending, and for seq_len with what it does not go with.

        Example:
            >>> import torch, sparsek as sk
            >>> sk.MaskPolicy(window=128, sinks=4).packed(torch.tensor([0, 300, 317, 512])).summary
            '8 of 16 blocks, 50 %, 8 partial'
        """
        self._refuse_topk("attention_varlen takes the policy as it is")
        if seq_len is not None:
            return self._unread(cu_seqlens_q, cu_seqlens_k, device, seq_len, max_seqlen)
        if max_seqlen is not None:
            raise InvalidInput(
                "max_seqlen goes with seq_len; without it cu_seqlens are read, and it is known"
            )
        layout = packed_layout(cu_seqlens_q, cu_seqlens_k)
        return self.visible_in(layout, cu_seqlens_q.device if device is None else as_device(device)).within

    def _unread(
        self, cu_seqlens: Tensor, of_keys: Any, device: Any, seq_len: int, max_seqlen: int | None
    ) -> BlockMask:
        """The mask of packed documents without a look at cu_seqlens, if they are on a GPU."""
        if self.sinks or self.stride is not None or (of_keys is not None and of_keys is not cu_seqlens):
            raise InvalidInput(
                "seq_len goes with a policy without sinks and stride, and with one cu_seqlens for queries and keys; "
                "leave it out, and cu_seqlens are read"
            )
        arguments.tensor("cu_seqlens_q", cu_seqlens, (torch.int32, torch.int64))
        if device is not None and as_device(device) != cu_seqlens.device:
            raise InvalidInput(
                f"cu_seqlens_q is on {cu_seqlens.device} and device is {device}; use one device"
            )
        return BlockMask.documents(
            cu_seqlens,
            seq_len,
            window=self.window,
            causal=self.causal,
            max_seqlen=max_seqlen,
            block=self.block,
        )

    def visible_in(self, layout: PackedLayout, device: torch.device) -> ResolvedRule:
        """The rule at a layout of documents, for the current stream. Kept for equal layouts."""
        within, always = self._parts
        found = [each._in_layout(layout, device) for each in (within, always) if each is not None]
        return ResolvedRule(*found, k=self.topk or 0)

    @property
    def _parts(self) -> tuple[MaskPolicy, MaskPolicy | None]:
        """The keys that may be seen, and, with top-k, those that always are."""
        if self.topk is None:
            return self, None
        always = replace(self, topk=None, window=self.window or 1)
        return MaskPolicy(causal=self.causal, block=self.block), always

    @property
    def _near(self) -> Window:
        """The window and the sinks, without a stride."""
        ahead = 1 if self.causal else None
        if self.window is None or self.stride is not None:
            return Window(None, ahead)
        return Window(self.window, ahead or self.window, self.sinks, sinks_ahead=not self.causal)

    def _mask(self, q_len: int, kv_len: int, device: torch.device) -> BlockMask:
        def build() -> BlockMask:
            frame = Frame(q_len=q_len, kv_len=kv_len, block=self.block, device=device)
            if self.stride is not None:
                return BlockMask.strided(stride=self.stride, window=self.window, causal=self.causal, **frame)
            if self.window is not None:
                return BlockMask.sliding_window(
                    window=self.window, sinks=self.sinks, causal=self.causal, **frame
                )
            return BlockMask.causal(**frame) if self.causal else BlockMask.full(**frame)

        return kept_mask((self, q_len, kv_len, device), build)

    def _in_layout(self, layout: PackedLayout, device: torch.device) -> BlockMask:
        def build() -> BlockMask:
            label = f"{self.label}, {layout.docs.item.size} documents"
            masks = [
                documents_mask(BlockMask, layout, near, self.block, device, label)
                for near in _both(self._near, layout.near)
            ]
            if self.stride is not None:
                masks.append(self._strided_in(layout, device))
            return functools.reduce(operator.and_, masks)

        return kept_mask((self, layout.key, device), build)

    def _strided_in(self, layout: PackedLayout, device: torch.device) -> BlockMask:
        """Blocks count from key 0, so the queries of all documents must have one offset from their keys."""
        shifts = np.unique(layout.docs.shift)
        if shifts.size > 1 or (layout.docs.origin < 0).any():
            raise InvalidInput(
                "a stride counts blocks from the first key: every document needs as many queries as keys, and all keys"
            )
        return BlockMask.strided(
            stride=self.stride, window=self.window, causal=False, q_len=layout.q_len, kv_len=layout.kv_len,
            block=self.block, device=device, q_offset=int(shifts[0]) if shifts.size else 0,
        )  # fmt: skip

    def _refuse_topk(self, instead: str) -> None:
        if self.topk is not None:
            raise InvalidInput(f"a top-k policy has no mask for lengths alone; {instead}")

    @property
    def label(self) -> str:
        """The options that are not default, in words: "window=4096, sinks=128"."""
        plain = MaskPolicy()
        changed = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name) and each.name != "block"
        ]
        return ", ".join(changed) or "causal"


def packed_layout(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, totals: tuple[int, int] | None = None
) -> PackedLayout:
    """The layout of packed documents, as one batch item; `totals`: the number of queries and of keys."""
    q_edges = edges_of(cu_seqlens_q, "cu_seqlens_q", totals and totals[0])
    k_edges = q_edges
    if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        k_edges = edges_of(cu_seqlens_k, "cu_seqlens_k", totals and totals[1])
    elif totals is not None and totals[1] != totals[0]:
        raise InvalidInput(f"{totals[0]} queries and {totals[1]} keys need a cu_seqlens_k of their own")
    if q_edges.size != k_edges.size:
        raise InvalidInput(
            f"cu_seqlens_q is for {q_edges.size - 1} documents and cu_seqlens_k for {k_edges.size - 1}"
        )
    return PackedLayout(Documents.packed(q_edges, k_edges), int(q_edges[-1]), int(k_edges[-1]))


def _both(a: Window, b: Window) -> list[Window]:
    """The intersection of two windows, as few windows: one, unless sinks of `a` lie outside a window of `b`."""
    unbounded = b.back is None and b.ahead in (None, 1)
    if a.sinks and not unbounded and not (_within(b.back, a.back) and _within(b.ahead, a.ahead)):
        return [a, b]
    sinks = a.sinks if unbounded else 0
    sinks_ahead = a.sinks_ahead and b.ahead is None
    return [Window(_least(a.back, b.back), _least(a.ahead, b.ahead), sinks, sinks_ahead)]


def _least(a: int | None, b: int | None) -> int | None:
    return min((each for each in (a, b) if each is not None), default=None)


def _within(a: int | None, b: int | None) -> bool:
    """Bound a is no wider than bound b."""
    return b is None or (a is not None and a <= b)


@torch.no_grad()
def block_scores(q: Tensor, k: Tensor, block: tuple[int, int]) -> Tensor:
    """The mean of each tile's queries times the mean of each block's keys, float32 [B, Hkv, Mb, Nb].

    The mean of queries is also over the heads of q that share a head of k.
    """
    return tile_means(q, k.shape[1], block[0]) @ block_means(k, block[1]).mT


def tile_means(q: Tensor, kv_heads: int, side: int) -> Tensor:
    """float32 [B, Hkv, tiles, D]: the mean of each tile's queries, and of the heads that share a head of k."""
    return block_means(q, side).unflatten(1, (kv_heads, -1)).mean(2)


def block_means(x: Tensor, side: int) -> Tensor:
    """float32 [B, H, blocks, D]: the mean of each `side` rows of [B, H, L, D], and of the remaining ones."""
    whole = x.shape[2] // side * side
    means = [x[:, :, :whole].unflatten(2, (-1, side)).mean(3, dtype=torch.float32)] if whole else []
    if whole < x.shape[2]:
        means.append(x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32))
    return torch.cat(means, 2) if means else x[:, :, :0].float()


@constant
def _constant_mask(
    rule: tuple[Any, ...], q_len: int, kv_len: int, device: str | torch.device | None
) -> BlockMask:
    """A mask made while torch.compile traces: a constant of the graph.

    `rule` has a policy's options, encoded, because a policy made in the traced function would arrive with default
    options, and one that it is given with symbols for numbers that change.
    """
    window, sinks, stride, causal, block = decoded(rule)
    policy = MaskPolicy(window, sinks, stride, causal=causal, block=block)
    return policy._mask(q_len, kv_len, as_device(device))


@traceable
@not_traced("a top-k mask")
def _chosen(policy: MaskPolicy, q: Tensor, k: Tensor) -> BlockMask:
    """A top-k mask, made outside of inference mode, as by builders."""
    if not q.shape[0]:  # no batch item to choose for, and a mask has at least one
        frame = Frame(q_len=q.shape[2], kv_len=k.shape[2], block=policy.block, device=q.device)
        return BlockMask.causal(**frame) if policy.causal else BlockMask.full(**frame)
    place = Place.of(q_len=q.shape[2], kv_len=k.shape[2], block=policy.block, device=q.device)
    q, k = values_of(q, "q"), values_of(k, "k")
    return untransformed(lambda: best_of(policy, block_scores(q, k, place.block), place))


def best_of(policy: MaskPolicy, scores: Tensor, place: Place) -> BlockMask:
    """The mask of a top-k policy, by `block_scores`."""
    back, sinks = (policy.window or 1) - 1, -(-policy.sinks // place.block[1])
    near = LocalBlocks(
        min(sinks, place.grid[1]), min(back, place.reach), 0 if policy.causal else min(back, place.reach)
    )
    label = "causal" if policy.causal else "full"
    return best_near(BlockMask, scores, place, policy.causal, policy.topk or 0, near, label)
