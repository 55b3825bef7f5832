"""cpu.bsr24: C = A @ B on CPU tensors for a BSR24 A, or its transpose: unpacks its blocks, then calls cpu.spmm.

Every call unpacks all blocks, into twice the memory of the values. Rows of B under empty block columns never reach C.
Inside a stored block, a NaN or Inf in B reaches all its rows.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import CpuConfig, CpuKernel
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.kernels.spmm import cpu as spmm
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

UNPACK_BYTES = 24  # bytes moved per element of A: its position, in the cache, and the output
PIECE = 1 << 15  # bytes of metadata unpacked at once; their positions take 32 bytes each
COLUMNS, VALUES = 8, 4  # per byte of metadata


class CpuWork24(NamedTuple):
    """cpu.spmm's work for the unpacked blocks, and whether A is transposed."""

    product: Any
    transposed: bool


class CpuBsr24(CpuKernel):
    """cpu.spmm of unpacked blocks. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.bsr24"
    storages = ("bsr24",)

    def seconds(self, p: SpmmProblem, c: CpuConfig) -> float:
        written = UNPACK_BYTES * 2 * p.stored / p.card.bandwidth
        return spmm.KERNEL.seconds(p.unpacked, c) + written + p.card.launch_seconds

    def notes(self, p: SpmmProblem, c: CpuConfig) -> list[str]:
        size = 2 * p.stored * dtypes.itemsize(p.dtype)
        return [f"every call unpacks A's blocks, into {size / 1e6:.3g} MB that it gives back"]

    def prepare(self, p: SpmmProblem, c: CpuConfig, a: BSR24) -> CpuWork24:
        # Only its pattern and dtype are read.
        shown = _turned(BSR.unchecked(a.pattern, a.values), p.a.transposed)
        return CpuWork24(spmm.KERNEL.prepare(p.unpacked, c, shown), p.a.transposed)

    def launch(
        self, c: CpuConfig, work: CpuWork24, a: BSR24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad():
            whole = BSR.unchecked(a.pattern, unpacked(a.values, a.meta, a.dtype))
            whole = _turned(whole, work.transposed)
        spmm.KERNEL.launch(c, work.product, whole, b, out, epilogue)


def _turned(a: BSR, transposed: bool) -> BSR:
    return a.T if transposed else a


def unpacked(values: Tensor, meta: Tensor, dtype: torch.dtype) -> Tensor:
    """The dense [..., C] of values [..., C/2] and meta uint8 [..., C/8] of any strides, in `dtype`. No gradient.

    One pass over the output, by a table of the positions of the four values of a byte. `matrix.two_four.unpack` takes
    several passes and is differentiable.
    """
    flat_values, flat_meta = values.reshape(-1, VALUES), meta.reshape(-1)
    dense = torch.zeros(flat_meta.shape[0], COLUMNS, dtype=dtype, device=meta.device)
    for first in range(0, flat_meta.shape[0], PIECE):
        part = slice(first, first + PIECE)
        places = _places().index_select(0, flat_meta[part].int())
        dense[part].scatter_(1, places, flat_values[part].to(dtype))
    return dense.view(*meta.shape[:-1], COLUMNS * meta.shape[-1])


@cache
def _places() -> Tensor:
    """int64 [256, 4]: the column, 0 to 7, of each value of a byte."""
    byte = torch.arange(256, device="cpu")
    fields = [byte >> shift & 3 for shift in (0, 2, 4, 6)]
    return torch.stack((fields[0], fields[1], fields[2] + 4, fields[3] + 4), 1)


KERNEL: SpmmKernel = CpuBsr24()
