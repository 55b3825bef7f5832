"""Readiness of tensors across CUDA streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ready(NamedTuple):
    """The stream and event after which a plan's tensors are ready."""

    stream: torch.cuda.Stream
    event: torch.cuda.Event
    index: int
    raw: int  # the stream's handle

    @classmethod
    def here(cls, device: torch.device) -> Ready | None:
        """After the work queued on the current stream so far; None on a CPU."""
        if device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(device)
        made = cls(stream, torch.cuda.Event(), stream.device_index, stream.cuda_stream)
        made.event.record(made.stream)
        return made


def wait_for(made: Ready, tensors: Iterable[Tensor | None]) -> None:
    """Makes the current stream wait for these tensors and keeps their memory alive until it is done.

    A captured stream may not wait, and need not: torch.cuda.graph synchronises the device first.
    """
    if torch._C._cuda_getCurrentRawStream(made.index) == made.raw:  # making a Stream object takes longer
        return
    current = torch.cuda.current_stream(made.stream.device)
    if current != made.stream:
        current.wait_event(made.event)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(current)


class Contents(NamedTuple):
    """What shows that a tensor was written to: torch's counter of writes, and where and what it is.

    `x.data = other` counts no write. Those to `x.data`, and to memory that NumPy shares, show nowhere.
    """

    version: int
    pointer: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> Contents | None:
        """None for a tensor of inference mode, which counts no writes."""
        return None if x.is_inference() else cls(x._version, x.data_ptr(), x.dtype)


def captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def tensors_in(work: Any) -> Iterator[Tensor]:
    """Every tensor in prepared work: dataclasses, tuples, lists and dicts of them."""
    if isinstance(work, Tensor):
        yield work
    elif is_dataclass(work):
        for each in fields(work):
            yield from tensors_in(getattr(work, each.name))
    elif isinstance(work, (tuple, list)):
        for each in work:
            yield from tensors_in(each)
    elif isinstance(work, dict):
        yield from tensors_in(list(work.values()))
