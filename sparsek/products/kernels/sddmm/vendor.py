"""vendor.sddmm: all of X @ Y by torch.matmul (cuBLAS on a GPU), then a selection of the stored blocks. Runs only by
name: nothing is densified silently.

It is in the table so that a plan can show when the dense product is predicted to be faster. Every call allocates the
dense product, and frees it. An element of it depends only on its own row of X and column of Y, so NaN spreads as in
the reference. float32 follows torch's own TF32 setting at the time of the call.
"""

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.spmm.vendor_dense import product_of_blocks, unless_fits
from sparsek.products.plan.kernels import SddmmKernel
from sparsek.products.plan.problems import SddmmProblem


class VendorSddmm(FixedKernel):
    """Dense matmul. Any device and layout."""

    name = "vendor.sddmm"
    only_by_name = "it allocates all of X @ Y"
    config = Fixed("torch.matmul, then the stored blocks")

    def why_not(self, p: SddmmProblem) -> list[str]:
        return unless_fits("X @ Y takes", _dense_bytes(p), p.card)

    def seconds(self, p: SddmmProblem, c: Fixed) -> float:
        size = dtypes.itemsize(p.dtype)
        inputs, stored = (p.m + p.n) * p.k * size, p.nnzb * p.block[0] * p.block[1] * size
        product = max(
            p.dense_flops / (p.card.tflops[p.rate_name] * 1e12), (inputs + _dense_bytes(p)) / p.card.bandwidth
        )
        return product + 2 * stored / p.card.bandwidth + 2 * p.card.launch_seconds

    def prepare(self, p: SddmmProblem, c: Fixed, pattern: BlockPattern) -> tuple[Tensor, Tensor]:
        """Block rows and block columns of the stored blocks, int64."""
        return pattern.block_rows.long(), pattern.indices.long()

    def launch(
        self,
        c: Fixed,
        work: tuple[Tensor, Tensor],
        x: Tensor,
        y: Tensor,
        pattern: BlockPattern,
        values: Tensor,
    ) -> None:
        if values.numel() == 0:
            return
        with torch.no_grad():
            values.copy_(product_of_blocks(x, y, pattern, work))


def _dense_bytes(p: SddmmProblem) -> int:
    return p.grid[0] * p.block[0] * p.grid[1] * p.block[1] * dtypes.itemsize(p.dtype)


KERNEL: SddmmKernel = VendorSddmm()
