"""C = A @ B with A or B a `Scaled`, an FP8 matrix: checks, the torch.library op, plan and launch.

`sparsek.spmm`, `sparsek.linear` and the @ operator come here with such matrices. The dense operand is a ScaledTensor,
which `sparsek.quantize` has made, or a tensor in bf16, fp16 or fp32, which the call rounds to E4M3 with a scale for
each column of B (row of x): on a GPU by one kernel, `kernels/pack/to_fp8.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import device as devices
from sparsek.core import dtypes
from sparsek.core.arguments import told
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import ScaledTensor, quantize_dense, register_rounder
from sparsek.matrix.quantized import Scaled
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import flat, transforms
from sparsek.ops.planning import choose
from sparsek.plan import operands, schedule
from sparsek.plan.cache import PlanCache
from sparsek.plan.plan import check_plan
from sparsek.plan.problem import ScaledBsr24Problem, ScaledSemi24Problem, ScaledSpmmProblem
from sparsek.plan.scaled import (
    E4M3,
    NO_GRADIENT,
    ScaledPlan,
    ScaledProduct,
    check_layer,
    check_operands,
    check_out,
    described,
    dtype_of,
    facts,
    refuse_gradients,
)
from sparsek.reference.epilogue import PLAIN, Epilogue

FP8 = (Scaled, ScaledTensor)

# From a Semi24's metadata, which is to it what a pattern is to a BSR, to its plans.
_PLANS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes(A: Any, B: Any) -> bool:
    """Whether one of them is in FP8."""
    return isinstance(A, FP8) or isinstance(B, FP8)


def product(
    A: Any,
    B: Any,
    out: Tensor | None,
    epilogue: Epilogue,
    plan: Any,
    kernel: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """`sparsek.spmm` where one operand is in FP8. `epilogue` is what alpha, beta and out amount to."""
    transforms.refuse("FP8 products have no gradient; they do not go")
    if plan is not None:
        check_plan(plan, ScaledPlan, "plan_spmm(A, B) for a Scaled", kernel)
        if dtype is not None and dtypes.name(dtype_of(None, dtype)) != plan.problem.out_dtype:
            raise InvalidInput(f"dtype={dtype} contradicts plan, whose result is {plan.problem.out_dtype}")
        return plan(A, B, out, epilogue)
    call = _checked(A, B, out, epilogue, dtype)
    if out is not None and torch.compiler.is_compiling():
        raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
    c = multiply(call, kernel)
    return call.seen(c, A) if out is None else out


def linear(
    x: Tensor | ScaledTensor, W: Scaled, epilogue: Epilogue, kernel: str | None, dtype: torch.dtype | None
) -> Tensor:
    """`sparsek.linear` where W [N, K] is in FP8. `epilogue` is about [..., N]."""
    transforms.refuse("FP8 products have no gradient; they do not go")
    check_layer(x, W)
    call = ScaledProduct.linear(x, W, epilogue, dtype)
    call.check_epilogue()
    y = multiply(call, kernel)
    return y.view(*x.shape[:-1], W.shape[0])


def swiglu(x: Tensor | ScaledTensor, W_gate: Any, W_up: Any, kernel: str | None) -> Tensor:
    """`sparsek.swiglu` with matrices in FP8. x is rounded once for both products; the gate is rounded to y's dtype."""
    for w in (W_gate, W_up):
        check_layer(x, w)
    if W_gate.shape != W_up.shape:
        raise InvalidInput(f"W_gate is {list(W_gate.shape)} and W_up {list(W_up.shape)}; they must agree")
    if isinstance(x, Tensor) and operands.wants_gradient(x):
        raise InvalidInput(NO_GRADIENT)
    dtype = dtype_of(x, None)
    x8 = x if isinstance(x, ScaledTensor) else quantize_dense(x, E4M3, "row", check=False)
    gate = linear(x8, W_gate, Epilogue(activation="silu"), kernel, dtype)
    return linear(x8, W_up, Epilogue(other=gate, combine="mul"), kernel, dtype)


