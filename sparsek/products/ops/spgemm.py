"""`spgemm`, C = A @ B for two BSR matrices: checks, the torch.library ops, matches, plan and launch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor

from sparsek.core import arguments, tracing
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import untransformed
from sparsek.engine.call import recorded_calls, transforms
from sparsek.engine.call.autocast import autocasts, follow_autocast
from sparsek.engine.call.recorded_calls import Slot
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import check_plan
from sparsek.engine.planning import choose
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.padding import zero_outside
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops import gradients, library_args
from sparsek.products.ops.library_args import SampledArgs, SpgemmArgs
from sparsek.products.plan import operands
from sparsek.products.plan.matches import match
from sparsek.products.plan.spgemm import CachedMatches, MatchCache, Matcher, Pair, SpgemmPlan

SPGEMM = Operation(SpgemmPlan, choose)
Output: TypeAlias = Literal["dense", "bsr"] | BlockPattern


@overload
def spgemm(
    A: BSR,
    B: BSR,
    out: Literal["dense"] = "dense",
    *,
    plan: SpgemmPlan | None = None,
    kernel: str | None = None,
) -> Tensor: ...
@overload
def spgemm(
    A: BSR,
    B: BSR,
    out: Literal["bsr"] | BlockPattern,
    *,
    plan: SpgemmPlan | None = None,
    kernel: str | None = None,
) -> BSR: ...
def spgemm(
    A: BSR,
    B: BSR,
    out: Output = "dense",
    *,
    plan: SpgemmPlan | None = None,
    kernel: str | None = None,
) -> Tensor | BSR:
    """Compute C = A @ B of two BSR. `A @ B` is spgemm(A, B, "bsr").

    Matching two patterns for the first time synchronizes; after that a call does not, and allocates only C. The same
    plan gives the same bits.

    Args:
        A: A BSR [M, K] in blocks of (bm, bk). Transposed views cost nothing.
        B: A BSR [K, N] in blocks of (bk, bn), of the dtype of A, on its device.
        out: The form of C. "dense": a tensor [M, N], row-major. "bsr": a BSR with every block that a pair of blocks
            contributes to. A BlockPattern of the shape and blocks of C: a BSR on it, where blocks without a pair are 0.
        plan: From `plan_spgemm`. By default a plan is made once, and cached with the pattern of A, as are the matched
            pairs of blocks.
        kernel: The name of a kernel, for example "hopper.spgemm". It runs or raises Unsupported. The backward
            pass uses it too.

    Returns:
        C, accumulated in float32 (float64 for float64) and rounded once. Values outside the matrix are 0.

    Raises:
        InvalidInput: For operands that do not fit, and for out="bsr" inside torch.compile, because the number of blocks
            of C depends on data.
        Unsupported: If no kernel can run; the message has the reasons of each.

    Differentiable in the values of A and B, with gradients [nnzb, bm, bk]; with `plan` there is no gradient. Under
    torch.autocast A and B are cast to its dtype, which is that of C; with `plan` they are not.

    Examples:
        >>> A = sk.random_bsr(128, 128, block=32, density=0.25)
        >>> sk.spgemm(A, A.T).shape, (A @ A.T).density <= 1
        (torch.Size([128, 128]), True)
    """
    if autocasts() and plan is None:
        A, B = follow_autocast(A, B)
    if plan is not None:
        _check_plan(plan, out, kernel)
        transforms.check(*(x.values for x in (A, B) if isinstance(x, BSR)))
        transforms.refuse("plan=")
        return plan(A, B)
    if kernel is not None:
        arguments.encodable("kernel", kernel)
    compiling = torch.compiler.is_compiling()
    if not compiling and A.__class__ is B.__class__ is BSR:
        at = out if isinstance(out, BlockPattern) else None
        kept = A.pattern.derived("matches", MatchCache).find(B.pattern, at)
        if kept is not None and (at is not None or (isinstance(out, str) and out in ("dense", "bsr"))):
            call = Pair(A, B, kept.matches, at is None and out == "dense", kept.owner)
            c = _repeat(call, kernel)
            if c.__class__ is not Slot:
                return call.seen(c)
    operands.check_spgemm(A, B, out)
    transforms.check(A.values, B.values)
    if compiling or transforms.active() or tracing.wants_gradient(A.values, B.values):
        transforms.check_untransformed(A.pattern.indptr, B.pattern.indptr)
        both = *library_args.flat(A), *library_args.flat(B)
        if isinstance(out, str) and out == "dense":
            return transforms.call("spgemm_dense", *both, kernel)
        if isinstance(out, str):
            if compiling:
                raise InvalidInput(
                    'out="bsr" does not go through torch.compile, as the number of blocks depends on the patterns; '
                    'make the pattern outside, spgemm(A, B, "bsr").pattern, and hand it over as out='
                )
            out = untransformed(lambda: _matched(A.pattern, B.pattern, None)).matches.pattern
        indptr, indices, _ = library_args.flat_pattern(out)
        return BSR.unchecked(out, transforms.call("spgemm", *both, indptr, indices, kernel))
    call = _pair(A, B, out)
    return call.seen(_run(call, kernel))


def plan_spgemm(
    A: BSR,
    B: BSR,
    out: Output = "dense",
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SpgemmPlan:
    """Return the plan that `spgemm(A, B, out)` would use: frozen, callable, and explained by `.explain()`.

    Matching two patterns for the first time synchronizes. The schedule is made on the host and copied to the device
    once.

    Args:
        A: As in `spgemm`.
        B: As in `spgemm`.
        out: As in `spgemm`.
        kernel: The name of a kernel to use.
        config: A config of that kernel, by its text or by some of its fields, as `sparsek tune` prints them.
        device: The name of a card, for example "h200", present or not: the plan predicts and explains for it, and
            cannot be called.

    Raises:
        InvalidInput: For operands that do not fit.
        Unsupported: If no kernel can run; the message has the reasons of each.
    """
    transforms.refuse("plan_spgemm")
    operands.check_spgemm(A, B, out)
    return SPGEMM.plan(_pair(A, B, out), kernel, config, device)


def _check_plan(plan: Any, out: Output, kernel: str | None) -> None:
    check_plan(plan, SpgemmPlan, "plan_spgemm", kernel)
    operands.check_wanted(out)
    planned = plan.matches.pattern if plan.matches is not None else None
    if (isinstance(out, str) and out == "dense") != plan.problem.dense_out or (
        isinstance(out, BlockPattern) and out is not planned
    ):
        raise InvalidInput(
            "out contradicts plan, which was made for another one; plan_spgemm(A, B, out) for this one"
        )


def _matched(a: BlockPattern, b: BlockPattern, wanted: Any) -> CachedMatches:
    """The matches of both patterns; if `wanted` is a pattern, at its blocks of C only."""
    at = wanted if isinstance(wanted, BlockPattern) else None
    return a.derived("matches", MatchCache).get(a, b, at, captured(a.indptr), matcher(a.device))


def _pair(a: BSR, b: BSR, out: Output) -> Pair:
    kept = _matched(a.pattern, b.pattern, out)
    return Pair(a, b, kept.matches, isinstance(out, str) and out == "dense", kept.owner)


def _repeat(call: Pair, kernel: str | None) -> Any:
    a, b, _, dense, owner = call
    settings = dense, a.order is None, b.order is None, kernel
    assert owner is not None
    return recorded_calls.repeat(owner.derived("calls", recorded_calls.Calls), settings, (a.values, b.values))


def _run(call: Pair, kernel: str | None) -> Tensor:
    """C or its values, without autograd, for checked operands; by a recorded call where there is one."""
    slot = _repeat(call, kernel)
    return slot.run(lambda: SPGEMM.run(call, kernel)) if slot.__class__ is Slot else slot


def _gathered(x: Tensor, pattern: BlockPattern) -> BSR:
    """The blocks of a dense matrix, any strides, at `pattern`. Reads and writes O(stored). No sync."""
    (m, n), (bm, bn) = pattern.shape, pattern.block
    rows = pattern.block_rows.long()[:, None] * bm + torch.arange(bm, device=x.device)
    columns = pattern.indices.long()[:, None] * bn + torch.arange(bn, device=x.device)
    if pattern.is_ragged:
        rows, columns = rows.clamp(max=m - 1), columns.clamp(max=n - 1)
    values = x[rows[:, :, None], columns[:, None, :]]
    return BSR.unchecked(pattern, zero_outside(pattern, values))


def _run_op(args: SpgemmArgs) -> Tensor:
    """A @ B, dense, or its values at the blocks of C."""
    a, b = library_args.matrix(*args.a), library_args.matrix(*args.b)
    operands.check_spgemm(a, b, args.form)
    out: Any = "dense"
    if args.form != out:
        out = library_args.pattern_of(args.c_indptr, args.c_indices, args.c_sizes)
    return _run(_pair(a, b, out), args.kernel)


def _fake(args: SpgemmArgs) -> Tensor:
    operands.check_spgemm(library_args.fake(*args.a), library_args.fake(*args.b), args.form)
    rows, columns, *block = args.c_sizes
    return args.a_values.new_empty(
        (rows, columns) if args.form == "dense" else (args.c_indices.shape[0], *block)
    )


def _run_sampled(args: SampledArgs) -> Tensor:
    """The values of X @ A at the blocks of P, for X dense and A in BSR. The adjoint of `spgemm_dense` uses it.

    X is read at the blocks that contribute to a block of P. With `p_transposed`, P is the transpose of the given
    pattern, and the values are in the order and blocks of that one.
    """
    a, p = library_args.matrix(*args.a), library_args.pattern_of(args.p_indptr, args.p_indices, args.p_sizes)
    met = _matched(p.T if args.p_transposed else p, a.T.pattern, None).matches.pattern
    left, right = _gathered(args.x, met), a
    if args.p_transposed:
        left, right = right.T, left.T
    return _run(_pair(left, right, p), args.kernel)


def _fake_sampled(args: SampledArgs) -> Tensor:
    return args.values.new_empty((args.p_indices.shape[0], *args.p_sizes[2:]))


_GRADIENTS = gradients.of_spgemm, gradients.save_spgemm
transforms.register("spgemm", SpgemmArgs, _run_op, _fake, *_GRADIENTS)
transforms.register(
    "spgemm_dense",
    SpgemmArgs.dense,
    _run_op,
    _fake,
    *_GRADIENTS,
    args=SpgemmArgs,
    without=("c_indptr", "c_indices"),
)
transforms.register(
    "sampled", SampledArgs, _run_sampled, _fake_sampled, gradients.of_sampled, gradients.save_sampled
)


def matcher(device: torch.device) -> Matcher:
    """The function that matches two patterns on `device`: by Triton on a GPU, otherwise by torch, with equal lists."""
    if device.type == "cuda":
        try:
            from sparsek.products.kernels.spgemm import match as portable
        except ImportError:
            return match
        return portable.match
    return match
