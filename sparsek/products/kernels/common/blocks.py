"""Pieces of plain Triton kernels that multiply a row of stored blocks with a dense matrix.

A program walks the K axis of a block row as if its stored blocks were contiguous, TK per step:

    stored blocks   | b0      | b1      | b2      |          kk = 0 .. length * bk
    steps           | s0   | s1   | s2   | s3   | s4 |
    A tile          values[start + kk // bk][rows of the tile, kk % bk]                   [TM, TK]
    B tile          B[indices[start + kk // bk] * bk + kk % bk, columns of the tile]      [TK, TN]

If TK divides bk, a step lies in one block and has one scalar index. Otherwise a step joins several small blocks or
straddles two, and its index is a vector along TK: blocks 16 wide still fill a dot of depth 64. In FP8, where a block
may have a scale, every step lies in one block, and what TK has beyond it is masked. Positions outside the stored
blocks are masked and never read, so NaN in rows of B that no block references cannot reach the product.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch import tensors
from sparsek.engine.launch.tensors import at, times
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.common import epilogue as epilogues
from sparsek.products.kernels.common.rounding import rounded_columns
from sparsek.products.reference.epilogue import Epilogue

ROUNDS = tl.constexpr(not env.interpreting())


@triton.jit
def _to_tf32(x):
    """Rounds to nearest, as cuBLAS does. The tensor core would truncate the low bits, which doubles the error."""
    if ROUNDS:
        x = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], tl.int32, is_pure=True, pack=1)
        x = x.to(tl.float32, bitcast=True)
    return x


@triton.jit
def add_product(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b. In float32 without TF32, each step is summed separately and added by an fma that Triton does not
    fold into the dot. One chain over all of K had twice the rounding error of cuBLAS (H200, 2026-11-21).
    """
    if a.dtype == tl.float32 and PRECISION == "ieee":
        step = tl.dot(a, b, input_precision=PRECISION)
        return tl.fma(step, tl.full(acc.shape, 1.0, tl.float32), acc)
    if a.dtype == tl.float32:
        a, b = _to_tf32(a), _to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def add_step(acc, a, b, scale, place, PRECISION: tl.constexpr, SCALE: tl.constexpr):
    """acc + a @ b. In FP8 times the scale of the block at `place`, if SCALE is "block".

    Hopper's tensor cores keep some 14 bits of a running FP8 sum. So they sum only within a step; the steps are added in
    float32.
    """
    TK: tl.constexpr = a.shape[1]
    if SCALE == "":
        return add_product(acc, a, b, PRECISION)
    elif SCALE == "block":
        step = tl.dot(a, b, max_num_imprecise_acc=TK)
        return acc + tl.load(scale + place) * step
    else:
        return tl.dot(a, b, acc, max_num_imprecise_acc=TK)


@triton.jit
def _from_first(step, BK: tl.constexpr, TK: tl.constexpr):
    """[TK]: k counted from the start of the step's first block."""
    begin = 0
    if TK % BK != 0:
        begin = times(step * TK % BK, 16)
    return begin + tl.arange(0, TK)


@triton.jit
def _which(kt, BK: tl.constexpr, SPAN: tl.constexpr):
    """kt // BK for kt below SPAN * BK, by comparisons: for bk 112 a step has 200 instructions on sm_90, not 309."""
    which = (kt >= BK).to(tl.int32)
    for s in tl.static_range(2, SPAN):
        which += (kt >= s * BK).to(tl.int32)
    return which


