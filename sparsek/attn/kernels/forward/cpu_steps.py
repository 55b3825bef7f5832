"""Steps that cpu.attention and cpu.attention_bwd share: units of queries, and the key blocks that they visit.

A *unit* is one tile of queries with the `pack` query heads that share its list and its keys. A step computes a few
units with equally many partial and equally many full blocks, `span` blocks of each at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparsek.attn.mask.elements import element_mask
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.attn.reference.scores import Scores, capped, distances
from sparsek.engine.launch.kinds import CpuKernel, wide_size

STEP_SECONDS = 2e-4


@dataclass(frozen=True)
class CpuAttentionConfig:
    """`step_bytes`: the most that one step gathers and computes, but at least one unit and one block."""

    step_bytes: int = 1 << 23

    def __repr__(self) -> str:
        return f"steps of {self.step_bytes >> 10} KiB"


class CpuAttentionStep(NamedTuple):
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

    def query_heads(self, pack: int) -> Tensor:
        """[units, pack]."""
        return self.head[:, None] * pack + torch.arange(pack, dtype=torch.int64, device=self.head.device)


@dataclass(frozen=True)
class CpuAttentionWork:
    """`steps` cover every tile of every head once. `pack`: query heads that share a unit."""

    pack: int
    steps: tuple[CpuAttentionStep, ...]


class Blocks(NamedTuple):
    """k or v in blocks: `whole` [B, Hkv, n, bk, E], and `last` [B, Hkv, bk, E], a ragged end with zero padding."""

    whole: Tensor
    last: Tensor | None


class Footprint(NamedTuple):
    """Elements that a step holds: `unit` per unit, `block` per block of a unit at a time."""

    unit: int
    block: int


class CpuAttentionKernel(CpuKernel):
    """What the forward and backward kernels share. `gathers`, `passes`: how often a gathered block and a score are
    read or written. `products`: how much a step gathers and computes, over the forward pass.
    """

    gathers: int
    passes: int
    products: int

    def default(self, p: AttentionProblem) -> CpuAttentionConfig:
        return CpuAttentionConfig()

    def configs(self, p: AttentionProblem) -> list[CpuAttentionConfig]:
        return [CpuAttentionConfig(1 << shift) for shift in (20, 21, 22, 23, 24)]

    def seconds(self, p: AttentionProblem, c: CpuAttentionConfig) -> float:
        (bq, bk), size = p.block, wide_size(p)
        gathered = p.visited / packed(p) * bk * (p.dim + p.v_dim) * size
        scores = p.visited * bq * bk * size
        count = max(self.products * (gathered + scores) / c.step_bytes, 1)
        moved = self.gathers * gathered + self.passes * scores + p.compulsory_bytes
        rate = p.card.tflops["fp64" if size == 8 else "fp32"] * 1e12
        return p.useful_flops / rate + moved / p.card.bandwidth + count * STEP_SECONDS

    def notes(self, p: AttentionProblem, c: CpuAttentionConfig) -> list[str]:
        pack = packed(p)
        return [f"{pack} query heads share a gathered block"] if pack > 1 else []

    def footprint(self, p: AttentionProblem, rows: int, bk: int) -> Footprint:
        """Elements that a step holds for units of so many rows and blocks of so many keys."""
        raise NotImplementedError

    def prepare(self, p: AttentionProblem, c: CpuAttentionConfig, mask: BlockMask) -> CpuAttentionWork:
        footprint = self.footprint(p, packed(p) * p.block[0], p.block[1])
        return CpuAttentionWork(packed(p), tuple(steps(p, c, mask, footprint)))


def columns_of(step: CpuAttentionStep, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Partial entries [units, partial] of the units, and the blocks [units, partial + full] that they visit."""
    partial = entries(mask.partial.starts, step.row, step.partial)
    full = entries(mask.full.starts, step.row, step.full)
    return partial, torch.cat((mask.partial.indices[partial], mask.full.indices[full]), 1)


def changed(
    s: Tensor, step: CpuAttentionStep, columns: Tensor, pack: int, mask: BlockMask, scores: Scores
) -> tuple[Tensor, Tensor | None]:
    """Scores s [units, pack * height, n * bk] of the blocks `columns`, capped and biased, and the derivative by `s`."""
    s, slope = capped(s, scores.softcap)
    if scores.alibi_slopes is None:
        return s, slope
    bq, bk = mask.block
    ahead, device = mask.kv_len - mask.q_len, s.device
    queries = step.tile[:, None] * bq + torch.arange(step.height, dtype=torch.int64, device=device) + ahead
    keys = (columns[..., None] * bk + torch.arange(bk, dtype=torch.int64, device=device)).flatten(1)
    slopes, heads = scores.alibi_slopes, step.query_heads(pack)
    of_units = slopes[heads] if slopes.dim() == 1 else slopes[step.batch[:, None], heads]
    bias = of_units[..., None, None].to(s.dtype) * distances(queries, keys).unsqueeze(1).to(s.dtype)
    return s.sub_(bias.flatten(1, 2)), slope


