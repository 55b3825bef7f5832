"""The data of a mask: two lists of key blocks for each query tile, in compressed rows.

*Full* blocks are visited without a test, *partial* blocks have an element rule. Memory and time do not grow with the
blocks that are absent; rows that visit the same run of blocks share its entries. Builders (build/), conversions
(convert/) and combinations stand on this; `BlockMask` has all of them as methods (mask.py).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.attn.mask import lists
from sparsek.attn.mask.layout import MaskLayout, Uses
from sparsek.attn.mask.lists import BlockLists, HostMask, Members, Sizes
from sparsek.core import arguments
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.record import Record
from sparsek.core.tracing import saveable, untransformed
from sparsek.pictures.masks import PictureRows

if TYPE_CHECKING:
    from typing_extensions import Self

UNKNOWN = Sizes(0, 0, 0, exact=False)


@dataclass(frozen=True, eq=False, repr=False)
class MaskData(PlanOwner, Record):
    """The fields of `BlockMask`, which documents them.

    A builder with kernels writes all tensors into one buffer, the *base*, in a layout that it states. The mask then has
    `_layout` and `_base`, and its tensors are views of the base, made when the first of them is read.
    """

    q_len: int
    kv_len: int
    block: tuple[int, int]
    batch: int
    heads: int
    full: BlockLists
    partial: BlockLists
    lo: Tensor | None = None
    hi: Tensor | None = None
    rules: Tensor | None = None
    bits: Tensor | None = None
    sizes: Sizes = UNKNOWN
    pure: bool = False
    label: str = ""
    members: Members | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False)
    _layout: MaskLayout | None = field(default_factory=lambda: None, init=False)
    _base: Tensor | None = field(default_factory=lambda: None, init=False)

    def __post_init__(self) -> None:
        """Checks the fields: in `BlockMask`."""

    @classmethod
    def unchecked(cls, **parts: Any) -> Self:
        """Return a mask of fields that are known to be right, without a check or a sync. Internal."""
        return super().unchecked(**{name: saveable_part(part) for name, part in parts.items()})

    @classmethod
    def of_layout(cls, layout: MaskLayout, base: Tensor, readbacks: tuple[Any, ...] = ()) -> Self:
        """Return the mask whose tensors are in `base`, and whose `verify` applies `readbacks`. No check, no sync."""
        made = object.__new__(cls)
        fields = made.__dict__
        fields.update(layout.fields)
        memo: dict[Hashable, Any] = {"uses": Uses(), "heavy": layout.heavy}
        fields["_memo"], fields["_layout"], fields["_base"] = memo, layout, base
        if readbacks:
            memo["readbacks"] = readbacks
        return made

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks (Mb, Nb) of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def rows(self) -> int:
        """Rows of the lists, batch * heads * Mb."""
        return self.batch * self.heads * self.grid[0]

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.full.starts.device if self._base is None else self._base.device

    @property
    def stored_blocks(self) -> int:
        """Visited blocks, summed over batch * heads. Waits for the device once if `sizes` is not exact."""
        return self._counted[0]

    @property
    def heavy_blocks(self) -> int:
        """Blocks of rows more than twice as long as the mean, or an upper bound. Never waits for the device."""
        # By bounds as long as the sizes are bounds: a recorded call allocates by them for other masks too.
        if "heavy" not in self._memo and "host" in self._memo and self.sizes.exact:
            host = self.host
            self._memo["heavy"] = lists.heavy_blocks(host.full.counts, host.partial.counts)
        return self._memo.get("heavy", self.sizes.stored)

    @property
    def partial_blocks(self) -> int:
        """Stored blocks with an element rule. Waits for the device once if `sizes` is not exact."""
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
    def nbytes(self) -> int:
        """Bytes of the mask's tensors; a tensor that two lists share counts once."""
        parts = [part for part in leaves_of(self) if part is not None]
        return sum({(part.data_ptr(), part.shape): part.nbytes for part in parts}.values())

    @property
    def host(self) -> HostMask:
        """The tensors as numpy arrays. Waits for the device once."""
        return self.derived("host", lambda: _to_host(self))

    def verify(self, wait: bool = False) -> None:
        """Raise InvalidInput if the device found a fault in what the mask was made from, such as a NaN score.

        On a GPU builders of scores and lists check there. Every call with the mask verifies it, so this is for CUDA
        graphs and compiled functions, which do not. A mask with a fault causes no access out of bounds, but its result
        means nothing. Lists that `from_blocks` counted on the device have exact `sizes` from then on.

        Args:
            wait: Whether to wait for the device. Without it nothing is raised until the result has arrived.

        Raises:
            InvalidInput: With the position of the fault.

        Example:
            >>> import sparsek as sk
            >>> sk.BlockMask.causal(1000).verify(wait=True)
        """
        if wait is not True and wait is not False:
            arguments.flag("wait", wait)
        for each in self._memo.get("readbacks", ()):
            each.apply(self, wait)

    def to(self, device: str | torch.device) -> Self:
        """Return the same mask on another device; this object if it is there already.

        Args:
            device: "cpu", "cuda", "cuda:0" or a torch.device.

        Raises:
            InvalidInput: For a device that this machine does not have.
        """
        target = arguments.device("device", device)
        if target == self.device:
            return self
        made = _pytree.tree_map_only(Tensor, lambda part: part.to(target), self)
        made._memo.update({key: self._memo[key] for key in KEPT if key in self._memo})
        return made

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
        """The stored blocks in words: "528 of 1024 blocks, 51.6 %, 32 partial". No sync: "at most" for bounds."""
        cells = self.rows * self.grid[1]
        share = 100 * self.sizes.stored / cells if cells else 0.0
        most = "" if self.sizes.exact else "at most "
        return (
            f"{most}{self.sizes.stored} of {cells} blocks, {share:.3g} %, {most}{self.sizes.partial} partial"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        self.verify(wait=True)
        return super().__reduce__()


@dataclass(frozen=True, eq=False)
class MaskPart:
    """The place of a mask in a whole one, as on a rank of a mesh: calls with it add in the order of one process.

    A mask keeps it under PART; then kernels and their configs are those of calls with `whole`, tiles are cut as there,
    and every tile visits its blocks in that order.

    Attributes:
        whole: The whole mask, on the device of the part.
        tiles: int64 [batch * heads of the part, query tiles of the whole]: the part's tiles, -1 for those it lacks.
            None: it has all.
        blocks: The same for key blocks.
        kv_heads: Heads of k of calls with the whole mask; 0: as many as in those with the part.
        first: The first of them that the part has, with all heads of q that share it.
        dq: Whether dQ is in that order too. Not where query tiles lack visits, as on the rank that owns keys.
    """

    whole: Any
    tiles: Tensor | None = None
    blocks: Tensor | None = None
    kv_heads: int = 0
    first: int = 0
    dq: bool = True

    @classmethod
    def of(cls, mask: MaskData) -> MaskPart | None:
        """The place of a mask, None for most."""
        return mask.known(PART)


PART = "part"
KEPT = ("host", "counted", "elements", "readbacks", "heavy")
LISTS = ("full", "partial")
TENSORS = ("lo", "hi", "rules", "bits")
Mask = TypeVar("Mask", bound=MaskData)


class Leaf:
    """A field of tensors of masks, until it is set: views take the host longer than all else of a mask."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, mask: Any, owner: Any = None) -> Any:
        if mask is None:
            return None  # as the default of the field
        tensors = untransformed(lambda: mask._layout.leaves(mask._base), mask._base)
        fields = mask.__dict__
        fields["full"], fields["partial"] = BlockLists(*tensors[:3]), BlockLists(*tensors[3:6])
        fields["lo"], fields["hi"], fields["rules"], fields["bits"] = tensors[6:]
        return fields[self.name]


# After the dataclass is made, which would take the descriptors for defaults. Attributes of a mask take precedence.
for _name in LISTS + TENSORS:
    setattr(MaskData, _name, Leaf(_name))


def saveable_part(part: Any) -> Any:
    """A part of a mask, with tensors that a backward pass can save."""
    return BlockLists(*map(saveable, part)) if isinstance(part, BlockLists) else saveable(part)


def leaves_of(mask: MaskData) -> list[Any]:
    """The tensors of a mask, and None for those that it lacks: always ten."""
    return [*mask.full, *mask.partial, *(getattr(mask, name) for name in TENSORS)]


def _count(mask: MaskData) -> tuple[int, int]:
    if mask.sizes.exact:
        return mask.sizes.stored, mask.sizes.partial
    full, partial = torch.stack((mask.full.counts.sum(), mask.partial.counts.sum())).tolist()
    mask.verify()
    return full + partial, partial


def _to_host(mask: MaskData) -> HostMask:
    """Copies of all tensors. Waits once, for the last one, on the same stream."""
    parts = [None if part is None else part.to("cpu", non_blocking=True) for part in leaves_of(mask)]
    if mask.device.type == "cuda":
        torch.cuda.current_stream(mask.device).synchronize()
    arrays: list[Any] = [None if part is None else part.numpy() for part in parts]
    return HostMask(PictureRows(*arrays[:3]), PictureRows(*arrays[3:6]), *arrays[6:])
