"""C = act(alpha * scale_A[m] * scale_B[n] * (A8 @ B8) + bias[:, None]) for an FP8 BSR24 A on sparse tensor cores.

The kernel of hopper.semi24_fp8 with the lists of hopper.bsr24. A step is 128 columns, so blocks must be wide enough.
Not timed yet.
"""

from collections.abc import Iterator

from torch import Tensor

from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm import hopper_24_fp8 as semi24_fp8
from sparsek.products.kernels.spmm import hopper_bsr24 as bsr24
from sparsek.products.kernels.spmm.hopper_24 import Config, Work
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue


class HopperBsr24Fp8:
    """The kernel of hopper.semi24 in FP8, with lists of blocks."""

    name = "hopper.bsr24_fp8"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr24_fp8"):
            return foreign
        reasons = semi24_fp8.why_not(p) + bsr24.why_not_blocks(p)
        if p.block[1] % 128:
            reasons.append(f"a step is 128 columns: blocks must be a multiple of that wide, not {p.block[1]}")
        return reasons

    def default(self, p: SpmmProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        return bsr24.tiles_of_blocks(p)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return bsr24.blocks_seconds(p, c) + rounding_seconds(p)

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Work:
        assert isinstance(a.matrix, BSR24)
        return semi24.prepared(p, c, a.matrix, bsr24.lists_of(p, c, a.matrix))

    def launch(
        self, c: Config, work: Work, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        semi24_fp8.launch(c, work, a, b, out, epilogue)


KERNEL: SpmmKernel = HopperBsr24Fp8()
