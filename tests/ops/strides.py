"""Tensors with every kind of strides, surrounded by NaN.

A layout places fresh N(0, 1) numbers by strides and an offset, and leaves NaN everywhere else: between the elements,
before the first and after the last one. A kernel that misreads a stride reads NaN; one that writes outside its output
is detected by `PlacedTensor.untouched`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MARGIN = 1024  # elements of NaN on either side, a multiple of 16 bytes in every dtype


@dataclass(frozen=True)
class PlacedTensor:
    """A view `x` of `memory`, which holds NaN outside `x`. `before` is a copy of that memory."""

    x: Tensor
    memory: Tensor
    before: Tensor

    def untouched(self, *, written: bool = False) -> bool:
        """Whether the memory is unchanged; if the view itself may be `written`, the memory around it."""
        now = self.memory
        if written:
            now, reached = now.clone(), offsets(self.x.shape, self.x.stride()) + self.x.storage_offset()
            now[reached] = self.before[reached]
        same = (now == self.before) | (now.isnan() & self.before.isnan())
        return bool(same.all())

    def again(self) -> PlacedTensor:
        """The same numbers in the same layout in other memory."""
        memory = self.before.clone()
        x = memory.as_strided(self.x.shape, self.x.stride(), self.x.storage_offset())
        return PlacedTensor(x, memory, self.before)


@dataclass(frozen=True)
class StrideLayout:
    """A kind of strides. `strides(shape)` are its strides and the offset of its first element, in elements, or None
    if no tensor of that shape can have them. `own`: no two elements overlap.
    """

    name: str
    strides: Callable[[Sequence[int]], tuple[list[int], int] | None]
    own: bool = True

    def place(
        self, shape: Sequence[int], dtype: torch.dtype, device: str, draw: torch.Generator
    ) -> PlacedTensor | None:
        """N(0, 1) numbers of `shape` with these strides, surrounded by NaN; None if no such tensor exists."""
        found = self.strides(shape)
        if found is None:
            return None
        strides, offset = found
        at = offsets(shape, strides).to(device) + MARGIN + offset
        size = 2 * MARGIN + offset + 1 + sum(max(0, n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = torch.full((size,), torch.nan, dtype=dtype, device=device)
        places = at.unique()
        memory[places] = torch.randn(len(places), generator=draw, dtype=torch.float32, device="cpu").to(
            device, dtype
        )
        return PlacedTensor(memory.as_strided(shape, strides, MARGIN + offset), memory, memory.clone())


def offsets(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The offset of each element from the first one: int64 of `shape`, on the CPU."""
    at = torch.zeros(tuple(shape), dtype=torch.int64, device="cpu")
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(size, dtype=torch.int64, device="cpu") * stride
        at += steps.view([-1 if i == dim else 1 for i in range(len(shape))])
    return at


def packed(
    shape: Sequence[int], order: Sequence[int] | None = None, pitch: int = 1, step: int = 1
) -> list[int]:
    """Strides of a tensor whose dims are ordered by `order`, outermost first. Neighbours in the innermost dim are
    `step` apart; its rows are `pitch` times as far apart as necessary.
    """
    strides, reach = [0] * len(shape), step
    for place, dim in enumerate(reversed(list(order or range(len(shape))))):
        strides[dim] = reach
        reach *= max(1, shape[dim]) * (pitch if place == 0 else 1)
    return strides


def _whole(shape: Sequence[int]) -> tuple[list[int], int]:
    return packed(shape), 0


def _shifted(by: int) -> Callable[[Sequence[int]], tuple[list[int], int]]:
    return lambda shape: (packed(shape), by)


def _turned(
    offset: int = 0, step: int = 1, pitch: int = 1
) -> Callable[[Sequence[int]], tuple[list[int], int] | None]:
    """The transpose of the last two dims of a packed tensor."""

    def strides(shape: Sequence[int]) -> tuple[list[int], int] | None:
        if len(shape) < 2:
            return None
        dims = list(range(len(shape)))
        return packed(shape, [*dims[:-2], dims[-1], dims[-2]], pitch, step), offset

    return strides


