"""Attention's backward pass apart from its products: a pass over rows before it, and a cast and sums after it.

    prepare_rows      rows[0] = unit lse log2(e),  rows[1] = rowsum(grad * out) - grad_lse   reads out and grad once
    cast_quantized    dq = scale (acc[0] + ... )                                             reads acc once, writes dq
    add_parts         dk = scale (part 0 + part 1 + ...), dv without scale                   of parts with visits

A weight is exp2(scale log2(e) s - rows[0]), and ds = weight (dp - rows[1]). Rows without any key, and rows after the
last query, have rows[0] = +inf: weight and ds are 0 there, without a test in the kernel. With `unit` -1 / (scale
log2(e)), a weight is exp2(scale log2(e) (s + rows[0])): products of s start from rows[0].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.engine.launch.launch import launch

# Elements of each tensor per program: 32 for each of its 128 threads, which are 4 vectors of 16 bytes in bf16.
ELEMENTS = 4096
WARPS = 4
PART_ROWS = 16  # of keys, of each program that adds parts


@triton.jit
def row_of(at, s_h, s_m, PACK: tl.constexpr):
    """Where rows of a head begin; those of PACK heads are row at % PACK of token at // PACK."""
    offset = at * s_m
    if PACK > 1:
        offset = (at // PACK) * s_m + (at % PACK) * s_h
    return offset


@triton.jit
def deltas(out, grad, grad_lse, of_out, of_grad, of_lse, there, so_d, sg_d, DV: tl.constexpr):
    """rowsum(grad * out) - grad_lse of rows of one head that are `there`, and where each begins."""
    col = tl.arange(0, triton.next_power_of_2(DV)).to(tl.int64)
    live = there[:, None] & (col < DV)[None, :]
    o = tl.load(out + (of_out[:, None] + (col * so_d)[None, :]), mask=live, other=0.0)
    do = tl.load(grad + (of_grad[:, None] + (col * sg_d)[None, :]), mask=live, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if grad_lse is not None:
        delta -= tl.load(grad_lse + of_lse, mask=there, other=0.0)
    return delta


@triton.jit(do_not_specialize=("unit", "q_len", "rows", "heads", "plane", "sl_b", "sl_h", "sn_b", "sn_h"))
def _prepare_rows(
    out, grad, lse, grad_lse, made, unit, q_len, rows, heads, plane,
    so_b, so_h, so_m, so_d, sg_b, sg_h, sg_m, sg_d, sl_b, sl_h, sl_m, sn_b, sn_h, sn_m,
    DV: tl.constexpr, ROWS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, ROWS)
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    at = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)

    there = at < q_len * PACK
    lse += b * sl_b + h * PACK * sl_h
    lg = tl.load(lse + row_of(at, sl_h, sl_m, PACK), mask=there, other=float("-inf"))
    seen = lg > float("-inf")
    out += b * so_b + h * PACK * so_h
    grad += b * sg_b + h * PACK * sg_h
    if grad_lse is not None:
        grad_lse += b * sn_b + h * PACK * sn_h
    of_out, of_grad = row_of(at, so_h, so_m, PACK), row_of(at, sg_h, sg_m, PACK)
    delta = deltas(out, grad, grad_lse, of_out, of_grad, row_of(at, sn_h, sn_m, PACK), there, so_d, sg_d, DV)

    made += head.to(tl.int64) * rows + at
    tl.store(made, tl.where(seen | (lg != lg), lg * 1.4426950408889634, float("inf")) * unit, mask=at < rows)
    tl.store(made + plane, tl.where(seen, delta, 0.0), mask=at < rows)


def prepare_rows(
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    rows: int,
    unit: float = 1.0,
    made: Tensor | None = None,
    pack: int = 1,
) -> Tensor:
    """float32 [2, B, Hq / pack, rows], contiguous: lse in base 2 times `unit`, and rowsum(grad * out) - grad_lse.

    out, grad: bf16 or fp16 [B, Hq, S, Dv], any strides. lse: float32 [B, Hq, S], natural logarithm; grad_lse: its
    gradient or None; any strides. Row i * pack + r of head h is that of token i and head h * pack + r. `rows` is at
    least S * pack. Rows without any key (lse = -inf) and rows behind those are +inf times `unit` and 0, whatever grad
    and grad_lse are there. Sums are float32, in an order that follows the strides of
    out and grad, because Triton distributes a tile over threads by them: the same values with other strides differ in
    the last bits. `made`: memory for the result. No sync.
    """
    batch, heads, q_len, v_dim = out.shape
    heads //= pack
    if made is None:
        made = torch.empty((2, batch, heads, rows), dtype=torch.float32, device=out.device)
    if made.numel() == 0:
        return made
    tile = ELEMENTS // triton.next_power_of_2(v_dim)
    with torch.cuda.device_of(out):
        launch(
            _prepare_rows, (batch * heads * triton.cdiv(rows, tile),),
            out, grad, lse, grad_lse, made, unit, q_len, rows, heads, batch * heads * rows,
            *out.stride(), *grad.stride(), *lse.stride(), *((0, 0, 0) if grad_lse is None else grad_lse.stride()),
            DV=v_dim, ROWS=tile, PACK=pack, num_warps=WARPS,
        )  # fmt: skip
    return made


@triton.jit(do_not_specialize=("scale", "rows", "q_len", "heads"))
def _cast_quantized(
    acc, turns, dq, scale, rows, q_len, heads, sq_b, sq_h, sq_m, sq_d,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    # `q_len`: rows of a head of acc, in the order of bwd_dq.as_held: 16 rows together, and of these 8 columns, a row, a
    # pair of columns.
    tiles = tl.cdiv(q_len, ROWS)
    head = tl.program_id(0) // tiles
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    start = (tl.program_id(0) % tiles * ROWS).to(tl.int64)
    slab = start + tl.arange(0, ROWS // 16) * 16
    place = (slab * WIDTH)[:, None] + tl.arange(0, 16 * WIDTH)[None, :]
    x = tl.zeros((ROWS // 16, 16 * WIDTH), tl.float32)
    for i in tl.static_range(SUMS):
        one = head.to(tl.int64) * SUMS + i
        there = slab < q_len
        if turns is not None:
            there &= tl.load(turns + one * (rows // 64) + slab // 64, mask=there, other=0) > 0
        x += tl.load(acc + one * rows * WIDTH + place, mask=there[:, None], other=0.0)
    x = tl.reshape(x, (ROWS // 16, WIDTH // 8, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (0, 4, 2, 1, 3, 5)), (ROWS, WIDTH)) * scale
    at = start + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH).to(tl.int64)
    dq += b * sq_b + h * PACK * sq_h
    live = (at < q_len)[:, None] & (col < D)[None, :]
    tl.store(
        dq + row_of(at, sq_h, sq_m, PACK)[:, None] + (col * sq_d)[None, :],
        x.to(dq.dtype.element_ty),
        mask=live,
    )


def cast_quantized(acc: Tensor, scale: float, dq: Tensor, turns: Tensor | None = None, pack: int = 1) -> None:
    """dq = scale * (acc[:, :, 0] + acc[:, :, 1] + ...), rounded once. No sync.

    acc: float32 [B, Hq / pack, sums, R, Dp], contiguous, rows as in prepare_rows, every 16 in the order of
    bwd_dq.as_held; R is a multiple of 64, and Dp a power of two from 32 to 256. dq: bf16 or fp16 [B, Hq, S, D], any
    strides, with S * pack <= R and D <= Dp. With turns, int32 [B * Hq / pack * sums * R / 64], groups of 64 rows of a
    sum without a turn count as 0.
    """
    batch, heads, q_len, dim = dq.shape
    heads, q_len = heads // pack, q_len * pack
    if dq.numel() == 0:
        return
    sums, rows, width = acc.shape[2:]
    tile = ELEMENTS // width
    with torch.cuda.device_of(dq):
        launch(
            _cast_quantized, (batch * heads * triton.cdiv(q_len, tile),),
            acc, turns, dq, scale, rows, q_len, heads, *dq.stride(),
            D=dim, WIDTH=width, ROWS=tile, SUMS=sums, PACK=pack, num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _add_columns(parts, lengths, out, scale, first, columns, count, inside, row, kv_len, so_m, so_d,
    COLS: tl.constexpr, AREA: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Rows `inside` a tile, `row` of a head, whose parts are `columns` apart, `first` the first."""
    col = tl.arange(0, triton.next_power_of_2(COLS))
    live = (row < kv_len)[:, None] & (col < COLS)[None, :]
    at = (inside * WIDTH)[:, None] + (FIRST + col)[None, :]
    acc = tl.zeros(at.shape, tl.float32)
    for i in range(count):
        part = first + i * columns
        there = tl.load(lengths + part) > 0
        acc += tl.load(parts + part.to(tl.int64) * AREA + at, mask=live & there, other=0.0)
    out += (row.to(tl.int64) * so_m)[:, None] + (col.to(tl.int64) * so_d)[None, :]
    tl.store(out, (acc * scale).to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=("scale", "kv_len", "heads", "columns", "count"))
def _add_parts(
    parts, lengths, dk, dv, scale, kv_len, heads, columns, count, sk_b, sk_h, sk_m, sk_d, sv_b, sv_h, sv_m, sv_d,
    D: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // (KEYS // ROWS)
    inside = tl.program_id(0) % (KEYS // ROWS) * ROWS + tl.arange(0, ROWS)
    column = tile % columns
    first = tile // columns * count * columns + column
    b = (tile // columns // heads).to(tl.int64)
    h = (tile // columns % heads).to(tl.int64)
    row = column * KEYS + inside
    dk += b * sk_b + h * sk_h
    dv += b * sv_b + h * sv_h
    _add_columns(
        parts,
        lengths,
        dk,
        scale,
        first,
        columns,
        count,
        inside,
        row,
        kv_len,
        sk_m,
        sk_d,
        D,
        KEYS * WIDTH,
        WIDTH,
        0,
    )
    _add_columns(
        parts,
        lengths,
        dv,
        1.0,
        first,
        columns,
        count,
        inside,
        row,
        kv_len,
        sv_m,
        sv_d,
        DV,
        KEYS * WIDTH,
        WIDTH,
        FIRST,
    )


def add_parts(
    parts: Tensor, lengths: Tensor, count: int, scale: float, dk: Tensor, dv: Tensor, first: int
) -> None:
    """dk = scale * (part 0 + part 1 + ...), dv = part 0 + ..., each rounded once, in order. No sync.

    parts: float32 [B * H * count * columns, keys, width], contiguous, those of dk in the columns before `first`, those
    of dv from there on. lengths: int32 [B * H * count * columns]; a part of length 0 is not read. dk, dv: bf16 or fp16
    [B, H, T, D] and [B, H, T, Dv], any strides.
    """
    batch, heads, kv_len, dim = dk.shape
    keys, width = parts.shape[1:]
    columns = triton.cdiv(kv_len, keys)
    with torch.cuda.device_of(dk):
        launch(
            _add_parts, (batch * heads * columns * (keys // PART_ROWS),),
            parts, lengths, dk, dv, scale, kv_len, heads, columns, count, *dk.stride(), *dv.stride(),
            D=dim, DV=dv.shape[3], KEYS=keys, WIDTH=width, FIRST=first, ROWS=PART_ROWS, num_warps=WARPS,
        )  # fmt: skip
