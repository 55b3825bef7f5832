"""BlockMask: the query-key pairs of attention, as lists of key blocks for each query tile.

The fields are those of `MaskData`, and every method of another module is named here: builders of build/, conversions of
convert/, combinations of `compose`, the elements of `elements`, and the checks of the constructor of `check`. All those
modules know `MaskData` alone.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, overload

import torch

from sparsek.attn.mask import check, compose, traced
from sparsek.attn.mask import elements as view
from sparsek.attn.mask.build import bigbird, lists, scored, structured
from sparsek.attn.mask.convert import flex, interop, xformers
from sparsek.attn.mask.data import LISTS, TENSORS, Leaf, MaskData, saveable_part
from sparsek.attn.mask.lists import BlockLists, Frame, TransposedLists
from sparsek.core.record import record
from sparsek.core.tracing import untransformed
from sparsek.pictures import masks as pictures

if TYPE_CHECKING:
    from typing_extensions import Unpack


class FullBlocks(Leaf):
    """The two meanings of `full`: `mask.full` are the full blocks of a mask, `BlockMask.full(seq_len)` makes a mask."""

    @overload
    def __get__(self, mask: None, owner: type[BlockMask]) -> FullBlocks: ...
    @overload
    def __get__(self, mask: BlockMask, owner: type[BlockMask]) -> BlockLists: ...
    def __get__(self, mask: BlockMask | None, owner: type[BlockMask]) -> Any:
        """The builder, for the class; the instance attribute `full` takes precedence over this descriptor."""
        return self if mask is None else super().__get__(mask)

    def __call__(self, seq_len: int | None = None, **frame: Unpack[Frame]) -> BlockMask:
        """Return the mask in which every query sees every key.

        Args:
            seq_len: Queries and keys, in tokens, where there are as many of both.
            **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

        Returns:
            A mask shared by all batch items and heads. Made without a host sync.

        Raises:
            InvalidInput: For lengths, blocks or devices that no mask has.

        Example:
            >>> import sparsek as sk
            >>> sk.BlockMask.full(q_len=100, kv_len=300)
            BlockMask(full, 100 x 300, block 128x128, batch 1, heads 1, 3 of 3 blocks, 100 %, 1 partial, cpu)
        """
        return structured.full(BlockMask, seq_len, **frame)


@record(leaves=LISTS + TENSORS)
class BlockMask(MaskData):
    """Which keys each query sees, as the key blocks that each query tile visits.

    Builders make masks of known form (`causal`, `sliding_window`, `strided`, `dilated`, `bigbird`, `block_diagonal`,
    `documents`), of scores (`topk`, `cumulative`), of lists (`from_block_map`, `from_indices`, `from_blocks`,
    `from_pattern`), and of other forms (`from_dense`, `from_mask_mod`, `from_flex`, `from_transformers`,
    `from_xformers`). `a & b` and `a | b` combine masks; `per_head` and `per_batch` join them.

    The constructor takes the lists themselves. Row r = (b * heads + h) * Mb + i describes query tile i of head h of
    batch item b, with i < Mb = ceil(q_len / bq). A query sees every key of a full block, and of a partial block the
    keys that the block's rule admits. The constructor checks everything, with one wait for the device, and replaces
    `sizes` by the true ones. The tensors must not be written to afterwards.

    Attributes:
        q_len: Queries, in tokens.
        kv_len: Keys, in tokens.
        block: (bq, bk), in tokens, each 64 or 128; see `members`.
        batch: Batch items with lists of their own; 1 if all share them.
        heads: Heads with lists of their own, those of q or of k; 1 if all share them.
        full: `BlockLists` of the full blocks. None of them reaches beyond kv_len.
        partial: `BlockLists` of the partial blocks.
        lo: int32 [1 or batch * heads, q_len] or None. By interval, query q sees key k if lo[q] <= k < hi[q].
        hi: Like `lo`; at most kv_len.
        rules: int32, parallel to `partial.indices`: BY_INTERVAL (-1), or r >= 0 for bits[r]. None: all are by interval.
        bits: int32 [n, bq, bk / 32] or None: bit c % 32 of word c // 32 of row q is key c of the block.
        sizes: Stored blocks, partial blocks, and the blocks of the longest row; upper bounds where `exact` is False.
        pure: Whether the interval explains every stored block: there are no bits, and full blocks lie inside. Without
            `lo` and `hi` the interval is every key.
        label: The mask in words.
        members: `Members` (rows, window, sinks) or None. With it the mask has `lo` and `hi`, no `bits`, and W words of
            `rules` for each partial entry, W = ceil(bq / 32): query q of a tile has bit q, and sees the keys k of its
            interval for which it is 1, k >= hi[q] - window or k < lo[q] + sinks. Then bq is a power of two up to 128,
            and `rows` is 1.

    Raises:
        InvalidInput: For a fault in the lists, with its position.

    Example:
        >>> import sparsek as sk
        >>> mask = sk.BlockMask.sliding_window(320, window=128, block=64)
        >>> mask.stored_blocks, mask.grid, mask.density
        (12, (5, 5), 0.48)
        >>> print(mask.plot())
        ┌──────────┐
        │▒▒        │
        │██▒▒      │
        │▒▒██▒▒    │
        │  ▒▒██▒▒  │
        │    ▒▒██▒▒│
        └──────────┘
        BlockMask(sliding_window(128), 320 x 320, block 64x64, batch 1, heads 1, 12 of 25 blocks, 48 %, 8 partial, cpu)
        █ full, ▒ partial
    """

    full: FullBlocks = FullBlocks("full")

    def __post_init__(self) -> None:
        parts = {name: getattr(self, name) for name in LISTS + TENSORS} | check.plain(self)
        for name, part in parts.items():
            object.__setattr__(self, name, saveable_part(part))
        object.__setattr__(self, "sizes", check.check(self))

    @property
    def elements(self) -> int:
        """Query-key pairs that are seen, summed over batch * heads. Waits for the device once."""
        return self.derived("elements", lambda: view.elements(self))

    @property
    def transposed(self) -> TransposedLists:
        """For every key block the query tiles that visit it. Built once, without a sync.

        Lists that are built while a CUDA graph is captured belong to the graph and are not kept.
        """
        in_graph = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if in_graph and "transposed" not in self._memo:
            return view.transposed(self)
        return self.derived("transposed", lambda: view.transposed(self))

    element_mask = view.checked_element_mask
    dense_rows = view.dense_rows
    to_dense = view.to_dense

    # Builders. None waits for a CUDA device, and only `topk` reads blocks that it does not store. Inside torch.compile
    # they are constants or one node of the graph: see attn/mask/traced.py.
    causal = classmethod(structured.causal)
    sliding_window = classmethod(structured.sliding_window)
    strided = classmethod(structured.strided)
    dilated = classmethod(structured.dilated)
    bigbird = classmethod(bigbird.bigbird)
    block_diagonal = classmethod(structured.block_diagonal)
    documents = classmethod(structured.documents)
    topk = classmethod(scored.topk)
    cumulative = classmethod(scored.cumulative)
    from_block_map = classmethod(lists.from_block_map)
    from_indices = classmethod(lists.from_indices)
    from_blocks = classmethod(lists.from_blocks)

    # Combinations. These wait for the device. Like conversions, they raise inside torch.compile with fullgraph=True,
    # and run between two graphs otherwise.
    __and__ = compose.both
    __or__ = compose.either
    __invert__ = compose.inverted
    per_head = classmethod(compose.per_head)
    per_batch = classmethod(compose.per_batch)

    # Other libraries. These may wait for the device.
    from_dense = classmethod(interop.from_dense)
    from_transformers = classmethod(interop.from_transformers)
    from_flex = classmethod(flex.from_flex)
    from_mask_mod = classmethod(flex.from_mask_mod)
    from_xformers = classmethod(xformers.from_xformers)
    from_pattern = classmethod(interop.from_pattern)
    to_flex = interop.to_flex
    to_fa4 = interop.to_fa4
    to_pattern = interop.to_pattern

    def drawn(self, head: int = 0, batch: int = 0) -> pictures.HeadPicture:
        """One head of one batch item, for pictures. Waits for the device."""
        first = interop.as_row(self, head, batch)
        self.verify(wait=True)
        rows = slice(first, first + self.grid[0])

        def read(given: BlockLists) -> pictures.PictureRows:
            parts = given.starts[rows], given.counts[rows], given.indices
            return pictures.PictureRows(*(part.cpu().numpy() for part in parts))

        full, partial = (untransformed(functools.partial(read, each)) for each in (self.full, self.partial))
        parts = (("head", head, self.heads), ("batch item", batch, self.batch))
        which = ", ".join(f"{name} {at} of 0 to {count - 1}" for name, at, count in parts if count > 1)
        shape, name = (self.q_len, self.kv_len), self.label or "block mask"
        return pictures.HeadPicture(shape, self.block, full, partial, name, repr(self), which)

    plot = pictures.plot


traced.makes(BlockMask)
