"""Adds the parts of keys that portable.attention_paged has computed apart: a program for some rows and 128 columns.

    top = max lse[s], sink;   w[s] = exp2(lse[s] - top);   out = sum w[s] o[s] / (sum w[s] + exp2(sink - top))

Parts are added in a fixed order, so the bits repeat. Every byte is read once, by loads that do not wait for each other.
"""

import triton
import triton.language as tl

# The most parts of one row, and of the rows of a program, which it loads together.
MOST = 64
COLUMNS = 128
WARPS = 4

NUMBERS = ("tokens", "requests", "parts")


def shape(parts: int) -> tuple[int, int]:
    """So many parts rounded up to a power of two, and the rows of a program: few parts in many programs would take as
    long as the launch of these.
    """
    most = 1 << (parts - 1).bit_length()
    return most, MOST // most


@triton.jit(do_not_specialize=NUMBERS)
def add_parts(
    o_part, lse_part, counts, cu_seqlens_q, sink_logits, v_scale, out, lse, tokens, requests, parts, so_m, so_h, so_d,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, V_SCALES: tl.constexpr, MOST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """o_part float32 [parts, tokens, HEADS, DV], divided by each part's own sum; lse_part float32 [parts, tokens,
    HEADS], log2, -inf for a part without keys; counts int32 [tokens, HEADS]. Rows of one part are left as they are.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # below 2^31: their parts fit into memory
    head = row % HEADS
    token = row // HEADS
    row = row.to(tl.int64)
    part = tl.arange(0, MOST)
    where = part.to(tl.int64)[None, :] * (tokens.to(tl.int64) * HEADS) + row[:, None]
    # None of these three loads waits for another. What no part has written is read here too, and not used.
    exists = token < tokens
    last = tl.load(cu_seqlens_q + requests)
    count = tl.load(counts + row, mask=exists, other=0)
    part_lse = tl.load(lse_part + where, mask=exists[:, None] & (part < parts)[None, :], other=float("-inf"))
    cut = exists & (token < last) & (count > 1)
    there = cut[:, None] & (part[None, :] < tl.minimum(count, parts)[:, None])
    part_lse = tl.where(there, part_lse, float("-inf"))
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = col < DV
    o = o_part + where[:, :, None] * DV + col[None, None, :]
    o = tl.load(o, mask=there[:, :, None] & inside[None, None, :], other=0.0)
    top = tl.max(part_lse, 1)
    if sink_logits is not None:
        sink = tl.load(sink_logits + head) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(part_lse - base[:, None])
    total = tl.sum(weight, 1)
    if sink_logits is not None:
        total += tl.exp2(sink - base)
    total = tl.where(total == 0.0, 1.0, total)
    acc = tl.sum(o * weight[:, :, None], 1) / total[:, None]
    if v_scale is not None:
        acc *= tl.load(v_scale + (head // GROUP if V_SCALES > 1 else head * 0))[:, None]
    to = out + token.to(tl.int64) * so_m + head.to(tl.int64) * so_h
    to = to[:, None] + (col.to(tl.int64) * so_d)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=cut[:, None] & inside[None, :])
    if lse is not None:
        if tl.program_id(1) == 0:
            to_lse = lse + head.to(tl.int64) * tokens + token
            tl.store(to_lse, (top + tl.log2(total)) * 0.6931471805599453, mask=cut)
