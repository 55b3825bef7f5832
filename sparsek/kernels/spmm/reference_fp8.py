"""reference.spmm_fp8: the specification of FP8 products, run as a kernel. Any device and matrix; slow, in float64."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.kernels.spmm import reference as spmm
from sparsek.kernels.spmm import reference_24 as semi24
from sparsek.kernels.spmm import reference_bsr24 as bsr24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.storage import FP8
from sparsek.plan.kernel import SpmmKernel, rounding_seconds
from sparsek.plan.problem import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue
from sparsek.reference.quantized import product

# Kernels of the same product without scales, whose times are known.
PLAIN_KERNELS: dict[str, Any] = {
    "bsr_fp8": spmm.KERNEL,
    "semi24_fp8": semi24.KERNEL,
    "bsr24_fp8": bsr24.KERNEL,
}
CALLS = 4  # of torch, to multiply both operands by their scales
PASSES = 3  # over the operands in float64


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "both operands times their scales in float64, the reference of their product"


class ReferenceSpmmFp8:
    """`sparsek.reference.quantized` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.spmm_fp8"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless(*FP8):
            return foreign
        return []

    def default(self, p: SpmmProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: SpmmProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: SpmmProblem, c: ReferenceConfig) -> float:
        whole = p.plain("fp64")
        kernel = PLAIN_KERNELS[p.a.kind]
        product = kernel.seconds(whole, kernel.default(whole))
        stretched = PASSES * 8 * p.k * (p.m + p.n * p.batch) / p.card.bandwidth
        return product + stretched + CALLS * p.card.launch_seconds + rounding_seconds(p)

    def prepare(self, p: SpmmProblem, c: ReferenceConfig, a: Quantized) -> None:
        return None

    def launch(
        self,
        c: ReferenceConfig,
        work: None,
        a: Quantized,
        b: QuantizedTensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        with torch.no_grad():
            out.copy_(product(a, b, epilogue, out.dtype))


KERNEL: SpmmKernel = ReferenceSpmmFp8()
