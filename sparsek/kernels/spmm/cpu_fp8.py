"""cpu.spmm_fp8: FP8 products on CPU tensors. Both operands times their scales in float32, then the float32 kernel.

    A8 * scale_A, B8 * scale_B     float32, made anew in every call
    C = epilogue(A @ B)            cpu.spmm, cpu.semi24 or cpu.bsr24, rounded once to C's dtype

CPUs have no FP8 product, so this is no faster than the float32 product of the same pattern, and it needs four times
the memory of A's values during the call.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsek.kernels.kinds import CpuKernel
from sparsek.kernels.spmm import cpu as spmm
from sparsek.kernels.spmm import cpu_24 as semi24
from sparsek.kernels.spmm import cpu_bsr24 as bsr24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.storage import FP8
from sparsek.plan.product_kernels import SpmmKernel, rounding_seconds
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue

PLAIN_KERNELS: dict[str, Any] = {
    "bsr_fp8": spmm.KERNEL,
    "semi24_fp8": semi24.KERNEL,
    "bsr24_fp8": bsr24.KERNEL,
}
STRETCHED_BYTES = 16  # bytes moved per value that is multiplied by its scale


@dataclass(frozen=True)
class Config:
    """`product`: the config of the float32 kernel."""

    product: Any

    def __repr__(self) -> str:
        return f"times the scales in float32, then {self.product}"


@dataclass(frozen=True)
class Work:
    """The float32 kernel and its own work."""

    kernel: Any
    product: Any


class CpuSpmmFp8(CpuKernel):
    """The float32 kernels on values times scales. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.spmm_fp8"
    storages = FP8

    def default(self, p: SpmmProblem) -> Config:
        return Config(PLAIN_KERNELS[p.a.kind].default(p.plain("fp32")))

    def configs(self, p: SpmmProblem) -> Iterable[Config]:
        return [Config(each) for each in PLAIN_KERNELS[p.a.kind].configs(p.plain("fp32"))]

    def seconds(self, p: Any, c: Config) -> float:
        product = PLAIN_KERNELS[p.a.kind].seconds(p.plain("fp32"), c.product)
        stored = p.stored if p.a.blocks is None else p.nnzb * p.block[0] * p.block[1]
        stretched = STRETCHED_BYTES * (stored + p.k * p.n * p.batch) / p.card.bandwidth
        return product + stretched + 2 * p.card.launch_seconds + rounding_seconds(p)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return ["a processor multiplies no FP8: values times scales become float32 in every call"]

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Work:
        kernel = PLAIN_KERNELS[p.a.kind]
        return Work(kernel, kernel.prepare(p.plain("fp32"), c.product, a.dequantize(torch.float32)))

    def launch(
        self, c: Config, work: Work, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel() == 0:
            return
        bias, other = (None if x is None else x.float() for x in (epilogue.bias, epilogue.other))
        made = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        wide = a.dequantize(torch.float32)
        epilogue = replace(epilogue, bias=bias, other=other)
        work.kernel.launch(c.product, work.product, wide, b.dequantize(torch.float32), made, epilogue)
        if made is not out:
            out.copy_(made)


KERNEL: SpmmKernel = CpuSpmmFp8()
