"""Device code of masks whose rows are a few runs of key blocks: bounds of queries, and entries of runs.

Queries and positions are int64: the sum of a length and an offset may pass 2^31.
"""

import triton
import triton.language as tl


@triton.jit
def within(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def bounds(query, low, high, sink_end, kv_len, SINKS: tl.constexpr):
    """lo and hi of queries, as `bounds` of attn/mask/build/documents.py for one document of all keys.

    SINKS: 0 without sinks, 1 with sinks, 2 with sinks that are seen from positions before them too.
    """
    lo, hi = within(query + low, 0, kv_len), within(query + high, 0, kv_len)
    if SINKS > 0:
        lo = tl.where(lo > sink_end, lo, 0)
    if SINKS == 2:
        hi = tl.maximum(hi, sink_end)
    return lo, hi


@triton.jit
def steps_before(first, step, edge):
    """How many numbers first, first + step, ... are less than the edge."""
    return tl.maximum(edge - first + step - 1, 0) // step


@triton.jit
def cut_off(first, count, step, end):
    """The first and the count of those of `count` columns, `step` apart, that are from 0 on and before `end`."""
    count = tl.maximum(count, 0)
    skipped = tl.minimum(count, steps_before(first, step, 0))
    first += skipped * step
    return first, tl.minimum(count - skipped, steps_before(first, step, end))


@triton.jit
def write_runs(
    indices, row, live, capacity, first_a, count_a, step_a, first_b, count_b, first_c, count_c, step_c,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """The entries of three runs, from row * capacity on; the middle run has step 1. 0 where a row has fewer."""
    ab = count_a + count_b
    for done in range(0, capacity, ENTRIES):
        entry = done + tl.arange(0, ENTRIES)[None, :]
        column = tl.where(
            entry < count_a[:, None],
            first_a[:, None] + entry * step_a,
            tl.where(
                entry < ab[:, None],
                (first_b - count_a)[:, None] + entry,
                first_c[:, None] + (entry - ab[:, None]) * step_c,
            ),
        )
        column = tl.where(entry < (ab + count_c)[:, None], column, 0)
        at = row.to(tl.int64)[:, None] * capacity + entry
        tl.store(indices + at, column, mask=live[:, None] & (entry < capacity))


@triton.jit
def write_all_columns(indices, columns, chunk, LANES: tl.constexpr):
    """The numbers below `columns`, of one chunk."""
    at = chunk * LANES + tl.arange(0, LANES)
    tl.store(indices + at, at, mask=at < columns)


@triton.jit
def write_bounds(lo, hi, chunk, q_len, low, high, sink_end, kv_len, SINKS: tl.constexpr, LANES: tl.constexpr):
    """lo and hi of the queries of one chunk."""
    query = chunk * LANES + tl.arange(0, LANES)
    from_key, to_key = bounds(query.to(tl.int64), low, high, sink_end, kv_len, SINKS)
    tl.store(lo + query, from_key.to(tl.int32), mask=query < q_len)
    tl.store(hi + query, to_key.to(tl.int32), mask=query < q_len)
