"""C = A @ B with A in BSR: checks, the torch.library op, plan and launch."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import device as devices
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern
from sparsek.ops.planning import choose
from sparsek.plan import operands, schedule
from sparsek.plan.cache import PlanCache
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.spmm import SpmmPlan


def spmm(
    A: BSR,
    B: Tensor,
    *,
    out: Tensor | None = None,
    plan: SpmmPlan | None = None,
    kernel: str | None = None,
) -> Tensor:
    """C = A @ B: block-sparse times dense, accumulated in float32 (float64 for float64).

    A: BSR [M, K]. B: [K, N] or [..., K, N] of A's dtype on A's device, row-major or its transpose view, which is
    read in place. Returns C [..., M, N], row-major, of the same dtype.

    out: written instead of a new tensor; [..., M, N], rows contiguous, no memory shared with A or B.
    plan: from `plan_spmm`; without it one is made and kept with A's pattern.
    kernel: a name of the kernels' table ("hopper.spmm"): that kernel runs or `Unsupported` says why not.

    Rows of B under block columns without any block never reach C, NaN or not. A NaN under a stored block reaches the
    rows of that block; where the plan merges block rows also the rows merged with them; with vendor.dense all rows.
    The same plan gives the same bits. Once planned, hopper.spmm and portable.spmm neither sync nor allocate more
    than C. torch.autocast does not touch the operands.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.
    """
    if torch.compiler.is_compiling():
        if out is not None or plan is not None:
            raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
        pattern = A.pattern
        return torch.ops.sparsek.spmm(
            A.values, pattern.indptr, pattern.indices, A.order, B, list(A.shape), list(A.block), kernel
        )
    if plan is not None:
        if not isinstance(plan, SpmmPlan):
            raise InvalidInput(f"plan must come from plan_spmm, got {type(plan).__name__}")
        if kernel not in (None, plan.kernel):
            raise InvalidInput(f"kernel={kernel!r} contradicts plan, which uses {plan.kernel}")
        return plan(A, B, out)
    operands.check_operands(A, B)
    operands.check_no_gradient(A, B)
    if out is not None:
        operands.check_out(A, B, out)
    return _cached_plan(A, B, out, kernel).run(A, B, out)


def plan_spmm(
    A: BSR,
    B: Tensor,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> SpmmPlan:
    """The plan that `spmm(A, B)` would use: frozen, callable, and able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called.
    Costs: schedules are made on the host and copied to A's device once.
    """
    operands.check_operands(A, B)
    if config is not None and kernel is None:
        raise InvalidInput("config= belongs to one kernel; name it with kernel=")
    p = _problem(A, B, None, None if device is None else str(device))
    return _make_plan(A, p, kernel, config, ready=device is None)


def _make_plan(a: BSR, p: SpmmProblem, kernel: str | None, config: Any, ready: bool) -> SpmmPlan:
    choice = choose(p, kernel, config)
    work = choice.kernel.prepare(p, choice.config, a) if ready else None
    return SpmmPlan(p, choice, work, ready, weakref.ref(a.pattern))


def _tf32(b: Tensor) -> bool:
    """Whether torch may multiply these as TF32. Older settings show here too, and newer ones break reading those."""
    return b.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _cached_plan(a: BSR, b: Tensor, out: Tensor | None, kernel: str | None) -> SpmmPlan:
    key = (
        kernel,
        a.order is None,
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() % 16,
        None if out is None else (out.stride(), out.data_ptr() % 16),
        _tf32(b),
    )
    plans = a.pattern.derived("plans", PlanCache)
    captured = b.is_cuda and torch.cuda.is_current_stream_capturing()
    return plans.get(key, lambda: _make_plan(a, _problem(a, b, out, None), kernel, None, True), captured)


def _problem(a: BSR, b: Tensor, out: Tensor | None, card_name: str | None) -> SpmmProblem:
    pattern = a.pattern
    m, k = a.shape
    n = b.shape[-1]
    card = devices.card_of(b.device) if card_name is None else devices.card_named(card_name)
    lengths = pattern.host.indptr[1:] - pattern.host.indptr[:-1]
    merged = ()
    if a.block[0] <= 64 and a.order is None:
        factors = [r for r in (2, 4, 8) if r * a.block[0] <= 128 and a.block[0] & (a.block[0] - 1) == 0]
        merged = tuple((r, schedule.merged_steps(pattern, r)) for r in factors)
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
        aligned=operands.aligned(b, out),
        transposed=a.order is not None,
        tf32=_tf32(b),
        row_max=int(lengths.max()) if len(lengths) else 0,
        touches_all_columns=pattern.derived("touches_all", lambda: _touches_all(pattern)),
        merged=merged,
    )


def _touches_all(pattern: BlockPattern) -> bool:
    touched = torch.zeros(pattern.grid[1], dtype=torch.bool)
    touched[torch.from_numpy(pattern.host.indices.astype("int64"))] = True
    return bool(touched.all())


# Patterns that came through the compiled op, so that plans are made once. An entry lives as long as its indptr: the
# pattern holds another tensor object on the same memory.
_PATTERNS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@torch.library.custom_op("sparsek::spmm", mutates_args=())
def _spmm_op(
    values: Tensor,
    indptr: Tensor,
    indices: Tensor,
    order: Tensor | None,
    b: Tensor,
    shape: list[int],
    block: list[int],
    kernel: str | None,
) -> Tensor:
    pattern = _PATTERNS.get(indptr)
    wanted = (indices.data_ptr(), (shape[0], shape[1]), (block[0], block[1]))
    if pattern is None or (pattern.indices.data_ptr(), pattern.shape, pattern.block) != wanted:
        pattern = BlockPattern.unchecked(*wanted[1:], indptr.detach(), indices.detach())
        _PATTERNS[indptr] = pattern
    with torch.no_grad():
        return spmm(BSR.unchecked(pattern, values, order), b, kernel=kernel)


@_spmm_op.register_fake
def _(
    values: Tensor,
    indptr: Tensor,
    indices: Tensor,
    order: Tensor | None,
    b: Tensor,
    shape: list[int],
    block: list[int],
    kernel: str | None,
) -> Tensor:
    return b.new_empty((*b.shape[:-2], shape[0], b.shape[-1]))


def _refuse_gradient(ctx: Any, grad: Tensor) -> NoReturn:
    raise InvalidInput(operands.NO_GRADIENT)


_spmm_op.register_autograd(_refuse_gradient)
BSR.register_matmul(spmm)