def hide(scores: Tensor, step: CpuAttentionStep, partial_entries: Tensor, mask: BlockMask) -> None:
    """Masks scores [units, pack * height, n * bk] with -inf by the rules of partial blocks.

    `partial_entries` [units, at most n] are those of the first blocks.
    """
    units, partial = partial_entries.shape
    if partial == 0:
        return
    bq, bk = mask.block
    seen = element_mask(mask, step.row.repeat_interleave(partial), partial_entries.reshape(-1))
    hidden = ~seen.view(units, partial, bq, bk)[:, :, : step.height]
    by_block = scores.view(units, -1, step.height, scores.shape[-1] // bk, bk)[:, :, :, :partial]
    by_block.masked_fill_(hidden.transpose(1, 2).unsqueeze(1), -torch.inf)


def gather(x: Blocks, step: CpuAttentionStep, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks `columns` [units, n] of each unit's head, one below the other: [units, n * bk, E]."""
    whole = x.whole.shape[2]
    found = x.whole[step.batch[:, None], step.kv_head[:, None], columns.clamp(max=whole - 1)]
    if x.last is not None:
        unit, place = (columns == whole).nonzero(as_tuple=True)
        found[unit, place] = x.last[step.batch[unit], step.kv_head[unit]]
    return found.to(dtype).flatten(1, 2)


def blocks(x: Tensor, size: int) -> Blocks:
    """[B, Hkv, T, E] of any strides in blocks of `size` keys; only a ragged end is copied."""
    whole, rest = divmod(x.shape[2], size)
    uncut = x[:, :, : whole * size].unflatten(2, (whole, size))
    if not rest:
        return Blocks(uncut, None)
    last = functional.pad(x[:, :, whole * size :], (0, 0, 0, size - rest))
    return Blocks(uncut, last) if whole else Blocks(last.unsqueeze(2), None)


def tiles(x: Tensor, pack: int, size: int, height: int) -> Tensor:
    """A view of x [B, Hq, S, E] as tiles [B, Hq / pack, pack, n, size, E], or its ragged last tile [..., height, E]."""
    x = x.unflatten(1, (x.shape[1] // pack, pack))
    whole = x.shape[-2] // size
    if height == size:
        return x[..., : whole * size, :].unflatten(-2, (whole, size))
    return x[..., whole * size :, :].unsqueeze(-3)


def entries(starts: Tensor, rows: Tensor, count: int) -> Tensor:
    """Positions in `indices` of the `count` entries of each row: [rows, count]."""
    return starts[rows].to(torch.int64)[:, None] + torch.arange(count, device=starts.device)


def steps(
    p: AttentionProblem, c: CpuAttentionConfig, mask: BlockMask, size: Footprint
) -> Iterator[CpuAttentionStep]:
    """Units grouped by their numbers of partial and full blocks, each group cut to `step_bytes`; ragged tiles apart."""
    bq = p.block[0]
    heads, tiles_of_head = p.q_heads // packed(p), mask.grid[0]
    shape = (p.batch, heads, tiles_of_head)
    if 0 in shape:
        return
    row = np.arange(mask.rows).reshape(mask.batch, mask.heads, tiles_of_head)
    row = np.broadcast_to(row, shape).reshape(-1)
    partial, full = mask.partial.counts.numpy()[row], mask.full.counts.numpy()[row]
    height = np.full(tiles_of_head, bq)
    height[-1] = p.q_len - (tiles_of_head - 1) * bq
    height = np.broadcast_to(height, shape).reshape(-1)
    kinds = np.stack((height, partial, full))
    order = np.lexsort(kinds)
    cuts = np.flatnonzero((kinds[:, order][:, 1:] != kinds[:, order][:, :-1]).any(0)) + 1
    unit_bytes, block_bytes = (elements * wide_size(p) for elements in size)
    for group in np.split(order, cuts):
        high, some, rest = kinds[:, group[0]].tolist()
        span = max(1, min(some + rest, c.step_bytes // block_bytes))
        at_once = max(1, c.step_bytes // (unit_bytes + span * block_bytes))
        for first in range(0, group.size, at_once):
            units = group[first : first + at_once]
            batch, head, tile = np.unravel_index(units, shape)
            places = (batch, head, head // (heads // p.kv_heads), tile, row[units])
            yield CpuAttentionStep(some, rest, span, high, *(torch.from_numpy(place) for place in places))


def packed(p: AttentionProblem) -> int:
    """Number of query heads that share keys and lists."""
    return p.group if p.mask_heads in (1, p.kv_heads) else 1
