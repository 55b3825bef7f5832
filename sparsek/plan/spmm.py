"""The plan of C = A @ B."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern
from sparsek.plan import operands
from sparsek.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class SpmmPlan(Plan):
    """How to multiply one pattern of blocks with one shape of B. Call it: `plan(A, B, out=None)`.

    `problem` is an SpmmProblem. `pattern` is a weak reference: a pattern keeps its plans.
    """

    pattern: Callable[[], BlockPattern | None] = field(default=lambda: None, repr=False)

    def __call__(self, a: BSR, b: Tensor, out: Tensor | None = None) -> Tensor:
        """C = A @ B for A of the planned pattern and B as planned; `out` [..., M, N] is overwritten. No host sync.

        Raises InvalidInput for other operands. Values may change between calls, the pattern may not.
        """
        self.refuse_unless_ready()
        operands.check_operands(a, b)
        operands.check_no_gradient(a, b)
        if out is not None:
            operands.check_out(a, b, out)
        self._check_planned(a, b, out)
        return self.run(a, b, out)

    def run(self, a: BSR, b: Tensor, out: Tensor | None = None) -> Tensor:
        """The call without its checks, for operands that are known to fit."""
        if out is None:
            out = b.new_empty((*b.shape[:-2], self.problem.m, self.problem.n))
        if out.numel():
            kernel, config, _ = self.choice
            with dtypes.as_given(b.device):
                kernel.launch(config, self.work, a, b, out)
        return out

    def headline(self) -> list[str]:
        p = self.problem
        batch = f"{p.batch} x " if p.batch != 1 else ""
        line = (
            f"C = A @ B   A [{p.m}, {p.k}] {p.dtype}, {p.nnzb} blocks of {p.block[0]}x{p.block[1]} "
            f"({100 * p.density:.3g} % stored), B {batch}[{p.k}, {p.n}] {p.b_layout}-major, on {p.card.name}"
        )
        return [line]

    def _check_planned(self, a: BSR, b: Tensor, out: Tensor | None) -> None:
        p = self.problem
        if self.pattern() is not a.pattern or p.transposed != (a.order is not None):
            raise InvalidInput(
                "this plan was made for another pattern of blocks; call plan_spmm(A, B) for this A, or spmm(A, B)"
            )
        batch, layout = b.shape[:-2].numel(), operands.layout(b)
        if (batch, b.shape[-1], layout, dtypes.name(b.dtype)) != (p.batch, p.n, p.b_layout, p.dtype):
            raise InvalidInput(
                f"this plan multiplies {p.dtype} B of {p.batch} x [{p.k}, {p.n}], {p.b_layout}-major; got {b.dtype} "
                f"{list(b.shape)}, {layout}-major"
            )
        if p.aligned and not operands.aligned(b, out):
            raise InvalidInput(
                "this plan needs pointers and leading strides of B and out that are multiples of 16 bytes; "
                "spmm(A, B) takes any"
            )
