"""The plan of C = A @ B with a Semi24 or a BSR24 on either side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.semi24 import Semi24
from sparsek.plan import operands
from sparsek.plan.kernel import Kernel
from sparsek.plan.plan import Plan
from sparsek.plan.problem import BSR24Problem, Problem24
from sparsek.plan.spmm import OTHER_LAYOUT, epilogue_parts, formula, formula_of, is_aligned, joins, new_rows
from sparsek.reference.epilogue import PLAIN, Epilogue

Matrix24 = Semi24 | BSR24
VALUES_HAVE_NO_GRADIENT = (
    "the values of a {kind} ask for a gradient, which products of 2:4 matrices do not compute; use A.detach(). "
    "Gradients reach the dense operand, the bias and the residual"
)


class Kernel24(Kernel[Any], Protocol):
    """One implementation of C = A @ B for a Semi24 or a BSR24, or for its transpose, with an epilogue.

    A kernel may have a method `make(c, work, a, b, epilogue, by_columns)`, which returns C as `Plan24.run` does, in a
    tensor of its own, or None where it can only write to an `out`.
    """

    def prepare(self, p: Any, c: Any, a: Any) -> Any:
        """Work that is done once per plan. `a` is as stored; that it stands transposed `p` says, and the work must."""
        ...

    def launch(self, c: Any, work: Any, a: Any, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        """Runs. `out` [..., M, N] is preallocated and fully overwritten; it lies as the problem's `out_layout` says."""
        ...


