"""The plan of C = A @ B with a BSR on either side."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan import operands
from sparsek.plan.plan import Plan
from sparsek.plan.problem import Problem24, SpmmProblem
from sparsek.plan.select import Candidate, Choice
from sparsek.reference.epilogue import PLAIN, Epilogue

OTHER_LAYOUT = {"row": "col", "col": "row", "strided": "strided"}


class Product(NamedTuple):
    """A call in the form that kernels take: the BSR on the left.

    `out_layout` is "col" where it stood on the right: B @ A is (A.T @ B.mT).mT, and C is then the transpose view of
    what the caller sees.
    """

    a: BSR
    b: Tensor
    out: Tensor | None
    epilogue: Epilogue
    out_layout: str

    @classmethod
    def of(cls, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Product:
        """The form of a @ b, one of them a BSR. By views only. `epilogue` is about C as the caller sees it.

        Leading dims of a dense left operand are rows as well, and become so where all matrices lie so in memory.
        """
        if isinstance(a, BSR):
            return cls(a, b, out, epilogue, "row")
        other = epilogue.other
        if a.dim() > 2 and all(x is None or joins(x, a) for x in (a, out, other)):
            a, out, other = (None if x is None else x.flatten(0, -2) for x in (a, out, other))
        if other is not None:
            epilogue = replace(epilogue, other=other.mT)
        return cls(b.T, a.mT, None if out is None else out.mT, epilogue, "col")

    def seen(self, c: Tensor, a: Any) -> Tensor:
        """C as `SpmmPlan.run` leaves it as the caller sees it, who gave `a` as the left operand: its leading dims."""
        if self.out_layout == "row" or c.dim() == a.dim():
            return c
        return c.view(*a.shape[:-1], c.shape[-1])

    def check_epilogue(self) -> None:
        """InvalidInput unless the epilogue fits the operands, which fit each other."""
        operands.check_epilogue(self.a.shape[0], self.b, self.epilogue, self.out_layout)


@dataclass(frozen=True, eq=False, repr=False)
class SpmmPlan(Plan):
    """How to multiply one pattern of blocks with one shape of a dense matrix, and what to do to the product.

    Call it as it was planned: `plan(A, B, out=None, epilogue=...)`, the BSR on the side where it was.
    `problem` is an SpmmProblem. `pattern` is a weak reference to the pattern of the BSR as it stands on the left:
    a pattern keeps its plans. `limit` is how many stored blocks a plan that followed may have.
    """

    pattern: Callable[[], BlockPattern | None] = field(default=lambda: None)
    limit: int | None = None
    made: Ready | None = None
    # The facts of the last call that was found to fit.
    _passed: list[Any] = field(default_factory=list, init=False)

    @property
    def on_right(self) -> bool:
        """The BSR is the right operand."""
        return self.problem.out_layout == "col"

    def __call__(self, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Tensor:
        """C = A @ B for a BSR of the planned pattern and a dense matrix as planned. No host sync.

        `out`, of C's shape, is overwritten. `epilogue` has the parts that were planned. Raises InvalidInput for other
        operands. Values may change between calls, the pattern may not.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spmm(A, B) there")
        self.refuse_unless_ready()
        operands.check_given(epilogue)
        (operands.check_right if self.on_right else operands.check_left)(a, b)
        if out is not None:
            operands.check_out(a, b, out, epilogue)
        product = Product.of(a, b, out, epilogue)
        product.check_epilogue()
        if operands.wants_gradient(product.a.values, product.b, epilogue.bias, epilogue.other):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="spmm"))
        self._check_planned(product)
        c = self.run(product, captured(product.b))
        return product.seen(c, a) if out is None else out

    def run(self, product: Product, capturing: bool) -> Tensor:
        """The call without its checks, for operands that are known to fit. `capturing`: a CUDA graph is.

        Returns C by rows: in the kernels' form [..., M, N], or [..., N, M] where the BSR stood on the right.
        """
        a, b, out, epilogue, out_layout = product
        if operands.autocasts(b):
            with dtypes.as_given(b.device):
                return self.run(product, capturing)
        by_columns = out_layout == "col"
        if out is None:
            c = new_rows(b, self.problem.m, by_columns)
            out = c.mT if by_columns else c
        else:
            c = out.mT if by_columns else out
        if out.numel():
            if self.made is not None and not capturing:
                wait_for(self.made, tensors_in(self.work))
            kernel, config, _ = self.choice
            kernel.launch(config, self.work, a, b, out, epilogue)
        return c

    def follow(self, a: BSR) -> SpmmPlan:
        """This plan for a matrix whose blocks have moved: same shape, same block, and at most as many stored.

        `a` is the BSR as it stands in the product. The work list is made on the device, without a host sync, so that
        training may move blocks between steps; a new `plan_spmm` balances better and may merge or split rows.
        Raises InvalidInput for another shape, block, device or more blocks.
        """
        self.refuse_unless_ready()
        if not isinstance(a, BSR):
            raise InvalidInput(f"a plan follows a BSR, got {type(a).__name__}")
        stands = a.T if self.on_right else a
        p, old, limit = self.problem, self.pattern(), self.limit or self.problem.nnzb
        new = stands.pattern
        same = (new.shape, new.block, stands.order is not None) == ((p.m, p.k), p.block, p.transposed)
        if not same or new.nnzb > limit or dtypes.name(a.dtype) != p.dtype:
            sides, block = ((p.k, p.m), p.block[::-1]) if self.on_right else ((p.m, p.k), p.block)
            view = ", a transposed view" if p.transposed != self.on_right else ""
            raise InvalidInput(
                f"this plan follows {p.dtype} matrices of {sides[0]}x{sides[1]} in blocks of {block[0]}x{block[1]}"
                f"{view}, with at most {limit} stored; got {a!r}"
            )
        if old is not None and new.device != old.device:
            raise InvalidInput(f"this plan is on {old.device} and A on {new.device}")
        # What only a sync could tell is bounded.
        most = min(new.grid[1], new.nnzb)
        bounded = replace(p, nnzb=new.nnzb, row_max=most, merged=(), touches_all_columns=False)
        kernel, config, _ = self.choice
        why_not = kernel.why_not(bounded)
        if why_not:
            raise Unsupported(f"{kernel.name} cannot follow", {kernel.name: tuple(why_not)})
        if hasattr(kernel, "follow"):
            config, work = kernel.follow(bounded, config, stands)
        else:
            work = kernel.prepare(bounded, config, stands)
        choice = Choice(kernel, config, (Candidate(kernel.name, config, kernel.seconds(bounded, config)),))
        made = Ready.here(new.device)
        return replace(
            self, problem=bounded, choice=choice, work=work, pattern=weakref.ref(new), limit=limit, made=made
        )

    def headline(self) -> list[str]:
        p: SpmmProblem = self.problem
        batch = f"{p.batch} x " if p.batch != 1 else ""
        (rows, columns), (bm, bk) = (p.m, p.k), p.block
        product, dense, lies = "A @ B", [p.k, p.n], p.b_layout
        if self.on_right:
            rows, columns, bm, bk = columns, rows, bk, bm
            product, dense, lies = "B @ A", [p.n, p.k], OTHER_LAYOUT[p.b_layout]
        line = (
            f"C = {formula(p, product)}   A [{rows}, {columns}] {p.dtype}, {p.nnzb} blocks of {bm}x{bk} "
            f"({100 * p.density:.3g} % stored), B {batch}{dense} {lies}-major, on {p.card.name}"
        )
        return [line]

    def _check_planned(self, product: Product) -> None:
        p: SpmmProblem = self.problem
        a, b, out, epilogue, _ = product
        if self.pattern() is not a.pattern or p.transposed != (a.order is not None):
            raise InvalidInput(
                "this plan was made for another pattern of blocks; call plan_spmm(A, B) for this A, or spmm(A, B)"
            )
        told = facts(product)
        if self._passed == [told]:
            return
        batch, layout = b.shape[:-2].numel(), operands.layout(b)
        if (batch, b.shape[-1], layout, dtypes.name(b.dtype)) != (p.batch, p.n, p.b_layout, p.dtype):
            name, planned, got, lies = "B", [p.k, p.n], list(b.shape), OTHER_LAYOUT
            if self.on_right:
                name, planned, got = "A", planned[::-1], [*b.shape[:-2], b.shape[-1], b.shape[-2]]
            else:
                lies = {each: each for each in OTHER_LAYOUT}
            raise InvalidInput(
                f"this plan multiplies {p.dtype} {name} of {p.batch} x {planned}, {lies[p.b_layout]}-major; got "
                f"{b.dtype} {got}, {lies[layout]}-major"
            )
        parts = epilogue_parts(epilogue, out)
        planned_parts = p.scaled, p.bias, p.activation, p.combine, p.in_place
        if parts != planned_parts:
            raise InvalidInput(
                f"this plan was made for C = {formula(p, 'A @ B')}; got {formula_of(*parts, 'A @ B')}. Hand over the "
                "epilogue that was planned, epilogue=..., or plan with this one"
            )
        if p.aligned and not is_aligned(a.values, b, out, epilogue.other, p.m, p.out_layout):
            raise InvalidInput(
                "this plan needs pointers and leading strides of A's values, B and out that are multiples of 16 bytes; "
                "spmm(A, B) takes any"
            )
        self._passed[:] = [told]


