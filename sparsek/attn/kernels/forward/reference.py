"""reference.attention, reference.attention_fp8 and reference.attention_bwd: the specification as kernels.

Any device, dtype and layout; they visit every query-key pair, so they are slow, and predicted to be.
"""

from typing import Any

import torch

from sparsek.attn.plan.kernels import AttentionCall, AttentionGradCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.attention import attention, attention_backward
from sparsek.attn.reference.attention_fp8 import attention_fp8
from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel, wide_seconds, wide_size


class _Reference(FixedKernel):
    """`passes`: reads and writes per score. `widths`: of k and v in float32, for every tile of queries. `calls`:
    torch calls per tile.
    """

    config = Fixed("every key for one tile of queries at a time, in float32 or float64")
    passes: int
    widths: int
    calls: int

    def seconds(self, p: AttentionProblem, c: Fixed) -> float:
        heads, tiles, size = p.batch * p.q_heads, p.grid[0], wide_size(p)
        keys = heads * tiles * p.kv_len * (p.dim + p.v_dim)
        moved = self.passes * heads * p.q_len * p.kv_len * size
        moved += keys * (4 * dtypes.itemsize(p.dtype) + self.widths * size)
        return wide_seconds(p, p.dense_flops, moved, self.calls * tiles)


class ReferenceAttention(_Reference):
    """`sparsek.attn.reference.attention` as a kernel: the last resort, and the baseline for tests."""

    name = "reference.attention"
    passes = 12  # scaled, masked, log-sum-exp, difference, exponential, product
    widths = 2  # k and v are repeated, masked and widened
    calls = 24

    def launch(self, c: Fixed, work: None, call: AttentionCall) -> None:
        q, k, v, mask, scale, out, lse, scores = call
        with torch.no_grad():
            result, sums = self._attention(q, k, v, mask, out.dtype, scale=scale, scores=scores)
            out.copy_(result)
            if lse is not None:
                lse.copy_(sums)

    def _attention(self, q: Any, k: Any, v: Any, mask: Any, out: torch.dtype, **options: Any) -> Any:
        return attention(q, k, v, mask, **options)


class ReferenceAttentionFp8(ReferenceAttention):
    """`sparsek.attn.reference.attention_fp8` as a kernel: any device, and the baseline for tests."""

    name = "reference.attention_fp8"
    calls = 28  # four more for scales

    def _attention(self, q: Any, k: Any, v: Any, mask: Any, out: torch.dtype, **options: Any) -> Any:
        return attention_fp8(q, k, v, mask, dtype=torch.promote_types(out, torch.float32), **options)


class ReferenceAttentionBackward(_Reference):
    """`sparsek.attn.reference.attention.attention_backward` as a kernel: the last resort."""

    name = "reference.attention_bwd"
    passes = 18  # scaled, masked, difference, exponential, gradients of weights and scores, products
    widths = 6  # and dk and dv are accumulated
    calls = 48

    def launch(self, c: Fixed, work: None, call: AttentionGradCall) -> None:
        q, k, v, mask, scale, out, lse, grad, grad_lse, *results, scores = call
        with torch.no_grad():
            found = attention_backward(q, k, v, mask, out, lse, grad, grad_lse, scale=scale, scores=scores)
            for mine, theirs in zip(results, found, strict=True):
                mine.copy_(theirs)


KERNELS: dict[str, Any] = {
    each.name: each for each in (ReferenceAttention(), ReferenceAttentionFp8(), ReferenceAttentionBackward())
}
