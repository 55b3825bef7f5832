"""The tiles of hopper.attention_paged, written on the device from the lengths there, longest first.

A tile is `positions` queries of one request; it stands for all heads, which the kernel takes side by side. One launch
writes a record for each. Nothing is sorted: the keys that a request's tiles visit never fall from tile to tile, so how
many tiles of a request visit at least x keys has a closed form, and a tile's place is a sum of such counts over
requests. Tiles of about as many keys (a class of QUANTUM keys) stay together by request, so that they share keys in L2.

A record is FIELDS int32:

    0 first row of q   1 request   2 key position of the first query   3 queries   4 keys of the request
    5 masked steps     6 steps     7 first block at the diagonal   8 how many   9 first block at the window's edge
    10 masked steps before those at the sinks' edge   11 whole blocks of sinks, then the sinks' edge
    12 first whole block   13 how many
    with lists: 5 is the tile's row in the lists of a head, 6 that in joined lists (unions.py); others are unused

Blocks are of `keys` keys, the kernel's steps. Masked steps come first: diagonal, window's edge, sinks' edge; then whole
blocks of the window, and of the sinks. A tile that sees nothing has one masked step, beyond its keys.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from sparsek.attn.plan.kernels import PagedCall
from sparsek.core.memory import carved
from sparsek.engine.launch.launch import launch_unspecialized

FIELDS = 16
QUANTUM = 1024  # keys of a class
TILES = 32  # by a program
REQUESTS = 32  # read together
WARPS = 4
FAR = 1 << 30  # more keys than there can be

_NUMBERS = ("tokens", "requests", "most_keys", "window", "sinks", "bound", "capacity")


@triton.jit
def _lengths(cu, lens, r, live, tokens, most_keys):
    """First row, queries and keys of requests, whatever the tensors hold."""
    first = tl.minimum(tl.maximum(tl.load(cu + r, mask=live, other=0), 0), tokens)
    last = tl.minimum(tl.maximum(tl.load(cu + r + 1, mask=live, other=0), 0), tokens)
    length = tl.minimum(tl.maximum(tl.load(lens + r, mask=live, other=0), 0), most_keys)
    return first, tl.maximum(last - first, 0), length


@triton.jit
def _at_least(n, length, x, bound, CAUSAL: tl.constexpr, POSITIONS: tl.constexpr):
    """How many tiles of a request of n queries visit at least x keys. At most `bound` keys of a tile count."""
    tiles = (n + (POSITIONS - 1)) // POSITIONS
    ahead = 0
    if CAUSAL:
        ahead = (tl.maximum(x - (length - n), 1) + (POSITIONS - 1)) // POSITIONS - 1
    some = tl.where((tl.minimum(length, bound) >= x) & (tiles > 0), tl.maximum(tiles - ahead, 1), 0)
    return tl.where(x <= 0, tiles, some)


@triton.jit
def _blocks(a, KEYS: tl.constexpr):
    return (a + (KEYS - 1)) // KEYS


@triton.jit(
    do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("cu_seqlens", "seq_lens", "tiles", "count")
)
def _place(
    cu_seqlens, seq_lens, tiles, count, tokens, requests, most_keys, window, sinks, bound, capacity,
    POSITIONS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, LIST: tl.constexpr,
    QUANTUM: tl.constexpr, TILES: tl.constexpr, REQUESTS: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The records of TILES tiles. WINDOW: there is a window. LIST: queries of a tile of lists, 0 without lists."""
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    owner = tl.zeros((TILES,), dtype=tl.int32)
    before = tl.zeros((TILES,), dtype=tl.int32)  # tiles of the requests before its own
    listed = tl.zeros((TILES,), dtype=tl.int32)
    total = 0
    for start in range(0, requests, REQUESTS):
        r = start + tl.arange(0, REQUESTS)
        _, n, _ = _lengths(cu_seqlens, seq_lens, r, r < requests, tokens, most_keys)
        own = (n + (POSITIONS - 1)) // POSITIONS
        until = total + tl.cumsum(own, 0)
        passed = (until[None, :] <= tile[:, None]) & (r < requests)[None, :]
        owner += tl.sum(passed.to(tl.int32), 1)
        before = tl.maximum(before, tl.max(tl.where(passed, until[None, :], 0), 1))
        if LIST > 0:
            listed += tl.sum(tl.where(passed, ((n + (LIST - 1)) // LIST)[None, :], 0), 1)
        total += tl.sum(own, 0)
    # More tiles than rows of q allow: the lengths are wrong, and nothing is computed.
    total = tl.where(total <= capacity, total, 0)
    live = tile < total
    first, n, length = _lengths(cu_seqlens, seq_lens, owner, live, tokens, most_keys)
    i = tile - before
    offset = length - n
    if CAUSAL:
        visited = tl.maximum(offset + tl.minimum((i + 1) * POSITIONS, n), 0)
    else:
        visited = length
    # A class holds tiles of up to a multiple of QUANTUM keys, the first one also those of none.
    low = tl.maximum(tl.minimum(visited, bound) - 1, 0) // QUANTUM * QUANTUM + 1
    high = low + QUANTUM
    low = tl.where(low > 1, low, 0)
    # Of its own class, tiles of later queries are before this one.
    rank = (n + (POSITIONS - 1)) // POSITIONS - _at_least(n, length, high, bound, CAUSAL, POSITIONS) - 1 - i
    for start in range(0, requests, REQUESTS):
        r = start + tl.arange(0, REQUESTS)
        _, n_r, length_r = _lengths(cu_seqlens, seq_lens, r, r < requests, tokens, most_keys)
        n_r, length_r, r = n_r[None, :], length_r[None, :], r[None, :]
        longer = _at_least(n_r, length_r, high[:, None], bound, CAUSAL, POSITIONS)
        alike = _at_least(n_r, length_r, low[:, None], bound, CAUSAL, POSITIONS) - longer
        rank += tl.sum(longer + tl.where(r < owner[:, None], alike, 0), 1)

    p_0 = offset + i * POSITIONS
    queries = tl.minimum(n - i * POSITIONS, POSITIONS)
    p_1 = p_0 + queries - 1
    there = live & (rank >= 0) & (rank < capacity)
    record = tiles + rank.to(tl.int64) * FIELDS
    tl.store(record, first + i * POSITIONS, mask=there)
    tl.store(record + 1, owner, mask=there)
    tl.store(record + 2, p_0, mask=there)
    tl.store(record + 3, queries, mask=there)
    tl.store(record + 4, length, mask=there)
    if LIST > 0:
        tl.store(record + 5, listed + i * POSITIONS // LIST, mask=there)
    else:
        # Blocks a to b - 1 hold keys that some query sees, f_0 to f_1 - 1 keys that all do; of the sinks before a,
        # those before s_1 and s_0.
        end, all_end = length, length
        if CAUSAL:
            end = tl.minimum(tl.maximum(p_1 + 1, 0), length)
            all_end = tl.minimum(tl.maximum(p_0 + 1, 0), length)
        elif WINDOW:
            end = tl.minimum(tl.maximum(p_1 + window, 0), length)
            all_end = tl.minimum(tl.maximum(p_0 + window, 0), length)
        a, f_0, s_0, s_1 = length * 0, length * 0, length * 0, length * 0
        b = _blocks(end, KEYS)
        if WINDOW:
            sunk, all_sunk = tl.minimum(sinks, length), tl.minimum(sinks, length)
            if CAUSAL:
                sunk, all_sunk = tl.minimum(sinks, end), tl.minimum(sinks, all_end)
            a = tl.minimum(tl.maximum(p_0 - window + 1, 0) // KEYS, b)
            s_1 = tl.minimum(_blocks(sunk, KEYS), a)
            s_0 = tl.minimum(all_sunk // KEYS, s_1)
            b = tl.maximum(b, _blocks(sunk, KEYS))
            f_0 = tl.minimum(_blocks(tl.maximum(p_1 - window + 1, 0), KEYS), b)
        f_1 = tl.minimum(tl.maximum(all_end // KEYS, f_0), b)
        diagonal = b - f_1
        edges = diagonal + f_0 - a
        masked = edges + s_1 - s_0
        steps = masked + f_1 - f_0 + s_0
        blind = steps == 0
        one = blind.to(tl.int32)
        tl.store(record + 5, masked + one, mask=there)
        tl.store(record + 6, steps + one, mask=there)
        tl.store(record + 7, tl.where(blind, _blocks(length, KEYS), f_1), mask=there)
        tl.store(record + 8, diagonal + one, mask=there)
        tl.store(record + 9, a, mask=there)
        tl.store(record + 10, edges + one, mask=there)
        tl.store(record + 11, s_0, mask=there)
        tl.store(record + 12, f_0, mask=there)
        tl.store(record + 13, f_1 - f_0, mask=there)
    if tl.program_id(0) == 0:
        tl.store(count, total)


class Shape(NamedTuple):
    """What a schedule depends on beside the lengths. `window` 0: none. `list_queries` 0: no lists; `bound`: about as
    many keys count for the order at most.
    """

    positions: int
    keys: int
    causal: bool
    window: int = 0
    sinks: int = 0
    list_queries: int = 0
    bound: int = FAR


class Schedule(NamedTuple):
    """Records int32 [capacity, FIELDS]; the first `count` int32 [1] are tiles."""

    tiles: Tensor
    count: Tensor


def capacity(tokens: int, requests: int, positions: int) -> int:
    """As many tiles as there can be, whatever the lengths."""
    return -(-tokens // positions) + requests


def schedule(call: PagedCall, shape: Shape) -> Schedule:
    """One launch and one allocation, without a sync. Records beyond `count` hold anything."""
    tokens, requests = call.q.shape[0], call.seq_lens.shape[0]
    room = capacity(tokens, requests, shape.positions)
    _, (tiles, count) = carved([(room, FIELDS), 1], call.q.device)
    most_keys = min(call.block_table.shape[1] * call.k.shape[2], FAR)
    args = (
        call.cu_seqlens_q, call.seq_lens, tiles, count, tokens, requests, most_keys, min(shape.window, FAR),
        min(shape.sinks, FAR), min(shape.bound, FAR), room,
    )  # fmt: skip
    constants = (
        shape.positions, shape.keys, shape.causal, shape.window > 0, shape.list_queries, QUANTUM, TILES, REQUESTS,
        FIELDS,
    )  # fmt: skip
    launch_unspecialized(_place, call.q.device, -(-room // TILES), args, constants, WARPS)
    return Schedule(tiles, count)
