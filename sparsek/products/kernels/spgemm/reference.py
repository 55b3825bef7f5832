"""reference.spgemm: the specification as a kernel.

Any device and dtype; slow, and predicted to be. It finds the pairs again, on the host.
"""

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel, wide_seconds, wide_size
from sparsek.products.formats.bsr import BSR
from sparsek.products.plan.kernels import SpgemmKernel
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.problems import SpgemmProblem
from sparsek.products.reference.spgemm import spgemm

CALLS_PER_STEP = 9
# Sorting and searching a pair on the host.
PAIR_SECONDS = 5e-7


class ReferenceSpgemm(FixedKernel):
    """`sparsek.products.reference.spgemm` as a kernel: the last resort, and the baseline for tests."""

    name = "reference.spgemm"
    config = Fixed("one bmm for each place among a block's pairs, summed in float32 or float64")

    def seconds(self, p: SpgemmProblem, c: Fixed) -> float:
        (bm, bn), bk = p.block, p.a_block[1]
        narrow, wide = dtypes.itemsize(p.dtype), wide_size(p)
        gathered, stored = p.pairs * bk * (bm + bn), p.nnzb_out * bm * bn
        # Blocks are gathered (read, written), widened (read, written) and read; products are written, and read and
        # added to C's blocks, which are cleared first and rounded last.
        moved = gathered * (3 * narrow + 2 * wide) + 4 * p.pairs * bm * bn * wide + 4 * stored * wide
        moved += 3 * p.m * p.n * narrow if p.dense_out else 0
        calls = CALLS_PER_STEP * (1 + p.pairs_max)
        return p.pairs * PAIR_SECONDS + wide_seconds(p, p.useful_flops, moved, calls)

    def launch(self, c: Fixed, work: None, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        with torch.no_grad():
            made = spgemm(a, b, matches.pattern)
            out.copy_(made.values if out.ndim == 3 else made.to_dense())


KERNEL: SpgemmKernel = ReferenceSpgemm()
