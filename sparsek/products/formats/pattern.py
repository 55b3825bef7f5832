"""BlockPattern: which blocks of a matrix are stored, as row pointers and column indices, and what is derived from them.

The layout is block compressed sparse row (BSR), as in SciPy and torch: block row i stores its blocks at positions
`indptr[i]` to `indptr[i + 1] - 1`, and `indices` holds their block columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.record import Record, record
from sparsek.core.tracing import of_values, saveable
from sparsek.pictures.blocks import BlockPicture, Drawable

BLOCK_STEP, BLOCK_MAX = 16, 512


class HostPattern(NamedTuple):
    """The indices of a pattern on the host: read-only int32 arrays `indptr` [Mb+1] and `indices` [nnzb]."""

    indptr: np.ndarray
    indices: np.ndarray


@record(leaves=("indptr", "indices"))
@dataclass(frozen=True, eq=False, repr=False)
class BlockPattern(PlanOwner, Record, Drawable):
    """Which blocks of a matrix [M, K] are stored, without values. Immutable; plans are cached with it.

    Construction checks everything, with one sync. Tensors made in torch.inference_mode are copied, so that
    autograd can save them.

    Attributes:
        shape: (M, K). The sides need not be multiples of the block.
        block: The sides (bm, bk) of a block, multiples of 16 from 16 to 512.
        indptr: int32 [Mb+1] with Mb = ceil(M / bm): where each block row starts in `indices`, and its end. Contiguous.
        indices: int32 [nnzb], the block columns, sorted and unique in each block row. Contiguous, on the device of
            `indptr`. Write to neither tensor afterwards.

    Raises:
        InvalidInput: For parts that do not fit; the message gives the position of the first fault.

    Examples:
        >>> indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 0, 1], dtype=torch.int32)
        >>> sk.BlockPattern((128, 128), (64, 64), indptr, indices)
        BlockPattern(128x128, block 64x64, 3 of 4 blocks, 75 %, rows 1..2, cpu)
    """

    shape: tuple[int, int]
    block: tuple[int, int]
    indptr: Tensor
    indices: Tensor
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", block_sides(self.block))
        object.__setattr__(self, "shape", matrix_sides(self.shape, self.block))
        _check_tensors(self)
        for name in ("indptr", "indices"):
            object.__setattr__(self, name, saveable(getattr(self, name)))
        _check_indices(self.host, self.grid)

    @classmethod
    def unchecked(
        cls,
        shape: tuple[int, int],
        block: tuple[int, int],
        indptr: Tensor,
        indices: Tensor,
        host: HostPattern | None = None,
        passing: bool = True,
    ) -> BlockPattern:
        """Make a pattern of valid parts, without checks or sync.

        Args:
            shape: As in the class.
            block: As in the class.
            indptr: As in the class.
            indices: As in the class.
            host: The indices on the host, if they are there; it saves a later copy.
            passing: Without `host`, on a GPU: products are scheduled there, without a sync, as if block rows were about
                even. With False the first product reads the indices, which takes about a millisecond, and chooses
                among all kernels.
        """
        made = super().unchecked(shape, block, saveable(indptr), saveable(indices))
        if host is not None:
            made._memo["host"] = host
        elif passing and not torch.compiler.is_compiling():
            made._memo["passing"] = 0  # calls that were not found; see products/ops/recorded_products.py
        return made

    @classmethod
    def from_host(
        cls, shape: tuple[int, int], block: tuple[int, int], host: HostPattern, device: torch.device
    ) -> BlockPattern:
        """Make a pattern on `device` of valid indices on the host. No sync."""
        host = _frozen(host)
        indptr, indices = (torch.tensor(part, device=device) for part in host)
        return cls.unchecked(shape, block, indptr, indices, host)

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of block rows and block columns, (Mb, Kb)."""
        return grid_of(self.shape, self.block)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """The shape rounded up to whole blocks, (Mb * bm, Kb * bk)."""
        return self.grid[0] * self.block[0], self.grid[1] * self.block[1]

    @property
    def is_ragged(self) -> bool:
        """Whether a side is not a multiple of the block."""
        return self.padded_shape != self.shape

    @property
    def nnzb(self) -> int:
        """The number of stored blocks."""
        return self.indices.shape[0]

    @property
    def density(self) -> float:
        """Stored blocks over all blocks, 0 to 1; 0.0 for a matrix without blocks."""
        cells = self.grid[0] * self.grid[1]
        return self.nnzb / cells if cells else 0.0

    @property
    def device(self) -> torch.device:
        """The device of the indices."""
        return self.indptr.device

    @property
    def host(self) -> HostPattern:
        """The indices as read-only NumPy arrays. Synchronizes at most once: a checked pattern already did."""
        return self.derived("host", lambda: _to_host(self))

    @property
    def passing(self) -> bool:
        """Whether products with this pattern are scheduled on its GPU, without a sync: see `unchecked`. Internal."""
        return "passing" in self._memo and self.indptr.is_cuda

    @property
    def row_lengths(self) -> Tensor:
        """The number of stored blocks in each block row, int32 [Mb]."""
        return self.derived("row_lengths", lambda: self.indptr[1:] - self.indptr[:-1])

    @property
    def longest_first(self) -> Tensor:
        """Block rows with most blocks first, as int32 [Mb, 3]: index, position of the first block, number of blocks."""
        lengths = self.row_lengths
        rows = torch.argsort(lengths, descending=True, stable=True)
        return torch.stack((rows.int(), self.indptr[:-1][rows], lengths[rows].int()), 1)

    @property
    def block_rows(self) -> Tensor:
        """The block row of each stored block, int32 [nnzb]."""
        return self.derived("block_rows", lambda: _block_rows(self))

    @property
    def transposed(self) -> tuple[BlockPattern, Tensor]:
        """The transposed pattern and int32 perm [nnzb]: its block q is block perm[q] of this one. No sync."""
        original, perm = self._memo.get("transpose of", (None, None))
        pattern = None if original is None else original()
        if pattern is not None:
            return pattern, perm
        return self.derived("transposed", lambda: _transpose(self))

    def flip(self) -> tuple[BlockPattern, Tensor]:
        """Return `transposed`, computed anew and not cached. Internal."""
        return _transpose(self)

    @property
    def T(self) -> BlockPattern:  # noqa: N802
        """The transposed pattern; its `.T` is this object again."""
        return self.transposed[0]

    def to(self, device: str | torch.device) -> BlockPattern:
        """Return this pattern on `device`; the same object if it is there already."""
        target = arguments.device("device", device)
        if target == self.device:
            return self
        indptr, indices = self.indptr.to(target), self.indices.to(target)
        host, passing = self._memo.get("host"), "passing" in self._memo
        return BlockPattern.unchecked(self.shape, self.block, indptr, indices, host, passing)

    def same_as(self, other: BlockPattern) -> bool:
        """Return whether both have the same shape, block sides and stored blocks, on any devices.

        Copies the indices of each pattern to the host once, unless both are the same object.
        """
        if self is other:
            return True
        if not isinstance(other, BlockPattern):
            raise InvalidInput(f"other is {arguments.shown(other)}; it must be a BlockPattern")
        if (self.shape, self.block, self.nnzb) != (other.shape, other.block, other.nnzb):
            return False
        return all(map(np.array_equal, self.host, other.host))

    def _corner(self, p: int) -> tuple[int, int]:
        """Row and column of the first element of stored block p. Synchronizes at most once."""
        indptr, indices = self.host
        return (int(np.searchsorted(indptr, p, side="right")) - 1) * self.block[0], int(
            indices[p]
        ) * self.block[1]

    def drawn(self) -> BlockPicture:
        """Return the data of its pictures. Synchronizes at most once. Internal."""
        name = f"{self.shape[0]} × {self.shape[1]}"
        return BlockPicture(self.shape, self.block, *self.host, name, repr(self), self.summary)

    def __repr__(self) -> str:
        size = f"{self.shape[0]}x{self.shape[1]}, block {self.block[0]}x{self.block[1]}"
        if type(self.indptr) is not Tensor:
            return f"BlockPattern({size}, indices not concrete)"
        lengths = np.diff(self.host.indptr)
        rows = f"rows {lengths.min()}..{lengths.max()}" if lengths.size else "no rows"
        return f"BlockPattern({size}, {self.summary}, {rows}, {self.device})"

    @property
    def summary(self) -> str:
        """How much is stored, as text: "512 of 4096 blocks, 12.5 %"."""
        return f"{self.nnzb} of {self.grid[0] * self.grid[1]} blocks, {100 * self.density:.3g} %"


