"""Masks that are new in every call: what those of one builder have in common, so that calls with them are recorded.

A builder with kernels writes all tensors of a mask into one buffer, the *base*. Masks of one builder, with the same
options and operands of the same shapes, differ only in the contents of their base. Their `Kind` keeps the calls that
were recorded with such masks (ops/bound.py), which take the base as an operand; a schedule is made anew in each. A mask
that is used again and again gets a plan of its own instead, whose schedule is kept. So does one whose predecessor of
its kind was used so, and the first of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import words
from sparsek.core.arguments import is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.home import Home, drop_oldest
from sparsek.mask.lists import BlockLists
from sparsek.mask.readback import LateSizes

if TYPE_CHECKING:
    from sparsek.mask.mask import BlockMask

FEW = 4  # attention calls with one mask; from the next one on it has a plan of its own
KINDS = 256
LISTS, TENSORS = ("full", "partial"), ("lo", "hi", "rules", "bits")
PLAIN = ("q_len", "kv_len", "block", "batch", "heads", "sizes", "pure", "label")


class Part(NamedTuple):
    """A tensor of a mask: piece `at` of its base, seen in `shape` (None: one-dimensional, as the piece is)."""

    at: int
    shape: tuple[int, ...] | None


class Kind(Home):
    """What masks of one form have in common: all but the contents of their base. See `kind_of`.

    `plain`: the fields that are no tensors. `sizes`: the pieces of the base. `parts`: the place of every tensor.
    `heavy`: as `BlockMask.heavy_blocks`, by which plans allocate; None if it is not known.
    """

    def __init__(
        self,
        plain: tuple[Any, ...],
        heavy: int | None,
        sizes: tuple[int, ...],
        parts: tuple[Part | None, ...],
    ) -> None:
        super().__init__()
        self.plain = dict(zip(PLAIN, plain, strict=True))
        self.heavy, self.sizes, self.parts = heavy, sizes, parts
        self.last: Uses | None = None

    def mask(
        self,
        cls: type[BlockMask],
        base: Tensor,
        faults: Sequence[WrittenFault] = (),
        late: LateSizes | None = None,
    ) -> BlockMask:
        """The mask whose tensors are in `base`, where these faults would be. No check, no sync. A `Leaf` makes the
        tensors when the first of them is read.
        """
        made: Any = object.__new__(cls)
        fields = made.__dict__
        fields.update(self.plain)
        memo: dict[str, Any] = {"fresh": Fresh(self, base)}
        fields["_memo"], fields["_base"] = memo, None
        if self.heavy is not None:
            memo["heavy"] = self.heavy
        _note(memo, self, faults, late)
        return made

    def leaves(self, base: Tensor) -> list[Any]:
        """The tensors of the mask in `base`, in the order of `leaves_of`."""
        pieces = base.split_with_sizes(self.sizes)
        tensors = []
        for part in self.parts:
            if part is None:
                tensors.append(None)
            else:
                tensors.append(pieces[part.at] if part.shape is None else pieces[part.at].view(part.shape))
        return tensors


def fill(mask: Any) -> None:
    """Make the tensors of a mask that `Kind.mask` has made: views, which take the host longer than all else of it."""
    state = mask._memo["fresh"]
    tensors = state.kind.leaves(state.base)
    fields = mask.__dict__
    fields["full"], fields["partial"] = BlockLists(*tensors[:3]), BlockLists(*tensors[3:6])
    fields["lo"], fields["hi"], fields["rules"], fields["bits"] = tensors[6:]


class Leaf:
    """A field of tensors of masks. After `fill`, and in other masks, the attribute of the instance takes precedence."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, mask: Any, owner: Any = None) -> Any:
        if mask is None:
            return None  # as the default of the field
        fill(mask)
        return mask.__dict__[self.name]


