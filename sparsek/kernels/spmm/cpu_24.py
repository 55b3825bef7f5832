"""cpu.semi24: C = A @ B on CPU tensors for a Semi24 A, or its transpose, in torch, with an epilogue.

    some rows of A, unpacked        D [r, K]      as many as fit in the cache
    (of A.T: some columns)          C[r]  = epilogue(D @ B)

Every row of C is one dot product over K, so it is rounded once. A is never unpacked as a whole. `spmm/cpu.py`
describes the rounding with bf16 units and `wide`. A NaN or Inf in a row of B reaches every row of C.

Every call unpacks all of A. With few columns of B this takes most of the time, and torch's product with the dense
matrix is faster, if there is memory for it.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.kernels.kinds import CpuConfig, CpuKernel
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue

UNPACK_BYTES = 24  # bytes moved per element of A: its position, in the cache, and the output
STEP_SECONDS = 3e-5
LEAST = 8  # rows or columns of a step; columns come in bytes of metadata
PIECE = 1 << 15  # bytes of metadata unpacked at once; their positions take 32 bytes each
COLUMNS, VALUES = 8, 4  # per byte of metadata


@dataclass(frozen=True)
class Pieces(CpuConfig):
    """`step_bytes`: how much of A is unpacked at once. `wide`: multiply 16-bit inputs as float32."""

    def __repr__(self) -> str:
        return f"{self.step_bytes >> 10} KiB of A unpacked at a time{', in float32' if self.wide else ''}"


class CpuSemi24(CpuKernel):
    """Unpacks A piece by piece. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.semi24"
    storages = ("semi24",)
    config = Pieces

    def seconds(self, p: SpmmProblem, c: CpuConfig) -> float:
        size = 4 if c.wide else dtypes.itemsize(p.dtype)
        steps = -(-p.m // _side(c, p.k, size))
        rate = p.card.tflops["fp32" if c.wide else p.dtype] * 1e12
        parts = p.has_alpha + p.bias + bool(p.activation) + bool(p.combine)
        moved = UNPACK_BYTES * p.m * p.k + 2 * parts * p.m * p.n * p.batch * 4 + p.compulsory_bytes
        return p.dense_flops / rate + moved / p.card.bandwidth + steps * STEP_SECONDS

    def prepare(self, p: SpmmProblem, c: CpuConfig, a: Semi24) -> bool:
        """Whether A is transposed."""
        return p.a.transposed

    def launch(
        self, c: CpuConfig, work: bool, a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad():
            wanted = torch.float32 if c.wide else a.dtype
            b = b.to(wanted)
            by_columns = out.stride(-2) == 1 and out.stride(-1) != 1
            m, k = out.shape[-2], b.shape[-2]
            step = _side(c, k, wanted.itemsize)
            for first in range(0, m, step):
                rows = slice(first, min(m, first + step))
                part = _rows_of(a, rows, wanted, work)
                # A column-major result is computed column-major: copying it across would be slow.
                z = torch.matmul(b.mT, part.mT).mT if by_columns else torch.matmul(part, b)
                if not epilogue.is_plain:
                    z = _finished(z, rows, epilogue)
                out[..., rows, :].copy_(z)


def _side(c: CpuConfig, k: int, size: int) -> int:
    """Rows of a step: a multiple of 8."""
    return max(LEAST, c.step_bytes // max(1, k * size) // LEAST * LEAST)


def _rows_of(a: Semi24, rows: slice, dtype: torch.dtype, transposed: bool) -> Tensor:
    """Some rows of A, or of its transpose, dense."""
    if not transposed:
        return unpacked(a.values[rows], a.meta[rows], dtype)
    values, meta = (slice(rows.start // each, rows.stop // each) for each in (2, 8))
    return unpacked(a.values[:, values], a.meta[:, meta], dtype).mT


def _finished(z: Tensor, rows: slice, epilogue: Epilogue) -> Tensor:
    """Applies the epilogue to some rows of the product, in float32 or float64."""
    bias = None if epilogue.bias is None else epilogue.bias[rows]
    other = None if epilogue.other is None else epilogue.other[..., rows, :]
    return replace(epilogue, bias=bias, other=other).apply(z.to(torch.promote_types(z.dtype, torch.float32)))


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


KERNEL: SpmmKernel = CpuSemi24()