@triton.jit
def inside_blocks(step, BK: tl.constexpr, TK: tl.constexpr, SPAN: tl.constexpr):
    """[TK]: the offset of each k of a step inside its block."""
    if BK % TK == 0:
        return step % (BK // TK) * TK + tl.arange(0, TK)
    else:
        from_first = _from_first(step, BK, TK)
        return from_first - _which(from_first, BK, SPAN) * BK


@triton.jit
def _entry(entries, mapping, at_entry, live):
    """entries[at_entry], or the entry of `mapping` at that index."""
    found = tl.load(entries + at_entry, mask=live, other=0)
    if mapping is not None:
        found = tl.load(mapping + found, mask=live, other=0)
    return found


@triton.jit
def find(
    indices, index_map, order, order_map, start, length, step,
    BK: tl.constexpr, TK: tl.constexpr, SPAN: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """The blocks of step `step`: their entries in `indices`, and their positions. Scalars, or [TK] when gathered.

    Positions count up from `start`, or are read from `order` if LISTED. The entries of a list may be indices into a
    map. A step touches at most SPAN blocks: SPAN scalar loads that all threads share, then selects along TK. This
    form shows the compiler that 16 neighbours are equal.
    """
    q = step * TK // BK
    index = _entry(indices, index_map, start + q, q < length)
    place = start + q
    if LISTED:
        place = _entry(order, order_map, start + q, q < length)
    if BK % TK != 0:
        which = _which(_from_first(step, BK, TK), BK, SPAN)
        index += tl.zeros([TK], dtype=tl.int32)
        place += which * (0 if LISTED else 1)
        for s in tl.static_range(1, SPAN):
            live = q + s < length
            index = tl.where(which == s, _entry(indices, index_map, start + q + s, live), index)
            if LISTED:
                place = tl.where(which == s, _entry(order, order_map, start + q + s, live), place)
    return index, place


@triton.jit
def blocks_times_dense(
    values, indices, order, start, length, i, col, b, n, k, sb_k, sb_n, scale,
    BM: tl.constexpr, BK: tl.constexpr, TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
    SPAN: tl.constexpr, VIEW: tl.constexpr, WIDE: tl.constexpr,
    RAGGED_K: tl.constexpr, RAGGED_N: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr,
    b_scales=None,
):  # fmt: skip
    """float32 [TM, TN]: rows `i` of the `length` blocks from `start` on, times columns `col` of b [K, N].

    `i` [TM] are rows inside the block, `col` [TN] columns of B. VIEW: blocks are stored transposed, and block q of
    the row is at order[start + q]. SCALE: what of an FP8 A shares a scale; here only scales of blocks are applied.
    `b_scales` [TN]: b is rounded to E4M3 with these. Each element is one sum in the order of K.
    """
    kt = tl.arange(0, TK)
    STEPS: tl.constexpr = (BK + TK - 1) // TK  # of a block
    WITHIN: tl.constexpr = BK % TK == 0 or SCALE != ""
    PADDED: tl.constexpr = BK % TK != 0 and SCALE != ""
    if VIEW:
        a_i = i
        a_step: tl.constexpr = BM
    else:
        a_i = i * BK
        a_step: tl.constexpr = 1
    col_off = at(col, WIDE) * sb_n
    acc = tl.zeros((TM, TN), dtype=tl.float32)
    steps = length * STEPS if PADDED else tl.cdiv(length * BK, TK)
    column, place = find(indices, None, order, None, start, length, 0, BK, BK if PADDED else TK, SPAN, VIEW)
    for step in range(steps):
        if WITHIN:
            inner = step % STEPS * TK
            a_ptr = values + place.to(tl.int64) * (BM * BK) + inner * a_step
            a_ptr = a_ptr + (a_i[:, None] + (kt * a_step)[None, :])
            b_row = column * BK + inner + kt
            b_ptr = b + (column * BK + inner).to(tl.int64) * sb_k
            b_ptr = b_ptr + ((at(kt, WIDE) * sb_k)[:, None] + col_off[None, :])
            left = BK - inner if BK % TK != 0 else TK
            a_live = (kt < left)[None, :]
            b_live = (kt < left)[:, None]
        else:
            inside = inside_blocks(step, BK, TK, SPAN)
            a_ptr = values + (a_i[:, None] + (at(place, WIDE) * (BM * BK) + inside * a_step)[None, :])
            b_row = column * BK + inside
            b_ptr = b + ((at(b_row, WIDE) * sb_k)[:, None] + col_off[None, :])
            left = length * BK - step * TK
            a_live = (kt < left)[None, :]
            b_live = (kt < left)[:, None]
        if BM % TM != 0:
            a_live = a_live & (i < BM)[:, None]
        if RAGGED_K:
            b_live = b_live & (b_row < k)[:, None]
        if RAGGED_N:
            b_live = b_live & (col < n)[None, :]
        a_tile = tl.load(a_ptr, mask=a_live, other=0.0)
        b_tile = tl.load(b_ptr, mask=b_live, other=0.0)
        if b_scales is not None:
            b_tile = rounded_columns(b_tile, b_scales)
        # Read one step ahead: an index loaded in the step that uses it would halve the pipeliner's buffers.
        here = place
        if PADDED:
            column, place = find(
                indices, None, order, None, start, length, (step + 1) // STEPS, BK, BK, 1, VIEW
            )
        else:
            column, place = find(indices, None, order, None, start, length, step + 1, BK, TK, SPAN, VIEW)
        acc = add_step(acc, a_tile, b_tile, scale, here, PRECISION, SCALE)
    return acc


def constants(
    tile_k: int, a: BSR, b: Tensor, out: Tensor, tf32: bool, epilogue: Epilogue, limit: int
) -> dict[str, Any]:
    """Constexprs of a kernel C = A @ B that follow from its operands. `b` [batch, K, N], `out` and `epilogue.other`
    [batch, M, N]. Offsets beyond `limit` use 64 bits.
    """
    (bm, bk), (m, k), n, other = a.block, a.shape, b.shape[2], epilogue.other
    (unit_bk, unit_bn), (unit_cm, unit_cn), (unit_om, unit_on) = map(tensors.units, (b, out, other))
    largest = max(*map(tensors.extent, (b, out, other)), a.values.numel())
    return {
        "BM": bm, "BK": bk, "SPAN": span(bk, tile_k), "VIEW": a.order is not None, "WIDE": largest > limit,
        "RAGGED_K": k % bk != 0, "PRECISION": "tf32" if tf32 else "ieee",
        "UNIT_M": tensors.unit(m, b), "UNIT_N": tensors.unit(n, b), "UNIT_K": tensors.unit(k, b),
        "UNIT_BK": unit_bk, "UNIT_BN": unit_bn, "UNIT_CM": unit_cm, "UNIT_CN": unit_cn,
        "UNIT_OM": unit_om, "UNIT_ON": unit_on, **epilogues.constants(epilogue),
    }  # fmt: skip


def span(bk: int, tile_k: int) -> int:
    """The most blocks that a step of depth tile_k can touch."""
    return -(-(bk - math.gcd(bk, tile_k) + tile_k) // bk)
