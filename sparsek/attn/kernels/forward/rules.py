"""Device code: the rule of a partial block, which decides the keys that each of its queries sees. It is stated here for
all kernels, once for each layout of scores, so that who changes it sees all of them.

    rule of the block's entry < 0, or no rules     keys from lo of the query to its hi
    rule >= 0                                      keys whose bit is 1: key % 32 of a word of the query
    by members                                     keys from lo to hi if the bit of the token is 1, or at the ends

By members `rules` are words of the entry, with a bit for each token of the tile; the ends are the last `window` keys of
an interval and its first `sinks`.

`bits` are int32 words [rules, BM, BK / 32] for blocks of BM queries and BK keys. An expression that functions of the
backward pass share changes the order of instructions in some of them, so each has its own.
"""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek.attn.mask.lists import Members


def named(c: Any) -> str:
    """The rules that a config is compiled for; without any only the end of the keys."""
    found = c.true_names("interval", "bits")
    found += [f"members of {c.members}"] * bool(c.members) + ["ends without a bit"] * c.member_ends
    return "rules " + ("+".join(found) or "ends")


class Ruled:
    """Of a config, what the rule of members needs: see `Members`."""

    block: tuple[int, int]
    members: int

    @property
    def words(self) -> int:
        """Words of 32 bits of an entry."""
        return Members(self.members).words(self.block[0]) if self.members else 0


# Plain Triton: a tile of any shape.


@triton.jit
def of_queries(x, KEYS_FIRST: tl.constexpr):
    """One number per query, as a row or a column of a tile of scores: [queries, 1], or [1, queries]."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def of_keys(x, KEYS_FIRST: tl.constexpr):
    """One number per key: [1, keys], or [keys, 1]."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def admitted(
    low, high, rules, bits, entry, inside, first, inner, window, opening,
    BM: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, MEMBERS: tl.constexpr, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """bool [tile_m, TN], KEYS_FIRST [TN, tile_m]: the rule of a partial block for TN keys from `first` on.

    `inside` [tile_m] and `inner` count queries and keys from the block's corner. MEMBERS: rows of a token, 0 if not by
    members; then `window` and `opening` keys at the ends of low to high need no bit, or both are None.
    """
    c = tl.arange(0, TN)
    if MEMBERS:
        WORDS: tl.constexpr = (BM // MEMBERS + 31) // 32
        token = inside // MEMBERS
        word = tl.load(rules + (tl.zeros_like(token) + entry).to(tl.int64) * WORDS + token // 32)
        member = (word >> (token % 32)) & 1 != 0
        key = of_keys(first + c, KEYS_FIRST)
        if window is None:
            low = tl.where(member, low, 2147483647)
            return (of_queries(low, KEYS_FIRST) <= key) & (key < of_queries(high, KEYS_FIRST))
        else:
            ok = (of_queries(low, KEYS_FIRST) <= key) & (key < of_queries(high, KEYS_FIRST))
            at_ends = key >= of_queries(high - window, KEYS_FIRST)
            at_ends = at_ends | (key < of_queries(low + opening, KEYS_FIRST))
            return ok & (at_ends | of_queries(member, KEYS_FIRST))
    elif bits is None:
        key = of_keys(first + c, KEYS_FIRST)
        return (of_queries(low, KEYS_FIRST) <= key) & (key < of_queries(high, KEYS_FIRST))
    else:
        WORDS: tl.constexpr = BK // 32
        rule = tl.load(rules + entry)
        words = bits + tl.maximum(rule, 0).to(tl.int64) * (BM * WORDS) + (inside * WORDS + inner // 32)
        ok = (of_queries(inside, KEYS_FIRST) < 0) & (of_keys(c, KEYS_FIRST) < 0)
        for w in tl.static_range((TN + 31) // 32):
            word = of_queries(tl.load(words + w, mask=rule >= 0, other=0), KEYS_FIRST)
            bit = (word >> of_keys((inner + c) % 32, KEYS_FIRST)) & 1
            ok = ok | ((bit != 0) & of_keys(c // 32 == w, KEYS_FIRST))
        if low is not None:
            key = of_keys(first + c, KEYS_FIRST)
            within = (of_queries(low, KEYS_FIRST) <= key) & (key < of_queries(high, KEYS_FIRST))
            ok = ok | ((rule < 0) & within)
        return ok


# Gluon: a query without its bit begins at its window. These numbers broadcast to each other.


@gluon.jit
def member_bit(T: gl.constexpr, words, row):
    """Whether the bit of a row of the mask's block is set in the words of an entry."""
    bit = row // T.members
    if T.words == 1:
        return (gl.load(words) >> bit) & 1 != 0
    else:
        return (gl.load(words + bit // 32) >> (bit % 32)) & 1 != 0


@gluon.jit
def bits_of(T: gl.constexpr, words, query, there):
    """Those of a warpgroup's 64 rows of an entry, from query `query` of the block on. 0 unless `there`."""
    BITS: gl.constexpr = 64 // T.pack // T.members
    first = query // T.members
    words += first // 32
    found = gl.load(words, mask=there, other=0)
    if BITS > 32:
        found = found | gl.load(words + 1, mask=there, other=0)
    if BITS < 32:
        found = (found >> (first % 32)) & ((1 << BITS) - 1)
    return found


@gluon.jit
def member_bounds(T: gl.constexpr, bit, lo, hi, ends):
    """The first key that a row sees, and the end of its sinks, which begin at `lo`: none where its bit is set.

    `ends`: window and sinks, in keys; None for neither.
    """
    if T.member_ends:
        window, sinks = ends
        return gl.where(bit, lo, gl.maximum(lo, hi - window)), gl.where(bit, lo, gl.minimum(lo + sinks, hi))
    else:
        return gl.where(bit, lo, hi), lo


# Gluon, forward: scores [rows, T.keys] in wgmma's layout, where no function moves a score to another thread. Intervals
# and bits are words of 32 keys, which can be made while wgmma still computes the scores; members follow it. Scores are
# viewed as [rows, words, 4, 4, 2]: a thread has one of the second four, so the bits of its scores are constants, and
# R2P tests two of them at once.


@gluon.jit
def by_words(T: gl.constexpr, s, words):
    """Scores whose bit is 1, -inf elsewhere. words: [rows, T.keys / 32, 4]; bit k of word w at place p is key 32 w + 2
    p + k.
    """
    WORDS: gl.constexpr = T.keys // 32
    view = s.reshape((64, WORDS, 4, 4, 2))
    EIGHT: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, view.type.layout))
    eight = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, EIGHT))) * 8
    ONE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, view.type.layout))
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, ONE)))
    bit = 1 << (eight[None, None, :, None, None] + one[None, None, None, None, :])
    # By PTX: LLVM would pack the results of the tests into numbers, and unpack them.
    PTX: gl.constexpr = """{ .reg .pred p; .reg .b32 x; and.b32 x, $2, $3; setp.ne.b32 p, x, 0;
    selp.f32 $0, $1, 0fFF800000, p; }"""
    given = [view, words[:, :, None, :, None], bit]
    view = gl.inline_asm_elementwise(PTX, "=f,f,r,r", given, dtype=gl.float32, is_pure=True, pack=1)
    return gl.convert_layout(view.reshape((64, T.keys)), s.type.layout)


