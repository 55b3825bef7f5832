"""The layout of a mask: its fields that are no tensors, and where its tensors are in one int32 buffer, the *base*.

A builder states the layout that it writes. Masks of one layout differ in the contents of their bases only, so a call
that was recorded with one of them is repeated with any other (attn/mask/recorded.py). torch.compile gets a layout as
text, the one form of constant whose numbers torch 2.11 neither makes symbols of nor refuses to take apart; from torch
2.13 on it could be the object. `MaskLayout.text` and `MaskLayout.of_text` alone know that form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.lists import ALIGNED, WORD, Members, Sizes
from sparsek.core.plan_owner import PlanOwner

LAYOUTS = 256
ABSENT = -1  # in place of a size, among the numbers of a layout
FIELDS = 14  # numbers of the fields of a mask, which others may follow
NO_MEMBERS = (0, 0, 0)  # in place of members


class Room(NamedTuple):
    """The sizes of a mask's tensors, as far as its lengths, batch and heads do not determine them.

    Attributes:
        partial: Entries of `partial.indices`, and of `rules`, which has several words for each of a mask by members.
        full: Entries of `full.indices`; ABSENT if it is `partial.indices`.
        bounds: Rows of `lo` and `hi`; 0 for a mask without them.
        bits: Blocks in `bits`; ABSENT for a mask without `rules` and `bits`, and by members.
    """

    partial: int
    full: int = ABSENT
    bounds: int = 0
    bits: int = ABSENT


class Counted(NamedTuple):
    """The sizes of a mask, and the blocks of rows that are more than twice as long as the mean."""

    sizes: Sizes
    heavy: int


class Uses:
    """How often attention was called with a mask that has a layout. `passing`: whether such masks are used a few times
    only, as the one before was; None before the first use.
    """

    __slots__ = ("count", "passing")

    def __init__(self) -> None:
        self.count, self.passing = 0, None


class MaskLayout(PlanOwner):
    """All of a mask but the contents of its base, from its numbers: see `of`.

    `fields`: those of the mask that are no tensors. `heavy`: as `BlockMask.heavy_blocks`, by which plans allocate.
    `last`: the uses of the mask that was used last.
    """

    def __init__(self, numbers: Sequence[int], label: str) -> None:
        self._memo = {}
        self.numbers, self.fields = numbers, fields_of(numbers, label)
        self.heavy, self.room = numbers[FIELDS], Room(*numbers[FIELDS + 1 :])
        self.last: Uses | None = None
        self.shapes = shapes_of(self.fields, self.room)
        self.spans: list[int] = []  # of the base: each tensor, and what aligns the next one
        self.places: list[int | None] = []  # of each tensor, in the order of `leaves_of`, among the spans
        for shape in self.shapes:
            if shape is None:
                self.places.append(None)
                continue
            size = 1
            for side in shape:
                size *= side
            self.places.append(len(self.spans))
            self.spans += [size, -size % ALIGNED] if size % ALIGNED else [size]
        if not any(self.spans):
            self.spans.append(ALIGNED)  # so that there is an address
        self.length = sum(self.spans)

    @classmethod
    def of(
        cls, place: Any, counted: Counted, room: Room, label: str, *, batch: int = 1, heads: int = 1,
        pure: bool = True, members: Members | None = None,
    ) -> MaskLayout:  # fmt: skip
        """The layout of a mask at a `Place`, always the same object."""
        sides, sizes = (place.q_len, place.kv_len, *place.block), map(int, counted.sizes)
        numbers = *sides, batch, heads, *sizes, int(pure), *(members or NO_MEMBERS), counted.heavy, *room
        return known_layout(place.device, numbers, label)

    @classmethod
    def like(cls, mask: Any, tensors: Sequence[Any]) -> MaskLayout:
        """The layout of a mask with these tensors, always the same object."""
        _, _, full, _, _, partial, lo, _, rules, bits = tensors
        by_bits = ABSENT if rules is None or mask.members else 0 if bits is None else bits.shape[0]
        room = Room(partial.numel(), full.numel(), 0 if lo is None else lo.shape[0], by_bits)
        more = {"batch": mask.batch, "heads": mask.heads, "pure": mask.pure, "members": mask.members}
        return cls.of(mask, Counted(mask.sizes, mask.heavy_blocks), room, mask.label, **more)

    def base(self, device: torch.device) -> Tensor:
        """Memory for the tensors of a mask, not cleared. One allocation, which a recorded call may contain."""
        return torch.empty(self.length, dtype=torch.int32, device=device)

    def pieces(self, base: Tensor) -> list[Any]:
        """The ten tensors in `base`, each with one dim, and None for those that the mask lacks, by one operator. None
        for full.indices too, if those are partial.indices.
        """
        found = base.split_with_sizes(self.spans)
        return [None if at is None else found[at] for at in self.places]

    def leaves(self, base: Tensor) -> list[Any]:
        """The tensors of the mask in `base`, in the order of `leaves_of`."""
        made = [
            x if x is None or shape is None or len(shape) == 1 else x.view(shape)
            for x, shape in zip(self.pieces(base), self.shapes, strict=True)
        ]
        if self.room.full == ABSENT:
            made[2] = made[5]
        return made

    def text(self) -> str:
        """All of the layout in numbers and the label."""
        return f"{','.join(map(str, self.numbers))},{self.fields['label']}"

    @classmethod
    def of_text(cls, text: str) -> MaskLayout:
        """The layout that has this text. torch.compile traces it."""
        *numbers, label = text.split(",", FIELDS + 1 + len(Room._fields))
        return cls([int(each) for each in numbers], label)


@lru_cache(maxsize=LAYOUTS)
def known_layout(device: torch.device, numbers: tuple[int, ...], label: str = "") -> MaskLayout:
    """The layout of masks on a device: the one cache of layouts."""
    return MaskLayout(numbers, label)


def fields_of(numbers: Sequence[int], label: str = "") -> dict[str, Any]:
    """The fields of a mask that are no tensors, from their numbers, which may be followed by others."""
    q_len, kv_len, bq, bk, batch, heads, stored, partial, longest, exact, pure, rows, window, sinks = numbers[
        :FIELDS
    ]
    return {
        "q_len": q_len, "kv_len": kv_len, "block": (bq, bk), "batch": batch, "heads": heads,
        "sizes": Sizes(stored, partial, longest, exact == 1), "pure": pure == 1, "label": label,
        "members": Members(rows, window, sinks) if rows else None,
    }  # fmt: skip


def shapes_of(fields: dict[str, Any], room: Room) -> tuple[tuple[int, ...] | None, ...]:
    """The shapes of a mask's tensors, in the order of `leaves_of`. None: it lacks it, or shares partial.indices."""
    q_len, (bq, bk), members = fields["q_len"], fields["block"], fields["members"]
    row, entries = (fields["batch"] * fields["heads"] * -(-q_len // bq),), (room.partial,)
    bounds = (room.bounds, q_len) if room.bounds else None
    rules = None if room.bits == ABSENT else entries
    bits = None if rules is None else (room.bits, bq, bk // WORD)
    if members is not None:
        rules = (room.partial * members.words(bq),)
    return (
        row, row, None if room.full == ABSENT else (room.full,), row, row, entries, bounds, bounds, rules, bits,
    )  # fmt: skip