def joins(x: Tensor, a: Tensor) -> bool:
    """Whether `x` has the leading dims of `a`, and lies as one matrix with as many rows as all of them together."""
    if x.shape[:-1] != a.shape[:-1] or x.numel() == 0:
        return False
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def empty_out(b: Tensor, m: int, out_layout: str) -> Tensor:
    """An uninitialised C [..., M, N]: contiguous, or the transpose view of a contiguous [..., N, M]."""
    by_columns = out_layout == "col"
    new = new_rows(b, m, by_columns)
    return new.mT if by_columns else new


def new_rows(b: Tensor, m: int, by_columns: bool) -> Tensor:
    """An uninitialised C by rows: [..., M, N], or [..., N, M] if `by_columns`."""
    *batch, _, n = b.shape
    if batch:
        return b.new_empty((*batch, n, m) if by_columns else (*batch, m, n))
    return b.new_empty((n, m) if by_columns else (m, n))


def facts(call: Product) -> tuple[Any, ...]:
    """All of a call that its plan depends on but the pattern: calls alike in this fit the same plan."""
    a, b, out, epilogue, out_layout = call
    starts = a.values.data_ptr() % 16, b.data_ptr() % 16
    told = a.order is None, out_layout, b.shape, b.stride(), b.dtype, starts
    if out is None and (epilogue is PLAIN or epilogue.is_plain):
        return told
    more = [None if x is None else (x.stride(), x.data_ptr() % 16) for x in (out, epilogue.other)]
    return *told, *more, *epilogue_parts(epilogue, out)


