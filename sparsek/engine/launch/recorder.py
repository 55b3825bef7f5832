"""Records a call while it launches its kernels, so that it can be repeated quickly.

    Recorder                notes each launch: function, grid, argument block, tensor maps
    Recorded.repeat         allocates, writes the addresses that changed, calls cuLaunchKernelEx; in the order of the
                            recorded call, so that its first kernel runs while the host prepares the others

A recorded call keeps what a launch would compute again each time. Between two calls of the same shapes, strides and
alignments only addresses change. Operands and tensors allocated during the call are roles, and their addresses are
updated. Any other address is a constant of the call, whose memory the plan keeps alive. cuTensorMapReplaceAddress
writes an address into a tensor map.

A call is recorded only if it consists of launches, allocations and views. Any other torch operator prevents it.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsek.core import fault_ring
from sparsek.core.streams import Contents
from sparsek.engine.launch import driver
from sparsek.engine.launch.driver import COOPERATIVE, LaunchAttribute, LaunchConfig

# The torch operators allowed in a recorded call: allocations and views.
ALLOCATIONS = {"aten::empty.memory_format", "aten::new_empty", "aten::empty_strided", "aten::empty_like",
               "aten::new_empty_strided"}  # fmt: skip
ZEROS = {"aten::zeros", "aten::new_zeros", "aten::zero_"}
VIEWS = {  # and operators that only read dtypes, or keep memory alive for a stream, once for all calls on it
    "promote_types", "result_type", "record_stream",
    "mT", "numpy_T", "narrow", "contiguous", "to",  # these appear in inference mode only; see `_is_copy`
    "alias", "as_strided", "detach", "expand", "flatten", "permute", "reshape", "select", "slice", "squeeze", "t",
    "transpose", "unflatten", "unsqueeze", "view", "_unsafe_view", "_reshape_alias", "movedim", "unbind", "split",
    "split_with_sizes",
}  # fmt: skip

ALIGNED = 15  # Triton specializes for addresses that are multiples of 16, and TMA requires them
MISS: Any = object()
# What torch's compiled code allocates with, on the current device: 1 us less than torch.empty_strided. It does not fill
# memory under torch.use_deterministic_algorithms. Not in every torch.
_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_allocate: Any = getattr(_guards, "_empty_strided_cuda", None)
_threads = threading.local()  # .recorder: the Recorder of the call in progress


def _empty(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class Address(NamedTuple):
    """An address in a role's memory: bytes after its first element."""

    role: int
    offset: int


class Result(NamedTuple):
    """A tensor that the call returns: a role, or a view of it that starts `offset` elements after its first."""

    role: int
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    view: bool = False


class Launch:
    """One launch: its function, grid and argument block."""

    __slots__ = ("cells", "config", "function", "kept", "launch", "pointers")

    def __init__(
        self,
        function: Any,
        grid: Sequence[int],
        block: int,
        shared: int,
        cells: Sequence[Any],
        *kept: Any,
        cooperative: bool = False,
    ) -> None:
        gx, gy, gz = (*grid, 1, 1)[:3]
        # With this attribute all CTAs are resident together or the launch fails, so one CTA may wait for another.
        attribute = LaunchAttribute(COOPERATIVE, 0, (ctypes.c_int * 16)(1))
        attributes = (ctypes.addressof(attribute), 1) if cooperative else (None, 0)
        self.config = LaunchConfig(gx, gy, gz, block, 1, 1, shared, None, *attributes)
        self.pointers = (ctypes.c_void_p * len(cells))(*map(ctypes.addressof, cells))
        self.function = function if isinstance(function, ctypes.c_void_p) else ctypes.c_void_p(function)
        handle = ctypes.c_char.from_address(
            self.function.value or 0
        )  # byref, which ctypes passes on fastest, is it
        self.launch = ctypes.byref(self.config), ctypes.byref(handle), ctypes.byref(self.pointers), None
        self.cells, self.kept = cells, (attribute, kept)


