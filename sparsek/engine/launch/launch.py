"""The one launcher of kernels in Triton, Gluon and CUDA C++.

    shipped machine code (launch/shipped.py)         is loaded and launched through the driver
    any other Triton or Gluon kernel                 is found or compiled, and launched, by Triton's JIT
    a launch in a recorded call (launch/recorder.py) is also noted

If a launch hook or profiler of Triton is active, Triton launches. A compilation of more than two seconds prints a
line on a terminal.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsek.engine.launch import driver, shipped
from sparsek.engine.launch.driver import CELLS, Boxed, Code
from sparsek.engine.launch.progress import patient_with
from sparsek.engine.launch.recorder import Launch, Recorder, hooked, recorder


class _Unrecorded:
    """Stands for a Recorder outside recording: addresses are used as they are."""

    def cell(self, pointer: int, tensor: Tensor | None = None) -> Any:
        return ctypes.c_uint64(pointer)

    def tensor_map(self, made: Any, pointer: int, tensor: Tensor | None = None) -> Any:
        return made


def launch(kernel: Any, grid: Sequence[int], *args: Any, **named: Any) -> None:
    """Launches a Triton or Gluon kernel on the current device and stream, as `kernel[grid](*args, **named)` does."""
    if 0 in grid:  # the driver refuses an empty grid, which Triton's launcher ignores
        return
    made, code = recorder(), None if hooked() else shipped.find(kernel, args, named)
    ready = code is not None
    if code is None:
        with patient_with(kernel, args, named):
            compiled = kernel[tuple(grid)](*args, **named)
        code = compiled and made and driver.code_of(compiled)
    if code:
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        in_order = [values.get(name) for name in kernel.arg_names]
        if ready:
            _run(code, grid, in_order, torch._C._cuda_getDevice(), made)
        else:
            _note(code, grid, in_order, made)


# key -> what is launched: shipped code, or Triton's compiled kernel, which its JIT takes 20 us to find. The key has
# the id of the kernel, which lives as long as its module: Triton's hash of a kernel reads its source, 8 ms the first
# time.
_COMPILED: dict[Any, Any] = {}


def launch_direct(
    kernel: Any,
    device: torch.device,
    ctas: int,
    args: Sequence[Any],
    key: Any,
    first: Sequence[Any],
    **options: Any,
) -> None:
    """Launches a kernel on the current stream of `device`; bypasses the JIT once compiled, under a tested Triton.

    `args` are all parameters in order, constants too; `first` the same for the JIT. Triton compiles for the dtypes of
    tensors and for None by itself; `key` must differ wherever else it would compile differently: also where an int
    passes int32, which no kernel here does. Without CTAs nothing is launched.
    """
    if not ctas:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_direct(kernel, device, ctas, args, key, first, **options)
        return
    kinds = tuple([getattr(arg, "dtype", arg.__class__) for arg in args])
    key, made, listens = (id(kernel), device.index, kinds, key), recorder(), hooked()
    compiled = _COMPILED.get(key)
    if compiled is None and not listens:
        compiled = shipped.find(kernel, first, options)
        if compiled is not None:
            _COMPILED[key] = compiled
    if compiled.__class__ is Code and not listens:
        _run(compiled, (ctas,), args, device.index, made)
        return
    if compiled is None or compiled.__class__ is Code:
        with patient_with(kernel, first, options):
            compiled = kernel[(ctas,)](*first, **options)
        if compiled is None:  # the interpreter compiles nothing
            return
        if driver.is_tested() and not listens:
            _COMPILED[key] = compiled
    elif listens:
        compiled[(ctas, 1, 1)](*args)
    else:
        stream, function = torch._C._cuda_getCurrentRawStream(device.index), compiled.function
        compiled.run(ctas, 1, 1, stream, function, compiled.packed_metadata, None, None, None, *args)
    if made is not None:
        _note(driver.code_of(compiled), (ctas,), args, made)


def launch_unspecialized(
    kernel: Any,
    device: torch.device,
    programs: int,
    args: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """Launches a kernel whose sizes and alignments Triton does not specialize for, on the current stream of `device`.

    `constants` follow `args`, whose ints fit int32.
    """
    given = (*args, *constants)
    launch_direct(kernel, device, programs, given, (constants, warps), given, num_warps=warps, num_stages=1)


def launch_cuda(
    function: ctypes.c_void_p,
    grid: int,
    block: int,
    shared: int,
    device: int,
    arguments: Sequence[Any],
    owners: Sequence[Tensor],
) -> None:
    """Launches a CUDA C++ kernel on `device`, torch's current one, and its current stream.

    `arguments` are its parameters in order: Boxed tensors, passed as tensor maps, or ctypes structures whose c_void_p
    fields are addresses. `owners` are the tensors that own this memory, operands or not; a recorded call holds what is
    none of its operands. Without blocks nothing is launched.
    """
    if not grid:
        return
    made = recorder()
    cells = []
    for each in arguments:
        if isinstance(each, Boxed):
            cell = driver.tensor_map(each)
            if made is not None:
                made.tensor_map(cell, each.pointer)
        else:
            cell = each
            if made is not None:
                made.structure(each)
        cells.append(cell)
    if made is not None:
        made.constants += [each for each in owners if made.at(each.data_ptr()) is None]
    _go(Launch(function, (grid,), block, shared, cells), device, made)


class _LastLaunches(threading.local):
    """This thread's last launch of each code, by id: to refill an argument block takes a third of building one."""

    def __init__(self) -> None:
        self.steps: dict[int, Launch] = {}


