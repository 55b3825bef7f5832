"""C = act(alpha * scale_A[m] * scale_B[n] * (A8 @ B8) + bias[:, None]) for an FP8 Semi24 A on sparse tensor cores.

The kernel of hopper.semi24 with bytes instead of 16-bit numbers: a step is 128 columns instead of 64, and B is
contiguous along K, as FP8 wgmma requires. Tensor cores keep some 14 bits of a running FP8 sum, so their sums are
promoted to float32 registers every 512 columns; tiles are narrower for it. With `fast_accum` there is no promotion,
and the tiles are those of hopper.semi24. C is bf16 or fp16.

8192^3 on an H200 (docs/notes/fp8-products.md; variants in one run, without peers): 0.596 ms, 1845 TFLOPS in
dense-equivalent, after 0.698 ms while every promotion wrote zeros that the next wgmma waited for. With `fast_accum`
0.546 ms, 2010 TFLOPS; that kernel is unchanged since it was 0.95 to 0.97 of cuSPARSELt FP8 (2026-11-23), which
accumulates the same way and was timed without scales.
"""

from collections.abc import Iterator

from torch import Tensor

from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.spmm import hopper_24 as semi24
from sparsek.products.kernels.spmm.hopper_24 import Config, Scales, Work
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue


def why_not(p: SpmmProblem) -> list[str]:
    """Reasons shared by Semi24 and BSR24 in FP8."""
    reasons = semi24.why_not(p, p.c.dtype)
    if p.a.scale == "block":
        reasons.append("a scale per block belongs inside the sums, which the tensor core keeps to itself")
    return reasons


def launch(
    c: Config, work: Work, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
) -> None:
    """As SpmmKernel.launch."""
    matrix = a.matrix
    assert isinstance(matrix, (Semi24, BSR24))
    scale = a.scale if a.kind == "row" else a.scale.view(())
    semi24.launch(c, work, matrix, b.values.mT, out, epilogue, Scales(scale, b.scale))


class HopperSemi24Fp8:
    """The kernel of hopper.semi24 in FP8."""

    name = "hopper.semi24_fp8"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("semi24_fp8"):
            return foreign
        reasons = why_not(p)
        if p.k % 32 or not p.k:
            reasons.append(f"a row of A's values must be whole 16 bytes: K a multiple of 32, not {p.k}")
        return reasons

    def default(self, p: SpmmProblem) -> Config:
        return min(self.configs(p), key=lambda c: self.seconds(p, c))

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        return semi24.tiles_of(p, (2, 1))

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        return semi24.whole_seconds(p, c) + rounding_seconds(p)

    def prepare(self, p: SpmmProblem, c: Config, a: Quantized) -> Work:
        assert isinstance(a.matrix, Semi24)
        return semi24.prepared(p, c, a.matrix)

    def launch(
        self, c: Config, work: Work, a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        launch(c, work, a, b, out, epilogue)


KERNEL: SpmmKernel = HopperSemi24Fp8()
