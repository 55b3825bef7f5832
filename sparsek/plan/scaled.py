"""The plan of C = A @ B with an FP8 matrix A, on either side, and what kernels of such products agree to do.

B, bf16    -- rounded, by one kernel, a scale for each column -->  B8     (not if B came in FP8)
A8, B8     -- a kernel of this protocol -->  C = act(alpha * scale_A * scale_B * (A8 @ B8) + bias) ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured, tensors_in, wait_for
from sparsek.matrix.bsr import BSR
from sparsek.matrix.dense8 import ScaledTensor, quantize_dense
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import Scaled
from sparsek.matrix.semi24 import Semi24
from sparsek.plan import operands
from sparsek.plan.kernel import Kernel
from sparsek.plan.plan import Plan
from sparsek.plan.problem import ScaledProblem, ScaledSemi24Problem
from sparsek.plan.spmm import epilogue_parts, formula_of, joins
from sparsek.reference.epilogue import PLAIN, Epilogue

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16
MATRICES = {"spmm_fp8": "BSR", "semi24_fp8": "Semi24", "bsr24_fp8": "BSR24"}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NO_GRADIENT = (
    "products of FP8 matrices have no gradient; call them under torch.no_grad(), or multiply .dequantize(dtype), "
    "which has one for the dense operand"
)


class KernelScaled(Kernel[Any], Protocol):
    """One implementation of C = A @ B for a Scaled A and a ScaledTensor B, with an epilogue.

    `seconds` counts the rounding of B too, `rounding_seconds(p)`: every kernel gets B in FP8.
    """

    def prepare(self, p: Any, c: Any, a: Scaled) -> Any:
        """Work that is done once per plan: schedules, a dense copy."""
        ...

    def launch(
        self, c: Any, work: Any, a: Scaled, b: ScaledTensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        """Runs. `out` [..., M, N] is preallocated and fully overwritten; it lies as the problem's `out_layout` says.

        `b` is turned: b.values [..., N, K] is contiguous and begins on a multiple of 16 bytes, B is b.values.mT, and
        b.scale is float32 [..., N] or []. Of `a`, a.matrix.values is FP8 and a.scale float32 as a.kind says. The
        epilogue's bias [M] and other matrix [..., M, N] have out's dtype, and apply to the scaled sums in float32.
        """
        ...


def rounding_seconds(p: ScaledProblem) -> float:
    """The time to round B to FP8 before the product, 0 for a B that came in FP8.

    At 78 % of copy bandwidth, or as long as a row takes one program (H200, 2026-11-22: 58 us at 8192x8192, 4.4 us at
    16x14336).
    """
    if not p.rounds:
        return 0.0
    moved = p.batch * p.n * p.k * (dtypes.itemsize(p.rounds) + 1)
    return 1.5e-6 + max(moved / (0.78 * p.card.bandwidth), 0.2e-9 * p.k)


class ScaledProduct(NamedTuple):
    """A call in the form that kernels take: the FP8 matrix on the left, `b` [..., K, N].

    `out_layout` is "col" where it stood on the right, as in `plan.spmm.Product`. `dtype` is C's.
    """

    a: Scaled
    b: Tensor | ScaledTensor
    out: Tensor | None
    epilogue: Epilogue
    out_layout: str
    dtype: torch.dtype

    @classmethod
    def of(
        cls, a: Any, b: Any, out: Tensor | None, epilogue: Epilogue, dtype: torch.dtype | None
    ) -> ScaledProduct:
        """The form of a @ b, one of them a Scaled; by views only. `epilogue` is about C as the caller sees it."""
        dense = b if isinstance(a, Scaled) else a
        dtype = dtype_of(dense, dtype) if out is None else out.dtype
        if isinstance(a, Scaled):
            return cls(a, b, out, epilogue, "row", dtype)
        turned, other = b.T, epilogue.other
        if a.ndim > 2 and all(x is None or joins(x, a) for x in (out, other)):
            if isinstance(a, ScaledTensor) and not a.turned:
                a = a.rows()
            elif isinstance(a, Tensor) and joins(a, a):
                a = a.flatten(0, -2)
            if a.ndim == 2:
                out, other = (None if x is None else x.flatten(0, -2) for x in (out, other))
        if other is not None:
            epilogue = replace(epilogue, other=other.mT)
        return cls(turned, a.mT, None if out is None else out.mT, epilogue, "col", dtype)

    @classmethod
    def linear(
        cls, x: Tensor | ScaledTensor, w: Scaled, epilogue: Epilogue, dtype: torch.dtype | None
    ) -> ScaledProduct:
        """The form of x [..., K] @ w.T, which is (w @ x.T).T, for w [N, K]. `epilogue` is about [..., N]."""
        if isinstance(x, ScaledTensor):
            joined: Any = x.rows()
        else:
            joined = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
        other = epilogue.other
        if other is not None:
            epilogue = replace(epilogue, other=other.reshape(joined.shape[0], other.shape[-1]).mT)
        return cls(w, joined.mT, None, epilogue, "col", dtype_of(x, dtype))

    @property
    def m(self) -> int:
        return self.a.shape[0]

    def in_fp8(self) -> ScaledTensor:
        """B as kernels take it: rounded if it came wide, its values contiguous along K."""
        b = self.b
        if isinstance(b, Tensor):
            return quantize_dense(b.mT, E4M3, "row", check=False).mT
        if not b.turned:
            raise InvalidInput("B lies along N; FP8 operands lie along K: sparsek.quantize(B.mT).mT")
        return b

    def seen(self, c: Tensor, a: Any) -> Tensor:
        """C as `ScaledPlan.run` leaves it as the caller sees it, who gave `a` as the left operand: its leading dims."""
        if self.out_layout == "row" or c.shape[:-1] == a.shape[:-1]:
            return c
        return c.view(*a.shape[:-1], c.shape[-1])

    def check_epilogue(self) -> None:
        """InvalidInput unless the epilogue fits the operands, which fit each other."""
        if not self.epilogue.is_plain:
            operands.check_epilogue(self.m, _like(self.b, self.dtype), self.epilogue, self.out_layout)

    def new_rows(self) -> Tensor:
        """An uninitialised C by rows: [..., M, N], or [..., N, M] where `out_layout` is "col"."""
        *batch, _, n = self.b.shape
        sides = (n, self.m) if self.out_layout == "col" else (self.m, n)
        return torch.empty((*batch, *sides), dtype=self.dtype, device=self.b.device)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledPlan(Plan):
    """How to multiply FP8 matrices of one shape with dense ones, and what to do to the product.

    Call it as it was planned: `plan(A, B, out=None, epilogue=...)`, the FP8 matrix on the side where it was; a plan of
    a layer as `plan(x, W, epilogue=...)`. A plan of a BSR or BSR24 fits those of that `pattern`, a weak reference; one
    of a Semi24 every one of that shape.
    """

    problem: ScaledProblem
    layer: bool = False
    pattern: Callable[[], BlockPattern | None] | None = None
    made: Ready | None = None

    def __call__(self, a: Any, b: Any, out: Tensor | None = None, epilogue: Epilogue = PLAIN) -> Tensor:
        """C = A @ B for operands as planned. No host sync.

        `out`, of C's shape, is overwritten. `epilogue` has the parts that were planned. Raises InvalidInput for other
        operands.
        """
        if torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.compile; call spmm(A, B) there")
        self.refuse_unless_ready()
        operands.check_given(epilogue)
        dtype = dtypes.parse(self.problem.out_dtype)
        if self.layer:
            if out is not None:
                raise InvalidInput("a plan of a layer makes its output; leave out= away")
            check_layer(a, b)
            call = ScaledProduct.linear(a, b, epilogue, dtype)
        else:
            check_operands(a, b)
            if out is not None:
                check_out(a, b, out, epilogue)
            call = ScaledProduct.of(a, b, out, epilogue, dtype)
        call.check_epilogue()
        refuse_gradients(call)
        self._check_planned(call)
        c = self.run(call, captured(call.a.scale))
        return call.seen(c, a) if out is None else out

    def run(self, call: ScaledProduct, capturing: bool) -> Tensor:
        """The call without its checks, for operands that are known to fit. `capturing`: a CUDA graph is.

        Returns C by rows: in the kernels' form [..., M, N], or [..., N, M] where `out_layout` is "col".
        """
        a, _, out, epilogue, out_layout, _ = call
        if operands.autocasts(a.scale):
            with dtypes.as_given(a.device):
                return self.run(call, capturing)
        b = call.in_fp8()
        by_columns = out_layout == "col"
        if out is None:
            c = call.new_rows()
            out = c.mT if by_columns else c
        else:
            c = out.mT if by_columns else out
        if out.numel():
            if self.made is not None and not capturing:
                wait_for(self.made, tensors_in(self.work))
            kernel, config, _ = self.choice
            kernel.launch(config, self.work, a, b, out, epilogue)
        return c

    def headline(self) -> list[str]:
        p: Any = self.problem
        product = "A @ B"
        if p.out_layout == "col":
            product = "B @ A.T" if self.layer else "B @ A"
        rows, columns = (p.m, p.k) if self.layer or p.out_layout == "row" else (p.k, p.m)
        dense = [p.k, p.n] if p.out_layout == "row" else [p.n, p.k]
        batch = f"{p.batch} x " if p.batch != 1 else ""
        stored = "2:4"
        if not isinstance(p, ScaledSemi24Problem):
            bm, bk = p.block if rows == p.m else p.block[::-1]
            inside = "2:4 in " if p.op == "bsr24_fp8" else ""
            stored = f"{inside}{p.nnzb} blocks of {bm}x{bk} ({100 * p.density:.3g} % stored)"
        came = f"{p.rounds}, rounded to {p.b_dtype}" if p.rounds else p.b_dtype
        of_b = "tensor" if p.b_scale == "tensor" else "column" if p.out_layout == "row" else "row"
        sums = ", fast_accum" if p.fast_accum else ""
        parts = p.scaled, p.bias, p.activation, p.combine, p.in_place
        line = (
            f"C = {formula_of(*parts, product)}   A [{rows}, {columns}] {p.dtype}, a scale per {p.a_scale}, {stored}, "
            f"B {batch}{dense} {came}, a scale per {of_b}, C {p.out_dtype}{sums}, on {p.card.name}"
        )
        return [line]

    def details(self) -> list[str]:
        spent = rounding_seconds(self.problem)
        p = self.problem
        line = f"  rounding   {spent * 1e6:.1f} us of it to round B from {p.rounds} to {p.b_dtype}"
        return [line, *super().details()] if spent else super().details()

    def _check_planned(self, call: ScaledProduct) -> None:
        p: Any = self.problem
        matrix = call.a.matrix
        ours = None if isinstance(matrix, Semi24) else matrix.pattern
        planned = None if self.pattern is None else self.pattern()
        if (
            type(matrix).__name__ != MATRICES[p.op]
            or ours is not planned
            or call.a.shape != (p.m, p.k)
            or (isinstance(matrix, BSR) and p.transposed != (matrix.order is not None))
        ):
            raise InvalidInput(
                "this plan was made for another matrix, of another shape or pattern; call plan_spmm(A, B) for this A, "
                "or spmm(A, B)"
            )
        told = described(call)
        different = [
            f"{name} {getattr(p, name)}, not {found}"
            for name, found in told.items()
            if found != getattr(p, name)
        ]
        different = [each for each in different if not each.startswith("aligned False")]
        if different:
            raise InvalidInput(
                f"this plan was made for {'; '.join(different)}. Plan anew, or call spmm(A, B)"
            )


def described(call: ScaledProduct) -> dict[str, Any]:
    """The fields of a ScaledProblem that follow from the call's tensors alone, without A's pattern."""
    a, b, out, epilogue, out_layout, dtype = call
    scaled, bias, activation, combine, in_place = epilogue_parts(epilogue, out)
    came = isinstance(b, ScaledTensor)
    return {
        "n": b.shape[-1],
        "batch": b.shape[:-2].numel(),
        "dtype": dtypes.FP8[a.dtype],
        "b_dtype": dtypes.FP8[b.dtype if came else E4M3],
        "out_dtype": dtypes.name(dtype),
        "a_scale": a.kind,
        "b_scale": "column" if not came or b.kind == "row" else "tensor",
        "rounds": "" if came else dtypes.name(b.dtype),
        "fast_accum": a.fast_accum,
        "aligned": lies_aligned(call),
        "out_layout": out_layout,
        "scaled": scaled,
        "bias": bias,
        "activation": activation,
        "combine": combine,
        "in_place": in_place,
    }


def lies_aligned(call: ScaledProduct) -> bool:
    """Whether A's and B's FP8 values, C and the epilogue's matrix begin and step by multiples of 16 bytes."""
    a, b, out, epilogue, out_layout, dtype = call
    if b.shape[-2] % ALIGNMENT or a.matrix.values.data_ptr() % ALIGNMENT:
        return False
    if isinstance(b, ScaledTensor) and b.values.data_ptr() % ALIGNMENT:
        return False
    other = epilogue.other
    if other is not None:
        lies = 1 in other.shape[-2:] or operands.layout(other) == out_layout
        if not lies or max(other.stride()) >= 2**31:
            return False
    row = (call.m if out_layout == "col" else b.shape[-1]) * dtype.itemsize
    return (row % ALIGNMENT == 0 if out is None else True) and operands.aligned(out, other)


