"""cpu.attention_paged: attention over paged keys and values on CPU tensors, in batched torch.

    a tile of queries of one request     Q  [Hkv, group * rows, D]
    the keys that any of them may see    K  [Hkv, columns, D], V [Hkv, columns, Dv]   (gathered from their pages)
    one bmm per product                  S  [Hkv, group * rows, columns]

Query heads that share a head of keys are rows of one product, so keys are gathered once for all of them, in float32, or
float64 for float64. Columns are a range that follows from causality and the window, the sinks before it, or the blocks
that the lists of the tile name. Bound by memory for single queries, and by the products for prompts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.kernels.kinds import wide_seconds, wide_size
from sparsek.mask.pages import PageLists
from sparsek.plan.attention_kernels import PagedCall, PagedKernel
from sparsek.plan.attention_problems import PagedProblem


@dataclass(frozen=True)
class CpuPagedConfig:
    """`rows`: queries of a tile."""

    rows: int = 64

    def __repr__(self) -> str:
        return f"tiles of {self.rows} queries"


class CpuPaged:
    """Batched torch, request by request. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.attention_paged"

    def why_not(self, p: PagedProblem) -> list[str]:
        return [] if p.on_cpu else ["runs on CPU tensors only"]

    def default(self, p: PagedProblem) -> CpuPagedConfig:
        return CpuPagedConfig()

    def configs(self, p: PagedProblem) -> list[CpuPagedConfig]:
        return [CpuPagedConfig(rows) for rows in (16, 64, 256)]

    def seconds(self, p: PagedProblem, c: CpuPagedConfig) -> float:
        tiles = p.requests * max(1, -(-p.tokens // (max(1, p.requests) * c.rows)))
        size, width = wide_size(p), p.dim + p.v_dim
        gathered = tiles * p.kv_heads * p.seen * width * (2 * size + dtypes.itemsize(p.kv_dtype))
        scores = 8 * p.tokens * p.q_heads * p.seen * size
        return wide_seconds(p, p.useful_flops, gathered + scores, 25 * tiles)

    def prepare(self, p: PagedProblem, c: CpuPagedConfig, device: Any) -> PagedProblem:
        return p

    def launch(self, c: CpuPagedConfig, work: PagedProblem, call: PagedCall) -> None:
        with torch.no_grad():
            tokens, most = call.q.shape[0], min(work.max_k, call.block_table.shape[1] * work.page)
            edges = call.cu_seqlens_q.clamp(0, tokens).cummax(0).values.tolist()
            lengths = call.seq_lens.clamp(0, most).tolist()
            table = call.block_table.clamp(0, call.k.shape[0] - 1).long()
            bq, tile = (1, 0) if call.lists is None else (call.lists.block[0], 0)
            rows = c.rows if call.lists is None else min(c.rows, 16) if bq == 1 else bq
            for r, length in enumerate(lengths):
                first, last = edges[r], edges[r + 1]
                for start in range(first, last, rows):
                    stop, shift = min(start + rows, last), length - last
                    listed = (
                        None
                        if call.lists is None
                        else _listed(
                            call.lists, tile + (start - first) // bq, -(-(stop - start) // bq), length
                        )
                    )
                    _tile(work, call, table[r], length, slice(start, stop), start + shift, listed)
                tile += -(-(last - first) // bq)
            call.out[edges[-1] : call.out_end] = 0
            if call.lse is not None:
                call.lse[:, edges[-1] : call.lse_end] = -torch.inf


def _tile(
    p: PagedProblem,
    call: PagedCall,
    pages: Tensor,
    length: int,
    at: slice,
    position: int,
    listed: Tensor | None,
) -> None:
    """Writes the rows `at`, whose first query stands at `position`. `listed`: see `_listed`."""
    n, wide = at.stop - at.start, torch.promote_types(call.q.dtype, torch.float32)
    columns = _columns(p, length, position, n, listed, call.lists)
    here = torch.arange(position, position + n, device=call.q.device)[:, None]
    seen = torch.ones((1, n, columns.numel()), dtype=torch.bool, device=call.q.device)
    if p.causal:
        seen = seen & (columns <= here)
    if p.window:
        near = (columns > here - p.window) & (columns < here + p.window)
        seen = seen & (near | (columns < p.sinks))
    if listed is not None and call.lists is not None:
        bq, bk = call.lists.block
        blocks = listed.repeat_interleave(bq, 1)[:, :n]
        seen = seen & blocks[..., columns // bk]
    group = p.group
    if seen.shape[0] == p.q_heads:  # a list per head of q
        seen = seen.view(p.kv_heads, group * n, -1)
    else:
        seen = seen.repeat(1, group, 1)
    where = pages[columns // p.page], columns % p.page
    keys, values = (
        _gathered(x, where, scale, wide) for x, scale in ((call.k, call.k_scale), (call.v, call.v_scale))
    )
    queries = call.q[at].to(wide).unflatten(1, (p.kv_heads, group)).permute(1, 2, 0, 3)
    scores = torch.bmm(queries.reshape(p.kv_heads, group * n, -1), keys.mT).mul_(call.scale)
    if call.softcap:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    scores = scores.masked_fill_(~seen, -torch.inf)
    top = scores.new_full((p.kv_heads, group * n, 1), -torch.inf)
    if columns.numel():
        top = scores.amax(-1, keepdim=True)
    sink = None
    if call.sink_logits is not None:
        sink = call.sink_logits.to(wide).view(p.kv_heads, group, 1).repeat_interleave(n, 1)
        top = torch.maximum(top, sink)
    base = top.masked_fill(top == -torch.inf, 0)
    weights = scores.sub_(base).exp_()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - base).exp_()
    out = torch.bmm(weights, values).div_(total.masked_fill(total == 0, 1))
    call.out[at] = out.view(p.q_heads, n, -1).transpose(0, 1).to(call.out.dtype)
    if call.lse is not None:
        call.lse[:, at] = (base + total.log()).view(p.q_heads, n).to(call.lse.dtype)


def _columns(
    p: PagedProblem, length: int, position: int, n: int, listed: Tensor | None, lists: PageLists | None
) -> Tensor:
    """The keys that n queries from `position` on may see, int64, ascending."""
    first, last = 0, length
    if p.causal:
        last = max(0, min(last, position + n))
    if p.window:
        last = max(0, min(last, max(position + n - 1 + p.window, p.sinks)))
        first = min(max(0, position - p.window + 1), last)
    columns = torch.arange(first, last, device="cpu")
    if first:
        columns = torch.cat((torch.arange(min(p.sinks, first), device="cpu"), columns))
    if listed is None or lists is None:
        return columns
    return columns[listed.any(0).any(0)[columns // lists.block[1]]]


def _gathered(x: Tensor, where: tuple[Tensor, Tensor], scale: Tensor | None, wide: torch.dtype) -> Tensor:
    """Rows of pages, [Hkv, columns, D], scaled."""
    page, row = where
    if x.dtype == torch.float8_e4m3fn:  # by bytes, because not every torch indexes FP8
        found = x.view(torch.uint8)[page, :, row].view(x.dtype)
    else:
        found = x[page, :, row]
    found = found.transpose(0, 1).to(wide)
    return found if scale is None else found * scale.to(wide).view(-1, 1, 1)


def _listed(lists: PageLists, tile: int, tiles: int, length: int) -> Tensor:
    """bool [heads, tiles, blocks]: the blocks of tiles `tile` to tile + tiles - 1 of one request."""
    blocks = -(-length // lists.block[1])
    each = torch.arange(tile, tile + tiles, device="cpu")
    rows = torch.arange(lists.heads, device="cpu")[:, None] * lists.tiles + each.clamp(
        max=max(lists.tiles - 1, 0)
    )
    marks = torch.zeros((lists.heads, tiles, blocks + 1), dtype=torch.bool, device="cpu")
    if lists.tiles == 0:
        return marks[..., :blocks]
    for starts, counts, indices in (lists.full, lists.partial):
        if not indices.numel():
            continue
        many = counts[rows].long().clamp(0, min(lists.longest, indices.numel()))[..., None]
        entry = torch.arange(int(many.max()), device="cpu")
        place = (starts[rows].long()[..., None] + entry).clamp(0, max(indices.numel() - 1, 0))
        found = indices[place].long()
        there = (entry < many) & (found >= 0) & (found < blocks) & (each < lists.tiles)[None, :, None]
        marks.scatter_(2, torch.where(there, found, blocks), True)
        marks[..., blocks] = False
    return marks[..., :blocks]


KERNEL: PagedKernel = CpuPaged()
