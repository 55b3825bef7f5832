"""The one launcher: runs kernels of Triton, Gluon and CUDA C++.

    machine code that came with the package (lang/shipped.py)    is loaded, and launched through the driver
    any other kernel of Triton or Gluon                          is found or compiled and launched by Triton's JIT
    a launch during a call that is recorded (lang/recorder.py)   is noted

Where a hook or profiler of Triton listens, Triton launches. A compilation of more than two seconds says so on a
terminal.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparsek.kernels.lang import driver, shipped
from sparsek.kernels.lang.driver import CELLS, Boxed, Code
from sparsek.kernels.lang.progress import patient_with
from sparsek.kernels.lang.recorder import Launch, Recorder, hooked, recorder


class _Unrecorded:
    """In a Recorder's place where none is: addresses are what they are."""

    def cell(self, pointer: int, tensor: Tensor | None = None) -> Any:
        return ctypes.c_uint64(pointer)

    def tensor_map(self, made: Any, pointer: int, tensor: Tensor | None = None) -> Any:
        return made


def launch(kernel: Any, grid: Sequence[int], *args: Any, **named: Any) -> None:
    """Runs a kernel of Triton or Gluon on the current device and stream, as `kernel[grid](*args, **named)` does."""
    if 0 in grid:  # the driver refuses what Triton's launcher passes over
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


# key -> what is launched: shipped code, or Triton's compiled kernel, which its JIT takes 20 us to find. Kernels stand
# in keys by their id, for they live as long as their module, and Triton's hash of one reads its source: 8 ms at first.
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
    """Runs a kernel on `device`'s current stream; under a tested Triton without its JIT once it is compiled.

    `args` are all parameters in order, constants too; `first` the same as the JIT takes them. Calls that Triton would
    compile differently differ in `key`.
    """
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch_direct(kernel, device, ctas, args, key, first, **options)
        return
    key, made, listens = (id(kernel), device.index, key), recorder(), hooked()
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
    """Runs a kernel on `device`'s current stream: one whose sizes and alignments Triton does not look at.

    `constants` follow `args`, and tell apart what differs in the dtypes of `args`.
    """
    key = constants, warps, *[arg is None for arg in args]
    given = (*args, *constants)
    launch_direct(kernel, device, programs, given, key, given, num_warps=warps, num_stages=1)


def launch_cuda(
    function: ctypes.c_void_p,
    grid: int,
    block: int,
    shared: int,
    device: int,
    arguments: Sequence[Any],
    held: Sequence[Tensor],
) -> None:
    """Runs a kernel of CUDA C++ on `device`, torch's current one, and its current stream.

    `arguments` are its parameters in order: Boxed matrices, which it gets as tensor maps, or ctypes structures, whose
    fields of type c_void_p are addresses. `held` are the tensors in whose memory these lie, operands or not.
    """
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
        made.constants += held
    _go(Launch(function, (grid,), block, shared, cells), device, made)


class _Kept(threading.local):
    """A thread's last launch of each code, by its id: to fill its argument block takes a third of making one."""

    def __init__(self) -> None:
        self.steps: dict[int, Launch] = {}


_kept = _Kept()


def _run(code: Code, grid: Sequence[int], values: Sequence[Any], device: int, made: Recorder | None) -> None:
    """Launches through the driver, with `values` of all of the kernel's parameters."""
    step = None if made or code.boxes else _kept.steps.get(id(code))
    if step is None:
        step = _step(code, grid, values, made or _Unrecorded())
        if not made:
            _kept.steps[id(code)] = step  # which holds `code`, so that no other gets its id
    else:
        config = step.config
        config.gx, config.gy, config.gz = (*grid, 1, 1)[:3]
        cells = iter(step.cells)
        for kind, value in zip(code.kinds, values, strict=True):
            if kind != "constexpr":
                next(cells).value = value.data_ptr() if kind[0] == "*" else value
    _go(step, device, made)


def _note(code: Code | str, grid: Sequence[int], values: Sequence[Any], made: Recorder) -> None:
    """Notes a launch that Triton has done."""
    if isinstance(code, str):
        made.reason = made.reason or code
    else:
        made.add(_step(code, grid, values, made))


def _go(step: Launch, device: int, made: Recorder | None) -> None:
    step.config.stream = torch._C._cuda_getCurrentRawStream(device)
    run = driver.cuda().cuLaunchKernelEx
    status = run(*step.launch)
    if status == driver.INVALID_CONTEXT:  # in a new thread torch may not have set one yet
        driver.enter(device)
        status = run(*step.launch)
    driver.check(status)
    if made is not None:
        made.add(step)


def _step(code: Code, grid: Sequence[int], values: Sequence[Any], made: Recorder | _Unrecorded) -> Launch:
    """The launch with `values` of the kernel's parameters, constants among them."""
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
    cells += [ctypes.c_uint64(0), ctypes.c_uint64(0)]  # scratch memory, which these kernels do without
    return Launch(code.function, grid, code.threads, code.shared, cells, code, cooperative=code.cooperative)
