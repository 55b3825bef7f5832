"""Runs one kernel of attention without the planner: problem, config, work, poisoned outputs."""

from typing import Any

from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.mask.mask import BlockMask
from sparsek.plan import attention_operands as operands
from sparsek.plan.kernel import AttentionCall
from sparsek.plan.problem import AttentionProblem
from sparsek.testing.poison import poisoned


def problem(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, lse: bool = True) -> AttentionProblem:
    """The problem that attention of q, k and v under `mask` poses."""
    layout = operands.layout(q, k, v)
    return AttentionProblem(
        batch=q.shape[0],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        q_len=q.shape[2],
        kv_len=k.shape[2],
        dim=q.shape[3],
        v_dim=v.shape[3],
        dtype=dtypes.name(q.dtype),
        card=card_of(q.device),
        block=mask.block,
        mask_batch=mask.batch,
        mask_heads=mask.heads,
        **mask.sizes._asdict(),
        by_interval=mask.lo is not None,
        by_bits=mask.bits is not None,
        aligned=layout.aligned,
        unit_stride=layout.unit_stride,
        lse=lse,
    )


def attend(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    config: Any = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `kernel`, written over NaN."""
    p = problem(q, k, v, mask)
    c = kernel.default(p) if config is None else config
    out = operands.empty_out(q, v.shape[3]).fill_(float("nan"))
    lse = poisoned(q.shape[:3], operands.lse_dtype(q.dtype), q.device)
    work = kernel.prepare(p, c, mask)
    factor = operands.checked_scale(scale, q.shape[3])
    kernel.launch(c, work, AttentionCall(q, k, v, mask, factor, out, lse))
    return out, lse
