"""PageLists: the key blocks that tiles of queries visit, in a ragged batch over paged keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import int_or_pair

TILES = (1, 64, 128)  # queries of a tile
LEAST, MOST = 16, 1 << 20  # keys of a block


@dataclass(frozen=True, eq=False)
class PageLists:
    """The key blocks that each tile of queries visits, in a ragged batch over paged keys.

    Tile i of a request is its queries i * bq to (i + 1) * bq - 1, and block j its keys j * bk to (j + 1) * bk - 1: a
    block is logical, and the block table has its pages. Row h * tiles + first + i describes tile i of a
    request for head h, where `first` is the number of tiles of all requests before: the sum of ceil(queries / bq). A
    query sees the keys of its tile's blocks that exist and, if the call is causal, do not stand behind it. Entries
    below 0 or beyond the keys are skipped. The other entries of a row, full and partial together, must be unique: a
    kernel may count a block once or as often as it occurs. `attention_paged` with check=True finds repeats.

    Attributes:
        full: Blocks that every query of the tile sees whole, `BlockLists` of heads * tiles rows. They need no test.
        partial: Further blocks, which are tested element by element.
        heads: Heads with lists of their own: 1, those of k, or those of q.
        tiles: Rows of one head; at least the tiles of all requests. On a GPU, where nobody reads how many these are,
            `attention_paged` refuses too few with check=True alone, and none at all in every call.
        block: (bq, bk), in tokens: bq 1, 64 or 128; bk a power of two from 16 to 2^20.
        longest: At most this many blocks in a row, full and partial together. Kernels leave out further ones.

    Raises:
        InvalidInput: For other blocks, and for lists of other shapes, dtypes or devices. Their values are checked by
            `attention_paged` with check=True.

    Calls read the lists on the device, so a CUDA graph follows lists that are written in place.
    """

    full: BlockLists
    partial: BlockLists
    heads: int
    tiles: int
    block: tuple[int, int]
    longest: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", page_block(self.block))
        for name, least in (("heads", 1), ("tiles", 0), ("longest", 0)):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name), least))
        for name in ("full", "partial"):
            lists = getattr(self, name)
            if not isinstance(lists, (tuple, list)) or len(lists) != 3:
                raise InvalidInput(
                    f"{name} is {arguments.shown(lists)}; it must be BlockLists (starts, counts, indices)"
                )
            for part, x in zip(BlockLists._fields, lists, strict=True):
                check_list(f"{name}.{part}", x, 1)
            object.__setattr__(self, name, BlockLists(*lists))
        for name, (starts, counts, indices) in (("full", self.full), ("partial", self.partial)):
            for x in (starts, counts, indices):
                arguments.one_device("full.starts are", self.device, name, x.device)
            if not starts.shape[0] == counts.shape[0] == self.heads * self.tiles:
                raise InvalidInput(
                    f"{name} has {starts.shape[0]} starts and {counts.shape[0]} counts; {self.heads} heads of "
                    f"{self.tiles} tiles need {self.heads * self.tiles}"
                )

    @classmethod
    def from_indices(cls, indices: Tensor, block: tuple[int, int], counts: Tensor | None = None) -> PageLists:
        """Return the lists of the key blocks in `indices`, without a copy and without a sync.

        Every block is tested element by element, so a block may hold keys behind a query, or beyond the last key.

        Args:
            indices: int32 [heads, tiles, n], contiguous: key blocks of each tile of queries, in any order, each
                at most once. Entries below 0 are skipped. Kept as it is: later writes to it change the lists.
            block: (bq, bk), the queries of a tile and the keys of a block: (1, 64) lists 64 keys at a time for every
                query. bq is 1, 64 or 128; bk a power of two from 16 to 2^20.
            counts: int32 [heads, tiles], contiguous: how many first entries of each row count. All n for None.

        Raises:
            InvalidInput: For other shapes, dtypes, layouts or blocks.

        Example:
            >>> import torch, sparsek as sk
            >>> indices = torch.tensor([[[0, 3, 5], [0, 2, -1]]], dtype=torch.int32)
            >>> lists = sk.PageLists.from_indices(indices, block=(1, 64))
            >>> lists.heads, lists.tiles, lists.longest
            (1, 2, 3)
        """
        sides = page_block(block)
        check_list("indices", indices, 3)
        heads, tiles, n = indices.shape
        if not heads:
            raise InvalidInput(f"indices is {list(indices.shape)}; it needs a head: [heads, tiles, n]")
        if indices.numel() > INT32_MAX:
            raise InvalidInput(
                f"indices has {indices.numel()} entries; at most {INT32_MAX} (int32) can be indexed"
            )
        rows, device = heads * tiles, indices.device
        if counts is not None:
            check_list("counts", counts, 2)
            arguments.one_device("indices are", device, "counts", counts.device)
            if tuple(counts.shape) != (heads, tiles):
                raise InvalidInput(
                    f"counts is {list(counts.shape)}; indices {list(indices.shape)} need one for each row, "
                    f"{[heads, tiles]}"
                )
        starts = torch.arange(rows, dtype=torch.int32, device=device) * n
        many = torch.full((rows,), n, dtype=torch.int32, device=device) if counts is None else counts.view(-1)
        zeros = torch.zeros((rows,), dtype=torch.int32, device=device)
        # A kernel may form the address of an entry that it does not read, so both lists have memory.
        none = torch.full((1,), -1, dtype=torch.int32, device=device)
        entries = indices.view(-1) if indices.numel() else none
        return cls(
            BlockLists(zeros, zeros.clone(), none), BlockLists(starts, many, entries), heads, tiles, sides, n
        )

    @classmethod
    def of_masks(cls, masks: Sequence[BlockMask], *, verify: bool = True) -> PageLists:
        """Return the lists of masks of single requests, in the order of the batch.

        Paged attention tests the elements of a partial block by causality and the last key alone. So masks must have no
        other rule: those of `topk`, `cumulative`, `from_block_map`, `from_indices`, `causal` and `full`, with the last
        query at the last key, and those of `sk.policies`; not windows, documents, or bits.

        Args:
            masks: One `BlockMask` for each request that has queries, of its queries and keys, on one device. All have
                one batch item and one block; those of 1 head serve all heads of the others.
            verify: Whether to check the element rules, with one wait for the device. Without it masks of other rules
                give wrong results.

        Raises:
            InvalidInput: For masks that do not go together, or have other rules.

        Example:
            >>> import sparsek as sk
            >>> masks = [sk.BlockMask.causal(300, block=64), sk.BlockMask.causal(q_len=70, kv_len=900, block=64)]
            >>> sk.PageLists.of_masks(masks).tiles
            7
        """
        arguments.flag("verify", verify)
        if not isinstance(masks, Sequence) or not masks or not all(isinstance(x, BlockMask) for x in masks):
            raise InvalidInput(
                f"masks is {arguments.shown(masks)}; it must be a list of one or more BlockMask"
            )
        heads = _one_shape(masks)
        if verify and not torch.compiler.is_compiling():
            _check_rules(masks)
        tiles = sum(mask.grid[0] for mask in masks)
        full, partial = (
            _joined([getattr(x, name) for x in masks], masks, heads) for name in ("full", "partial")
        )
        longest = max(mask.sizes.longest for mask in masks)
        return cls(full, partial, heads, tiles, masks[0].block, longest)

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.full.starts.device

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Starts, counts and indices of the full blocks, then those of the partial ones."""
        return *self.full, *self.partial


