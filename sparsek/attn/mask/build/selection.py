"""The checked arguments of a mask of chosen blocks, and its layout.

A kernel (`kernels/mask`) makes the mask on a GPU from a `Selection`; `selection_reference.py` is the specification, in
plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.attn.mask.build.banded import visible
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.layout import ABSENT, Counted, MaskLayout, Room
from sparsek.attn.mask.lists import CHOSEN_SIZES, Place, Sizes, check_stored
from sparsek.attn.mask.readback import index, made_in
from sparsek.core import arguments
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel

INTS = (torch.int32, torch.int64)
MASS_BITS = 30  # the highest mass of a row is an integer of so many bits
# What may be wrong in a row, in the order in which it is reported; a fault is kind << POSITION_BITS | position.
LENGTH, NUMBER, VALUE, CROWDED = range(4)
POSITION_BITS = 26


class LocalBlocks(NamedTuple):
    """Blocks that are always kept: the first `sinks`, and those with a key from `back` tokens before a tile's first
    query to `fore` tokens after its last; none of these if `back` is None.
    """

    sinks: int
    back: int | None
    fore: int


class Selection(NamedTuple):
    """The arguments of a mask of chosen blocks.

    Attributes:
        kind: "topk" and "mass" choose by scores, "map" and "indices" are the choice itself.
        place: Lengths, device, offset, and the block in which the choice is made.
        causal: Whether a query sees no keys after its own.
        given: [batch, heads, Mb, Nb], scores or bool; of indices [batch, heads, Mb, K]. Any strides.
        lengths: Ints [1 or batch, Nb] in any strides, how many keys each block has, unchecked; None: all.
        capacity: The most blocks of a row.
        limit: Of topk the budget, of mass the share: a number, or a tensor [1 or batch, 1 or heads, 1, 1].
        least: Of mass, the blocks that a row keeps at least.
        always: Blocks that come first: bool that broadcasts to the scores, or near ones; None: none.
        counts: Of indices, ints that broadcast to [batch, heads, Mb]; None: entries of -1 are absent.
        every: Of topk, whether a row keeps all `always` blocks even if they are more than the limit. A NaN score
            then excludes a block, without a fault.
        names: The shapes of arguments as the caller gave them, and words for messages.
        label: The mask in words.
    """

    kind: str
    place: Place
    causal: bool
    given: Tensor
    lengths: Tensor | None
    capacity: int
    label: str
    limit: Any = 0
    least: int = 0
    always: Tensor | LocalBlocks | None = None
    counts: Tensor | None = None
    every: bool = False
    names: dict[str, Any] = {}  # noqa: RUF012

    @property
    def groups(self) -> int:
        """Heads with lists of their own, of all batch items."""
        return self.given.shape[0] * self.given.shape[1]

    @property
    def split(self) -> tuple[int, int]:
        """How many stored tiles and blocks one of the choice is."""
        return self.place.block[0] // self.stored.block[0], self.place.block[1] // self.stored.block[1]

    @property
    def stored(self) -> Place:
        """The place with the blocks of the mask."""
        return self.place.stored

    @property
    def room(self) -> int:
        """Entries of each row."""
        return min(self.capacity * self.split[1], self.stored.grid[1])

    @property
    def rows(self) -> int:
        """Rows of the lists."""
        return self.groups * self.stored.grid[0]

    @property
    def deep(self) -> int:
        """The most blocks that a tile sees in part because a query sees no keys after its own."""
        return _deep(self.stored) if self.causal else 0

    @property
    def has_interval(self) -> bool:
        """Whether the mask has lo and hi."""
        return self.causal or self.place.kv_len % self.stored.block[1] != 0

    def bounds(self) -> tuple[int, int, int]:
        """The most stored blocks, partial ones, and blocks of the longest row."""
        most, cut, longest = _bounds(self.stored, self.causal, self.room)
        return self.groups * most, self.groups * (cut if self.lengths is None else most), longest

    def explain(self, fault: int) -> str:
        """The fault that a kernel writes, in words."""
        row, word = fault >> 32, fault & 0xFFFFFFFF
        heads, tiles, position = self.given.shape[1], self.stored.grid[0], word & ((1 << POSITION_BITS) - 1)
        at = row // tiles // heads, row // tiles % heads, row % tiles // self.split[0], position
        return self.fault(word >> POSITION_BITS, at)

    def fault(self, kind: int, at: Sequence[int]) -> str:
        """What is wrong, at batch item, head, query tile, and column or entry."""
        names, (b, h, i, x) = self.names, at
        if kind == LENGTH:
            return (
                f"kv_lengths{_within((b, x), names['kv_lengths'])} is out of range; a block has 0 to "
                f"{self.place.block[1]} keys"
            )
        if kind == NUMBER and self.kind == "topk":
            return f"k{_within((b, h), names['limit'])} is below 1; a tile keeps at least 1 block"
        if kind == NUMBER and self.kind == "mass":
            return (
                f"threshold{_within((b, h), names['limit'])} is out of range; it must be over 0 and at most 1"
            )
        if kind == NUMBER:
            return (
                f"counts{_within((b, h, i), names['counts'])} is out of range; indices has room for 0 to "
                f"{self.given.shape[-1]} blocks"
            )
        if kind == VALUE and self.kind == "topk":
            return f"scores{index(at)} is NaN; -inf means never. A policy's scores are NaN where q or k are"
        if kind == VALUE and self.kind == "mass":
            return (
                f"scores{index(at)} is negative, infinite or NaN; they are masses from 0. A policy's scores are NaN "
                "where q or k are"
            )
        if kind == VALUE:
            return (
                f"indices{_within(at, names['indices'])} is out of range; key blocks are 0 to "
                f"{self.place.grid[1] - 1}"
            )
        if self.kind == "indices":
            return f"indices of tile {index((b, h, i))} hold key block {x} more than once"
        return f"always{index((b, h, i))} keeps more than {names['room']} blocks; they count among the k"


@lru_cache(maxsize=256)
def _bounds(place: Place, causal: bool, capacity: int) -> tuple[int, int, int]:
    """The most stored blocks of a head, partial ones, and blocks of a row."""
    edge, end = visible(place, causal)
    most = np.minimum(capacity, end)
    return int(most.sum()), int(np.minimum(capacity, end - edge).sum()), int(most.max(initial=0))


@lru_cache(maxsize=256)
def _deep(place: Place) -> int:
    edge, end = visible(place, True)
    return int((end - edge).max(initial=0))


@lru_cache(maxsize=256)
def held(place: Place, causal: bool, near: LocalBlocks) -> np.ndarray:
    """How many blocks of each tile are near, int64 [Mb]."""
    (_, end), bk = visible(place, causal), place.block[1]
    sinks = np.minimum(near.sinks, end)
    if near.back is None:
        return sinks
    left = np.clip((place.first - near.back) // bk, 0, end)
    right = np.clip((place.last + near.fore) // bk + 1, left, end)
    return sinks + np.maximum(right - np.maximum(left, sinks), 0)


class Shaped(NamedTuple):
    """In place of a tensor, where a message needs its shape only."""

    shape: torch.Size


def _within(at: Sequence[int], shape: Sequence[int]) -> str:
    """The last coordinates, as many as the shape has dims, with 0 for a dim of one element."""
    some = [0 if size == 1 else x for x, size in zip(at[len(at) - len(shape) :], shape, strict=True)]
    return index(some)


def layout_of(c: Selection) -> MaskLayout:
    """The layout of the mask of a choice: rows have a fixed capacity, and full and partial blocks share their list."""
    rows, (batch, heads) = c.rows, c.given.shape[:2]
    listed = rows * c.room
    check_stored(listed)
    bits = ABSENT
    if c.lengths is not None:
        tiles, columns = c.stored.grid
        bits = c.lengths.shape[0] * (columns + tiles * c.deep) if rows else 0
    stored, cut, longest = c.bounds()
    bound = Counted(Sizes(stored, cut, longest, exact=False), stored)
    room = Room(listed, bounds=1 if c.has_interval else 0, bits=bits)
    return MaskLayout.of(c.stored, bound, room, c.label, batch=batch, heads=heads, pure=c.lengths is None)


def by_a_kernel(cls: type[Mask], c: Selection) -> Mask | None:
    """The mask made on a GPU by one launch; None where no kernel makes it. Of fake tensors, one without values."""
    if is_fake(c.given):
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            raise InvalidInput(
                "make_fx of fake tensors does not record how values choose the blocks of a mask; use "
                'tracing_mode="real", or make the mask outside'
            )
        layout = layout_of(c)
        return cls.of_layout(layout, layout.base(c.place.device))
    return written(cls, c, partial(by_kernel, "choose_blocks")) if c.place.device.type == "cuda" else None


def written(cls: type[Mask], c: Selection, write: Callable[[list[Any], Selection], Any]) -> Mask | None:
    """The mask whose tensors `write` fills; it returns words for faults, or None. Views only: no sync."""
    layout = layout_of(c)
    base = layout.base(c.place.device)
    words = write(layout.pieces(base), c)
    if words is None:
        return None
    words = () if c.every else words
    # Without its tensors, because it stays with the mask.
    shaped: Any = Shaped(c.given.shape)
    shapes_only = c._replace(given=shaped, lengths=None, limit=0, always=None, counts=None)
    late = c.kind != "topk" or isinstance(c.limit, Tensor)
    return made_in(cls, layout, base, words, (shapes_only.explain,) * len(words), late)


def place_of(what: str, given: Tensor, seq_len: int | None, frame: dict[str, Any]) -> Place:
    """The place of a mask that is made where the tensor `given` is; `what`: "scores are"."""
    device = frame.get("device")
    if device is not None and arguments.device("device", device) != given.device:
        raise InvalidInput(
            f"{what} on {given.device} and device is {device}; masks are made where the choice is"
        )
    return Place.of(seq_len, **{"sides_of": CHOSEN_SIZES, **frame, "device": given.device})


def as_kv_lengths(kv_lengths: Any, place: Place) -> Tensor:
    """Ints [1 or B, Nb], not checked for their values."""
    given = arguments.tensor("kv_lengths", kv_lengths, INTS)
    arguments.one_device("kv_lengths is", given.device, "the mask is made", place.device)
    if given.ndim not in (1, 2) or given.shape[-1] != place.grid[1] or 0 in given.shape[:-1]:
        raise InvalidInput(
            f"kv_lengths is {list(given.shape)}; {place.kv_len} keys in blocks of {place.block[1]} need "
            f"[{place.grid[1]}] or [batch, {place.grid[1]}]"
        )
    return (given if given.ndim == 2 else given[None]).detach()


def joined_batch(lengths: Tensor | None, batch: int) -> int:
    """The batch items of a mask whose blocks are chosen for `batch` items. InvalidInput if kv_lengths has others."""
    own = 1 if lengths is None else lengths.shape[0]
    if 1 not in (own, batch) and own != batch:
        raise InvalidInput(f"kv_lengths has {own} batch items and the blocks have {batch}; give 1 or {batch}")
    return max(own, batch)