def facts(call: ScaledProduct) -> tuple[Any, ...]:
    """All of a call that its plan depends on but A's pattern: calls alike in this fit the same plan."""
    a, b, out, epilogue, out_layout, dtype = call
    matrix = a.matrix
    values = matrix.values
    stored = values.data_ptr() % ALIGNMENT, values.dtype, isinstance(matrix, BSR) and matrix.order is not None
    if isinstance(b, ScaledTensor):
        dense = b.values.shape, b.scale.ndim, b.values.data_ptr() % ALIGNMENT
    else:
        dense = b.shape, "", 0
    told = type(matrix), a.kind, a.fast_accum, a.shape, stored, b.dtype, dense, out_layout, dtype
    if out is None and (epilogue is PLAIN or epilogue.is_plain):
        return told
    more = [None if x is None else (x.stride(), x.data_ptr() % ALIGNMENT) for x in (out, epilogue.other)]
    return *told, *more, *epilogue_parts(epilogue, out)


def dtype_of(dense: Any, asked: torch.dtype | None) -> torch.dtype:
    """C's dtype: the one asked for, or that of a dense operand that came wide, or bf16."""
    if asked is not None:
        return arguments.dtype("dtype", asked, OUT_DTYPES)
    return dense.dtype if isinstance(dense, Tensor) else torch.bfloat16


