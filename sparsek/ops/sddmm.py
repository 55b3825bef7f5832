"""S = X @ Y at the stored blocks of a pattern: checks, the torch.library op, plan and launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.ops import bound, gradients, library_args, transforms
from sparsek.ops.autocast import autocasts, follow_autocast
from sparsek.ops.bound import Slot
from sparsek.ops.library_args import SddmmArgs
from sparsek.ops.planning import choose
from sparsek.plan import operands
from sparsek.plan.op import Operation
from sparsek.plan.plan import check_plan
from sparsek.plan.sddmm import Sampled, SddmmPlan

SDDMM = Operation(SddmmPlan, choose)


def sddmm(
    X: Tensor,
    Y: Tensor,
    pattern: BlockPattern,
    *,
    plan: SddmmPlan | None = None,
    kernel: str | None = None,
) -> BSR:
    """S = X @ Y at the stored blocks of `pattern`: sampled dense times dense, a BSR [M, N].

    X: [M, K]. Y: [K, N] of its dtype on its device; each row-major or the transpose view of such a matrix, which is
    read in place: `sddmm(dC, B.T, A.pattern)` is the gradient of A in C = A @ B. Other strides are read in place too,
    by fewer kernels. pattern: BlockPattern of shape (M, N) on their device. Values of S outside the matrix are 0.
    Summed in float32 (float64 for float64), rounded once.

    plan: from `plan_sddmm`; without it one is made and kept with the pattern.
    kernel: a name of the kernels' table ("cpu.sddmm"): that kernel runs or `Unsupported` says why not. The backward
    pass uses kernels of the same family.

    Differentiable in X and Y. plan= has no gradient. A NaN in row i of X or column j of Y reaches stored elements of
    that row or column alone, except with vendor.sddmm, which computes the dense product.
    The same plan gives the same bits. Once planned, no sync and no allocation but the values. Under torch.autocast X
    and Y are cast to its dtype, which is S's, as by torch.matmul; with plan= they are not.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.
    """
    if autocasts() and plan is None:
        X, Y = follow_autocast(X, Y)
    if plan is not None:
        check_plan(plan, SddmmPlan, "plan_sddmm", kernel)
        transforms.check(X, Y)
        transforms.refuse("plan=")
        return plan(X, Y, pattern)
    if kernel is not None:
        arguments.text("kernel", kernel)
    return BSR.unchecked(pattern, sampled(X, Y, pattern, kernel))


def plan_sddmm(
    X: Tensor,
    Y: Tensor,
    pattern: BlockPattern,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SddmmPlan:
    """The plan that `sddmm(X, Y, pattern)` would use: frozen, callable, and able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called.
    Costs: schedules are made on the host and copied to the pattern's device once.
    """
    transforms.refuse("plan_sddmm")
    operands.check_sddmm(X, Y, pattern)
    return SDDMM.plan(Sampled(X, Y, pattern), kernel, config, device)


def sampled(x: Tensor, y: Tensor, pattern: BlockPattern, kernel: str | None) -> Tensor:
    """The values of X @ Y at the blocks of a pattern, with gradients."""
    slot = bound.UNBOUND
    if not torch.compiler.is_compiling() and pattern.__class__ is BlockPattern:
        slot = _repeat(x, y, pattern, kernel)
        if slot.__class__ is not Slot:
            return slot
    if not slot.learns:
        operands.check_sddmm(x, y, pattern)
        transforms.check(x, y)
    learns = operands.wants_gradient(x, y)
    if library_args.traced() or (learns and not library_args.are_plain(x, y)):
        transforms.check_untransformed(pattern)
        return transforms.call("sddmm", x, y, *library_args.flat_pattern(pattern), kernel)
    if learns:
        return Sddmm.apply(x, y, *library_args.flat_pattern(pattern), kernel, pattern)
    return slot.run(lambda: SDDMM.run(Sampled(x, y, pattern), kernel))


def _repeat(x: Tensor, y: Tensor, pattern: BlockPattern, kernel: str | None) -> Any:
    return bound.repeat(pattern.derived("calls", bound.Calls), ("sddmm", kernel), (x, y))


def _run(x: Tensor, y: Tensor, pattern: BlockPattern, kernel: str | None) -> Tensor:
    """The values, without autograd, of operands that have been checked; bound where it may be."""
    slot = _repeat(x, y, pattern, kernel)
    return slot.run(lambda: SDDMM.run(Sampled(x, y, pattern), kernel)) if slot.__class__ is Slot else slot


@torch.library.custom_op(
    "sparsek::sddmm", mutates_args=(), schema=library_args.schema_of(SddmmArgs), tags=library_args.TAGS
)
def _sddmm_op(*given: Any) -> Tensor:
    x, y, indptr, indices, sizes, kernel = SddmmArgs(*given)
    pattern = library_args.pattern_of(indptr, indices, sizes)
    operands.check_sddmm(x, y, pattern)
    with torch.no_grad():
        return _run(x, y, pattern, kernel)


@_sddmm_op.register_fake
def _(*given: Any) -> Tensor:
    x, y, indptr, indices, sizes, _ = SddmmArgs(*given)
    rows, columns, bm, bn = sizes
    operands.check_sddmm(x, y, BlockPattern.unchecked((rows, columns), (bm, bn), indptr, indices))
    return x.new_empty((indices.shape[0], bm, bn))


transforms.differentiable(_sddmm_op, gradients.of_sddmm, gradients.save_sddmm)


class Sddmm(torch.autograd.Function):
    """The values, with gradients, of the op's arguments and their pattern: the op costs the host more."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *args, pattern = given
        x, y, *_, kernel = args
        values = sampled(x, y, pattern, kernel)
        gradients.save_sddmm(ctx, args, values)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients.of_sddmm(ctx, grad), None
