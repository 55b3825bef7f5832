"""The order of tiles of backward kernels in two passes, over keys and over queries, and room for their parts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.attn.kernels.backward.transposed import transposed
from sparsek.attn.kernels.forward.lengths import Lengths, walked
from sparsek.attn.kernels.forward.parts import Walk, longest_part
from sparsek.attn.kernels.forward.portable_tiles import section
from sparsek.attn.mask.lists import TransposedLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.problems import AttentionGradProblem
from sparsek.core import dtypes


@dataclass(frozen=True, eq=False)
class Walks:
    """The order of tiles of both passes, and the lists of key blocks."""

    keys: Walk
    queries: Walk
    lists: TransposedLists


def walks(p: AttentionGradProblem, mask: BlockMask) -> Walks:
    """The order of both passes' tiles, on the mask's device, without a sync."""
    (tiles, columns), lists = mask.grid, transposed(mask)
    part = longest_part(p.leading.visited, p.block, p.card.sm_count)
    members = p.group if mask.heads > p.kv_heads else 1
    visits = Lengths(
        lists.partial.counts, lists.full.counts, mask.batch * mask.heads // members, columns, tiles * p.group,
        members, p.group // members,
    )  # fmt: skip
    per_query, per_key = ((p.dim + p.v_dim) * dtypes.itemsize(p.dtype) * n for n in (p.q_len, p.kv_len))
    heads = p.batch * p.kv_heads
    keys = walked(visits, p.visited, part, section(p, heads, p.group * per_query, 1), heads)
    heads = p.batch * p.q_heads
    visits = Lengths(mask.partial.counts, mask.full.counts, mask.batch * mask.heads, tiles, p.longest)
    queries = walked(visits, p.visited, part, section(p, heads, per_key, p.group), heads)
    return Walks(keys, queries, lists)


def room(taken: Walk, rows: int, width: int, device: torch.device) -> Tensor | None:
    """Slots for the float32 sums of parts, or None."""
    if not taken.slots:
        return None
    return torch.empty((taken.replicas * taken.slots, rows, width), dtype=torch.float32, device=device)


def parts_of(p: AttentionGradProblem) -> list[str]:
    """A line of `explain()` where some tile may be cut."""
    part = longest_part(p.leading.visited, p.block, p.card.sm_count)
    if max(p.grid[0] * p.group, p.longest) <= part:
        return []
    return [f"tiles of more than {part} blocks are cut into parts, whose float32 sums need a workspace"]
