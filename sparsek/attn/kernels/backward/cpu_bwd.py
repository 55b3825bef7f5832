"""cpu.attention_bwd: the gradients of attention over the stored blocks of a mask, on CPU tensors, in batched torch.

    P  = exp(S - lse)                 [pack*bq, span*bk]   scores once more, from Q and the gathered K
    dS = P * (dO V^T - delta)         [pack*bq, span*bk]   delta = rowsum(dO * out) - dlse
    dQ += dS K                        [pack*bq, D]         kept in the unit
    dV, dK += P^T dO, dS^T Q          [span*bk, Dv], D     scattered to the blocks they came from

Steps and units are those of cpu.attention. dK and dV are summed in float32, or float64 for float64, in the order of
the steps and of the units in a step, so the bits repeat. Query heads that share keys are rows of one product.

Only stored blocks are read. Keys and values of a stored block must be finite, also those that its rule masks. The
incoming gradient of a row that sees no key has no effect.
"""

import torch
from torch import Tensor

from sparsek.attn.kernels.forward import cpu_steps as cpu
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionGradCall, AttentionGradKernel
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import Scores


class CpuAttentionBackward(cpu.CpuAttentionKernel):
    """Batched torch. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.attention_bwd"
    widens = True
    gathers = 9  # read, written and read twice; their gradients written, read and accumulated
    passes = 16
    products = 2

    def footprint(self, p: AttentionProblem, rows: int, bk: int) -> cpu.Footprint:
        return cpu.Footprint(2 * rows * (p.dim + p.v_dim), 2 * bk * (p.dim + p.v_dim + rows))

    def launch(self, c: cpu.CpuAttentionConfig, work: cpu.CpuAttentionWork, call: AttentionGradCall) -> None:
        q, k, v, mask, scale, out, lse, grad, grad_lse, dq, dk, dv, scores = call
        with torch.no_grad():
            (bq, bk), count = mask.block, mask.grid[1]
            keys, values = cpu.blocks(k, bk), cpu.blocks(v, bk)
            sum_dtype = torch.promote_types(q.dtype, torch.float32)
            sums = [x.new_zeros((*x.shape[:2], count, bk, x.shape[3]), dtype=sum_dtype) for x in (k, v)]
            for step in work.steps:
                at = (step.batch, step.head, slice(None), step.tile if step.height == bq else 0)
                as_tiles = work.pack, bq, step.height
                of_lse = None if grad_lse is None else cpu.tiles(grad_lse.unsqueeze(-1), *as_tiles)[at]
                rows = (q, out, lse.unsqueeze(-1), grad)
                given = [cpu.tiles(x, *as_tiles)[at].to(sum_dtype) for x in rows]
                found = _differentiate(step, given, of_lse, (keys, values), mask, scale, scores, sums)
                cpu.tiles(dq, *as_tiles)[at] = found.to(dq.dtype)
            for whole, each in zip(sums, (dk, dv), strict=True):
                each.copy_(whole.flatten(2, 3)[:, :, : each.shape[2]])


def _differentiate(
    step: cpu.CpuAttentionStep,
    given: list[Tensor],
    grad_lse: Tensor | None,
    blocks_of: tuple[cpu.Blocks, cpu.Blocks],
    mask: BlockMask,
    scale: float,
    changes: Scores,
    sums: list[Tensor],
) -> Tensor:
    """dq [units, pack, height, D] of q, out, lse and grad [units, pack, height, ...]; accumulates into dk and dv."""
    units, pack, height, _ = given[0].shape
    q, out, lse, grad = (x.reshape(units, pack * height, -1) for x in given)
    left = q * scale
    empty = lse == -torch.inf
    grad = grad.masked_fill(empty, 0)
    delta = (grad * out).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta.sub_(grad_lse.reshape(delta.shape).masked_fill(empty, 0))
    base = lse.masked_fill(empty, torch.inf)  # weights exp(-inf) = 0
    dq = torch.zeros_like(q)
    keys, values = blocks_of
    partial, columns = cpu.columns_of(step, mask)
    for first in range(0, columns.shape[1], step.span):
        met = columns[:, first : first + step.span]
        k, v = cpu.gather(keys, step, met, q.dtype), cpu.gather(values, step, met, q.dtype)
        scores = torch.bmm(left, k.mT)
        scores, slope = cpu.changed(scores, step, met, pack, mask, changes)
        cpu.hide(scores, step, partial[:, first : first + step.span], mask)
        weights = scores.sub_(base).exp_()
        of_scores = torch.bmm(grad, v.mT).sub_(delta).mul_(weights)
        if slope is not None:
            of_scores.mul_(slope)
        dq.baddbmm_(of_scores, k)
        for whole, part in zip(
            sums, (torch.bmm(of_scores.mT, left), torch.bmm(weights.mT, grad)), strict=True
        ):
            _add(whole, step, met, part)
    return dq.mul_(scale).view(given[0].shape)


def _add(sums: Tensor, step: cpu.CpuAttentionStep, columns: Tensor, parts: Tensor) -> None:
    """Adds parts [units, n * bk, E] to the blocks `columns` [units, n] of each unit's head, one after the other."""
    batch, heads, count, bk, dim = sums.shape
    at = (step.batch * heads + step.kv_head)[:, None] * count + columns
    sums.view(batch * heads * count, bk * dim).index_add_(0, at.flatten(), parts.reshape(-1, bk * dim))


KERNEL: AttentionGradKernel = CpuAttentionBackward()
