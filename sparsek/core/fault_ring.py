"""Words of host memory that kernels write faults to, so that the host learns of them without a copy or an event.

A kernel stores `1 + fault`, with a fault from 0 up, only if there is one. The words of a ring are given out in turn:
a mask's word is used again for the mask made COUNT masks later. A captured CUDA graph writes to one word at every
replay, so its words are never given out again.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

COUNT = 2048  # of a ring
_BYTES = 8


class FaultRing:
    """COUNT int64 words in pinned memory, as tensors of one element. All are 0 where nothing was found."""

    def __init__(self, pinned: bool) -> None:
        self.words = torch.zeros(COUNT, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.values: np.ndarray = self.words.numpy()
        self.views = self.words.split(1)
        self.owners: list[Any] = [None] * COUNT
        self._first, self._turn = self.words.data_ptr(), itertools.count()

    def take(self) -> Tensor:
        """The next word, set to 0."""
        at = next(self._turn) % COUNT
        self.values[at], self.owners[at] = 0, None
        return self.views[at]

    def place(self, word: Tensor) -> int | None:
        """The number of a word of this ring; None for another."""
        at = (word.data_ptr() - self._first) // _BYTES
        return at if 0 <= at < COUNT else None


_rings: list[FaultRing] = []
_of_graphs: list[Tensor] = []


def ring() -> FaultRing:
    """The ring of pinned words of this process; made on first use, which needs CUDA."""
    if not _rings:
        _rings.append(FaultRing(pinned=True))
    return _rings[0]


def place_of(word: Tensor) -> int | None:
    """The place of a word in the ring; None if it is no word of the ring."""
    return ring().place(word) if _rings else None


def written() -> list[int]:
    """The places of words in the ring that are not 0."""
    if not _rings or not _rings[0].values.any():
        return []
    return np.flatnonzero(_rings[0].values).tolist()


def word_for(device: torch.device) -> Tensor:
    """A word, int64 [1], that kernels on `device` may write to and the host may read at any time. It is 0."""
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int64, device="cpu")
    if torch.cuda.is_current_stream_capturing():
        # A graph writes to it at every replay, so it is never given out again.
        _of_graphs.append(torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True))
        return _of_graphs[-1]
    return ring().take()
