"""Device pieces of hopper.attention_fwd: its producer warp, and the records of the schedule.

Records: see attn/plan/attention_schedule.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek.attn.kernels.forward.pipeline import after
from sparsek.attn.kernels.forward.rules import bits_of
from sparsek.attn.kernels.forward.softmax import prefetch
from sparsek.attn.plan.attention_schedule import FIELDS
from sparsek.engine.launch.gluon import tma_load

RECORD = gl.constexpr(FIELDS)
NOWHERE = gl.constexpr(1 << 22)  # a block column beyond every key


@gluon.jit
def tile_at(T: gl.constexpr, tiles, t):
    """Record t: position, batch item, head, first partial entry, masked steps, first full entry, all steps, slot."""
    SUB: gl.constexpr = T.block[1] // T.keys
    r = tiles + RECORD * t
    masked = gl.load(r + 4) * SUB
    steps = masked + gl.load(r + 6) * SUB
    # fmt: off
    return gl.load(r), gl.load(r + 1), gl.load(r + 2), gl.load(r + 3), masked, gl.load(r + 5), steps, gl.load(r + 7)
    # fmt: on


@gluon.jit
def bounds_at(T: gl.constexpr, bounds, b, h, at, q_len, kv_len):
    """The first key that queries `at` of head h see, and the end: those of the mask if the config reads intervals."""
    lo_ptr, hi_ptr, bound_item, bound_head, bound_group = bounds
    if T.interval:
        base = b * bound_item + h // bound_group * bound_head
        lo = gl.load(lo_ptr + base + at, mask=at < q_len, other=0)
        hi = gl.load(hi_ptr + base + at, mask=at < q_len, other=0)
    else:
        lo = at * 0
        hi = at * 0 + kv_len
    return lo, hi


@gluon.jit
def inner_bounds(T: gl.constexpr, bounds, b, h, pos, q_len, kv_len):
    """First and end of the keys that are from lo to hi for all 64 rows from query `pos` on."""
    lo_ptr, hi_ptr, bound_item, bound_head, bound_group = bounds
    if T.interval:
        QUERIES: gl.constexpr = 64 // T.pack
        EACH: gl.constexpr = (QUERIES + 31) // 32
        # Every warp has all of them, so that they meet in registers.
        at = pos + gl.arange(0, QUERIES, gl.BlockedLayout([EACH], [32], [4], [0]))
        base = b * bound_item + h // bound_group * bound_head
        lo = gl.load(lo_ptr + base + at, mask=at < q_len, other=0)
        hi = gl.load(hi_ptr + base + at, mask=at < q_len, other=kv_len)
        return gl.max(lo, 0), gl.min(hi, 0)
    else:
        return 0, kv_len


class Where(NamedTuple):
    """A warpgroup's 64 rows of a tile: the first partial entry and the first full one, the first row in the mask's
    block, bounds of keys; with ALiBi, positions and slopes; with members, see `by_members`.
    """

    p_begin: Any
    f_begin: Any
    row: Any
    lo: Any
    hi: Any
    place: Any
    slope: Any
    inner: Any
    ends: Any


@gluon.jit
def masked_column(T: gl.constexpr, partial, begin, i):
    """Block column of masked step i. A tile without blocks has one step without an entry, beyond the last key."""
    SUB: gl.constexpr = T.block[1] // T.keys
    return gl.load(partial + begin + i // SUB, mask=begin >= 0, other=NOWHERE)


@gluon.jit
def bits_at(T: gl.constexpr, rules, begin, row, i, masked):
    """The bits of 64 rows, from row `row` of the mask's block on, in masked step i; 0 from step `masked` on."""
    SUB: gl.constexpr = T.block[1] // T.keys
    return bits_of(T, rules + (begin + i // SUB) * T.words, row // T.pack, (i < masked) & (begin >= 0))


@gluon.jit
def load_step(T: gl.constexpr, k_desc, v_desc, b, kv, key, slot, phase, k_s, v_s, bars):
    """K and V of the keys from `key` on, into a slot. The next slot and its phase."""
    KEYS: gl.constexpr = T.keys
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    # Wait until every warpgroup has multiplied the K in this slot.
    mbarrier.wait(k_empty.index(slot), phase)
    mbarrier.expect(k_full.index(slot), KEYS * T.dim * 2)
    tma_load(k_desc, [b, kv, key, 0], k_full.index(slot), k_s.index(slot))
    mbarrier.wait(v_empty.index(slot), phase)  # and the V
    mbarrier.expect(v_full.index(slot), KEYS * T.v_dim * 2)
    tma_load(v_desc, [b, kv, key, 0], v_full.index(slot), v_s.index(slot))
    return after(slot, phase, T.stages)


@gluon.jit
def load(
    T: gl.constexpr, q_desc, k_desc, v_desc, tiles, count, partial, full, group, q_s, k_s, v_s, bars, rules=0
):
    """Producer warp: Q of every tile, then K and V of its steps; if T.passes, of those that some row sees."""
    SUB: gl.constexpr = T.block[1] // T.keys
    POSITIONS: gl.constexpr = 64 // T.pack
    KEYS: gl.constexpr = T.keys
    GROUPS: gl.constexpr = T.groups
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    slot = 0
    phase = 1  # waiting on the phase before a barrier's first returns at once, so every slot starts empty
    q_slot = 0
    q_phase = 1
    for t in range(gl.program_id(0), gl.load(count), gl.num_programs(0)):
        pos, b, h, p_begin, masked, f_begin, steps, part = tile_at(T, tiles, t)
        kv = h // group
        following = t + gl.num_programs(0)
        prefetch(tiles + RECORD * gl.where(following < gl.load(count), following, t))
        for w in gl.static_range(GROUPS):
            # Wait until warpgroup w has finished with this slot's Q.
            mbarrier.wait(q_empty.index(q_slot * GROUPS + w), q_phase)
            landed = q_full.index(q_slot * GROUPS + w)
            mbarrier.expect(landed, 64 * T.dim * 2)
            tma_load(
                q_desc, [b, h // T.pack, pos + w * POSITIONS, 0, 0], landed, q_s.index(q_slot * GROUPS + w)
            )
        q_slot += 1
        if q_slot == T.q_slots:
            q_slot = 0
            q_phase ^= 1
        for i in range(steps):
            if i < masked:
                col = masked_column(T, partial, p_begin, i)
            else:
                col = gl.load(full + f_begin + (i - masked) // SUB)
            key = col * T.block[1] + i % SUB * KEYS
            if T.passes:
                bits = bits_at(T, rules, p_begin, pos % T.block[0] * T.pack, i, masked)
                if (i >= masked) | (bits != 0):
                    slot, phase = load_step(T, k_desc, v_desc, b, kv, key, slot, phase, k_s, v_s, bars)
            else:
                slot, phase = load_step(T, k_desc, v_desc, b, kv, key, slot, phase, k_s, v_s, bars)
