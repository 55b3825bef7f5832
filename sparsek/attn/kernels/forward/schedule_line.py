"""Device code of schedule_bwd.py: the places of key tiles in the line, as in attn/plan/attention_grad_schedule.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _section(tile, n, total, key_tiles, columns, sections, heads, parts):
    """0 for tiles far longer than the mean; of parts without a visit, the last."""
    own = tl.where((parts > 1) & (n == 0), sections, tile // columns * sections // heads) + 1
    return tl.where(n.to(tl.int64) * key_tiles > 4 * total.to(tl.int64), 0, own)


@triton.jit
def band_sections(totals, key_tiles, sections, heads, ctas, band_room):
    """As in the plan: sections whose heads take each column in turn, or 0."""
    span = tl.load(totals + 3)
    count = tl.maximum(heads * (span + 1) // ctas, 1)
    reach = (heads + count - 1) // count * span
    fits = (ctas <= 2 * reach) & (ctas + reach <= band_room)
    even = 4 * tl.load(totals + 4).to(tl.int64) * key_tiles <= 5 * tl.load(totals + 1).to(tl.int64)
    return tl.where(fits & even & (count < sections), count, 0)


@triton.jit
def _key(tile, n, columns, heads, in_turn):
    """The order in a section: longer tiles first; of equally long ones those of a head, or those of a column."""
    spot = tl.where(in_turn, tile % columns * heads + tile // columns, tile)
    return spot.to(tl.int64) - (n.to(tl.int64) << 32)


@triton.jit
def place_tiles(
    totals, n, rank, first, ticks, columns, key_tiles, sections, heads, parts, in_turn, SINGLE: tl.constexpr,
    TILE_TICKS: tl.constexpr, TILES: tl.constexpr, STREAM: tl.constexpr
):  # fmt: skip
    """The place of key tiles in the line, and their first visits."""
    total = tl.load(totals + 1)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    live = tile < key_tiles
    own = tl.load(n + tile, mask=live, other=0)
    section = _section(tile, own, total, key_tiles, columns, sections, heads, parts)
    key = _key(tile, own, columns, heads, in_turn)[:, None]
    place = tl.zeros((TILES,), dtype=tl.int32)
    before = tl.zeros((TILES,), dtype=tl.int32)
    for start in range(0, key_tiles, STREAM):
        other = start + tl.arange(0, STREAM)
        there = other < key_tiles
        length = tl.load(n + other, mask=there, other=0)
        of_other = _section(other, length, total, key_tiles, columns, sections, heads, parts)
        of_other = tl.where(there, of_other, 2147483647)[None, :]
        ahead = _key(other, length, columns, heads, in_turn)[None, :] < key
        ahead = (of_other < section[:, None]) | ((of_other == section[:, None]) & ahead)
        place += tl.sum(ahead.to(tl.int32), 1)
        if SINGLE:
            length += length % 2
        before += tl.sum(tl.where(other[None, :] < tile[:, None], length[None, :], 0), 1)
    if SINGLE:
        own += own % 2
    tl.store(rank + tile, place, mask=live)
    tl.store(first + tile, before, mask=live)
    tl.store(ticks + place, own + TILE_TICKS, mask=live)


@triton.jit
def place_alike(
    totals, n, rank, first, ticks, columns, key_tiles, sections, heads, in_turn, SINGLE: tl.constexpr,
    TILE_TICKS: tl.constexpr, TILES: tl.constexpr, STREAM: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """The same where all heads have the same lists: of TILES key blocks, the tiles of all heads."""
    most = 4 * tl.load(totals + 1).to(tl.int64)
    column = tl.program_id(0) * TILES + tl.arange(0, TILES)
    live = column < columns
    own = tl.load(n + column, mask=live, other=0)
    of_longer = tl.zeros((TILES, STREAM), dtype=tl.int32)
    of_equal = tl.zeros((TILES, STREAM), dtype=tl.int32)
    of_lower = tl.zeros((TILES, STREAM), dtype=tl.int32)
    of_before = tl.zeros((TILES, STREAM), dtype=tl.int32)
    of_far = tl.zeros((STREAM,), dtype=tl.int32)
    of_head = tl.zeros((STREAM,), dtype=tl.int32)
    for start in range(0, columns, STREAM):
        other = start + tl.arange(0, STREAM)
        length = tl.load(n + other, mask=other < columns, other=-1)
        lower = other[None, :] < column[:, None]
        same = length[None, :] == own[:, None]
        of_longer += (length[None, :] > own[:, None]).to(tl.int32)
        of_equal += same.to(tl.int32)
        of_lower += (same & lower).to(tl.int32)
        of_far += (length.to(tl.int64) * key_tiles > most).to(tl.int32)
        visits = tl.maximum(length, 0)
        if SINGLE:
            visits += visits % 2
        of_before += tl.where(lower, visits[None, :], 0)
        of_head += visits
    # Of one head: tiles that are longer, as long, and as long and before; tiles far longer than the mean; visits.
    longer = tl.sum(of_longer, 1)[None, :]
    equal = tl.sum(of_equal, 1)[None, :]
    lower = tl.sum(of_lower, 1)[None, :]
    before = tl.sum(of_before, 1)[None, :]
    far = tl.sum(of_far, 0)
    visits = tl.sum(of_head, 0)
    is_far = (own.to(tl.int64) * key_tiles > most)[None, :]
    if SINGLE:
        own += own % 2
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS))[:, None]
        section = head * sections // heads
        begin = (section * heads + sections - 1) // sections
        end = ((section + 1) * heads + sections - 1) // sections
        place = (
            heads * far + begin * (columns - far) + (end - begin) * (longer - far) + (head - begin) * equal
        )
        in_columns = begin * columns + (end - begin) * (longer + lower) + head - begin  # none is far then
        place = tl.where(is_far, heads * longer + head * equal, place) + lower
        place = tl.where(in_turn, in_columns, place)
        tile = head * columns + column[None, :]
        there = (head < heads) & live[None, :]
        tl.store(rank + tile, place, mask=there)
        tl.store(first + tile, head * visits + before, mask=there)
        tl.store(ticks + place, own[None, :] + TILE_TICKS + head * 0, mask=there)
