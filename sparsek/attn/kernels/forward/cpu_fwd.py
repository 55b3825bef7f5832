"""cpu.attention: out = softmax(scale * Q K^T) V over the stored blocks of a mask, on CPU tensors, in batched torch.

    tiles of queries that visit       Q[u]  [pack*bq, D]
    equally many blocks, in one       K[u]  [span*bk, D], V[u] [span*bk, Dv]   (their blocks, gathered)
    bmm per product                   S[u]  [pack*bq, span*bk]

A *unit* is one tile of queries with the `pack` query heads that share its list and its keys. A step computes a few
units with equally many partial and equally many full blocks. If a step cannot hold all blocks of a unit, it processes
them one group after another with an online softmax, partial blocks first, then full ones. Sums are float32, or
float64 for float64.

Only stored blocks are read: values outside them never reach a tile. Keys and values of a stored block must be finite,
also those that its rule masks, since a weight of 0 times NaN is NaN.

Time over dense scaled_dot_product_attention, S = 4096, D = 64 and 128, one EPYC core (AVX-512), torch 2.13.0,
2026-11-21. 12.5 % of the blocks: 0.17 to 0.30, float16 0.13 to 0.17. A window of 512, 14 % of the blocks: 0.20 to
0.37. Causal: 0.6 to 1.1, and with every block up to 2: for those torch's fused kernel does less.
"""

import torch
from torch import Tensor

from sparsek.attn.kernels.forward import cpu_steps as cpu
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionKernel
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import Scores


class CpuAttention(cpu.CpuAttentionKernel):
    """Batched torch. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.attention"
    gathers = 3  # read, written and read
    passes = 9  # written, then read and written four more times
    products = 1

    def footprint(self, p: AttentionProblem, rows: int, bk: int) -> cpu.Footprint:
        return cpu.Footprint(rows * (p.dim + 2 * p.v_dim), bk * (p.dim + p.v_dim + rows))

    def launch(self, c: cpu.CpuAttentionConfig, work: cpu.CpuAttentionWork, call: AttentionCall) -> None:
        q, k, v, mask, scale, out, lse, scores = call
        with torch.no_grad():
            (bq, bk), pack = mask.block, work.pack
            keys, values = cpu.blocks(k, bk), cpu.blocks(v, bk)
            for step in work.steps:
                at = (step.batch, step.head, slice(None), step.tile if step.height == bq else 0)
                queries = cpu.tiles(q, pack, bq, step.height)[at]
                found, sums = _attend(step, queries, keys, values, mask, scale, scores)
                cpu.tiles(out, pack, bq, step.height)[at] = found.to(out.dtype)
                if lse is not None:
                    cpu.tiles(lse.unsqueeze(-1), pack, bq, step.height)[at] = sums.to(lse.dtype)


def _attend(
    step: cpu.CpuAttentionStep,
    queries: Tensor,
    keys: cpu.Blocks,
    values: cpu.Blocks,
    mask: BlockMask,
    scale: float,
    changes: Scores,
) -> tuple[Tensor, Tensor]:
    """queries [units, pack, height, D]; their outputs [units, pack, height, Dv] and log-sum-exps [..., 1]."""
    units, pack, height, dim = queries.shape
    sum_dtype = torch.promote_types(queries.dtype, torch.float32)
    left = (queries.to(sum_dtype) * scale).reshape(units, pack * height, dim)
    partial, columns = cpu.columns_of(step, mask)
    out = left.new_zeros(units, pack * height, values.whole.shape[-1])
    total = left.new_zeros(units, pack * height, 1)
    if changes.sink_logits is None:
        top = torch.full_like(total, -torch.inf)
    else:  # a key with a weight of 1 so far, and no value
        sinks = changes.sink_logits.to(sum_dtype)[step.query_heads(pack)]
        top = sinks.repeat_interleave(height, 1).unsqueeze(-1)
        total.masked_fill_(top > -torch.inf, 1)
    for first in range(0, columns.shape[1], step.span):
        met = columns[:, first : first + step.span]
        scores = torch.bmm(left, cpu.gather(keys, step, met, sum_dtype).mT)
        scores, _ = cpu.changed(scores, step, met, pack, mask, changes)
        cpu.hide(scores, step, partial[:, first : first + step.span], mask)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row without a key so far keeps -inf; 0 in its place makes its weights exp(-inf) = 0.
        base = higher.masked_fill(higher == -torch.inf, 0)
        weights = scores.sub_(base).exp_()
        kept = (top - base).exp_()
        total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        out.mul_(kept).baddbmm_(weights, cpu.gather(values, step, met, sum_dtype))
        top = higher
    out.div_(total.masked_fill(total == 0, 1))
    shape = (units, pack, height, -1)
    return out.view(shape), (top + total.log()).view(shape)


KERNEL: AttentionKernel = CpuAttention()
