"""The blocks of a dense matrix that a BSR stores, chosen and gathered in plain Triton. `BSR.from_dense` on a GPU.

    w [M, K]  --_norms-->  keys [Mb, Kb]  --_choose-->  where, indptr, status  --_gather-->  values, indices

    _norms    reads w once: of every block the Frobenius norm, or for the rules that ask whether anything is there its
              largest magnitude. The bits of a float that is not negative, as an integer, have its order: the key.
    _choose   one program for all blocks, or one for every block row where each has its own share. It finds the key of
              the last block that is stored by counting: of a range three keys are tried at once, and the range shrinks
              to a quarter, until as many blocks are at a key or above it as are wanted. Then it lists what is stored in
              order, of equal keys the first ones, with a scan.
    _gather   copies the stored blocks.

All reads and writes of values are 16 bytes a thread where w is aligned. Every sum has a fixed order: no atomics. Sides
that are ragged are masked; nothing is padded.

A norm may be unsure: NaN, Inf, an overflow, or a choice among blocks so small that squares underflow. `_choose` says so
in `status`, and the host leaves all of it to torch, which looks again and refuses NaN and Inf. `status` lies in the
host's memory, and the host waits for `_choose` only: under `keep`, where it knows how many blocks there will be, the
GPU gathers meanwhile.

`ops/spmm.py` registers a function with `formats/convert.py` that imports this file when the first CUDA tensor comes.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.formats.convert import Packed, Rule, least_sure
from sparsek.formats.pattern import grid_of
from sparsek.formats.two_four import BITS
from sparsek.kernels.portable.match import launch
from sparsek.kernels.prims.portable_tensors import times

# A thread has eight loads of 16 bytes under way. TILE: elements of a tile, at most.
NORM_BYTES, NORM_WARPS = 32768, 8
GATHER_BYTES, GATHER_WARPS = 16384, 4
TILE = 16384
MIN_CHUNK, MAX_CHUNK, KEYS_PER_THREAD = 256, 4096, 8  # keys of a step of `_choose`
CELLS = 2**20  # keys that one program ranks: beyond it torch's sort, which takes the whole card, is faster
FIELD = tl.constexpr(21)  # bits of each of three counts in an int64, which holds CELLS
LARGEST = tl.constexpr(2**21 - 1)

_SIZES = ("rows", "columns", "w_row", "count", "cells", "across", "least")
_ANYWHERE = ("w", "keys", "where", "indptr", "status", "indices", "values")


@triton.jit
def _rows(
    w, offsets, lanes, i, down, rows, w_row,
    BM: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """TALL rows of block row `i`, from row `down` of it on, in the lanes that are live; None: all of them.

    `offsets` [TALL, .] are those of its first rows from w.
    """
    w += offsets + down * w_row
    if UNIT > 1:
        w = tl.multiple_of(w, (1, 16))
    live = lanes
    if RAGGED:
        live = lanes & (i * BM + down + tl.arange(0, TALL) < rows)[:, None]
    if live is None:
        return tl.load(w)
    else:
        return tl.load(w, mask=live, other=0)


@triton.jit
def _there(
    w, offsets, lanes, i, rows, w_row, BM: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    """int32: 1 for each lane [.] of `offsets` [TALL, .] that has anything but zeros, of either sign, in BM rows."""
    bits = tl.core.get_int_dtype(w.dtype.element_ty.primitive_bitwidth, True)
    found = tl.zeros(offsets.shape, bits)
    for down in range(0, BM, TALL):
        found |= (
            _rows(w, offsets, lanes, i, down, rows, w_row, BM, UNIT, TALL, RAGGED).to(bits, bitcast=True) << 1
        )
    return tl.max((found != 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _norms(
    w, keys, rows, columns, w_row, SQUARES: tl.constexpr,
    KIND: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, RAGGED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """SIDE blocks side by side, TALL rows of them a step. A row of a block has WIDE >= BK lanes."""
    across = (columns + (BK - 1)) // BK
    chunks = (across + (SIDE - 1)) // SIDE
    i, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * SIDE
    w_row, columns = times(w_row, UNIT).to(tl.int64), times(columns, UNIT)
    lane = tl.arange(0, SIDE * WIDE)
    column = lane // WIDE * BK + lane % WIDE
    lanes = None
    if RAGGED or BK != WIDE or SIDE > 1:
        lanes = ((lane % WIDE < BK) & (first * BK + column < columns))[None, :]
    w += i * BM * w_row + first * BK
    offsets = tl.arange(0, TALL)[:, None] * w_row + column[None, :]
    if SQUARES:
        sums = tl.zeros(offsets.shape, tl.float64 if w.dtype.element_ty == tl.float64 else tl.float32)
        for down in range(0, BM, TALL):
            x = _rows(w, offsets, lanes, i, down, rows, w_row, BM, UNIT, TALL, RAGGED).to(sums.dtype)
            sums += x * x
        square = tl.sum(tl.reshape(tl.sum(sums, 0), (SIDE, WIDE)), 1)
        if square.dtype == tl.float64:
            key = tl.sqrt(square).to(tl.int64, bitcast=True)
        else:
            key = tl.sqrt_rn(square).to(tl.int32, bitcast=True)
        if tl.min(key, 0) == 0:
            # Its squares may have vanished.
            there = _there(w, offsets, lanes, i, rows, w_row, BM, UNIT, TALL, RAGGED)
            key = tl.maximum(key, tl.max(tl.reshape(there, (SIDE, WIDE)), 1).to(key.dtype))
    else:
        there = _there(w, offsets, lanes, i, rows, w_row, BM, UNIT, TALL, RAGGED)
        key = tl.max(tl.reshape(there, (SIDE, WIDE)), 1)
    block = first + tl.arange(0, SIDE)
    tl.store(keys + (i * across + block), key, mask=block < across)


@triton.jit
def _rank(key, SURE: tl.constexpr, INFINITY: tl.constexpr):
    """Keys that are unsure, but that of a block of zeros, have the rank of `SURE` or of `INFINITY`."""
    return tl.where(key > 0, tl.minimum(tl.maximum(key, SURE), INFINITY), key)


@triton.jit
def _last(keys, count, cells, CHUNK: tl.constexpr, SURE: tl.constexpr, INFINITY: tl.constexpr):
    """The key of the last of the `count` largest of `cells` keys, and how many of that key are among them, or more."""
    lanes = tl.arange(0, CHUNK)
    highest = _rank(tl.load(keys + lanes, mask=lanes < cells, other=-1), SURE, INFINITY)
    lowest = tl.where(highest < 0, INFINITY, highest)
    for begin in range(CHUNK, cells, CHUNK):
        key = _rank(tl.load(keys + begin + lanes, mask=begin + lanes < cells, other=-1), SURE, INFINITY)
        highest = tl.maximum(highest, key)
        lowest = tl.where(key < 0, lowest, tl.minimum(lowest, key))
    # `reached` keys are at `low` or above, and `beyond` at `high` or above: reached >= count > beyond.
    low, high = tl.min(lowest, 0), tl.max(highest, 0) + 1
    reached, beyond = cells, 0
    while (high - low > 1) & (reached != count):
        step = (high - low + 3) >> 2
        one, two, three = low + step, low + 2 * step, low + 3 * step
        found = tl.zeros((CHUNK,), tl.int64)
        for begin in range(0, cells, CHUNK):
            key = _rank(tl.load(keys + begin + lanes, mask=begin + lanes < cells, other=-1), SURE, INFINITY)
            found += (key >= one).to(tl.int64) + ((key >= two).to(tl.int64) << FIELD)
            found += (key >= three).to(tl.int64) << (2 * FIELD)
        total = tl.sum(found, 0)
        at_one, at_two, at_three = total & LARGEST, (total >> FIELD) & LARGEST, total >> (2 * FIELD)
        over, under = one, at_one  # the first of the three that too few reach
        if at_one >= count:
            low, reached, over, under = one, at_one.to(tl.int32), two, at_two
        if at_two >= count:
            low, reached, over, under = two, at_two.to(tl.int32), three, at_three
        if at_three >= count:
            low, reached, over, under = three, at_three.to(tl.int32), high, total * 0 + beyond
        if over < high:
            high, beyond = over, under.to(tl.int32)
    return low, tl.where(reached == count, count, count - beyond)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _choose(
    keys, where, indptr, status, least, count, cells, across,
    RANKED: tl.constexpr, CHECKED: tl.constexpr, SURE: tl.constexpr, INFINITY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program has `cells` keys in order, of whole block rows of `across` blocks, and stores the `count` largest if
    RANKED, and otherwise those over `least`. `where` gets the cells that are stored, `status` how many, or -1 if
    CHECKED and a norm is unsure.
    """
    group = tl.program_id(0)
    first = group * cells
    keys += first
    if RANKED:
        start = group * count
        last, wanted = _last(keys, count, cells, CHUNK, SURE, INFINITY)
    else:
        start = 0
        last, wanted = least.to(keys.dtype.element_ty), 0
    above_before, equal_before, unsure = 0, 0, 0
    for begin in range(0, cells, CHUNK):
        lane = begin + tl.arange(0, CHUNK)
        live = lane < cells
        key = tl.load(keys + lane, mask=live, other=0)
        rank = _rank(key, SURE, INFINITY) if CHECKED else key
        above, equal = live & (rank > last), live & (rank == last)
        # One scan counts both: those above in the low half, those that are equal in the high half.
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        scan = tl.cumsum(both, 0) - both
        equals = equal_before + (scan >> 16)
        stored = above | (equal & (equals < wanted))
        at = start + above_before + (scan & 0xFFFF) + tl.minimum(equals, wanted)
        tl.store(where + at, first + lane, mask=stored)
        tl.store(indptr + (first + lane) // across, at, mask=live & ((first + lane) % across == 0))
        if CHECKED:
            unsure += tl.sum(
                (live & ((key >= INFINITY) | (stored & (key > 0) & (key < SURE)))).to(tl.int32), 0
            )
        total = tl.sum(both, 0)
        above_before += total & 0xFFFF
        equal_before += total >> 16
    found = above_before + tl.minimum(equal_before, wanted)
    if group == tl.num_programs(0) - 1:
        tl.store(indptr + (first + cells) // across, start + found)
    tl.store(status + group, tl.where(unsure > 0, -1, found))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _gather(
    w, where, indices, values, rows, columns, w_row, count,
    KIND: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, RAGGED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """TALL rows of each of SIDE stored blocks, which lie one behind the other in `values`."""
    PARTS: tl.constexpr = BM // TALL
    w_row, columns = times(w_row, UNIT), times(columns, UNIT)
    across = (columns + (BK - 1)) // BK
    first, down = tl.program_id(0) // PARTS * SIDE, tl.program_id(0) % PARTS * TALL
    each = first + tl.arange(0, SIDE)
    column = tl.load(where + each, mask=each < count, other=0) % across
    tl.store(indices + each, column, mask=(each < count) & (down == 0))

    line, lane = tl.arange(0, SIDE * TALL), tl.arange(0, WIDE)[None, :]
    block, row = first + line // TALL, down + line % TALL
    live = block < count
    cell = tl.load(where + block, mask=live, other=0)
    row_of_w, column_of_w = cell // across * BM + row, (cell % across * BK)[:, None] + lane
    inside = live[:, None] & (lane < BK)
    read = inside
    if RAGGED:
        read = inside & (row_of_w < rows)[:, None] & (column_of_w < columns)
    source = w + ((row_of_w.to(tl.int64) * w_row)[:, None] + column_of_w)
    if UNIT > 1:
        source = tl.multiple_of(source, (1, 16))
    MASKED: tl.constexpr = RAGGED or BK != WIDE or SIDE > 1
    x = tl.load(source, mask=read, other=0) if MASKED else tl.load(source)
    target = values + ((block.to(tl.int64) * (BM * BK) + row * BK)[:, None] + lane)
    tl.store(tl.multiple_of(target, (1, 16)), x, mask=inside)


class Source(NamedTuple):
    """What the kernels are told of x [M, K]: rows, columns, elements from row to row; KIND to RAGGED."""

    x: Tensor
    sizes: tuple[int, int, int]
    constants: tuple[Any, ...]
    block: tuple[int, int]


class Chosen(NamedTuple):
    """What `_choose` writes, and the number of stored blocks where the host knows it."""

    indptr: Tensor
    where: Tensor
    status: Tensor
    count: int | None


def pack_bsr(w: Tensor, block: tuple[int, int], rule: Rule) -> Packed | None:
    """The blocks of w [M, K] that `rule` stores, as `convert.from_dense` chooses them. One sync, for the choice.

    Any float dtype; rows without gaps, of a mask of elements too. None for what the kernels do not take: other strides,
    an empty or lazily negated w, more than CELLS blocks to rank at once; and where a norm is unsure.
    """
    grid = grid_of((w.shape[0], w.shape[1]), block)
    source, inside, by_norm = _source(w, block), None, rule.threshold is not None or rule.keep is not None
    if source is None or (rule.keep and rule.scope == "global" and grid[0] * grid[1] > CELLS):
        return None
    if rule.mask is None:
        keys = _keys(source, grid, by_norm)
    elif tuple(rule.mask.shape) == grid:
        keys = rule.mask.to(torch.int32, memory_format=torch.contiguous_format)
    else:
        inside = _source(rule.mask.view(torch.int8), block)
        if inside is None:
            return None
        keys = _keys(inside, grid, False)
    chosen, made, done = _chosen(keys, rule, by_norm), None, None
    try:
        if w.is_cuda:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(w.device))
        if chosen.count is not None:
            made = _blocks(source, chosen.where, chosen.count)
    finally:  # `status` is written to until then
        if done is not None:
            done.synchronize()
    found = chosen.status.tolist()
    if min(found) < 0:
        return None
    indices, values = made or _blocks(source, chosen.where, found[0])
    if inside is not None:
        outside = _blocks(inside, chosen.where, found[0])[1].view(torch.bool).logical_not_()
        values.masked_fill_(outside, 0)
    return Packed(chosen.indptr, indices, values)


def _source(x: Tensor, block: tuple[int, int]) -> Source | None:
    """None for what the kernels do not read."""
    if x.numel() == 0 or x.is_neg() or not (x.is_cuda or env.interpreting()):
        return None
    return None if x.shape[1] > 1 and x.stride(1) != 1 else _described(x, block)


def _described(x: Tensor, block: tuple[int, int]) -> Source:
    (rows, columns), step, unit = x.shape, x.stride(0), 16 // x.element_size()
    if x.data_ptr() % 16 or step % unit or columns % unit:
        unit = 1
    ragged = rows % block[0] != 0 or columns % block[1] != 0
    return Source(x, (rows, columns, step), (str(x.dtype), *block, unit, ragged), block)


@cache
def _tile(block: tuple[int, int], itemsize: int, most: int) -> tuple[int, int, int]:
    """TALL, WIDE and SIDE of a tile of so many bytes, or of TILE elements if that is less."""
    room = min(TILE, most // itemsize)
    wide = triton.next_power_of_2(block[1])
    tall = min(block[0] & -block[0], room // wide)
    return tall, wide, room // (tall * wide)


def _keys(source: Source, grid: tuple[int, int], by_norm: bool) -> Tensor:
    """The keys of the blocks, [Mb, Kb]: of their norms, or 1 where something is there."""
    x = source.x
    keys = x.new_empty(grid, dtype=torch.int64 if by_norm and x.dtype == torch.float64 else torch.int32)
    tile = _tile(source.block, x.element_size(), NORM_BYTES)
    programs = grid[0] * -(-grid[1] // tile[2])
    constants = by_norm, *source.constants, *tile
    launch(_norms, x.device, programs, (x, keys, *source.sizes), constants, NORM_WARPS)
    return keys


@lru_cache
def _bits(x: float, dtype: torch.dtype) -> int:
    """A float's bits as an integer."""
    return int(torch.tensor(x, dtype=dtype).view(BITS[dtype][0]))


def _chosen(keys: Tensor, rule: Rule, by_norm: bool) -> Chosen:
    """Starts `_choose` on the keys of a grid of blocks."""
    rows, columns = keys.shape
    groups = rows if rule.scope == "row" else 1
    cells = rows * columns // groups
    floats = torch.float64 if keys.dtype == torch.int64 else torch.float32
    sure, infinity = _bits(least_sure(floats), floats), BITS[floats][1]
    least, count, known = 0, rule.count(cells), None
    if (
        rule.threshold is not None
    ):  # every key ranks as `sure` at least, and so `least` takes as many bits as keys do
        least = max(_bits(rule.threshold, floats), sure - 1)
    elif rule.keep is not None:
        least, known = infinity, groups * count
    indptr = keys.new_empty(rows + 1, dtype=torch.int32)
    where = keys.new_empty(rows * columns if known is None else known, dtype=torch.int32)
    status = torch.empty(groups, dtype=torch.int32, pin_memory=keys.is_cuda)
    chunk = max(MIN_CHUNK, min(MAX_CHUNK, triton.next_power_of_2(cells)))
    args = keys, where, indptr, status, least, count, cells, columns
    constants = count > 0, by_norm, sure, infinity, chunk
    launch(_choose, keys.device, groups, args, constants, max(1, chunk // (32 * KEYS_PER_THREAD)))
    return Chosen(indptr, where, status, known)


def _blocks(source: Source, where: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Block columns [count] and values [count, bm, bk] of the cells in `where`."""
    x, block = source.x, source.block
    indices, values = where.new_empty(count), x.new_empty((count, *block))
    tile = _tile(block, x.element_size(), GATHER_BYTES)
    programs = block[0] // tile[0] * -(-count // tile[2])
    args = x, where, indices, values, *source.sizes, count
    if programs:
        launch(_gather, x.device, programs, args, (*source.constants, *tile), GATHER_WARPS)
    return indices, values
