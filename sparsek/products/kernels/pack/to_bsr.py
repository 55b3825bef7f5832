"""Selects and gathers the blocks of a dense matrix that a BSR stores, in plain Triton. `BSR.from_dense` on a GPU.

    w [M, K]  --_norms-->  keys [Mb, Kb]  --_choose-->  indptr, where: cell numbers  --_gather-->  indices, values

    _norms    reads w once. A block's key is its Frobenius norm as an integer of the same bits: the order of floats that
              are not negative is the order of their bits. If only zeros are distinguished from the rest, it is 0 or 1.
    _choose   one program for all blocks, or one per block row where each keeps its own share; torch where some rows
              keep one more. It finds the key of the last stored block by counting how many keys reach it: three are
              tried at once, so that each step leaves a quarter of the range. Then a scan lists the stored blocks; of
              equal keys the first.
    _gather   copies the stored blocks.

Where w is aligned, w and values move 16 bytes at once. Every sum has a fixed order, and there are no atomics. Ragged
sides are masked; nothing is padded.

A norm may be NaN or Inf, or so small that squares underflow and decide the selection. The kernels flag this in a word
of the host's memory, and the host then leaves the whole selection to torch, which checks again and refuses NaN and
Inf. Under `keep`, where the host knows the number of blocks, it waits for `_norms` only, while the GPU selects and
gathers.

Bottleneck: memory, and the host between two calls: `_choose` and `_gather` of one call take 18 us, in which the host
should begin the next. So calls under `keep` are recorded (launch/recorder.py): a repeated one launches `_norms` first,
and the host does the rest while it runs.

`products/ops/packing.py` registers functions with `products/formats/convert.py` that import this file at the first CUDA
tensor.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch.launch import launch_unspecialized
from sparsek.engine.launch.mark import set_mark, wait_for_mark
from sparsek.engine.launch.recorder import fault_word
from sparsek.engine.launch.tensors import SIZE_LIMIT, times
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Rule, least_sure, picked
from sparsek.products.formats.pattern import INT32_MAX, BlockPattern, grid_of
from sparsek.products.formats.two_four import BITS

# What `_norms` reads per step: rows of so many bytes, as many adjacent blocks as they hold, at least one; fewer than
# AHEAD steps are in flight. 8192^2 in bf16, blocks of 128, on an H200 (2026-11-22): 34 us with four rows of 2 KB, 59
# with 32 rows of one block, 60 with one step at a time, for which ptxas keeps two loads of a thread in flight.
NORM_ROWS, NORM_ROW_BYTES, NORM_WARPS, AHEAD = 4, 2048, 4, 6
GATHER_BYTES, GATHER_WARPS = 16384, 4
# Keys that `_choose` reads at once, and how many one program ranks: 1023 per lane would still be right. For more,
# torch's sort, which uses the whole card, should be faster (not measured).
MIN_CHUNK, MAX_CHUNK, KEYS_PER_THREAD = 256, 4096, 16
CELLS = 2**20

# Triton does not specialize for these: neither a size nor an alignment triggers a compilation. UNIT marks rows of
# whole 16-byte words: the elements of a word, otherwise 1.
_SIZES = ("rows", "columns", "w_row", "count", "cells", "across", "least")
_ANYWHERE = ("w", "keys", "where", "indptr", "word", "indices", "values")


@triton.jit
def _rows(
    w, offsets, lanes, i, down, rows, w_row,
    BM: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """TALL rows of block row `i`, from row `down` of it on, in the live lanes; None: all of them.

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
    w, offsets, lanes, i, rows, w_row, BM: tl.constexpr, UNIT: tl.constexpr, TALL: tl.constexpr, RAGGED: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """int32: 1 for each lane [.] of `offsets` [TALL, .] with anything but zeros, of either sign, in BM rows."""
    bits = tl.core.get_int_dtype(w.dtype.element_ty.primitive_bitwidth, True)
    found = tl.zeros(offsets.shape, bits)
    for down in tl.range(0, BM, TALL, num_stages=AHEAD):
        x = _rows(w, offsets, lanes, i, down, rows, w_row, BM, UNIT, TALL, RAGGED)
        found |= x.to(bits, bitcast=True) << 1
    return tl.max((found != 0).to(tl.int32), 0)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _norms(
    w, keys, word, rows, columns, w_row,
    SQUARES: tl.constexpr, SURE: tl.constexpr, INFINITY: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, RAGGED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """SIDE adjacent blocks, TALL rows of them per step. A row of a block has WIDE >= BK lanes.

    Keys are of norms if SQUARES; 1 goes to `word` if one is NaN or Inf, or too small to be reliable.
    """
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
    block = first + tl.arange(0, SIDE)
    if SQUARES:
        sums = tl.zeros(offsets.shape, tl.float64 if w.dtype.element_ty == tl.float64 else tl.float32)
        for down in tl.range(0, BM, TALL, num_stages=AHEAD):
            x = _rows(w, offsets, lanes, i, down, rows, w_row, BM, UNIT, TALL, RAGGED).to(sums.dtype)
            sums += x * x
        square = tl.sum(tl.reshape(tl.sum(sums, 0), (SIDE, WIDE)), 1)
        if square.dtype == tl.float64:
            key = tl.sqrt(square).to(tl.int64, bitcast=True)
        else:
            key = tl.sqrt_rn(square).to(tl.int32, bitcast=True)
        strange = ~(square < float("inf"))
        key = tl.where(strange, INFINITY, key)
        if tl.min(tl.where(block < across, key, INFINITY), 0) == 0:
            # Zeros, or their squares have underflowed.
            there = _there(w, offsets, lanes, i, rows, w_row, BM, UNIT, TALL, RAGGED, AHEAD)
            key = tl.maximum(key, tl.max(tl.reshape(there, (SIDE, WIDE)), 1).to(key.dtype))
        tl.store(word + tl.zeros(key.shape, tl.int32), 1, mask=strange | ((key > 0) & (key < SURE)))
    else:
        there = _there(w, offsets, lanes, i, rows, w_row, BM, UNIT, TALL, RAGGED, AHEAD)
        key = tl.max(tl.reshape(there, (SIDE, WIDE)), 1)
    tl.store(keys + (i * across + block), key, mask=block < across)


@triton.jit
def _rank(key, SURE: tl.constexpr):
    """Norms that are too small to be reliable rank alike; zero, and -1 past the last cell, rank below them."""
    return tl.where(key > 0, tl.maximum(key, SURE), key)


@triton.jit
def _read(keys, begin, cells, UNIT: tl.constexpr, CHUNK: tl.constexpr):
    """The keys [CHUNK] from `begin` on; -1 past the last cell."""
    lane = begin + tl.arange(0, CHUNK)
    source = keys + lane
    if UNIT > 1:
        source = tl.multiple_of(source, 16)
    return tl.load(source, mask=lane < times(cells, UNIT), other=-1)


@triton.jit
def _reach(key, one, two, three):
    """How many keys reach each of three thresholds, in ten bits each."""
    return (key >= one).to(tl.int32) + ((key >= two).to(tl.int32) << 10) + ((key >= three).to(tl.int32) << 20)


@triton.jit
def _last(
    keys, count, cells, UNIT: tl.constexpr, CHUNK: tl.constexpr, SURE: tl.constexpr, INFINITY: tl.constexpr
):
    """The key of the last of the `count` largest of `cells` keys, and an upper bound of how many with that key are
    among them.
    """
    own = _rank(_read(keys, 0, cells, UNIT, CHUNK), SURE)
    highest, lowest = own, tl.where(own < 0, INFINITY, own)
    for begin in range(CHUNK, cells, CHUNK):
        key = _rank(_read(keys, begin, cells, UNIT, CHUNK), SURE)
        highest = tl.maximum(highest, key)
        lowest = tl.where(key < 0, lowest, tl.minimum(lowest, key))
    # `reached` keys are at `low` or above, and `beyond` at `high` or above: reached >= count > beyond.
    low, high = tl.min(lowest, 0), tl.max(highest, 0) + 1
    reached, beyond = cells, 0
    while (high - low > 1) & (reached != count):
        step = (high - low + 3) >> 2
        one, two, three = low + step, low + 2 * step, low + 3 * step
        found = _reach(own, one, two, three)
        for begin in range(CHUNK, cells, CHUNK):
            found += _reach(_rank(_read(keys, begin, cells, UNIT, CHUNK), SURE), one, two, three)
        # Three counts of ten bits per lane become three of 21 bits in total.
        pair = (found & 1023).to(tl.int64) + ((found >> 10 & 1023).to(tl.int64) << 21)
        total = tl.sum(pair + ((found >> 20).to(tl.int64) << 42), 0)
        at_one, at_two, at_three = total & 0x1FFFFF, total >> 21 & 0x1FFFFF, total >> 42
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
    keys, where, indptr, word, least, count, cells, across,
    RANKED: tl.constexpr, CHECKED: tl.constexpr, SURE: tl.constexpr, INFINITY: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program has `cells` keys in order, of whole block rows of `across` blocks. It stores the `count` largest if
    RANKED, otherwise those over `least`, whose number goes to `word`. `where` receives the stored cells. CHECKED: keys
    are norms.
    """
    group = tl.program_id(0)
    first = group * cells
    keys += first
    if RANKED:
        start = group * count
        last, wanted = _last(keys, count, cells, UNIT, CHUNK, SURE, INFINITY)
    else:
        start = 0
        last, wanted = least.to(keys.dtype.element_ty), 0
    above_before, equal_before = 0, 0
    for begin in range(0, cells, CHUNK):
        cell = first + begin + tl.arange(0, CHUNK)
        key = _read(keys, begin, cells, UNIT, CHUNK)
        rank = _rank(key, SURE) if CHECKED else key
        above, equal = rank > last, rank == last
        # One scan counts both: larger keys in the low half, equal keys in the high half.
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        scan = tl.cumsum(both, 0) - both
        equals = equal_before + (scan >> 16)
        stored = above | (equal & (equals < wanted))
        at = start + above_before + (scan & 0xFFFF) + tl.minimum(equals, wanted)
        tl.store(where + at, cell, mask=stored)
        row = cell.to(tl.uint32) // across.to(tl.uint32)
        tl.store(indptr + row, at, mask=(key >= 0) & (row.to(tl.int32) * across == cell))
        total = tl.sum(both, 0)
        above_before += total & 0xFFFF
        equal_before += total >> 16
    found = above_before + tl.minimum(equal_before, wanted)
    if group == tl.num_programs(0) - 1:
        tl.store(indptr + (first + cells) // across, start + found)
    if not RANKED:
        tl.store(word, found)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def _gather(
    w, where, indices, values, rows, columns, w_row, count,
    BM: tl.constexpr, BK: tl.constexpr, UNIT: tl.constexpr, RAGGED: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """TALL rows of each of SIDE stored blocks, which are adjacent in `values`."""
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


class View(NamedTuple):
    """How a matrix [M, K] is read in blocks: its grid; rows, columns and the row stride; the programs of `_norms`;
    and, from BM on, the constants for which `_norms` and `_gather` are compiled.
    """

    block: tuple[int, int]
    grid: tuple[int, int]
    sizes: tuple[int, int, int]
    programs: int
    norms: tuple[Any, ...]
    gather: tuple[Any, ...]


class Source(NamedTuple):
    """A matrix and its View."""

    x: Tensor
    view: View


# `again(what, tensors, run)`: `run()`, which consists of launches and allocations and reads these tensors, or a
# recorded call of it. `what` and their shapes determine the rest of it.
Again = Callable[[Hashable, Sequence[Tensor], Callable[[], Any]], Any]


class PackResult(NamedTuple):
    """What a call under `keep` makes: the parts of a BSR; the word of host memory that is 1, once the mark of this
    thread is reached, if a norm may not decide; and from what that can be found out, all keys and the stored cells.
    """

    indptr: Tensor
    indices: Tensor
    values: Tensor
    word: Tensor
    keys: Tensor
    where: Tensor


def pack_bsr(
    w: Tensor,
    block: tuple[int, int],
    rule: Rule,
    again: Again = lambda what, tensors, run: run(),
) -> BSR | None:
    """The blocks of w [M, K] that `rule` selects, as in `convert.from_dense`. One sync.

    Any float dtype; rows without gaps, of a mask of elements too. None for unsupported inputs: other strides, sides
    near 2^31, an empty or lazily negated w, more than CELLS blocks to rank at once; and if norms do not decide.
    """
    mask, source = rule.mask, _source(w, block)
    if source is None:
        return None
    asked, (rows, columns) = source, source.view.grid
    if mask is not None and tuple(mask.shape) != (rows, columns):
        asked = _source(mask.view(torch.int8), block)
    groups, count, more = (1, 0, 0) if rule.keep is None else rule.split((rows, columns))
    if asked is None or ((count or more) and rows * columns // groups > CELLS):
        return None
    shape = source.view.sizes[:2]
    if count and not more:
        what = block, rule.keep, rule.scope
        made = finished(again(what, (w,), lambda: _kept(source, groups, count)[:4]), shape, block)
        return _examined(_kept(source, groups, count), shape, block) if made is None else made

    by_norm, word = rule.keep is not None or rule.threshold is not None, None
    if mask is not None and asked is source:
        keys = mask.to(torch.int32, memory_format=torch.contiguous_format)
    else:
        keys, word = _keys(asked, by_norm)
    where, indptr, found = _uneven(keys, rule) if more else _over(keys, rule, groups)
    set_mark(w.device)
    wait_for_mark(w.device)
    where = where if found is None else where[: _taken(found)]
    if word is not None and _taken(word) and _is_undecided(keys, where):
        return None
    indices, values = _gathered(source, where)
    if asked is not source:
        _, flags = _gathered(asked, where)
        values.masked_fill_(flags.view(torch.bool).logical_not_(), 0)
    return _assembled(shape, block, indptr, indices, values)


def finished(parts: Sequence[Tensor], shape: tuple[int, int], block: tuple[int, int]) -> BSR | None:
    """The BSR of the first four fields of a `PackResult`; None if its norms may not decide.

    It is assembled before the host waits, while the GPU works.
    """
    *parts, word = parts
    made = _assembled(shape, block, *parts)
    wait_for_mark(made.device)
    if int(word):
        _taken(word)
        return None
    return made


def _examined(kept: PackResult, shape: tuple[int, int], block: tuple[int, int]) -> BSR | None:
    """The BSR of a `PackResult`; None if norms do not decide."""
    wait_for_mark(kept.keys.device)
    _taken(kept.word)
    return None if _is_undecided(kept.keys, kept.where) else _assembled(shape, block, *kept[:3])


def _source(x: Tensor, block: tuple[int, int]) -> Source | None:
    """None for inputs that the kernels do not support."""
    if x.numel() == 0 or x.is_neg() or not (x.is_cuda or env.interpreting()):
        return None
    step, unit = x.stride()
    if (unit != 1 and x.shape[1] > 1) or step > INT32_MAX or max(x.shape) > SIZE_LIMIT:
        return None
    return Source(x, _view(tuple(x.shape), step, x.dtype, x.data_ptr() % 16 == 0, block))


@lru_cache(maxsize=1024)
def _view(
    shape: tuple[int, int], step: int, dtype: torch.dtype, aligned: bool, block: tuple[int, int]
) -> View:
    (rows, columns), unit = shape, 16 // dtype.itemsize
    if not aligned or step % unit or columns % unit:
        unit = 1
    grid = grid_of(shape, block)
    common = *block, unit, rows % block[0] != 0 or columns % block[1] != 0
    wide = triton.next_power_of_2(block[1])
    of_norms = NORM_ROWS, wide, max(1, NORM_ROW_BYTES // dtype.itemsize // wide)
    of_gather = _tile(block, GATHER_BYTES // dtype.itemsize)
    programs = grid[0] * -(-grid[1] // of_norms[2])
    return View(
        block, grid, (rows, columns, step), programs, (*common, *of_norms, AHEAD), (*common, *of_gather)
    )


def _tile(block: tuple[int, int], elements: int) -> tuple[int, int, int]:
    """TALL, WIDE and SIDE of a tile of so many elements.

    TALL is a power of two that divides the block's rows, WIDE one that holds its columns.
    """
    wide = triton.next_power_of_2(block[1])
    tall = min(block[0] & -block[0], elements // wide)
    return tall, wide, elements // (tall * wide)


def _taken(word: Tensor) -> int:
    """What a kernel wrote to a word of host memory, which is 0 again."""
    seen = word.numpy()
    value = int(seen[0])
    if value:
        seen[0] = 0
    return value


@lru_cache
def _bits(x: float, dtype: torch.dtype) -> int:
    """A float's bits as an integer."""
    return int(torch.tensor(x, dtype=dtype, device="cpu").view(BITS[dtype][0]))


def _floats(keys: torch.dtype) -> torch.dtype:
    return torch.float64 if keys == torch.int64 else torch.float32


@lru_cache
def _limits(keys: torch.dtype) -> tuple[int, int]:
    """SURE and INFINITY: the key of the least reliable norm, and that of infinity."""
    floats = _floats(keys)
    return _bits(least_sure(floats), floats), BITS[floats][1]


def _keys(source: Source, by_norm: bool) -> tuple[Tensor, Tensor]:
    """The keys of the blocks, [Mb, Kb]: of their norms, or 1 for a block that is not zero; and the word of `_norms`."""
    (x, view), word = source, fault_word(source.x.device)
    keys = x.new_empty(view.grid, dtype=torch.int64 if by_norm and x.dtype == torch.float64 else torch.int32)
    constants = by_norm, *_limits(keys.dtype), *view.norms
    launch_unspecialized(_norms, x.device, view.programs, (x, keys, word, *view.sizes), constants, NORM_WARPS)
    return keys, word


def _is_undecided(keys: Tensor, where: Tensor) -> bool:
    """Whether a norm is NaN or Inf, or that of a cell in `where` may be far off: it is small, and not 0. One sync."""
    stored, (sure, infinity) = keys.view(-1)[where], _limits(keys.dtype)
    return bool((keys == infinity).any() | ((stored > 0) & (stored < sure)).any())


def _kept(source: Source, groups: int, count: int) -> PackResult:
    """The blocks of the `count` largest norms of each group. The mark is set where the norms are known."""
    keys, word = _keys(source, True)
    set_mark(keys.device)
    where = keys.new_empty(groups * count, dtype=torch.int32)
    indptr = _choose_in(keys, where, groups, True, count=count)
    return PackResult(indptr, *_gathered(source, where), word, keys, where)


def _over(keys: Tensor, rule: Rule, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for all cells, which begins with those that are stored; indptr; and the word of their number."""
    by_norm, least = rule.threshold is not None or rule.keep is not None, 0
    sure, infinity = _limits(keys.dtype)
    if rule.threshold is not None:
        # No norm but 0 ranks below `sure`. So this changes nothing, and gives `least` the width of keys.
        least = max(_bits(rule.threshold, _floats(keys.dtype)), sure - 1)
    elif by_norm:
        least = infinity
    where, found = keys.new_empty(keys.numel(), dtype=torch.int32), fault_word(keys.device)
    return where, _choose_in(keys, where, groups, by_norm, found, least), found


def _uneven(keys: Tensor, rule: Rule) -> tuple[Tensor, Tensor, None]:
    """The stored cells, and indptr, where some block rows store one more than others: chosen by torch."""
    norms = keys.view(_floats(keys.dtype))
    stored = picked(norms.clamp(min=least_sure(norms.dtype)).masked_fill_(keys == 0, 0), rule)
    where = torch.nonzero_static(stored.view(-1), size=rule.count(keys.numel())).view(-1).to(torch.int32)
    indptr = where.new_zeros(keys.shape[0] + 1)
    indptr[1:] = stored.sum(1).cumsum(0)
    return where, indptr, None


def _choose_in(
    keys: Tensor,
    where: Tensor,
    groups: int,
    by_norm: bool,
    found: Tensor | None = None,
    least: int = 0,
    count: int = 0,
) -> Tensor:
    """Launches `_choose` for groups of block rows. Its indptr [Mb+1]."""
    (rows, columns), (sure, infinity) = keys.shape, _limits(keys.dtype)
    cells = rows * columns // groups
    indptr = keys.new_empty(rows + 1, dtype=torch.int32)
    chunk = min(MAX_CHUNK, max(MIN_CHUNK, 1 << (cells - 1).bit_length()))
    args = keys, where, indptr, found, least, count, cells, columns
    constants = bool(count), by_norm, sure, infinity, 1 if cells % 4 else 4, chunk
    warps = max(1, chunk // (32 * KEYS_PER_THREAD))
    launch_unspecialized(_choose, keys.device, groups, args, constants, warps)
    return indptr


def _gathered(source: Source, where: Tensor) -> tuple[Tensor, Tensor]:
    """The indices and values of the blocks at these cells."""
    (x, view), count = source, where.numel()
    indices, values = where.new_empty(count), x.new_empty((count, *view.block))
    tall, _, side = view.gather[-3:]
    programs = view.block[0] // tall * -(-count // side)
    if programs:
        args = x, where, indices, values, *view.sizes, count
        launch_unspecialized(_gather, x.device, programs, args, view.gather, GATHER_WARPS)
    return indices, values


def _assembled(
    shape: tuple[int, int], block: tuple[int, int], indptr: Tensor, indices: Tensor, values: Tensor
) -> BSR:
    pattern = BlockPattern.of_fields({"shape": shape, "block": block, "indptr": indptr, "indices": indices})
    return BSR.of_fields({"pattern": pattern, "values": values, "order": None})
