"""Adds the parts of keys that portable.attention_paged has computed apart: one program per query, head and 128 columns.

    top = max lse[s], sink;   w[s] = exp2(lse[s] - top);   out = sum w[s] o[s] / (sum w[s] + exp2(sink - top))

Parts are added in a fixed order, so the bits repeat. Every byte is read once, by loads that do not wait for each other.
"""

import triton
import triton.language as tl

# The most parts of one row, which a program loads together.
MOST = 64
COLUMNS = 128
WARPS = 4

NUMBERS = ("tokens", "requests", "parts")


@triton.jit(do_not_specialize=NUMBERS)
def add_parts(
    o_part, lse_part, counts, cu_seqlens_q, sink_logits, v_scale, out, lse, tokens, requests, parts, so_m, so_h, so_d,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, V_SCALES: tl.constexpr, MOST: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """o_part float32 [parts, tokens, HEADS, DV], divided by each part's own sum; lse_part float32 [parts, tokens,
    HEADS], log2, -inf for a part without keys; counts int32 [tokens, HEADS]. Rows of one part are left as they are.
    """
    head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS
    row = (token * HEADS + head).to(tl.int64)
    count = tl.minimum(tl.load(counts + row), parts)  # rows of no request hold anything
    last = tl.load(cu_seqlens_q + requests)
    if (count > 1) & (token < last):
        part = tl.arange(0, MOST)
        step = tokens.to(tl.int64) * HEADS
        where = part.to(tl.int64) * step + row
        part_lse = tl.load(lse_part + where, mask=part < count, other=float("-inf"))
        col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        seen = part_lse > float("-inf")
        o = tl.load(
            o_part + where[:, None] * DV + col[None, :], mask=seen[:, None] & (col < DV)[None, :], other=0.0
        )
        top = tl.max(part_lse, 0)
        if sink_logits is not None:
            sink = tl.load(sink_logits + head) * 1.4426950408889634
            top = tl.maximum(top, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.exp2(part_lse - base)
        total = tl.sum(weight, 0)
        if sink_logits is not None:
            total += tl.exp2(sink - base)
        total = tl.where(total == 0.0, 1.0, total)
        acc = tl.sum(o * weight[:, None], 0) / total
        if v_scale is not None:
            acc *= tl.load(v_scale + (head // GROUP if V_SCALES > 1 else 0))
        out += token.to(tl.int64) * so_m + head.to(tl.int64) * so_h
        tl.store(out + col.to(tl.int64) * so_d, acc.to(out.dtype.element_ty), mask=col < DV)
        if lse is not None:
            if tl.program_id(1) == 0:
                tl.store(
                    lse + head.to(tl.int64) * tokens + token, (top + tl.log2(total)) * 0.6931471805599453
                )
