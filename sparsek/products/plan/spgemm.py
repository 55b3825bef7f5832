"""The plan of C = A @ B for two BSR matrices, and the pairs of blocks behind it."""

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
from sparsek.core.plan_owner import PlanOwner, drop_oldest
from sparsek.core.streams import captured
from sparsek.engine.plan.plan import Plan
from sparsek.engine.plan.select import Choice
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan import operands
from sparsek.products.plan.matches import Matches, match
from sparsek.products.plan.problems import SpgemmProblem

# A pair is 8 bytes on the device. A serving engine multiplies the same few matrices.
LIMIT = 64

Held = Callable[[], BlockPattern | None]
Matcher = Callable[[BlockPattern, BlockPattern, BlockPattern | None], Matches]


class CachedMatches(NamedTuple):
    """The matches of a pattern with B's, restricted to `wanted` if that is a pattern, and their plans."""

    b: Held
    wanted: Held | None
    matches: Matches
    owner: PlanOwner


class Pair(NamedTuple):
    """C = A @ B, both BSR, with their matches. `dense`: C is dense. `kept_at`: the owner of its plans."""

    a: BSR
    b: BSR
    matches: Matches
    dense: bool
    kept_at: PlanOwner | None = None

    def seen(self, c: Tensor) -> Any:
        """C from the result of `SpgemmPlan.run`, as a BSR if it is one."""
        return c if self.dense else BSR.unchecked(self.matches.pattern, c)

    @property
    def like(self) -> Tensor:
        return self.a.values

    def problem(self, card: Card) -> SpgemmProblem:
        a, b, matches, dense, _ = self
        (m, k), n = a.shape, b.shape[1]
        starts = a.values.data_ptr() | b.values.data_ptr() | (n * a.values.element_size() if dense else 0)
        return SpgemmProblem(
            m=m,
            k=k,
            n=n,
            a_block=a.block,
            b_block=b.block,
            nnzb_a=a.nnzb,
            nnzb_b=b.nnzb,
            nnzb_out=matches.pattern.nnzb,
            pairs=matches.pairs,
            pairs_max=matches.longest,
            dtype=dtypes.name(a.dtype),
            card=card,
            dense_out=dense,
            a_transposed=a.order is not None,
            b_transposed=b.order is not None,
            aligned=starts % 16 == 0,
            tf32=operands.allows_tf32(a.dtype),
        )

    def key(self) -> Hashable:
        a, b, _, dense, _ = self
        placed = a.values.data_ptr() % 16, b.values.data_ptr() % 16
        return dense, a.order is None, b.order is None, a.dtype, placed, operands.allows_tf32(a.dtype)

    def plan_owner(self) -> PlanOwner:
        assert self.kept_at is not None
        return self.kept_at

    def prepare(self, p: SpgemmProblem, choice: Choice) -> Any:
        kernel, config, _ = choice
        work = kernel.prepare(p, config, self.matches)
        if hasattr(kernel, "place"):
            kernel.place(work, self.a, self.b, self.matches)
        return work

    def about(self) -> dict[str, Any]:
        patterns = {"a_pattern": weakref.ref(self.a.pattern), "b_pattern": weakref.ref(self.b.pattern)}
        return {"matches": self.matches, **patterns}


@dataclass(frozen=True, eq=False, repr=False)
class SpgemmPlan(Plan):
    """How to multiply two patterns of blocks, for any values. Call it: `plan(A, B)`.

    `problem` is an SpgemmProblem. `matches` are the pairs of blocks and C's pattern. `a_pattern` and `b_pattern` are
    weak references: A's pattern keeps the plan.
    """

    matches: Matches | None = None
    a_pattern: Held = field(default=lambda: None)
    b_pattern: Held = field(default=lambda: None)

    def __call__(self, a: Any, b: Any) -> Any:
        """C = A @ B for A and B of the planned patterns: dense or BSR, as planned. No host sync.

        Raises InvalidInput for other operands. Values may change between calls, the patterns may not.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spgemm(A, B, out) there")
        self.refuse_unless_ready()
        operands.check_spgemm(a, b, "dense")
        if tracing.wants_gradient(a.values, b.values):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="spgemm"))
        self._check_planned(a, b)
        assert self.matches is not None
        call = Pair(a, b, self.matches, self.problem.dense_out)
        return call.seen(self.run(call, captured(a.values)))

    def _allocated(self, call: Pair) -> tuple[Tensor, tuple[Any, ...] | None]:
        """C [M, N], or its values [nnzb, bm, bn]."""
        p: SpgemmProblem = self.problem
        out = call.a.values.new_empty((p.m, p.n) if p.dense_out else (p.nnzb_out, *p.block))
        if out.numel() == 0:
            return out, None
        if p.pairs == 0:
            return out.zero_(), None
        return out, (call.a, call.b, call.matches, out)

    def headline(self) -> list[str]:
        p: SpgemmProblem = self.problem
        stored = f"{p.nnzb} blocks of {p.block[0]}x{p.block[1]} ({100 * p.density:.3g} %)"
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


class MatchCache:
    """The matches of A's pattern with others: at most LIMIT pairs of patterns, the least recently used dropped first.

    B's and C's patterns are referenced weakly; entries of collected patterns are dropped next. Matches that a
    captured CUDA graph uses stay, because the graph reads them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int | None], CachedMatches] = {}
        self._captured: dict[int, CachedMatches] = {}

    def get(
        self,
        a: BlockPattern,
        b: BlockPattern,
        wanted: BlockPattern | None,
        captured: bool,
        make: Matcher = match,
    ) -> CachedMatches:
        """The matches of `a`, whose cache this is, and `b`. If there are none, `make` finds them, with a host sync."""
        kept = self.find(b, wanted)
        if kept is None:
            with torch.inference_mode(False):
                matches = make(a, b, wanted)
            if a.device.type == "cuda" and not captured:
                torch.cuda.current_stream(a.device).synchronize()  # plans on other streams read them unawares
            kept = CachedMatches(
                weakref.ref(b), None if wanted is None else weakref.ref(wanted), matches, PlanOwner()
            )
            self._drop()
            if wanted is None:
                also = matches.pattern
                self._kept[id(b), id(also)] = kept._replace(wanted=weakref.ref(also))
            self._kept[id(b), None if wanted is None else id(wanted)] = kept
        if captured:
            self._captured[id(kept.owner)] = kept
        return kept

    def find(self, b: BlockPattern, wanted: BlockPattern | None) -> CachedMatches | None:
        """The cached matches for `b` and C's pattern."""
        key = id(b), None if wanted is None else id(wanted)
        kept = self._kept.pop(key, None)
        if kept is None or kept.b() is not b or (kept.wanted is not None and kept.wanted() is not wanted):
            return None
        self._kept[key] = kept  # now the most recently used
        return kept

    def _drop(self) -> None:
        gone = [
            key
            for key, k in list(self._kept.items())
            if k.b() is None or (k.wanted is not None and k.wanted() is None)
        ]
        for key in gone:
            self._kept.pop(key, None)
        while len(self._kept) >= LIMIT:
            drop_oldest(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
