"""reference.sddmm: the specification, run as a kernel.

Any device, dtype and layout; slow, and predicted to be.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.kernel import SddmmKernel
from sparsek.plan.problem import SddmmProblem
from sparsek.reference.sddmm import STEP_ELEMENTS, sddmm

CALLS, CALLS_PER_STEP = 12, 5


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "X and Y gathered for each block, one bmm, in float32 or float64"


class ReferenceSddmm:
    """`sparsek.reference.sddmm` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.sddmm"

    def why_not(self, p: SddmmProblem) -> list[str]:
        return []

    def default(self, p: SddmmProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: SddmmProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: SddmmProblem, c: ReferenceConfig) -> float:
        (bm, bn), narrow, wide = p.block, dtypes.itemsize(p.dtype), 8 if p.dtype == "fp64" else 4
        gathered, stored = p.nnzb * p.k * (bm + bn), p.nnzb * bm * bn
        # X and Y are padded (read, written). Tiles are gathered (read, written), widened (read, written) and read; the
        # blocks are written, joined, rounded and cleared outside the matrix.
        moved = 2 * p.k * (p.m + p.n) * narrow + gathered * (3 * narrow + 2 * wide) + 8 * stored * wide
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        calls = CALLS + CALLS_PER_STEP * (1 + gathered // STEP_ELEMENTS)
        return p.useful_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: SddmmProblem, c: ReferenceConfig, pattern: BlockPattern) -> None:
        return None

    def launch(
        self, c: ReferenceConfig, work: None, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor
    ) -> None:
        with torch.no_grad():
            values.copy_(sddmm(x, y, pattern).values)


KERNEL: SddmmKernel = ReferenceSddmm()