def _one_shape(masks: Sequence[BlockMask]) -> int:
    """The heads of the joined lists. InvalidInput for masks that do not go together."""
    heads = max(mask.heads for mask in masks)
    for i, mask in enumerate(masks):
        arguments.one_device("masks[0] is", masks[0].device, f"masks[{i}]", mask.device)
        if mask.batch != 1 or mask.heads not in (1, heads) or mask.block != masks[0].block:
            raise InvalidInput(
                f"masks[{i}] has {mask.batch} batch items, {mask.heads} heads and blocks {mask.block}; masks of "
                f"requests have 1 batch item, 1 or {heads} heads, and one block, {masks[0].block}"
            )
        if mask.rules is not None and (mask.bits is not None or mask.members is not None):
            rule = "bits" if mask.members is None else "members"
            raise InvalidInput(
                f"masks[{i}] ({mask.label}) has partial blocks by {rule}; paged attention tests elements by causality "
                "alone. Use whole blocks, such as BlockMask.from_block_map"
            )
    return heads


def _check_rules(masks: Sequence[BlockMask]) -> None:
    """InvalidInput for intervals that are neither causal nor all keys. Waits once."""
    wrong = []
    for mask in masks:
        if mask.lo is None or mask.hi is None:
            wrong.append(torch.zeros(1, dtype=torch.bool, device=mask.device).any())
            continue
        here = torch.arange(mask.q_len, dtype=torch.int64, device=mask.device) + (
            mask.kv_len - mask.q_len + 1
        )
        seen = mask.hi > mask.lo
        causal = ((mask.lo == 0) & (mask.hi == here.clamp(0, mask.kv_len))) | (~seen & (here <= 0))
        every = (mask.lo == 0) & (mask.hi == mask.kv_len)
        wrong.append(~(causal.all() | every.all()))
    for i, bad in enumerate(torch.stack(wrong).tolist()):
        if bad:
            raise InvalidInput(
                f"masks[{i}] ({masks[i].label}) has partial blocks by other rules than causality with the last "
                "query at the last key; paged attention has windows as MaskPolicy(window=..., sinks=...)"
            )


