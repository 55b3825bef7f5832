"""C = A @ B with A or B a Semi24 or a BSR24: checks, the torch.library ops, plan and launch.

`sparsek.spmm`, `sparsek.linear` and the @ operator come here with such matrices. A product of the transpose, as in
B @ A and in the gradient of B, is a kernel of its own: its pairs lie along C, where sparse tensor cores do not take
them. portable.semi24 and portable.bsr24 unpack tiles in registers for it, on a CPU cpu.semi24 and cpu.bsr24 by rows.
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
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, captured
from sparsek.matrix import two_four
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.semi24 import Semi24
from sparsek.ops import flat, gradients, transforms
from sparsek.ops.planning import allows_tf32, choose
from sparsek.plan import operands
from sparsek.plan.cache import PlanCache
from sparsek.plan.plan import check_plan
from sparsek.plan.problem import BSR24Problem, Problem24, Semi24Problem
from sparsek.plan.semi24 import (
    VALUES_HAVE_NO_GRADIENT,
    Plan24,
    Product24,
    check_layer,
    check_operands,
    facts,
    gapless,
    lies_aligned,
)
from sparsek.plan.spmm import epilogue_parts, new_rows
from sparsek.reference.epilogue import PLAIN, Epilogue

TWO_FOUR = (Semi24, BSR24)

# From a Semi24's metadata, which is to it what a pattern is to a BSR, to its plans.
_PLANS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def takes(A: Any, B: Any) -> bool:
    """Whether one of them is a 2:4 matrix."""
    return isinstance(A, TWO_FOUR) or isinstance(B, TWO_FOUR)


def product(A: Any, B: Any, out: Tensor | None, epilogue: Epilogue, plan: Any, kernel: str | None) -> Tensor:
    """`sparsek.spmm` where one operand is a 2:4 matrix. `epilogue` is what alpha, beta and out amount to."""
    if plan is not None:
        check_plan(plan, Plan24, "plan_spmm(A, B) for a Semi24 or a BSR24", kernel)
        transforms.check(*(x.values if isinstance(x, TWO_FOUR) else x for x in (A, B)), out)
        transforms.refuse("plan=")
        return plan(A, B, out, epilogue)
    check_operands(A, B)
    if out is not None:
        if torch.compiler.is_compiling():
            raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
        transforms.refuse("out=")
        operands.check_out(A, B, out, epilogue)
    call = Product24.of(A, B, out, epilogue)
    c = multiply(call, kernel)
    return call.seen(c, A) if out is None else out


def plan(
    A: Any,
    B: Any,
    out: Tensor | None,
    epilogue: Epilogue,
    kernel: str | None,
    config: Any,
    device: str | None,
) -> Plan24:
    """`sparsek.plan_spmm` where one operand is a 2:4 matrix."""
    check_operands(A, B)
    if out is not None:
        operands.check_out(A, B, out, epilogue)
    call = Product24.of(A, B, out, epilogue)
    call.check_epilogue()
    return _make_plan(call, _problem(call, device), kernel, config, device is None)


def plan_linear(
    x: Tensor,
    W: Semi24 | BSR24,
    *,
    epilogue: Epilogue = PLAIN,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> Plan24:
    """The plan that `sparsek.linear(x, W)` uses for a 2:4 matrix W; call it as `plan(x, W, epilogue=...)`.

    epilogue: of bias [N], an activation and a residual [..., N] as `other`. Otherwise as `sparsek.plan_spmm`.
    """
    operands.check_given(epilogue)
    check_layer(x, W)
    call = Product24.linear(x, W, epilogue)
    call.check_epilogue()
    return _make_plan(call, _problem(call, device), kernel, config, device is None)


def multiply(call: Product24, kernel: str | None) -> Tensor:
    """The product by rows, as `Plan24.run` leaves it; by the op where something traces."""
    a, transposed, b, out, epilogue, out_layout = call
    bias, other = epilogue.bias, epilogue.other
    transforms.check(a.values, b, bias, other, out)
    if operands.wants_gradient(a.values):
        raise InvalidInput(VALUES_HAVE_NO_GRADIENT.format(kind=type(a).__name__))
    learns = operands.wants_gradient(b, bias, other, out)
    if out is not None:
        if learns or torch.compiler.is_compiling():
            raise InvalidInput(operands.OUT_HAS_NO_GRADIENT)
        return _run(call, kernel)
    traced = flat.traced()
    if not (learns or traced):
        return _run(call, kernel)
    if isinstance(a, BSR24):
        transforms.check_untransformed(a.pattern)
    more = epilogue.alpha, bias, epilogue.activation, other, epilogue.combine, kernel
    args = *flat.flat24(a), transposed, b, out_layout == "col", *more
    if not traced and flat.are_plain(a.values, b, bias, other):
        return Multiplied.apply(*args, call)
    return transforms.call("semi24" if isinstance(a, Semi24) else "bsr24", *args)


def _make_plan(call: Product24, p: Problem24, kernel: str | None, config: Any, ready: bool) -> Plan24:
    choice = choose(p, kernel, config)
    a = call.a
    work = choice.kernel.prepare(p, choice.config, a) if ready else None
    pattern = weakref.ref(a.pattern) if isinstance(a, BSR24) else None
    return Plan24(p, choice, work, ready, pattern, Ready.here(a.device) if ready else None)


def _run(call: Product24, kernel: str | None) -> Tensor:
    capturing = captured(call.b)
    return _cached_plan(call, kernel, capturing).run(call, capturing)


def _cached_plan(call: Product24, kernel: str | None, capturing: bool) -> Plan24:
    def make() -> Plan24:
        return _make_plan(call, _problem(call, None), kernel, None, ready=True)

    a = call.a
    if isinstance(a, BSR24):
        plans: PlanCache[Plan24] = a.pattern.derived("plans of 2:4 blocks", PlanCache)
    else:
        kept: Any = _PLANS.get(a.meta)
        if kept is None:
            kept = _PLANS[a.meta] = PlanCache()
        plans = kept
    return plans.get((kernel, allows_tf32(call.b.dtype), facts(call)), make, capturing)


def _problem(call: Product24, card_name: str | None) -> Problem24:
    a, transposed, b, out, epilogue, out_layout = call
    m, k = call.shape
    scaled, bias, activation, combine, in_place = epilogue_parts(epilogue, out)
    shared: dict[str, Any] = {
        "m": m,
        "k": k,
        "n": b.shape[-1],
        "dtype": dtypes.name(a.dtype),
        "card": devices.card_of(b.device) if card_name is None else devices.card_named(card_name),
        "batch": b.shape[:-2].numel(),
        "b_layout": operands.layout(b),
        "aligned": lies_aligned(call),
        "gapless": gapless(b),
        "transposed": transposed,
        "tf32": allows_tf32(b.dtype),
        "out_layout": out_layout,
        "scaled": scaled,
        "bias": bias,
        "activation": activation,
        "combine": combine,
        "in_place": in_place,
    }
    if isinstance(a, Semi24):
        return Semi24Problem(**shared)
    pattern = a.pattern.T if transposed else a.pattern
    lengths = pattern.host.indptr[1:] - pattern.host.indptr[:-1]
    return BSR24Problem(block=pattern.block, nnzb=pattern.nnzb, row_max=int(lengths.max(initial=0)), **shared)


@torch.library.custom_op("sparsek::semi24", mutates_args=(), tags=flat.TAGS)
def _semi24_op(
    values: Tensor,
    meta: Tensor,
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
    """C of a Semi24 of these parts, or its transpose, and b [..., K, N], with an epilogue: [..., M, N], row-major.

    `by_columns`: C is written by columns, and C.mT is returned, [..., N, M], row-major.
    """
    a = flat.matrix24(values, meta)
    return _run_op(_call(a, transposed, b, by_columns, alpha, bias, activation, other, combine), kernel)


@_semi24_op.register_fake
def _(
    values: Tensor,
    meta: Tensor,
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
    a = Semi24.unchecked(values, meta)
    return _fake(_call(a, transposed, b, by_columns, alpha, bias, activation, other, combine))


@torch.library.custom_op("sparsek::bsr24", mutates_args=(), tags=flat.TAGS)
def _bsr24_op(
    values: Tensor,
    meta: Tensor,
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
    """As `sparsek::semi24`, of a BSR24 of these parts."""
    a = flat.matrix24(values, meta, indptr, indices, sizes)
    return _run_op(_call(a, transposed, b, by_columns, alpha, bias, activation, other, combine), kernel)


@_bsr24_op.register_fake
def _(
    values: Tensor,
    meta: Tensor,
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
    pattern = flat.fake(values, indptr, indices, sizes).pattern
    a = BSR24.unchecked(pattern, values, meta)
    return _fake(_call(a, transposed, b, by_columns, alpha, bias, activation, other, combine))


def _call(
    a: Semi24 | BSR24,
    transposed: bool,
    b: Tensor,
    by_columns: bool,
    alpha: float,
    bias: Tensor | None,
    activation: str,
    other: Tensor | None,
    combine: str,
) -> Product24:
    operands.check_dense("B", b, a.values, "A")
    epilogue = Epilogue(alpha=alpha, bias=bias, activation=activation, other=other, combine=combine)
    call = Product24(a, transposed, b, None, epilogue, "col" if by_columns else "row")
    if b.dim() < 2 or b.shape[-2] != call.shape[1]:
        raise InvalidInput(f"A of the product is {list(call.shape)} and B {list(b.shape)}")
    call.check_epilogue()
    return call


def _run_op(call: Product24, kernel: str | None) -> Tensor:
    with torch.no_grad():
        return _run(call, kernel)


def _fake(call: Product24) -> Tensor:
    return new_rows(call.b, call.shape[0], call.out_layout == "col")


def _at_once(first: int, name: str) -> transforms.Vmap:
    """For an op whose dense operand is argument `first`: all items of a vmap in one product where they share A and the
    bias. Tokens are joined, matrices make a batch.
    """

    def at_once(size: int, in_dims: Any, args: Any) -> tuple[Tensor, int] | None:
        b, by_columns, alpha, bias, activation, other, *more = args[first:]
        of_b, _, _, of_bias, _, of_other, *_ = in_dims[first:]
        shared = of_bias is None and all(dim is None for dim in in_dims[:2])
        if not shared or of_b is None or (other is None) != (of_other is None):
            return None
        b, other = b.movedim(of_b, 0), None if other is None else other.movedim(of_other, 0)
        joins = by_columns and b.dim() == 3
        if joins:
            b, other = _beside(b), None if other is None else _beside(other)
        elif operands.layout(b) == "strided":
            b = b.contiguous()
        c = transforms.call(name, *args[:first], b, by_columns, alpha, bias, activation, other, *more)
        return (c.unflatten(0, (size, c.shape[0] // max(size, 1))) if joins else c), 0

    return at_once


def _beside(x: Tensor) -> Tensor:
    """Matrices [size, R, T], by columns, as one [R, size * T], by columns too."""
    return x.mT.reshape(x.shape[0] * x.shape[2], x.shape[1]).mT


transforms.differentiable(_semi24_op, gradients.of_24, gradients.save_24, _at_once(3, "semi24"))
transforms.differentiable(_bsr24_op, gradients.of_24, gradients.save_24, _at_once(6, "bsr24"))


class Multiplied(torch.autograd.Function):
    """The product by rows, with gradients, of an op's arguments and their call: the op costs the host more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *args, call = given
        c = _run(call, args[-1])
        gradients.save_24(ctx, args, c)
        return c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients.of_24(ctx, grad), None


for kind in TWO_FOUR:
    kind.register_matmul(lambda a, b: product(a, b, None, PLAIN, None, None))


def _pack24(*parts: Tensor | None) -> Any:
    """The module of the kernel that packs, loaded when formats bring the first CUDA tensor.

    None, and torch packs, where Triton is missing, and where something looks at calls op by op.
    """
    if flat.traced() or not flat.are_plain(*parts):
        return None
    try:
        from sparsek.kernels.pack import to_24 as pack24
    except ImportError:
        return None
    return pack24


def _pack(w: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """`two_four.pack` by one kernel, or None."""
    kernel = _pack24(w, mask)
    return None if kernel is None else kernel.pack24(w, mask)


def _unpack(values: Tensor, meta: Tensor) -> Tensor | None:
    """`two_four.unpack` by one kernel, or None."""
    kernel = _pack24(values, meta)
    return None if kernel is None else kernel.unpack24(values, meta)


two_four.register_pack(_pack)
two_four.register_unpack(_unpack)
