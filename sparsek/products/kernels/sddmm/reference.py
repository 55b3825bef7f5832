"""reference.sddmm: the specification as a kernel.

Any device, dtype and layout; slow, and predicted to be.
"""

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel, wide_seconds, wide_size
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.kernels import SddmmKernel
from sparsek.products.plan.problems import SddmmProblem
from sparsek.products.reference.sddmm import STEP_ELEMENTS, sddmm

CALLS, CALLS_PER_STEP = 12, 5


class ReferenceSddmm(FixedKernel):
    """`sparsek.products.reference.sddmm` as a kernel: the last resort, and the baseline for tests."""

    name = "reference.sddmm"
    config = Fixed("X and Y gathered for each block, one bmm, in float32 or float64")

    def seconds(self, p: SddmmProblem, c: Fixed) -> float:
        (bm, bn), narrow, wide = p.block, dtypes.itemsize(p.dtype), wide_size(p)
        gathered, stored = p.nnzb * p.k * (bm + bn), p.nnzb * bm * bn
        # X and Y are padded (read, written). Tiles are gathered (read, written), widened (read, written) and read; the
        # blocks are written, joined, rounded and cleared outside the matrix.
        moved = 2 * p.k * (p.m + p.n) * narrow + gathered * (3 * narrow + 2 * wide) + 8 * stored * wide
        calls = CALLS + CALLS_PER_STEP * (1 + gathered // STEP_ELEMENTS)
        return wide_seconds(p, p.useful_flops, moved, calls)

    def launch(
        self, c: Fixed, work: None, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor
    ) -> None:
        with torch.no_grad():
            values.copy_(sddmm(x, y, pattern).values)


KERNEL: SddmmKernel = ReferenceSddmm()
