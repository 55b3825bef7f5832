"""The mask of per-token lists in one launch, in plain Triton: bit for bit the lists of mask/build/unions.py. Any CUDA
GPU, and Triton's interpreter.

    few candidates     a candidate is a key block of one token: listed, or reached by its window or its sinks. They are
                       sorted by block, then token, and a scan joins the bits of equal blocks
    many, of columns   a histogram of each token's entries over all key blocks gives its bit of each

A program makes one row. One prefix sum gives every block its place among the partial or the full ones. 8 tokens of 16
blocks are 128 candidates of one warp: 28 steps of a bitonic network, 1500 instructions in all.

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

from sparsek.attn.mask.build.unions import UnionInputs
from sparsek.engine.launch.launch import launch

MOST = 8192  # candidates of a row that are sorted; code for so many takes 17 s to compile
MOST_COLUMNS = 2048  # that are counted: a thread has registers for 16 of them
_NONE = tl.constexpr(2**31 - 1)
# Triton does not specialize for these: sizes and strides that vary from call to call.
_VARY = (
    "si_b", "si_h", "si_m", "si_n", "sc_b", "sc_h", "sc_m", "listed", "of_sinks", "of_window", "sinks", "window",
    "heads", "tiles", "columns", "capacity", "q_len", "kv_len", "q_offset",
)  # fmt: skip


@triton.jit
def join_bits(column, word, next_column, next_word):
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


@triton.jit
def every_bit(here, part: tl.constexpr):
    """A word of bits of the `here` tokens that exist."""
    some = tl.minimum(tl.maximum(here - part * 32, 0), 32)
    return ((tl.full([], 1, tl.int64) << some.to(tl.int64)) - 1).to(tl.int32)


@triton.jit
def _write(
    cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules, bounds, row, tile, group, capacity,
    q_len, kv_len, q_offset, here, column, stored, whole, first, second, third, fourth,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The lists of a row: partial blocks, then full ones, then zeros. `column`, in ascending order where it is
    `stored`, has the bits `first` to `fourth`, and may be full if it is `whole`.
    """
    WORDS: tl.constexpr = (TOKENS + 31) // 32
    lane = tl.arange(0, LANES)
    whole = stored & whole & (first == every_bit(here, 0))
    if WORDS > 1:
        whole = whole & (second == every_bit(here, 1))
    if WORDS > 2:
        whole = whole & (third == every_bit(here, 2)) & (fourth == every_bit(here, 3))
    cut = stored & ~whole
    ranks = tl.cumsum(cut.to(tl.int32) | (whole.to(tl.int32) << 16), 0)
    n_cut, n_full = tl.sum(cut.to(tl.int32), axis=0), tl.sum(whole.to(tl.int32), axis=0)
    entry = tl.where(cut, ranks & 0xFFFF, n_cut + (ranks >> 16)) - 1
    start = row.to(tl.int64) * capacity
    stored = stored & (entry < capacity)
    spare = (lane >= n_cut + n_full) & (lane < capacity)
    tl.store(entries + start + entry, column, mask=stored)
    tl.store(entries + start + lane, 0, mask=spare)
    to, beyond = rules + (start + entry) * WORDS, rules + (start + lane) * WORDS
    tl.store(to, first, mask=stored)
    if WORDS > 1:
        tl.store(to + 1, second, mask=stored)
    if WORDS > 2:
        tl.store(to + 2, third, mask=stored)
        tl.store(to + 3, fourth, mask=stored)
    for part in tl.static_range(WORDS):
        tl.store(beyond + part, 0, mask=spare)
    tl.store(cut_starts + row, start.to(tl.int32))
    tl.store(cut_counts + row, n_cut)
    tl.store(starts + row, (start + n_cut).to(tl.int32))
    tl.store(full_counts + row, n_full)
    if group == 0:
        query = tile * TOKENS + tl.arange(0, TOKENS)
        exists = query < q_len
        lo, hi = _interval(bounds, query, exists, q_len, kv_len, q_offset, CAUSAL)
        tl.store(lo_of + query, lo, mask=exists)
        tl.store(hi_of + query, hi, mask=exists)


