"""Device code that reads the schedule of attention's backward pass (attn/plan/attention_grad_schedule.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek.attn.kernels.forward.rules import member_bit
from sparsek.attn.plan.attention_grad_schedule import TILE_FIELDS, VISIT_FIELDS

TILE = gl.constexpr(TILE_FIELDS)
VISIT = gl.constexpr(VISIT_FIELDS)


@gluon.jit
def tile_at(tiles, t):
    """Record t: batch item, head of keys, first key, first visit, masked pairs of steps, all pairs."""
    r = tiles + TILE * t
    return gl.load(r), gl.load(r + 1), gl.load(r + 2), gl.load(r + 3), gl.load(r + 4), gl.load(r + 5)


@gluon.jit
def step_at(T: gl.constexpr, visits, first, i):
    """Step i of the tile whose visits begin at `first`: first query, head, entry of the partial list or -1, ticket."""
    if T.subs == 2:
        v = visits + VISIT * (first + i // 2)
        pos = gl.load(v) + i % 2 * 64
    else:
        v = visits + VISIT * (first + i)
        pos = gl.load(v)
    return pos, gl.load(v + 1), gl.load(v + 2), gl.load(v + 3)


@gluon.jit
def word_at(T: gl.constexpr, visits, first, i, end, rules):
    """The only word of members of step i: all ones from step `end` on, and for blocks without a rule. In pairs of
    blocks, which all have rules, 0 for a step that only makes their number even.

    Read a step ahead, because its address comes of another load.
    """
    word = 0
    if T.words == 1:
        entry = gl.load(visits + VISIT * (first + i // T.subs) + 2, mask=i < end, other=-1)
        word = gl.load(rules + entry, mask=entry >= 0, other=0 if T.paired else -1)
    return word


@gluon.jit
def own_bits(T: gl.constexpr, HALF: gl.constexpr, word):
    """The bits of a half of a pair of key blocks, which come first."""
    if T.paired:
        word = word >> (HALF * (T.block[0] // T.members))
    return word


@gluon.jit
def sees(T: gl.constexpr, HALF: gl.constexpr, word):
    """Whether a query of a step sees a key of this half of a pair of key blocks."""
    return own_bits(T, HALF, word) & ((1 << T.block[0] // T.members) - 1) != 0


@gluon.jit
def read_halves(T: gl.constexpr, word, good):
    """Which halves of K a product with the dS of a step reads. `good`: a half that a query of the tile sees.

    Where no query sees a half, its dS is 0, and the other one is read in its place: keys that nobody sees may be NaN.
    """
    first = sees(T, 0, word)
    second = sees(T, 1, word)
    left = gl.where(first, 0, gl.where(second, 1, good))
    right = gl.where(second, 1, gl.where(first, 0, good))
    return left, right


@gluon.jit
def of_members(T: gl.constexpr, start, word, visits, first, i, rules):
    """What S of step i starts from, [queries]: -inf where a query's bit is 0. `word`: the only one."""
    query = i % T.subs * T.queries + gl.arange(0, T.queries, start.type.layout)
    if T.words == 1:
        bit = (word >> (query // T.members)) & 1 != 0
    else:
        entry = gl.load(visits + VISIT * (first + i // T.subs) + 2)
        bit = member_bit(T, rules + gl.maximum(entry, 0) * T.words, query) | (entry < 0)
    return gl.where(bit, start, float("-inf"))


@gluon.jit
def half_at(T: gl.constexpr, SIDE: gl.constexpr, visits, first, pair, there):
    """Half SIDE of a pair of 64 queries: first query, head, ticket. 0 for those not `there`.

    A pair is a visit of 128 queries, or two visits of 64.
    """
    if T.block[0] == 128:
        v = visits + VISIT * (first + pair)
        pos = gl.load(v, mask=there, other=0) + 64 * SIDE
    else:
        v = visits + VISIT * (first + 2 * pair + SIDE)
        pos = gl.load(v, mask=there, other=0)
    return pos, gl.load(v + 1, mask=there, other=0), gl.load(v + 3, mask=there, other=0)
