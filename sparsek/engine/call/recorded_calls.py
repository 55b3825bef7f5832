"""Recorded calls, found again: a call like one of the last four skips checks, planner and key.

    repeat(...)      the result of the recorded call (engine/launch/recorder.py), or the Slot of this one
    slot.run(...)    after all checks: runs, and records the second call of a key

    slot = recorded_calls.repeat(calls, settings, operands)
    if slot.__class__ is not recorded_calls.Slot:
        return slot
    ...               # checks
    return slot.run(lambda: ...)

Where autograd needs a gradient, `slot.differentiate(apply, owner, run)` is `apply(owner, operands, run())`, which makes
what `run` made the result of a differentiable function. From then on `repeat` calls `apply` with the result of the
recorded call, and without checks. Backward passes are calls of their own.

The key of a call has all that checks, plan and launch read: `settings` (verb, options, form of the sparse operand), the
shapes, strides, dtypes and alignments of the operands, the thread, the device and the stream. Calls under
torch.compile, torch.func, torch.jit.trace, a dispatch mode, autocast, forward-mode differentiation or the capture of a
CUDA graph, and those with a tensor subclass, are not recorded. Nor is a call that runs a vendor library or operators of
torch.

`repeat` compares the operands with those of the last calls with this `settings` by torch's own guards
(torch._C._dynamo.guards.TensorGuards, one call into C++). These compare dispatch keys too, and so find no call under
autocast, torch.func, torch.jit.trace or a dispatch mode. Only if none matches does it build the key.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sparsek.core.arguments import TENSORS
from sparsek.core.plan_owner import drop_oldest
from sparsek.engine.launch.recorder import MISS, Recorded, record

# A recorded call takes some KB on the host, and no device memory besides that of its plan.
LIMIT = 256
# Recorded calls with one `settings` that `repeat` finds: alternating shapes do not evict each other.
SHAPES = 4

# The state of a key whose recorded call has stale constants. The next call may have to make them, and the one after it
# is recorded.
STALE: Any = object()
Apply = Callable[[Any, Sequence[Tensor], Any], Any]

# torch.backends.cuda.matmul.fp32_precision, which takes six times as long
_precision: Callable[[], str] = functools.partial(torch._C._get_fp32_precision_getter, "cuda", "matmul")
_compiling = torch.compiler.is_compiling
_tracing = torch._C._is_tracing
_thread = threading.get_ident
_grad = torch.is_grad_enabled
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)


# A recorded call that `repeat` finds: torch's guards of its operands; the precision of float32 products, "" if no
# operand is float32; the thread; the grad mode, None if no operand requires a gradient; `apply` of a call that learns,
# as in `Slot.differentiate`; the call. A plain tuple, which unpacks fastest.
Recent = tuple[Callable[..., bool], str, int, "bool | None", "Apply | None", Recorded]


class Calls:
    """The calls of a pattern, a mask, or the metadata of a 2:4 matrix. Calls in `recent` are also in `known`."""

    __slots__ = ("known", "recent")

    def __init__(self) -> None:
        # A Recorded; STALE; True: the key occurred once; False: it cannot be recorded
        self.known: dict[Hashable, Any] = {}
        self.recent: dict[Hashable, tuple[Recent, ...]] = {}

    def note(self, key: Hashable, state: Any) -> None:
        """Store the state of a key.

        Evicts calls that cannot be repeated, for example those of a freed tensor, and beyond LIMIT keys the oldest.
        """
        gone = [self.known.pop(key, None)]
        past = [
            old
            for old, call in list(self.known.items())
            if isinstance(call, Recorded) and not call.is_fresh()
        ]
        gone += [self.known.pop(old, None) for old in past]
        while len(self.known) >= LIMIT:
            gone.append(drop_oldest(self.known))
        self.known[key] = state
        if any(isinstance(each, Recorded) for each in gone):
            left = {
                settings: tuple(x for x in xs if x[-1] not in gone)
                for settings, xs in list(self.recent.items())
            }
            self.recent = {settings: xs for settings, xs in left.items() if xs}

    def find_again(
        self, settings: Hashable, operands: Sequence[Tensor], call: Recorded, apply: Apply | None = None
    ) -> None:
        """Make `repeat` find the call, in the grad mode of now."""
        if GUARDS is None:
            return
        precision = _precision() if any(x.dtype is torch.float32 for x in operands) else ""
        sizes, strides = [list(x.shape) for x in operands], [list(x.stride()) for x in operands]
        like = GUARDS(*operands, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        grad = _grad() if any(x.requires_grad for x in operands) else None
        made = like, precision, _thread(), grad, apply, call
        others = [x for x in self.recent.get(settings, ()) if x[-1] is not call]
        self.recent[settings] = (made, *others)[:SHAPES]


class Slot(NamedTuple):
    """The place of a call in `calls`. `key`: None if it must not be recorded, because something traces it.

    `learns`: autograd needs a gradient of the call.
    """

    calls: Calls
    settings: Hashable
    operands: Sequence[Tensor]
    key: Hashable | None
    learns: bool

    def run(self, run: Callable[[], Any]) -> Any:
        """Return `run()`, for checked operands. The second call with a key is recorded, unless it learns.

        `run` reads the operands of the slot and tensors of a plan only; it makes copies of operands itself.
        """
        return run() if self.learns else self.inside(run)

    def inside(self, run: Callable[[], Any]) -> Any:
        """The same for the inner part of a differentiable function: recorded although it learns."""
        calls = self.calls
        if self.key is None:
            return run()
        seen: Any = calls.known.get(self.key)
        if self.learns and isinstance(seen, Recorded):
            output = self.again(seen)
            if output is not self:
                return output
            seen = calls.known.get(self.key)
        if seen is None:
            calls.note(self.key, True)
        if (
            seen is not True and seen is not STALE
        ):  # it is new, it cannot be recorded, or a hook of Triton listens now
            return run()
        output, made = record(run, self.operands)
        calls.note(self.key, made or seen is STALE)
        if made is not None and not self.learns:
            calls.find_again(self.settings, self.operands, made)
        return output

    def again(self, call: Recorded) -> Any:
        """Return the result of the recorded call with the key of this slot, or this slot if it cannot run now."""
        output = call.repeat(self.operands)
        if output is MISS:
            if not call.is_fresh():
                self.calls.note(self.key, STALE)
            return self
        if not self.learns:
            self.calls.find_again(self.settings, self.operands, call)
        return output

    def differentiate(self, apply: Apply, owner: Any, run: Callable[[], Any]) -> Any:
        """Return `apply(owner, operands, run())`, for checked operands. The run, outside autograd, may be recorded.

        `owner`: what each call has besides its operands, and what `apply` must not keep: a matrix or a mask.
        """
        seen: Any = self.calls.known.get(self.key)
        with torch.no_grad():
            made = self.inside(run)
        made = apply(owner, self.operands, made)
        if isinstance(seen, Recorded) and self.calls.known.get(self.key) is seen:  # not found stale meanwhile
            self.calls.find_again(self.settings, self.operands, seen, apply)
        return made


UNBOUND = Slot(Calls(), None, (), None, False)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` for calls with a key: without torch's look at each argument for wrappers of torch.func."""
    direct: Any = super(torch.autograd.Function, function)
    return direct.apply


