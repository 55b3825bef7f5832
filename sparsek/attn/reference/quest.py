"""Quest's choice of pages in plain torch, float64 too: the specification.

A page has a summary, the elementwise minimum and maximum of its keys. No key of the page has a larger product with a
query than

    bound = sum over d of max(q_d min_d, q_d max_d)

The bound of a page for a head of k is the largest over the heads of q that share it. Of the pages that begin at the
query's position or before, a query keeps the first, the last, and those with the highest bounds; of equal bounds those
of lower pages. A NaN counts as minus infinity.

Source: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, arXiv:2406.10774.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.core import dtypes


class Pages(NamedTuple):
    """The pages that queries keep: row h * tokens + t is that of head h of k and query t.

    Attributes:
        indices: int32 [Hkv, tokens, k]: pages of the request, ascending; -1 after the last one.
        starts: int32 [rows]: where a row of `indices` begins.
        whole: int32 [rows]: how many of its pages a query sees whole.
        cut_starts: int32 [rows]: starts + whole.
        cut: int32 [rows]: 1 where the query stands inside of its last page, else 0.
    """

    indices: Tensor
    starts: Tensor
    whole: Tensor
    cut_starts: Tensor
    cut: Tensor


def update(keys: Tensor, slot_mapping: Tensor, summaries: Tensor) -> None:
    """Adds rows of keys [pages, Hkv, page, D] to the summaries [pages, Hkv, 2, D], in place.

    `slot_mapping` int64 [tokens] has page * rows of a page + row for each of them. Others than those of the cache are
    skipped. A page whose row 0 is among them begins anew.
    """
    pages, _, side, _ = keys.shape
    valid = (slot_mapping >= 0) & (slot_mapping < pages * side)
    slot = slot_mapping.where(valid, 0)
    at, row = slot // side, slot % side
    with dtypes.as_given(keys.device):
        wide = torch.float64 if keys.dtype == torch.float64 else torch.float32
        x = _indexable(keys)[at, :, row].view(keys.dtype).to(wide)
        at = at.where(valid, pages)
        into = at[:, None, None].expand_as(x)
        anew = torch.zeros(pages + 1, dtype=torch.bool, device=keys.device)
        anew[at.where(row == 0, pages)] = True
        for which, (reduce, none) in enumerate((("amin", torch.inf), ("amax", -torch.inf))):
            held = torch.nn.functional.pad(summaries[:, :, which].to(wide), (0, 0, 0, 0, 0, 1))
            held = held.masked_fill(anew[:, None, None], none).scatter_reduce(0, into, x, reduce)
            summaries[:, :, which] = held[:-1].to(summaries.dtype)


def bounds(q: Tensor, summaries: Tensor) -> Tensor:
    """The bound of each page [Hkv, n] for q [Hq, D] and summaries [n, Hkv, 2, D]; at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(0, (summaries.shape[1], -1))
    low, high = summaries.to(wide).permute(2, 1, 0, 3)[:, :, None]
    return torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(3).nan_to_num(-torch.inf).amax(1)


def _indexable(x: Tensor) -> Tensor:
    """x, FP8 as bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def choose(
    q: Tensor,
    summaries: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page: int,
    topk: int,
) -> Pages:
    """The pages of `page` rows that queries q [tokens, Hq, D] keep, at most `topk` of each; the tensors of a batch as
    in `attention_paged`. Queries after those of all requests keep none. No sync.
    """
    tokens, width, heads, device = q.shape[0], block_table.shape[1], summaries.shape[1], q.device
    k = min(topk, width)
    with dtypes.as_given(device):
        token = torch.arange(tokens, dtype=torch.int32, device=device)
        request = torch.searchsorted(cu_seqlens_q[1:].contiguous(), token, right=True)
        live = request < len(seq_lens)
        request = request.clamp(max=max(len(seq_lens) - 1, 0))
        if len(seq_lens):
            end = seq_lens[request] - cu_seqlens_q[request + 1] + token + 1  # keys up to the query itself
        else:
            end = token * 0
        end = end.where(live, 0).clamp(0, width * page)
        seen, whole = (end + page - 1) // page, end // page
        column = torch.arange(width, dtype=torch.int32, device=device)
        indices = torch.full((heads, tokens, k), -1, dtype=torch.int32, device=device)
        for t in range(tokens if k and len(seq_lens) else 0):
            ids = block_table[request[t]].clamp(0, len(summaries) - 1)
            found = bounds(q[t], _indexable(summaries)[ids].view(summaries.dtype))
            found = found.clamp(max=torch.finfo(found.dtype).max)
            always = (column == 0) | (column == seen[t] - 1)
            found = found.masked_fill(always, torch.inf).masked_fill(column >= seen[t], -torch.inf)
            best = found.sort(dim=1, descending=True, stable=True).indices[:, :k].int()
            best = best.where(column[:k] < seen[t], width).sort(dim=1).values
            indices[:, t] = best.where(best < width, -1)
        starts = torch.arange(heads * tokens, dtype=torch.int32, device=device) * k
        cut = (seen - whole).int()
        whole = (seen.clamp(max=k) - cut).clamp(min=0).int().repeat(heads)
        return Pages(indices, starts, whole, starts + whole, cut.repeat(heads))
