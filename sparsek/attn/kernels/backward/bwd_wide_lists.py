"""Device pieces of attention's backward pass for wide heads: lists of blocks, rules of partial ones, and sums."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek.attn.kernels.forward.parts import FIELDS, share

ORDER = gl.constexpr(FIELDS)
# Parameters of both kernels for which Triton does not specialize: a new length or mask compiles nothing.
NUMBERS = [
    "q_len", "kv_len", "rows", "plane", "tiles", "heads", "group", "shared", "mask_step", "order_item", "order_group",
    "rule_step", "entries", "lead", "section", "all_heads", "slots", "window", "sunk",
]  # fmt: skip
POINTERS = [
    "sums", "order", "p_starts", "p_counts", "p_indices", "f_starts", "f_counts", "f_indices", "entry_of", "lo", "hi",
    "rules", "bits",
]  # fmt: skip


@gluon.jit
def tile_of(order, ROWS: gl.constexpr, inside, length):
    """A tile of this order entry, its first row, the first and last of its blocks, and its slot.

    A CTA without a tile gets one without blocks after the last row, where TMA stores nothing.
    """
    tile = gl.load(order)
    first = tile * ROWS + inside
    there = (tile >= 0) & (first < length)
    return (
        gl.where(there, tile, 0),
        gl.where(there, first, length),
        gl.where(there, gl.load(order + 1), 0),
        gl.where(there, gl.load(order + 2), 0),
        gl.where(there, gl.load(order + 3), -1),
    )


class Taken(NamedTuple):
    """Entries of a list: the first partial one and their number, the first full one and their number. `before`: the
    blocks of this list and those before.
    """

    p_first: Any
    p_count: Any
    f_first: Any
    f_count: Any
    before: Any


@gluon.jit
def taken(lists, row, begin, end, before):
    """Of the list in `row`, the entries that are blocks `begin` to `end` of a tile that has `before` blocks already."""
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices = lists
    partial = gl.load(p_counts + row)
    full = gl.load(f_counts + row)
    p_first, p_count, f_first, f_count = share(partial, full, begin, end, before)
    p_first += gl.load(p_starts + row)
    f_first += gl.load(f_starts + row)
    return Taken(p_first, p_count, f_first, f_count, before + partial + full)


@gluon.jit
def visited(lists, entries, i):
    """The tile of the other side that block i of `entries` visits."""
    p_starts, p_counts, p_indices, f_starts, f_counts, f_indices = lists
    where = f_indices + entries.f_first + i - entries.p_count
    if i < entries.p_count:
        where = p_indices + entries.p_first + i
    return gl.load(where)


@gluon.jit
def bounds_of(T: gl.constexpr, lo, hi, query, q_len, kv_len):
    """First key and end of the keys of every query."""
    if T.interval:
        there = query < q_len
        return gl.load(lo + query, mask=there, other=0), gl.load(hi + query, mask=there, other=0)
    else:
        return query * 0, query * 0 + kv_len


@gluon.jit
def put_sums(sums, x, width, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A part's float32 sums into its slot, whose rows have `width` columns."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, x.type.layout))
    col = gl.arange(0, COLS, gl.SliceLayout(0, x.type.layout))
    gl.store(sums + (gl.expand_dims(row * width, 1) + gl.expand_dims(col, 0)), x)
