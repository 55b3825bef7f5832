"""Device pieces of attention's backward pass: rules of partial blocks on scores with keys down and queries across."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def within_bounds(T: gl.constexpr, s, keys, pos, base, lists, kv_len, q_len):
    """Scores of keys between the bounds of their query, -inf elsewhere."""
    rules, bits, lo, hi = lists
    if T.interval:
        col = gl.arange(0, 64, gl.SliceLayout(0, s.type.layout))
        there = col < q_len - pos
        first = gl.load(lo + (base + pos) + col, mask=there, other=0)
        s = gl.where(keys >= gl.expand_dims(first, 0), s, float("-inf"))
        end = gl.load(hi + (base + pos) + col, mask=there, other=0)
        return gl.where(keys < gl.expand_dims(end, 0), s, float("-inf"))
    else:
        return gl.where(keys < kv_len, s, float("-inf"))


@gluon.jit
def allowed(T: gl.constexpr, s, entry, key, pos, base, lists, kv_len, q_len):
    """Scores [64 keys, 64 queries] after the rule of a partial block's entry."""
    rules, bits, lo, hi = lists
    keys = gl.expand_dims(key + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)), 1)
    if T.bits:
        rule = gl.load(rules + entry)
        if rule >= 0:
            words = bits + rule.to(gl.int64) * (T.block[0] * (T.block[1] // 32))
            query = gl.expand_dims(pos % T.block[0] + gl.arange(0, 64, gl.SliceLayout(0, s.type.layout)), 0)
            word = gl.load(words + (query * (T.block[1] // 32) + keys % T.block[1] // 32))
            s = gl.where((word >> (keys % 32)) & 1 != 0, s, float("-inf"))
        else:
            s = within_bounds(T, s, keys, pos, base, lists, kv_len, q_len)
    else:
        s = within_bounds(T, s, keys, pos, base, lists, kv_len, q_len)
    return s
