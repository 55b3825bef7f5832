"""What the planner knows of a kernel: a name and a few answers. Kernels implement it; ops join the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from sparsek.mask.mask import BlockMask
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.matches import Matches
from sparsek.plan.problem import (
    AttentionGradProblem,
    AttentionProblem,
    Problem,
    SddmmProblem,
    SpgemmProblem,
    SpmmProblem,
)
from sparsek.reference.epilogue import PLAIN, Epilogue

P = TypeVar("P", contravariant=True)


def beside(busy: float, moved: float) -> float:
    """Seconds of what computes for `busy` seconds and moves bytes of memory for `moved`.

    Neither hides the other wholly: 50 layers on an H200 (2026-11-22, op planner of benchmarks/results/h200) follow the
    root of the sum of squares.
    """
    return (busy * busy + moved * moved) ** 0.5


class Kernel(Protocol[P]):
    """One implementation of one operation, as far as the choice of a kernel goes.

    A kernel with an attribute `only_by_name`, a reason, is never chosen unless `kernel=` names it. A kernel may have a
    method `notes(p, c) -> list[str]`: what else `explain()` should say of that choice, one line each. An attribute
    `paced` names fields of its configs that follow from the problem, which a tuned config need not share.
    """

    name: str

    def why_not(self, p: P) -> list[str]:
        """Every reason why this kernel cannot run `p`, readable; [] means it can."""
        ...

    def default(self, p: P) -> Any:
        """The config this kernel would use: deterministic, no timing. A frozen dataclass."""
        ...

    def configs(self, p: P) -> Iterable[Any]:
        """Every legal config, for the tuner."""
        ...

    def seconds(self, p: P, c: Any) -> float:
        """Predicted time of one call on `p.card`."""
        ...


class SpmmKernel(Kernel[SpmmProblem], Protocol):
    """One implementation of C = A @ B for a BSR A, with an epilogue."""

    def prepare(self, p: SpmmProblem, c: Any, a: BSR) -> Any:
        """Work that is done once per plan: schedules, a dense copy. Kept by the plan, handed back to `launch`."""
        ...

    def launch(self, c: Any, work: Any, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        """Runs. `out` [..., M, N] is preallocated and fully overwritten; it lies as the problem's `out_layout` says."""
        ...


class SddmmKernel(Kernel[SddmmProblem], Protocol):
    """One implementation of S = X @ Y at the blocks of a pattern."""

    def prepare(self, p: SddmmProblem, c: Any, pattern: BlockPattern) -> Any:
        """Work that is done once per pattern and plan."""
        ...

    def launch(self, c: Any, work: Any, x: Tensor, y: Tensor, pattern: BlockPattern, values: Tensor) -> None:
        """Runs. `values` [nnzb, bm, bn] is preallocated and fully overwritten; outside the matrix it becomes 0."""
        ...


class SpgemmKernel(Kernel[SpgemmProblem], Protocol):
    """One implementation of C = A @ B for BSR A and B."""

    def prepare(self, p: SpgemmProblem, c: Any, matches: Matches) -> Any:
        """Work that is done once per pair of patterns and plan."""
        ...

    def launch(self, c: Any, work: Any, a: BSR, b: BSR, matches: Matches, out: Tensor) -> None:
        """Runs. `out` is preallocated and fully overwritten: dense [M, N], or values [nnzb, bm, bn] of C's pattern."""
        ...


class AttentionKernel(Kernel[AttentionProblem], Protocol):
    """One implementation of attention over the blocks of a mask."""

    def prepare(self, p: AttentionProblem, c: Any, mask: BlockMask) -> Any:
        """Work that is done once per mask and plan, on the mask's device, without a host sync.

        If the work has an attribute `imbalance`, a number or a function without arguments (which may sync), it is the
        work of the fullest CTA over the mean.
        """
        ...

    def launch(
        self,
        c: Any,
        work: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Runs. `out` [B, Hq, S, Dv] and `lse` [B, Hq, S] are preallocated and fully overwritten.

        `out` lies in memory as [B, Hq, S, Dv] or as [B, S, Hq, Dv], without gaps; `lse` is contiguous. No side of
        either and not T is 0. `scale` is positive and multiplies q k^T, base e.
        """
        ...


class AttentionGradKernel(Kernel[AttentionGradProblem], Protocol):
    """One implementation of the gradients of attention over the blocks of a mask."""

    def prepare(self, p: AttentionGradProblem, c: Any, mask: BlockMask) -> Any:
        """As `AttentionKernel.prepare`. What the kernel reads of `mask.transposed` belongs into the work: its tensors
        are those that calls on other streams wait for.
        """
        ...

    def launch(
        self,
        c: Any,
        work: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        scale: float,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        """Runs. `dq`, `dk` and `dv` have the shapes of q, k and v, and are preallocated and fully overwritten.

        P = exp(scale q k^T - lse) where the mask admits it, delta = rowsum(grad * out) - grad_lse,
        dv = P^T grad, dS = P * (grad v^T - delta), dq = scale dS k, dk = scale dS^T q. Rows of lse = -inf, which see
        nothing, give nothing. dk and dv are summed over the heads of q that a head of k serves.

        `out` and `lse` are as the forward pass gave them, `lse` contiguous. `grad` [B, Hq, S, Dv] is of q's dtype.
        `grad_lse` [B, Hq, S] is float32 (float64 for float64) and contiguous, or None for 0. dq, dk and dv lie in
        memory as [B, H, L, E] or as [B, L, H, E], without gaps. No side of anything is 0.
        """
        ...


@dataclass(frozen=True)
class MissingKernel:
    """Stands in for a kernel whose module does not import, as on machines that Triton does not come to."""

    name: str
    error: str

    def why_not(self, p: Problem) -> list[str]:
        return [f"does not import here: {self.error}"]
