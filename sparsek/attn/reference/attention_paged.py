"""Attention over paged keys and values in plain torch, float64 too: the specification of every kernel of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.attn.mask.pages import PageLists
from sparsek.core import dtypes


def attention_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = 0,
    sinks: int = 0,
    lists: PageLists | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [tokens, Hq, Dv], lse [Hq, tokens]) of a ragged batch; operands as in `plan.kernel.PagedCall`.

    Query i of the n of request r stands at p = seq_lens[r] - n + i. It sees the keys j < seq_lens[r] with

        j <= p                                 if causal
        p - window < j, or j < sinks           if window > 0 (not causal: also j < p + window)
        a block of its tile's lists            if lists are given

    s_j = softcap tanh(scale <q, k_j> k_scale / softcap), without softcap scale <q, k_j> k_scale,
    lse = log(sum_j exp(s_j) + exp(sink_logits[h])), out = sum_j exp(s_j - lse) v_j v_scale. A query that sees nothing
    gets 0 and -inf (or its sink). Rows after the last request are 0 and -inf. Sums are float32, or
    float64 for float64.
    """
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros(*q.shape[:2], v.shape[3], dtype=wide, device=q.device)
    lse = torch.full((heads, q.shape[0]), -torch.inf, dtype=wide, device=q.device)
    with dtypes.as_given(q.device):
        for at, keys, values, some in requests(
            k, v, block_table, seq_lens, cu_seqlens_q, causal=causal, window=window, sinks=sinks, lists=lists,
            k_scale=k_scale, v_scale=v_scale, dtype=wide,
        ):  # fmt: skip
            n, seen = at.stop - at.start, some.repeat_interleave(heads // some.shape[0], 0)
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            met = seen.any(1)[..., None]
            keys, values = keys.masked_fill(~met, 0), values.masked_fill(~met, 0)
            scores = q[at].transpose(0, 1).to(wide) @ keys.mT * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sink_logits is not None:
                scores = torch.cat((scores, sink_logits.to(wide)[:, None, None].expand(-1, n, 1)), 2)
                values = torch.nn.functional.pad(values, (0, 0, 0, 1))
            total = scores.logsumexp(2)
            weights = (scores - total.masked_fill(total == -torch.inf, 0)[..., None]).exp()
            out[at] = (weights @ values).transpose(0, 1)
            lse[:, at] = total
    return out.to(q.dtype), lse


class Request(NamedTuple):
    """One request: its rows of q, keys [Hkv, T, D], values [Hkv, T, Dv], and which keys its queries see: bool [H, n, T]
    for 1, Hkv or Hq heads H.
    """

    at: slice
    keys: Tensor
    values: Tensor
    seen: Tensor


def requests(
    k: Tensor,
    v: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    causal: bool = True,
    window: int = 0,
    sinks: int = 0,
    lists: PageLists | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Request]:
    """The requests one by one, with keys and values from their pages, scaled, in `dtype`."""
    edges, page, tile = cu_seqlens_q.tolist(), k.shape[2], 0
    factors = [
        1.0 if s is None else s.to(dtype).expand(k.shape[1])[:, None, None] for s in (k_scale, v_scale)
    ]
    for r, length in enumerate(seq_lens.tolist()):
        n, pages = edges[r + 1] - edges[r], block_table[r, : -(-length // page)].long()
        keys, values = (
            x[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype) * factor
            for x, factor in zip((k, v), factors, strict=True)
        )
        seen = _seen(n, length, causal, window, sinks, k.device)[None]
        if lists is not None:
            seen = seen & _listed(lists, tile, n, length, k.device)
            tile += -(-n // lists.block[0])
        yield Request(slice(edges[r], edges[r + 1]), keys, values, seen)


def _seen(n: int, length: int, causal: bool, window: int, sinks: int, device: torch.device) -> Tensor:
    """bool [n, length]: which keys the queries of one request see, lists aside."""
    p = (torch.arange(n, device=device) + length - n)[:, None]
    j = torch.arange(length, device=device)[None]
    seen = (j <= p) | torch.tensor(not causal, device=device)
    if window:
        seen = seen & (((j > p - window) & (j < p + window)) | (j < sinks))
    return seen


def _listed(lists: PageLists, tile: int, n: int, length: int, device: torch.device) -> Tensor:
    """bool [heads, n, length]: keys of the blocks of each query's tile; `tile` is the first."""
    bq, bk = lists.block
    blocks = torch.zeros(lists.heads, -(-n // bq), -(-length // bk), dtype=torch.bool, device="cpu")
    for part in (lists.full, lists.partial):
        starts, counts, indices = part.starts.tolist(), part.counts.tolist(), part.indices.cpu().long()
        for h in range(lists.heads):
            for i in range(blocks.shape[1]):
                row = h * lists.tiles + tile + i
                at = indices[starts[row] : starts[row] + counts[row]]
                blocks[h, i, at[(at >= 0) & (at < blocks.shape[2])]] = True
    blocks = blocks.to(device)
    return blocks.repeat_interleave(bq, 1)[:, :n].repeat_interleave(bk, 2)[..., :length]
