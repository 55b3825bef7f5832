"""Random ragged batches over paged keys, and what portable.attention_paged makes of them beside the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.mask.lists import BlockLists
from sparsek.mask.pages import PageLists
from sparsek.plan.kernel import PagedCall
from sparsek.plan.problem import PagedProblem
from sparsek.reference.attention_paged import attention_paged
from sparsek.testing.poison import poisoned

E4M3 = torch.float8_e4m3fn


@dataclass
class Batch:
    """Facts of a batch. `lengths`: (queries, keys) of each request; `layout` of the cache: "pair", "joined", "rows".

    `lists`: (heads, bq, bk), of which every row has up to `listed` blocks.
    """

    lengths: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (32, 32)
    page: int = 16
    dtype: torch.dtype = torch.float16
    fp8: bool = False
    scales: int = 0
    layout: str = "pair"
    causal: bool = True
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    lists: tuple[int, int, int] | None = None
    listed: int = 4
    full: bool = False
    device: str = "cpu"
    seed: int = 0
    spare: int = 0

    def make(self) -> tuple[PagedProblem, PagedCall]:
        """The problem and the call. What no request has a right to is NaN, and so are the outputs."""
        draw, on = random.Random(self.seed), self.device
        torch.manual_seed(self.seed)
        (hq, hkv), (d, dv) = self.heads, self.dims
        edges = [0]
        for n, _ in self.lengths:
            edges.append(edges[-1] + n)
        tokens, requests = edges[-1] + self.spare, len(self.lengths)
        width = max(1, *(-(-keys // self.page) for _, keys in self.lengths)) + draw.randrange(3)
        used = sum(-(-keys // self.page) for _, keys in self.lengths)
        pages = used + 3
        order = draw.sample(range(pages), pages)
        table = torch.full((requests, width), 2**31 - 1, dtype=torch.int32)
        kind = E4M3 if self.fp8 else self.dtype
        k, v = self._cache(pages, hkv, d, dv)
        for r, (_, keys) in enumerate(self.lengths):
            for i in range(-(-keys // self.page)):
                page, rows = order.pop(), min(self.page, keys - i * self.page)
                table[r, i] = page
                for x in (k, v):
                    x[page, :, :rows] = torch.randn(hkv, rows, x.shape[3]).to(kind).to(on)
        q = torch.randn(tokens, hq, d).to(self.dtype).to(on)
        lists = self._lists(edges, draw)
        k_scale, v_scale = (
            (torch.rand(self.scales, dtype=torch.float32, device="cpu") + 0.5).to(on) if self.scales else None
            for _ in "kv"
        )
        sinks = torch.randn(hq, dtype=torch.float32).to(on) if self.sink_logits else None
        bounds = max((n for n, _ in self.lengths), default=1), max((m for _, m in self.lengths), default=1)
        p = PagedProblem(
            tokens=tokens, requests=requests, q_heads=hq, kv_heads=hkv, dim=d, v_dim=dv, page=self.page,
            max_q=max(1, bounds[0]), max_k=max(1, bounds[1]), dtype=dtypes.name(self.dtype),
            kv_dtype="e4m3" if self.fp8 else dtypes.name(kind), card=card_of(q.device),
            causal=self.causal, window=self.window,
            sinks=self.sinks, softcap=self.softcap > 0, sink_logits=self.sink_logits,
            scale_per={0: "", 1: "tensor"}.get(self.scales, "head"), list_heads=lists.heads if lists else 0,
            list_block=lists.block if lists else (0, 0), listed=lists.longest if lists else 0, lse=True,
        )  # fmt: skip
        call = PagedCall(
            q, k, v, table.to(on), torch.tensor([m for _, m in self.lengths], dtype=torch.int32, device=on),
            torch.tensor(edges, dtype=torch.int32, device=on), lists, sinks, k_scale, v_scale, d**-0.5, self.softcap,
            poisoned((tokens, hq, dv), self.dtype, on), poisoned((hq, tokens), torch.float32, on),
        )  # fmt: skip
        return p, call

    def _cache(self, pages: int, hkv: int, d: int, dv: int) -> tuple[Tensor, Tensor]:
        """K and V full of NaN."""
        kind, on = (torch.uint8 if self.fp8 else self.dtype), self.device
        poison = 0x7F if self.fp8 else torch.nan

        def full(*shape: int) -> Tensor:
            made = torch.full(shape, poison, dtype=kind, device=on)
            return made.view(E4M3) if self.fp8 else made

        if self.layout == "joined":
            both = full(pages, hkv, self.page, d + dv)
            return both[..., :d], both[..., d:]
        if self.layout == "rows":
            return full(pages, self.page, hkv, d).transpose(1, 2), full(pages, self.page, hkv, dv).transpose(
                1, 2
            )
        return full(pages, hkv, self.page, d), full(pages, hkv, self.page, dv)

    def _lists(self, edges: list[int], draw: random.Random) -> PageLists | None:
        """Random blocks of every tile, absent ones among them. `full`: blocks that all queries see go to that list."""
        if self.lists is None:
            return None
        heads, bq, bk = self.lists
        tiles = sum(-(-n // bq) for n, _ in self.lengths) + 1
        rows: tuple[list[list[int]], list[list[int]]] = ([], [])
        for _ in range(heads):
            for n, keys in self.lengths:
                for i in range(-(-n // bq)):
                    blocks = -(-keys // bk)
                    chosen = draw.sample(range(blocks), min(blocks, self.listed))
                    seen = keys - n + i * bq if self.causal else keys
                    whole = [b for b in chosen if self.full and (b + 1) * bk <= seen + 1]
                    rows[0].append(whole)
                    rows[1].append(
                        [b for b in chosen if b not in whole] + draw.sample([-1, blocks + 7, 2**31 - 1], 1)
                    )
            rows[0].append([])
            rows[1].append([])
        made = []
        for part in rows:
            counts = torch.tensor([len(row) for row in part], dtype=torch.int32)
            starts = (counts.cumsum(0) - counts).to(torch.int32)
            flat = torch.tensor([b for row in part for b in row], dtype=torch.int32)
            made.append(BlockLists(*(x.to(self.device) for x in (starts, counts, flat))))
        return PageLists(made[0], made[1], heads, tiles, (bq, bk), self.listed + 1)


def attend(kernel: Any, p: PagedProblem, call: PagedCall, config: Any = None) -> tuple[Tensor, Tensor]:
    """(out, lse), written over NaN."""
    assert kernel.why_not(p) == []
    c = kernel.default(p) if config is None else config
    call.out.fill_(torch.nan)
    assert call.lse is not None
    call.lse.fill_(torch.nan)
    kernel.launch(c, kernel.prepare(p, c, call.q.device), call)
    return call.out, call.lse


def expected(p: PagedProblem, call: PagedCall) -> tuple[Tensor, Tensor]:
    """The reference in float64, over a cache whose unused rows are 0."""
    k, v = (x.to(torch.float64).nan_to_num(0.0) for x in (call.k, call.v))
    table = call.block_table.clamp(0, len(k) - 1)
    return attention_paged(
        call.q.double(), k, v, table, call.seq_lens, call.cu_seqlens_q, scale=call.scale, causal=p.causal,
        window=p.window, sinks=p.sinks, lists=call.lists, softcap=call.softcap, sink_logits=call.sink_logits,
        k_scale=call.k_scale, v_scale=call.v_scale,
    )  # fmt: skip


def check(kernel: Any, batch: Batch, config: Any = None) -> None:
    """Out and lse are right; rows behind the last request are untouched."""
    p, call = batch.make()
    hold(batch, p, call, *attend(kernel, p, call, config), config)


def hold(
    batch: Batch, p: PagedProblem, call: PagedCall, out: Tensor, lse: Tensor, config: Any = None
) -> None:
    exact, exact_lse = expected(p, call)
    tokens = sum(n for n, _ in batch.lengths)
    assert out[tokens:].isnan().all()
    assert lse[:, tokens:].isnan().all()
    out, lse, exact, exact_lse = out[:tokens], lse[:, :tokens], exact[:tokens], exact_lse[:, :tokens]
    what = f"{batch}, {config}"
    empty = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty), what
    assert (out.transpose(0, 1)[empty] == 0).all(), what
    # Out and the weights are rounded once each; either error is at most a unit of roundoff of a row.
    unit = torch.finfo(batch.dtype).eps / 2
    error = (out.double() - exact).norm()
    assert error <= 1.5 * unit * exact.norm() + 1e-12, f"{float(error / exact.norm() / unit)} units: {what}"
    off = (lse.double() - exact_lse)[~empty].abs()
    assert (off <= 1e-4 * (1 + exact_lse[~empty].abs())).all(), f"lse off by {float(off.max())}: {what}"
