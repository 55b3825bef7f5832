"""Readiness of tensors across CUDA streams."""

from __future__ import annotations

import ctypes
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


COMPARED = 1 << 26  # bytes of a CPU tensor that are compared at every use; beyond, only torch's counter is


class Contents(NamedTuple):
    """What shows that a tensor was written to: torch's counter of writes, and where and what it is.

    `x.data = other` counts no write, nor do writes to `x.data` and to memory that NumPy shares: of a CPU tensor that
    spans up to COMPARED bytes these are in `memory`. Elsewhere they show nowhere.
    """

    version: int
    pointer: int
    dtype: torch.dtype
    memory: bytes | None

    @classmethod
    def of(cls, x: Tensor) -> Contents | None:
        """None for a tensor of inference mode, which counts no writes."""
        return None if x.is_inference() else cls(x._version, x.data_ptr(), x.dtype, _memory(x))

    def are_of(self, x: Tensor) -> bool:
        """Whether a tensor of the same shape and strides still has them: `of(x) == self` without a copy of memory."""
        version, pointer, dtype, memory = self
        return (
            x._version == version
            and x.data_ptr() == pointer
            and x.dtype == dtype
            and (memory is None or _memcmp(pointer, memory, len(memory)) == 0)
        )


_memcmp = ctypes.CDLL(None).memcmp  # torch.equal takes longer, and finds no NaN equal
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t


def _memory(x: Tensor) -> bytes | None:
    """From the first to the last element of a CPU tensor, gaps included."""
    if not x.is_cpu or type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        return None
    pointer = x.data_ptr()
    if not pointer or not x.numel():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    size = span * x.element_size()
    return ctypes.string_at(pointer, size) if size <= COMPARED else None


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
