"""Bound calls: a call like one before it goes from the verb to the launch, with one guard, one key and one look-up.

    repeat(...)     the result of the recorded call (kernels/lang/recorder.py), or MISS
    slot(...)       after a MISS: where the call is kept; None where it must not be bound, as something watches it
    slot.run(...)   after every check: runs, and records the second call of a key

What checks, plan and launch read of a call is its `more` (verb, settings, form of the sparse operand), the operands'
shapes, strides, dtypes and alignments, the thread, the device and the stream. torch.compile, torch.func, a dispatch
mode, autocast, forward-mode differentiation, a tensor subclass and a CUDA graph's capture go the long way. So does a
call of which a vendor's library or torch's operators do a part: it is never recorded.

`repeat` asks torch's own guards (torch._C._dynamo.guards.TensorGuards, one call into C++) whether the operands are like
those of the last call with this `more`; only then the key is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsek.kernels.lang.recorder import MISS, Recorded, record
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.semi24 import Semi24

# A recorded call holds some KB on the host, and no memory of the device but what its plan holds.
LIMIT = 256
PLAIN = (Tensor, torch.nn.Parameter)
SPARSE = (BSR, Semi24, BSR24, Quantized)
DENSE = (*PLAIN, QuantizedTensor)

_compiling = torch.compiler.is_compiling
_thread = threading.get_ident
_grad = torch.is_grad_enabled
_stream = torch._C._cuda_getCurrentRawStream if hasattr(torch._C, "_cuda_getCurrentRawStream") else None


class Recent(NamedTuple):
    """The last call with some `more`: torch's guards of its operands, and the rest of its key.

    `precision`: that of float32 products, "" where no operand is float32.
    """

    like: Callable[..., bool]
    precision: str
    thread: int
    learns: bool
    grad: bool
    call: Recorded


class Calls:
    """The calls of a pattern, a mask, or a 2:4 matrix's metadata."""

    __slots__ = ("known", "recent")

    def __init__(self) -> None:
        self.known: dict[
            Hashable, Any
        ] = {}  # Recorded; True: the key came once; False: it cannot be recorded
        self.recent: dict[Hashable, Recent] = {}

    def begin(self, key: Hashable, state: bool) -> None:
        """Notes a new key. Calls that can never be repeated go, as those of a tensor that is gone, and the oldest."""
        for more, last in list(self.recent.items()):
            if not last.call.is_fresh():
                self.recent.pop(more, None)
        for old, call in list(self.known.items()):
            if call.__class__ is Recorded and not call.is_fresh():
                self.known.pop(old, None)
        while len(self.known) >= LIMIT:
            self.known.pop(next(iter(self.known)), None)
        self.known[key] = state


