"""Device code of hopper.attention_paged: its tiles, the steps of each, and the scores that a step may use.

T is the kernel's Config. `lists` are the arguments p_starts to longest of the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek.attn.kernels.forward.rules import by_bounds
from sparsek.attn.kernels.paged.schedule import FAR as FARTHEST
from sparsek.attn.kernels.paged.schedule import FIELDS
from sparsek.attn.kernels.paged.unions import JOINED

RECORD = gl.constexpr(FIELDS)
FAR = gl.constexpr(FARTHEST)  # beyond every key


@gluon.jit
def tile_number(t, total):
    """The tile in place t of `total`. Every second whole round of CTAs goes backwards, the last one does."""
    ctas = gl.num_programs(0)
    turn = t // ctas
    back = (total // ctas - 1 - turn) % 2 == 0
    return gl.where(back & (turn < total // ctas), turn * ctas + ctas - 1 - t % ctas, t)


@gluon.jit
def tile_at(T: gl.constexpr, record, h, lists):
    """Masked steps, all steps, and where they are: six numbers, see `masked_key` and `whole_key`."""
    if T.lists:
        SUB: gl.constexpr = T.list_block[1] // T.keys
        p_starts, p_counts, partial, p_size, f_starts, f_counts, full, f_size, rows, of_list, longest = lists
        row = gl.load(record + (JOINED if T.members > 0 else 5))
        there = row < rows
        row += h // of_list * rows
        p_count = gl.minimum(gl.maximum(gl.load(p_counts + row, mask=there, other=0), 0), longest)
        f_count = gl.minimum(gl.maximum(gl.load(f_counts + row, mask=there, other=0), 0), longest - p_count)
        begin = gl.load(p_starts + row, mask=there, other=0)
        f_begin = gl.load(f_starts + row, mask=there, other=0)
        none = p_count + f_count == 0
        masked = gl.where(none, 1, p_count * SUB)
        where = gl.where(none, -1, begin), f_begin, begin, begin, begin, begin
        return masked, masked + f_count * SUB, where
    else:
        r = record + 5
        where = gl.load(r + 2), gl.load(r + 3), gl.load(r + 4), gl.load(r + 5), gl.load(r + 6), gl.load(r + 7)
        return gl.load(r), gl.load(r + 1), where


@gluon.jit
def listed_key(T: gl.constexpr, entries, size, begin, i):
    """First key of step i of a list. Entries that do not exist, or are not blocks, stand beyond every key."""
    SUB: gl.constexpr = T.list_block[1] // T.keys
    LAST: gl.constexpr = FAR // T.list_block[1]
    at = begin + i // SUB
    block = gl.load(entries + at, mask=(begin >= 0) & (at >= 0) & (at < size), other=-1)
    return gl.where((block >= 0) & (block < LAST), block * T.list_block[1] + i % SUB * T.keys, FAR)


@gluon.jit
def masked_key(T: gl.constexpr, where, lists, i):
    """First key of masked step i."""
    a, b, c, d, s, f = where
    if T.lists:
        return listed_key(T, lists[2], lists[3], a, i)
    else:
        block = gl.where(i < b, a + i, gl.where(i < d, c + i - b, s + i - d))
        return block * T.keys


@gluon.jit
def whole_key(T: gl.constexpr, where, blocks, lists, i):
    """First key of whole step i, counted from the masked ones; `blocks` are at the window."""
    a, b, c, d, s, f = where
    if T.lists:
        return listed_key(T, lists[6], lists[7], b, i)
    else:
        return gl.where(i < blocks, f + i, i - blocks) * T.keys


@gluon.jit
def allowed(T: gl.constexpr, s, key, lo, hi, sunk):
    """Scores of the keys from `key` on that are from lo to hi, or below `sunk`, and -inf elsewhere."""
    if T.sinks:
        return by_bounds(T, s, key, lo, hi, sunk)
    else:
        return by_bounds(T, s, key, lo, hi)


@gluon.jit
def within(T: gl.constexpr, s, tile, lists, i, lo, hi, sunk):
    """Scores of whole step i. An entry of a list may be no block of the request's keys, or reach beyond them."""
    if T.lists:
        where, masked, blocks, length = tile
        key = whole_key(T, where, blocks, lists, i)
        if key + T.keys > length:
            s = allowed(T, s, key, lo, hi, sunk)
    return s