class Part:
    """What a call allocates, and what it then runs before it allocates again: functions and their arguments.

    `cells` are (8-byte cell, role, offset), of the argument blocks of launches from this part on. `maps` are (reference
    to a tensor map, cell for its address, role, offset). `last` are the addresses of all roles so far that were written
    at last.
    """

    __slots__ = ("allocations", "by_role", "cells", "last", "maps", "steps")

    def __init__(self) -> None:
        self.allocations: list[tuple[Any, Any]] = []
        self.cells: list[tuple[Any, int, int]] = []
        self.maps: list[tuple[Any, Any, int, int]] = []
        self.steps: list[tuple[Any, Any]] = []
        self.last: list[int] = []
        self.by_role: list[tuple[int, list[Any], list[Any]]] = []

    def close(self) -> None:
        """Sort cells and maps by role: what is written together."""
        for role in sorted({role for *_, role, _ in (*self.cells, *self.maps)}):
            cells = [(cell, offset) for cell, of, offset in self.cells if of == role]
            maps = [(made, cell, offset) for made, cell, of, offset in self.maps if of == role]
            self.by_role.append((role, cells, maps))

    def point(self, addresses: list[int], aligned: list[int]) -> bool:
        """Writes the addresses of this call into the argument blocks. False if operands are not as `aligned`."""
        if [address & ALIGNED for address in addresses[: len(aligned)]] != aligned:
            return False
        last, self.last = self.last, []  # if interrupted here, the next call writes all addresses again
        for role, cells, maps in self.by_role:
            address = addresses[role]
            if last and last[role] == address:
                continue
            for cell, offset in cells:
                cell.value = address + offset
            for tensor_map, cell, offset in maps:
                cell.value = address + offset
                driver.check(driver.cuda().cuTensorMapReplaceAddress(tensor_map, cell))
        self.last = [*addresses]
        return True


class Recorded:
    """A call ready to run again. Not for concurrent use by two threads."""

    __slots__ = (
        "aligned", "constants", "device", "fresh", "hooks", "one", "parts", "pick", "results", "single", "stream",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, results: Sequence[Result | None], single: bool) -> None:
        self.parts = tuple(recorder.parts)
        for part in self.parts:
            part.close()
        self.fresh = tuple(recorder.sources)
        self.results, self.single = tuple(results), single
        roles = [each.role for each in results if each is not None and not each.view]
        self.pick = itemgetter(*roles) if len(roles) == len(results) and single == (len(roles) == 1) else None
        (*early, last), self.one = self.parts, None
        if (
            not early
            and len(last.allocations) == len(last.steps) == 1
            and roles == [recorder.operands]
            and self.pick
        ):
            self.one = last, *last.allocations[0], *last.steps[0]
        self.constants = recorder.launches, recorder.constants
        self.device, self.stream = recorder.device, recorder.stream
        self.aligned = [x.data_ptr() & ALIGNED for x in recorder.roles[: recorder.operands]]
        self.hooks = _hooks()

    def repeat(self, operands: Sequence[Tensor]) -> Any:
        """The result for operands of the recorded shapes, strides and dtypes.

        MISS, and nothing is launched, if an operand has another alignment, if a source of the call's constants was
        written, or if a launch hook of Triton is active. The caller guarantees the thread, device and stream, and that
        no CUDA graph is being captured.
        """
        if self.fresh and not self.is_fresh():
            return MISS
        assigned, entering, leaving = self.hooks
        if (assigned or entering or leaving) and hooked():
            return MISS
        addresses: list[int] = []
        for x in operands:
            addresses.append(x.data_ptr())  # a comprehension is a function of its own
        if self.one is not None:  # the loop below for one allocation and one launch, in half the time
            part, allocate, sides, run, given = self.one
            made = allocate(*sides)
            addresses.append(made.data_ptr())
            if addresses != part.last and not part.point(addresses, self.aligned):
                return MISS
            status = run(*given)
            if status:
                self._retry(run, given, status)
            return made
        tensors = [*operands]
        for part in self.parts:
            for run, given in part.allocations:
                made = run(*given)
                tensors.append(made)
                addresses.append(made.data_ptr())
            if addresses != part.last and not part.point(addresses, self.aligned):
                return MISS
            for run, given in part.steps:
                status = run(*given)
                if status:
                    self._retry(run, given, status)
        if self.pick is not None:
            return self.pick(tensors)
        found = tuple([_seen(tensors, each) for each in self.results])
        return found[0] if self.single else found

    def is_fresh(self) -> bool:
        """False once a tensor was written that the call's constants were derived from."""
        for ref, held in self.fresh:
            source = ref()
            if source is None or (held is not None and not held.are_of(source)):
                return False
        return True

    def _retry(self, run: Any, given: Any, status: int) -> None:
        if status == driver.INVALID_CONTEXT:  # in a new thread torch may not have set a context yet
            driver.enter(self.device)
            status = run(*given)
        driver.check(status)