def _joined(parts: Sequence[BlockLists], masks: Sequence[BlockMask], heads: int) -> BlockLists:
    """The rows of all masks, head by head; masks of one head serve all."""
    starts, counts, before = [], [], 0
    for (first, many, indices), mask in zip(parts, masks, strict=True):
        rows = (mask.heads, mask.grid[0])
        starts.append((first.view(rows) + before).expand(heads, -1))
        counts.append(many.view(rows).expand(heads, -1))
        before += indices.shape[0]
    if before > INT32_MAX:
        raise InvalidInput(f"the masks have {before} entries; at most {INT32_MAX} (int32) can be indexed")
    entries = torch.cat([indices for *_, indices in parts])
    if not before:  # a kernel may form the address of an entry that it does not read
        entries = torch.full((1,), -1, dtype=torch.int32, device=entries.device)
    return BlockLists(torch.cat(starts, 1).flatten(), torch.cat(counts, 1).flatten(), entries)


def page_block(block: Any) -> tuple[int, int]:
    """A checked (bq, bk) of lists over pages."""
    sides = int_or_pair(block) if isinstance(block, (tuple, list)) else None
    if (
        sides is not None
        and sides[0] in TILES
        and LEAST <= sides[1] <= MOST
        and not sides[1] & (sides[1] - 1)
    ):
        return sides
    raise InvalidInput(
        f"block is {arguments.shown(block)}; it must be a pair (bq, bk) of 1, 64 or 128 queries and a power of two "
        f"of keys from {LEAST} to {MOST}"
    )


def check_list(name: str, x: Any, ndim: int) -> None:
    """InvalidInput unless x is a contiguous int32 tensor with `ndim` dims."""
    arguments.tensor(name, x, (torch.int32,), ndim)
    check_contiguous(name, x)


def check_contiguous(name: str, x: Tensor) -> None:
    """InvalidInput unless a tensor is."""
    if not x.is_contiguous():
        raise InvalidInput(f"{name} has strides {list(x.stride())}; call {name}.contiguous()")
