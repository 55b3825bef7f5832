"""C = A @ B with A or B in BSR: checks, the torch.library op, plan and launch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, overload

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core import device as devices
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured
from sparsek.matrix import convert
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import ScaledTensor
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import Scaled
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import flat, gradients, scaled, semi24, transforms
from sparsek.ops.planning import allows_tf32, choose
from sparsek.plan import operands, schedule
from sparsek.plan.cache import PlanCache
from sparsek.plan.plan import check_plan
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.scaled import ScaledPlan
from sparsek.plan.semi24 import Plan24
from sparsek.plan.spmm import Product, SpmmPlan, empty_out, epilogue_parts, facts, is_aligned
from sparsek.reference.epilogue import PLAIN, Epilogue


def spmm(
    A: Any,
    B: Any,
    *,
    out: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    plan: SpmmPlan | Plan24 | ScaledPlan | None = None,
    kernel: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """C = alpha * A @ B, plus beta * out: block-sparse times dense, or dense times block-sparse.

    One of A [M, K] and B [K, N] is a BSR, the other a dense tensor, [..., K, N] or [..., M, K], of its dtype on its
    device, row-major or the transpose view of such a matrix, which is read in place. Transposed views of a BSR cost
    nothing: `B @ A.T` and `A.T @ B` read A's values where they are. Returns C [..., M, N], row-major, of that dtype,
    accumulated in float32 (float64 for float64).

    alpha, beta: numbers that are finite in float32.
    out: written instead of a new tensor; [..., M, N], rows contiguous, no memory shared with A or B. With beta other
    than 0 it is read first and added: C = alpha * A @ B + beta * out, rounded once; by hopper.spmm alpha * A @ B is
    rounded before.
    plan: from `plan_spmm`; without it one is made and kept with the BSR's pattern.
    kernel: a name of the kernels' table ("hopper.spmm"): that kernel runs or `Unsupported` says why not. The backward
    pass uses kernels of the same family.

    Differentiable in the BSR's values, whose gradient stays [nnzb, bm, bk], and in the dense operand. The first reads
    leading dims of B joined with N, which copies B and C's gradient unless they lie so; those of a dense A are rows.
    out= and plan= have no gradient.

    A or B may be a Semi24 or a BSR24 instead, whose kernels are called semi24 and bsr24 and have no gradient for the
    values. Its transpose, as in X @ A and in the gradient of B, is never unpacked as a whole on a GPU:
    portable.semi24 and portable.bsr24 unpack it by tiles. x @ A.T is sparsek.linear(x, A).

    A or B may be a Scaled, an FP8 matrix (docs/fp8.md). The other operand is then a ScaledTensor, or a bf16, fp16 or
    fp32 tensor that is rounded to E4M3 with a scale for each column of B (each row of a dense A). C is in `dtype`, one
    of these three; without it in the tensor's own, bf16 for a ScaledTensor. No gradients. A Semi24 or BSR24 in FP8
    stands on the left.

    Rows of B under block columns without any block never reach C, NaN or not. A NaN under a stored block reaches the
    rows of that block; where the plan merges block rows also the rows merged with them; with vendor.dense all rows.
    The same plan gives the same bits. Once planned, GPU kernels neither sync nor allocate more than C, but
    for rows that are split, whose sums go through a workspace.
    torch.autocast does not touch the operands.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.
    """
    epilogue = _epilogue(alpha, beta, out)
    if kernel is not None:
        arguments.text("kernel", kernel)
    if scaled.takes(A, B):
        return scaled.product(A, B, out, epilogue, plan, kernel, dtype)
    _refuse_dtype(dtype)
    if not isinstance(A, BSR) and not isinstance(B, BSR) and semi24.takes(A, B):
        return semi24.product(A, B, out, epilogue, plan, kernel)
    if plan is not None:
        check_plan(plan, SpmmPlan, "plan_spmm", kernel)
        transforms.check(*(x.values if isinstance(x, BSR) else x for x in (A, B)), out)
        transforms.refuse("plan=")
        return plan(A, B, out, epilogue)
    operands.check_operands(A, B)
    if out is not None:
        if torch.compiler.is_compiling():
            raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
        transforms.refuse("out=")
        operands.check_out(A, B, out, epilogue)
    call = Product.of(A, B, out, epilogue)
    c = multiply(call, kernel)
    return call.seen(c, A) if out is None else out


@overload
def plan_spmm(
    A: Scaled,
    B: Any,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> ScaledPlan: ...


@overload
def plan_spmm(
    A: Tensor | ScaledTensor,
    B: Scaled,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> ScaledPlan: ...


@overload
def plan_spmm(
    A: Semi24 | BSR24,
    B: Any,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> Plan24: ...


@overload
def plan_spmm(
    A: Tensor,
    B: Semi24 | BSR24,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> Plan24: ...


@overload
def plan_spmm(
    A: Any,
    B: Any,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SpmmPlan: ...


def plan_spmm(
    A: Any,
    B: Any,
    *,
    out: Tensor | None = None,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> SpmmPlan | Plan24 | ScaledPlan:
    """The plan that `spmm(A, B)` would use: frozen, callable, and able to explain itself.

    out, epilogue: what the calls will be given; `linear(x, W, bias, activation)` is `plan_spmm(x, W.T,
    epilogue=Epilogue(bias=bias, activation=activation))`. kernel, config: use this kernel, with this config of its own.
    device: a card's name ("h200"): plan for that card, present or not; such a plan predicts and explains but cannot be
    called. dtype: of C, as in `spmm`, where an operand is in FP8.
    Costs: schedules are made on the host and copied to A's device once.
    """
    transforms.refuse("plan_spmm")
    operands.check_given(epilogue)
    if scaled.takes(A, B):
        return scaled.plan(A, B, out, epilogue, kernel, config, device, dtype)
    _refuse_dtype(dtype)
    if not isinstance(A, BSR) and not isinstance(B, BSR) and semi24.takes(A, B):
        return semi24.plan(A, B, out, epilogue, kernel, config, device)
    operands.check_operands(A, B)
    if out is not None:
        operands.check_out(A, B, out, epilogue)
    call = Product.of(A, B, out, epilogue)
    call.check_epilogue()
    p = _problem(call.a, call.b, call.out, device, *call[3:])
    return _make_plan(call.a, p, kernel, config, ready=device is None)


def multiply(call: Product, kernel: str | None) -> Tensor:
    """The product by rows, as `SpmmPlan.run` leaves it; by the op where something traces."""
    a, b, out, epilogue, out_layout = call
    bias, other = epilogue.bias, epilogue.other
    transforms.check(a.values, b, bias, other, out)
    learns = operands.wants_gradient(a.values, b, bias, other, out)
    if out is not None:
        if learns or torch.compiler.is_compiling():
            raise InvalidInput(operands.OUT_HAS_NO_GRADIENT)
        return _run(call, kernel)
    traced = flat.traced()
    if not (learns or traced):
        return _run(call, kernel)
    transforms.check_untransformed(a)
    by_columns = out_layout == "col"
    more = by_columns, epilogue.alpha, bias, epilogue.activation, other, epilogue.combine, kernel
    args = *flat.flat(a), b, *more
    if not traced and flat.are_plain(a.values, b, bias, other):
        return Spmm.apply(*args, call)
    c = transforms.call("spmm", *args)
    return c.mT if by_columns else c


def _refuse_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None:
        raise InvalidInput("dtype= is for products of FP8 matrices; others have the dtype of their operands")


def _epilogue(alpha: float, beta: float, out: Tensor | None) -> Epilogue:
    if type(alpha) is not float or type(beta) is not float:
        alpha, beta = arguments.number("alpha", alpha), arguments.number("beta", beta)
    if beta == 0:
        return PLAIN if alpha == 1 else Epilogue(alpha=alpha)
    if out is None:
        raise InvalidInput(f"beta is {beta:g} and there is no out= to multiply with it")
    return Epilogue(alpha=alpha, other=out, beta=beta)


def _make_plan(a: BSR, p: SpmmProblem, kernel: str | None, config: Any, ready: bool) -> SpmmPlan:
    choice = choose(p, kernel, config)
    work = choice.kernel.prepare(p, choice.config, a) if ready else None
    made = Ready.here(a.device) if ready else None
    return SpmmPlan(p, choice, work, ready, weakref.ref(a.pattern), made=made)


def _run(call: Product, kernel: str | None) -> Tensor:
    capturing = captured(call.b)
    return _cached_plan(call, kernel, capturing).run(call, capturing)


def _cached_plan(call: Product, kernel: str | None, capturing: bool) -> SpmmPlan:
    a, b, out, epilogue, out_layout = call

    def make() -> SpmmPlan:
        return _make_plan(a, _problem(a, b, out, None, epilogue, out_layout), kernel, None, ready=True)

    plans: PlanCache[SpmmPlan] = a.pattern.derived("plans", PlanCache)
    return plans.get((kernel, allows_tf32(b.dtype), facts(call)), make, capturing)


def _problem(
    a: BSR,
    b: Tensor,
    out: Tensor | None,
    card_name: str | None,
    epilogue: Epilogue = PLAIN,
    out_layout: str = "row",
) -> SpmmProblem:
    pattern = a.pattern
    m, k = a.shape
    n = b.shape[-1]
    card = devices.card_of(b.device) if card_name is None else devices.card_named(card_name)
    lengths = pattern.host.indptr[1:] - pattern.host.indptr[:-1]
    has_alpha, bias, activation, combine, in_place = epilogue_parts(epilogue, out)
    return SpmmProblem(
        m=m,
        k=k,
        n=n,
        block=a.block,
        nnzb=a.nnzb,
        dtype=dtypes.name(a.dtype),
        card=card,
        batch=b.shape[:-2].numel(),
        b_layout=operands.layout(b),
        aligned=is_aligned(a.values, b, out, epilogue.other, m, out_layout),
        transposed=a.order is not None,
        tf32=allows_tf32(b.dtype),
        row_max=int(lengths.max()) if len(lengths) else 0,
        touches_all_columns=pattern.derived("touches_all", lambda: _touches_all(pattern)),
        merged=schedule.merges(pattern, a.order is not None),
        out_layout=out_layout,
        scaled=has_alpha,
        bias=bias,
        activation=activation,
        combine=combine,
        in_place=in_place,
    )


def _touches_all(pattern: BlockPattern) -> bool:
    touched = torch.zeros(pattern.grid[1], dtype=torch.bool, device="cpu")
    touched[torch.from_numpy(pattern.host.indices.astype("int64"))] = True
    return bool(touched.all())


@torch.library.custom_op("sparsek::spmm", mutates_args=(), tags=flat.TAGS)
def _spmm_op(
    values: Tensor,
    indptr: Tensor,
    indices: Tensor,
    sizes: Sequence[int],
    transposed: bool,
    b: Tensor,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
    kernel: str | None,
) -> Tensor:
    a = flat.matrix(values, indptr, indices, sizes, transposed)
    call = _call(a, b, by_columns, alpha, bias, activation, other, combine)
    with torch.no_grad():
        c = _run(call, kernel)
    return c.mT if by_columns else c


@_spmm_op.register_fake
def _(
    values: Tensor,
    indptr: Tensor,
    indices: Tensor,
    sizes: Sequence[int],
    transposed: bool,
    b: Tensor,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
    kernel: str | None,
) -> Tensor:
    a = flat.fake(values, indptr, indices, sizes, transposed)
    call = _call(a, b, by_columns, alpha, bias, activation, other, combine)
    return empty_out(b, a.shape[0], call.out_layout)


def _call(
    a: BSR,
    b: Tensor,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
) -> Product:
    operands.check_left(a, b)
    epilogue = Epilogue(alpha=alpha, bias=bias, activation=activation, other=other, combine=combine)
    call = Product(a, b, None, epilogue, "col" if by_columns else "row")
    call.check_epilogue()
    return call


def _at_once(size: int, in_dims: Any, args: Any) -> tuple[Tensor, int] | None:
    """All items of a vmap in one product where they share A and the bias: tokens are joined, matrices make a batch."""
    b, by_columns, other = args[5], args[6], args[10]
    of_values, of_b, of_bias, of_other = (in_dims[at] for at in (0, 5, 8, 10))
    if of_values is not None or of_bias is not None or of_b is None or (other is None) != (of_other is None):
        return None
    b, other = b.movedim(of_b, 0), None if other is None else other.movedim(of_other, 0)
    joins = by_columns and b.dim() == 3
    if joins:
        b, other = _beside(b), None if other is None else _beside(other)
    elif operands.layout(b) == "strided":
        b = b.contiguous()
    c = transforms.call("spmm", *args[:5], b, *args[6:10], other, *args[11:])
    return (c.mT.unflatten(0, (size, b.shape[1] // max(size, 1))).mT if joins else c), 0


def _beside(x: Tensor) -> Tensor:
    """Matrices [size, R, T], by columns, as one [R, size * T], by columns too."""
    return x.mT.reshape(x.shape[0] * x.shape[2], x.shape[1]).mT


transforms.differentiable(_spmm_op, gradients.of_spmm, gradients.save_spmm, _at_once)


class Spmm(torch.autograd.Function):
    """The product by rows, with gradients, of the op's arguments and their call: the op costs the host more.

    What it returns is no view, so that `y += x` may follow.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *args, call = given
        c = _run(call, args[-1])
        gradients.save_spmm(ctx, args, c)
        ctx.by_columns = call.out_layout == "col"
        return c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        as_op = ctx
        if ctx.by_columns:
            *saved, out = ctx.saved_tensors
            grad, out = grad.mT, None if out is None else out.mT
            as_op = SimpleNamespace(
                **vars(ctx), saved_tensors=(*saved, out), needs_input_grad=ctx.needs_input_grad
            )
        return *gradients.of_spmm(as_op, grad), None


def _pack(w: Tensor, block: tuple[int, int], rule: convert.Rule) -> BSR | None:
    """The blocks of w that `rule` stores by kernels, loaded when the first CUDA tensor comes. None, and torch packs,
    where Triton is missing, and where something looks at calls op by op."""
    if flat.traced() or not flat.are_plain(w, rule.mask):
        return None
    try:
        from sparsek.kernels.pack.to_bsr import pack_bsr
    except ImportError:
        return None
    return pack_bsr(w, block, rule)


convert.register_pack(_pack)
