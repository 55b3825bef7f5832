"""What a device finds while it makes a mask: faults and sizes, copied to the host without a sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.data import Mask, MaskData
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.lists import exact_sizes, heavy_blocks
from sparsek.core import fault_ring
from sparsek.core.errors import InvalidInput


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

    def apply(self, mask: MaskData, wait: bool) -> None:
        """Raise InvalidInput if there is a fault. Does nothing while that is unknown."""
        at = self.read(wait)
        if at is not None and at >= 0:
            raise InvalidInput(self.explain(at))


class DeferredFault:
    """A fault that a kernel may write to a word of host memory (core/fault_ring.py).

    `explain(fault)` is the fault in words. Reading needs no event: a word is 0 until there is a fault. `place` is the
    word's place in the ring, whose words are given out again; None for a word that is never given out again. There
    `raise_earlier` finds the fault, if nothing verifies the mask of this layout.
    """

    __slots__ = ("device", "explain", "found", "place", "word")

    def __init__(
        self, word: Tensor, explain: Callable[[int], str], device: torch.device, layout: MaskLayout
    ) -> None:
        self.word, self.explain, self.device, self.found = word, explain, device, 0
        self.place = fault_ring.place_of(word)
        if self.place is not None:
            fault_ring.ring().owners[self.place] = layout, self

    def look(self) -> int:
        """1 + the fault, as far as it is written; 0 for none."""
        place = self.place
        if self.found == 0 and place is None:
            self.found = int(self.word)
        elif self.found == 0 and place is not None:
            ring = fault_ring.ring()
            owner = ring.owners[place]
            if owner is not None and owner[1] is self:
                self.found = int(ring.values[place])
        return self.found

    def apply(self, mask: MaskData, wait: bool) -> None:
        """Raise InvalidInput if there is a fault. Without `wait` one that was not yet written is not seen."""
        if wait and self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        found = self.look()
        if found > 0:
            self.tell()

    def tell(self) -> None:
        """Raise the fault. `raise_earlier` does not raise it again."""
        if self.place is not None:
            ring = fault_ring.ring()
            owner = ring.owners[self.place]
            if owner is not None and owner[1] is self:
                ring.values[self.place] = 0
        raise InvalidInput(self.explain(self.found - 1))


def raise_earlier(layout: MaskLayout) -> None:
    """Raise InvalidInput if an earlier mask of this layout had a fault that was not raised yet."""
    for place in fault_ring.written():
        owner = fault_ring.ring().owners[place]
        if owner is not None and owner[0] is layout:
            fault = owner[1]
            if fault.look() > 0:
                try:
                    fault.tell()
                except InvalidInput as error:
                    label = layout.fields["label"]
                    raise InvalidInput(f"an earlier mask, {label}, has a fault: {error}") from error


class DeferredSizes:
    """The sizes of lists on a device, read once a mask has had some uses. They replace the bounds in its `sizes`, and
    later plans use them.
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None

    def begin(self, mask: MaskData) -> None:
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

    def apply(self, mask: MaskData, wait: bool) -> None:
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


def with_readbacks(mask: Mask, readbacks: Sequence[Any]) -> Mask:
    """The mask, whose `verify` applies these readbacks. On the CPU they are applied here."""
    if mask.device.type == "cpu":
        for each in readbacks:
            each.apply(mask, wait=True)
    else:
        mask._memo["readbacks"] = tuple(readbacks)
    return mask


def made_in(
    cls: type[Mask], layout: MaskLayout, base: Tensor, words: Sequence[Tensor] = (),
    explain: Sequence[Callable[[int], str]] = (), late: bool = False,
) -> Mask:  # fmt: skip
    """The mask whose tensors are in `base`, where a kernel may write faults to `words`, each explained in words.
    `late`: its true sizes are read later.
    """
    found = [DeferredFault(*each, base.device, layout) for each in zip(words, explain, strict=True)]
    return cls.of_layout(layout, base, (*found, DeferredSizes()) if late else (*found,))


def index(at: Sequence[int]) -> str:
    """Coordinates as messages show them: "[0, 1, 2]"."""
    return f"[{', '.join(str(each) for each in at)}]"
