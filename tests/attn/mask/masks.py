"""What holds for every block mask, checked against its dense form."""

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.data import leaves_of
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.mask import BlockMask

ABSENT, FULL, PARTIAL = 0, 1, 2


def kinds(mask: BlockMask) -> Tensor:
    """What each block is, int [batch * heads, Mb, Nb]."""
    found = torch.full((mask.rows, mask.grid[1]), ABSENT)
    for kind, lists in ((FULL, mask.host.full), (PARTIAL, mask.host.partial)):
        for row, (start, count) in enumerate(zip(lists.starts, lists.counts, strict=True)):
            found[row, lists.indices[start : start + count].tolist()] = kind
    return found.view(mask.batch * mask.heads, *mask.grid)


def check_mask(mask: BlockMask) -> Tensor:
    """The dense form of a mask on the CPU, all of whose promises hold."""
    checked = BlockMask(*(getattr(mask, name) for name in BlockMask._fields))
    bounds = zip(checked.sizes[:3], mask.sizes[:3], strict=True)
    assert all(true == said if mask.sizes.exact else true <= said for true, said in bounds)
    assert (mask.stored_blocks, mask.partial_blocks) == checked.sizes[:2]
    seen = mask.to_dense()
    assert seen.shape == (mask.batch, mask.heads, mask.q_len, mask.kv_len)
    assert mask.elements == int(seen.sum())
    found = kinds(mask)
    assert torch.equal(found, expected_kinds(mask, seen))
    assert torch.equal(transposed_kinds(mask), found)
    return seen


def expected_kinds(mask: BlockMask, seen: Tensor) -> Tensor:
    """Full blocks are those that every query sees whole, and blocks that none sees are not stored."""
    (tiles, columns), (bq, bk) = mask.grid, mask.block
    here = torch.zeros(tiles * bq, dtype=torch.bool)
    here[: mask.q_len] = True
    whole = torch.zeros(mask.batch * mask.heads, tiles * bq, columns * bk, dtype=torch.bool)
    whole[:, : mask.q_len, : mask.kv_len] = seen.flatten(0, 1)
    blocks = whole.view(len(whole), tiles, bq, columns, bk)
    every = (blocks.all(4) | ~here.view(tiles, bq, 1)).all(2)
    return torch.where(every, FULL, torch.where(blocks.any(4).any(2), PARTIAL, ABSENT))


def transposed_kinds(mask: BlockMask) -> Tensor:
    """What each block is, from the transposed lists, whose entries must name the mask's own."""
    (tiles, columns), groups = mask.grid, mask.batch * mask.heads
    found, flipped = torch.full((groups, tiles, columns), ABSENT), mask.transposed
    for kind, lists, entries, own in (
        (FULL, flipped.full, flipped.full_entries, mask.full),
        (PARTIAL, flipped.partial, flipped.partial_entries, mask.partial),
    ):
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in (*lists, entries))
        assert lists.starts.numel() == lists.counts.numel() == groups * columns
        for row, (start, count) in enumerate(zip(lists.starts.tolist(), lists.counts.tolist(), strict=True)):
            at, group, column = slice(start, start + count), row // columns, row % columns
            seen = lists.indices[at]
            assert (seen.diff() > 0).all()
            _check_entries(own, group * tiles + seen, column, entries[at])
            found[group, seen.long(), column] = kind
    return found


def _check_entries(own: BlockLists, rows: Tensor, column: int, entries: Tensor) -> None:
    starts, counts = own.starts[rows], own.counts[rows]
    assert ((starts <= entries) & (entries < starts + counts)).all()
    assert (own.indices[entries] == column).all()


def in_one_buffer(mask: BlockMask) -> Any:
    """The same mask with all tensors in one buffer."""
    made = MaskLayout.like(mask, leaves_of(mask))
    base = torch.randint(-9, 9, (made.length,), dtype=torch.int32)
    for x, place in zip(leaves_of(mask), made.leaves(base), strict=True):
        if x is not None:
            place.copy_(x)
    return BlockMask.of_layout(made, base)
