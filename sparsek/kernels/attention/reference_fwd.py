"""reference.attention: the specification, run as a kernel.

Any device, dtype and layout; it visits every query-key pair, so it is slow, and predicted to be.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.mask.mask import BlockMask
from sparsek.plan.kernel import AttentionKernel
from sparsek.plan.problem import AttentionProblem
from sparsek.reference.attention import attention

# Reads and writes of one score: scaled, masked, log-sum-exp, difference, exponential, product.
PASSES = 12
CALLS_PER_TILE = 24


@dataclass(frozen=True)
class ReferenceConfig:
    """Nothing to choose."""

    def __repr__(self) -> str:
        return "every key for one tile of queries at a time, in float32 or float64"


class ReferenceAttention:
    """`sparsek.reference.attention` behind the protocol: the last resort, and what the others are compared with."""

    name = "reference.attention"

    def why_not(self, p: AttentionProblem) -> list[str]:
        return []

    def default(self, p: AttentionProblem) -> ReferenceConfig:
        return ReferenceConfig()

    def configs(self, p: AttentionProblem) -> Iterable[ReferenceConfig]:
        return [ReferenceConfig()]

    def seconds(self, p: AttentionProblem, c: ReferenceConfig) -> float:
        size = 8 if p.dtype == "fp64" else 4
        heads, tiles = p.batch * p.q_heads, p.grid[0]
        scores = heads * p.q_len * p.kv_len
        # k and v are repeated, masked and widened for every tile of queries.
        keys = heads * tiles * p.kv_len * (p.dim + p.v_dim)
        moved = PASSES * scores * size + keys * (4 * dtypes.itemsize(p.dtype) + 2 * size)
        rate = p.card.tflops["fp64" if p.dtype == "fp64" else "fp32"] * 1e12
        calls = CALLS_PER_TILE * tiles
        return p.dense_flops / rate + moved / p.card.bandwidth + calls * p.card.launch_seconds

    def prepare(self, p: AttentionProblem, c: ReferenceConfig, mask: BlockMask) -> None:
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
        lse: Tensor | None,
    ) -> None:
        with torch.no_grad():
            result, sums = attention(q, k, v, mask, scale=scale)
            out.copy_(result)
            if lse is not None:
                lse.copy_(sums)


KERNEL: AttentionKernel = ReferenceAttention()
