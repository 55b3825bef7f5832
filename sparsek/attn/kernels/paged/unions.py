"""The lists of hopper.attention_paged where every query has its own: a tile visits the blocks that any of its queries
lists, and words say which ones do. Plain Triton, one launch, written on the device from the lengths there.

A program makes the lists of one tile, for one head of the lists. A candidate is an entry of one query, partial or full;
entries that are no block of the request's keys, or lie behind a causal query, are none. Candidates are sorted by block,
then query, and a scan joins the bits of equal blocks. Blocks that every query of the tile lists and sees whole become
full ones; the others are partial, and before them in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.kernels.mask.unions import every_bit, join_bits
from sparsek.attn.kernels.paged.schedule import FIELDS
from sparsek.attn.mask.pages import PageLists
from sparsek.core.memory import carved
from sparsek.engine.launch.launch import launch_unspecialized

MOST = 4096  # candidates of a tile
JOINED = tl.constexpr(6)  # the field of a record that is its row in the joined lists
_NONE = tl.constexpr(2**31 - 1)
_NUMBERS = ("p_size", "f_size", "list_rows", "longest", "room", "tiles")
_POINTERS = (
    "records", "count", "p_starts", "p_counts", "partial", "f_starts", "f_counts", "full", "starts", "counts",
    "whole_starts", "whole_counts", "blocks", "words",
)  # fmt: skip


@triton.jit
def _word(block, query, part: tl.constexpr):
    """Of candidates in ascending order, word `part` of the queries that list their block: whole at its last one."""
    one = tl.where(query // 32 == part, 1 << (query % 32), 0)
    _, word = tl.associative_scan((block, one), 0, join_bits)
    return word


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _join(
    records, count, p_starts, p_counts, partial, f_starts, f_counts, full, starts, counts, whole_starts, whole_counts,
    blocks, words, p_size, f_size, list_rows, longest, room, tiles,
    CAUSAL: tl.constexpr, BK: tl.constexpr, QUERIES: tl.constexpr, EACH: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """EACH: entries of a query, at least `longest`. Rows of tiles that do not exist have no blocks."""
    CELLS: tl.constexpr = QUERIES * EACH
    WORDS: tl.constexpr = (QUERIES + 31) // 32
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CELLS)
    at, each = lane // EACH, lane % EACH

    record = records + tile.to(tl.int64) * FIELDS
    live = tile < tl.load(count)
    place = tl.load(record + 2, mask=live, other=0)
    queries = tl.load(record + 3, mask=live, other=0)
    length = tl.load(record + 4, mask=live, other=0)
    listed = tl.load(record + 5, mask=live, other=0) + at
    known = (at < queries) & (listed >= 0) & (listed < list_rows)
    listed += head * list_rows
    p_count = tl.minimum(tl.maximum(tl.load(p_counts + listed, mask=known, other=0), 0), longest)
    f_count = tl.minimum(tl.maximum(tl.load(f_counts + listed, mask=known, other=0), 0), longest - p_count)
    p_at = tl.load(p_starts + listed, mask=known, other=-1) + each
    f_at = tl.load(f_starts + listed, mask=known, other=-1) + each - p_count
    in_partial = known & (each < p_count) & (p_at >= 0) & (p_at < p_size)
    in_full = known & (each >= p_count) & (each - p_count < f_count) & (f_at >= 0) & (f_at < f_size)
    block = tl.load(partial + p_at, mask=in_partial, other=-1)
    block = tl.where(in_full, tl.load(full + f_at, mask=in_full, other=-1), block)
    end = length
    if CAUSAL:
        end = tl.minimum(length, tl.maximum(place + at + 1, 0))
    block = tl.where((block >= 0) & (block < (end + BK - 1) // BK), block, -1)

    key = tl.sort(tl.where(block >= 0, block * QUERIES + at, _NONE))
    block, at = key // QUERIES, key % QUERIES
    following = tl.gather(block, tl.minimum(lane + 1, CELLS - 1), 0)
    last = (key != _NONE) & ((following != block) | (lane == CELLS - 1))
    # The first query sees least.
    seen = length
    if CAUSAL:
        seen = tl.minimum(length, tl.maximum(place + 1, 0))
    every = last & ((block + 1).to(tl.int64) * BK <= seen)
    for part in tl.static_range(WORDS):
        every = every & (_word(block, at, part) == every_bit(queries, part))
    some = last & ~every
    n_some, n_every = tl.sum(some.to(tl.int32), axis=0), tl.sum(every.to(tl.int32), axis=0)
    rank = tl.where(some, tl.cumsum(some.to(tl.int32), 0), n_some + tl.cumsum(every.to(tl.int32), 0)) - 1
    start = row * room
    to = start + rank
    there = last & (rank < room)
    tl.store(blocks + to, block, mask=there)
    for part in tl.static_range(WORDS):
        tl.store(words + to * WORDS + part, _word(block, at, part), mask=there)
    tl.store(starts + row, start.to(tl.int32))
    tl.store(counts + row, n_some)
    tl.store(whole_starts + row, (start + n_some).to(tl.int32))
    tl.store(whole_counts + row, n_every)
    if head == 0:
        tl.store(record + JOINED, tile, mask=live)  # not in place of field 5, which other heads still read


class UnionLists(NamedTuple):
    """Lists of tiles, as those of `PageLists` of `tiles` tiles, and the words of their entries."""

    lists: tuple[Tensor, ...]
    words: Tensor
    tiles: int
    longest: int


def entries_of(longest: int) -> int:
    """Entries of a query for which a program has room."""
    return triton.next_power_of_2(max(1, longest))


def join(
    records: Tensor, count: Tensor, lists: PageLists, longest: int, queries: int, causal: bool, most_keys: int
) -> UnionLists:
    """The joined lists of the tiles of a schedule, of `queries` queries each, whose records get their rows. An
    allocation and a launch, without a sync. A query has at most `longest` blocks.
    """
    tiles, device = records.shape[0], records.device
    rows, words = lists.heads * tiles, -(-queries // 32)
    room = min(queries * longest, -(-most_keys // lists.block[1]))
    _, (starts, counts, whole_starts, whole_counts, blocks, bits) = carved(
        [rows, rows, rows, rows, max(1, rows * room), max(1, rows * room * words)], device
    )
    given = [records if x.numel() == 0 else x for x in (*lists.partial, *lists.full)]
    args = (
        records, count, *given, starts, counts, whole_starts, whole_counts, blocks, bits,
        lists.partial.indices.numel(), lists.full.indices.numel(), lists.tiles, longest, room, tiles,
    )  # fmt: skip
    each = entries_of(longest)
    warps = min(max(queries * each // 128, 1), 16)
    launch_unspecialized(_join, device, rows, args, (causal, lists.block[1], queries, each, FIELDS), warps)
    return UnionLists((starts, counts, blocks, whole_starts, whole_counts, blocks), bits, tiles, 2 * room)
