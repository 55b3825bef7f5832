"""Which query-key pairs attention visits: for every query tile, key blocks it visits whole and key blocks in part.

Two lists per query tile, in compressed rows: *full* blocks need no test, *partial* blocks have an element rule.
Nothing here grows with the blocks that are absent; rows that visit the same run of blocks share its entries.

This is the face; the work is done by its neighbours. `mask_build` and `mask_select` make masks, `mask_compose` joins
them, `mask_view` looks at their elements, `mask_check` is the constructor's, `mask_convert` knows other libraries. They
import this file, so the methods here import them when called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.core import arguments
from sparsek.core.eager import saveable
from sparsek.core.record import Record, record
from sparsek.mask.parts import BlockLists, Frame, HostLists, HostMask, Sizes, TransposedLists
from sparsek.matrix.pattern import BlockPattern

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask
    from typing_extensions import Unpack

    from sparsek.mask.interop import FlashLists

BLOCK_SIZES = (64, 128)
BY_INTERVAL = -1
WORD = 32  # bits of one int32 of `bits`

UNKNOWN = Sizes(0, 0, 0, exact=False)

Made = TypeVar("Made")


class FullBlocks:
    """`full` names two things: `mask.full` are the full blocks of a mask, `BlockMask.full(seq_len)` makes one."""

    @overload
    def __get__(self, mask: None, owner: type) -> FullBlocks: ...
    @overload
    def __get__(self, mask: BlockMask, owner: type) -> BlockLists: ...
    def __get__(self, mask: BlockMask | None, owner: type) -> Any:
        """Masks keep their lists in their own dictionary, which is asked first: only the class comes here."""
        return self

    if TYPE_CHECKING:

        def __set__(self, mask: BlockMask, lists: BlockLists) -> None: ...

    def __call__(self, seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
        """The mask with which every query sees every key. `frame`: see `Frame`."""
        from sparsek.mask import structured

        return structured.full(seq_len, **frame)


@record(leaves=("full", "partial", "lo", "hi", "rules", "bits"))
@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Record):
    """For every (batch item, head, query tile) the key blocks that are visited.

    `q_len` queries, `kv_len` keys; `block` is (bq, bk), each 64 or 128. `batch` and `heads` are 1 where all batch
    items or heads share the lists. Row r = (b * heads + h) * Mb + i describes query tile i, i < Mb = ceil(q_len / bq).

    Query q sees key k of a full block always, and of a partial block by the block's rule. `rules` is int32, parallel
    to `partial.indices`: BY_INTERVAL (-1) means lo[q] <= k < hi[q]; r >= 0 means bits[r]. No `rules`: all by interval.
    `lo` and `hi` are int32 [1 or batch * heads, q_len]. `bits` is int32 [n, bq, bk / 32]: bit c % 32 of word c // 32
    of row q is key c of the block.

    Always: a block that reaches beyond kv_len is partial, and no rule admits a key that is not there.
    `pure`: every stored block is all that the interval admits of it (no bits, and full blocks lie inside; without
    `lo` and `hi` the interval is every key). `label` says in words what the mask is.

    Construction checks everything with one wait for the device, raises InvalidInput that says where the fault is,
    and replaces `sizes` by what the lists hold. Do not write to the tensors afterwards.
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    full: FullBlocks
    partial: BlockLists
    lo: Tensor | None = None
    hi: Tensor | None = None
    rules: Tensor | None = None
    bits: Tensor | None = None
    sizes: Sizes = UNKNOWN
    pure: bool = False
    label: str = ""
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        from sparsek.mask import check

        parts = {name: getattr(self, name) for name in LISTS + TENSORS} | check.plain(self)
        for name, part in parts.items():
            object.__setattr__(self, name, _saveable(part))
        object.__setattr__(self, "sizes", check.check(self))

    @classmethod
    def unchecked(cls, **parts: Any) -> BlockMask:
        """A mask from fields that are known to be right: no check, no sync."""
        return super().unchecked(**{name: _saveable(part) for name, part in parts.items()})

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks (Mb, Nb) of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def rows(self) -> int:
        """batch * heads * Mb."""
        return self.batch * self.heads * self.grid[0]

    @property
    def device(self) -> torch.device:
        return self.full.starts.device

    @property
    def stored_blocks(self) -> int:
        """Blocks visited, summed over batch * heads. Waits for the device once if `sizes` is not exact."""
        return self._counted[0]

    @property
    def heavy_blocks(self) -> int:
        """Blocks of rows more than twice as long as the mean, or an upper bound. Never waits for the device."""
        if "heavy" not in self._memo and "host" in self._memo:
            from sparsek.mask import lists

            host = self.host
            self._memo["heavy"] = lists.heavy_blocks(host.full.counts, host.partial.counts)
        return self._memo.get("heavy", self.sizes.stored)

    @property
    def partial_blocks(self) -> int:
        """How many of the stored blocks have an element rule. Waits for the device once if `sizes` is not exact."""
        return self._counted[1]

    @property
    def _counted(self) -> tuple[int, int]:
        return self.derived("counted", lambda: _count(self))

    @property
    def density(self) -> float:
        """Stored blocks over all blocks; 0.0 where there are none."""
        cells = self.rows * self.grid[1]
        return self.stored_blocks / cells if cells else 0.0

    @property
    def elements(self) -> int:
        """Query-key pairs that are seen, summed over batch * heads. Waits for the device once."""
        from sparsek.mask import view

        return self.derived("elements", lambda: view.elements(self))

    @property
    def nbytes(self) -> int:
        """Bytes of the mask's tensors; a tensor that two lists share counts once."""
        parts = [part for part in _leaves(self) if part is not None]
        return sum({(part.data_ptr(), part.shape): part.nbytes for part in parts}.values())

    @property
    def host(self) -> HostMask:
        """The tensors as numpy arrays. Waits for the device once."""
        return self.derived("host", lambda: _to_host(self))

    @property
    def transposed(self) -> TransposedLists:
        """For every key block the query tiles that visit it. Built once, without a sync.

        Lists that are built while a CUDA graph is captured belong to the graph: they are not kept.
        """
        from sparsek.mask import view

        in_graph = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if in_graph and "transposed" not in self._memo:
            return view.transposed(self)
        return self.derived("transposed", lambda: view.transposed(self))

    def derived(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """What `build()` returned the first time it was asked for under `key`. Plans and transposed lists live here.

        `build` runs outside inference mode: tensors made inside it could never be saved for a backward pass.
        """
        if key not in self._memo:
            with torch.inference_mode(False):
                self._memo.setdefault(key, build())
        return self._memo[key]

    def known(self, key: Hashable) -> Any:
        """What `derived` keeps under `key`, or None if it was never asked for."""
        return self._memo.get(key)

    def verify(self, wait: bool = False) -> None:
        """Raises InvalidInput if the device found a fault in what the mask was made from, such as a NaN score.

        On a GPU `topk` and `from_blocks` check there and do not wait for the finding; until it has arrived this
        returns at once, unless `wait`. A faulty mask is safe to follow, but means nothing. `from_blocks` also counts
        there: what it counted takes the place of the bounds in `sizes`.
        """
        if wait is not True and wait is not False:
            arguments.flag("wait", wait)
        for each in self._memo.get("asked", ()):
            each.tell(self, wait)

    def to(self, device: str | torch.device) -> BlockMask:
        """The same mask on `device`; this very object if it is there already."""
        target = arguments.device("device", device)
        if target == self.device:
            return self
        made = _pytree.tree_map_only(Tensor, lambda part: part.to(target), self)
        made._memo.update({key: self._memo[key] for key in KEPT if key in self._memo})
        return made

    def element_mask(self, rows: Tensor, entries: Tensor) -> Tensor:
        """The rules of partial blocks, bool [n, bq, bk], for int64 `rows` [n] and positions `entries` [n] in
        `partial.indices`: element i is the rule of entry entries[i] in row rows[i]. Queries beyond q_len see nothing.
        """
        from sparsek.mask import view

        return view.checked_element_mask(self, rows, entries)

    def dense_rows(self, first: int, last: int) -> Tensor:
        """Which keys the queries `first` to `last` - 1 see, bool [batch, heads, last - first, kv_len]."""
        from sparsek.mask import view

        return view.dense_rows(self, first, last)

    def to_dense(self) -> Tensor:
        """Which keys every query sees, bool [batch, heads, q_len, kv_len]. InvalidInput above 2^31 elements."""
        from sparsek.mask import view

        return view.to_dense(self)

    # Builders. None waits for a CUDA device, and only `topk` looks at blocks that it does not store. torch.compile does
    # not trace them: under fullgraph=True they are refused, otherwise they run between two graphs.

    @classmethod
    def causal(cls, seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
        """Every query sees the keys up to its own position. `frame`: see `Frame`."""
        from sparsek.mask import structured

        return structured.causal(seq_len, **frame)

    @classmethod
    def sliding_window(
        cls,
        seq_len: int | None = None,
        window: int | None = None,
        sinks: int = 0,
        causal: bool = True,
        **frame: Unpack[Frame],
    ) -> BlockMask:
        """A query at position p sees keys p - window < k <= p (not causal: |p - k| < window), and the first `sinks`
        keys (causal: up to p). The window counts the query's own position. `frame`: see `Frame`.
        """
        from sparsek.mask import structured

        return structured.sliding_window(seq_len, window, sinks, causal, **frame)

    @classmethod
    def strided(
        cls,
        seq_len: int | None = None,
        stride: int | None = None,
        window: int | None = None,
        causal: bool = True,
        **frame: Unpack[Frame],
    ) -> BlockMask:
        """Blocks near the diagonal and every (stride / bk)-th block from there. `stride` is a multiple of bk.

        A tile whose queries stand in key blocks p to p' sees blocks j with p - w < j < p' + w, where w is `window`
        in blocks, rounded up, and further j with (p - j) or (j - p') a multiple of stride / bk. Causal: only keys up
        to the query. Child et al. 2019, "Generating Long Sequences with Sparse Transformers", in blocks.
        """
        from sparsek.mask import structured

        return structured.strided(seq_len, stride, window, causal, **frame)

    @classmethod
    def dilated(
        cls,
        seq_len: int | None = None,
        window: int | None = None,
        dilation: int = 1,
        causal: bool = True,
        **frame: Unpack[Frame],
    ) -> BlockMask:
        """A window with gaps: of every `dilation` blocks one is seen. With `dilation` 1 a window of whole blocks.

        A tile whose queries stand in key blocks p to p' sees these and p - t * dilation, p' + t * dilation for
        0 < t < w, where w is `window` in blocks, rounded up. Causal: only keys up to the query. Beltagy et al. 2020,
        "Longformer", in blocks.
        """
        from sparsek.mask import structured

        return structured.dilated(seq_len, window, dilation, causal, **frame)

    @classmethod
    def bigbird(
        cls,
        seq_len: int | None = None,
        window: int | None = None,
        globals: int = 0,
        random: int = 0,
        seed: int = 0,
        causal: bool = False,
        heads: int = 1,
        **frame: Unpack[Frame],
    ) -> BlockMask:
        """Window, global and random blocks: Zaheer et al. 2020, "Big Bird".

        `window` is that of `strided`. The first `globals` keys, rounded up to blocks, are seen by all queries;
        tiles with a query among the first `globals` positions see all keys. Every other tile sees `random` more
        blocks (fewer if fewer are left), distinct, near uniform, others for each of `heads`, which share one mask if
        nothing is drawn. What is drawn depends on `seed` and the shape, not on the device.
        """
        from sparsek.mask import structured

        return structured.bigbird(seq_len, window, globals, random, seed, causal, heads, **frame)

    @classmethod
    def block_diagonal(
        cls,
        lengths: Any,
        causal: bool = True,
        seq_len: int | None = None,
        block: int | tuple[int, int] = 128,
        device: str | torch.device | None = None,
    ) -> BlockMask:
        """Packed documents: a query sees the keys of its own document, causal up to itself.

        `lengths`: ints, one for each document, as a sequence, an array or a CPU tensor; or one such row for each
        batch item. Each row must sum up to the same length, and to `seq_len` if that is given.
        """
        from sparsek.mask import structured

        return structured.block_diagonal(lengths, causal, seq_len, block, device)

    @classmethod
    def topk(
        cls,
        scores: Tensor,
        k: int,
        causal: bool = False,
        always: Tensor | tuple[int, int] | None = None,
        seq_len: int | None = None,
        **frame: Unpack[Frame],
    ) -> BlockMask:
        """For each query tile the `k` key blocks with the highest scores, on the scores' device.

        `scores` is [1 or B, 1 or H, Mb, Nb] or [Mb, Nb], floating point. -inf means never; causal: nor does a block
        count that lies behind the tile. Rows with fewer blocks to choose from keep them all. Of equal scores any are
        kept, the same ones every time. Blocks that are `always` kept count among the k and may have any score: bool
        [Mb, Nb] (or [H, Mb, Nb]), or (sinks, local): the first `sinks` blocks and the `local` blocks up to the tile's
        own (not causal: and from there on).

        NaN scores, and rows with more than k `always` blocks, raise InvalidInput: on the CPU here, on a GPU when the
        mask is next used (`verify`).
        """
        from sparsek.mask import scored

        return scored.topk(scores, k, causal, always, seq_len, **frame)

    @classmethod
    def from_blocks(
        cls,
        indptr: Any,
        indices: Any,
        q_len: int,
        kv_len: int,
        block: int | tuple[int, int] = 128,
        batch: int = 1,
        heads: int = 1,
        device: str | torch.device | None = None,
    ) -> BlockMask:
        """Every key of the listed blocks: `indptr` [batch * heads * Mb + 1] and `indices` [nnzb], as in BlockPattern.

        Sequences, arrays or int tensors. Lists on the host are checked here; lists on a GPU are checked there, and
        what is found is raised when the mask is next used (`verify`).
        """
        from sparsek.mask import scored

        return scored.from_blocks(indptr, indices, (q_len, kv_len), block, (batch, heads), device)

    # Composition. Waits for the device.

    def __and__(self, other: BlockMask) -> BlockMask:
        """What both masks admit. Lengths and blocks must agree; batch and heads may be 1 in one of them."""
        from sparsek.mask import compose

        return compose.both(self, other) if isinstance(other, BlockMask) else NotImplemented

    def __or__(self, other: BlockMask) -> BlockMask:
        """What either mask admits. Lengths and blocks must agree; batch and heads may be 1 in one of them."""
        from sparsek.mask import compose

        return compose.either(self, other) if isinstance(other, BlockMask) else NotImplemented

    @classmethod
    def per_head(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """One mask after the other along the heads. No sync."""
        from sparsek.mask import compose

        return compose.per_head(masks)

    @classmethod
    def per_batch(cls, masks: Sequence[BlockMask]) -> BlockMask:
        """One mask after the other along the batch. No sync."""
        from sparsek.mask import compose

        return compose.per_batch(masks)

    # Other libraries: mask_convert says more. These may wait for the device.

    @classmethod
    def from_dense(cls, dense: Tensor, block: int | tuple[int, int] = 128) -> BlockMask:
        """From bool [q_len, kv_len], [heads, q_len, kv_len] or [batch, heads, q_len, kv_len]: true where seen."""
        from sparsek.mask import interop

        return interop.from_dense(dense, block)

    @classmethod
    def from_transformers(cls, mask: Tensor, block: int | tuple[int, int] = 128) -> BlockMask:
        """From a 4-D `attention_mask` of Hugging Face transformers, bool or additive."""
        from sparsek.mask import interop

        return interop.from_transformers(mask, block)

    @classmethod
    def from_flex(cls, bm: FlexMask) -> BlockMask:
        """From a FlexAttention BlockMask, whose `mask_mod` is asked about partial blocks only."""
        from sparsek.mask import interop

        return interop.from_flex(bm)

    @classmethod
    def from_pattern(cls, pattern: BlockPattern) -> BlockMask:
        """Every key of the stored blocks of a pattern [q_len, kv_len]."""
        from sparsek.mask import interop

        return interop.from_pattern(pattern)

    def to_flex(self, q_heads: int | None = None) -> FlexMask:
        """As a FlexAttention BlockMask. Its lists are dense: eight bytes or more for each block, stored or not."""
        from sparsek.mask import interop

        return interop.to_flex(self, q_heads)

    def to_fa4(self, q_heads: int | None = None) -> FlashLists:
        """As the lists that FlashAttention-4 takes, and tensors for the rule of its partial blocks."""
        from sparsek.mask import interop

        return interop.to_fa4(self, q_heads)

    def to_pattern(self, head: int = 0, batch: int = 0) -> BlockPattern:
        """Which blocks one head visits, whole or in part."""
        from sparsek.mask import interop

        return interop.to_pattern(self, head, batch)

    def plot(self, path: str | os.PathLike[str] | None = None, head: int = 0, batch: int = 0) -> str:
        """A picture of the blocks of one head; see `sparsek.pictures.masks`."""
        from sparsek.pictures import masks

        return masks.plot(self, path, head, batch)

    def __repr__(self) -> str:
        """One line of facts. No sync."""
        self.verify()
        size = (
            f"{self.label or 'blocks'}, {self.q_len} x {self.kv_len}, block {self.block[0]}x{self.block[1]}"
        )
        shared = f"batch {self.batch}, heads {self.heads}"
        if type(self.full.starts) is not Tensor:
            return f"BlockMask({size}, {shared}, lists not concrete)"
        return f"BlockMask({size}, {shared}, {self.summary}, {self.device})"

    @property
    def summary(self) -> str:
        """How much is stored, in words: "528 of 1024 blocks, 51.6 %, 32 partial". No sync: "at most" for bounds."""
        cells = self.rows * self.grid[1]
        share = 100 * self.sizes.stored / cells if cells else 0.0
        most = "" if self.sizes.exact else "at most "
        return (
            f"{most}{self.sizes.stored} of {cells} blocks, {share:.3g} %, {most}{self.sizes.partial} partial"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self.verify(wait=True)
        return super().__reduce__()


KEPT = ("host", "counted", "elements", "asked", "heavy")
LISTS = ("full", "partial")
TENSORS = ("lo", "hi", "rules", "bits")
# After the dataclass has been made: to it the descriptor would be a default.
setattr(BlockMask, "full", FullBlocks())  # noqa: B010


def _saveable(part: Any) -> Any:
    """A part of a mask, whose tensors a backward pass can save."""
    return BlockLists(*map(saveable, part)) if isinstance(part, BlockLists) else saveable(part)


def _leaves(mask: BlockMask) -> list[Any]:
    return [*mask.full, *mask.partial, *(getattr(mask, name) for name in TENSORS)]


def _count(mask: BlockMask) -> tuple[int, int]:
    if mask.sizes.exact:
        return mask.sizes.stored, mask.sizes.partial
    full, partial = torch.stack((mask.full.counts.sum(), mask.partial.counts.sum())).tolist()
    mask.verify()
    return full + partial, partial


def _to_host(mask: BlockMask) -> HostMask:
    """Copies that wait for the device once: the last of them, on the same stream."""
    parts = [None if part is None else part.to("cpu", non_blocking=True) for part in _leaves(mask)]
    if mask.device.type == "cuda":
        torch.cuda.current_stream(mask.device).synchronize()
    arrays: list[Any] = [None if part is None else part.numpy() for part in parts]
    return HostMask(HostLists(*arrays[:3]), HostLists(*arrays[3:6]), *arrays[6:])
