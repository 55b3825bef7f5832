"""The protocols of kernels of products, and what a product costs around its kernel."""

from typing import Any, Protocol

from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.plan.kernel import Kernel, beside, unless_aligned, unless_gapless, unless_whole
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.matches import Matches
from sparsek.products.plan.problems import SddmmProblem, SpgemmProblem, SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue


def unless_dense_sides(p: SpmmProblem) -> list[str]:
    """TMA reads B, and another matrix, and writes C."""
    sides = "B, C and another matrix with C's layout" if p.combine else "B and C"
    reasons = unless_aligned(p, f"leading strides of {sides}") + unless_whole("C", p.c_row, p.c.dtype)
    return reasons + unless_gapless("B", p.b.layout)


def unless_stored(p: SpmmProblem) -> list[str]:
    """TMA needs the address of something."""
    return [] if p.nnzb else ["A has no stored blocks, and TMA needs a valid address"]


def rounding_seconds(p: SpmmProblem) -> float:
    """Seconds to round B to FP8 before the product; 0 for a B that is not rounded.

    A launch; bytes at 95 % of copy bandwidth, or as its instructions allow; and the time that one program takes for a
    row (H200, 2026-11-22: 58 us at 8192x8192, 4.4 us at 16x14336; H100, 2026-11-26: about 70 us at 8192x8192).
    """
    if not p.b.rounds:
        return 0.0
    moved = p.batch * p.n * p.k * (dtypes.itemsize(p.b.rounds) + 1)
    return 2.2e-6 + beside(moved / min(3.34e12, 0.95 * p.card.bandwidth), 0.2e-9 * p.k)


def activation_seconds(p: SpmmProblem) -> float:
    """Seconds of torch to read C and write its activation, and what the derivative costs more than a product with a
    matrix: it reads no less, but takes 1.3 times as long (H200, 2026-11-26: 193 us; 256 us beside 185 us).
    """
    moved = 2.0 * p.m * p.n * p.batch * dtypes.itemsize(p.c.dtype)
    return p.card.launch_seconds + moved * 1.4 / (0.58 * p.card.bandwidth)


class SpmmKernel(Kernel[SpmmProblem], Protocol):
    """One implementation of C = A @ B for a sparse A of some kinds of storage, with an epilogue.

    The first reason of `why_not` is an unsupported storage, because `why_not` is called for every storage. A kernel
    whose attribute `writes_slope` is true also writes the epilogue's slope. `seconds` includes the rounding of B to
    FP8, `rounding_seconds(p)`.
    """

    def prepare(self, p: SpmmProblem, c: Any, a: Any) -> Any:
        """Work that is done once per plan: schedules, a dense copy. Kept by the plan and passed to `launch`.

        A 2:4 matrix is given as stored; p.a.transposed: the product uses its transpose, and the work must
        record that.
        """
        ...

    def launch(self, c: Any, work: Any, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        """Launches the kernel. `out` [..., M, N] is preallocated and fully overwritten; its layout is the problem's
        c.layout.

        A quantized `a` is a Quantized, and `b` then a transposed QuantizedTensor: b.values [..., N, K] is contiguous
        and begins at a multiple of 16 bytes, B is b.values.mT, and b.scale is float32 [..., N] or []. Of `a`,
        a.matrix.values is FP8 and a.scale float32, in the shape that a.kind implies. The epilogue's bias [M] and
        other matrix [..., M, N] have out's dtype, and apply to the scaled sums in float32. A kernel
        whose attribute `rounds` is true also takes B [..., K, N] before rounding, of any strides.
        """
        ...


class SddmmKernel(Kernel[SddmmProblem], Protocol):
    """One implementation of S = X @ Y at the blocks of a pattern."""

    def prepare(self, p: SddmmProblem, c: Any, pattern: BlockPattern) -> Any:
        """Work that is done once per pattern and plan."""
        ...

    def launch(self, c: Any, work: Any, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor) -> None:
        """Launches the kernel. `values` [nnzb, bm, bn] is preallocated and fully overwritten; 0 outside the matrix."""
        ...


class SpgemmKernel(Kernel[SpgemmProblem], Protocol):
    """One implementation of C = A @ B for BSR A and B."""

    def prepare(self, p: SpgemmProblem, c: Any, matches: Matches) -> Any:
        """Work that is done once per pair of patterns and plan."""
        ...

    def launch(self, c: Any, work: Any, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        """Launches the kernel. `out` is preallocated and fully overwritten: dense [M, N], or values [nnzb, bm, bn] of
        C's pattern.
        """
        ...
