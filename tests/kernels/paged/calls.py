"""Calls of kernels of attention over paged keys, with poisoned outputs."""

from typing import Any

import torch
from torch import Tensor

from sparsek.core.device import card_of
from sparsek.plan.attention_paged import Paged
from sparsek.plan.kernel import PagedCall
from sparsek.plan.problem import PagedProblem
from sparsek.testing.paged_cases import PagedInputs
from sparsek.testing.poison import poisoned


def paged_problem(inputs: PagedInputs, card: Any = None) -> PagedProblem:
    """The problem of a case on its device, or on another card; with lse."""
    call = Paged(
        **inputs.operands(), causal=inputs.causal, window=inputs.window, sinks=inputs.sinks, max_q=inputs.max_q,
        max_k=inputs.max_k, lse=True,
    )  # fmt: skip
    return call.problem(card_of(inputs.q.device) if card is None else card)


def attend_paged(
    kernel: Any, inputs: PagedInputs, config: Any = None, by_rows: bool = False
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a kernel, in poisoned tensors. `by_rows`: out is a view of [Hq, tokens, Dv]."""
    p = paged_problem(inputs)
    assert kernel.why_not(p) == [], kernel.why_not(p)
    c = kernel.default(p) if config is None else config
    (tokens, heads, _), wide = inputs.q.shape, inputs.q.dtype == torch.float64
    shape = (heads, tokens, p.v_dim) if by_rows else (tokens, heads, p.v_dim)
    out = poisoned(shape, inputs.q.dtype, inputs.q.device)
    out = out.transpose(0, 1) if by_rows else out
    lse = poisoned((heads, tokens), torch.float64 if wide else torch.float32, inputs.q.device)
    if tokens and inputs.max_k and inputs.max_q:
        work = kernel.prepare(p, c, inputs.q.device)
        kernel.launch(c, work, PagedCall(**inputs.operands(), out=out, lse=lse))
    else:
        out[: inputs.end], lse[:, : inputs.end] = 0, -torch.inf
    return out, lse