@gluon.jit
def no_words(T: gl.constexpr):
    """Words [64 rows, T.keys / 32, 4 places] of no key, in the layout in which `by_words` reads them."""
    KEYS: gl.constexpr = T.keys
    WORDS: gl.constexpr = T.keys // 32
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    view = gl.zeros((64, KEYS), gl.float32, S).reshape((64, WORDS, 4, 4, 2))
    LAYOUT: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, view.type.layout))
    return gl.zeros((64, WORDS, 4), gl.int32, LAYOUT)


@gluon.jit
def bits_from(first):
    """Words with 1 from bit `first` on, everywhere if that is below 0, nowhere if it is above 31."""
    PTX: gl.constexpr = "{ .reg .s32 x; max.s32 x, $1, 0; shl.b32 $0, -1, x; }"
    return gl.inline_asm_elementwise(PTX, "=r,r", [first], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def interval_words(T: gl.constexpr, key0, lo, hi, sunk=None):
    """Words of keys from key0 on that are from lo to hi, or below `sunk`, of each row."""
    none = no_words(T)
    WORDS: gl.constexpr = none.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, WORDS)
    w = gl.arange(0, T.keys // 32, gl.SliceLayout(0, gl.SliceLayout(2, WORDS))) * 32
    place = key0 + gl.arange(0, 4, gl.SliceLayout(0, ROW)) * 2
    EACH: gl.constexpr = gl.SliceLayout(1, ROW)
    first = gl.convert_layout(lo, EACH)[:, None] - place[None, :]
    end = gl.convert_layout(hi, EACH)[:, None] - place[None, :]
    found = bits_from(first[:, None, :] - w[None, :, None]) & ~bits_from(end[:, None, :] - w[None, :, None])
    if sunk is not None:
        end = gl.convert_layout(sunk, EACH)[:, None] - place[None, :]
        found = found | ~bits_from(end[:, None, :] - w[None, :, None])
    return found


@gluon.jit
def stored_words(T: gl.constexpr, words, row):
    """Words of rows from `row` of the mask's block on, from those that are stored of its rule."""
    none = no_words(T)
    WORDS: gl.constexpr = none.type.layout
    ROW: gl.constexpr = gl.SliceLayout(2, WORDS)
    r = gl.arange(0, 64, gl.SliceLayout(1, ROW))
    w = gl.arange(0, T.keys // 32, gl.SliceLayout(0, ROW))
    found = gl.load(words + ((row + r) // T.pack)[:, None] * (T.block[1] // 32) + w[None, :])
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, WORDS))) * 2
    return found[:, :, None] >> place[None, None, :]


@gluon.jit
def by_bounds(T: gl.constexpr, s, key0, lo, hi, sunk=None):
    """Scores of keys from key0 on that are from lo to hi, or below `sunk`; -inf elsewhere."""
    return by_words(T, s, interval_words(T, key0, lo, hi, sunk))


@gluon.jit
def by_members(T: gl.constexpr, s, key0, words, row, lo, hi, inner, ends):
    """Scores of keys from key0 on after the rule of members. Row 0 is row `row` of the mask's block, of `T.pack` heads.

    `inner`: keys from its first to its second number are from lo to hi for every row.
    """
    KEYS: gl.constexpr = T.keys
    r = (row + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout))) // T.pack
    bit = member_bit(T, words, r)
    if T.member_ends:
        first, end = member_bounds(T, bit, lo, hi, ends)
        key = gl.expand_dims(gl.arange(0, KEYS, gl.SliceLayout(0, s.type.layout)), 0)
        window = (key >= gl.expand_dims(first - key0, 1)) & (key < gl.expand_dims(hi - key0, 1))
        sunk = (key >= gl.expand_dims(lo - key0, 1)) & (key < gl.expand_dims(end - key0, 1))
        s = gl.where(window | sunk, s, float("-inf"))
    else:
        begin, end = inner
        if (key0 >= begin) & (key0 + KEYS <= end):
            s = gl.where(gl.expand_dims(bit, 1), s, float("-inf"))
        else:
            s = by_bounds(T, s, key0, gl.where(bit, lo, hi), hi)
    return s