def refuse_gradients(call: ScaledProduct) -> None:
    """InvalidInput where autograd would expect a gradient."""
    b = call.b if isinstance(call.b, Tensor) else None
    if operands.wants_gradient(b, call.epilogue.bias, call.epilogue.other, call.out):
        raise InvalidInput(NO_GRADIENT)


def check_operands(a: Any, b: Any) -> None:
    """InvalidInput unless one operand is a Scaled and the other a dense tensor or ScaledTensor that fits it."""
    on_left = isinstance(a, Scaled)
    if not on_left and not isinstance(b, Scaled):
        raise InvalidInput(
            f"A or B must be a Scaled, got {type(a).__name__} and {type(b).__name__}; sparsek.quantize makes one of a "
            "BSR, Semi24 or BSR24, and .dequantize() a tensor of a ScaledTensor"
        )
    name, each, other = ("A", a, "B") if on_left else ("B", b, "A")
    dense: Any = b if on_left else a
    if not on_left and not isinstance(each.matrix, BSR):
        raise InvalidInput(
            f"a {type(each.matrix).__name__} in FP8 stands on the left, or is the W of sparsek.linear(x, W)"
        )
    _check_dense(other, dense, each, name)
    if dense.ndim < 2:
        raise InvalidInput(
            f"{other} must have two dims or more, got {dense.ndim}; for a vector use .unsqueeze"
        )
    if on_left and dense.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(dense.shape)}: B needs {a.shape[1]} rows")
    if not on_left and dense.shape[-1] != b.shape[0]:
        raise InvalidInput(f"A is {list(dense.shape)} and B {list(b.shape)}: A needs {b.shape[0]} columns")
    if isinstance(dense, ScaledTensor) and dense.turned != on_left:
        how = "sparsek.quantize(B.mT).mT" if on_left else "sparsek.quantize(A)"
        raise InvalidInput(f"{other} is scaled along the wrong side; both operands lie along K: {how}")


