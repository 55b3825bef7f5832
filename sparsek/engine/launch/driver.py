"""The CUDA driver API by ctypes: modules, tensor maps for TMA, and the launch structure that launch/launch.py uses.

libcuda.so.1 comes with the GPU driver. The functions called here have had the same C signatures since CUDA 12.0.
cuda-core and cuda-bindings wrap the same functions, but not every supported torch installs them.
"""

import ctypes
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

# CUtensorMapDataType and CUtensorMapSwizzle, by dtype and by bytes per row of the box.
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
    """CUlaunchConfig. Cluster sizes are compiled into the kernels; only cooperative launches have an attribute."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute; its value is a union of 64 bytes."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


COOPERATIVE = 2
# Triton releases whose compiled kernels use the argument block that launch/launch.py builds.
TESTED = ("3.6.",)
# Triton's numeric types.
CELLS = {
    **{f"i{bits}": getattr(ctypes, f"c_int{max(8, bits)}") for bits in (1, 8, 16, 32, 64)},
    **{f"u{bits}": getattr(ctypes, f"c_uint{max(8, bits)}") for bits in (1, 8, 16, 32, 64)},
    "fp32": ctypes.c_float,
    "f32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class Code(NamedTuple):
    """A Triton or Gluon kernel as the driver launches it.

    `kinds`: Triton's types of all parameters, in order. `boxes`: how each tensor map is encoded (`encode`). `kept`:
    the objects that keep `function` loaded.
    """

    function: Any
    kinds: tuple[str, ...]
    boxes: Sequence[Any]
    threads: int
    shared: int
    cooperative: bool
    kept: Any = None


@cache
def is_tested() -> bool:
    """Whether compiled kernels of the installed Triton release may be launched without Triton."""
    return sys.modules["triton"].__version__.startswith(TESTED)


def code_of(compiled: Any) -> Code | str:
    """The code of a kernel that Triton has compiled and loaded; or the reason why only Triton can launch it."""
    run, metadata = compiled.run, compiled.metadata
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    if scratch or run.launch_pdl or run.num_ctas != 1 or not is_tested():
        return "this Triton's launches are not known here"
    kinds = tuple(compiled.src.signature.values())
    unknown = [kind for kind in kinds if not _is_known(kind)]
    if unknown:
        return f"a parameter is {unknown[0]}"
    boxes = getattr(metadata, "tensordesc_meta", None) or ()
    cooperative = bool(run.launch_cooperative_grid)
    return Code(
        compiled.function, kinds, boxes, 32 * metadata.num_warps, metadata.shared, cooperative, compiled
    )


def _is_known(kind: Any) -> bool:
    named = isinstance(kind, str)
    return named and (kind[0] == "*" or kind in CELLS or kind == "constexpr" or kind.startswith("tensordesc"))


class Boxed(NamedTuple):
    """A tensor in memory and the box of it that one TMA copy moves. Sizes in elements, the contiguous side first.

    `box[0]` elements fill the width of the swizzle. Outside the tensor TMA reads zeros and writes nothing. `outer` are
    the strides of the dims of more than a matrix. One copy may move `panels` boxes of a matrix side by side, one after
    another in shared memory; then the matrix must be whole boxes wide, and a place in it is (0, row, panel).
    """

    pointer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: int
    box: tuple[int, ...]
    panels: int = 1
    outer: tuple[int, ...] = ()


def by_rows(x: torch.Tensor, box: tuple[int, int], panels: int = 1) -> Boxed:
    """A row-major matrix. A single row may have any stride, and gets one that TMA accepts."""
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else -(-columns // 8) * 8
    return Boxed(x.data_ptr(), x.dtype, (columns, rows), stride, box, panels)


@cache
def cuda() -> ctypes.CDLL:
    """The driver library."""
    return ctypes.CDLL("libcuda.so.1")


def check(status: int) -> None:
    """Raises RuntimeError with the driver's error text unless `status` is 0."""
    if status:
        text = ctypes.c_char_p()
        cuda().cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA driver: error {status}, {said}")


@cache
def _primary(device: int) -> ctypes.c_void_p:
    """The context of `device` that torch uses."""
    context, number = ctypes.c_void_p(), ctypes.c_int()
    check(cuda().cuInit(0))
    check(cuda().cuDeviceGet(ctypes.byref(number), device))
    check(cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


def enter(device: int) -> None:
    """Makes torch's context of `device` current in this thread; a new thread may not have one."""
    check(cuda().cuCtxSetCurrent(_primary(device)))


def function(code: bytes, name: str, shared: int, device: int) -> ctypes.c_void_p:
    """The kernel `name` of a cubin, loaded on `device`, with `shared` bytes of dynamic shared memory allowed.

    The caller keeps it; the module stays loaded. Also works during CUDA graph capture, which otherwise refuses
    loading.
    """
    module, found, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    enter(device)
    check(cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        check(cuda().cuModuleLoadData(ctypes.byref(module), code))
        check(cuda().cuModuleGetFunction(ctypes.byref(found), module, name.encode()))
        check(cuda().cuFuncSetAttribute(found, MAX_DYNAMIC_SHARED, shared))
    finally:
        check(cuda().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    return found


def tensor_map(m: Boxed) -> Any:
    """A 128-byte tensor map at an address that is a multiple of 64."""
    size, wide = m.dtype.itemsize, m.box[0]
    sizes, strides, box = m.size, tuple(each * size for each in (m.stride, *m.outer)), m.box
    if m.panels > 1:
        sizes, strides, box = (wide, m.size[1], m.size[0] // wide), (*strides, wide * size), (*box, m.panels)
    return _encoded(m.pointer, DTYPES[m.dtype], sizes, strides, box, SWIZZLES[wide * size], 3, 0)


def encode(d: Any, meta: Any) -> Any:
    """The tensor map of a described tensor (launch/gluon.py) as Triton makes it for a compiled kernel.

    `meta` is the entry of the kernel's `tensordesc_meta`.
    """
    size, rank = meta["elem_size"], len(d.shape)
    strides = [stride * size for stride in reversed(d.strides[: rank - 1])]
    box = list(reversed(meta["block_size"]))
    kind = HOST_TYPES.get(meta["elem_type"], meta["elem_type"])
    return _encoded(
        d.base.data_ptr(), kind, list(reversed(d.shape)), strides, box, meta["swizzle"], 2, d.padding == "nan"
    )


# Triton numbers three element types differently from the driver.
HOST_TYPES = {8: 10, 9: 8, 10: 9}


def _encoded(
    pointer: int,
    kind: int,
    size: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    promotion: int,
    fill: int,
) -> Any:
    """Calls cuTensorMapEncodeTiled, the contiguous side first; strides in bytes. Not interleaved."""
    rank = len(size)
    raw = ctypes.create_string_buffer(192)
    at = -(-ctypes.addressof(raw) // 64) * 64
    check(
        cuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), kind, rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*size),
            (ctypes.c_uint64 * rank)(*strides, *[0] * (rank - len(strides))), (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank), 0, swizzle, promotion, int(fill),
        )
    )  # fmt: skip
    made = (ctypes.c_char * 128).from_address(at)
    made.kept = raw
    return made
