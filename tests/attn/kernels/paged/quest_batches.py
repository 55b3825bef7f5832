"""Caches, batches and lists for the tests of Quest."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from tests.attn.paged_cases import shuffled_pages


class Batch(NamedTuple):
    """Integer values, whose sums are exact in any order; entries of no request hold garbage."""

    q: Tensor
    keys: Tensor
    summaries: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor


def batch(
    lengths: list[int],
    queries: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    page: int = 16,
    dim: int = 16,
    dtype: torch.dtype = torch.float16,
    spare: int = 2,
    seed: int = 0,
    device: str = "cpu",
) -> Batch:
    """A cache with `lengths` keys and `queries` new tokens of each request; `spare` more tokens and table columns."""
    made = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in lengths]
    table, pages = shuffled_pages(made, counts, max(counts) + spare)
    draw = lambda *shape: torch.randint(-9, 10, shape, generator=made).to(torch.float32)  # noqa: E731
    keys = draw(pages, heads[1], page, dim)
    summaries = torch.stack((keys.amin(2), keys.amax(2)), 2)
    edges = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
    return Batch(
        draw(int(edges[-1]) + spare, heads[0], dim).to(dtype).to(device),
        *(x.to(dtype).to(device) for x in (keys, summaries)),
        *(x.to(device) for x in (table, torch.tensor(lengths, dtype=torch.int32), edges)),
    )


def slow_pages(b: Batch, page: int, topk: int) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """(head, token) -> pages that are seen whole, and those that are not, by loops in float64."""
    q, low, high = b.q.double(), b.summaries[:, :, 0].double(), b.summaries[:, :, 1].double()
    heads = low.shape[1]
    group = q.shape[1] // heads
    found = {}
    for r in range(len(b.seq_lens)):
        first, last = b.cu_seqlens_q[r : r + 2].tolist()
        for t in range(first, last):
            keys = int(b.seq_lens[r]) - (last - t) + 1
            ids = b.block_table[r, : -(-keys // page)].tolist() if keys > 0 else []
            for h in range(heads):
                score = [
                    max(
                        float(torch.maximum(q[t, g] * low[i, h], q[t, g] * high[i, h]).sum())
                        for g in range(h * group, (h + 1) * group)
                    )
                    for i in ids
                ]
                always = {0, len(ids) - 1} if ids else set()
                ranked = sorted(range(len(ids)), key=lambda j, a=always, s=score: (j not in a, -s[j], j))
                kept = sorted(ranked[:topk])
                cut = [j for j in kept if (j + 1) * page > keys]
                found[h, t] = [j for j in kept if j not in cut], cut
    return found


def listed(lists: PageLists) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """(head, token) -> pages of both lists."""
    made = {}
    for h in range(lists.heads):
        for t in range(lists.tiles):
            row = h * lists.tiles + t
            both = []
            for starts, counts, indices in (lists.full, lists.partial):
                start, many = int(starts[row]), int(counts[row])
                both.append(indices[start : start + many].tolist())
            made[h, t] = both[0], both[1]
    return made


def slow_update(keys: Tensor, slots: list[int], summaries: Tensor) -> Tensor:
    """The summaries after an update, by loops."""
    page, made = keys.shape[2], summaries.clone()
    slots = [slot for slot in slots if 0 <= slot < keys.shape[0] * page]
    for i in sorted({slot // page for slot in slots}):
        rows = sorted({slot % page for slot in slots if slot // page == i})
        x = keys[i, :, rows].double()
        low, high = x.amin(1), x.amax(1)
        if rows[0]:
            low = torch.minimum(low, summaries[i, :, 0].double())
            high = torch.maximum(high, summaries[i, :, 1].double())
        made[i, :, 0], made[i, :, 1] = low.to(made.dtype), high.to(made.dtype)
    return made
