"""Device code that reads the schedule of attention's backward pass (plan/attention_grad_schedule.py)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsek.plan.attention_grad_schedule import TILE_FIELDS, VISIT_FIELDS

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
