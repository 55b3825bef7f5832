"""reference.semi24: the specification, run as a kernel. Any device, dtype and layout; slow, and predicted to be."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.matrix.semi24 import Semi24
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.reference.semi24 import semi24

UNPACK_PASSES, UNPACK_CALLS = 36, 20  # of torch, which strides over the dense matrix


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "A written out dense, one matmul in float32 or float64"


class ReferenceSemi24:
    """`sparsek.reference.semi24` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.semi24"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("semi24"):
            return foreign
        return []

    def default(self, p: SpmmProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: SpmmProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: SpmmProblem, c: ReferenceConfig) -> float:
        size = 8 if p.dtype == "fp64" else 4
        columns = p.n * p.batch
        parts = p.has_alpha + p.bias + bool(p.activation) + 2 * bool(p.combine)
        moved = (UNPACK_PASSES * p.m * p.k + columns * (3 * p.k + (3 + 2 * parts) * p.m)) * size
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        calls = UNPACK_CALLS + 6 + parts
        return p.dense_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: ReferenceConfig, a: Semi24) -> bool:
        """Whether A stands transposed."""
        return p.a.transposed

    def launch(
        self, c: ReferenceConfig, work: bool, a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        with torch.no_grad():
            out.copy_(semi24(a, b, epilogue, transposed=work))


KERNEL: SpmmKernel = ReferenceSemi24()