def plan(
    A: Any,
    B: Any,
    out: Tensor | None,
    epilogue: Epilogue,
    kernel: str | None,
    config: Any,
    device: str | None,
    dtype: torch.dtype | None,
) -> ScaledPlan:
    """`sparsek.plan_spmm` where one operand is in FP8."""
    call = _checked(A, B, out, epilogue, dtype)
    call.check_epilogue()
    return _make_plan(call, kernel, config, device)


def plan_linear(
    x: Tensor | ScaledTensor,
    W: Scaled,
    *,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> ScaledPlan:
    """The plan that `sparsek.linear(x, W)` uses for an FP8 matrix W; call it as `plan(x, W, epilogue=...)`.

    epilogue: of bias [N], an activation and a residual [..., N] as `other`, in the result's dtype. Otherwise as
    `sparsek.plan_spmm`.
    """
    operands.check_given(epilogue)
    check_layer(x, W)
    call = ScaledProduct.linear(x, W, epilogue, dtype)
    call.check_epilogue()
    return _make_plan(call, kernel, config, device, layer=True)


def multiply(call: ScaledProduct, kernel: str | None) -> Tensor:
    """The product by rows, as `ScaledPlan.run` leaves it; by the op where something traces."""
    refuse_gradients(call)
    transforms.check(call.b if isinstance(call.b, Tensor) else None, call.epilogue.bias, call.epilogue.other)
    if call.out is not None or not flat.traced():
        return _run(call, kernel)
    a, b, _, epilogue, out_layout, dtype = call
    return torch.ops.sparsek.scaled(
        *_flat(a),
        *((b.values, b.scale) if isinstance(b, ScaledTensor) else (b, None)),
        out_layout == "col",
        epilogue.alpha,
        epilogue.bias,
        epilogue.activation,
        epilogue.other,
        epilogue.combine,
        dtype,
        kernel,
    )


def _checked(
    A: Any, B: Any, out: Tensor | None, epilogue: Epilogue, dtype: torch.dtype | None
) -> ScaledProduct:
    check_operands(A, B)
    if out is not None:
        check_out(A, B, out, epilogue)
        if dtype is not None and dtype is not out.dtype:
            raise InvalidInput(f"dtype= is {told(dtype)} and out {out.dtype}; leave one of them away")
    return ScaledProduct.of(A, B, out, epilogue, dtype)


def _make_plan(
    call: ScaledProduct, kernel: str | None, config: Any, device: str | None, layer: bool = False
) -> ScaledPlan:
    p = _problem(call, device)
    choice = choose(p, kernel, config)
    ready, matrix = device is None, call.a.matrix
    work = choice.kernel.prepare(p, choice.config, call.a) if ready else None
    pattern = None if isinstance(matrix, Semi24) else weakref.ref(matrix.pattern)
    made = Ready.here(call.a.device) if ready else None
    return ScaledPlan(p, choice, work, ready, layer, pattern, made)


def _run(call: ScaledProduct, kernel: str | None) -> Tensor:
    capturing = captured(call.a.scale)
    return _cached_plan(call, kernel, capturing).run(call, capturing)


def _cached_plan(call: ScaledProduct, kernel: str | None, capturing: bool) -> ScaledPlan:
    matrix = call.a.matrix
    if isinstance(matrix, Semi24):
        kept: Any = _PLANS.get(matrix.meta)
        if kept is None:
            kept = _PLANS[matrix.meta] = PlanCache()
    else:
        kept = matrix.pattern.derived("plans of FP8 products", PlanCache)
    return kept.get((kernel, facts(call)), lambda: _make_plan(call, kernel, None, None), capturing)


def _problem(
    call: ScaledProduct, card_name: str | None
) -> ScaledSpmmProblem | ScaledSemi24Problem | ScaledBsr24Problem:
    matrix = call.a.matrix
    m, k = call.a.shape
    card = devices.card_of(call.b.device) if card_name is None else devices.card_named(card_name)
    shared: dict[str, Any] = {"m": m, "k": k, "card": card, **described(call)}
    if isinstance(matrix, Semi24):
        return ScaledSemi24Problem(**shared)
    pattern = matrix.pattern
    lengths = pattern.host.indptr[1:] - pattern.host.indptr[:-1]
    shared |= {"block": pattern.block, "nnzb": pattern.nnzb, "row_max": int(lengths.max(initial=0))}
    if isinstance(matrix, BSR24):
        return ScaledBsr24Problem(**shared)
    view = matrix.order is not None
    return ScaledSpmmProblem(**shared, transposed=view, merged=schedule.merges(pattern, view))


def _flat(a: Scaled) -> tuple[Any, ...]:
    """A's values, scales, what they mean, how products sum, metadata, pattern, whether it is a transposed view."""
    matrix = a.matrix
    if isinstance(matrix, BSR):
        values, indptr, indices, sizes, transposed = flat.flat(matrix)
        return values, a.scale, a.kind, a.fast_accum, None, indptr, indices, sizes, transposed
    pattern = (None, None, []) if isinstance(matrix, Semi24) else flat.flat_pattern(matrix.pattern)
    return matrix.values, a.scale, a.kind, a.fast_accum, matrix.meta, *pattern, False


def _matrix(
    values: Tensor,
    meta: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    sizes: Sequence[int],
    transposed: bool,
) -> BSR | Semi24 | BSR24:
    """The matrix that `_flat` took apart."""
    if meta is not None:
        return flat.matrix24(values, meta, indptr, indices, sizes)
    assert indptr is not None
    assert indices is not None
    return flat.matrix(values, indptr, indices, sizes, transposed)


@torch.library.custom_op("sparsek::scaled", mutates_args=(), tags=flat.TAGS)
def _scaled_op(
    values: Tensor,
    scale: Tensor,
    kind: str,
    fast_accum: bool,
    meta: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    sizes: Sequence[int],
    transposed: bool,
    b: Tensor,
    b_scale: Tensor | None,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
    dtype: torch.dtype,
    kernel: str | None,
) -> Tensor:
    """C of a Scaled of these parts and B, with an epilogue: [..., M, N], row-major.

    `b` [..., K, N] is rounded to FP8, or without that, if there is a `b_scale`, the values [..., N, K] of a
    ScaledTensor. `by_columns`: C is written by columns, and C.mT is returned, [..., N, M], row-major.
    """
    matrix = _matrix(values, meta, indptr, indices, sizes, transposed)
    a = Scaled.unchecked(matrix, scale.contiguous(), kind, fast_accum)
    epilogue = Epilogue(alpha=alpha, bias=bias, activation=activation, other=other, combine=combine)
    dense: Any = b
    if b_scale is not None:
        dense = ScaledTensor.unchecked(operands.readable(b), b_scale.contiguous(), True)
    call = ScaledProduct(a, dense, None, epilogue, "col" if by_columns else "row", dtype)
    if dense.ndim < 2 or dense.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A of the product is {list(a.shape)} and B {list(dense.shape)}")
    call.check_epilogue()
    with torch.no_grad():
        return _run(call, kernel)


@_scaled_op.register_fake
def _(
    values: Tensor,
    scale: Tensor,
    kind: str,
    fast_accum: bool,
    meta: Tensor | None,
    indptr: Tensor | None,
    indices: Tensor | None,
    sizes: Sequence[int],
    transposed: bool,
    b: Tensor,
    b_scale: Tensor | None,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
    dtype: torch.dtype,
    kernel: str | None,
) -> Tensor:
    *batch, _, n = b.shape if b_scale is None else b.mT.shape
    m = sizes[int(transposed)] if len(sizes) else values.shape[0]
    return torch.empty((*batch, n, m) if by_columns else (*batch, m, n), dtype=dtype, device=b.device)


def _round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Values and scales of x by one kernel, loaded when the first CUDA tensor comes. None, and torch rounds, where
    Triton is missing, and where something looks at calls op by op."""
    if flat.traced() or not flat.are_plain(x):
        return None
    try:
        from sparsek.kernels.pack.to_fp8 import round_rows
    except ImportError:
        return None
    return round_rows(x, dtype)


register_rounder(_round_rows)
Scaled.register_matmul(lambda a, b: product(a, b, None, PLAIN, None, None, None))
ScaledTensor.register_matmul(lambda a, b: product(a, b, None, PLAIN, None, None, None))
