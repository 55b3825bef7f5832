"""The plan of C = A @ B with a sparse matrix on either side: BSR, Semi24 or BSR24, quantized to FP8 or not.

B, bf16    -- rounded to FP8 by one kernel, a scale per column -->  B8     (if A is FP8 and B is not)
A, B       -- a kernel -->  C = act(alpha * A @ B + bias) + other, for FP8 with scales on the sums

A kernel with the attribute `rounds` takes B in bf16, and rounds it itself, unless C is given.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsek.core import arguments, dtypes, memory, tracing
from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.streams import Ready, captured
from sparsek.engine.plan.plan import Plan, bound_seconds
from sparsek.engine.plan.select import Candidate, Choice
from sparsek.products.formats.base import ALIGNMENT
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Matrix, Quantized, SparseMatrix
from sparsek.products.formats.quantized_tensor import QuantizedTensor, quantize_dense
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import unread_stats
from sparsek.products.plan import operands
from sparsek.products.plan.kernels import rounding_seconds
from sparsek.products.plan.problems import DenseSpec, SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

OTHER_LAYOUT = {"row": "col", "col": "row", "strided": "strided"}
E4M3 = torch.float8_e4m3fn
ANEW = "call plan_spmm(A, B) for this A, or spmm(A, B)"

Dense = Tensor | QuantizedTensor


class Product(NamedTuple):
    """A call in the form that kernels take: the sparse matrix on the left, b [..., K, N].

    `transposed`: A is the transpose of `a`, a 2:4 matrix, which has no transposed view. `out_layout` is "col" if the
    sparse matrix was on the right: B @ A is (A.T @ B.mT).mT, and C is then the transpose view of the caller's result.
    `dtype` is C's.
    """

    a: SparseMatrix
    transposed: bool
    b: Dense
    out: Tensor | None
    epilogue: Epilogue
    out_layout: str
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        a: Any,
        b: Any,
        out: Tensor | None = None,
        epilogue: Epilogue = PLAIN,
        dtype: torch.dtype | None = None,
        predicted: bool = False,
    ) -> Product:
        """The form of a @ b, one of them sparse, checked. Makes views only. `epilogue` refers to the caller's C.

        Leading dims of a dense left operand become rows, if all matrices have collapsible leading dims. `predicted`:
        the product is not computed, so the dense one may be on the meta device.
        """
        operands.check_operands(a, b, predicted)
        if out is not None:
            operands.check_out(a, b, out, epilogue)
            if dtype is not None and dtype is not out.dtype:
                raise InvalidInput(
                    f"dtype= is {arguments.shown(dtype)} and out {out.dtype}; leave one of them away"
                )
        on_left = operands.is_sparse(a)
        found = dtype_of(a, b, dtype) if on_left else dtype_of(b, a, dtype)
        dtype, other, slope = (found if out is None else out.dtype), epilogue.other, epilogue.slope
        if on_left:
            return cls(a, False, b, out, epilogue, "row", dtype).fitting()
        lies = not a.turned if isinstance(a, QuantizedTensor) else joins(a, a)
        if a.ndim > 2 and lies and all(x is None or joins(x, a) for x in (out, other, slope)):
            a = a.rows() if isinstance(a, QuantizedTensor) else a.flatten(0, -2)
            out, other, slope = (None if x is None else x.flatten(0, -2) for x in (out, other, slope))
        epilogue = _turned(epilogue, other, slope)
        stands, transposed = (b, True) if isinstance(b, (Semi24, BSR24)) else (b.T, False)
        out = None if out is None else out.mT
        return cls(stands, transposed, a.mT, out, epilogue, "col", dtype).fitting()

    @classmethod
    def layer(
        cls, x: Dense, w: SparseMatrix, epilogue: Epilogue = PLAIN, dtype: torch.dtype | None = None
    ) -> Product:
        """The form of x [..., K] @ w.T, which is (w @ x.T).T, for w [N, K]. `epilogue` refers to [..., N], and is
        checked.
        """
        dtype = dtype_of(w, x, dtype)
        rows: Any = x.rows() if isinstance(x, QuantizedTensor) else tokens(x)
        other, slope = (None if x is None else tokens(x) for x in (epilogue.other, epilogue.slope))
        return cls(w, False, rows.mT, None, _turned(epilogue, other, slope), "col", dtype).fitting()

    @property
    def shape(self) -> tuple[int, int]:
        """M, K of the product."""
        rows, columns = self.a.shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def matrix(self) -> Matrix:
        """The sparse matrix without its scales."""
        return self.a.matrix if isinstance(self.a, Quantized) else self.a

    @property
    def wide(self) -> Tensor | None:
        """B before rounding; None for a B that was FP8."""
        return self.b if isinstance(self.b, Tensor) else None

    def seen(self, c: Tensor, a: Any) -> Tensor:
        """The caller's C from the result of `SpmmPlan.run`; `a` is the caller's left operand, with its leading dims."""
        if self.out_layout == "row" or c.shape[:-1] == a.shape[:-1]:
            return c
        return c.view(*a.shape[:-1], c.shape[-1])

    def fitting(self) -> Product:
        """This call. InvalidInput unless the epilogue fits the operands, which fit each other."""
        if self.epilogue is not PLAIN:
            shape = (*self.b.shape[:-2], self.shape[0], self.b.shape[-1])
            operands.check_epilogue(self.epilogue, shape, self.dtype, self.b.device, self.out_layout)
        return self

    @property
    def like(self) -> Tensor:
        return self.b if isinstance(self.b, Tensor) else self.b.values

    def problem(self, card: Card, counted: bool = True) -> SpmmProblem:
        """The call without its tensors, on `card`. `counted`: with the statistics of A's blocks."""
        m, k = self.shape
        b, epilogue = self.b, self.epilogue
        other, plain = epilogue.other, epilogue.is_plain
        if isinstance(self.a, Quantized):
            wide = isinstance(b, Tensor)
            dtype, rounds = (E4M3, dtypes.name(b.dtype)) if wide else (b.dtype, "")
            scale = "column" if wide or b.kind == "row" else "tensor"
            of_b = DenseSpec(dtypes.FP8[dtype], "col", scale, rounds)
        else:
            assert isinstance(b, Tensor)
            of_b = DenseSpec(dtypes.name(b.dtype), operands.layout(b))
        return SpmmProblem(
            a=self.a.storage(self.transposed, counted),
            b=of_b,
            c=DenseSpec(dtypes.name(self.dtype), self.out_layout),
            m=m,
            k=k,
            n=b.shape[-1],
            card=card,
            batch=b.shape[:-2].numel(),
            aligned=self.is_aligned,
            tf32=operands.allows_tf32(b.dtype) and not isinstance(self.a, Quantized),
            has_alpha=epilogue.alpha != 1,
            bias=epilogue.bias is not None,
            activation=epilogue.activation,
            combine="" if plain or other is None else epilogue.combine,
            in_place=self._in_place,
            slope=epilogue.slope is not None,
            rounded_before=bool(of_b.rounds) and self.out is not None,
        )

    def key(self) -> tuple[Any, ...]:
        """Everything that the plan depends on, except A's owner: calls with equal keys share a plan."""
        a, transposed, b, out, epilogue, out_layout, dtype = self
        if isinstance(a, Quantized):
            matrix = a.matrix
            stored = type(matrix), a.kind, a.fast_accum
            dense = (
                (b.shape, 0)
                if isinstance(b, Tensor)
                else (b.values.shape, b.scale.ndim, b.values.data_ptr() % 16)
            )
        else:
            assert isinstance(b, Tensor)
            matrix, stored = a, type(a)
            dense = b.shape, b.stride(), b.data_ptr() % 16, operands.allows_tf32(b.dtype)
        values = matrix.values
        view = transposed or (type(matrix) is BSR and matrix.order is not None)
        key = stored, view, values.dtype, values.data_ptr() % 16, b.dtype, dense, out_layout, dtype
        if out is None and (epilogue is PLAIN or epilogue.is_plain):
            return key
        beside = out, epilogue.other, epilogue.slope
        layouts = [None if x is None else (x.stride(), x.data_ptr() % 16) for x in beside]
        combine = epilogue.combine if epilogue.other is not None else ""
        settings = (
            epilogue.alpha != 1,
            epilogue.bias is not None,
            epilogue.activation,
            combine,
            self._in_place,
        )
        return *key, *layouts, *settings

    def plan_owner(self) -> PlanOwner:
        return self.a.plan_owner()

    def prepare(self, p: SpmmProblem, choice: Choice) -> Any:
        a = self.a
        if not isinstance(a, BSR) or not a.is_unread or captured(self.like):
            return choice.kernel.prepare(p, choice.config, a)
        key = operands.work_key(choice.kernel, choice.config, p, a.pattern.indptr)
        return a.pattern.derived(key, lambda: choice.kernel.prepare(p, choice.config, a))

    def about(self) -> dict[str, Any]:
        pattern = getattr(self.matrix, "pattern", None)
        return {"pattern": None if pattern is None else weakref.ref(pattern)}

    @property
    def is_aligned(self) -> bool:
        """Whether A's values, B, C and the epilogue's matrix begin and step by multiples of 16 bytes.

        The epilogue's matrix must have C's layout, and strides below 2^31 elements. Of an FP8 B its values count,
        along K.
        """
        a, _, b, out, epilogue, out_layout, dtype = self
        other = epilogue.other
        if other is not None:
            lies = 1 in other.shape[-2:] or operands.layout(other) == out_layout
            if not lies or max(other.stride()) >= 2**31:
                return False
        if a.values.data_ptr() % ALIGNMENT:
            return False
        if isinstance(a, Quantized):
            start = 0 if isinstance(b, Tensor) else b.values.data_ptr()
            if b.shape[-2] % ALIGNMENT or start % ALIGNMENT:
                return False
        elif not operands.aligned(self.wide):
            return False
        row = self.shape[0] if out_layout == "col" else b.shape[-1]
        return (row * dtype.itemsize % ALIGNMENT == 0 if out is None else True) and operands.aligned(
            out, other, epilogue.slope
        )

    @property
    def _in_place(self) -> bool:
        other, out = self.epilogue.other, self.out
        return other is not None and out is not None and memory.same_memory(other, out)


