"""Device code of portable.attention_paged for one tile of queries: pages, keys, FP8 values, and the steps."""

import triton
import triton.language as tl

from sparsek.engine.launch.tensors import at

# Two e4m3 values in each half of a register, as two registers of fp16 pairs: the even values, the odd ones.
_E4M3_PTX = tl.constexpr(
    "{ .reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 c, a; cvt.rn.f16x2.e4m3x2 d, b; "
    "prmt.b32 $0, c, d, 0x5410; prmt.b32 $1, c, d, 0x7632; }"
)
# What `e4m3_halves` leaves to the scales if the card has no conversion from e4m3.
FP16_OVER_E4M3 = tl.constexpr(256.0)


@triton.jit
def e4m3_halves(pairs, NATIVE: tl.constexpr):
    """fp16 of the even and of the odd values of `pairs`, int16 with two e4m3 values each; exact.

    Not NATIVE: over 256, because only bits move: e4m3's exponents have a bias of 7, those of fp16 one of 15.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            _E4M3_PTX, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        low = pairs & 0xFF
        high = (pairs >> 8) & 0xFF
        even = ((low & 0x80) << 8) | ((low & 0x7F) << 7)
        odd = ((high & 0x80) << 8) | ((high & 0x7F) << 7)
        even = tl.where((low & 0x7F) == 0x7F, 0x7E00, even).to(tl.int16)
        odd = tl.where((high & 0x7F) == 0x7F, 0x7E00, odd).to(tl.int16)
        return even.to(tl.float16, bitcast=True), odd.to(tl.float16, bitcast=True)


@triton.jit
def within_fp16(even, odd):
    """Rows times a power of two that brings their largest magnitude to 2^14 or more and below 2^15, in fp16, and the
    inverse of that power. Values 2^28 times smaller than the largest become subnormal.
    """
    even = even.to(tl.float32)
    odd = odd.to(tl.float32)
    bits = tl.maximum(
        even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )
    exponent = tl.maximum(tl.max(bits, 1) >> 23, 15)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    back = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (even * inverse).to(tl.float16), (odd * inverse).to(tl.float16), back


@triton.jit
def page_ids(table, first, entries, pages, PAGE: tl.constexpr, TN: tl.constexpr):
    """Pages of the TN keys from `first` on: a number, or where pages are shorter than a step, one of each key."""
    if TN <= PAGE:
        entry = first // PAGE
    else:
        entry = (first + tl.arange(0, TN)) // PAGE
    page = tl.load(table + entry, mask=entry < entries, other=0)
    return tl.minimum(tl.maximum(page, 0), pages - 1)


@triton.jit
def page_rows(
    base, page, first, live, s_page, s_d, S_N: tl.constexpr,
    PAGE: tl.constexpr, TN: tl.constexpr, COLS: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """TN rows of pages, COLS columns padded with zeros to PADDED. MASKED: rows that are not `live` are zero, and are
    not read.
    """
    row = tl.arange(0, TN)
    col = tl.arange(0, PADDED)
    if TN <= PAGE:
        where = base + (page.to(tl.int64) * s_page + at(first % PAGE, WIDE) * S_N)
        where = where + ((at(row, WIDE) * S_N)[:, None] + (at(col, WIDE) * s_d)[None, :])
    else:
        of_row = page.to(tl.int64) * s_page + at((first + row) % PAGE, WIDE) * S_N
        where = base + of_row[:, None] + (at(col, WIDE) * s_d)[None, :]
    if MASKED:
        mask = live[:, None]
        if PADDED != COLS:
            mask = mask & (col < COLS)[None, :]
        return tl.load(where, mask=mask, other=0)
    elif PADDED != COLS:
        return tl.load(where, mask=(col < COLS)[None, :], other=0)
    else:
        return tl.load(where)


@triton.jit
def listed(lists, index, BLOCK_STEPS: tl.constexpr):
    """The key block of step `index` of a row: entries of the full list, then those of the partial one; -1 behind them.

    `lists`: full indices, start, count, partial indices, start, count.
    """
    full, full_start, full_count, partial, partial_start, partial_count = lists
    entry = index // BLOCK_STEPS
    in_full = entry < full_count
    block = tl.load(full + full_start + entry, mask=in_full, other=-1)
    later = entry - full_count
    return tl.load(partial + partial_start + later, mask=(later >= 0) & (later < partial_count), other=block)


@triton.jit
def first_key(
    block, index, spans, length, BLOCK_KEYS: tl.constexpr, BLOCK_STEPS: tl.constexpr, TN: tl.constexpr
):
    """The first key of step `index`. Lists: `length`, where no key is, for a block that does not exist.

    `spans`: number of steps that begin at key 0, and the step from which the others go on.
    """
    if BLOCK_STEPS > 0:
        exists = (block >= 0) & (block < (length + BLOCK_KEYS - 1) // BLOCK_KEYS)
        return tl.where(exists, block * BLOCK_KEYS + index % BLOCK_STEPS * TN, length)
    else:
        sink_steps, low_step = spans
        return tl.where(index < sink_steps, index, low_step + index - sink_steps) * TN


@triton.jit
def walk(
    sums, q, q_odd, k, v, table, lists, spans, bounds, position, factor, cap,
    begin, end, entries, pages, sk_p, sk_d, sv_p, sv_d,
    SK_N: tl.constexpr, SV_N: tl.constexpr, PAGE: tl.constexpr, TN: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, KW: tl.constexpr, VW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr, BLOCK_STEPS: tl.constexpr,
    TEST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    FP8: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`sums` after the steps from `begin` to `end` - 1.

    `sums`: acc [TM, Dv], FP8: of even and of odd columns; total, top [TM]. `bounds`: length, the first key in any
    query's window, the end of keys that any query sees, window, sinks. TEST: 0 if every query sees every key of these
    steps, 1 if keys may be missing, 2 for any rule. FP8: pairs of values are int16, D and DV count pairs.
    """
    acc, acc_odd, total, top = sums
    length, first_seen, end_seen, window, sinks = bounds
    block = 0
    if BLOCK_STEPS > 0:
        block = listed(lists, begin, BLOCK_STEPS)
    first = first_key(block, begin, spans, length, BLOCK_KEYS, BLOCK_STEPS, TN)
    page = page_ids(table, first, entries, pages, PAGE, TN)
    if BLOCK_STEPS > 0:
        block = listed(lists, begin + 1, BLOCK_STEPS)
    for index in range(begin, end):
        key = first + tl.arange(0, TN)
        live = key < length
        if TEST == 2:
            live = key < end_seen
            if WINDOWED:
                live = live & ((key >= first_seen) | (key < sinks))
        k_tile = page_rows(k, page, first, live, sk_p, sk_d, SK_N, PAGE, TN, D, KW, TEST > 0, WIDE)
        v_tile = page_rows(v, page, first, live, sv_p, sv_d, SV_N, PAGE, TN, DV, VW, TEST > 0, WIDE)
        # Pages are read one step ahead, and lists two: addresses that a step loads itself would halve the pipeline.
        first = first_key(block, index + 1, spans, length, BLOCK_KEYS, BLOCK_STEPS, TN)
        page = page_ids(table, first, entries, pages, PAGE, TN)
        if BLOCK_STEPS > 0:
            block = listed(lists, index + 2, BLOCK_STEPS)

        if FP8:
            k_even, k_odd = e4m3_halves(k_tile, NATIVE)
            s = tl.dot(q, tl.trans(k_even))
            s = tl.dot(q_odd, tl.trans(k_odd), s)
        else:
            s = tl.dot(q, tl.trans(k_tile))
        if CAPPED:  # tanh x = 1 - 2 / (exp(2 x) + 1), which has the right limits
            s = cap - 2.0 * cap / (tl.exp2(s * factor[:, None]) + 1.0)
        elif FP8:
            s = s * factor[:, None]
        unit = 1.0 if CAPPED or FP8 else factor
        if TEST == 2:
            ok = live[None, :]
            if CAUSAL:
                ok = ok & (key[None, :] <= position[:, None])
            if WINDOWED:
                near = key[None, :] > position[:, None] - window
                if not CAUSAL:
                    near = near & (key[None, :] < position[:, None] + window)
                ok = ok & (near | (key < sinks)[None, :])
            s = tl.where(ok, s, float("-inf"))
        elif TEST == 1:
            s = tl.where(live[None, :], s, float("-inf"))
        now = tl.maximum(top, tl.max(s, 1) * unit)
        base = tl.where(now == float("-inf"), 0.0, now)  # no key yet, or scores of -inf: -inf - -inf is NaN
        p = tl.exp2(s * unit - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            v_even, v_odd = e4m3_halves(v_tile, NATIVE)
            p = p.to(tl.float16)
            acc = tl.dot(p, v_even, acc * shrink[:, None])
            acc_odd = tl.dot(p, v_odd, acc_odd * shrink[:, None])
        else:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        top = now
    return acc, acc_odd, total, top
