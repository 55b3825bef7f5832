"""S = X @ Y at the blocks of a pattern as a benchmark."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from sparsek.products.ops.sddmm import plan_sddmm, sddmm
from sparsek.testing.product_budget import check_sddmm
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import OperandSet, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import CUBLAS, TORCH_DENSE
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, USEFUL_NOTE
from sparsek_bench.peers.torch_sparse import SAMPLED
from sparsek_bench.suites.product import BlocksCase


@dataclass(frozen=True)
class SddmmCase(BlocksCase):
    """S [m, n] = X [m, k] @ Y [k, n] at `density` of the blocks of S, in a seeded random pattern."""

    op: ClassVar[str] = "sddmm"

    m: int = options.size("Rows of X")
    k: int = options.size("Columns of X")
    n: int = options.size("Columns of Y")

    def sets(self, draw: Draw) -> Callable[[Draw], OperandSet]:
        """X is N(0, 1), Y scaled so that S has unit scale."""
        pattern = draw.blocks(self.m, self.n, self.block, self.density, self.pattern).pattern

        def one(draw: Draw) -> OperandSet:
            x, y = draw.normal(self.m, self.k), draw.normal(self.k, self.n).mul_(self.k**-0.5)

            def twin(seed: int) -> Callable[[], object]:
                """All of X @ Y: both are dense and random already."""
                return partial(torch.matmul, x, y, out=x.new_empty(pattern.shape))

            flops = 2.0 * pattern.nnzb * pattern.block[0] * pattern.block[1] * self.k
            return OperandSet((x, y, pattern), plan_sddmm, partial(check_sddmm, x, y), flops, twin, sddmm)

        return one


BENCH = Bench(
    "sddmm",
    suites={
        "published": rows(
            ("hopper.sddmm", "portable.sddmm"),
            *(SddmmCase(8192, 8192, 8192, (block, block), 0.125) for block in (128, 64)),
        )
    },
    kinds=(SddmmCase,),
    peers=(CUBLAS, SAMPLED, TORCH_DENSE),
    tables=(
        Table(
            op="sddmm",
            title="SDDMM",
            columns=(CASE, MS, SPEEDUP, USEFUL, ROOF),
            note=(
                f"{USEFUL_NOTE} Dense is cuBLAS. torch.sparse is the kernel of its BSR sampled_addmm with the best "
                "tile of K, stages and warps."
            ),
            beside=("torch_sparse",),
            kernels=("hopper.sddmm",),
        ),
    ),
)
