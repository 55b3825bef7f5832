"""cpu.bsr24: C = A @ B on CPU tensors for a BSR24 A, or its transpose: unpacks its blocks, then calls cpu.spmm.

Every call unpacks all blocks, into twice the memory of the values. Rows of B under empty block columns never reach C.
Inside a stored block, a NaN or Inf in B reaches all its rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.kernels.kinds import CpuConfig, CpuKernel
from sparsek.kernels.spmm import cpu as spmm
from sparsek.kernels.spmm.cpu_24 import UNPACK_BYTES, unpacked
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue


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


KERNEL: SpmmKernel = CpuBsr24()