_kept = _LastLaunches()


def _run(code: Code, grid: Sequence[int], values: Sequence[Any], device: int, made: Recorder | None) -> None:
    """Launches through the driver; `values` are all parameters of the kernel."""
    step = None if made or code.boxes else _kept.steps.get(id(code))
    if step is None:
        step = _step(code, grid, values, made or _Unrecorded())
        if not made:
            _kept.steps[id(code)] = step  # holds `code`, so its id is not reused
    else:
        config = step.config
        config.gx, config.gy, config.gz = (*grid, 1, 1)[:3]
        cells = iter(step.cells)
        for kind, value in zip(code.kinds, values, strict=True):
            if kind != "constexpr":
                next(cells).value = value.data_ptr() if kind[0] == "*" else value
    _go(step, device, made)


def _note(code: Code | str, grid: Sequence[int], values: Sequence[Any], made: Recorder) -> None:
    """Notes a launch that Triton has made."""
    if isinstance(code, str):
        made.reason = made.reason or code
    else:
        made.add(_step(code, grid, values, made))


def _go(step: Launch, device: int, made: Recorder | None) -> None:
    step.config.stream = torch._C._cuda_getCurrentRawStream(device)
    run = driver.cuda().cuLaunchKernelEx
    status = run(*step.launch)
    if status == driver.INVALID_CONTEXT:  # in a new thread torch may not have set a context yet
        driver.enter(device)
        status = run(*step.launch)
    driver.check(status)
    if made is not None:
        made.add(step)


def _step(code: Code, grid: Sequence[int], values: Sequence[Any], made: Recorder | _Unrecorded) -> Launch:
    """The launch for `values` of the kernel's parameters, constants included."""
    boxes = iter(code.boxes)
    cells: list[Any] = []
    for kind, value in zip(code.kinds, values, strict=True):
        if kind == "constexpr":
            continue
        if kind[0] == "*":
            cells.append(made.cell(value.data_ptr(), value))
        elif kind in CELLS:
            cells.append(CELLS[kind](value))
        else:
            encoded = driver.encode(value, next(boxes))
            cells.append(made.tensor_map(encoded, value.base.data_ptr(), value.base))
            cells += [ctypes.c_int32(size) for size in value.shape]
            cells += [ctypes.c_int64(stride) for stride in value.strides]
    cells += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # scratch memory, which these kernels do not use
    return Launch(code.function, grid, code.threads, code.shared, cells, code, cooperative=code.cooperative)
