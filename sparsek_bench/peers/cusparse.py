"""cuSPARSE's Blocked-ELL SpMM through ctypes, on the library that torch has already loaded.

Source: NVIDIA, cuSPARSE generic API, cusparseCreateBlockedEll and cusparseSpMM. Every block row holds the
same number of blocks; shorter rows are filled with column index -1.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsek_bench.engine.case import block_name
from sparsek_bench.engine.peer import Peer, ReadyPeer, UnavailableError, accepted, holding

# Values of library_types.h and cusparse.h.
CUDA_TYPES = {"fp32": 0, "fp16": 2, "bf16": 14}
CUDA_R_32F = 0
INDEX_32I = 2
INDEX_BASE_ZERO = 0
ORDER_ROW = 2
NON_TRANSPOSE = 0
SPMM_BLOCKED_ELL_ALG1 = 13
SONAMES = ("libcusparse.so.12", "libcusparse.so.13", "libcusparse.so.11")


def load() -> ctypes.CDLL:
    """The library. Raises UnavailableError with the reason why it cannot be had."""
    for name in SONAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "cusparseCreateBlockedEll"):
            return library
        raise UnavailableError(f"{name} has no cusparseCreateBlockedEll")
    raise UnavailableError(f"none of {', '.join(SONAMES)} can be loaded")


def run(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Calls a function of the library. Raises UnavailableError for a status other than success."""
    status = getattr(library, name)(*arguments)
    if status:
        raise UnavailableError(f"{name} gave cuSPARSE status {status}")


def blocked_ell(indptr: Tensor, indices: Tensor, values: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Columns int32 [Mb, width], -1 where empty, and values for it.

    `layout` "rows": values [Mb * b, width * b], each matrix row whole. "blocks": values [Mb, width, b, b].
    """
    size = values.shape[1]
    lengths = (indptr[1:] - indptr[:-1]).long()
    block_rows = int(lengths.numel())
    width = int(lengths.max()) if block_rows else 0
    rows = torch.repeat_interleave(torch.arange(block_rows, device=values.device), lengths)
    slots = torch.arange(values.shape[0], device=values.device) - indptr[:-1].long()[rows]
    columns = torch.full((block_rows, width), -1, dtype=torch.int32, device=values.device)
    columns[rows, slots] = indices
    filled = torch.zeros(block_rows, width, size, size, dtype=values.dtype, device=values.device)
    filled[rows, slots] = values
    if layout == "rows":
        filled = filled.transpose(1, 2).contiguous().view(block_rows * size, width * size)
    return columns, filled


@dataclass
class PreparedProduct:
    """One prepared product; calling it queues it on torch's current stream. Keeps its buffers alive.

    `made` destroys its handle and descriptors: when this object goes, but not at the end of the process, where the
    driver may be gone before.
    """

    library: ctypes.CDLL
    handle: ctypes.c_void_p
    arguments: tuple[Any, ...]
    width: int
    kept: tuple[Any, ...] = field(repr=False)
    made: ExitStack = field(repr=False)

    def __post_init__(self) -> None:
        weakref.finalize(self, self.made.close).atexit = False

    def __call__(self) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        run(self.library, "cusparseSetStream", self.handle, stream)
        run(self.library, "cusparseSpMM", self.handle, *self.arguments)


def prepare(library: ctypes.CDLL, one: Any, layout: str, dtype: str) -> PreparedProduct:
    """Descriptors and workspace for one operand set. Raises UnavailableError when a cuSPARSE call fails."""
    kind = CUDA_TYPES[dtype]
    columns, values = blocked_ell(one.a.pattern.indptr, one.a.pattern.indices, one.a.logical_values(), layout)
    m, k = one.a.shape
    n = one.b.shape[-1]
    size = one.a.block[0]
    width = int(columns.shape[1])
    i64, pointer, byref = ctypes.c_int64, ctypes.c_void_p, ctypes.byref
    handle, a, b, c = pointer(), pointer(), pointer(), pointer()
    alpha, beta, needed = ctypes.c_float(1.0), ctypes.c_float(0.0), ctypes.c_size_t()
    plain, algorithm = NON_TRANSPOSE, SPMM_BLOCKED_ELL_ALG1
    product = (plain, plain, byref(alpha), a, b, byref(beta), c, CUDA_R_32F, algorithm)
    with ExitStack() as made:
        run(library, "cusparseCreate", byref(handle))
        made.callback(library.cusparseDestroy, handle)
        run(
            library, "cusparseCreateBlockedEll", byref(a), i64(m), i64(k), i64(size), i64(width * size),
            pointer(columns.data_ptr()), pointer(values.data_ptr()), INDEX_32I, INDEX_BASE_ZERO, kind,
        )  # fmt: skip
        made.callback(library.cusparseDestroySpMat, a)
        for matrix, tensor, rows in ((b, one.b, k), (c, one.out, m)):
            run(
                library, "cusparseCreateDnMat", byref(matrix), i64(rows), i64(n), i64(tensor.stride(0)),
                pointer(tensor.data_ptr()), kind, ORDER_ROW,
            )  # fmt: skip
            made.callback(library.cusparseDestroyDnMat, matrix)
        run(library, "cusparseSpMM_bufferSize", handle, *product, byref(needed))
        workspace = torch.empty(max(16, needed.value), dtype=torch.uint8, device=one.b.device)
        kept = (columns, values, workspace, alpha, beta, one)
        arguments = (*product, pointer(workspace.data_ptr()))
        return PreparedProduct(library, handle, arguments, width, kept, made.pop_all())


class CuSparse(Peer):
    """cuSPARSE SpMM on Blocked-ELL."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        (rows, columns), block = case.block, block_name(case.block)
        ragged = case.m % rows or case.k % columns
        reasons = {
            f"Blocked-ELL blocks are square, not {block}": rows != columns,
            f"Blocked-ELL needs sides that are multiples of the block {block}": ragged,
            f"not set up here for {case.dtype}": case.dtype not in CUDA_TYPES,
        }
        return super().why_not(case, device) + holding(reasons)

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        library, failures = load(), []
        # NVIDIA's pages do not specify whether a row of blocks is stored row by row or block by block; the gate
        # decides.
        for layout in ("rows", "blocks"):
            try:
                first = prepare(library, sets[0], layout, case.dtype)
                sets[0].out.fill_(torch.nan)
                first()
                accepted(sets[0].judge(sets[0].out), f"Blocked-ELL stored by {layout}")
            except UnavailableError as error:
                failures.append(str(error))
                tried(f"cuSPARSE: {error}")
                continue
            others = [prepare(library, one, layout, case.dtype) for one in sets[1:]]
            note = f"Blocked-ELL stored by {layout}, {first.width} blocks in every row"
            return ReadyPeer((first, *others), note)
        raise UnavailableError("; ".join(failures))