class Product24(NamedTuple):
    """A call in the form that kernels take: the 2:4 matrix, or its transpose, on the left.

    `out_layout` is "col" where it stood on the right, as in `plan.spmm.Product`.
    """

    a: Matrix24
    transposed: bool
    b: Tensor
    out: Tensor | None
    epilogue: Epilogue
    out_layout: str

    @classmethod
    def of(cls, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Product24:
        """The form of a @ b, one of them a 2:4 matrix. By views only. `epilogue` is about C as the caller sees it."""
        if not isinstance(a, Tensor):
            return cls(a, False, b, out, epilogue, "row")
        other = epilogue.other
        if a.dim() > 2 and all(x is None or joins(x, a) for x in (a, out, other)):
            a, out, other = (None if x is None else x.flatten(0, -2) for x in (a, out, other))
        if other is not None:
            epilogue = replace(epilogue, other=other.mT)
        return cls(b, True, a.mT, None if out is None else out.mT, epilogue, "col")

    @classmethod
    def linear(cls, x: Tensor, w: Matrix24, epilogue: Epilogue = PLAIN) -> Product24:
        """The form of x [..., K] @ w.T, which is (w @ x.T).T, for w [N, K]. `epilogue` is about [..., N]."""
        rows, other = x.reshape(-1, x.shape[-1]), epilogue.other
        if other is not None:
            epilogue = replace(epilogue, other=other.reshape(-1, other.shape[-1]).mT)
        return cls(w, False, rows.mT, None, epilogue, "col")

    @property
    def shape(self) -> tuple[int, int]:
        """M, K of the product."""
        rows, columns = self.a.shape
        return (columns, rows) if self.transposed else (rows, columns)

    def seen(self, c: Tensor, a: Any) -> Tensor:
        """C as `Plan24.run` leaves it as the caller sees it, who gave `a` as the left operand: its leading dims."""
        if self.out_layout == "row" or c.shape[:-1] == a.shape[:-1]:
            return c
        return c.view(*a.shape[:-1], c.shape[-1])

    def check_epilogue(self) -> None:
        """InvalidInput unless the epilogue fits the operands, which fit each other."""
        operands.check_epilogue(self.shape[0], self.b, self.epilogue, self.out_layout)


@dataclass(frozen=True, eq=False, repr=False)
class Plan24(Plan):
    """How to multiply 2:4 matrices of one shape with dense ones, and what to do to the product.

    Call it as it was planned: `plan(A, B, out=None, epilogue=...)`, the 2:4 matrix on the side where it was; a plan of
    a layer as `plan(x, W, epilogue=...)`. A plan of a Semi24 fits every Semi24 of that shape; one of a BSR24 every
    BSR24 of that `pattern`, a weak reference.
    """

    pattern: Callable[[], BlockPattern | None] | None = None
    made: Ready | None = None

    @property
    def on_right(self) -> bool:
        """The 2:4 matrix is the right operand."""
        return self.problem.out_layout == "col"

    @property
    def of_layer(self) -> bool:
        """What is planned is x @ W.T."""
        return self.on_right and not self.problem.transposed

    def __call__(self, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Tensor:
        """C = A @ B for operands as planned. No host sync, but where vendor.cusparselt compresses values anew.

        `out`, of C's shape, is overwritten. `epilogue` has the parts that were planned. Raises InvalidInput for other
        operands.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spmm(A, B) there")
        self.refuse_unless_ready()
        operands.check_given(epilogue)
        product = self._product(a, b, out, epilogue)
        product.check_epilogue()
        if operands.wants_gradient(product.a.values, product.b, epilogue.bias, epilogue.other):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="spmm"))
        self._check_planned(product)
        c = self.run(product, captured(product.b))
        return product.seen(c, a) if out is None else out

    def run(self, product: Product24, capturing: bool) -> Tensor:
        """The call without its checks, for operands that are known to fit. `capturing`: a CUDA graph is.

        Returns C by rows: in the kernels' form [..., M, N], or [..., N, M] where `out_layout` is "col".
        """
        a, _, b, out, epilogue, out_layout = product
        if operands.autocasts(b):
            with dtypes.as_given(b.device):
                return self.run(product, capturing)
        by_columns = out_layout == "col"
        kernel, config, _ = self.choice
        p: Problem24 = self.problem
        if self.made is not None and not capturing:
            wait_for(self.made, tensors_in(self.work))
        make = getattr(kernel, "make", None)
        if out is None and make is not None and p.m * p.n * p.batch:
            made = make(config, self.work, a, b, epilogue, by_columns)
            if made is not None:
                return made
        if out is None:
            c = new_rows(b, p.m, by_columns)
            out = c.mT if by_columns else c
        else:
            c = out.mT if by_columns else out
        if out.numel():
            kernel.launch(config, self.work, a, b, out, epilogue)
        return c

    def headline(self) -> list[str]:
        p: Problem24 = self.problem
        batch = f"{p.batch} x " if p.batch != 1 else ""
        rows, columns = (p.k, p.m) if p.transposed else (p.m, p.k)
        product, dense, lies = "A @ B", [p.k, p.n], p.b_layout
        if self.on_right:
            product = "B @ A" if p.transposed else "B @ A.T"
            dense, lies = dense[::-1], OTHER_LAYOUT[lies]
        elif p.transposed:
            product = "A.T @ B"
        stored = "2:4"
        if isinstance(p, BSR24Problem):
            bm, bk = p.block[::-1] if p.transposed else p.block
            stored = f"2:4 in {p.nnzb} blocks of {bm}x{bk} ({100 * p.density:.3g} % stored)"
        line = f"C = {formula(p, product)}   A [{rows}, {columns}] {p.dtype}, {stored}, B {batch}{dense} {lies}-major"
        return [f"{line}, on {p.card.name}"]

    def _product(self, a: Any, b: Any, out: Tensor | None, epilogue: Epilogue) -> Product24:
        """The call in the kernels' form, if its operands fit each other."""
        if self.of_layer:
            if out is not None:
                raise InvalidInput("a plan of a layer makes its output; leave out= away")
            check_layer(a, b)
            return Product24.linear(a, b, epilogue)
        check_operands(a, b)
        if out is not None:
            operands.check_out(a, b, out, epilogue)
        return Product24.of(a, b, out, epilogue)

    def _check_planned(self, product: Product24) -> None:
        p: Problem24 = self.problem
        a, transposed, b, out, epilogue, _ = product
        if isinstance(a, BSR24):
            same = self.pattern is not None and self.pattern() is a.pattern
        else:
            same = self.pattern is None
        if not same or product.shape != (p.m, p.k) or transposed != p.transposed:
            rows, columns = (p.k, p.m) if p.transposed else (p.m, p.k)
            kind = "Semi24" if self.pattern is None else "BSR24 of one pattern"
            raise InvalidInput(
                f"this plan was made for a {kind} [{rows}, {columns}], got {type(a).__name__} {list(a.shape)}; "
                "call plan_spmm(A, B) for this A, or spmm(A, B)"
            )
        batch, layout = b.shape[:-2].numel(), operands.layout(b)
        if (batch, b.shape[-1], layout, dtypes.name(b.dtype)) != (p.batch, p.n, p.b_layout, p.dtype):
            raise InvalidInput(
                f"this plan multiplies a dense {p.dtype} {p.batch} x {[p.k, p.n]}, {p.b_layout}-major as the kernel "
                f"sees it; got {b.dtype} {list(b.shape)}, {layout}-major"
            )
        parts = epilogue_parts(epilogue, out)
        if parts != (p.scaled, p.bias, p.activation, p.combine, p.in_place):
            raise InvalidInput(
                f"this plan was made for C = {formula(p, 'A @ B')}; got {formula_of(*parts, 'A @ B')}. Hand over the "
                "epilogue that was planned, epilogue=..., or plan with this one"
            )
        if (p.aligned and not lies_aligned(product)) or (p.gapless and not gapless(b)):
            raise InvalidInput(
                "this plan needs pointers and leading strides that are multiples of 16 bytes, and a dense operand "
                "without gaps if it had none; spmm(A, B) takes any"
            )


def check_operands(a: Any, b: Any) -> None:
    """InvalidInput unless one operand is a Semi24 or a BSR24 and the other a dense tensor that fits it."""
    on_left = isinstance(a, (Semi24, BSR24))
    if not on_left and not isinstance(b, (Semi24, BSR24)):
        raise InvalidInput(
            f"A or B must be a Semi24 or a BSR24, got {type(a).__name__} and {type(b).__name__}"
        )
    name, each, other, dense = ("A", a, "B", b) if on_left else ("B", b, "A", a)
    if not isinstance(dense, Tensor):
        raise InvalidInput(
            f"{other} must be a dense torch.Tensor, got {type(dense).__name__}; a {type(each).__name__} is multiplied "
            "with dense matrices only"
        )
    operands.check_dense(other, dense, each.values, name)
    if dense.dim() < 2:
        sides, how = ("[K, N] or [..., K, N]", "-1") if name == "A" else ("[M, K] or [..., M, K]", "0")
        raise InvalidInput(
            f"{other} must be {sides}, got {dense.dim()}-D; for a vector use {other}.unsqueeze({how})"
        )
    if name == "A" and dense.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if name == "B" and dense.shape[-1] != b.shape[0]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: A needs {b.shape[0]} columns")


def check_layer(x: Any, w: Any) -> None:
    """InvalidInput unless w [N, K] is a Semi24 or a BSR24 and x [..., K] a dense tensor that fits it."""
    if not isinstance(w, (Semi24, BSR24)):
        raise InvalidInput(f"W must be a Semi24 or a BSR24, got {type(w).__name__}")
    operands.check_linear(x, w, None, None, None)


def gapless(b: Tensor) -> bool:
    """Whether every matrix of b [..., K, N] is contiguous, or the transpose view of a contiguous one."""
    k, n = b.shape[-2:]
    return b.stride()[-2:] in ((n, 1), (1, k))


def lies_aligned(call: Product24) -> bool:
    """Whether A's values, B, C and the epilogue's matrix begin and step by multiples of 16 bytes."""
    return is_aligned(call.a.values, call.b, call.out, call.epilogue.other, call.shape[0], call.out_layout)


def facts(call: Product24) -> tuple[Any, ...]:
    """All of a call that its plan depends on but a pattern: calls alike in this fit the same plan."""
    a, transposed, b, out, epilogue, out_layout = call
    starts = a.values.data_ptr() % 16, b.data_ptr() % 16
    told = transposed, out_layout, a.shape, b.shape, b.stride(), b.dtype, starts
    if out is None and epilogue.is_plain:
        return told
    more = [None if x is None else (x.stride(), x.data_ptr() % 16) for x in (out, epilogue.other)]
    return *told, *more, *epilogue_parts(epilogue, out)
