"""Quest's choice of pages for decode, in plain Triton: any CUDA GPU from sm_80, and Triton's interpreter.
`attn/reference/quest.py` is the specification.

    _update   a token and head of k: the first token of a page in slot_mapping adds all new rows of this page
    _bounds   a query, head of k and PAGES pages: two products, in float32 [rows, width]

                  max over g of  max(q_g, 0) . highs^T  +  min(q_g, 0) . lows^T       g: heads of q of this head

    _pick     a query and head of k: the highest bounds, by bisection over the row in registers

Lengths stay on the device. Pages behind a query are neither read nor scored. Every sum has one order: same inputs, same
bits. Bottleneck: memory, one read of the summaries: 4 bytes of each 2 * page * D of keys and values, in 16 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.reference.quest import Pages
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.ranks import highest, order

MOST_PAGES = 16384  # of a request: a row is in registers
PAGES = 64  # that a program of `_bounds` has
FEW, MANY = 64, 1024  # slots compared at once, of few and of many tokens
GATHERED = tl.constexpr(64)  # rows of keys read at once
EDGES = tl.constexpr(256)  # requests compared at once

_NUMBERS = ("tokens", "requests", "pages", "width", "heads", "k", "topk", "chunks")


@triton.jit
def _is_of(slot, page, PAGE: tl.constexpr):
    return (slot >= 0) & (slot // PAGE == page)


@triton.jit(do_not_specialize=("tokens", "pages", "heads"))
def _update(
    keys, slots, summaries, tokens, pages, heads, s_page, s_head, s_row,
    PAGE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    slot = tl.load(slots + token)
    page = slot // PAGE
    before = tl.load(slots + token - 1, mask=token > 0, other=-1)
    leads = (slot >= 0) & (page < pages) & ~_is_of(before, page, PAGE)
    if leads:
        for first in range(0, token, SCAN):
            at = first + tl.arange(0, SCAN)
            other = tl.load(slots + at, mask=at < token, other=-1)
            leads = leads & (tl.max(_is_of(other, page, PAGE).to(tl.int32), axis=0) == 0)
    if leads:
        column = tl.arange(0, WIDE)
        low = tl.full((WIDE,), float("inf"), tl.float32)
        high = tl.full((WIDE,), float("-inf"), tl.float32)
        anew = tl.zeros([], tl.int32)
        keys += page * s_page + head.to(tl.int64) * s_head
        for first in range(token, tokens, SCAN):
            at = first + tl.arange(0, SCAN)
            other = tl.load(slots + at, mask=at < tokens, other=-1)
            if tl.max(_is_of(other, page, PAGE).to(tl.int32), axis=0) > 0:
                for part in range(0, SCAN, GATHERED):
                    each = first + part + tl.arange(0, GATHERED)
                    few = tl.load(slots + each, mask=each < tokens, other=-1)
                    own = _is_of(few, page, PAGE)
                    row = few % PAGE
                    anew = tl.maximum(anew, tl.max((own & (row == 0)).to(tl.int32), axis=0))
                    there = own[:, None] & (column < D)[None, :]
                    x = tl.load(keys + row[:, None] * s_row + column[None, :], mask=there, other=0.0)
                    x = x.to(tl.float32)
                    low = tl.minimum(low, tl.min(tl.where(there, x, float("inf")), axis=0))
                    high = tl.maximum(high, tl.max(tl.where(there, x, float("-inf")), axis=0))
        to = summaries + (page * heads + head) * (2 * D) + column
        held = (column < D) & (anew == 0)
        low = tl.minimum(low, tl.load(to, mask=held, other=float("inf")).to(tl.float32))
        high = tl.maximum(high, tl.load(to + D, mask=held, other=float("-inf")).to(tl.float32))
        tl.store(to, low.to(to.dtype.element_ty), mask=column < D)
        tl.store(to + D, high.to(to.dtype.element_ty), mask=column < D)


@triton.jit
def _place(token, cu_seqlens_q, seq_lens, requests, width, PAGE: tl.constexpr):
    """The request of a token, and how many keys up to itself it sees: 0 after those of all requests."""
    request = tl.zeros([], tl.int32)
    for first in range(0, requests, EDGES):
        at = first + tl.arange(0, EDGES)
        edge = tl.load(cu_seqlens_q + 1 + at, mask=at < requests, other=0x7FFFFFFF)
        request += tl.sum((edge <= token).to(tl.int32), axis=0)
    live = request < requests
    length = tl.load(seq_lens + request, mask=live, other=0).to(tl.int64)
    edge = tl.load(cu_seqlens_q + 1 + request, mask=live, other=0)
    end = tl.where(live, length - edge + token + 1, 0)
    return request, tl.minimum(tl.maximum(end, 0), width.to(tl.int64) * PAGE).to(tl.int32)


@triton.jit(do_not_specialize=_NUMBERS)
def _bounds(
    q, summaries, block_table, seq_lens, cu_seqlens_q, out,
    tokens, requests, pages, width, chunks, heads, sq_t, sq_h, st_r,
    PAGE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """out [heads, tokens, width] of the pages that a token sees. GROUP heads of q, in ROWS rows."""
    pid = tl.program_id(0)
    token, head = pid // chunks % tokens, pid // chunks // tokens
    first = pid % chunks * PAGES
    request, end = _place(token, cu_seqlens_q, seq_lens, requests, width, PAGE)
    seen = (end + PAGE - 1) // PAGE
    if first < seen:
        page = first + tl.arange(0, PAGES)
        id = tl.load(block_table + request.to(tl.int64) * st_r + page, mask=page < seen, other=0)
        id = tl.minimum(tl.maximum(id, 0), pages - 1).to(tl.int64)
        column, g = tl.arange(0, WIDE), tl.arange(0, ROWS)
        x = tl.load(
            q + token.to(tl.int64) * sq_t + (head * GROUP + g)[:, None].to(tl.int64) * sq_h + column[None, :],
            mask=(g < GROUP)[:, None] & (column < D)[None, :], other=0.0,
        )  # fmt: skip
        of = summaries + (id * heads + head)[:, None] * (2 * D) + column[None, :]
        there = (page < seen)[:, None] & (column < D)[None, :]
        low = tl.load(of, mask=there, other=0.0).to(x.dtype)
        high = tl.load(of + D, mask=there, other=0.0).to(x.dtype)
        # A NaN stays one.
        bound = tl.dot(tl.where(x < 0, 0.0, x).to(x.dtype), high.T, input_precision="ieee")
        bound = tl.dot(tl.where(x < 0, x, 0.0).to(x.dtype), low.T, bound, input_precision="ieee")
        bound = tl.where((g < GROUP)[:, None] & (bound == bound), bound, float("-inf"))
        row = (head * tokens + token).to(tl.int64)
        tl.store(out + row * width + page, tl.max(bound, axis=0), mask=page < seen)


@triton.jit(do_not_specialize=_NUMBERS)
def _pick(
    bounds, seq_lens, cu_seqlens_q, indices, starts, whole, cut_starts, cut,
    tokens, requests, width, k,
    PAGE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    _, end = _place(row % tokens, cu_seqlens_q, seq_lens, requests, width, PAGE)
    seen = (end + PAGE - 1) // PAGE
    count = tl.minimum(seen, k)
    page = tl.arange(0, COLS)
    there = page < seen
    nothing, ahead = tl.full([], -0x80000000, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
    x = tl.load(bounds + row.to(tl.int64) * width + page, mask=there, other=0.0)
    key = tl.where(there, order(x, False), nothing)
    key = tl.where(there & ((page == 0) | (page == seen - 1)), ahead, key)
    kept = highest(key, count, nothing, nothing, tl.max(key, axis=0))
    start = row * k
    entry = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(indices + start + entry, page, mask=kept)
    tl.store(indices + start + page, -1, mask=(page >= count) & (page < k))
    partial = tl.where(end % PAGE != 0, 1, 0)
    tl.store(starts + row, start)
    tl.store(whole + row, count - partial)
    tl.store(cut_starts + row, start + count - partial)
    tl.store(cut + row, partial)


def update(keys: Tensor, slot_mapping: Tensor, summaries: Tensor) -> None:
    """As `reference.quest.update`. One launch."""
    pages, heads, page, dim = keys.shape
    tokens = len(slot_mapping)
    with torch.cuda.device_of(keys):
        launch(
            _update, (tokens * heads,), keys, slot_mapping, summaries, tokens, pages, heads, *keys.stride()[:3],
            PAGE=page, D=dim, WIDE=triton.next_power_of_2(dim), SCAN=FEW if tokens <= FEW else MANY, num_warps=4,
        )  # fmt: skip


def choose(
    q: Tensor,
    summaries: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    page: int,
    topk: int,
) -> Pages:
    """As `reference.quest.choose`. Two launches."""
    (tokens, q_heads, dim), (pages, heads) = q.shape, summaries.shape[:2]
    requests, width = block_table.shape
    k, rows = min(topk, width), heads * tokens
    made = torch.empty(rows * (k + 4), dtype=torch.int32, device=q.device)
    numbers = [made[i * rows : (i + 1) * rows] for i in range(4)]
    indices = made[4 * rows :].view(heads, tokens, k)
    bounds = torch.empty(rows * width, dtype=torch.float32, device=q.device)
    chunks, cols = -(-width // PAGES), max(16, triton.next_power_of_2(width))
    batch = seq_lens, cu_seqlens_q
    with torch.cuda.device_of(q):
        launch(
            _bounds, (rows * chunks,), q, summaries, block_table, *batch, bounds,
            tokens, requests, pages, width, chunks, heads, *q.stride()[:2], block_table.stride(0),
            PAGE=page, D=dim, WIDE=max(16, triton.next_power_of_2(dim)), GROUP=q_heads // heads,
            ROWS=max(16, triton.next_power_of_2(q_heads // heads)), PAGES=PAGES, num_warps=4,
        )  # fmt: skip
        launch(
            _pick, (rows,), bounds, *batch, indices, *numbers, tokens, requests, width, k,
            PAGE=page, COLS=cols, num_warps=min(max(cols // 512, 1), 32),
        )  # fmt: skip
    return Pages(indices, *numbers)