def _is_copy(made: Any, args: Sequence[Any]) -> bool:
    """Whether an apparent view copies: in inference mode `reshape` and others arrive as one op, copy included."""
    if not isinstance(made, Tensor) or not made.numel():
        return False
    return made.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()


def _seen(tensors: list[Tensor], result: Result | None) -> Tensor | None:
    if result is None:
        return None
    x = tensors[result.role]
    return (
        x
        if not result.view
        else torch.as_strided(x, result.shape, result.stride, x.storage_offset() + result.offset)
    )


class Recorder(TorchDispatchMode):
    """The launches and allocations of a call. `reason`: why it cannot be repeated; "" if it can."""

    def __init__(self, operands: Sequence[Tensor]) -> None:
        super().__init__()
        self.reason = ""
        self.parts = [Part()]
        self.launches: list[Launch] = []
        self.cells: dict[Address, Any] = {}  # one for all launches
        self.words: set[int] = set()  # the roles of words for faults
        self.sources: list[
            tuple[weakref.ref[Tensor], Contents | None]
        ] = []  # recorded calls may be kept with these
        self.constants: list[Tensor] = []
        self.roles: list[Tensor] = list(operands)
        self.operands = len(operands)
        self.device = operands[0].device.index or 0
        self.stream = torch._C._cuda_getCurrentRawStream(self.device)
        pointers = [x.data_ptr() for x in operands]
        if len(set(pointers)) < len(pointers):
            self.reason = "two operands begin at the same address"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports torch._dynamo on the first call, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name
        full = f"{name}.{func._schema.overload_name}" if func._schema.overload_name else name
        if full in ALLOCATIONS:
            if made.is_cuda:
                self._allocated(made)
        elif name in ZEROS and isinstance(made, Tensor) and made.is_cuda and made.is_contiguous():
            if name != "aten::zero_":
                self._allocated(made)
            size = ctypes.c_size_t(made.nbytes)
            step = self.cell(made.data_ptr(), made), ctypes.c_ubyte(0), size, ctypes.c_void_p(self.stream)
            if made.nbytes:
                self._runs(driver.cuda().cuMemsetD8Async, step)
        elif name.removeprefix("aten::") not in VIEWS or _is_copy(made, args):
            self.reason = self.reason or f"{name} runs between its launches"
        return made

    def _allocated(self, made: Tensor) -> None:
        sides = tuple(made.shape), made.stride()
        filled = torch.are_deterministic_algorithms_enabled() or made.device.index != self.device
        if _allocate is None or filled:
            self._makes(_empty, (*sides, made.dtype, made.device), made)
        else:
            self._makes(_allocate, (*sides, made.dtype), made)

    def _makes(self, function: Any, given: Any, made: Tensor) -> None:
        if self.parts[-1].steps:
            self.parts.append(Part())
        self.parts[-1].allocations.append((function, given))
        self.roles.append(made)

    def _runs(self, function: Any, given: Any) -> None:
        self.parts[-1].steps.append((function, given))

    def word(self, made: Tensor) -> None:
        """Notes a word for faults, a new one for each call."""
        self.words.add(len(self.roles))
        self._makes(fault_ring.ring().take, (), made)

    def mark(self, event: ctypes.c_void_p) -> None:
        """Notes that an event is recorded here."""
        self._runs(driver.cuda().cuEventRecord, (event, ctypes.c_void_p(self.stream)))

    def at(self, pointer: int, tensor: Tensor | None = None) -> Address | None:
        """The role that owns an address; None for a constant."""
        if not pointer:
            return None
        exact = [role for role, x in enumerate(self.roles) if x.data_ptr() == pointer and x.numel()]
        if len(exact) == 1:
            return Address(exact[0], 0)
        within = [
            (role, pointer - x.data_ptr())
            for role, x in enumerate(self.roles)
            if x.data_ptr() <= pointer < x.data_ptr() + _span(x)
        ]
        if len(exact) > 1 or len(within) > 1:
            self.reason = self.reason or "an address lies in the memory of two operands"
        if within:
            return Address(*within[0])
        if tensor is not None:
            self.constants.append(tensor)
        return None

    def add(self, step: Launch) -> None:
        """Notes a launch."""
        step.config.stream = self.stream
        self.launches.append(step)
        self._runs(driver.cuda().cuLaunchKernelEx, step.launch)

    def cell(self, pointer: int, tensor: Tensor | None = None) -> Any:
        """An 8-byte cell of the argument block that holds an address."""
        at = self.at(pointer, tensor)
        if at is None:
            return ctypes.c_uint64(pointer)
        cell = self.cells.get(at)
        if cell is None:
            cell = self.cells[at] = ctypes.c_uint64(pointer)
            self.parts[-1].cells.append((cell, *at))
        return cell

    def tensor_map(self, made: Any, pointer: int, tensor: Tensor | None = None) -> Any:
        """A tensor map whose address follows its role."""
        at = self.at(pointer, tensor)
        if at is not None:
            self.parts[-1].maps.append((ctypes.byref(made), ctypes.c_void_p(), *at))
        return made

    def structure(self, given: ctypes.Structure) -> None:
        """Makes the addresses inside a structure argument follow their roles."""
        for name, kind in given._fields_:
            at = self.at(getattr(given, name) or 0) if kind is ctypes.c_void_p else None
            if at is not None:
                place = ctypes.c_uint64.from_buffer(given, getattr(type(given), name).offset)
                self.parts[-1].cells.append((place, *at))

    def watch(self, *sources: Tensor) -> None:
        """The call's constants depend on `sources`; a write to one invalidates the recorded call."""
        for source in sources:
            if source.is_inference():
                self.reason = self.reason or "torch does not count writes to a tensor of inference mode"
            else:
                self.sources.append((weakref.ref(source), Contents.of(source)))

    def recorded(self, output: Any) -> Recorded | None:
        """The recorded call that returned `output`; None if it cannot be repeated."""
        several = isinstance(output, tuple)
        results = [self._result(x) for x in (output if several else (output,))]
        if not any(part.steps for part in self.parts):
            self.reason = self.reason or "nothing was launched"
        if self.reason:
            return None
        return Recorded(self, results, not several)

    def _result(self, x: Tensor | None) -> Result | None:
        if x is None:
            return None
        for place, made in enumerate(self.roles):
            if x is made:
                return Result(place)
        storage = x.untyped_storage().data_ptr() if x.numel() else None
        shared = [
            at
            for at, made in enumerate(self.roles)
            if at not in self.words and made.untyped_storage().data_ptr() == storage
        ]  # all words are of one storage
        if shared:  # among operands in one storage, a view of the one that it begins with
            place = min(shared, key=lambda at: self.roles[at].data_ptr() != x.data_ptr())
            if x.dtype != self.roles[place].dtype:
                self.reason = self.reason or "it returns a tensor in another dtype than its memory"
                return None
            offset = x.storage_offset() - self.roles[place].storage_offset()
            return Result(place, tuple(x.shape), tuple(x.stride()), offset, True)
        self.reason = self.reason or "it returns a tensor that is neither an operand nor allocated in it"
        return None