def block_sides(block: Any, step: int = BLOCK_STEP) -> tuple[int, int]:
    """Check block sides, a pair or one int for square blocks, and return (bm, bk): multiples of `step` up to 512."""
    sides = int_or_pair(block)
    if sides is None or any(side % step or not step <= side <= BLOCK_MAX for side in sides):
        raise InvalidInput(
            f"block is {arguments.shown(block)}; it must be one or two ints, multiples of {step} from {step} to "
            f"{BLOCK_MAX}"
        )
    return sides


def int_or_pair(value: Any) -> tuple[int, int] | None:
    """A pair of ints as a tuple, or one int twice; None for anything else, and for ints below 0."""
    with suppress(InvalidInput):
        if isinstance(value, (tuple, list)):
            return arguments.pair("value", value)
        side = arguments.integer("value", value)
        return side, side
    return None


def matrix_sides(shape: Any, block: tuple[int, int]) -> tuple[int, int]:
    """Return (M, K) as ints. Raise InvalidInput for a side that is negative or, in whole blocks, overflows int32."""
    sides = arguments.pair("shape", shape)
    for name, side, step in zip("MK", sides, block, strict=True):
        if -(-side // step) * step > INT32_MAX:
            raise InvalidInput(
                f"shape {sides[0]}x{sides[1]}: {name} in whole blocks must fit int32 ({INT32_MAX})"
            )
    return sides


def grid_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """The numbers of block rows and block columns, (Mb, Kb)."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _check_tensors(pattern: BlockPattern) -> None:
    """Check what does not need the contents of the indices."""
    named = (("indptr", pattern.indptr), ("indices", pattern.indices))
    for name, part in named:
        arguments.tensor(name, part, (torch.int32,), ndim=1)
        if not part.is_contiguous():
            raise InvalidInput(f"{name} must be contiguous, got stride {part.stride()}; call .contiguous()")
    if pattern.indptr.device != pattern.indices.device:
        raise InvalidInput(
            f"indptr is on {pattern.indptr.device} and indices on {pattern.indices.device}; use one device"
        )
    rows = pattern.grid[0]
    if pattern.indptr.numel() != rows + 1:
        raise InvalidInput(
            f"indptr has {pattern.indptr.numel()} entries; {pattern.shape[0]} rows in blocks of "
            f"{pattern.block[0]} are {rows} block rows and need {rows + 1}"
        )
    if pattern.indices.numel() > INT32_MAX:
        raise InvalidInput(
            f"{pattern.indices.numel()} stored blocks; at most {INT32_MAX} (int32) can be indexed"
        )


def _check_indices(host: HostPattern, grid: tuple[int, int]) -> None:
    """Check the contents of the indices."""
    indptr, indices = host
    if indptr[0] != 0:
        raise InvalidInput(f"indptr[0] is {indptr[0]}; it must be 0")
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if falls.size:
        row = int(falls[0])
        raise InvalidInput(
            f"indptr falls from {indptr[row]} to {indptr[row + 1]} at block row {row}; it must never fall"
        )
    if indptr[-1] != indices.size:
        raise InvalidInput(f"indptr[-1] is {indptr[-1]}; it must be the number of indices, {indices.size}")
    outside = np.flatnonzero((indices < 0) | (indices >= grid[1]))
    if outside.size:
        where = _where(indptr, outside[0])
        right = f"block columns are 0 to {grid[1] - 1}" if grid[1] else "the matrix has no block columns"
        raise InvalidInput(f"indices[{outside[0]}] is {indices[outside[0]]}, {where}; {right}")
    row_starts = np.zeros(indices.size + 1, dtype=bool)
    row_starts[indptr] = True
    stuck = np.flatnonzero((indices[1:] <= indices[:-1]) & ~row_starts[1:-1]) + 1
    if stuck.size:
        at = stuck[0]
        fault = "repeats" if indices[at] == indices[at - 1] else "is smaller than"
        raise InvalidInput(
            f"indices[{at}] is {indices[at]}, {_where(indptr, at)}, and {fault} the one before it "
            f"({indices[at - 1]}); indices must be sorted and unique in each block row"
        )


def _where(indptr: np.ndarray, position: Any) -> str:
    row = int(np.searchsorted(indptr, position, side="right")) - 1
    return f"entry {position - indptr[row]} of block row {row}"


def _frozen(host: HostPattern) -> HostPattern:
    for part in host:
        part.flags.writeable = False
    return host


def _to_host(pattern: BlockPattern) -> HostPattern:
    """One copy from the device, so one sync."""
    both = of_values(
        lambda *parts: torch.cat(parts).cpu().numpy(),
        pattern.indptr, pattern.indices, reads="a pattern is read", instead="make it outside",
    )  # fmt: skip
    split = pattern.indptr.numel()
    return _frozen(HostPattern(both[:split], both[split:]))


def _block_rows(pattern: BlockPattern) -> Tensor:
    rows = torch.arange(pattern.grid[0], dtype=torch.int32, device=pattern.device)
    lengths = pattern.indptr[1:] - pattern.indptr[:-1]
    return torch.repeat_interleave(rows, lengths, output_size=pattern.nnzb)


def _transpose(pattern: BlockPattern) -> tuple[BlockPattern, Tensor]:
    """A stable sort by column: rows stay in order within a column, so the result is sorted and unique."""
    made = None
    if pattern.indptr.is_cuda and not torch.compiler.is_compiling():
        made = by_kernel("transposed_lists", pattern.indptr, pattern.indices, pattern.grid)
    indptr, indices, perm, inverse = made or _transposed_lists(pattern)
    (m, k), (bm, bk) = pattern.shape, pattern.block
    passing = "passing" in pattern._memo
    flipped = BlockPattern.unchecked((k, m), (bk, bm), indptr, indices, passing=passing)
    # A weak reference: without a reference cycle both are freed, with their schedules on the GPU, when the last user
    # goes.
    flipped._memo["transpose of"] = weakref.ref(pattern), inverse
    return flipped, perm


def _transposed_lists(pattern: BlockPattern) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """indptr, indices, perm and its inverse of the transposed pattern."""
    device, columns = pattern.device, pattern.grid[1]
    by_column, perm = torch.sort(pattern.indices, stable=True)
    starts = torch.arange(columns + 1, dtype=torch.int32, device=device)
    indptr = torch.searchsorted(by_column, starts, out_int32=True)
    # Looking up cached rows would make torch.compile recompile once other code has cached them.
    rows = _block_rows(pattern) if torch.compiler.is_compiling() else pattern.block_rows
    inverse = torch.empty_like(pattern.indices)
    inverse[perm] = torch.arange(pattern.nnzb, dtype=torch.int32, device=device)
    return indptr, rows[perm], perm.to(torch.int32), inverse
