"""A mask of chosen blocks in one launch, in plain Triton: bit for bit the lists of `selection_reference.py`. Any CUDA
GPU, and Triton's interpreter.

    topk, mass   a score becomes an integer of the same order; the lowest one that is kept is found by bisection
    map          bool
    indices      a histogram of a row's entries, so any order is right, and a repeated entry counts 2

A program makes one row and has all its columns in registers. Bisection ends as soon as a bound has the right count over
it: about 12 steps of some 15 instructions for 256 random scores, 32 at most. Blocks of the score at the bound are kept
by column, lower ones first. One prefix sum gives every kept block its entry. The same launch writes the intervals,
rules and bits of the mask, and the first fault of a row to a word of the host; of several rows with a
fault the word has any.

Nothing is read or written out of bounds, whatever the values: columns are positions, and those of `indices` are
checked before they are used.

`products/ops/packing.py` registers it with `attn/mask/build/selection.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.mask.build import selection
from sparsek.attn.mask.build.selection import LocalBlocks, Selection
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.ranks import count_over, highest, order
from sparsek.engine.launch.recorder import fault_word
from sparsek.engine.launch.tensors import times

MOST_COLUMNS = 16384  # a prefix sum over more takes more shared memory than an SM has
_MASS_BITS, _SHIFT = tl.constexpr(selection.MASS_BITS), tl.constexpr(selection.POSITION_BITS)
_LENGTH, _NUMBER, _VALUE, _CROWDED = (
    tl.constexpr(each) for each in (selection.LENGTH, selection.NUMBER, selection.VALUE, selection.CROWDED)
)
_NONE = tl.constexpr(2**31 - 1)
# Triton does not specialize for these: sizes and strides that vary from call to call.
_VARY = (
    "sg_b", "sg_h", "sg_m", "sg_n", "sl_b", "sl_n", "sk_b", "sk_h", "sa_b", "sa_h", "sa_m", "sa_n", "sc_b", "sc_h",
    "sc_m", "limit", "least", "sinks", "back", "fore", "heads", "tiles", "columns", "listed", "capacity", "q_len",
    "kv_len", "q_offset", "deep", "length_items", "room",
)  # fmt: skip


@triton.jit
def _first(found, at, kind: tl.constexpr):
    """The word of a fault: the lowest position where one was found, or _NONE."""
    return tl.min(tl.where(found, (kind << _SHIFT) | at, _NONE), axis=0)


@triton.jit
def _sum(mass):
    """The exact sum of masses of 30 bits, int64: two sums of 15 bits in int32, because a warp adds these at once."""
    return (tl.sum(mass >> 15, axis=0).to(tl.int64) << 15) + tl.sum(mass & 0x7FFF, axis=0)


@triton.jit
def _masses(x, counted):
    """`chosen.masses` of one row: int32 multiples, rounded down, of a power of two that the highest mass selects."""
    x = tl.where(counted, x.to(tl.float64), 0.0)
    top = tl.max(x, axis=0)
    exponent = tl.maximum((top.to(tl.int64, bitcast=True) >> 52) - 1022, -900)
    power = ((-exponent + _MASS_BITS + 1023) << 52).to(tl.float64, bitcast=True)
    return (x * power).to(tl.int64).to(tl.int32)


@triton.jit
def _needed(key, mass, goal, nothing, ahead):
    """How many of the highest keys have a sum of masses of at least `goal`, 0 for 0; and two bounds: the last of them
    is over the first bound, and not over the second, and no other value is.
    """
    high = tl.max(key, axis=0)
    # No key is between `nothing` and the lowest, nor between the highest and those that are kept whatever their mass.
    low = tl.min(tl.where(key > nothing, key, high), axis=0)
    low = tl.where(low > nothing, low - 1, low)
    over = tl.zeros([], tl.int64)
    inside = count_over(key, low)
    above = tl.zeros([], tl.int32)
    few: tl.constexpr = key.shape[0] <= 256
    if few:  # a sum of counts fits over one of the upper 14 bits
        upper, lower = (mass >> 16) | (1 << 22), mass & 0xFFFF
    # The sum over `low` reaches the goal, that over `high` does not. `inside` keys are between, `above` over `high`.
    rest = tl.max(tl.where(key < ahead, key, nothing), axis=0)
    middle = tl.maximum(rest, low)
    while (goal > 0) & (middle != low) & (low < rest) & (inside > 1):
        most = key > middle
        if few:
            sums = tl.sum(tl.where(most, upper, 0), axis=0)
            here = ((sums & 0x3FFFFF).to(tl.int64) << 16) + tl.sum(tl.where(most, lower, 0), axis=0)
            count = sums >> 22
        else:
            here = _sum(tl.where(most, mass, 0))
            count = tl.sum(most.to(tl.int32), axis=0)
        reached = here >= goal
        low = tl.where(reached, middle, low)
        over = tl.where(reached, over, here)
        high = tl.where(reached, high, middle)
        inside = tl.where(reached, count - above, inside + above - count)
        above = tl.where(reached, above, count)
        middle = (low & high) + ((low ^ high) >> 1)
    high = tl.max(tl.where(key <= high, key, nothing), axis=0)
    each = tl.maximum(tl.max(tl.where(key == high, mass, 0), axis=0), 1).to(tl.int64)
    more = ((goal - over + each - 1) // each).to(tl.int32)
    return tl.where(goal > 0, above + more, 0), low, high


@triton.jit
def _prefix(keys, WORDS: tl.constexpr):
    """Words [n, WORDS] whose first `keys` bits are set."""
    ahead = keys[:, None] - 32 * tl.arange(0, WORDS)[None, :]
    ahead = tl.minimum(tl.maximum(ahead, 0), 32)
    return ((tl.full(ahead.shape, 1, tl.int64) << ahead.to(tl.int64)) - 1).to(tl.int32)


@triton.jit
def _length(lengths, sl_n, j, kv_len, BK: tl.constexpr, FK: tl.constexpr, there):
    """How many keys block j has, from 0 to those up to kv_len."""
    given = tl.load(lengths + (j // FK).to(tl.int64) * sl_n, mask=there, other=0).to(tl.int64)
    given = tl.minimum(tl.maximum(given - j % FK * BK, 0), BK)
    return tl.minimum(given, tl.maximum(kv_len - j.to(tl.int64) * BK, 0)).to(tl.int32)


@triton.jit
def _write_bits(
    bits, lengths, sl_n, item, i, first, edge, tiles, columns, kv_len, q_len, deep, length_items,
    BQ: tl.constexpr, BK: tl.constexpr, FK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The bits of the key blocks i, i + tiles, ...; if causal, also of those that tile i sees in part."""
    WORDS: tl.constexpr = BK // 32
    query = tl.arange(0, BQ)
    inside = query[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    for step in range((columns - i + tiles - 1) // tiles):
        j = i + step * tiles
        keys = _length(lengths, sl_n, j, kv_len, BK, FK, True)
        to = bits + (item.to(tl.int64) * columns + j) * (BQ * WORDS)
        tl.store(to + inside, _prefix(keys + query * 0, WORDS))
    if CAUSAL:
        for d in range(deep):
            j = tl.minimum(edge + d, columns - 1)
            keys = _length(lengths, sl_n, j, kv_len, BK, FK, columns > 0)
            ahead = first + query + 1 - j.to(tl.int64) * BK
            keys = tl.minimum(tl.maximum(ahead, 0), keys).to(tl.int32)
            at = length_items.to(tl.int64) * columns + (item.to(tl.int64) * tiles + i) * deep + d
            tl.store(bits + at * (BQ * WORDS) + inside, _prefix(keys, WORDS))


@triton.jit
def _ends(i, q_len, kv_len, q_offset, BQ: tl.constexpr, BK: tl.constexpr, CAUSAL: tl.constexpr):
    """Positions of the first and last query of tile i, int64; leading blocks seen whole, and seen at all, int32."""
    first = i.to(tl.int64) * BQ + q_offset
    last = tl.minimum(first + BQ, q_offset.to(tl.int64) + q_len) - 1
    if CAUSAL:
        edge = tl.minimum(tl.maximum(first + 1, 0), kv_len) // BK
        end = (tl.minimum(tl.maximum(last + 1, 0), kv_len) + BK - 1) // BK
    else:
        edge = kv_len.to(tl.int64) // BK
        end = (kv_len.to(tl.int64) + BK - 1) // BK
    return first, last, edge.to(tl.int32), end.to(tl.int32)


@triton.jit(do_not_specialize=_VARY)
def _choose(
    given, lengths, numbers, always, held, fault, full_counts, cut_counts, starts, cut_starts, indices, lo, hi, rules,
    bits, sg_b, sg_h, sg_m, sg_n, sl_b, sl_n, sk_b, sk_h, sa_b, sa_h, sa_m, sa_n, sc_b, sc_h, sc_m,
    limit, least, sinks, back, fore, heads, tiles, columns, listed, capacity, q_len, kv_len, q_offset, deep,
    length_items, room,
    KIND: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, EVERY: tl.constexpr, WIDE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, COLS: tl.constexpr, LISTED: tl.constexpr, UNIT: tl.constexpr,
    FQ: tl.constexpr, FK: tl.constexpr,
):  # fmt: skip
    """One row of lists. A block of the choice is FQ x FK blocks of the mask. EVERY: as `Selection.every`."""
    if UNIT > 1:  # rows of `given` are whole 16-byte words
        sg_n = 1
        sg_b, sg_h, sg_m, columns = (
            times(sg_b, UNIT),
            times(sg_h, UNIT),
            times(sg_m, UNIT),
            times(columns, UNIT),
        )
    row = tl.program_id(0)
    i, group = row % tiles, row // tiles
    b, h = (group // heads).to(tl.int64), (group % heads).to(tl.int64)
    tile = i // FQ  # of the choice
    column = tl.arange(0, COLS)
    inside = column < columns
    word = tl.full([], _NONE, tl.int32)
    first, last, _, end = _ends(tile, q_len, kv_len, q_offset, BQ * FQ, BK * FK, CAUSAL)
    there = inside & (column < end)
    of = tl.full([COLS], 0, tl.int64)
    if lengths is not None:
        lengths += b * sl_b
        of = tl.load(lengths + column.to(tl.int64) * sl_n, mask=inside, other=0).to(tl.int64)
        word = tl.minimum(word, _first(inside & ((of < 0) | (of > BK * FK)), column, _LENGTH))
        of = tl.minimum(tl.maximum(of, 0), BK * FK)
        there = there & (of > 0)

    # What is kept of the blocks that exist.
    given += b * sg_b + h * sg_h + tile.to(tl.int64) * sg_m
    if KIND == "map":
        chosen = tl.load(given + column.to(tl.int64) * sg_n, mask=inside, other=0) != 0
        kept = chosen & there
    elif KIND == "indices":
        entry = tl.arange(0, LISTED)
        room_here = entry < listed
        at = tl.load(given + entry.to(tl.int64) * sg_n, mask=room_here, other=-1).to(tl.int64)
        if held is not None:
            count = tl.load(held + b * sc_b + h * sc_h + tile.to(tl.int64) * sc_m).to(tl.int64)
            if (count < 0) | (count > listed):
                word = tl.minimum(word, _NUMBER << _SHIFT)
            used = room_here & (entry < count)
        else:
            used = room_here & (at != -1)
        right = used & (at >= 0) & (at < columns)
        word = tl.minimum(word, _first(used & ~right, entry, _VALUE))
        often = tl.histogram(tl.where(right, at, 0).to(tl.int32), COLS, mask=right)
        word = tl.minimum(word, _first(often > 1, column, _CROWDED))
        kept = (often > 0) & there
    else:
        x = tl.load(given + column.to(tl.int64) * sg_n, mask=inside, other=0.0)
        x = x.to(tl.float64 if WIDE else tl.float32)
        if WIDE:
            nothing, ahead = (
                tl.full([], -0x8000000000000000, tl.int64),
                tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64),
            )
        else:
            nothing, ahead = tl.full([], -0x80000000, tl.int32), tl.full([], 0x7FFFFFFF, tl.int32)
        if KIND == "mass":
            right = (x >= 0) & (x < float("inf"))
        else:
            right = x == x
        if not EVERY:
            word = tl.minimum(word, _first(there & ~right, column, _VALUE))
        able = there & right
        if KIND == "topk":
            able = able & (x != float("-inf"))
        key = tl.where(able, order(x, WIDE), nothing)
        early = inside & False
        low = nothing
        if NEAR != "":
            early = there & (column < sinks)
        if NEAR == "window":
            left, to = (first - back) // (BK * FK), (last + fore) // (BK * FK)
            left = tl.where(first - back < 0, 0, left)
            to = tl.where(last + fore < 0, -1, to)
            early = early | (there & (column >= left) & (column <= to))
        if always is not None:
            always += b * sa_b + h * sa_h + tile.to(tl.int64) * sa_m
            early = there & (tl.load(always + column.to(tl.int64) * sa_n, mask=inside, other=0) != 0)
        key = tl.where(early, ahead, key)
        before = tl.sum(early.to(tl.int32), axis=0)
        high = tl.max(key, axis=0)
        if KIND == "topk":
            if numbers is not None:
                budget = tl.load(numbers + b * sk_b + h * sk_h).to(tl.int64)
                if budget < 1:
                    word = tl.minimum(word, _NUMBER << _SHIFT)
                most = tl.minimum(tl.maximum(budget, 1), capacity).to(tl.int32)
            else:
                most = tl.minimum(limit, capacity).to(tl.int32)
            count = most
            if EVERY:
                count = tl.minimum(tl.maximum(count, before), capacity)
        else:
            most = capacity.to(tl.int32)
            if numbers is not None:
                share = tl.load(numbers + b * sk_b + h * sk_h).to(tl.float64)
                if ~((share > 0.0) & (share <= 1.0)):
                    word = tl.minimum(word, _NUMBER << _SHIFT)
                share = tl.where((share > 0.0) & (share <= 1.0), share, 1.0)
            else:
                share = limit.to(tl.int64).to(tl.float64, bitcast=True)
            mass = _masses(x, able)
            product = _sum(mass).to(tl.float64) * share
            goal = product.to(tl.int64)
            goal += (goal.to(tl.float64) < product).to(tl.int64)
            enough, under, last_kept = _needed(key, mass, goal, nothing, ahead)
            count = tl.minimum(tl.maximum(tl.maximum(enough, before), least), most)
            known = (count == enough) & (goal > 0)
            low, high = tl.where(known, under, nothing), tl.where(known, last_kept, high)
        if not EVERY:
            if before > most:
                word = tl.minimum(word, _CROWDED << _SHIFT)
        kept = highest(key, count, nothing, low, high)

    # The blocks of the mask that it consists of, and what the queries of the row's tile see of them.
    stored = columns
    if FK == 2:
        kept = tl.interleave(kept.to(tl.int32), kept.to(tl.int32)) != 0
        of = tl.interleave(tl.minimum(of, BK), tl.maximum(of - BK, 0))
        stored = (kv_len + BK - 1) // BK
        column = tl.arange(0, 2 * COLS)
    first, last, edge, end = _ends(i, q_len, kv_len, q_offset, BQ, BK, CAUSAL)
    kept = kept & (column < end)
    whole = column < edge
    short = column < 0
    if lengths is not None:
        natural = tl.minimum(kv_len - column.to(tl.int64) * BK, BK)
        of = tl.minimum(of, natural)
        short = of < natural
        kept = kept & (of > 0)
        whole = whole & (of == BK)

    # The lists: full blocks, then partial ones, then zeros.
    kept_whole, kept_cut = kept & whole, kept & ~whole
    ranks = tl.cumsum(kept_whole.to(tl.int32) | (kept_cut.to(tl.int32) << 16), 0)
    n_full, n_cut = tl.sum(kept_whole.to(tl.int32), axis=0), tl.sum(kept_cut.to(tl.int32), axis=0)
    entry = tl.where(kept_whole, ranks & 0xFFFF, n_full + ((ranks >> 16) & 0xFFFF)) - 1
    start = row.to(tl.int64) * room
    tl.store(indices + start + entry, column, mask=kept & (entry < room))
    spare = (column >= n_full + n_cut) & (column < room)
    if n_full + n_cut < room:
        tl.store(indices + start + column, 0, mask=spare)
    tl.store(starts + row, start.to(tl.int32))
    tl.store(cut_starts + row, (start + n_full).to(tl.int32))
    tl.store(full_counts + row, n_full)
    tl.store(cut_counts + row, n_cut)
    if word != _NONE:
        tl.store(fault, ((row.to(tl.int64) << 32) | word) + 1)

    if lengths is not None:
        item = tl.where(length_items > 1, b, 0)
        code = item * stored + column
        if CAUSAL:
            own = length_items.to(tl.int64) * stored + (item * tiles + i) * deep + column - edge
            code = tl.where(column < edge, code, own)
        code = tl.where(short, code, -1).to(tl.int32)
        tl.store(rules + start + entry, code, mask=kept & (entry < room))
        tl.store(rules + start + column, tl.sum(tl.where(column == 0, code, 0), axis=0), mask=spare)
        if (h == 0) & ((b == 0) | (length_items > 1)):
            _write_bits(
                bits, lengths, sl_n, item, i, first, edge, tiles, stored, kv_len, q_len, deep, length_items,
                BQ, BK, FK, CAUSAL,
            )  # fmt: skip
    if lo is not None:
        if group == 0:
            query = i * BQ + tl.arange(0, BQ)
            seen = tl.full([BQ], 0, tl.int64) + kv_len
            if CAUSAL:
                seen = tl.minimum(tl.maximum(query.to(tl.int64) + q_offset + 1, 0), kv_len)
            tl.store(lo + query, 0, mask=query < q_len)
            tl.store(hi + query, seen.to(tl.int32), mask=query < q_len)


def choose_blocks(made: Sequence[Any], c: Selection) -> tuple[Tensor, ...] | None:
    """Writes the tensors of the mask, those of its layout, in one launch, without a sync; None for rows that are too
    long. Returns the word of a fault.
    """
    if max(c.stored.grid[1], c.given.shape[-1]) > MOST_COLUMNS:
        return None
    word = fault_word(c.place.device)
    starts, full, _, cut_starts, cut, indices, lo, hi, rules, bits = made
    tiles, columns, place = c.stored.grid[0], c.place.grid[1], c.place
    cols = max(16, triton.next_power_of_2(columns))
    numbers, limit = (c.limit, 0) if isinstance(c.limit, Tensor) else (None, c.limit)
    if numbers is None and c.kind == "mass":
        limit = struct.unpack("<q", struct.pack("<d", c.limit))[0]
    near = c.always if isinstance(c.always, LocalBlocks) else LocalBlocks(0, None, 0)
    near_kind = (
        "" if c.always is None or isinstance(c.always, Tensor) else "sinks" if near.back is None else "window"
    )
    always = c.always if isinstance(c.always, Tensor) else None
    warps = min(max(cols * c.split[1] // 512, 1), 32)
    # A histogram counts an entry once for each thread that has it, so every thread has entries of its own.
    listed = max(32 * warps, triton.next_power_of_2(c.given.shape[-1])) if c.kind == "indices" else 1
    options: dict[str, Any] = {"num_warps": warps}
    if cols * c.split[1] <= 256:  # so that an SM has registers for the 32 programs that it can hold
        options["maxnreg"] = 64
    with torch.cuda.device_of(starts):
        launch(
            _choose, (c.rows,), c.given, c.lengths, numbers, always, c.counts, word, full, cut, starts,
            cut_starts, indices, lo, hi, rules, bits,
            *_steps(c.given, 4), *_steps(c.lengths, 2), *_steps(numbers, 4)[:2], *_steps(always, 4),
            *_steps(c.counts, 3), limit, c.least, near.sinks, near.back or 0, near.fore, c.given.shape[1],
            tiles, columns, c.given.shape[-1], c.capacity, place.q_len, place.kv_len, place.q_offset, c.deep,
            1 if c.lengths is None else c.lengths.shape[0], c.room,
            KIND=c.kind, CAUSAL=c.causal, NEAR=near_kind, EVERY=c.every,
            WIDE=c.given.dtype == torch.float64, BQ=c.stored.block[0], BK=c.stored.block[1], COLS=cols,
            LISTED=listed,
            UNIT=_unit(c.given, columns), FQ=c.split[0], FK=c.split[1], **options,
        )  # fmt: skip
    return (word,)


def _unit(x: Tensor, columns: int) -> int:
    """The elements in 16 bytes, if every row of x is whole words of these; else 1."""
    unit = 16 // x.element_size()
    *outer, step = _steps(x, 4)
    whole = x.shape[-1] == columns and step == 1 and x.data_ptr() % 16 == 0
    return unit if whole and not any(each % unit for each in (*outer, columns)) else 1


def _steps(x: Tensor | None, dims: int) -> list[int]:
    """Strides; 0 for a dim of one element, which broadcasts, and for no tensor."""
    if x is None:
        return [0] * dims
    return [step if size > 1 else 0 for step, size in zip(x.stride(), x.shape, strict=True)]
