"""C = A @ B for two BSR matrices: checks, the torch.library ops, matches, plan and launch."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import captured
from sparsek.core.tracing import untransformed
from sparsek.matrix.bsr import BSR
from sparsek.matrix.padding import zero_outside
from sparsek.matrix.pattern import BlockPattern
from sparsek.ops import bound, gradients, library_args, transforms
from sparsek.ops.autocast import autocasts, follow_autocast
from sparsek.ops.bound import Slot
from sparsek.ops.library_args import SampledArgs, SpgemmArgs
from sparsek.ops.planning import choose, matcher
from sparsek.ops.spmm import spmm
from sparsek.plan import operands
from sparsek.plan.op import Operation
from sparsek.plan.plan import check_plan
from sparsek.plan.spgemm import Kept, MatchCache, Pair, SpgemmPlan

SPGEMM = Operation(SpgemmPlan, choose)
DENSE_SCHEMA = library_args.schema_of(SpgemmArgs, without=("c_indptr", "c_indices"))


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
    out: str | BlockPattern = "dense",
    *,
    plan: SpgemmPlan | None = None,
    kernel: str | None = None,
) -> Tensor | BSR:
    """C = A @ B: block-sparse times block-sparse. `A @ B` is spgemm(A, B, "bsr").

    A: BSR [M, K] in blocks of (bm, bk). B: BSR [K, N] in blocks of (bk, bn), of A's dtype on its device. Transposed
    views cost nothing. out: "dense" for a tensor [M, N], row-major; "bsr" for a BSR with every block that some pair of
    blocks adds to; a BlockPattern of C's shape and blocks for a BSR with these, of which those without a pair are 0.
    Values outside the matrix are 0. Summed in float32 (float64 for float64), rounded once.

    plan: from `plan_spgemm`; without it one is made and kept with A's pattern, as are the matched pairs of blocks.
    kernel: a name of the kernels' table ("cpu.spgemm"): that kernel runs or `Unsupported` says why not. The backward
    pass uses it too.

    Differentiable in the values of A and B, whose gradients stay [nnzb, bm, bk]; plan= has no gradient. Inside
    torch.compile out="bsr" is refused, since how many blocks C has is data.
    The same plan gives the same bits. Matching two patterns for the first time waits for the device; after that no sync
    and no allocation but C. Under torch.autocast A and B are cast to its dtype, which is C's; with plan= they are not.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.
    """
    if autocasts() and plan is None:
        A, B = follow_autocast(A, B)
    if plan is not None:
        _check_plan(plan, out, kernel)
        transforms.check(*(x.values for x in (A, B) if isinstance(x, BSR)))
        transforms.refuse("plan=")
        return plan(A, B)
    if kernel is not None:
        arguments.text("kernel", kernel)
    compiling = torch.compiler.is_compiling()
    if not compiling and A.__class__ is B.__class__ is BSR:
        at = out if isinstance(out, BlockPattern) else None
        kept = A.pattern.derived("matches", MatchCache).find(B.pattern, at)
        if kept is not None and (at is not None or (isinstance(out, str) and out in ("dense", "bsr"))):
            call = Pair(A, B, kept.matches, at is None and out == "dense", kept.home)
            c = _repeat(call, kernel)
            if c.__class__ is not Slot:
                return call.seen(c)
    operands.check_spgemm(A, B, out)
    transforms.check(A.values, B.values)
    if compiling or transforms.active() or operands.wants_gradient(A.values, B.values):
        transforms.check_untransformed(A, B)
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
    out: str | BlockPattern = "dense",
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SpgemmPlan:
    """The plan that `spgemm(A, B, out)` would use: frozen, callable, and able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called.
    Costs: pairs of blocks are matched on the patterns' device, which waits for it, unless they have been before;
    schedules are made on the host and copied there once.
    """
    transforms.refuse("plan_spgemm")
    operands.check_spgemm(A, B, out)
    return SPGEMM.plan(_pair(A, B, out), kernel, config, device)


def _check_plan(plan: Any, out: str | BlockPattern, kernel: str | None) -> None:
    check_plan(plan, SpgemmPlan, "plan_spgemm", kernel)
    operands.check_wanted(out)
    planned = plan.matches.pattern if plan.matches is not None else None
    if (isinstance(out, str) and out == "dense") != plan.problem.dense_out or (
        isinstance(out, BlockPattern) and out is not planned
    ):
        raise InvalidInput(
            "out contradicts plan, which was made for another one; plan_spgemm(A, B, out) for this one"
        )


def _matched(a: BlockPattern, b: BlockPattern, wanted: Any) -> Kept:
    """The matches of both patterns, at those blocks of C that `wanted` has if it is a pattern."""
    at = wanted if isinstance(wanted, BlockPattern) else None
    return a.derived("matches", MatchCache).get(a, b, at, captured(a.indptr), matcher(a.device))


def _pair(a: BSR, b: BSR, out: str | BlockPattern) -> Pair:
    kept = _matched(a.pattern, b.pattern, out)
    return Pair(a, b, kept.matches, isinstance(out, str) and out == "dense", kept.home)


def _repeat(call: Pair, kernel: str | None) -> Any:
    a, b, _, dense, home = call
    more = dense, a.order is None, b.order is None, kernel
    assert home is not None
    return bound.repeat(home.derived("calls", bound.Calls), more, (a.values, b.values))


def _run(call: Pair, kernel: str | None) -> Tensor:
    """C or its values, without autograd, of operands that have been checked; bound where it may be."""
    slot = _repeat(call, kernel)
    return slot.run(lambda: SPGEMM.run(call, kernel)) if slot.__class__ is Slot else slot


def _gathered(x: Tensor, pattern: BlockPattern) -> BSR:
    """The blocks of a dense matrix, any strides, that `pattern` names. Reads and writes O(stored). No sync."""
    (m, n), (bm, bn) = pattern.shape, pattern.block
    rows = pattern.block_rows.long()[:, None] * bm + torch.arange(bm, device=x.device)
    columns = pattern.indices.long()[:, None] * bn + torch.arange(bn, device=x.device)
    if pattern.is_ragged:
        rows, columns = rows.clamp(max=m - 1), columns.clamp(max=n - 1)
    values = x[rows[:, :, None], columns[:, None, :]]
    return BSR.unchecked(pattern, zero_outside(pattern, values))


@torch.library.custom_op(
    "sparsek::spgemm", mutates_args=(), schema=library_args.schema_of(SpgemmArgs), tags=library_args.TAGS
)
def _spgemm_op(*given: Any) -> Tensor:
    """The values of A @ B at the blocks of C."""
    args = SpgemmArgs(*given)
    a, b = library_args.matrix(*args.a), library_args.matrix(*args.b)
    operands.check_spgemm(a, b, "bsr")
    with torch.no_grad():
        c = library_args.pattern_of(args.c_indptr, args.c_indices, args.c_sizes)
        return _run(_pair(a, b, c), args.kernel)


@_spgemm_op.register_fake
def _(*given: Any) -> Tensor:
    args = SpgemmArgs(*given)
    operands.check_spgemm(library_args.fake(*args.a), library_args.fake(*args.b), "bsr")
    return args.a_values.new_empty((args.c_indices.shape[0], *args.c_sizes[2:]))


@torch.library.custom_op(
    "sparsek::spgemm_dense",
    mutates_args=(),
    schema=DENSE_SCHEMA,
    tags=library_args.TAGS,
)
def _spgemm_dense_op(*given: Any) -> Tensor:
    """A @ B, dense."""
    args = SpgemmArgs.dense(given)
    a, b = library_args.matrix(*args.a), library_args.matrix(*args.b)
    operands.check_spgemm(a, b, "dense")
    with torch.no_grad():
        return _run(_pair(a, b, "dense"), args.kernel)


@_spgemm_dense_op.register_fake
def _(*given: Any) -> Tensor:
    args = SpgemmArgs.dense(given)
    operands.check_spgemm(library_args.fake(*args.a), library_args.fake(*args.b), "dense")
    return args.a_values.new_empty(args.c_sizes[:2])


@torch.library.custom_op(
    "sparsek::sampled", mutates_args=(), schema=library_args.schema_of(SampledArgs), tags=library_args.TAGS
)
def _sampled_op(*given: Any) -> Tensor:
    """The values of X @ A at the blocks of P, X dense and A in BSR: what the adjoint of `spgemm_dense` is made of.

    X is read at the blocks that add to some block of P. With `p_transposed` P is the transpose of the pattern that is
    given, and the values are in that one's order and blocks.
    """
    args = SampledArgs(*given)
    a, p = library_args.matrix(*args.a), library_args.pattern_of(args.p_indptr, args.p_indices, args.p_sizes)
    with torch.no_grad():
        met = _matched(p.T if args.p_transposed else p, a.T.pattern, None).matches.pattern
        left, right = _gathered(args.x, met), a
        if args.p_transposed:
            left, right = right.T, left.T
        return _run(_pair(left, right, p), args.kernel)


@_sampled_op.register_fake
def _(*given: Any) -> Tensor:
    args = SampledArgs(*given)
    return args.values.new_empty((args.p_indices.shape[0], *args.p_sizes[2:]))


def _multiply(a: Any, b: Any) -> Any:
    """What `a @ b` means where one is a BSR: a BSR if both are, dense otherwise."""
    return spgemm(a, b, "bsr") if isinstance(a, BSR) and isinstance(b, BSR) else spmm(a, b)


transforms.differentiable(_spgemm_op, gradients.of_spgemm, gradients.save_spgemm)
transforms.differentiable(_spgemm_dense_op, gradients.of_spgemm, gradients.save_spgemm)
transforms.differentiable(_sampled_op, gradients.of_sampled, gradients.save_sampled)
BSR.register_matmul(_multiply)
