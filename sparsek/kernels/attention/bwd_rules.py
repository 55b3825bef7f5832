"""Device pieces of attention's backward pass: rules of partial blocks, on scores [keys, queries]."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def within_bounds(T: gl.constexpr, s, keys, first, end, kv_len):
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
def allowed(T: gl.constexpr, s, entry, key, pos, rules, bits, first, end, kv_len):
    """Scores [64 keys, queries of a step] after the rule of a partial block's entry."""
    keys = gl.expand_dims(key + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)), 1)
    if T.bits:
        rule = gl.load(rules + entry)
        if rule >= 0:
            words = bits + rule.to(gl.int64) * (T.block[0] * (T.block[1] // 32))
            query = gl.expand_dims(
                pos % T.block[0] + gl.arange(0, T.queries, gl.SliceLayout(0, s.type.layout)), 0
            )
            word = gl.load(words + (query * (T.block[1] // 32) + keys % T.block[1] // 32))
            s = gl.where((word >> (keys % 32)) & 1 != 0, s, float("-inf"))
        else:
            s = within_bounds(T, s, keys, first, end, kv_len)
    else:
        s = within_bounds(T, s, keys, first, end, kv_len)
    return s
