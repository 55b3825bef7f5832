"""Mask policies: what a query may see, said once for every length, for packed documents, and for q and k."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import constant, not_traced, untransformed
from sparsek.mask.cache import edges_of, kept_mask, values_of
from sparsek.mask.documents import Documents, PackedLayout, Window, documents_mask
from sparsek.mask.lists import Frame, as_device, mask_block
from sparsek.mask.mask import BlockMask
from sparsek.mask.operands import check_tensors
from sparsek.mask.scored import best_blocks


class ResolvedRule(NamedTuple):
    """What a policy says at given lengths: `within`, or of each tile of it the `k` blocks that score best, among them
    those of `always`.
    """

    within: BlockMask
    always: BlockMask | None = None
    k: int = 0

    def mask_for(self, q: Tensor, k: Tensor) -> BlockMask:
        """The mask for q [B, Hq, S, D] and k [B, Hkv, T, D]. Heads of q that share a head of k see the same."""
        within, always = self.within, self.always
        if always is None:
            return within
        q, k = values_of(q, "q"), values_of(k, "k")
        if not q.shape[0]:  # no item to choose for, and a mask is of one at least
            return within
        return untransformed(
            lambda: best_blocks(within, block_scores(q, k, within.block), self.k, always),
        )


@dataclass(frozen=True)
class MaskPolicy:
    """Which keys a query sees, whatever the lengths. Frozen and hashable; its masks are made once for each length.

    MaskPolicy()                            keys up to the query
    MaskPolicy(causal=False)                every key
    MaskPolicy(window=4096, sinks=128)      the last `window` keys, its own included, and the first `sinks`; not
                                            causal: as many ahead
    MaskPolicy(stride=512, window=256)      BlockMask.strided
    MaskPolicy(topk=16, window=256, sinks=1)
                                            for each tile of queries the 16 blocks of keys with the highest scores,
                                            among them always those of the window (the own block by default) and the
                                            sinks. Score: mean of the tile's queries times mean of the block's keys,
                                            summed over the heads of q that share one of k.
    block: 64, 128 or a pair, as in BlockMask.

    Raises InvalidInput for options that do not fit together. Sources of sinks: Xiao et al., arXiv:2309.17453; of mean
    scores for blocks: Lu et al., "MoBA", arXiv:2502.13189.
    """

    window: int | None = None
    sinks: int = 0
    stride: int | None = None
    topk: int | None = None
    causal: bool = True
    block: int | tuple[int, int] = 128

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
        """The mask of q_len queries and kv_len keys (as many), the last query at the last key: the same one each time.

        Under torch.compile the lengths become constants. InvalidInput for top-k, whose masks follow q and k.
        """
        # A compiled graph is for one mask, so the lengths are no symbols there.
        q_len = arguments.integer("q_len", q_len)
        kv_len = q_len if kv_len is None else arguments.integer("kv_len", kv_len)
        self._refuse_topk("mask_for(q, k) makes one")
        if torch.compiler.is_compiling():
            rule = self.window, self.sinks, self.stride, self.causal, self.block
            return _constant_mask(rule, q_len, kv_len, device)
        return self._mask(q_len, kv_len, as_device(device))

    def mask_for(self, q: Tensor, k: Tensor) -> BlockMask:
        """The mask for q [B, Hq, S, D] and k [B, Hkv, T, D], on their device. Only top-k looks at more than shapes."""
        check_tensors(q, k, k)
        if self.topk is None:
            return self.mask(q.shape[2], k.shape[2], q.device)
        return _chosen(self, q, k)

    def packed(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        device: str | torch.device | None = None,
    ) -> BlockMask:
        """The mask of packed documents, each of which is masked by itself; see `attention_varlen`.

        cu_seqlens: int32 or int64 [documents + 1]. The mask is on `device`, or else where they are. From a GPU they
        are read with one sync, once for a tensor. The mask is the same one each time. InvalidInput for top-k.
        """
        self._refuse_topk("attention_varlen takes the policy as it is")
        scene = packed_scene(cu_seqlens_q, cu_seqlens_k)
        return self.visible_in(scene, cu_seqlens_q.device if device is None else as_device(device)).within

    def visible_in(self, scene: PackedLayout, device: torch.device) -> ResolvedRule:
        """What this says of a scene, for the current stream. Kept for scenes that are the same."""
        within, always = self._parts
        found = [each._in_scene(scene, device) for each in (within, always) if each is not None]
        return ResolvedRule(*found, k=self.topk or 0)

    @property
    def _parts(self) -> tuple[MaskPolicy, MaskPolicy | None]:
        """What may be seen, and what always is; the latter for top-k only."""
        if self.topk is None:
            return self, None
        always = replace(self, topk=None, window=self.window or 1)
        return MaskPolicy(causal=self.causal, block=self.block), always

    @property
    def _near(self) -> Window:
        """What is near, and sinks; a stride is not in it."""
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

    def _in_scene(self, scene: PackedLayout, device: torch.device) -> BlockMask:
        def build() -> BlockMask:
            label = f"{self.label}, {scene.docs.item.size} documents"
            masks = [
                documents_mask(BlockMask, scene, near, self.block, device, label)
                for near in _both(self._near, scene.near)
            ]
            if self.stride is not None:
                masks.append(self._strided_in(scene, device))
            return functools.reduce(operator.and_, masks)

        return kept_mask((self, scene.key, device), build)

    def _strided_in(self, scene: PackedLayout, device: torch.device) -> BlockMask:
        """Blocks count from key 0, so queries of all documents must stand at their positions in the same way."""
        shifts = np.unique(scene.docs.shift)
        if shifts.size > 1 or (scene.docs.origin < 0).any():
            raise InvalidInput(
                "a stride counts blocks from the first key: every document needs as many queries as keys, and all keys"
            )
        return BlockMask.strided(
            stride=self.stride, window=self.window, causal=False, q_len=scene.q_len, kv_len=scene.kv_len,
            block=self.block, device=device, q_offset=int(shifts[0]) if shifts.size else 0,
        )  # fmt: skip

    def _refuse_topk(self, instead: str) -> None:
        if self.topk is not None:
            raise InvalidInput(f"a top-k policy has no mask for lengths alone; {instead}")

    @property
    def label(self) -> str:
        """The options that are set, in words: "window=4096, sinks=128"."""
        plain = MaskPolicy()
        said = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name) and each.name != "block"
        ]
        return ", ".join(said) or "causal"


def packed_scene(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, totals: tuple[int, int] | None = None
) -> PackedLayout:
    """Packed documents as one batch item; `totals`: how many queries and keys there must be."""
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
    """What is near by both, as few that must all hold: one, unless sinks of `a` lie outside of a window of `b`."""
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
    """Mean of each tile's queries times mean of each block's keys, float32 [B, Hkv, Mb, Nb].

    The queries' mean is also over the heads of q that share a head of k.
    """
    tiles = _means(q, block[0])
    tiles = tiles.unflatten(1, (k.shape[1], -1)).mean(2)
    return tiles @ _means(k, block[1]).mT


def _means(x: Tensor, side: int) -> Tensor:
    """float32 [B, H, blocks, D]: the mean of each `side` rows of [B, H, L, D], and of those that are left."""
    whole = x.shape[2] // side * side
    means = [x[:, :, :whole].unflatten(2, (-1, side)).mean(3, dtype=torch.float32)] if whole else []
    if whole < x.shape[2]:
        means.append(x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32))
    return torch.cat(means, 2) if means else x[:, :, :0].float()


@constant
def _constant_mask(
    rule: tuple[Any, ...], q_len: int, kv_len: int, device: str | torch.device | None
) -> BlockMask:
    """While torch.compile traces; the graph keeps the mask.

    `rule` holds a policy's options: a policy that was made in the traced function would come with its defaults.
    """
    window, sinks, stride, causal, block = rule
    policy = MaskPolicy(window, sinks, stride, causal=causal, block=block)
    return policy._mask(q_len, kv_len, as_device(device))


@not_traced("a top-k mask")
def _chosen(policy: MaskPolicy, q: Tensor, k: Tensor) -> BlockMask:
    """Outside of inference mode, as builders are."""
    within, always = (
        each._mask(q.shape[2], k.shape[2], q.device) for each in policy._parts if each is not None
    )
    return ResolvedRule(within, always, policy.topk or 0).mask_for(q, k)
