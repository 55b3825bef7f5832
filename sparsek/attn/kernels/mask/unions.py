"""The mask of per-token lists in one launch, in plain Triton: bit for bit the lists of mask/build/unions.py. Any CUDA
GPU, and Triton's interpreter.

    candidate   a key block of one token: listed, or reached by its window or its sinks
    sort        by block, then token: a bitonic network in registers and shared memory
    scan        the bits of equal blocks, joined up to the last of each
    rank        of the last ones, among the partial and among the full blocks: one prefix sum

A program makes one row. 8 tokens of 16 blocks are 128 candidates of one warp: 28 steps of the network are most of its
instructions. Its lists are read once, in the order of memory.

Nothing is read or written out of bounds, whatever the values: entries are compared with the key blocks before they are
used, and a row has room for all of its distinct candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.mask.build.unions import Listed
from sparsek.engine.launch.launch import launch

MOST = 8192  # candidates of a row
_NONE = tl.constexpr(2**31 - 1)
_WORD = tl.constexpr(32)
# Triton does not specialize for these: sizes and strides that vary from call to call.
_VARY = (
    "si_b", "si_h", "si_m", "si_n", "sc_b", "sc_h", "sc_m", "listed", "of_sinks", "of_window", "sinks", "window",
    "heads", "tiles", "columns", "capacity", "q_len", "kv_len", "q_offset",
)  # fmt: skip


@triton.jit
def _joined(column, word, next_column, next_word):
    """The bits of the last column of two parts, which ascend."""
    return next_column, next_word | tl.where(column == next_column, word, 0)


@triton.jit
def _interval(bounds, token, there, q_len, kv_len, q_offset, CAUSAL: tl.constexpr):
    """lo and hi of tokens."""
    if bounds is not None:
        lo = tl.load(bounds + token, mask=there, other=0)
        hi = tl.load(bounds + q_len.to(tl.int64) + token, mask=there, other=0)
    else:
        lo = token * 0
        hi = lo + kv_len
        if CAUSAL:
            hi = tl.minimum(tl.maximum(token + q_offset + 1, 0), kv_len)
    return lo, hi


@triton.jit(do_not_specialize=_VARY)
def _unions(
    indices, counts, bounds, cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules,
    si_b, si_h, si_m, si_n, sc_b, sc_h, sc_m, listed, of_sinks, of_window, sinks, window,
    heads, tiles, columns, capacity, q_len, kv_len, q_offset,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One row of lists, of TOKENS times EACH candidates."""
    CELLS: tl.constexpr = TOKENS * EACH
    WORDS: tl.constexpr = (TOKENS + 31) // 32
    row = tl.program_id(0)
    tile, group = row % tiles, row // tiles
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    lane = tl.arange(0, CELLS)
    at, each = lane // EACH, lane % EACH
    token = tile * TOKENS + at
    there = token < q_len
    lo, hi = _interval(bounds, token, there, q_len, kv_len, q_offset, CAUSAL)

    # Key blocks of the mask, and whether a candidate is one, with its token's bit.
    used = there & (each < listed)
    if counts is not None:
        many = tl.load(counts + b * sc_b + h * sc_h + token.to(tl.int64) * sc_m, mask=used, other=0)
        used = used & (each < many)
    from_here = indices + b * si_b + h * si_h
    block = tl.load(from_here + token.to(tl.int64) * si_m + each.to(tl.int64) * si_n, mask=used, other=-1)
    used = used & (block >= 0) & (block < columns)
    block = tl.where(used, block, 0).to(tl.int32)
    used = used & (block * BK < hi - lo)
    column = lo // BK + block
    bit = used
    if of_sinks > 0:
        sink = each - listed
        near = there & (sink >= 0) & (sink < of_sinks) & (sink * BK < tl.minimum(sinks, hi - lo))
        column = tl.where(near, lo // BK + sink, column)
        end = (column + 1) * BK
        used, bit = used | near, bit | (near & (end <= lo + sinks) & (end <= hi))
    if of_window > 0:
        place = each - listed - of_sinks
        last = tl.maximum(hi - window, lo) // BK + place
        near = there & (place >= 0) & (place < of_window) & (last * BK < hi)
        column = tl.where(near, last, column)
        used = used | near
        bit = bit | (near & (column * BK >= hi - window) & ((column + 1) * BK <= hi))

    key = tl.where(used, column * (2 * TOKENS) + tl.where(bit, 0, TOKENS) + at, _NONE)
    key = tl.sort(key)
    column, at = key // (2 * TOKENS), key % TOKENS
    real, bit = key != _NONE, (key & TOKENS) == 0
    following = tl.gather(column, tl.minimum(lane + 1, CELLS - 1), 0)
    last = real & ((following != column) | (lane == CELLS - 1))
    if bounds is not None:
        from_key = tl.max(tl.where(there, lo, 0), axis=0)
        to_key = tl.min(tl.where(there, hi, _NONE), axis=0)
    else:
        from_key, to_key = _interval(None, tile * TOKENS, True, q_len, kv_len, q_offset, CAUSAL)
    whole = last & (column * BK >= from_key) & ((column + 1) * BK <= to_key)
    here = tl.minimum(q_len - tile * TOKENS, TOKENS)
    for part in tl.static_range(WORDS):
        word = tl.where(real & bit & (at // 32 == part), 1 << (at % 32), 0)
        _, word = tl.associative_scan((column, word), 0, _joined)
        some = tl.minimum(tl.maximum(here - part * 32, 0), 32)
        wanted = ((tl.full([], 1, tl.int64) << some.to(tl.int64)) - 1).to(tl.int32)
        whole = whole & (word == wanted)
        if part == 0:
            first = word
        elif part == 1:
            second = word
        elif part == 2:
            third = word
        else:
            fourth = word

    # The lists: partial blocks, then full ones, then zeros.
    cut = last & ~whole
    ranks = tl.cumsum(cut.to(tl.int32) | (whole.to(tl.int32) << 16), 0)
    n_cut, n_full = tl.sum(cut.to(tl.int32), axis=0), tl.sum(whole.to(tl.int32), axis=0)
    entry = tl.where(cut, ranks & 0xFFFF, n_cut + (ranks >> 16)) - 1
    start = row.to(tl.int64) * capacity
    spare = (lane >= n_cut + n_full) & (lane < capacity)
    tl.store(entries + start + entry, column, mask=last & (entry < capacity))
    tl.store(entries + start + lane, 0, mask=spare)
    for part in tl.static_range(WORDS):
        word = first
        if part == 1:
            word = second
        if part == 2:
            word = third
        if part == 3:
            word = fourth
        tl.store(rules + (start + entry) * WORDS + part, word, mask=last & (entry < capacity))
        tl.store(rules + (start + lane) * WORDS + part, 0, mask=spare)
    tl.store(cut_starts + row, start.to(tl.int32))
    tl.store(cut_counts + row, n_cut)
    tl.store(starts + row, (start + n_cut).to(tl.int32))
    tl.store(full_counts + row, n_full)
    if group == 0:
        query = tile * TOKENS + tl.arange(0, TOKENS)
        exists = query < q_len
        lo_q, hi_q = _interval(bounds, query, exists, q_len, kv_len, q_offset, CAUSAL)
        tl.store(lo_of + query, lo_q, mask=exists)
        tl.store(hi_of + query, hi_q, mask=exists)


def token_unions(made: Sequence[Any], c: Listed) -> bool:
    """Writes the tensors of the mask, those of its layout, in one launch, without a sync. False, and nothing, for rows
    with too many candidates.
    """
    (tokens, bk), (tiles, columns), (batch, heads, _, n) = c.place.block, c.place.grid, c.indices.shape
    each = triton.next_power_of_2(max(n + sum(c.near), 1))
    if tokens * each > MOST or columns * 2 * tokens >= 2**31:
        return False
    starts, full, _, cut_starts, cut, entries, lo, hi, rules, _ = made
    place = c.place
    warps = min(max(tokens * each // 128, 1), 16)
    with torch.cuda.device_of(starts):
        launch(
            _unions, (c.rows,), c.indices, c.counts, c.bounds, cut_starts, cut, starts, full, entries, lo, hi, rules,
            *_steps(c.indices, 4), *_steps(c.counts, 3), n, *c.near, min(c.sinks, place.kv_len),
            min(c.window, place.kv_len), heads, tiles, columns, c.capacity, place.q_len, place.kv_len, place.q_offset,
            CAUSAL=c.causal, TOKENS=tokens, BK=bk, EACH=each, num_warps=warps,
        )  # fmt: skip
    return True


def _steps(x: Tensor | None, dims: int) -> Sequence[int]:
    """Strides; 0 for no tensor."""
    return [0] * dims if x is None else x.stride()