def _wider(more: int, offset: int) -> Callable[[Sequence[int]], tuple[list[int], int] | None]:
    """Columns of a matrix that has `more` of them."""

    def strides(shape: Sequence[int]) -> tuple[list[int], int] | None:
        return None if len(shape) < 2 else (packed((*shape[:-1], shape[-1] + more)), offset)

    return strides


def _stepping(dim: int) -> Callable[[Sequence[int]], tuple[list[int], int] | None]:
    """Every other element along `dim`."""

    def strides(shape: Sequence[int]) -> tuple[list[int], int] | None:
        if len(shape) < -dim:
            return None
        sides = list(shape)
        sides[dim] *= 2
        found = packed(sides)
        found[dim] *= 2
        return found, 0

    return strides


def _expanded(*dims: int) -> Callable[[Sequence[int]], tuple[list[int], int] | None]:
    """The same elements again along `dims`."""

    def strides(shape: Sequence[int]) -> tuple[list[int], int] | None:
        if len(shape) < -min(dims):
            return None
        found = packed([1 if i - len(shape) in dims else size for i, size in enumerate(shape)])
        return [0 if i - len(shape) in dims else stride for i, stride in enumerate(found)], 0

    return strides


def _everywhere(shape: Sequence[int]) -> tuple[list[int], int]:
    return [0] * len(shape), 0


def _sliding(shape: Sequence[int]) -> tuple[list[int], int] | None:
    """Every row begins one element after the previous one, as for windows of a signal."""
    return None if len(shape) < 2 else ([*packed(shape[:-1]), 1], 0)


def _heads_inside(shape: Sequence[int]) -> tuple[list[int], int] | None:
    """The dim before the rows is inside them, as for heads in [B, S, H, D] and batch items in [S, B, D]."""
    if len(shape) < 3:
        return None
    dims = list(range(len(shape)))
    return packed(shape, [*dims[:-3], dims[-2], dims[-3], dims[-1]]), 0


def _single(stride: int) -> Callable[[Sequence[int]], tuple[list[int], int] | None]:
    """Any stride in dims of one element, which no address depends on."""

    def strides(shape: Sequence[int]) -> tuple[list[int], int] | None:
        if 1 not in shape:
            return None
        return [stride if size == 1 else s for size, s in zip(shape, packed(shape), strict=True)], 0

    return strides


ZOO: tuple[StrideLayout, ...] = (
    StrideLayout("contiguous", _whole),
    StrideLayout("turned", _turned()),
    StrideLayout("turned from an odd offset", _turned(offset=1)),
    StrideLayout("turned with a wide pitch", _turned(pitch=3)),
    StrideLayout("turned in steps of two", _turned(step=2)),
    StrideLayout("every other row", _stepping(-2)),
    StrideLayout("every other column", _stepping(-1)),
    StrideLayout("every other item", _stepping(-3)),
    StrideLayout("columns of a wider matrix", _wider(64, 16)),
    StrideLayout("columns from an odd one", _wider(5, 3)),
    StrideLayout("a pitch of many rows", _wider(4096, 0)),
    StrideLayout("an odd offset", _shifted(1)),
    StrideLayout("an aligned offset", _shifted(64)),
    StrideLayout("heads inside rows", _heads_inside),
    StrideLayout("one row", _expanded(-2), own=False),
    StrideLayout("one column", _expanded(-1), own=False),
    StrideLayout("one item", _expanded(-3), own=False),
    StrideLayout("one matrix row for all", _expanded(-3, -2), own=False),
    StrideLayout("one element", _everywhere, own=False),
    StrideLayout("sliding windows", _sliding, own=False),
    StrideLayout("a stride of 0 in single dims", _single(0)),
    StrideLayout("a stride of 13 in single dims", _single(13)),
)


def layouts(shape: Sequence[int]) -> Iterator[StrideLayout]:
    """The layouts that a tensor of `shape` can have, each pair of strides and offset once."""
    seen = set()
    for layout in ZOO:
        found = layout.strides(shape)
        key = None if found is None else (*found[0], found[1])
        if found is not None and key not in seen and math.prod(shape):
            seen.add(key)
            yield layout
