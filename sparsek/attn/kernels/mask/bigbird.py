"""Masks of BigBird in one launch: global blocks, a window, and blocks drawn at random.

    row    0 .. first | drawn before the window | left .. right | drawn after it

A program draws the blocks of its rows by Philox from the seed, the row and the number of the draw, as the builder
does, sorts them, and writes the row. Tiles that see every block share the list of all columns. Other rows have a fixed
room for their entries.

Bottleneck: the host, with one launch, one allocation and the sizes.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.mask.runs import bounds, within, write_all_columns, write_bounds
from sparsek.attn.mask.build import bigbird as drawn
from sparsek.attn.mask.build.banded import Band
from sparsek.attn.mask.build.bigbird import BigBird
from sparsek.attn.mask.lists import Place
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.products.formats.pattern import INT32_MAX

ROWS, ENTRIES, LANES, WARPS = 16, 16, 1024, 4
MOST_DRAWN = 128  # by one row; numpy draws more
ROUNDS = tl.constexpr(drawn.ROUNDS)
MULTIPLY_A, MULTIPLY_C = (tl.constexpr(each) for each in drawn.MULTIPLIERS)
WEYL_A, WEYL_B = (tl.constexpr(each) for each in drawn.WEYL)
LARGE = tl.constexpr(INT32_MAX)
_LISTS = ("full_starts", "full_counts", "starts", "counts", "indices", "lo", "hi")
_SIZES = ("rows", "tiles", "columns", "q_len", "kv_len", "low", "high", "offset")
_NUMBERS = ("near", "after", "wide", "globals", "random", "seed_low", "seed_high", "capacity")


@triton.jit
def _philox(seed_low, seed_high, one, two):
    """As `philox` of attn/mask/build/bigbird.py: uint64 in [0, 2^32). The counters are broadcast to one shape."""
    a, b = one.to(tl.uint32), two.to(tl.uint32)
    c, d = tl.zeros_like(a), tl.zeros_like(a)
    key_a, key_b = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    for _ in tl.static_range(ROUNDS):
        left, right = a.to(tl.uint64) * MULTIPLY_A, c.to(tl.uint64) * MULTIPLY_C
        a = (right >> 32).to(tl.uint32) ^ b ^ key_a
        c = (left >> 32).to(tl.uint32) ^ d ^ key_b
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        key_a += WEYL_A
        key_b += WEYL_B
    return a.to(tl.uint64)


@triton.jit(do_not_specialize=_SIZES + _NUMBERS, do_not_specialize_on_alignment=_LISTS)
def _bigbird(
    full_starts, full_counts, starts, counts, indices, lo, hi,
    rows, tiles, columns, q_len, kv_len, low, high, offset,
    near, after, wide, globals, random, seed_low, seed_high, capacity,
    DRAWS: tl.constexpr, BOUNDED: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """DRAWS: a power of two, at least `random`. `after`: blocks of the window from the tile's last one on."""
    pid, row_programs, column_programs = tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, LANES)
    if pid < row_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        live, query = row < rows, (row % tiles).to(tl.int64) * BQ
        last_query = tl.minimum(query + BQ, q_len) - 1
        _, first_hi = bounds(query, low, high, 0, kv_len, 0)
        _, last_hi = bounds(last_query, low, high, 0, kv_len, 0)
        edge, end = (first_hi // BK).to(tl.int32), ((last_hi + BK - 1) // BK).to(tl.int32)
        top, bottom = ((query + offset) >> SHIFT).to(tl.int32), ((last_query + offset) >> SHIFT).to(tl.int32)
        first = tl.where(query + offset < globals, end, tl.minimum(wide, end))
        left = within(top - near + 1, first, end)
        right = within(bottom + after, left, end)
        window, others = right - left, left - first + end - right
        # Draws.
        at = tl.arange(0, DRAWS)[None, :]
        number = tl.minimum(others, random)[:, None]
        there, zero = at < number, tl.zeros((ROWS, DRAWS), tl.int32)
        drawn = _philox(seed_low, seed_high, row[:, None] + zero, at + zero)
        rank = (drawn * (others[:, None] - number + 1).to(tl.uint64) >> 32).to(tl.int32)
        rank = tl.where(there, rank, LARGE)
        if DRAWS > 1:
            rank = tl.sort(rank, 1)
        column = first[:, None] + tl.where(there, rank, 0) + at
        before = there & (column < left[:, None])
        column = tl.where(before, column, column + window[:, None])
        in_front = tl.sum(before.to(tl.int32), 1)
        whole = tl.minimum(first, edge) + tl.maximum(tl.minimum(right, edge) - left, 0)
        whole += tl.sum((there & (column < edge[:, None])).to(tl.int32), 1)
        drawn_there = tl.minimum(others, random)
        stored = first + window + drawn_there
        every = first == end
        room = columns + row.to(tl.int64) * capacity
        begin = tl.where(every, 0, room)
        tl.store(full_starts + row, begin.to(tl.int32), mask=live)
        tl.store(full_counts + row, whole, mask=live)
        tl.store(starts + row, (begin + whole).to(tl.int32), mask=live)
        tl.store(counts + row, stored - whole, mask=live)
        # Entries: those of draws, and all others.
        own = live & (every == 0)
        place = first[:, None] + at + tl.where(before, 0, window[:, None])
        inside = own[:, None] & there & (place < capacity)
        tl.store(indices + room[:, None] + place, column, mask=inside)
        begin_window = first + in_front
        for done in range(0, capacity, ENTRIES):
            entry = done + tl.arange(0, ENTRIES)[None, :]
            in_window = entry - begin_window[:, None]
            of_window = (in_window >= 0) & (in_window < window[:, None])
            kept = (entry < first[:, None]) | of_window | (entry >= stored[:, None])
            value = tl.where(of_window, left[:, None] + in_window, tl.where(entry < first[:, None], entry, 0))
            tl.store(indices + room[:, None] + entry, value, mask=own[:, None] & kept & (entry < capacity))
    elif pid < row_programs + column_programs:
        write_all_columns(indices, columns, pid - row_programs, LANES)
    elif BOUNDED:
        chunk = pid - row_programs - column_programs
        write_bounds(lo, hi, chunk, q_len, low, high, 0, kv_len, 0, LANES)


def bigbird(
    tensors: Sequence[Any], place: Place, band: Band, bird: BigBird, heads: int
) -> tuple[Tensor, ...] | None:
    """Writes a mask of BigBird with a draw for each of `heads`, as far as queries see keys before `band.high`.

    `tensors`: those of its layout. None if too many blocks are drawn. No sync; it may be captured.
    """
    if bird.random > MOST_DRAWN:
        return None
    (tiles, columns), (bq, bk), capacity = place.grid, place.block, bird.capacity(place)
    full_starts, full_counts, _, starts, counts, indices, lo, hi = tensors[:8]
    rows, bounded = tiles * heads, lo is not None
    queries = place.q_len if bounded else 0
    made = full_starts, full_counts, starts, counts, indices, *((lo, hi) if bounded else (indices, indices))
    sizes = rows, tiles, columns, place.q_len, place.kv_len, band.low, band.high, place.q_offset
    seed = ((half ^ 1 << 31) - (1 << 31) for half in (bird.seed & drawn.LOW, bird.seed >> 32))  # as int32
    after, most = 1 if bird.causal else bird.near, INT32_MAX
    numbers = bird.near, after, min(bird.wide, columns), min(bird.globals, most), bird.random, *seed, capacity
    draws = triton.next_power_of_2(max(bird.random, 1))
    constants = draws, bounded, bq, bk, bk.bit_length() - 1, ROWS, ENTRIES, LANES
    programs = sum(-(-size // each) for size, each in ((rows, ROWS), (columns, LANES), (queries, LANES)))
    if programs:
        args = (*made, *sizes, *numbers)
        launch_unspecialized(_bigbird, starts.device, programs, args, constants, WARPS)
    return ()