def is_aligned(
    values: Tensor, b: Tensor, out: Tensor | None, other: Tensor | None, m: int, out_layout: str
) -> bool:
    """Whether A's values, B, C and the epilogue's matrix begin and step by multiples of 16 bytes.

    The latter must lie as C does, and step by less than 2^31 elements.
    """
    if other is not None:
        lies = 1 in other.shape[-2:] or operands.layout(other) == out_layout
        if not lies or max(other.stride()) >= 2**31:
            return False
    if values.data_ptr() % 16:
        return False
    new = (m if out_layout == "col" else b.shape[-1]) * b.element_size() % 16 == 0
    return (new if out is None else True) and operands.aligned(b, out, other)


def epilogue_parts(epilogue: Epilogue, out: Tensor | None) -> tuple[bool, bool, str, str, bool]:
    """The fields of an SpmmProblem that describe an epilogue: scaled, bias, activation, combine, in_place."""
    if epilogue.is_plain:
        return False, False, "", "", False
    other = epilogue.other
    in_place = other is not None and out is not None and operands.same_memory(other, out)
    combine = "" if other is None else epilogue.combine
    return epilogue.alpha != 1, epilogue.bias is not None, epilogue.activation, combine, in_place


def formula(p: SpmmProblem | Problem24, product: str) -> str:
    """What becomes of the product, in words: "gelu(A @ B + bias) + other"."""
    return formula_of(p.scaled, p.bias, p.activation, p.combine, p.in_place, product)


def formula_of(scaled: bool, bias: bool, activation: str, combine: str, in_place: bool, product: str) -> str:
    inner = f"alpha * {product}" if scaled else product
    inner = f"{inner} + bias" if bias else inner
    if activation:
        inner = f"{activation}({inner})"
    elif combine == "mul" and bias:
        inner = f"({inner})"
    other = "C" if in_place else "other"
    return {"": inner, "add": f"{inner} + beta * {other}", "mul": f"{inner} * {other}"}[combine]