class Uses:
    """How often attention was called with a mask."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Fresh:
    """The state of a mask that may be new in every call: its base, its kind, and the calls of attention with it.

    `passing`: whether such masks are used a few times only, as the one before this was. `kind` is found at the first
    use, because that takes 20 us; `known`: whether it was.
    """

    __slots__ = ("base", "kind", "known", "passing", "uses")

    def __init__(self, kind: Kind | None, base: Tensor) -> None:
        self.base, self.kind, self.uses, self.passing, self.known = base, None, Uses(), False, False
        if kind is not None:
            self.join(kind)

    def join(self, kind: Kind | None) -> None:
        """Make this the last mask of its kind; None for a mask that has none."""
        self.known = True
        if kind is not None:
            last, kind.last, self.kind = kind.last, self.uses, kind
            self.passing = last is not None and last.count <= FEW


_KINDS: dict[Hashable, Kind] = {}


def leaves_of(mask: BlockMask) -> list[Any]:
    """The tensors of a mask, and None for those that it lacks: always ten."""
    return [*mask.full, *mask.partial, *(getattr(mask, name) for name in TENSORS)]


def _address(x: Tensor) -> int:
    """In int32 elements."""
    return x.data_ptr() // 4


def _offset(x: Tensor) -> int:
    """In place of an address, which a fake tensor lacks."""
    return int(x.storage_offset())


def kind_of(mask: BlockMask, base: Tensor) -> Kind | None:
    """The kind of a mask whose tensors should all be views of `base`, int32 [n]; None if one is not."""
    leaves, address = leaves_of(mask), _offset if is_fake(base) else _address
    first, end = address(base), address(base) + base.numel()
    places: dict[int, int] = {}  # offset in the base -> elements
    for x in leaves:
        if x is None or not x.numel():
            continue
        at = address(x) - first
        if not (first <= address(x) and address(x) + x.numel() <= end and x.is_contiguous()):
            return None
        if places.setdefault(at, x.numel()) != x.numel():
            return None
    sizes: list[int] = []
    number: dict[int, int] = {}
    reached = 0
    for at in sorted(places):
        if at < reached:
            return None
        if at > reached:
            sizes.append(at - reached)
        number[at] = len(sizes)
        sizes.append(places[at])
        reached = at + places[at]
    empty = len(sizes)
    sizes += [0, base.numel() - reached]
    parts = []
    for x in leaves:
        if x is None:
            parts.append(None)
        else:
            piece = number[address(x) - first] if x.numel() else empty
            parts.append(Part(piece, None if x.dim() == 1 else tuple(x.shape)))
    plain = tuple(getattr(mask, name) for name in PLAIN)
    heavy = mask._memo.get("heavy")
    facts = plain, heavy, tuple(sizes), tuple(parts), base.device
    kind = _KINDS.get(facts)
    if kind is None:
        while len(_KINDS) >= KINDS:
            drop_oldest(_KINDS)
        kind = _KINDS[facts] = Kind(plain, heavy, tuple(sizes), tuple(parts))
    return kind


def freshened(
    mask: BlockMask, base: Tensor, fault: WrittenFault | None, late: LateSizes | None = None
) -> BlockMask:
    """The mask as one whose tensors are views of `base`. `fault`: where its fault would be; `late`: of its sizes."""
    # A mask of closed form has neither, and most often it is kept.
    kind = None if fault is None and late is None else kind_of(mask, base)
    mask._memo["fresh"] = Fresh(kind, base)
    _note(mask._memo, kind, () if fault is None else (fault,), late)
    return mask


def _note(
    memo: dict[Any, Any], kind: Kind | None, faults: Sequence[WrittenFault], late: LateSizes | None
) -> None:
    """Makes the mask verify these."""
    if faults or late is not None:
        memo["readbacks"] = (*faults,) if late is None else (*faults, late)
    if kind is not None:
        for each in faults:
            each.keep(kind)


def known_kind(mask: Any) -> Kind | None:
    """The kind of a mask that `freshened` has marked; found now if it was not."""
    state = mask._memo["fresh"]
    if not state.known:
        state.join(kind_of(mask, state.base))
    return state.kind


def fresh_of(mask: Any, *, counting: bool = False) -> Fresh | None:
    """The state of a mask whose plan is not worth keeping, with its kind; None for any other.

    `counting`: this is one more use.
    """
    state = mask._memo.get("fresh")
    if state is None:
        return None
    kind = known_kind(mask)
    if counting:
        state.uses.count += 1
        if state.uses.count == FEW + 1:
            for each in mask._memo.get("readbacks", ()):
                if isinstance(each, LateSizes):
                    each.begin(mask)
    # True sizes may have replaced the bounds by which calls of this kind allocate.
    passing = state.passing and state.uses.count <= FEW
    if kind is None or not passing or mask.sizes.exact != kind.plain["sizes"].exact:
        return None
    return state


class WrittenFault:
    """A fault that a kernel may write to a word of host memory (core/words.py).

    `explain(fault)` is the fault in words. Reading needs no event: a word is 0 until there is a fault. `place` is the
    word's place in the ring, whose words are given out again; None for a word that is never given out again.
    """

    __slots__ = ("device", "explain", "found", "place", "word")

    def __init__(self, word: Tensor, explain: Callable[[int], str], device: torch.device) -> None:
        self.word, self.explain, self.device, self.found = word, explain, device, 0
        self.place = words.place_of(word)

    def keep(self, kind: Kind) -> None:
        """Let `raise_earlier` find the fault, if nothing verifies the mask."""
        if self.place is not None:
            words.ring().owners[self.place] = kind, self

    def look(self) -> int:
        """1 + the fault, as far as it is written; 0 for none."""
        place = self.place
        if self.found == 0 and place is None:
            self.found = int(self.word)
        elif self.found == 0 and place is not None:
            ring = words.ring()
            owner = ring.owners[place]
            if owner is not None and owner[1] is self:
                self.found = int(ring.values[place])
        return self.found

    def apply(self, mask: BlockMask, wait: bool) -> None:
        """Raise InvalidInput if there is a fault. Without `wait` one that was not yet written is not seen."""
        if wait and self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        found = self.look()
        if found > 0:
            self.tell()

    def faults_only(self) -> WrittenFault:
        """The readback for another mask that contains this one: this one."""
        return self

    def tell(self) -> None:
        """Raise the fault. `raise_earlier` does not raise it again."""
        if self.place is not None:
            ring = words.ring()
            owner = ring.owners[self.place]
            if owner is not None and owner[1] is self:
                ring.values[self.place] = 0
        raise InvalidInput(self.explain(self.found - 1))


def raise_earlier(kind: Kind) -> None:
    """Raise InvalidInput if an earlier mask of this kind had a fault that was not raised yet."""
    for place in words.written():
        owner = words.ring().owners[place]
        if owner is not None and owner[0] is kind:
            fault = owner[1]
            if fault.look() > 0:
                try:
                    fault.tell()
                except InvalidInput as error:
                    label = kind.plain["label"]
                    raise InvalidInput(f"an earlier mask, {label}, has a fault: {error}") from error
