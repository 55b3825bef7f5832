"""Launches machine code through CUDA's driver: modules, tensor maps for TMA, and a launch that is made ready once.

For kernels in CUDA C++ (lang/nvrtc.py); Triton launches its own. libcuda.so.1 comes with the GPU's driver and is
called by ctypes: eight functions whose C signatures have not changed since CUDA 12.0. cuda-core and cuda-bindings wrap
the same ones, but neither is part of every torch that this project runs on, so ctypes would have to be here anyway.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

# CUtensorMapDataType and CUtensorMapSwizzle, by dtype and by bytes of a row of the box.
DTYPES = {
    torch.float8_e4m3fn: 0,  # bytes
    torch.float8_e5m2: 0,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
SWIZZLES = {32: 1, 64: 2, 128: 3}
MAX_DYNAMIC_SHARED, RELAXED, INVALID_CONTEXT = 8, 2, 201


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig. Kernels say themselves how large their clusters are, so there are no attributes."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Boxed(NamedTuple):
    """A matrix in memory and the box of it that one copy moves. Sizes in elements, the contiguous side first.

    `box[0]` elements are as many bytes as the swizzle is wide. Outside the matrix TMA reads zeros and writes nothing.
    """

    pointer: int
    dtype: torch.dtype
    size: tuple[int, int]
    stride: int
    box: tuple[int, int]


@cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    """RuntimeError with the driver's words unless `status` is 0."""
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA driver: error {status}, {said}")


@cache
def _primary(device: int) -> ctypes.c_void_p:
    """The context of `device` that torch uses."""
    context, number = ctypes.c_void_p(), ctypes.c_int()
    check(_cuda().cuInit(0))
    check(_cuda().cuDeviceGet(ctypes.byref(number), device))
    check(_cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


def enter(device: int) -> None:
    """Makes torch's context of `device` that of this thread, which in a new thread nothing else may have done."""
    check(_cuda().cuCtxSetCurrent(_primary(device)))


def function(code: bytes, name: str, shared: int, device: int) -> ctypes.c_void_p:
    """The kernel `name` of a cubin, loaded on `device`, that may have `shared` bytes of dynamic shared memory.

    Callers keep it: the module stays loaded. Also while a CUDA graph is captured, where loading would else be refused.
    """
    module, found, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    enter(device)
    check(_cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        check(_cuda().cuModuleLoadData(ctypes.byref(module), code))
        check(_cuda().cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
        check(_cuda().cuFuncSetAttribute(found, MAX_DYNAMIC_SHARED, shared))
    finally:
        check(_cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    return found


def tensor_map(m: Boxed) -> Any:
    """The 128 bytes by which TMA knows a matrix, at a multiple of 64."""
    raw = ctypes.create_string_buffer(192)
    at = -(-ctypes.addressof(raw) // 64) * 64
    size = m.dtype.itemsize
    dims, strides = (ctypes.c_uint64 * 2)(*m.size), (ctypes.c_uint64 * 1)(m.stride * size)
    box, steps = (ctypes.c_uint32 * 2)(*m.box), (ctypes.c_uint32 * 2)(1, 1)
    check(
        _cuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), DTYPES[m.dtype], 2, ctypes.c_void_p(m.pointer), dims, strides, box, steps,
            0, SWIZZLES[m.box[0] * size], 3, 0,  # not interleaved, 256 bytes at once into L2, zeros outside
        )
    )  # fmt: skip
    made = (ctypes.c_char * 128).from_address(at)
    made.kept = raw
    return made


class Launch:
    """A launch with its arguments, ready to run any number of times on one stream.

    `arguments` are ctypes objects, in the order of the kernel's parameters. They hold addresses; whoever calls keeps
    the memory behind them.
    """

    __slots__ = ("config", "device", "function", "kept", "pointers", "run")

    def __init__(
        self,
        function: ctypes.c_void_p,
        grid: int,
        block: int,
        shared: int,
        device: int,
        stream: int,
        arguments: Sequence[Any],
    ):
        self.kept = LaunchConfig(grid, 1, 1, block, 1, 1, shared, stream, None, 0), tuple(arguments)
        self.config = ctypes.byref(self.kept[0])
        self.pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self.function, self.device, self.run = function, device, _cuda().cuLaunchKernelEx

    def __call__(self) -> None:
        """Runs it. `device` is torch's current one."""
        status = self.run(self.config, self.function, self.pointers, None)
        if status == INVALID_CONTEXT:
            enter(self.device)
            status = self.run(self.config, self.function, self.pointers, None)
        check(status)
