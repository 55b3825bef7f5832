"""Bound calls: a call like one before it goes from the verb to the launch, with one guard, one key and one look-up.

    slot = look_up(...)    None where something watches: torch.compile, torch.func, a mode of torch, autocast, a capture
    slot.call(...)         the recorded call (kernels/lang/launch.py): allocate, write the addresses, launch
    slot.run(...)          else, after every check and the plan: runs; the second call of a key is recorded

A key holds all that checks, plan and launch read of the operands: shapes, strides, dtypes, alignments, device, stream,
thread. A call is not bound where a vendor's library or torch's operators compute: then its slot never has a `call`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsek.kernels.lang.launch import Recorded, record

# A recorded call holds some KB on the host, and no memory of the device but what its plan holds.
LIMIT = 256
PLAIN = (Tensor, torch.nn.Parameter)

Calls = dict[Hashable, Any]
"""The recorded calls of a pattern, a mask, or a 2:4 matrix's metadata; True where a key came once, False for never."""

_get_ident = threading.get_ident


class Slot(NamedTuple):
    """Where a call is kept, the recorded call if there is one, and whether autograd wants a gradient of the call."""

    calls: Calls
    key: Hashable
    call: Recorded | None
    learns: bool

    def run(self, operands: Sequence[Tensor], run: Callable[[], Any], kept: Any) -> Any:
        """What `run()` returns, whose operands have been checked. A call that comes a second time is recorded.

        `kept` lives as long as the recorded call: what owns the memory of its constants.
        """
        calls, key, *_ = self
        seen = calls.get(key)
        if seen is True:
            output, made = record(run, operands, kept)
            calls[key] = made or False
            return output
        if seen is None:
            while len(calls) >= LIMIT:
                calls.pop(next(iter(calls)), None)
            calls[key] = True
        return run()


def look_up(calls: Calls, more: Hashable, operands: Sequence[Tensor | None]) -> Slot | None:
    """The slot of a call of `operands`; `more` is all else that it depends on. None where it must not be bound."""
    if (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    facts: list[Any] = [more, _get_ident()]
    index, learns = -1, False
    for x in operands:
        if x is None:
            facts.append(None)
            continue
        if x.__class__ not in PLAIN:
            return None
        dtype = x.dtype
        if dtype is not torch.bfloat16 and x.is_neg():  # no complex dtype has parts in bf16
            return None
        on = x.get_device()
        if on < 0 or (index >= 0 and on != index):
            return None
        index, learns = on, learns or x.requires_grad
        try:
            facts += (x.shape, x.stride(), dtype, x.data_ptr() & 15)
        except RuntimeError:  # a tensor without strides or address
            return None
    if index < 0 or index != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing():
        return None
    learns = learns and torch.is_grad_enabled()
    facts += (index, torch._C._cuda_getCurrentRawStream(index), learns)
    key = tuple(facts)
    found: Any = calls.get(key)
    if found.__class__ is not Recorded:
        return Slot(calls, key, None, learns)
    if not found.is_current():
        del calls[key]
        found = None
    return Slot(calls, key, found, learns)
