"""Error budget of attention over paged keys: twice the error of the dense computation in the same precision, or what
rounding explains, as in `testing/attention_budget.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.attn.reference.attention_paged import Request, attention_paged, requests
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.testing.attention_budget import AttentionGate, judge_attention, out_variance
from sparsek.testing.budget import ROUNDED, sum_variance, summing_unit

# Allowed error of lse for 16-bit inputs, absolute and relative.
LSE_LOW = 1e-4


class PagedInputs(NamedTuple):
    """The operands of one call, named as those of `attention_paged` and of `plan.kernel.PagedCall`.

    `cache`: as the verb takes it. `end`: rows of q that belong to requests.
    """

    q: Tensor
    cache: Tensor | tuple[Tensor, Tensor]
    k: Tensor
    v: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    lists: PageLists | None
    sink_logits: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    scale: float
    softcap: float
    causal: bool
    window: int
    sinks: int
    max_q: int
    max_k: int
    end: int

    def operands(self) -> dict[str, Any]:
        """All fields of a `PagedCall` but out and lse."""
        last = self._fields.index("softcap") + 1
        return {name: getattr(self, name) for name in self._fields[:last] if name != "cache"}


def check_attention_paged(inputs: PagedInputs, out: Tensor, lse: Tensor | None = None) -> AttentionGate:
    """Judges out [tokens, Hq, Dv], and lse [Hq, tokens] if given, as the attention of `inputs`.

    The error is relative, in the Frobenius norm, against the reference in float64, over the rows of requests. The
    dense computation is the reference's on the same inputs, in float32 for 16 bits, rounded once. lse may be off by
    1e-4 and 1e-4 of its value for 16-bit inputs, else 1e-5. Rows of queries that see nothing must be 0 and -inf, or
    their head's sink. Raises InvalidInput for results of another shape.
    """
    return expected_attention_paged(inputs).judge(out, lse)


@dataclass(frozen=True)
class ExpectedPaged:
    """The expected attention, computed once for any number of results: in float64 and dense, [Hq, end, Dv], with the
    variance of its sums and the sums of its terms' squares. `shape` is that of out; `blank`: queries that see nothing.
    """

    shape: tuple[int, ...]
    exact: Tensor
    dense: Tensor
    lse: Tensor
    blank: Tensor
    sums: Tensor
    squares: Tensor

    def judge(self, out: Tensor, lse: Tensor | None = None) -> AttentionGate:
        """The gate of a result, as of `check_attention_paged`."""
        tokens, heads, _ = self.shape
        if out.shape != self.shape or (lse is not None and lse.shape != (heads, tokens)):
            found = f"out {list(out.shape)}" + ("" if lse is None else f", lse {list(lse.shape)}")
            raise InvalidInput(f"out must be {list(self.shape)} and lse {[heads, tokens]}, got {found}")
        with torch.no_grad(), dtypes.as_given(out.device):
            end = self.exact.shape[1]
            found = out[:end].transpose(0, 1), None if lse is None else lse[:, :end]
            return judge_attention(*found, self, self.blank, LSE_LOW)


def expected_attention_paged(inputs: PagedInputs) -> ExpectedPaged:
    """The expected result of `check_attention_paged`."""
    seen, end = {name: getattr(inputs, name) for name in ("causal", "window", "sinks")}, inputs.end
    given = inputs.operands() | seen
    with torch.no_grad(), dtypes.as_given(inputs.q.device):
        dense = attention_paged(**given)[0][:end].transpose(0, 1)
        exact, lse = attention_paged(**{**given, "q": inputs.q.double()})
        exact, lse = exact[:end].transpose(0, 1), lse[:, :end]
        sums, squares = torch.zeros_like(exact), torch.zeros_like(exact)
        blank = torch.ones_like(lse, dtype=torch.bool)
        of_queries = ("q", "sink_logits", "scale", "softcap")
        some: Any = {name: part for name, part in given.items() if name not in of_queries}
        for each in requests(**some, dtype=torch.float64):
            at = each.at
            sums[:, at], squares[:, at], blank[:, at] = _terms(inputs, each, exact[:, at], lse[:, at])
    shape = (*inputs.q.shape[:2], inputs.v.shape[3])
    return ExpectedPaged(shape, exact, dense, lse, blank, sums, squares)


def _terms(inputs: PagedInputs, of: Request, exact: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one request: the variance of out's sums, the sum of its terms' squares, and which queries see nothing."""
    heads, scale = exact.shape[0], inputs.scale
    seen = of.seen.repeat_interleave(heads // of.seen.shape[0], 0)
    met = seen.any(1)[..., None]
    k, v = (x.repeat_interleave(heads // x.shape[0], 0).masked_fill(~met, 0) for x in (of.keys, of.values))
    q = inputs.q[of.at].transpose(0, 1).double()
    scores = q @ k.mT * scale
    # A cap shrinks errors of scores, and adds its own roundings, which those of the score's size stand for.
    shift = sum_variance(scores, (q.square() @ k.square().mT) * scale**2, q.shape[2], ROUNDED**-0.5)
    if inputs.softcap:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    sizes = scores.square() + lse.masked_fill(lse == -torch.inf, 0).square()[..., None]
    weights = (scores - lse[..., None]).masked_fill(~seen, -torch.inf).exp()
    shift = (shift + 2 * sizes + 6).masked_fill(~seen, 0)
    sums, squares = out_variance(weights, shift, v, exact, seen, summing_unit(inputs.q.dtype))
    return sums, squares, ~seen.any(-1)
