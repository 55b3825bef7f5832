"""Masks of closed form in one launch: causal, full, strided, dilated, and a window with sinks.

    program     writes
    rows        starts and counts of ROWS rows, and the entries of their runs
    columns     the list of all key blocks, which rows of one run share
    queries     lo and hi of LANES queries
    bits        one entry of bits: the sinks in a partial block

Each program computes the runs of its rows from the lengths alone, and every row has a fixed room for its entries, so
no program waits for another. Everything is in one allocation. structured.py and documents.py of mask/build are the
specification, on the CPU.

Bottleneck: the host, with one launch, one allocation and the sizes. The device writes 8 bytes for each query.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.mask.runs import (
    bounds,
    cut_off,
    steps_before,
    within,
    write_all_columns,
    write_bounds,
    write_runs,
)
from sparsek.attn.mask.build.banded import Band, Steps
from sparsek.attn.mask.lists import Place
from sparsek.engine.launch.launch import launch_unspecialized

ROWS, ENTRIES, LANES, WARPS = 32, 16, 1024, 4
WORD = tl.constexpr(32)
_LISTS = ("full_starts", "full_counts", "starts", "counts", "indices", "lo", "hi")
_SIZES = ("rows", "columns", "q_len", "kv_len", "low", "high")
_STEPS = ("offset", "near", "step", "gap", "more", "capacity")
_SINKS = ("sink_end", "full_capacity", "capacity", "split_row", "split_rows")


@triton.jit(do_not_specialize=_SIZES + _STEPS, do_not_specialize_on_alignment=_LISTS)
def _steps(
    full_starts, full_counts, starts, counts, indices, lo, hi,
    rows, columns, q_len, kv_len, low, high, offset, near, step, gap, more, capacity,
    STEPS: tl.constexpr, BOTH_WAYS: tl.constexpr, BOUNDED: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """STEPS: 0 for every block, 1 strided, 2 dilated. Both lists share entries: a row's full blocks are first."""
    pid, row_programs = tl.program_id(0), tl.cdiv(rows, ROWS)
    column_programs = 0
    if STEPS == 0:
        column_programs = tl.cdiv(columns, LANES)
    if pid < row_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        live, first = row < rows, row.to(tl.int64) * BQ
        last = tl.minimum(first + BQ, q_len) - 1
        _, first_hi = bounds(first, low, high, 0, kv_len, 0)
        _, last_hi = bounds(last, low, high, 0, kv_len, 0)
        edge, end = first_hi // BK, (last_hi + BK - 1) // BK
        if STEPS == 0:
            begin, whole, stored = tl.zeros_like(row), edge, end
        else:
            top, bottom = (first + offset) >> SHIFT, (last + offset) >> SHIFT
            if STEPS == 1:
                first_a = tl.maximum(top, 0) % step
                count_a = tl.where(top < gap, 0, (top - gap - first_a) // step + 1)
                first_b, count_b = top - near + 1, bottom - top + 2 * near - 1
                first_c, count_c = bottom + gap, columns + tl.maximum(-bottom, 0)
            else:
                count_a = tl.minimum(tl.maximum(top, 0) // step, more)
                first_a = top - count_a * step
                first_b, count_b = top, bottom - top + 1
                first_c, count_c = bottom + step, tl.zeros_like(top) + more
            first_a, count_a = cut_off(first_a, count_a, step, end)
            first_b, count_b = cut_off(first_b, count_b, 1, end)
            whole = tl.minimum(count_a, steps_before(first_a, step, edge))
            whole += tl.minimum(count_b, steps_before(first_b, 1, edge))
            stored = count_a + count_b
            if BOTH_WAYS:
                first_c, count_c = cut_off(first_c, count_c, step, end)
                whole += tl.minimum(count_c, steps_before(first_c, step, edge))
                stored += count_c
            else:
                count_c = tl.zeros_like(count_c)
            begin = row * capacity
            write_runs(
                indices, row, live, capacity, first_a.to(tl.int32), count_a.to(tl.int32), step,
                first_b.to(tl.int32), count_b.to(tl.int32), first_c.to(tl.int32), count_c.to(tl.int32), step,
                ENTRIES,
            )  # fmt: skip
        tl.store(full_starts + row, begin, mask=live)
        tl.store(full_counts + row, whole.to(tl.int32), mask=live)
        tl.store(starts + row, (begin + whole).to(tl.int32), mask=live)
        tl.store(counts + row, (stored - whole).to(tl.int32), mask=live)
    elif pid < row_programs + column_programs:
        write_all_columns(indices, columns, pid - row_programs, LANES)
    elif BOUNDED:
        chunk = pid - row_programs - column_programs
        write_bounds(lo, hi, chunk, q_len, low, high, 0, kv_len, 0, LANES)


@triton.jit(
    do_not_specialize=_SIZES + _SINKS,
    do_not_specialize_on_alignment=(*_LISTS, "full_indices", "rules", "bits"),
)
def _band(
    full_starts, full_counts, starts, counts, full_indices, indices, lo, hi, rules, bits,
    rows, columns, q_len, kv_len, low, high, sink_end, full_capacity, capacity, split_row, split_rows,
    SINKS: tl.constexpr, SLOTS: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    ROWS: tl.constexpr, ENTRIES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A window; SINKS as in `bounds`. SLOTS: entries of bits for each of the rows from `split_row` on; 0 without bits.

    The partial blocks of a row are up to three runs: of the sinks, of the left and of the right edge of the window. Its
    full blocks are those of the sinks and of the window: a run of the list of all columns if they are one run.
    """
    pid, row_programs = tl.program_id(0), tl.cdiv(rows, ROWS)
    column_programs, query_programs = tl.cdiv(columns, LANES), tl.cdiv(q_len, LANES)
    sink_columns = (sink_end + BK - 1) // BK
    if pid < row_programs:
        row = pid * ROWS + tl.arange(0, ROWS)
        live, first = row < rows, row.to(tl.int64) * BQ
        last = tl.minimum(first + BQ, q_len) - 1
        first_lo, first_hi = bounds(first, low, high, sink_end, kv_len, SINKS)
        last_lo, last_hi = bounds(last, low, high, sink_end, kv_len, SINKS)
        start = first_lo // BK
        end = tl.where(first_lo < last_hi, (last_hi + BK - 1) // BK, start)
        whole = within((last_lo + BK - 1) // BK, start, end)
        cut = within(first_hi // BK, whole, end)
        right = tl.zeros_like(start)  # the end of the full blocks of sinks
        sinks = right  # the end of their partial ones
        split = last_lo < 0
        if SINKS > 0:
            split = last_lo > sink_end
            apart = split & (first_lo > sink_end)
            right = tl.where(split, tl.minimum(sink_end, first_hi) // BK, 0)
            sinks = tl.maximum(right, tl.where(apart, sink_columns, 0))
        begin_left = tl.maximum(start, sinks)
        end_left = tl.maximum(whole, begin_left)
        begin_right = tl.maximum(cut, end_left)
        end_right = tl.maximum(end, begin_right)
        # Full blocks.
        inside = cut - whole
        full_begin = tl.where(right > 0, 0, whole)
        if SINKS > 0:
            both = (right > 0) & (inside > 0) & (right < whole)
            full_begin = tl.where(both, columns + row.to(tl.int64) * full_capacity, full_begin)
            none, right32 = tl.zeros_like(row), right.to(tl.int32)
            write_runs(
                full_indices + columns, row, live & both, full_capacity, none, right32, 1,
                whole.to(tl.int32), inside.to(tl.int32), none, none, 1, ENTRIES,
            )  # fmt: skip
        tl.store(full_starts + row, full_begin.to(tl.int32), mask=live)
        tl.store(full_counts + row, (right + inside).to(tl.int32), mask=live)
        # Partial blocks.
        of_sinks, of_left, of_right = sinks - right, end_left - begin_left, end_right - begin_right
        tl.store(starts + row, row * capacity, mask=live)
        tl.store(counts + row, (of_sinks + of_left + of_right).to(tl.int32), mask=live)
        for done in range(0, capacity, ENTRIES):
            entry = done + tl.arange(0, ENTRIES)[None, :]
            near = entry - of_sinks[:, None]
            far = near - of_left[:, None]
            column = tl.where(
                near < 0, right[:, None] + entry,
                tl.where(far < 0, begin_left[:, None] + near, begin_right[:, None] + far),
            )  # fmt: skip
            stored = far < of_right[:, None]
            at, written = row[:, None] * capacity + entry, live[:, None] & (entry < capacity)
            tl.store(indices + at, tl.where(stored, column, 0).to(tl.int32), mask=written)
            if SLOTS > 0:
                # Where no window reaches, the sinks have the same bits in all rows: entry 0.
                same = apart[:, None] & ((column + 1) * BK <= first_lo[:, None])
                own = 1 + (row - split_row)[:, None] * SLOTS + sink_columns - 1 - column
                by_bits = stored & split[:, None] & (column * BK < sink_end)
                rule = tl.where(by_bits, tl.where(same, 0, own), -1)
                tl.store(rules + at, rule.to(tl.int32), mask=written)
    elif pid < row_programs + column_programs:
        write_all_columns(full_indices, columns, pid - row_programs, LANES)
    elif pid < row_programs + column_programs + query_programs:
        chunk = pid - row_programs - column_programs
        write_bounds(lo, hi, chunk, q_len, low, high, sink_end, kv_len, SINKS, LANES)
    elif SLOTS > 0:
        slot = pid - row_programs - column_programs - query_programs
        column = sink_columns - 1 - tl.where(slot == 0, 0, (slot - 1) % SLOTS)
        WORDS: tl.constexpr = BK // WORD
        cell = tl.arange(0, BQ * WORDS)
        query = tl.where(slot == 0, 0, split_row + (slot - 1) // SLOTS).to(tl.int64) * BQ + cell // WORDS
        lo_q, hi_q = bounds(tl.minimum(query, q_len - 1), low, high, sink_end, kv_len, SINKS)
        lo_q, hi_q = tl.where(slot == 0, kv_len, lo_q), tl.where(slot == 0, kv_len, hi_q)
        word = tl.zeros((BQ * WORDS,), tl.int32)
        for bit in range(32):
            key = column * BK + cell % WORDS * WORD + bit
            seen = (key < hi_q) & ((key < sink_end) | (lo_q <= key))
            word |= seen.to(tl.int32) << bit
        tl.store(bits + slot * BQ * WORDS + cell, word)


def blocks(
    tensors: Sequence[Any], place: Place, band: Band, steps: Steps | None, causal: bool
) -> tuple[Tensor, ...]:
    """Writes a mask of every block, or of blocks with a step, as far as queries see keys before `band.high`.

    `tensors`: those of its layout. No sync; it may be captured.
    """
    (rows, columns), (bq, bk), capacity = place.grid, place.block, steps.capacity(place) if steps else 0
    full_starts, full_counts, _, starts, counts, indices, lo, hi = tensors[:8]
    bounded = lo is not None
    queries = place.q_len if bounded else 0
    lo, hi = (lo, hi) if bounded else (indices, indices)
    near, step, gap, more, kind, both_ways = steps or (0, 1, 0, 0, 0, False)
    sizes = rows, columns, place.q_len, place.kv_len, band.low, band.high, place.q_offset
    programs = -(-rows // ROWS) + -(-queries // LANES) + (0 if steps else -(-columns // LANES))
    constants = kind, both_ways, bounded, bq, bk, bk.bit_length() - 1, ROWS, ENTRIES, LANES
    if programs:
        made = full_starts, full_counts, starts, counts, indices, lo, hi
        args = (*made, *sizes, near, step, gap, more, capacity)
        launch_unspecialized(_steps, starts.device, programs, args, constants, WARPS)
    return ()


def band(tensors: Sequence[Any], place: Place, band: Band) -> tuple[Tensor, ...]:
    """Writes a mask of a window, maybe with sinks. `tensors`: those of its layout. No sync; it may be captured."""
    (rows, columns), (bq, bk) = place.grid, place.block
    full_capacity, capacity = band.capacities(place)
    split_row, split_rows, slots = band.split(place)
    full_starts, full_counts, full_indices, starts, counts, indices, lo, hi, rules, bits = tensors
    rules, bits = (rules, bits) if slots else (indices, indices)
    made = full_starts, full_counts, starts, counts, full_indices, indices, lo, hi, rules, bits
    programs = sum(-(-size // each) for size, each in ((rows, ROWS), (columns, LANES), (place.q_len, LANES)))
    programs += 1 + split_rows * slots if slots else 0
    sizes: tuple[Any, ...] = rows, columns, place.q_len, place.kv_len, band.low, band.high, band.sink_end
    sizes += full_capacity, capacity, split_row, split_rows
    constants = band.sinks, slots, bq, bk, ROWS, ENTRIES, LANES
    if programs:
        launch_unspecialized(_band, starts.device, programs, (*made, *sizes), constants, WARPS)
    return ()
