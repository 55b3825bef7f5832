"""cpu.attention: out = softmax(scale * Q K^T) V over the stored blocks of a mask, on CPU tensors, in batched torch.

    tiles of queries that visit       Q[u]  [pack*bq, D]
    equally many blocks go through    K[u]  [span*bk, D], V[u] [span*bk, Dv]   (the blocks they name, gathered)
    one bmm for each product          S[u]  [pack*bq, span*bk]

A *unit* is one tile of queries with the `pack` query heads that share its list and its keys; a step does a few units
with equally many partial and equally many full blocks. Where a step cannot hold all blocks of a unit, they go through
in turns with an online softmax, partial blocks first, then full ones. Sums are float32, or float64 for float64.

Only stored blocks are read: what the others hold never reaches a tile. Keys and values of a stored block must be
finite, also those that its rule hides, since a weight of 0 times NaN is NaN.

Time over dense scaled_dot_product_attention, S = 4096, D = 64 and 128, one EPYC core (AVX-512), torch 2.13.0,
2026-11-21. 12.5 % of the blocks: 0.17 to 0.30, float16 0.13 to 0.17. A window of 512, 14 % of the blocks: 0.20 to
0.37. Causal: 0.6 to 1.1, and with every block up to 2: for those torch's fused kernel does less.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.formats.block_mask import BlockMask
from sparsek.plan.kernel import AttentionKernel
from sparsek.plan.problem import AttentionProblem

STEP_SECONDS = 2e-4


@dataclass(frozen=True)
class CpuAttentionConfig:
    """`step_bytes`: what one step gathers and computes at most, one unit and one block at least."""

    step_bytes: int = 1 << 23

    def __repr__(self) -> str:
        return f"steps of {self.step_bytes >> 10} KiB"


class Step(NamedTuple):
    """Some units that visit `partial` + `full` blocks each, `span` of them at a time, with `height` queries each.

    Unit u is tile[u] of the query heads head[u] * pack and following of item batch[u]; they share head kv_head[u] of
    k and v, and row[u] of the mask.
    """

    partial: int
    full: int
    span: int
    height: int
    batch: Tensor
    head: Tensor
    kv_head: Tensor
    tile: Tensor
    row: Tensor


@dataclass(frozen=True)
class CpuWork:
    """`steps` cover every tile of every head once. `pack`: query heads that share a unit."""

    pack: int
    steps: tuple[Step, ...]


class Blocks(NamedTuple):
    """k or v in blocks: `whole` [B, Hkv, n, bk, E], and `last` [B, Hkv, bk, E], a ragged end filled up with zeros."""

    whole: Tensor
    last: Tensor | None


class CpuAttention:
    """Batched torch. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.attention"

    def why_not(self, p: AttentionProblem) -> list[str]:
        return [] if p.on_cpu else ["runs on CPU tensors only"]

    def default(self, p: AttentionProblem) -> CpuAttentionConfig:
        return CpuAttentionConfig()

    def configs(self, p: AttentionProblem) -> Iterable[CpuAttentionConfig]:
        return [CpuAttentionConfig(1 << shift) for shift in (20, 21, 22, 23, 24)]

    def seconds(self, p: AttentionProblem, c: CpuAttentionConfig) -> float:
        bq, bk = p.block
        size = _sum_size(p)
        gathered = p.visited / _pack(p) * bk * (p.dim + p.v_dim) * size
        scores = p.visited * bq * bk * size
        steps = max((gathered + scores) / c.step_bytes, 1)
        rate = p.card.tflops["fp64" if size == 8 else "fp32"] * 1e12
        # Gathered blocks are read, written and read; scores are written, and read and written four times more.
        moved = 3 * gathered + 9 * scores + p.compulsory_bytes
        return p.useful_flops / rate + moved / p.card.bandwidth + steps * STEP_SECONDS

    def notes(self, p: AttentionProblem, c: CpuAttentionConfig) -> list[str]:
        pack = _pack(p)
        return [f"{pack} query heads share a gathered block"] if pack > 1 else []

    def prepare(self, p: AttentionProblem, c: CpuAttentionConfig, mask: BlockMask) -> CpuWork:
        return CpuWork(_pack(p), tuple(_steps(p, c, mask)))

    def launch(
        self,
        c: CpuAttentionConfig,
        work: CpuWork,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        with torch.no_grad():
            by_unit = (q.shape[1] // work.pack, work.pack)
            bq, bk = mask.block
            keys, values = _blocks(k, bk), _blocks(v, bk)
            for step in work.steps:
                at = (step.batch, step.head, slice(None), step.tile if step.height == bq else 0)
                queries = _tiles(q.unflatten(1, by_unit), bq, step.height)[at]
                found, sums = _attend(step, queries, keys, values, mask, scale)
                _tiles(out.unflatten(1, by_unit), bq, step.height)[at] = found.to(out.dtype)
                if lse is not None:
                    _tiles(lse.unsqueeze(-1).unflatten(1, by_unit), bq, step.height)[at] = sums.to(lse.dtype)


def _attend(
    step: Step, queries: Tensor, keys: Blocks, values: Blocks, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """queries [units, pack, height, D]; their outputs [units, pack, height, Dv] and log-sum-exps [..., 1]."""
    units, pack, height, dim = queries.shape
    sum_dtype = torch.promote_types(queries.dtype, torch.float32)
    left = (queries.to(sum_dtype) * scale).reshape(units, pack * height, dim)
    entries = _entries(mask.partial.starts, step.row, step.partial)
    columns = torch.cat(
        (mask.partial.indices[entries], mask.full.indices[_entries(mask.full.starts, step.row, step.full)]), 1
    )
    out = left.new_zeros(units, pack * height, values.whole.shape[-1])
    total = left.new_zeros(units, pack * height, 1)
    top = torch.full_like(total, -torch.inf)
    for first in range(0, columns.shape[1], step.span):
        met = columns[:, first : first + step.span]
        scores = torch.bmm(left, _gather(keys, step, met, sum_dtype).mT)
        _hide(scores, step, entries[:, first : first + step.span], mask)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet keeps -inf: 0 in its place makes its weights exp(-inf) = 0.
        base = higher.masked_fill(higher == -torch.inf, 0)
        weights = scores.sub_(base).exp_()
        kept = (top - base).exp_()
        total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        out.mul_(kept).baddbmm_(weights, _gather(values, step, met, sum_dtype))
        top = higher
    out.div_(total.masked_fill(total == 0, 1))
    shape = (units, pack, height, -1)
    return out.view(shape), (top + total.log()).view(shape)


def _hide(scores: Tensor, step: Step, entries: Tensor, mask: BlockMask) -> None:
    """Sets scores [units, pack * height, n * bk] of pairs that a partial block does not admit to -inf.

    `entries` [units, at most n] are the partial entries of the first blocks.
    """
    units, partial = entries.shape
    if partial == 0:
        return
    bq, bk = mask.block
    seen = mask.element_mask(step.row.repeat_interleave(partial), entries.reshape(-1))
    hidden = ~seen.view(units, partial, bq, bk)[:, :, : step.height]
    by_block = scores.view(units, -1, step.height, scores.shape[-1] // bk, bk)[:, :, :, :partial]
    by_block.masked_fill_(hidden.transpose(1, 2).unsqueeze(1), -torch.inf)


def _gather(x: Blocks, step: Step, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks `columns` [units, n] of each unit's head, one below the other: [units, n * bk, E]."""
    whole = x.whole.shape[2]
    found = x.whole[step.batch[:, None], step.kv_head[:, None], columns.clamp(max=whole - 1)]
    if x.last is not None:
        unit, place = (columns == whole).nonzero(as_tuple=True)
        found[unit, place] = x.last[step.batch[unit], step.kv_head[unit]]
    return found.to(dtype).flatten(1, 2)


def _blocks(x: Tensor, size: int) -> Blocks:
    """[B, Hkv, T, E] of any strides in blocks of `size` keys; only a ragged end is copied."""
    whole, rest = divmod(x.shape[2], size)
    blocks = x[:, :, : whole * size].unflatten(2, (whole, size))
    if not rest:
        return Blocks(blocks, None)
    last = functional.pad(x[:, :, whole * size :], (0, 0, 0, size - rest))
    return Blocks(blocks, last) if whole else Blocks(last.unsqueeze(2), None)


def _tiles(x: Tensor, size: int, height: int) -> Tensor:
    """A view of x [..., S, E] as tiles [..., n, size, E], or as its ragged last tile [..., 1, height, E]."""
    whole = x.shape[-2] // size
    if height == size:
        return x[..., : whole * size, :].unflatten(-2, (whole, size))
    return x[..., whole * size :, :].unsqueeze(-3)


def _entries(starts: Tensor, rows: Tensor, count: int) -> Tensor:
    """Positions in `indices` of the `count` entries of each row: [rows, count]."""
    return starts[rows].to(torch.int64)[:, None] + torch.arange(count)


def _steps(p: AttentionProblem, c: CpuAttentionConfig, mask: BlockMask) -> Iterator[Step]:
    """Units grouped by their numbers of partial and full blocks, each group cut to `step_bytes`; ragged tiles apart."""
    bq, bk = p.block
    pack = _pack(p)
    heads, tiles = p.q_heads // pack, mask.grid[0]
    shape = (p.batch, heads, tiles)
    if 0 in shape:
        return
    row = np.broadcast_to(np.arange(mask.rows).reshape(mask.batch, mask.heads, tiles), shape).reshape(-1)
    partial, full = mask.partial.counts.numpy()[row], mask.full.counts.numpy()[row]
    height = np.full(tiles, bq)
    height[-1] = p.q_len - (tiles - 1) * bq
    height = np.broadcast_to(height, shape).reshape(-1)
    kinds = np.stack((height, partial, full))
    order = np.lexsort(kinds)
    cuts = np.flatnonzero((kinds[:, order][:, 1:] != kinds[:, order][:, :-1]).any(0)) + 1
    unit_bytes = pack * bq * (p.dim + 2 * p.v_dim) * _sum_size(p)
    block_bytes = bk * (p.dim + p.v_dim + pack * bq) * _sum_size(p)
    for group in np.split(order, cuts):
        high, some, rest = kinds[:, group[0]].tolist()
        span = max(1, min(some + rest, c.step_bytes // block_bytes))
        at_once = max(1, c.step_bytes // (unit_bytes + span * block_bytes))
        for first in range(0, group.size, at_once):
            units = group[first : first + at_once]
            batch, head, tile = np.unravel_index(units, shape)
            places = (batch, head, head // (heads // p.kv_heads), tile, row[units])
            yield Step(some, rest, span, high, *(torch.from_numpy(place) for place in places))


def _pack(p: AttentionProblem) -> int:
    """Query heads that share keys and lists."""
    return p.group if p.mask_heads in (1, p.kv_heads) else 1


def _sum_size(p: AttentionProblem) -> int:
    return 8 if p.dtype == "fp64" else 4


KERNEL: AttentionKernel = CpuAttention()