# Gluon, backward: scores of any layout, of queries and keys that broadcast to them.


@gluon.jit
def by_entry(T: gl.constexpr, s, entry, low, high, query, key, rules, bits, ends=None):
    """Scores after the rule of a partial block's entry."""
    BM: gl.constexpr = T.block[0]
    BK: gl.constexpr = T.block[1]
    if T.members > 0:
        bit = member_bit(T, rules + entry * T.words, query % BM)
        first, end = member_bounds(T, bit, low, high, ends)
        seen = (first <= key) & (key < high)
        if T.member_ends:
            seen = seen | ((low <= key) & (key < end))
        s = gl.where(seen, s, float("-inf"))
    elif T.bits:
        rule = gl.load(rules + entry)
        if rule >= 0:
            words = bits + rule.to(gl.int64) * (BM * (BK // 32))
            word = gl.load(words + (query % BM * (BK // 32) + key % BK // 32))
            s = gl.where((word >> (key % 32)) & 1 != 0, s, float("-inf"))
        else:
            s = gl.where((low <= key) & (key < high), s, float("-inf"))
    else:
        s = gl.where((low <= key) & (key < high), s, float("-inf"))
    return s


@gluon.jit
def by_stage(T: gl.constexpr, s, keys, first, end, kv_len):
    """Scores of keys from `first` to `end` of their query, -inf elsewhere. Bounds are float bits in shared memory."""
    if T.interval:
        COL: gl.constexpr = gl.SliceLayout(0, s.type.layout)
        low = first.reshape((T.queries,)).load(COL).to(gl.int32, bitcast=True)
        s = gl.where(keys >= gl.expand_dims(low, 0), s, float("-inf"))
        high = end.reshape((T.queries,)).load(COL).to(gl.int32, bitcast=True)
        return gl.where(keys < gl.expand_dims(high, 0), s, float("-inf"))
    else:
        return gl.where(keys < kv_len, s, float("-inf"))


@gluon.jit
def by_step(T: gl.constexpr, s, entry, key, pos, rules, bits, first, end, kv_len, ends=None):
    """Scores [64 keys, queries of a step] after the rule of a partial block's entry, with bounds as for `by_stage`."""
    keys = gl.expand_dims(key + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)), 1)
    if T.members > 0 and T.member_ends:
        COL: gl.constexpr = gl.SliceLayout(0, s.type.layout)
        QUERIES: gl.constexpr = T.queries
        query = gl.expand_dims(pos % T.block[0] + gl.arange(0, QUERIES, COL), 0)
        low = query * 0
        high = low + kv_len
        if T.interval:
            low = gl.expand_dims(first.reshape((QUERIES,)).load(COL).to(gl.int32, bitcast=True), 0)
            high = gl.expand_dims(end.reshape((QUERIES,)).load(COL).to(gl.int32, bitcast=True), 0)
        s = by_entry(T, s, entry, low, high, query, keys, rules, bits, ends)
    elif T.bits:
        rule = gl.load(rules + entry)
        if rule >= 0:
            words = bits + rule.to(gl.int64) * (T.block[0] * (T.block[1] // 32))
            query = gl.expand_dims(
                pos % T.block[0] + gl.arange(0, T.queries, gl.SliceLayout(0, s.type.layout)), 0
            )
            word = gl.load(words + (query * (T.block[1] // 32) + keys % T.block[1] // 32))
            s = gl.where((word >> (keys % 32)) & 1 != 0, s, float("-inf"))
        else:
            s = by_stage(T, s, keys, first, end, kv_len)
    else:
        s = by_stage(T, s, keys, first, end, kv_len)
    return s
