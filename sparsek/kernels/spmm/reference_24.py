"""reference.semi24: the specification, run as a kernel. Any device, dtype and layout; slow, and predicted to be."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.matrix.semi24 import Semi24
from sparsek.plan.problem import Semi24Problem
from sparsek.plan.semi24 import Kernel24
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

    def why_not(self, p: Semi24Problem) -> list[str]:
        return []

    def default(self, p: Semi24Problem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: Semi24Problem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: Semi24Problem, c: ReferenceConfig) -> float:
        size = 8 if p.dtype == "fp64" else 4
        columns = p.n * p.batch
        parts = p.scaled + p.bias + bool(p.activation) + 2 * bool(p.combine)
        moved = (UNPACK_PASSES * p.m * p.k + columns * (3 * p.k + (3 + 2 * parts) * p.m)) * size
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        calls = UNPACK_CALLS + 6 + parts
        return p.dense_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: Semi24Problem, c: ReferenceConfig, a: Semi24) -> bool:
        """Whether A stands transposed."""
        return p.transposed

    def launch(
        self, c: ReferenceConfig, work: bool, a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        with torch.no_grad():
            out.copy_(semi24(a, b, epilogue, transposed=work))


KERNEL: Kernel24 = ReferenceSemi24()