def check_out(a: Any, b: Any, out: Any, epilogue: Epilogue) -> None:
    """InvalidInput unless `out` has the shape of a @ b, a dtype that C may have, contiguous rows, and its own memory.

    It may lie over a dense operand that is rounded before anything is written.
    """
    dtype = arguments.dtype("the dtype of out", arguments.dense("out", out).dtype, OUT_DTYPES)
    left, right = (a.matrix, _like(b, dtype)) if isinstance(a, Scaled) else (_like(a, dtype), b.matrix)
    read = {}
    for name, each in (("A", a), ("B", b)):
        if isinstance(each, (Scaled, ScaledTensor)):
            read[f"{name}'s scales"] = each.scale
        if isinstance(each, ScaledTensor):
            read[f"{name}'s values"] = each.values
    operands.check_out(left, right, out, epilogue, read)


def _like(x: Tensor | ScaledTensor, dtype: torch.dtype) -> Tensor:
    """One number that looks like a tensor of x's shape and device in another dtype."""
    return torch.empty((), dtype=dtype, device=x.device).expand(x.shape)


def check_layer(x: Any, w: Any) -> None:
    """InvalidInput unless w [N, K] is a Scaled and x [..., K] a dense tensor or ScaledTensor that fits it."""
    if not isinstance(w, Scaled):
        raise InvalidInput(f"W must be a Scaled, got {type(w).__name__}")
    _check_dense("x", x, w, "W")
    if x.ndim < 1 or x.shape[-1] != w.shape[1]:
        raise InvalidInput(
            f"x is {list(x.shape)} and W [N, K] {list(w.shape)}: the last dim of x must be {w.shape[1]}"
        )
    if isinstance(x, ScaledTensor) and x.turned:
        raise InvalidInput("x is a transposed view, scaled along the wrong side; use sparsek.quantize(x)")


def _check_dense(name: str, x: Any, a: Scaled, other: str) -> None:
    if isinstance(x, ScaledTensor):
        device = x.device
    else:
        if isinstance(x, Tensor) and x.dtype not in OUT_DTYPES:
            raise InvalidInput(
                f"{name} is {x.dtype}; FP8 products round {', '.join(map(str, OUT_DTYPES))}, or take "
                f"sparsek.quantize({name}), which has scales beside its FP8 values"
            )
        device = arguments.dense(name, x).device
    if device != a.device:
        raise InvalidInput(
            f"{other} is on {a.device} and {name} on {device}; move one of them, SparseK does not"
        )