class Slot(NamedTuple):
    """Where a call is kept, and the recorded call if there is one. `learns`: autograd wants a gradient of the call."""

    calls: Calls
    more: Hashable
    key: Hashable
    call: Recorded | None
    learns: bool

    def check_once(self, check: Callable[..., Any], *given: Any) -> None:
        """`check(*given)`, which raises for operands that do not fit, unless a call of this key has passed it."""
        if self.key not in self.calls.known:
            check(*given)
            self.calls.begin(self.key, False)

    def run(self, operands: Sequence[Tensor], run: Callable[[], Any], kept: Any = None) -> Any:
        """What `run()` returns, whose operands have been checked. A call that comes a second time is recorded.

        `kept` lives as long as the recorded call: whatever its constants need beside the tensors that it launches with.
        """
        known = self.calls.known
        if self.call is not None:
            output = self.call(*operands)
            if output is not MISS:
                self._remember(operands, self.call)
                return output
            if not self.call.is_fresh():
                # Its constants are of the past: this call makes them anew, and the next is recorded.
                known.pop(self.key, None)
        seen = known.get(self.key)
        if seen is None:
            self.calls.begin(self.key, True)
            return run()
        if seen is not True:  # it cannot be recorded, or a hook of Triton listens now
            return run()
        output, made = record(run, operands, kept)
        known[self.key] = made or False
        if made is not None:
            self._remember(operands, made)
        return output

    def _remember(self, operands: Sequence[Tensor], call: Recorded) -> None:
        """Has `repeat` find the call."""
        recent = self.calls.recent
        if GUARDS is None or _single() is False:
            return
        if len(recent) >= LIMIT:
            recent.clear()
        precision = _precision() if any(x.dtype is torch.float32 for x in operands) else ""
        sizes, strides = [list(x.shape) for x in operands], [list(x.stride()) for x in operands]
        like = GUARDS(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        recent[self.more] = Recent(like, precision, _thread(), self.learns, _grad(), call)


def _guards() -> Any:
    """torch's class of guards; None where this torch has none that behave as `repeat` needs."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards  # pyright: ignore[reportAttributeAccessIssue]
        x, y = (torch.empty(sides, dtype=torch.float32, device="cpu") for sides in ((2, 3), (3, 2)))
        like = guards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
        return guards if like(x) and not like(y) and not like(y.mT) and not like(x.double()) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


def _precision() -> str:
    return str(torch.backends.cuda.matmul.fp32_precision)


GUARDS = _guards()
_devices: list[bool] = []


def _single() -> bool:
    """Whether there is one GPU, so that it is the current one."""
    if not _devices:
        _devices.append(torch.cuda.device_count() == 1)
    return _devices[0]


def repeat(calls: Calls, more: Hashable, operands: Sequence[Tensor], learns: bool = False) -> Any:
    """The result of the last call with this `more`, run again with operands like its own; MISS if they differ.

    `learns`: the call is one inside of autograd, for operands of which a gradient is wanted.
    """
    recent = calls.recent.get(more)
    if recent is None or _compiling() or forward_ad._current_level >= 0:
        return MISS
    like, precision, thread, recorded_learns, grad, call = recent
    if precision and precision != _precision():
        return MISS
    if recorded_learns is not learns or grad is not _grad() or thread != _thread() or not like(*operands):
        return MISS
    stream = _stream(call.device)  # type: ignore[misc]
    if stream != call.stream or (
        stream and torch._C._cuda_isCurrentStreamCapturing()
    ):  # none captures stream 0
        return MISS
    return call(*operands)


def slot(calls: Calls, more: Hashable, operands: Sequence[Tensor]) -> Slot | None:
    """The slot of a call of `operands`; `more` is all else that it depends on. None where it must not be bound."""
    if (
        _compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    ):
        return None
    facts: list[Any] = [more, _thread()]
    index, learns = -1, False
    for x in operands:
        on = x.get_device() if x.__class__ in PLAIN else -1
        if on < 0 or (index >= 0 and on != index) or x.is_neg():
            return None
        index, learns = on, learns or x.requires_grad
        try:
            facts += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
        except RuntimeError:  # a tensor without strides or address
            return None
        if x.dtype is torch.float32:
            facts.append(_precision())
    if index < 0 or index != torch._C._cuda_getDevice() or torch._C._cuda_isCurrentStreamCapturing():
        return None
    learns = learns and _grad()
    key = (*facts, index, torch._C._cuda_getCurrentRawStream(index), learns)
    found = calls.known.get(key)
    return Slot(calls, more, key, found if found.__class__ is Recorded else None, learns)


def calls_of(matrix: Any) -> Calls:
    """The calls of a sparse matrix."""
    return matrix.home().derived("calls", Calls)


def form(x: Any) -> tuple[Any, ...]:
    """What a call depends on of a sparse matrix, or of an FP8 tensor, beside its home and its `tensors`.

    Whoever keeps a call of this form keeps what it is `named` by. The metadata of a BSR24 is an operand, or what a call
    makes of it watches it: a call of metadata that is gone is never repeated.
    """
    kind = x.__class__
    if kind is BSR:
        return kind, id(x.order)
    if kind is BSR24:
        return kind, id(x.meta)
    if kind is Quantized:
        return kind, x.kind, x.fast_accum, *form(x.matrix)
    return (kind, x.turned) if kind is QuantizedTensor else (kind,)


def named(x: Any) -> Tensor | None:
    """The object that `form` names by its id."""
    matrix = x.matrix if x.__class__ is Quantized else x
    return matrix.order if matrix.__class__ is BSR else None


def tensors(x: Any) -> tuple[Tensor, ...]:
    """The tensors of an operand that may differ from call to call."""
    kind = x.__class__
    if kind in PLAIN:
        return (x,)
    if kind is BSR:
        return (x.values,)
    if kind is Quantized:
        return x.scale, *tensors(x.matrix)
    if kind is QuantizedTensor:
        return x.values, x.scale
    return (x.values, x.meta) if kind is Semi24 or kind is BSR24 else (x,)
