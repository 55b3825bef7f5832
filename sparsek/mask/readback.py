"""What a device finds while it makes a mask: faults and sizes, copied to the host without a sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.mask.lists import exact_sizes, heavy_blocks

if TYPE_CHECKING:
    from sparsek.mask.mask import BlockMask


class Readback:
    """An asynchronous device-to-host copy of a few int64 values."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers, self.arrived = numbers, None
        if numbers.device.type == "cuda":
            self.numbers = torch.empty(numbers.shape, dtype=torch.int64, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(numbers.device))

    def read(self, wait: bool) -> Any:
        """The values as an int or a list; None while they have not arrived, unless `wait`."""
        if self.arrived is not None:
            if torch.cuda.is_current_stream_capturing():  # asking would end the capture of a CUDA graph
                return None
            if wait:
                self.arrived.synchronize()
            elif not self.arrived.query():
                return None
            self.arrived = None
        return self.numbers.tolist()


class Fault(Readback):
    """The position of a fault in what a mask was made from; negative if there is none."""

    def __init__(self, at: Tensor, explain: Callable[[int], str]) -> None:
        super().__init__(at)
        self.explain = explain

    def apply(self, mask: BlockMask, wait: bool) -> None:
        """Raise InvalidInput if there is a fault. Does nothing while that is unknown."""
        at = self.read(wait)
        if at is not None and at >= 0:
            raise InvalidInput(self.explain(at))

    def faults_only(self) -> Fault:
        """The readback for another mask that contains this one: this one."""
        return self


class LateSizes:
    """The sizes of lists on a device, read once a mask has had some uses. They replace the bounds in its `sizes`, and
    later plans use them.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def begin(self, mask: BlockMask) -> None:
        """Copy the counts of the rows to the host, without a sync. Not while a CUDA graph is captured."""
        parts = mask.full.counts, mask.partial.counts
        on_gpu = mask.device.type == "cuda"
        if self.counts is not None or (on_gpu and torch.cuda.is_current_stream_capturing()):
            return
        self.counts = torch.empty((2, mask.rows), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        for there, here in zip(parts, self.counts, strict=True):
            here.copy_(there, non_blocking=True)
        if on_gpu:
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(mask.device))

    def apply(self, mask: BlockMask, wait: bool) -> None:
        """Set the sizes of the mask, once they have arrived. `wait`: read them now, if nothing has begun to."""
        if mask.sizes.exact or (self.counts is None and not wait):
            return
        self.begin(mask)
        if self.counts is None:
            return
        if self.arrived is not None:
            if torch.cuda.is_current_stream_capturing():  # asking would end the capture of a CUDA graph
                return
            if wait:
                self.arrived.synchronize()
            elif not self.arrived.query():
                return
        counts = self.counts.numpy()
        object.__setattr__(mask, "sizes", exact_sizes(*counts))
        mask._memo["heavy"] = heavy_blocks(*counts)

    def faults_only(self) -> None:
        """The readback for another mask that contains this one: none, because its sizes are others."""


def faults(found: Tensor, explain: Callable[[int], str]) -> list[Fault]:
    """A readback of whether any element is True. None in a captured CUDA graph, whose replays have no host code."""
    if found.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return []
    return [Fault(_first(found), explain)]


def _first(found: Tensor) -> Tensor:
    """The flat position of the first True, int64; -1 if there is none."""
    if not found.numel():
        return found.new_full((), -1, dtype=torch.int64)
    flat = found.flatten()
    return torch.where(flat.any(), flat.to(torch.uint8).argmax(), -1)


def with_readbacks(mask: BlockMask, readbacks: Sequence[Any]) -> BlockMask:
    """The mask, whose `verify` applies these readbacks. On the CPU they are applied here."""
    if mask.device.type == "cpu":
        for each in readbacks:
            each.apply(mask, wait=True)
    else:
        mask._memo["readbacks"] = tuple(readbacks)
    return mask


def index(at: Sequence[int]) -> str:
    """Coordinates as messages show them: "[0, 1, 2]"."""
    return f"[{', '.join(str(each) for each in at)}]"
