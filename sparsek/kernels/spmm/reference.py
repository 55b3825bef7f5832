"""reference.spmm: the specification, run as a kernel.

Any device, dtype and layout; slow, and predicted to be.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.matrix.bsr import BSR
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.reference.spmm import spmm

CALLS_PER_STEP = 6


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "one bmm for each place in a block row, summed in float32 or float64"


class ReferenceSpmm:
    """`sparsek.reference.spmm` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.spmm"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr"):
            return foreign
        return []

    def default(self, p: SpmmProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: SpmmProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: SpmmProblem, c: ReferenceConfig) -> float:
        bm, bk = p.block
        size = 8 if p.dtype == "fp64" else 4
        columns = p.n * p.batch
        # Values and B are widened (read, written, read), one row of B is gathered and one of C added for each block.
        values = 3 * p.nnzb * bm * bk * size
        gathered = 2 * p.nnzb * bk * columns * size
        added = 4 * p.nnzb * bm * columns * size
        # The epilogue reads and writes C for each of its parts.
        parts = p.has_alpha + p.bias + bool(p.activation) + 2 * bool(p.combine)
        dense = columns * (3 * p.k + (3 + 2 * parts) * p.m) * size
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        moved = values + gathered + added + dense
        # One step for each place in the longest block row.
        calls = CALLS_PER_STEP * (1 + p.row_max) + parts
        return p.useful_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: ReferenceConfig, a: BSR) -> None:
        return None

    def launch(
        self,
        c: ReferenceConfig,
        work: None,
        a: BSR,
        b: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        with torch.no_grad():
            out.copy_(spmm(a, b, epilogue))


KERNEL: SpmmKernel = ReferenceSpmm()