def recorder() -> Recorder | None:
    """The Recorder of this thread's recorded call."""
    return getattr(_threads, "recorder", None)


def fault_word(device: torch.device) -> Tensor:
    """A word for kernels on `device` to write a fault to; in a recorded call a new one each time."""
    made, recording_ = fault_ring.word_for(device), recorder()
    if recording_ is not None and device.type == "cuda":
        recording_.word(made)
    return made


@contextmanager
def recording(operands: Sequence[Tensor]) -> Any:
    """A Recorder for the calls inside the block."""
    made = Recorder(operands)
    _threads.recorder = made
    try:
        with made:
            yield made
    finally:
        _threads.recorder = None


def record(run: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Any, Recorded | None]:
    """The result of `run()`, and the recorded call, if it can be repeated."""
    with recording(operands) as made:
        output = run()
    return output, made.recorded(output)


def hooked() -> bool:
    """Whether a launch hook or profiler of Triton is active."""
    triton = sys.modules.get("triton")
    if triton is None:
        return False
    runtime = triton.knobs.runtime
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _hooks() -> tuple[Any, Any, Any]:
    """What is empty while no launch hook is active: the knobs that someone has assigned, and both chains of hooks."""
    triton = sys.modules.get("triton")
    if triton is None:
        return (), (), ()
    kind = type(triton.knobs.runtime)
    chains = (getattr(hook, "calls", True) for hook in (kind.launch_enter_hook, kind.launch_exit_hook))
    return vars(triton.knobs.runtime), *chains


def _span(x: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not x.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()
