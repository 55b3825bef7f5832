"""The plan of C = A @ B for two BSR matrices, and the pairs of blocks behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan import operands
from sparsek.plan.cache import PlanCache
from sparsek.plan.matches import Matches, match
from sparsek.plan.plan import Plan
from sparsek.plan.problem import SpgemmProblem

# A pair is 8 bytes on the device. A serving engine multiplies the same few matrices.
LIMIT = 64

Held = Callable[[], BlockPattern | None]
Matcher = Callable[[BlockPattern, BlockPattern, BlockPattern | None], Matches]


@dataclass(frozen=True, eq=False, repr=False)
class SpgemmPlan(Plan):
    """How to multiply two patterns of blocks, for any values. Call it: `plan(A, B)`.

    `problem` is an SpgemmProblem. `matches` are the pairs of blocks and C's pattern. `a_pattern` and `b_pattern` are
    weak references: A's pattern keeps the plan.
    """

    matches: Matches | None = None
    a_pattern: Held = field(default=lambda: None)
    b_pattern: Held = field(default=lambda: None)
    made: Ready | None = None

    def __call__(self, a: Any, b: Any) -> Any:
        """C = A @ B for A and B of the planned patterns: dense or BSR, as planned. No host sync.

        Raises InvalidInput for other operands. Values may change between calls, the patterns may not.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spgemm(A, B, out) there")
        self.refuse_unless_ready()
        operands.check_spgemm(a, b, "dense")
        if operands.wants_gradient(a.values, b.values):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="spgemm"))
        self._check_planned(a, b)
        return self.result(self.run(a, b))

    def run(self, a: BSR, b: BSR) -> Tensor:
        """C [M, N], or its values [nnzb, bm, bn], without the checks, for operands that are known to fit."""
        p: SpgemmProblem = self.problem
        assert self.matches is not None
        out = a.values.new_empty((p.m, p.n) if p.dense_out else (p.nnzb_out, *p.block))
        if out.numel() == 0:
            return out
        if p.pairs == 0:
            return out.zero_()
        if self.made is not None and not captured(out):
            wait_for(self.made, tensors_in(self.work))
        kernel, config, _ = self.choice
        with dtypes.as_given(a.device):
            kernel.launch(config, self.work, a, b, self.matches, out)
        return out

    def result(self, out: Tensor) -> Any:
        """What `run` returned, as a BSR if C is one."""
        assert self.matches is not None
        return out if self.problem.dense_out else BSR.unchecked(self.matches.pattern, out)

    def headline(self) -> list[str]:
        p: SpgemmProblem = self.problem
        cells = p.grid[0] * p.grid[1]
        stored = (
            f"{p.nnzb_out} blocks of {p.block[0]}x{p.block[1]} ({100 * p.nnzb_out / max(cells, 1):.3g} %)"
        )
        c = f"C dense [{p.m}, {p.n}], {stored} with a pair" if p.dense_out else f"C [{p.m}, {p.n}], {stored}"
        line = (
            f"C = A @ B   A {_matrix(p.m, p.k, p.nnzb_a, p.a_block, p.dtype)}, B "
            f"{_matrix(p.k, p.n, p.nnzb_b, p.b_block, p.dtype)}, {c}, on {p.card.name}"
        )
        return [line, f"  matches    {p.pairs} pairs of blocks, at most {p.pairs_max} to a block of C"]

    def _check_planned(self, a: BSR, b: BSR) -> None:
        p: SpgemmProblem = self.problem
        views = a.order is not None, b.order is not None
        for name, x, held in (("A", a, self.a_pattern), ("B", b, self.b_pattern)):
            if held() is not x.pattern:
                raise InvalidInput(
                    f"this plan was made for another pattern of blocks of {name}; call plan_spgemm(A, B, out) for this "
                    "one, or spgemm(A, B, out)"
                )
        if (dtypes.name(a.dtype), *views) != (p.dtype, p.a_transposed, p.b_transposed):
            raise InvalidInput(
                f"this plan multiplies {p.dtype} {_kind(p.a_transposed)} A and {_kind(p.b_transposed)} B; got "
                f"{a.dtype}, {_kind(views[0])} and {_kind(views[1])}"
            )


def _matrix(rows: int, columns: int, nnzb: int, block: tuple[int, int], dtype: str) -> str:
    return f"[{rows}, {columns}] {dtype}, {nnzb} blocks of {block[0]}x{block[1]}"


def _kind(view: bool) -> str:
    return "transposed view" if view else "stored"


class Kept(NamedTuple):
    """The matches of a pattern with B's, at `wanted` if that is a pattern, and the plans made for them."""

    b: Held
    wanted: Held | None
    matches: Matches
    plans: PlanCache[SpgemmPlan]


class MatchCache:
    """What A's pattern keeps of its products: at most LIMIT pairs of patterns, the least recently used dropped first.

    B's and C's patterns are referenced weakly; what is kept for one that is gone goes next. Matches that were used
    while a CUDA graph was captured stay: the graph goes on reading them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int | None], Kept] = {}
        self._captured: dict[int, Kept] = {}

    def get(
        self,
        a: BlockPattern,
        b: BlockPattern,
        wanted: BlockPattern | None,
        captured: bool,
        make: Matcher = match,
    ) -> Kept:
        """The matches of `a`, whose cache this is, and `b`. If there are none `make` finds them, with a host sync."""
        key = id(b), None if wanted is None else id(wanted)
        kept = self._kept.pop(key, None)
        if kept is None or kept.b() is not b or (kept.wanted is not None and kept.wanted() is not wanted):
            with torch.inference_mode(False):
                matches = make(a, b, wanted)
            if a.device.type == "cuda" and not captured:
                torch.cuda.current_stream(a.device).synchronize()  # plans on other streams read them unawares
            kept = Kept(weakref.ref(b), None if wanted is None else weakref.ref(wanted), matches, PlanCache())
            self._drop()
            if wanted is None:
                also = matches.pattern
                self._kept[id(b), id(also)] = kept._replace(wanted=weakref.ref(also))
        self._kept[key] = kept
        if captured:
            self._captured[id(kept.plans)] = kept
        return kept

    def _drop(self) -> None:
        gone = [
            key
            for key, k in self._kept.items()
            if k.b() is None or (k.wanted is not None and k.wanted() is None)
        ]
        for key in gone:
            del self._kept[key]
        while len(self._kept) >= LIMIT:
            del self._kept[next(iter(self._kept))]

    def __len__(self) -> int:
        return len(self._kept)
