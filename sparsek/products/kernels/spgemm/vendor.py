"""vendor.spgemm: A and B written out dense, then torch.matmul (cuBLAS on a GPU); the stored blocks of a BSR C are
then selected. Runs only by name: nothing is densified silently.

It is in the table so that a plan can show when the dense product is predicted to be faster. The dense copies are
those of vendor.dense: shared by all plans, kept as long as the values, renewed after a write to them. For a BSR C
every call also allocates the dense product, and frees it.

The dense copies have zeros for missing blocks: NaN or Inf in a block of A reaches the whole row of C, in a block of B
the whole column, whether that block has a pair or not. float32 follows torch's own TF32 setting at the time of the
call.
"""

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.spmm.vendor_dense import COPYING, dense_copy, product_of_blocks, unless_fits
from sparsek.products.plan.kernels import SpgemmKernel
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.problems import SpgemmProblem


class VendorSpgemm(FixedKernel):
    """Dense matmul. Any device; blocks outside the patterns are zeros."""

    name = "vendor.spgemm"
    only_by_name = "it keeps dense copies of A and B"
    config = Fixed("dense copies of A and B, torch.matmul")

    def why_not(self, p: SpgemmProblem) -> list[str]:
        what = "dense copies of A and B take" if p.dense_out else "dense copies of A, B and C take"
        return unless_fits(what, _dense_bytes(p), p.card, "them")

    def seconds(self, p: SpgemmProblem, c: Fixed) -> float:
        size = dtypes.itemsize(p.dtype)
        moved = (p.m * p.k + p.k * p.n + p.m * p.n) * size
        product = max(p.dense_flops / (p.card.tflops[p.rate_name] * 1e12), moved / p.card.bandwidth)
        if p.dense_out:
            return product + p.card.launch_seconds
        picked = 2 * p.nnzb_out * p.block[0] * p.block[1] * size
        return product + picked / p.card.bandwidth + 2 * p.card.launch_seconds

    def notes(self, p: SpgemmProblem, c: Fixed) -> list[str]:
        return ["NaN or Inf in a block of A fills rows of C, in a block of B columns, with or without a pair"]

    def prepare(self, p: SpgemmProblem, c: Fixed, matches: Matches) -> tuple[Tensor, Tensor]:
        """Block rows and block columns of C's stored blocks, int64."""
        return matches.pattern.block_rows.long(), matches.pattern.indices.long()

    def launch(
        self, c: Fixed, work: tuple[Tensor, Tensor], a: BSR, b: BSR, matches: Matches, out: Tensor
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad(), COPYING:
            left, right = dense_copy(a), dense_copy(b)
            if out.ndim == 2:
                torch.matmul(left, right, out=out)
            else:
                out.copy_(product_of_blocks(left, right, matches.pattern, work))


def _dense_bytes(p: SpgemmProblem) -> int:
    """Bytes of whole blocks of A and B, and of C if it is not the output."""
    (mb, nb), kb = p.grid, -(-p.k // p.a_block[1])
    m, k, n = mb * p.block[0], kb * p.a_block[1], nb * p.block[1]
    return (m * k + k * n + (0 if p.dense_out else m * n)) * dtypes.itemsize(p.dtype)


KERNEL: SpgemmKernel = VendorSpgemm()
