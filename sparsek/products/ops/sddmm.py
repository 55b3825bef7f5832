"""`sddmm`, S = X @ Y at the stored blocks of a pattern: checks, the torch.library op, plan and launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, tracing
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.autocast import autocasts, follow_autocast
from sparsek.engine.call.recorded_calls import Slot
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import check_plan
from sparsek.engine.planning import choose
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops import gradients, library_args, recorded_products
from sparsek.products.ops.library_args import SddmmArgs
from sparsek.products.plan import operands
from sparsek.products.plan.sddmm import Sampled, SddmmPlan

SDDMM = Operation(SddmmPlan, choose)


def sddmm(
    X: Tensor,
    Y: Tensor,
    pattern: BlockPattern,
    *,
    plan: SddmmPlan | None = None,
    kernel: str | None = None,
) -> BSR:
    """Compute S = X @ Y at the stored blocks of a pattern: sampled dense-dense matrix multiplication.

    `sddmm(dC, B.T, A.pattern)` is the gradient of A in C = A @ B. Once planned, a call does not synchronize and
    allocates only the values. The same plan gives the same bits.

    Args:
        X: [M, K] in bf16, fp16, fp32 or fp64, row-major or the transpose view of a row-major matrix, which is read in
            place. Fewer kernels read other strides.
        Y: [K, N] of the dtype of X, on its device, with strides like X.
        pattern: A BlockPattern of shape (M, N) on their device.
        plan: From `plan_sddmm`. By default a plan is made once, and cached with the pattern.
        kernel: The name of a kernel, for example "hopper.sddmm". It runs or raises Unsupported. The backward pass uses
            kernels of the same family.

    Returns:
        A BSR [M, N] on the pattern, accumulated in float32 (float64 for float64) and rounded once. Values outside the
        matrix are 0.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable in X and Y; with `plan` there is no gradient. A NaN in row i of X or column j of Y reaches stored
    elements of that row or column only, except with vendor.sddmm, which computes the dense product. Under
    torch.autocast X and Y are cast to its dtype, which is that of S; with `plan` they are not.

    Examples:
        >>> pattern = sk.random_bsr(256, 128, block=32, density=0.25).pattern
        >>> sk.sddmm(torch.randn(256, 64), torch.randn(64, 128), pattern).values.shape
        torch.Size([8, 32, 32])
    """
    if autocasts() and plan is None:
        X, Y = follow_autocast(X, Y)
    if plan is not None:
        check_plan(plan, SddmmPlan, "plan_sddmm", kernel)
        transforms.check(X, Y)
        transforms.refuse("plan=")
        return plan(X, Y, pattern)
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    values = sampled(Sampled(X, Y, pattern), kernel)
    return BSR.of_fields({"pattern": pattern, "values": values, "order": None})


def plan_sddmm(
    X: Tensor,
    Y: Tensor,
    pattern: BlockPattern,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SddmmPlan:
    """Return the plan that `sddmm(X, Y, pattern)` would use: frozen, callable, and explained by `.explain()`.

    The schedule is made on the host and copied to the device of the pattern once.

    Args:
        X: As in `sddmm`.
        Y: As in `sddmm`.
        pattern: As in `sddmm`.
        kernel: The name of a kernel to use.
        config: A config of that kernel, by its text or by some of its fields, as `sparsek tune` prints them.
        device: The name of a card, for example "h200", present or not: the plan predicts and explains for it, and
            cannot be called.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.
    """
    transforms.refuse("plan_sddmm")
    operands.check_sddmm(X, Y, pattern, predicted=device is not None)
    return SDDMM.plan(Sampled(X, Y, pattern), kernel, config, device)


def sampled(call: Sampled, kernel: str | None) -> Tensor:
    """The values of a call, with gradients."""
    slot, (x, y, pattern) = recorded_calls.UNBOUND, call
    if not torch.compiler.is_compiling() and pattern.__class__ is BlockPattern:
        slot = recorded_products.sample(x, y, pattern, kernel)
        if slot.__class__ is not Slot:
            return slot
    if not slot.learns:
        operands.check_sddmm(*call)
        transforms.check(x, y)
    if transforms.traced() or tracing.wants_gradient(x, y):
        transforms.check_untransformed(pattern.indptr)
        return transforms.call("sddmm", x, y, *library_args.flat_pattern(pattern), kernel)
    return slot.run(lambda: recorded_products.run(SDDMM, call, kernel, slot))


def _run_op(args: SddmmArgs) -> Tensor:
    """The values, without autograd; by a recorded call where there is one."""
    x, y, indptr, indices, sizes, kernel = args
    call = Sampled(x, y, library_args.pattern_of(indptr, indices, sizes))
    operands.check_sddmm(*call)
    slot = recorded_products.sample(*call, kernel)
    return (
        slot.run(lambda: recorded_products.run(SDDMM, call, kernel, slot)) if slot.__class__ is Slot else slot
    )


def _fake(args: SddmmArgs) -> Tensor:
    rows, columns, bm, bn = args.sizes
    pattern = BlockPattern.unchecked((rows, columns), (bm, bn), args.indptr, args.indices)
    operands.check_sddmm(args.x, args.y, pattern)
    return args.x.new_empty((args.indices.shape[0], bm, bn))


transforms.register("sddmm", SddmmArgs, _run_op, _fake, gradients.of_sddmm, gradients.save_sddmm)