@triton.jit
def _common(bounds, tile, q_len, kv_len, q_offset, CAUSAL: tl.constexpr, TOKENS: tl.constexpr):
    """How many tokens of a tile exist, and the keys that all of them may see."""
    if bounds is not None:
        token = tile * TOKENS + tl.arange(0, TOKENS)
        there = token < q_len
        lo, hi = _interval(bounds, token, there, q_len, kv_len, q_offset, CAUSAL)
        lo = tl.max(tl.where(there, lo, 0), axis=0)
        hi = tl.min(tl.where(there, hi, _NONE), axis=0)
    else:
        lo, hi = _interval(None, tile * TOKENS, True, q_len, kv_len, q_offset, CAUSAL)
    return tl.minimum(q_len - tile * TOKENS, TOKENS), lo, hi


@triton.jit(do_not_specialize=_VARY)
def _sorted(
    indices, counts, bounds, cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules,
    si_b, si_h, si_m, si_n, sc_b, sc_h, sc_m, listed, of_sinks, of_window, sinks, window,
    heads, tiles, columns, capacity, q_len, kv_len, q_offset,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """One row of lists, from TOKENS times EACH candidates."""
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
    stored = real & ((following != column) | (lane == CELLS - 1))
    here, from_key, to_key = _common(bounds, tile, q_len, kv_len, q_offset, CAUSAL, TOKENS)
    whole = stored & (column * BK >= from_key) & ((column + 1) * BK <= to_key)
    one = tl.where(real & bit, 1 << (at % 32), 0)
    _, first = tl.associative_scan((column, tl.where(at // 32 == 0, one, 0)), 0, join_bits)
    second, third, fourth = first, first, first
    if WORDS > 1:
        _, second = tl.associative_scan((column, tl.where(at // 32 == 1, one, 0)), 0, join_bits)
    if WORDS > 2:
        _, third = tl.associative_scan((column, tl.where(at // 32 == 2, one, 0)), 0, join_bits)
        _, fourth = tl.associative_scan((column, tl.where(at // 32 == 3, one, 0)), 0, join_bits)
    _write(
        cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules, bounds, row, tile, group, capacity,
        q_len, kv_len, q_offset, here, column, stored, whole, first, second, third, fourth, CAUSAL, TOKENS, BK, CELLS,
    )  # fmt: skip


@triton.jit
def _word(
    indices, counts, bounds, stored, tile, part, si_m, si_n, sc_m, listed, of_sinks, of_window, sinks, window, columns,
    q_len, kv_len, q_offset,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The bits of 32 tokens for all columns, and which columns these or earlier ones reach."""
    each, column = tl.arange(0, EACH), tl.arange(0, COLS)
    word = tl.zeros([COLS], tl.int32)
    for at in range(min(TOKENS, 32)):
        token = tile * TOKENS + part * 32 + at
        there = token < q_len
        lo, hi = _interval(bounds, token, there, q_len, kv_len, q_offset, CAUSAL)
        used = there & (each < listed)
        if counts is not None:
            used = used & (each < tl.load(counts + token.to(tl.int64) * sc_m, mask=there, other=0))
        of = indices + token.to(tl.int64) * si_m
        block = tl.load(of + each.to(tl.int64) * si_n, mask=used, other=-1)
        used = used & (block >= 0) & (block < columns)
        block = tl.where(used, block, 0).to(tl.int32)
        used = used & (block * BK < hi - lo)
        bit = tl.histogram(tl.where(used, lo // BK + block, 0), COLS, mask=used) > 0
        if of_sinks > 0:
            near = there & (column >= lo // BK) & (column * BK - lo < tl.minimum(sinks, hi - lo))
            stored = stored | near
            bit = bit | (near & ((column + 1) * BK <= tl.minimum(lo + sinks, hi)))
        if of_window > 0:
            near = there & (column >= tl.maximum(hi - window, lo) // BK) & (column * BK < hi)
            stored = stored | near
            bit = bit | (near & (column * BK >= hi - window) & ((column + 1) * BK <= hi))
        stored = stored | bit
        word |= tl.where(bit, 1 << at, 0)
    return word, stored


@triton.jit(do_not_specialize=_VARY)
def _counted(
    indices, counts, bounds, cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules,
    si_b, si_h, si_m, si_n, sc_b, sc_h, sc_m, listed, of_sinks, of_window, sinks, window,
    heads, tiles, columns, capacity, q_len, kv_len, q_offset,
    CAUSAL: tl.constexpr, TOKENS: tl.constexpr, BK: tl.constexpr, EACH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """One row of lists, from COLS columns, and a histogram of the EACH entries of each token."""
    WORDS: tl.constexpr = (TOKENS + 31) // 32
    row = tl.program_id(0)
    tile, group = row % tiles, row // tiles
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    indices += b * si_b + h * si_h
    if counts is not None:
        counts += b * sc_b + h * sc_h
    column = tl.arange(0, COLS)
    stored = column < 0
    first, stored = _word(
        indices, counts, bounds, stored, tile, 0, si_m, si_n, sc_m, listed, of_sinks, of_window, sinks, window, columns,
        q_len, kv_len, q_offset, CAUSAL, TOKENS, BK, EACH, COLS,
    )  # fmt: skip
    second, third, fourth = first, first, first
    if WORDS > 1:
        second, stored = _word(
            indices, counts, bounds, stored, tile, 1, si_m, si_n, sc_m, listed, of_sinks, of_window, sinks, window,
            columns, q_len, kv_len, q_offset, CAUSAL, TOKENS, BK, EACH, COLS,
        )  # fmt: skip
    if WORDS > 2:
        third, stored = _word(
            indices, counts, bounds, stored, tile, 2, si_m, si_n, sc_m, listed, of_sinks, of_window, sinks, window,
            columns, q_len, kv_len, q_offset, CAUSAL, TOKENS, BK, EACH, COLS,
        )  # fmt: skip
        fourth, stored = _word(
            indices, counts, bounds, stored, tile, 3, si_m, si_n, sc_m, listed, of_sinks, of_window, sinks, window,
            columns, q_len, kv_len, q_offset, CAUSAL, TOKENS, BK, EACH, COLS,
        )  # fmt: skip
    here, from_key, to_key = _common(bounds, tile, q_len, kv_len, q_offset, CAUSAL, TOKENS)
    whole = (column * BK >= from_key) & ((column + 1) * BK <= to_key)
    _write(
        cut_starts, cut_counts, starts, full_counts, entries, lo_of, hi_of, rules, bounds, row, tile, group, capacity,
        q_len, kv_len, q_offset, here, column, stored, whole, first, second, third, fourth, CAUSAL, TOKENS, BK, COLS,
    )  # fmt: skip


def token_unions(made: Sequence[Any], c: UnionInputs) -> bool:
    """Writes the tensors of the mask, those of its layout, in one launch, without a sync. False, and nothing, for rows
    with too many candidates.
    """
    (tokens, bk), (tiles, columns), (_, heads, _, n) = c.place.block, c.place.grid, c.indices.shape
    starts, full, _, cut_starts, cut, entries, lo, hi, rules, _ = made
    place = c.place
    each = triton.next_power_of_2(max(n + sum(c.near), 1))
    cols, listed = (max(triton.next_power_of_2(many), 32) for many in (columns, n))
    count = counts_columns(tokens, each, listed, cols)
    if not count and (tokens * each > MOST or columns * 2 * tokens >= 2**31):
        return False
    args = (
        c.indices, c.counts, c.bounds, cut_starts, cut, starts, full, entries, lo, hi, rules, *_steps(c.indices, 4),
        *_steps(c.counts, 3), n, *c.near, c.sinks, c.window, heads, tiles,
        columns, c.capacity, place.q_len, place.kv_len, place.q_offset,
    )  # fmt: skip
    constants = {"CAUSAL": c.causal, "TOKENS": tokens, "BK": bk}
    with torch.cuda.device_of(starts):
        if count:
            warps = min(max(cols // 512, listed // 256, 1), 16)
            # A histogram counts an entry once for each thread that has it.
            listed = max(listed, 32 * warps)
            launch(_counted, (c.rows,), *args, **constants, EACH=listed, COLS=cols, num_warps=warps)
        else:
            warps = min(max(tokens * each // 128, 1), 16)
            launch(_sorted, (c.rows,), *args, **constants, EACH=each, num_warps=warps)
    return True


def counts_columns(tokens: int, each: int, listed: int, columns: int) -> bool:
    """Whether histograms of lists of `listed` entries take less than half the instructions of a sort of `each`
    candidates of every token, whose latency is lower. Fitted to compiled code: a sort takes 16 for each of its steps
    and 32 candidates.
    """
    cells = tokens * each
    steps = cells.bit_length() * (cells.bit_length() - 1)
    counted = tokens * (64 + columns * (2 + listed // 32) // 3)
    return columns <= MOST_COLUMNS and (cells > MOST or 2 * counted < cells * steps // 4)


def _steps(x: Tensor | None, dims: int) -> Sequence[int]:
    """Strides; 0 for no tensor."""
    return [0] * dims if x is None else x.stride()
