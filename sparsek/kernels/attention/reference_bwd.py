"""reference.attention_bwd: the formulas of the gradients of attention, run as a kernel.

Any device, dtype and layout; it visits every query-key pair, so it is slow, and predicted to be.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.kernels.attention.reference_fwd import ReferenceConfig
from sparsek.mask.mask import BlockMask
from sparsek.plan.kernel import AttentionGradKernel
from sparsek.plan.problem import AttentionGradProblem
from sparsek.reference.attention import attention_backward

# Reads and writes of one score: scaled, masked, difference, exponential, gradients of weights and scores, products.
PASSES = 18
CALLS_PER_TILE = 48


class ReferenceAttentionBackward:
    """`sparsek.reference.attention.attention_backward` behind the protocol: the last resort."""

    name = "reference.attention_bwd"

    def why_not(self, p: AttentionGradProblem) -> list[str]:
        return []

    def default(self, p: AttentionGradProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: AttentionGradProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: AttentionGradProblem, c: ReferenceConfig) -> float:
        size = 8 if p.dtype == "fp64" else 4
        heads, tiles = p.batch * p.q_heads, p.grid[0]
        scores = heads * p.q_len * p.kv_len
        # k and v are repeated, masked and widened for every tile of queries; dk and dv are added to for each.
        keys = heads * tiles * p.kv_len * (p.dim + p.v_dim)
        moved = PASSES * scores * size + keys * (4 * dtypes.itemsize(p.dtype) + 6 * size)
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        calls = CALLS_PER_TILE * tiles
        return p.dense_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: AttentionGradProblem, c: ReferenceConfig, mask: BlockMask) -> None:
        return None

    def launch(
        self,
        c: ReferenceConfig,
        work: None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        scale: float,
        out: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> None:
        with torch.no_grad():
            found = attention_backward(q, k, v, mask, out, lse, grad, grad_lse, scale=scale)
            for mine, theirs in zip((dq, dk, dv), found, strict=True):
                mine.copy_(theirs)


KERNEL: AttentionGradKernel = ReferenceAttentionBackward()
