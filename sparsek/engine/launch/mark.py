"""A mark in a stream that the host waits for: one event for each thread and device. Recorded calls set it again."""

from __future__ import annotations

import ctypes
import threading

import torch

from sparsek.engine.launch import driver
from sparsek.engine.launch.recorder import recorder

# By thread and device. No event is destroyed: a later thread may have the number of one that ended, and its calls.
_events: dict[tuple[int, int], tuple[torch.cuda.Event, ctypes.c_void_p]] = {}


def set_mark(device: torch.device) -> None:
    """Sets the mark of this thread behind all work that is queued on the device's current stream. Nothing on a CPU."""
    if device.type != "cuda":
        return
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(index):  # event and stream are of this device's context
            return set_mark(device)
    _, event = _events.get((threading.get_ident(), index)) or _new(index)
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
    driver.check(driver.cuda().cuEventRecord(event, stream))
    made = recorder()
    if made is not None:
        made.mark(event)


def wait_for_mark(device: torch.device) -> None:
    """Returns once the work before the mark of this thread is done."""
    if device.type == "cuda":
        _, event = _events[threading.get_ident(), device.index or 0]
        driver.check(driver.cuda().cuEventSynchronize(event))


def _new(index: int) -> tuple[torch.cuda.Event, ctypes.c_void_p]:
    with torch.cuda.device(index):
        event = torch.cuda.Event()
        event.record()  # which creates it
    made = event, ctypes.c_void_p(event.cuda_event)
    _events[threading.get_ident(), index] = made
    return made
