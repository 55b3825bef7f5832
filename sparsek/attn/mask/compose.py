"""Intersection and union of masks, and masks joined along heads or batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsek.attn.mask.build.tiles import TileMask
from sparsek.attn.mask.data import Mask, MaskData
from sparsek.attn.mask.elements import CHUNK, element_mask, find, refuse_members, stored_cells
from sparsek.attn.mask.lists import BY_INTERVAL, BlockLists, Sizes, check_stored
from sparsek.attn.mask.readback import DeferredSizes
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import not_traced


class Placed:
    """A mask in the grid of another that has as many or more batch items and heads."""

    def __init__(self, mask: MaskData, batch: int, heads: int) -> None:
        self.mask, tiles = mask, mask.grid[0]
        row = torch.arange(batch * heads * tiles, device=mask.device)
        b, h, i = row // (heads * tiles), row // tiles % heads, row % tiles
        b, h = b * mask.batch // batch, h * mask.heads // heads
        self.rows = (b * mask.heads + h) * tiles + i

    @property
    def cells(self) -> Tensor:
        """Row * Nb + column of every stored block, int64, in no order."""
        return stored_cells(self.mask, self.rows)

    def find(self, cells: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each cell: whether the mask stores it as full, whether as partial, and its entry if partial."""
        columns = self.mask.grid[1]
        rows, column = self.rows[cells // columns], cells % columns
        full, _ = find(self.mask.full, rows, column, self.mask.sizes.longest)
        partial, entry = find(self.mask.partial, rows, column, self.mask.sizes.longest)
        return full, partial, entry

    def seen(self, cells: Tensor) -> Tensor:
        """The admitted elements of each cell, bool [n, bq, bk]."""
        full, partial, entry = self.find(cells)
        seen = full[:, None, None].repeat(1, *self.mask.block)
        rows = self.rows[cells // self.mask.grid[1]]
        seen[partial] = element_mask(self.mask, rows[partial], entry[partial])
        return seen


@not_traced("a block mask")
def both(a: Mask, other: MaskData) -> Mask:
    """Return the intersection: a query sees a key that both masks admit. Waits for the device.

    Args:
        other: A mask of the same lengths, block and device. Batch and heads of one may be 1, or heads a divisor.

    Raises:
        InvalidInput: For masks that do not fit together.

    Example:
        >>> import sparsek as sk
        >>> mask = sk.BlockMask.causal(512) & sk.BlockMask.block_diagonal([200, 312], causal=False)
        >>> mask.label
        'causal & block_diagonal(2 documents, causal=False)'
    """
    if not isinstance(other, type(a)):
        return _not_a_mask(other, "&")
    # Searches for the blocks of the mask that has fewer in the other mask.
    a_placed, b_placed, made = _placed(a, other, "&")
    fewer, more = sorted(
        (a_placed, b_placed), key=lambda each: each.mask.sizes.stored / max(each.mask.rows, 1)
    )
    cells = fewer.cells
    full, partial, _ = more.find(cells)
    return _filled(type(a), made, cells[full | partial], a_placed, b_placed, "&")


@not_traced("a block mask")
def either(a: Mask, other: MaskData) -> Mask:
    """Return the union: a query sees a key that either mask admits. Waits for the device.

    Args:
        other: A mask of the same lengths, block and device. Batch and heads of one may be 1, or heads a divisor.

    Raises:
        InvalidInput: For masks that do not fit together.

    Example:
        >>> import sparsek as sk
        >>> window, dilated = sk.BlockMask.sliding_window(512, 64), sk.BlockMask.dilated(512, 128, dilation=2)
        >>> (window | dilated).stored_blocks
        7
    """
    if not isinstance(other, type(a)):
        return _not_a_mask(other, "|")
    a_placed, b_placed, made = _placed(a, other, "|")
    cells = torch.cat((a_placed.cells, b_placed.cells)).unique()
    return _filled(type(a), made, cells, a_placed, b_placed, "|")


def inverted(a: MaskData) -> NoReturn:
    """InvalidInput, with how to build the complement: most of its blocks would be stored."""
    raise InvalidInput("a BlockMask has no ~; build the complement by BlockMask.from_dense(~mask.to_dense())")


def _not_a_mask(other: Any, sign: str) -> Any:
    """InvalidInput for a tensor; for other objects what Python's operators return."""
    if isinstance(other, Tensor):
        raise InvalidInput(
            f"a BlockMask does not combine with a tensor; write mask {sign} BlockMask.from_dense(tensor)"
        )
    return NotImplemented


def _named(mask: MaskData) -> str:
    label = mask.label or "blocks"
    return f"({label})" if " & " in label or " | " in label else label


def _placed(a: MaskData, b: MaskData, sign: str) -> tuple[Placed, Placed, TileMask]:
    """Both masks in the grid of the result, and the empty result."""
    for mask in (a, b):
        refuse_members(mask, sign)
    _check_alike(type(a), (a, b), sign)
    for mask in (a, b):
        mask.verify(wait=True)
    batch, heads = max(a.batch, b.batch), max(a.heads, b.heads)
    if min(a.batch, b.batch) not in (1, batch):
        raise InvalidInput(
            f"masks of {a.batch} {sign} {b.batch} batch items; they must be as many, or 1 for all"
        )
    if heads % min(a.heads, b.heads):
        raise InvalidInput(f"masks of {a.heads} {sign} {b.heads} heads; one number must divide the other")
    made = TileMask((a.q_len, a.kv_len), a.block, batch, heads, a.device)
    return Placed(a, batch, heads), Placed(b, batch, heads), made


def _filled(cls: type[Mask], made: TileMask, cells: Tensor, a: Placed, b: Placed, sign: str) -> Mask:
    """The mask of these cells: full where the full lists alone decide, else by elements, a chunk at a time."""
    joined = torch.logical_and if sign == "&" else torch.logical_or
    whole = joined(a.find(cells)[0], b.find(cells)[0])
    made.add_full(cells[whole])
    for some in cells[~whole].split(CHUNK // (made.block[0] * made.block[1])):
        made.add(some, joined(a.seen(some), b.seen(some)))
    return made.mask(cls, f"{_named(a.mask)} {sign} {_named(b.mask)}")


@not_traced("a block mask")
def per_head(cls: type[Mask], masks: Sequence[Mask]) -> Mask:
    """Return one mask after the other along the heads. No sync.

    Args:
        masks: Masks of the same lengths, block and device, each of one or more heads. A mask that comes twice is stored
            once.

    Raises:
        InvalidInput: For no masks, and for masks that do not fit together.

    Example:
        >>> import sparsek as sk
        >>> local, wide = sk.BlockMask.sliding_window(512, 64), sk.BlockMask.causal(512)
        >>> sk.BlockMask.per_head([local] * 6 + [wide] * 2).heads
        8
    """
    return _Stack(cls, masks, "per_head", axis=1).mask()


@not_traced("a block mask")
def per_batch(cls: type[Mask], masks: Sequence[Mask]) -> Mask:
    """Return one mask after the other along the batch. No sync.

    Args:
        masks: Masks of the same lengths, block and device, each of one or more batch items. A mask that comes twice is
            stored once.

    Raises:
        InvalidInput: For no masks, and for masks that do not fit together.

    Example:
        >>> import sparsek as sk
        >>> padded = (sk.BlockMask.causal(512), sk.BlockMask.block_diagonal([300, 212]))
        >>> sk.BlockMask.per_batch(padded).batch
        2
    """
    return _Stack(cls, masks, "per_batch", axis=0).mask()


class _Stack:
    """Masks one after the other along the batch (axis 0) or the heads (axis 1). Repeated masks are stored once."""

    def __init__(self, cls: type[MaskData], masks: Sequence[MaskData], name: str, axis: int) -> None:
        if not isinstance(masks, Sequence):
            raise InvalidInput(f"{name} takes a list of masks, got {arguments.shown(masks)}")
        _check_alike(cls, masks, name, "members")
        self.masks, self.name, self.axis = list(masks), name, axis
        self.distinct = list(dict.fromkeys(self.masks))
        self.first, across = self.masks[0], ("heads", "batch")[axis]
        self.across = max(getattr(mask, across) for mask in self.masks)
        for at, mask in enumerate(self.masks):
            if getattr(mask, across) not in (1, self.across):
                raise InvalidInput(
                    f"{name}: mask {at} has {across} {getattr(mask, across)} and others {self.across}; "
                    f"{across} must be the same in all masks, or 1"
                )

    def mask(self) -> Any:
        full, partial = self._lists("full"), self._lists("partial")
        lo, hi = self._interval()
        rules, bits = self._bits()
        along = sum(getattr(mask, ("batch", "heads")[self.axis]) for mask in self.masks)
        batch, heads = (self.across, along) if self.axis else (along, self.across)
        made = self.first.unchecked(
            q_len=self.first.q_len, kv_len=self.first.kv_len, block=self.first.block, batch=batch, heads=heads,
            full=full, partial=partial, lo=lo, hi=hi, rules=rules, bits=bits, sizes=self._sizes(),
            pure=all(mask.pure for mask in self.masks), label=f"{self.name} of {len(self.masks)}",
            members=self.first.members,
        )  # fmt: skip
        found = (each for mask in self.distinct for each in mask._memo.get("readbacks", ()))
        made._memo["readbacks"] = tuple(each for each in found if not isinstance(each, DeferredSizes))
        return made

    def _rows(self, parts: Sequence[Tensor], width: int) -> Tensor:
        """A field of each batch item and head, [1 or batch * heads, width], for the rows of the result."""
        grown = []
        for mask, part in zip(self.masks, parts, strict=True):
            part = part.view(-1, width) if width else part.view(mask.batch * mask.heads, 0)
            part = part.expand(mask.batch * mask.heads, -1).view(mask.batch, mask.heads, width)
            grown.append(part.expand(*((self.across, -1) if self.axis else (-1, self.across)), -1))
        return torch.cat(grown, self.axis).flatten(0, 1)

    def _lists(self, kind: str) -> BlockLists:
        base, end = {}, 0
        for mask in self.distinct:
            base[mask] = end
            end += getattr(mask, kind).indices.numel()
        check_stored(end)
        tiles, found = self.first.grid[0], [getattr(mask, kind) for mask in self.masks]
        starts = [each.starts + base[mask] for mask, each in zip(self.masks, found, strict=True)]
        indices = torch.cat([getattr(mask, kind).indices for mask in self.distinct])
        counts = self._rows([each.counts for each in found], tiles).flatten()
        return BlockLists(self._rows(starts, tiles).flatten(), counts, indices)

    def _interval(self) -> tuple[Tensor | None, Tensor | None]:
        """lo and hi of the result. A mask without them admits every key."""
        first = self.first
        if all(mask.lo is None for mask in self.masks):
            return None, None
        if len(self.distinct) == 1 and first.lo is not None and first.lo.shape[0] == 1:
            return first.lo, first.hi
        none = torch.zeros((1, first.q_len), dtype=torch.int32, device=first.device)
        every = torch.full_like(none, first.kv_len)
        lo = self._rows([none if mask.lo is None else mask.lo for mask in self.masks], first.q_len)
        return lo, self._rows([every if mask.hi is None else mask.hi for mask in self.masks], first.q_len)

    def _bits(self) -> tuple[Tensor | None, Tensor | None]:
        if all(mask.rules is None for mask in self.masks):
            return None, None
        if self.first.members is not None:
            words: list[Any] = [mask.rules for mask in self.distinct]
            return torch.cat(words), None
        rules, bits, end = [], [], 0
        for mask in self.distinct:
            rule = torch.full_like(mask.partial.indices, BY_INTERVAL) if mask.rules is None else mask.rules
            rules.append(torch.where(rule == BY_INTERVAL, rule, rule + end))
            if mask.bits is not None:
                bits.append(mask.bits)
                end += mask.bits.shape[0]
        return torch.cat(rules), torch.cat(bits) if bits else None

    def _sizes(self) -> Sizes:
        stored = partial = 0
        for mask in self.masks:
            times = self.across // (mask.batch if self.axis else mask.heads)
            stored, partial = stored + times * mask.sizes.stored, partial + times * mask.sizes.partial
        check_stored(stored)
        longest = max(mask.sizes.longest for mask in self.masks)
        return Sizes(stored, partial, longest, all(mask.sizes.exact for mask in self.masks))


def _check_alike(cls: type[MaskData], masks: Sequence[Any], name: str, *more: str) -> None:
    """InvalidInput unless these are masks of one shape, block and device, and alike in fields of `more` names."""
    if not masks:
        raise InvalidInput(f"{name} of no masks; give at least one")
    for at, mask in enumerate(masks):
        if not isinstance(mask, cls):
            raise InvalidInput(f"{name}: mask {at} is {arguments.shown(mask)}; it must be a BlockMask")
        for what in ("q_len", "kv_len", "block", "device", *more):
            found, right = getattr(mask, what), getattr(masks[0], what)
            if found != right:
                raise InvalidInput(
                    f"{name}: {what} of mask {at} is {found} and of mask 0 {right}; they must agree"
                )
