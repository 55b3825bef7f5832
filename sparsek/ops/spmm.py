"""C = A @ B with A in BSR: checks, the torch.library op, plan and launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek import kernels
from sparsek.core import device as devices
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern
from sparsek.plan import schedule
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.select import Plan, bound_seconds, select


def spmm(
    A: BSR,
    B: Tensor,
    *,
    out: Tensor | None = None,
    plan: Plan | None = None,
    kernel: str | None = None,
) -> Tensor:
    """C = A @ B: block-sparse times dense, accumulated in float32 (float64 for float64).

    A: BSR [M, K]. B: [K, N] or [..., K, N] of A's dtype on A's device, row-major or its transpose view, which is
    read in place. Returns C [..., M, N], row-major, of the same dtype.

    out: written instead of a new tensor; [..., M, N], rows contiguous, no memory shared with A or B.
    plan: from `plan_spmm`; without it one is made and kept with A's pattern.
    kernel: a name of the kernels' table ("hopper.spmm"): that kernel runs or `Unsupported` says why not.

    Only stored blocks are multiplied: rows of B under block columns without any block never reach C, NaN or not.
    The same plan gives the same bits. Once planned, a call neither syncs nor allocates more than C.
    Raises InvalidInput for operands that do not fit and Unsupported with every reason if no kernel can run.
    """
    if torch.compiler.is_compiling():
        if out is not None or plan is not None:
            raise InvalidInput("out= and plan= do not go through torch.compile; call spmm(A, B) there")
        pattern = A.pattern
        return torch.ops.sparsek.spmm(
            A.values, pattern.indptr, pattern.indices, A.order, B, list(A.shape), list(A.block), kernel
        )
    _check_operands(A, B)
    if torch.is_grad_enabled() and (A.values.requires_grad or B.requires_grad):
        raise InvalidInput(
            "spmm has no gradient yet; call it under torch.no_grad(), or use sparsek.reference.spmm.spmm, which has one"
        )
    if out is not None:
        _check_out(A, B, out)
    if plan is None:
        plan = _cached_plan(A, B, out, kernel)
    elif kernel is not None and kernel != plan.kernel:
        raise InvalidInput(f"kernel={kernel!r} contradicts plan, which uses {plan.kernel}")
    return plan(A, B, out)


def plan_spmm(
    A: BSR,
    B: Tensor,
    *,
    kernel: str | None = None,
    config: Any = None,
    device: str | None = None,
) -> Plan:
    """The plan that `spmm(A, B)` would use: frozen, callable, and able to explain itself.

    kernel, config: use this kernel, with this config of its own. device: a card's name ("h200"): plan for that card,
    present or not; such a plan predicts and explains but cannot be called.
    Costs: schedules are made on the host and copied to A's device once.
    """
    _check_operands(A, B)
    if config is not None and kernel is None:
        raise InvalidInput("config= belongs to one kernel; name it with kernel=")
    p = _problem(A, B, None, device)
    return _make_plan(A, p, kernel, config, ready=device is None)


def _make_plan(a: BSR, p: SpmmProblem, kernel: str | None, config: Any, ready: bool) -> Plan:
    if kernel is not None:
        kernels.load(kernel)
    table = [kernels.load(name) for name in kernels.names_for("spmm")]
    chosen, config, candidates = select(p, table, only=kernel, config=config)
    work = chosen.prepare(p, config, a) if ready else None
    seconds = next(c.seconds for c in candidates if c.name == chosen.name)
    return Plan(p, chosen.name, config, seconds, bound_seconds(p), candidates, chosen, work, ready)


def _cached_plan(a: BSR, b: Tensor, out: Tensor | None, kernel: str | None) -> Plan:
    key = (
        "spmm",
        kernel,
        a.order is None,
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() % 16,
        None if out is None else (out.stride(), out.data_ptr() % 16),
        torch.backends.cuda.matmul.allow_tf32,
    )
    return a.pattern.derived(key, lambda: _make_plan(a, _problem(a, b, out, None), kernel, None, ready=True))


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
    itemsize = b.element_size()
    layout = _layout(b)
    lead = b.stride(-2) if layout == "row" else b.stride(-1)
    strides = [lead, *b.stride()[:-2], *((n,) if out is None else out.stride()[:-1])]
    starts = [b.data_ptr(), 0 if out is None else out.data_ptr()]
    batch = 1
    for side in b.shape[:-2]:
        batch *= side
    return SpmmProblem(
        m=m,
        k=k,
        n=n,
        block=a.block,
        nnzb=a.nnzb,
        dtype=dtypes.name(a.dtype),
        card=card,
        batch=batch,
        b_layout=layout,
        aligned=all(s * itemsize % 16 == 0 for s in strides) and all(s % 16 == 0 for s in starts),
        transposed=a.order is not None,
        tf32=torch.backends.cuda.matmul.allow_tf32,
        on_cpu=card.is_cpu,
        row_max=int(lengths.max()) if len(lengths) else 0,
        touches_all_columns=pattern.derived("touches_all", lambda: _touches_all(pattern)),
        merged=merged,
    )


def _touches_all(pattern: BlockPattern) -> bool:
    touched = torch.zeros(pattern.grid[1], dtype=torch.bool)
    touched[torch.from_numpy(pattern.host.indices.astype("int64"))] = True
    return bool(touched.all())


def _layout(b: Tensor) -> str:
    """ "row" for contiguous rows, "col" for the transpose view of such a matrix, "strided" for anything else."""
    k, n = b.shape[-2:]
    if (b.stride(-1) == 1 or n == 1) and b.stride(-2) >= n:
        return "row"
    if (b.stride(-2) == 1 or k == 1) and b.stride(-1) >= k:
        return "col"
    return "strided"


def _check_operands(a: Any, b: Any) -> None:
    if not isinstance(a, BSR):
        raise InvalidInput(f"A must be a BSR, got {type(a).__name__}; make one with BSR.from_dense")
    if not isinstance(b, Tensor) or b.layout != torch.strided:
        raise InvalidInput(f"B must be a dense torch.Tensor, got {type(b).__name__}")
    if b.dim() < 2:
        raise InvalidInput(
            f"B must be [K, N] or [..., K, N], got {b.dim()}-D; for a vector use B.unsqueeze(-1)"
        )
    if b.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and B {list(b.shape)}: B needs {a.shape[1]} rows")
    if b.dtype != a.dtype:
        raise InvalidInput(f"A is {a.dtype} and B {b.dtype}; cast one of them, SparseK does not")
    if b.device != a.device:
        raise InvalidInput(f"A is on {a.device} and B on {b.device}; move one of them, SparseK does not")


def _check_out(a: BSR, b: Tensor, out: Tensor) -> None:
    wanted = (*b.shape[:-2], a.shape[0], b.shape[-1])
    if (
        not isinstance(out, Tensor)
        or tuple(out.shape) != wanted
        or out.dtype != b.dtype
        or out.device != b.device
    ):
        raise InvalidInput(f"out must be {b.dtype} {list(wanted)} on {b.device}, got {_describe(out)}")
    if out.numel() and (out.stride(-1) != 1 or out.stride(-2) < out.shape[-1]):
        raise InvalidInput(f"out must have contiguous rows that do not overlap, got strides {out.stride()}")
    for name, other in (("B", b), ("A's values", a.values)):
        if _overlap(out, other):
            raise InvalidInput(f"out shares memory with {name}; C would be read while it is written")


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x0, x1), (y0, y1) = _span(x), _span(y)
    return x0 < y1 and y0 < x1


def _span(x: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (reach + 1) * x.element_size()


def _describe(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


# Patterns that came through the compiled op, kept as long as their indptr lives, so that plans are made once.
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
    if pattern is None or pattern.indices.data_ptr() != indices.data_ptr():
        pattern = BlockPattern.unchecked((shape[0], shape[1]), (block[0], block[1]), indptr, indices)
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


BSR.register_matmul(spmm)
