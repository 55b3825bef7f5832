"""Ragged batches over paged keys: drawn lengths, pages in any order, NaN where no key is, and what is expected."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.mask.lists import BlockLists
from sparsek.mask.pages import PageLists
from sparsek.plan.kernel import PagedCall
from sparsek.plan.problem import PagedProblem
from sparsek.reference import attention_paged as specified
from sparsek.testing.poison import poisoned

CANARY = 3.0
GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6, 0)


@dataclass(frozen=True)
class Ragged:
    """A batch: queries and keys of each request, and what the call is to do with them.

    `layout`: "split" pages of K and V, "joined" in one tensor [pages, Hkv, page, D + Dv], "tokens" [pages, page, Hkv,
    D]. `list_heads` and `list_block`: lists of some blocks that a tile may see, with entries that are no blocks.
    `shared`: requests begin with the pages of the first one. `behind`: rows of q behind the last request.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (128, 128)
    page: int = 128
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    list_heads: int = 0
    list_block: tuple[int, int] = (128, 128)
    layout: str = "split"
    odd_out: bool = False
    shared: bool = False
    behind: int = 0
    spread: float = 1.0  # the standard deviation of q

    @property
    def tokens(self) -> int:
        return sum(self.queries) + self.behind


@dataclass
class Made:
    """The call of a batch and its problem; `out` is a view of `room`, which holds canaries around it."""

    batch: Ragged
    call: PagedCall
    problem: PagedProblem
    room: Tensor
    rules: dict[str, Any] = field(default_factory=dict)

    def expected(self) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        c = self.call
        options: dict[str, Any] = self.rules | {
            "sink_logits": None if c.sink_logits is None else c.sink_logits.double()
        }
        return specified.attention_paged(
            c.q.double(),
            c.k.double(),
            c.v.double(),
            c.block_table,
            c.seq_lens,
            c.cu_seqlens_q,
            **options,
        )

    def dense(self) -> Tensor:
        """out by products and a softmax in the precision of q, request by request."""
        c, b = self.call, self.batch
        out = torch.zeros(c.q.shape[0], c.q.shape[1], c.v.shape[3], dtype=c.q.dtype, device=c.q.device)
        edges = c.cu_seqlens_q.tolist()
        for r, length in enumerate(c.seq_lens.tolist()):
            first, last = edges[r], edges[r + 1]
            if first == last or length == 0:
                continue
            at = c.block_table[r, : -(-length // b.page)].long()
            group = b.heads[0] // b.heads[1]
            k, v = (
                x[at].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(group, 0)
                for x in (c.k, c.v)
            )
            q = c.q[first:last].transpose(0, 1)
            scores = (q @ k.mT) * c.scale
            if c.softcap:
                scores = c.softcap * torch.tanh(scores / c.softcap)
            scores = scores.float().masked_fill(~self.seen(r), -torch.inf)
            if c.sink_logits is not None:
                scores = torch.cat((scores, c.sink_logits[:, None, None].expand(-1, last - first, 1)), 2)
            weights = scores.softmax(-1).nan_to_num(0)[..., :length].to(q.dtype)
            out[first:last] = (weights @ v).transpose(0, 1)
        return out

    def seen(self, r: int) -> Tensor:
        """bool [Hq, n, length] of request r: the keys that its queries see."""
        c, b = self.call, self.batch
        n, length = b.queries[r], int(c.seq_lens[r])
        seen = specified._seen(n, length, b.causal, b.window, b.sinks, c.q.device)[None]
        if c.lists is not None:
            tile = sum(-(-each // c.lists.block[0]) for each in b.queries[:r])
            seen = seen & specified._listed(c.lists, tile, n, length, c.q.device)
        return seen.repeat_interleave(b.heads[0] // seen.shape[0], 0)


def make(batch: Ragged, seed: int, device: str = "cuda", lse: bool = True) -> Made:
    """Tensors of `batch`, drawn by `seed`."""
    draw, b = random.Random(seed), batch
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator, dtype=torch.float32).to(b.dtype)

    ints: Any = {"dtype": torch.int32, "device": device}
    (hq, hkv), (dim, v_dim), requests = b.heads, b.dims, len(b.queries)
    edges = torch.tensor([sum(b.queries[:r]) for r in range(requests + 1)], **ints)
    used = [-(-length // b.page) for length in b.keys]
    width, pages = max(*used, 1) + 1, sum(used) + 3
    ids = draw.sample(range(pages), sum(used))
    table = [[draw.choice(GARBAGE) for _ in range(width)] for _ in range(requests)]
    for r, count in enumerate(used):
        table[r][:count] = ids[sum(used[:r]) : sum(used[: r + 1])]
    if b.shared:
        for r in range(1, requests):
            count = min(used[0], used[r], b.keys[0] // b.page, b.keys[r] // b.page)
            table[r][:count] = table[0][:count]
    if b.layout == "joined":
        both = poisoned((pages, hkv, b.page, dim + v_dim), b.dtype, device)
        k, v = both[..., :dim], both[..., dim:]
    elif b.layout == "tokens":
        k, v = (poisoned((pages, b.page, hkv, d), b.dtype, device).transpose(1, 2) for d in b.dims)
    else:
        k, v = (poisoned((pages, hkv, b.page, d), b.dtype, device) for d in b.dims)
    for r, length in enumerate(b.keys):
        for j in range(used[r]):
            rows = min(b.page, length - j * b.page)
            k[table[r][j], :, :rows] = randn(hkv, rows, dim)
            v[table[r][j], :, :rows] = randn(hkv, rows, v_dim)
    q = randn(b.tokens, hq, dim) * b.spread
    extra = 3 if b.odd_out else 8
    room = torch.full((b.tokens, hq + 1, v_dim + extra), CANARY, dtype=b.dtype, device=device)
    out = room[:, :hq, :v_dim]
    out.fill_(torch.nan)
    lists = _lists(b, draw, device) if b.list_heads else None
    sink = (
        torch.randn(hq, device=device, generator=generator, dtype=torch.float32) * 2
        if b.sink_logits
        else None
    )
    call = PagedCall(
        q=q, k=k, v=v, block_table=torch.tensor(table, **ints), seq_lens=torch.tensor(b.keys, **ints),
        cu_seqlens_q=edges, lists=lists, sink_logits=sink, k_scale=None, v_scale=None, scale=dim**-0.5,
        softcap=b.softcap, out=out, lse=poisoned((hq, b.tokens), torch.float32, device) if lse else None,
    )  # fmt: skip
    rules = {
        "scale": call.scale, "causal": b.causal, "window": b.window, "sinks": b.sinks, "lists": lists,
        "softcap": b.softcap, "sink_logits": sink,
    }  # fmt: skip
    return Made(b, call, problem_of(call, b), room, rules)


def problem_of(call: PagedCall, b: Ragged) -> PagedProblem:
    """The problem of a call, with the batch's own bounds of lengths."""
    strides = [s for x in (call.q, call.k, call.v) for s in x.stride()[:-1]]
    addresses = [x.data_ptr() for x in (call.q, call.k, call.v)]
    aligned = all(s % 8 == 0 for s in strides) and all(a % 16 == 0 for a in addresses)
    listed = call.lists is not None
    return PagedProblem(
        tokens=b.tokens, requests=len(b.queries), q_heads=b.heads[0], kv_heads=b.heads[1], dim=b.dims[0],
        v_dim=b.dims[1], page=b.page, max_q=max(b.queries), max_k=call.block_table.shape[1] * b.page,
        dtype=dtypes.name(b.dtype), kv_dtype=dtypes.name(b.dtype), card=card_of(call.q.device), causal=b.causal,
        window=b.window, sinks=b.sinks, softcap=b.softcap > 0, sink_logits=b.sink_logits, aligned=aligned,
        list_heads=call.lists.heads if call.lists else 0, list_block=call.lists.block if call.lists else (0, 0),
        listed=call.lists.longest if listed and call.lists else 0, lse=call.lse is not None,
    )  # fmt: skip


def _lists(b: Ragged, draw: random.Random, device: str) -> PageLists:
    """Half of the blocks that each tile sees, in any order, among entries that are no blocks."""
    bq, bk = b.list_block
    rows: dict[str, list[list[int]]] = {"full": [], "partial": []}
    for _ in range(b.list_heads):
        for n, length in zip(b.queries, b.keys, strict=True):
            for first in range(0, n, bq):
                low = length - n + first  # the position of the tile's first query
                high = low + min(bq, n - first) if b.causal else length
                found: dict[str, list[int]] = {"full": [], "partial": []}
                for block in range(-(-min(high, length) // bk)):
                    if draw.random() < 0.5:
                        end = min(length, low + 1) if b.causal else length
                        found["full" if (block + 1) * bk <= end else "partial"].append(block)
                for name, row in found.items():
                    row += [draw.choice((-1, -(2**31), 2**31 - 1, -(-length // bk)))] * (draw.random() < 0.3)
                    draw.shuffle(row)
                    rows[name].append(row)
    ints: Any = {"dtype": torch.int32, "device": device}

    def packed(each: list[list[int]]) -> BlockLists:
        starts = [sum(map(len, each[:i])) for i in range(len(each))]
        flat = [entry for row in each for entry in row]
        return BlockLists(
            torch.tensor(starts, **ints),
            torch.tensor([len(row) for row in each], **ints),
            torch.tensor(flat, **ints),
        )

    longest = max(len(f) + len(p) for f, p in zip(rows["full"], rows["partial"], strict=True))
    tiles = len(rows["full"]) // b.list_heads
    return PageLists(
        packed(rows["full"]), packed(rows["partial"]), b.list_heads, tiles, b.list_block, longest
    )


def check(made: Made, out: Tensor, lse: Tensor | None, what: object = "") -> None:
    """Out within twice the error of dense attention in the same precision, lse within 1e-3; nothing else written."""
    b, end = made.batch, sum(made.batch.queries)
    exact, exact_lse = made.expected()
    found = out[:end].double()
    assert torch.isfinite(found).all(), (
        f"{what}: {int((~torch.isfinite(found)).sum())} elements are not finite"
    )
    size = float(exact[:end].norm())
    if size:
        error, budget = (float((x - exact[:end]).norm()) / size for x in (found, made.dense()[:end].double()))
        assert error <= 2 * budget + 1e-6, f"{what}: error {error:.3g}, of dense attention {budget:.3g}"
    empty = exact_lse[:, :end] == -torch.inf
    assert (found.transpose(0, 1)[empty] == 0).all(), f"{what}: a query that sees nothing is not 0"
    if lse is not None:
        got, wanted = lse[:, :end].double(), exact_lse[:, :end]
        assert (got[empty] == -torch.inf).all(), what
        off = (got - wanted)[~empty].abs() - 1e-3 * (1 + wanted[~empty].abs())
        assert not off.numel() or float(off.max()) <= 0, f"{what}: lse is off by {float(off.max()):.3g} more"
        assert lse[:, end:].isnan().all(), f"{what}: lse behind the last request was written"
    assert out[end:].isnan().all(), f"{what}: rows behind the last request were written"
    room = made.room
    assert (room[:, b.heads[0] :] == CANARY).all(), f"{what}: written beside out"
    assert (room[:, :, b.dims[1] :] == CANARY).all(), f"{what}: written beside out"


def run(kernel: Any, made: Made, c: Any = None) -> tuple[Tensor, Tensor | None]:
    """Out and lse of one launch over poisoned outputs."""
    p, call = made.problem, made.call
    config = kernel.default(p) if c is None else c
    call.out.fill_(torch.nan)
    if call.lse is not None:
        call.lse.fill_(torch.nan)
    kernel.launch(config, kernel.prepare(p, config, call.q.device), call)
    return call.out, call.lse


def found_before(made: Made, kernel: Any, c: Any = None) -> None:
    """Pages that no query's window and no sink reaches become NaN, and nothing changes."""
    b, call = made.batch, made.call
    want = [x.clone() for x in run(kernel, made, c) if x is not None]
    kept = call.k.clone(), call.v.clone()
    given = 0
    for r, (n, length) in enumerate(zip(b.queries, b.keys, strict=True)):
        for j in range(-(-length // b.page)):
            if b.sinks <= j * b.page and (j + 1) * b.page <= length - n - b.window + 1:
                given += 1
                for x in (call.k, call.v):
                    x[int(call.block_table[r, j])] = torch.nan
    assert given, "no page is out of reach"
    found = [x for x in run(kernel, made, c) if x is not None]
    for x, y in zip(found, want, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), f"{c}: {b}"
    call.k.copy_(kept[0])
    call.v.copy_(kept[1])


def drawn(seed: int, **more: Any) -> Ragged:
    """A batch of random lengths and rules."""
    draw = random.Random(seed)
    requests = draw.randint(1, 6)
    queries = tuple(
        draw.choice((0, 1, 2, draw.randint(1, 40), draw.randint(1, 700))) for _ in range(requests)
    )
    if not sum(queries):
        queries = (3, *queries[1:])
    keys = tuple(max(0, n + draw.choice((0, 0, 1, draw.randint(0, 3000), -n // 2))) for n in queries)
    window = draw.choice((0, 0, 1, 77, 128, 500, 1500))
    d = draw.choice((64, 96, 128, 256))
    b = Ragged(
        queries, keys, heads=draw.choice(((2, 2), (4, 1), (8, 2), (6, 2), (16, 1))), dims=(d, d),
        page=draw.choice((16, 32, 64, 128, 256)), dtype=draw.choice((torch.bfloat16, torch.float16)),
        causal=draw.random() < 0.7, window=window, sinks=draw.choice((0, 4, 128, 200)) if window else 0,
        softcap=draw.choice((0.0, 0.0, 5.0)), sink_logits=draw.random() < 0.4,
        layout=draw.choice(("split", "joined", "tokens")), odd_out=draw.random() < 0.3, shared=draw.random() < 0.3,
        behind=draw.choice((0, 1, 70)), spread=draw.choice((1.0, 4.0)),
    )  # fmt: skip
    if draw.random() < 0.3:
        per = draw.choice((1, b.heads[1], b.heads[0]))
        b = replace(
            b,
            list_heads=per,
            list_block=(draw.choice((64, 128)), draw.choice((64, 128, 256))),
            window=0,
            sinks=0,
        )
    return replace(b, **more)