@dataclass(frozen=True, eq=False, repr=False)
class SpmmPlan(Plan):
    """How to multiply sparse matrices of one kind with dense ones of one shape, with an epilogue.

    Call it as it was planned: `plan(A, B, out=None, epilogue=...)`, with the sparse matrix on the same side; the plan
    of a `layer` as `plan(x, W, epilogue=...)`. `problem` is an SpmmProblem. `pattern` is a weak reference to the
    pattern of A as a left operand. A plan fits matrices of that pattern; for a Semi24 it is None, and the plan fits
    every Semi24 of its shape. `limit`: the most stored blocks of a retargeted plan.
    """

    problem: SpmmProblem
    pattern: Callable[[], BlockPattern | None] | None = None
    layer: bool = False
    limit: int | None = None
    # Set by the operations above plans: the fast path of `plan(A, B)`; without it every call is checked.
    quick: ClassVar[Callable[..., Tensor] | None] = None
    # The key of the last call that was checked.
    _passed: list[Any] = field(default_factory=list, init=False)

    @property
    def on_right(self) -> bool:
        """Whether the sparse matrix is the right operand."""
        return self.problem.c.layout == "col"

    def __call__(self, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Tensor:
        """C = A @ B for operands as planned. No host sync.

        `out`, of C's shape, is overwritten. `epilogue` has the parts that were planned. Raises InvalidInput for other
        operands. Values may change between calls, the pattern may not.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spmm(A, B) there")
        if self.quick is not None and out is None and epilogue is PLAIN:
            return self.quick(a, b)
        return self.checked(a, b, out, epilogue)

    def checked(self, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Tensor:
        """The result of a call, after its checks."""
        self.refuse_unless_ready()
        operands.check_given(epilogue)
        dtype = dtypes.parse(self.problem.c.dtype)
        if self.layer:
            if out is not None:
                raise InvalidInput("a plan of a layer allocates its output; omit out=")
            operands.check_layer(a, b)
            call = Product.layer(a, b, epilogue, dtype if isinstance(b, Quantized) else None)
        else:
            on_left = operands.is_sparse(a)
            if on_left != operands.is_sparse(b) and on_left == self.on_right:
                side = "right" if self.on_right else "left"
                raise InvalidInput(f"this plan was made for a sparse matrix on the {side}; {ANEW}")
            scaled = (isinstance(a, Quantized) or isinstance(b, Quantized)) and out is None
            call = Product.of(a, b, out, epilogue, dtype if scaled else None)
        if tracing.wants_gradient(call.a.values, call.wide, epilogue.bias, epilogue.other):
            raise InvalidInput(operands.PLAN_HAS_NO_GRADIENT.format(op="spmm"))
        if tracing.wants_gradient(out):
            raise InvalidInput(operands.OUT_HAS_NO_GRADIENT)
        self._check_planned(call)
        c = self.run(call, captured(call.a.values))
        if out is None:
            return call.seen(c, a)
        increment_version(out)  # kernels write by its address, which autograd does not see
        return out

    def _allocated(self, call: Product) -> tuple[Tensor, tuple[Any, ...] | None]:
        """C row-major: in the kernels' form [..., M, N], or [..., N, M] if c.layout is "col"."""
        p, a, b, out, epilogue = self.problem, call.a, call.b, call.out, call.epilogue
        by_columns = p.c.layout == "col"
        if epilogue.alpha == 0:
            return _without_product(call, p), None
        if epilogue.other is not None and epilogue.combine == "add" and epilogue.beta == 0:
            epilogue = _without_other(call)
        if out is None:  # before the rounding: a recorded call allocates at once
            c = new_rows(b, p.m, by_columns, dtypes.parse(p.c.dtype))
            out = c.mT if by_columns else c
        else:
            c = out.mT if by_columns else out
        # A given C may lie in the memory of B, so B is then rounded before the kernel that writes C.
        inside = call.out is None and getattr(self.choice.kernel, "rounds", False)
        if isinstance(a, Quantized) and isinstance(b, Tensor) and not inside:
            b = quantize_dense(b.mT, E4M3, "row", check=False, together=True).mT
        return c, (a, b, out, epilogue) if out.numel() else None

    def retarget(self, a: BSR) -> SpmmPlan:
        """This plan for a matrix whose blocks have moved: same shape, same block, and at most as many stored.

        `a` is the BSR as oriented in the product. Its schedule is made on the device, without a host sync, as for
        a pattern of `BlockPattern.unchecked`; a new `plan_spmm` may join or split rows. Raises InvalidInput for another
        shape, block, device or more blocks.
        """
        self.refuse_unless_ready()
        p = self.problem
        if not isinstance(a, BSR) or p.a.kind != "bsr":
            raise InvalidInput(
                f"only a plan of a BSR can be retargeted, to a BSR; this is one of {p.a.kind}, got {type(a).__name__}"
            )
        turned = self.on_right and not self.layer
        stands = a.T if turned else a
        old, limit = self.pattern and self.pattern(), self.limit or p.nnzb
        new = stands.pattern
        same = (new.shape, new.block, stands.order is not None) == ((p.m, p.k), p.block, p.a.transposed)
        if not same or new.nnzb > limit or dtypes.name(a.dtype) != p.dtype:
            sides, block = ((p.k, p.m), p.block[::-1]) if turned else ((p.m, p.k), p.block)
            view = ", a transposed view" if p.a.transposed != turned else ""
            raise InvalidInput(
                f"this plan can be retargeted to {p.dtype} matrices of {sides[0]}x{sides[1]} in blocks of "
                f"{block[0]}x{block[1]}{view}, with at most {limit} stored; got {a!r}"
            )
        if old is not None and new.device != old.device:
            raise InvalidInput(f"this plan is on {old.device} and A on {new.device}")
        unread = replace(p, a=replace(p.a, blocks=unread_stats(new)))
        kernel = getattr(self.choice.kernel, "successor", self.choice.kernel)
        if why_not := kernel.why_not(unread):
            raise Unsupported(f"{kernel.name} cannot take another pattern", {kernel.name: tuple(why_not)})
        config = self.choice.config
        if config not in kernel.configs(unread):  # it joins or splits rows, or is of another kernel
            config = kernel.default(unread)
        seconds = max(kernel.seconds(unread, config), bound_seconds(unread))
        choice = Choice(kernel, config, (Candidate(kernel.name, config, seconds),))
        work, made = kernel.prepare(unread, config, stands), Ready.here(new.device)
        pattern = weakref.ref(new)
        return replace(
            self, problem=unread, choice=choice, work=work, pattern=pattern, limit=limit, made=made
        )

    def headline(self) -> list[str]:
        p = self.problem
        return [f"C = {formula(p, self._product(p))}   {self._words(p)}, on {p.card.name}"]

    def details(self) -> list[str]:
        p, lines = self.problem, super().details()
        if p.a.quantized and p.b.rounds:
            copied = p.stored * dtypes.parse(p.c.dtype).itemsize / 1e6
            lines.insert(
                0, f"  gradient   that of B dequantizes A to {p.c.dtype}, into a workspace of {copied:.3g} MB"
            )
        if spent := rounding_seconds(p):
            inside = getattr(self.choice.kernel, "rounds", False) and not p.rounded_before
            how = "the kernel rounds" if inside else f"{spent * 1e6:.1f} us of it to round"
            more = ""
            if inside and not self.layer:
                given = replace(p, rounded_before=True)
                longer = self.implementation.seconds(given, self.config) - self.seconds
                more = f"; with out= a launch before it does, {longer * 1e6:.1f} us more"
            lines.insert(0, f"  rounding   {how} B from {p.b.rounds} to {p.b.dtype}{more}")
        return lines

    def _product(self, p: SpmmProblem) -> str:
        if p.c.layout == "col":
            return "B @ A.T" if self.layer else "B @ A"
        return "A.T @ B" if p.a.two_four and p.a.transposed else "A @ B"

    def _words(self, p: SpmmProblem) -> str:
        """The operands of a problem like this plan's, as text, in the caller's form."""
        turned = (p.c.layout == "col" and not self.layer) or (p.a.two_four and p.a.transposed)
        rows, columns = (p.k, p.m) if turned else (p.m, p.k)
        stored = "2:4"
        if p.a.blocks is not None:
            bm, bk = p.block[::-1] if turned else p.block
            inside = "2:4 in " if p.a.two_four else ""
            stored = f"{inside}{p.nnzb} blocks of {bm}x{bk} ({100 * p.density:.3g} % stored)"
        scale = f", a scale per {p.a.scale}" if p.a.quantized else ""
        right, batch = p.c.layout == "col", f"{p.batch} x " if p.batch != 1 else ""
        dense = f"{batch}{[p.n, p.k] if right else [p.k, p.n]}"
        if not p.a.quantized:
            lies = OTHER_LAYOUT[p.b.layout] if right else p.b.layout
            other = "" if p.b.dtype == p.dtype else f" {p.b.dtype}"
            return f"A [{rows}, {columns}] {p.dtype}, {stored}, B {dense}{other} {lies}-major"
        came = f"{p.b.rounds}, rounded to {p.b.dtype}" if p.b.rounds else p.b.dtype
        shares = "row" if right and p.b.scale == "column" else p.b.scale
        sums = ", fast_accum" if p.a.fast_accum else ""
        return (
            f"A [{rows}, {columns}] {p.dtype}{scale}, {stored}, B {dense} {came}, a scale per {shares}, "
            f"C {p.c.dtype}{sums}"
        )

    def _dense(self, p: SpmmProblem) -> str:
        """The dense operand of a problem like this plan's, in the caller's form."""
        right = p.c.layout == "col"
        name, sides = ("x" if self.layer else "A", [p.n, p.k]) if right else ("B", [p.k, p.n])
        lies = OTHER_LAYOUT[p.b.layout] if right else p.b.layout
        came = f"{p.b.rounds}, rounded to {p.b.dtype}," if p.b.rounds else p.b.dtype
        how = f"a scale per {p.b.scale}" if p.b.scale else f"{lies}-major"
        return f"{came} {name} of {p.batch} x {sides}, {how}"

    def _check_planned(self, call: Product) -> None:
        p = self.problem
        ours = getattr(call.matrix, "pattern", None)
        known = call.key()
        planned = None if self.pattern is None else self.pattern()
        if self._passed == [known] and ours is planned and call.shape == (p.m, p.k):
            return
        found = call.problem(p.card, counted=False)  # counting blocks of a new pattern may wait for the GPU
        kinds = [(each.a.two_four, each.a.quantized, each.a.transposed) for each in (p, found)]
        fits = kinds[0] == kinds[1] and (p.m, p.k) == (found.m, found.k)
        if ours is not planned or not fits:
            blocks = kinds[0][:2] == kinds[1][:2] and ours is not None and planned is not None
            what = "another pattern of blocks" if blocks else "another matrix"
            raise InvalidInput(
                f"this plan was made for {what}; {ANEW}. It multiplies {self._words(p)}; got {call.a!r}"
            )
        if _operands(found) != _operands(p):
            found = call.problem(p.card)
            dense = self._dense(p), self._dense(found)
            mine, others = dense if dense[0] != dense[1] else (self._words(p), self._words(found))
            raise InvalidInput(f"this plan multiplies {mine}; got {others}. Plan anew, or call spmm(A, B)")
        if _epilogue(found) != _epilogue(p):
            raise InvalidInput(
                f"this plan was made for C = {formula(p, 'A @ B')}; got {formula(found, 'A @ B')}. Pass the "
                "planned epilogue, epilogue=..., or plan with this one"
            )
        if p.aligned and not found.aligned:
            raise InvalidInput(
                "this plan needs pointers and leading strides of A's values, B and out that are multiples of 16 bytes; "
                "spmm(A, B) takes any"
            )
        self._passed[:] = [known]


def _turned(epilogue: Epilogue, other: Tensor | None, slope: Tensor | None) -> Epilogue:
    """The epilogue with the transposes of these matrices."""
    if other is None and slope is None:
        return epilogue
    return replace(
        epilogue, other=None if other is None else other.mT, slope=None if slope is None else slope.mT
    )


def _operands(p: SpmmProblem) -> tuple[Any, ...]:
    return replace(p.a, blocks=None), p.b, p.c, p.n, p.batch


def _epilogue(p: SpmmProblem) -> tuple[Any, ...]:
    return p.has_alpha, p.bias, p.activation, p.combine, p.in_place, p.slope


def dtype_of(sparse: SparseMatrix, dense: Dense, requested: torch.dtype | None) -> torch.dtype:
    """C's dtype: that of the operands; in FP8 `dtype`, or that of a dense operand before rounding, or bf16."""
    if isinstance(sparse, Quantized):
        if requested is not None:
            return arguments.dtype("dtype", requested, operands.OUT_DTYPES)
        return dense.dtype if isinstance(dense, Tensor) else torch.bfloat16
    if requested is not None:
        raise InvalidInput("dtype= is for products of FP8 matrices; others have the dtype of their operands")
    return dense.dtype


def joins(x: Any, a: Any) -> bool:
    """Whether `x` has the leading dims of `a`, and they collapse into the rows of one matrix."""
    if x.shape[:-1] != a.shape[:-1] or x.numel() == 0:
        return False
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def tokens(x: Tensor) -> Tensor:
    """x [..., K] as [T, K]: a view if its dims collapse."""
    # Not Size.numel(), which torch.compile takes for a constant.
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def new_rows(b: Dense, m: int, by_columns: bool, dtype: torch.dtype) -> Tensor:
    """An uninitialised row-major C: [..., M, N], or [..., N, M] if `by_columns`."""
    *batch, _, n = b.shape
    # torch.empty returns another tensor than a recorder sees; a recorded call then makes a view of C every time.
    like = b if isinstance(b, Tensor) else b.values
    return like.new_empty((*batch, n, m) if by_columns else (*batch, m, n), dtype=dtype)


def _without_product(call: Product, p: SpmmProblem) -> Tensor:
    """C for an alpha of 0, row-major: the epilogue of zeros. A and B are not read, whatever they hold."""
    by_columns, out = p.c.layout == "col", call.out
    if out is None:
        c = new_rows(call.b, p.m, by_columns, dtypes.parse(p.c.dtype))
        out = c.mT if by_columns else c
    else:
        c = out.mT if by_columns else out
    wide = torch.promote_types(out.dtype, torch.float32)
    out.copy_(call.epilogue.apply(torch.zeros(out.shape, dtype=wide, device=out.device)))
    return c


def _without_other(call: Product) -> Epilogue:
    """The epilogue for a beta of 0: its other matrix is zeros, so no NaN or Inf in it reaches C."""
    other = call.epilogue.other
    assert other is not None
    return replace(call.epilogue, other=other.zero_() if call._in_place else torch.zeros_like(other))


def formula(p: SpmmProblem, product: str) -> str:
    """The formula of the product with its epilogue: "gelu(A @ B + bias) + other"."""
    inner = f"alpha * {product}" if p.has_alpha else product
    inner = f"{inner} + bias" if p.bias else inner
    if p.activation:
        inner = f"{p.activation}({inner})"
    elif p.combine == "mul" and p.bias:
        inner = f"({inner})"
    other = "C" if p.in_place else "other"
    whole = {"": inner, "add": f"{inner} + beta * {other}", "mul": f"{inner} * {other}"}[p.combine]
    return f"{whole}, and the slope of {p.activation}" if p.slope else whole
