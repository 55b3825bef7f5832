"""The plan of S = X @ Y at the stored blocks of a pattern."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes, tracing
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.engine.plan.plan import Plan
from sparsek.engine.plan.select import Choice
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.storage import block_stats, unread_stats
from sparsek.products.plan import operands
from sparsek.products.plan.problems import SddmmProblem


class Sampled(NamedTuple):
    """S = X @ Y at a pattern, the owner of its plans."""

    x: Tensor
    y: Tensor
    pattern: BlockPattern

    @property
    def like(self) -> Tensor:
        return self.x

    def problem(self, card: Card) -> SddmmProblem:
        x, y, pattern = self
        stats = unread_stats(pattern) if pattern.passing else block_stats(pattern, False)
        return SddmmProblem(
            m=x.shape[0],
            k=x.shape[1],
            n=y.shape[1],
            block=pattern.block,
            nnzb=pattern.nnzb,
            dtype=dtypes.name(x.dtype),
            card=card,
            x_layout=operands.layout(x),
            y_layout=operands.layout(y),
            aligned=operands.aligned(x, y),
            tf32=operands.allows_tf32(x.dtype),
            row_max=stats.row_max,
        )

    def key(self) -> Hashable:
        x, y, _ = self
        starts = x.data_ptr() % 16, y.data_ptr() % 16
        return x.shape[1], x.stride(), y.stride(), x.dtype, starts, operands.allows_tf32(x.dtype)

    def plan_owner(self) -> BlockPattern:
        return self.pattern

    def prepare(self, p: SddmmProblem, choice: Choice) -> Any:
        pattern = self.pattern
        if not pattern.passing or captured(self.x):
            return choice.kernel.prepare(p, choice.config, pattern)
        key = operands.work_key(choice.kernel, choice.config, p, pattern.indptr)
        return pattern.derived(key, lambda: choice.kernel.prepare(p, choice.config, pattern))

    def about(self) -> dict[str, Any]:
        return {"pattern": weakref.ref(self.pattern)}


@dataclass(frozen=True, eq=False, repr=False)
class SddmmPlan(Plan):
    """How to compute one pattern of blocks from X and Y of one shape. Call it: `plan(X, Y, pattern)`.

    `problem` is an SddmmProblem. `pattern` is a weak reference, because a pattern keeps its plans.
    """

    pattern: Callable[[], BlockPattern | None] = field(default=lambda: None)

    def __call__(self, x: Any, y: Any, pattern: Any) -> BSR:
        """S = X @ Y at the planned pattern, for X and Y as planned. No host sync.

        Raises InvalidInput for other operands.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call sddmm(X, Y, pattern) there")
        self.refuse_unless_ready()
        operands.check_sddmm(x, y, pattern)
        if tracing.wants_gradient(x, y):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="sddmm"))
        self._check_planned(x, y, pattern)
        return BSR.unchecked(pattern, self.run(Sampled(x, y, pattern), captured(x)))

    def _allocated(self, call: Sampled) -> tuple[Tensor, tuple[Any, ...] | None]:
        """The values of S [nnzb, bm, bn]."""
        x, y, pattern = call
        values = x.new_empty((pattern.nnzb, *pattern.block))
        if values.numel() == 0:
            return values, None
        if x.shape[1] == 0:
            return values.zero_(), None
        return values, (x, y, pattern, values)

    def headline(self) -> list[str]:
        p: SddmmProblem = self.problem
        line = (
            f"S = X @ Y at a pattern   S [{p.m}, {p.n}] {p.dtype}, {p.nnzb} blocks of {p.block[0]}x{p.block[1]} "
            f"({100 * p.density:.3g} % stored), X {[p.m, p.k]} {p.x_layout}-major, Y {[p.k, p.n]} {p.y_layout}-major, "
            f"on {p.card.name}"
        )
        return [line]

    def _check_planned(self, x: Tensor, y: Tensor, pattern: BlockPattern) -> None:
        p: SddmmProblem = self.problem
        if self.pattern() is not pattern:
            raise InvalidInput(
                "this plan was made for another pattern of blocks; call plan_sddmm(X, Y, pattern) for this one, or "
                "sddmm(X, Y, pattern)"
            )
        layouts = operands.layout(x), operands.layout(y)
        if (x.shape[1], dtypes.name(x.dtype), *layouts) != (p.k, p.dtype, p.x_layout, p.y_layout):
            raise InvalidInput(
                f"this plan takes {p.dtype} X {[p.m, p.k]} {p.x_layout}-major and Y {[p.k, p.n]} {p.y_layout}-major; "
                f"got {x.dtype} {list(x.shape)} {layouts[0]}-major and {list(y.shape)} {layouts[1]}-major"
            )
        if p.aligned and not operands.aligned(x, y):
            raise InvalidInput(
                "this plan needs pointers and leading strides of X and Y that are multiples of 16 bytes; "
                "sddmm(X, Y, pattern) takes any"
            )