def _guards() -> Any:
    """torch's class of guards; None if those of this torch do not behave as `repeat` needs."""
    try:
        guards = torch._C._dynamo.guards.TensorGuards  # pyright: ignore[reportAttributeAccessIssue]
        x, y = (torch.empty(sides, dtype=torch.float32, device="cpu") for sides in ((2, 3), (3, 2)))
        like = guards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
        return guards if like(x) and not like(y) and not like(y.mT) and not like(x.double()) else None
    except (AttributeError, TypeError, RuntimeError):
        return None


GUARDS = _guards()


def repeat(calls: Calls, settings: Hashable, operands: Sequence[Tensor], owner: Any = None) -> Any:
    """Run the recorded call with the same `settings` and equal operand properties, and return its result; otherwise a
    Slot.

    Calls with one `settings` have one number of operands: torch's guards raise TypeError for another. Not for a
    function that torch.compile traces.
    """
    recent = calls.recent.get(settings)
    if recent is not None and forward_ad._current_level < 0:
        thread = _thread()
        for each in recent:
            like, precision, of_thread, grad, apply, call = each
            if of_thread != thread or not like(*operands) or (grad is not None and grad is not _grad()):
                continue
            stream = call.stream
            if _stream(call.device) != stream or _device() != call.device or (stream and _capturing()):
                continue  # none captures stream 0
            if precision and precision != _precision():
                continue
            output = call.repeat(operands)
            if output is not MISS:
                if each is not recent[0]:
                    calls.recent[settings] = (each, *[x for x in recent if x is not each])
                return output if apply is None else apply(owner, operands, output)
    key, learns = _key(settings, operands)
    if key is None:
        return UNBOUND
    slot, found = Slot(calls, settings, operands, key, learns), calls.known.get(key)
    return slot.again(found) if isinstance(found, Recorded) and not learns else slot


def _key(settings: Hashable, operands: Sequence[Tensor]) -> tuple[Hashable, bool]:
    """The key of a call, None if it must not be recorded; and whether autograd needs a gradient of it."""
    if (
        _compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or _tracing()
    ):
        return None, False
    facts: list[Any] = [settings, _thread()]
    index, learns = -1, False
    for x in operands:
        on = x.get_device() if x.__class__ in TENSORS else -1
        if on < 0 or (index >= 0 and on != index) or x.is_neg():
            return None, False
        index, learns = on, learns or x.requires_grad
        try:
            facts += (x.shape, x.stride(), x.dtype, x.data_ptr() & 15)
        except RuntimeError:  # a tensor without strides or address
            return None, False
        if x.dtype is torch.float32:
            facts.append(_precision())
    if index < 0 or index != _device() or _capturing():
        return None, False
    learns = learns and _grad()
    return (*facts, index, _stream(index), learns), learns
