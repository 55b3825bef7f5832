"""reference.bsr24: the specification, run as a kernel. Any device, dtype and layout; slow, and predicted to be."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.kernels.spmm import reference as spmm
from sparsek.kernels.spmm.reference_24 import UNPACK_CALLS, UNPACK_PASSES
from sparsek.matrix.bsr24 import BSR24
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.bsr24 import bsr24
from sparsek.reference.epilogue import PLAIN, Epilogue


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "blocks written out, then one bmm for each place in a block row, in float32 or float64"


class ReferenceBsr24:
    """`sparsek.reference.bsr24` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.bsr24"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr24"):
            return foreign
        return []

    def default(self, p: SpmmProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: SpmmProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: SpmmProblem, c: ReferenceConfig) -> float:
        blocks = p.unpacked
        written = UNPACK_PASSES * (2 * p.stored * dtypes.itemsize(p.dtype) / p.card.bandwidth)
        product = spmm.KERNEL.seconds(blocks, spmm.KERNEL.default(blocks))
        return product + written + UNPACK_CALLS * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: ReferenceConfig, a: BSR24) -> bool:
        """Whether A stands transposed."""
        return p.a.transposed

    def launch(
        self, c: ReferenceConfig, work: bool, a: BSR24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        with torch.no_grad():
            out.copy_(bsr24(a, b, epilogue, transposed=work))


KERNEL: SpmmKernel = ReferenceBsr24()
