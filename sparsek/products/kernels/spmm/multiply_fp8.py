"""Device pieces of FP8 products: the consumer warpgroups, promotion to float32, and scaling.

T is a Config of hopper.spmm_fp8. Every tensor-core sum of `promote` pieces and `chunk` columns, a unit, is promoted to
float32 registers, times the scale of its rows or its block. Two units are in flight, in two sets of registers. With
`promote` 0 nothing is promoted before the tile is done, and wgmma of one stage overlaps with the next, as in 16 bits.
Column scales are applied at the end of a tile, the critical section: no wgmma runs while its warpgroup scales and
stores the tile and starts the next from zero. Tiles that can be held do without it
(spmm/multiply_fp8_register_tile.py). The path of a staged tile to memory is in spmm/multiply.py.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.engine.launch.gluon import opaque, tma_store_wait
from sparsek.products.kernels.spmm.multiply import RECORD, bias_of, boxed, look_ahead, owned_boxes, send_box


@gluon.constexpr_function
def units(t: Any) -> int:
    """Promotions of a stage."""
    return t.pieces // t.promote * t.chunks


@gluon.jit
def record(tiles, t):
    """First step, end step, row and column of C, and workspace slot or -1, of tile t."""
    at = tiles + RECORD * t
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 5)


@gluon.jit
def begun(T: gl.constexpr, starts, scales):
    """The CTA's first tile and the tile after its last, and the factor of all of C: alpha and scales of tensors."""
    a_scale, b_scale, factor = scales
    if T.a_scale == "tensor":
        factor = factor * gl.load(a_scale)
    if T.b_scale == "tensor":
        factor = factor * gl.load(b_scale)
    return gl.load(starts + gl.program_id(0)), gl.load(starts + gl.program_id(0) + 1), factor


@gluon.jit
def block_scales(T: gl.constexpr, a_scale, begin, end, q):
    """The scales of the blocks that are promoted in the stage that begins at piece q; () if scales are not per block.
    A missing step has only zeros to scale.
    """
    found = ()
    if T.a_scale == "block":
        COUNT: gl.constexpr = T.pieces // T.promote
        for g in gl.static_range(COUNT):
            step = begin + (q + g * T.promote) // T.per_block
            found = found + (gl.load(a_scale + step, mask=step < end, other=0.0),)
    return found


@gluon.jit
def carried(bound):
    """`bound` of an inner loop. Under Triton 3.6 a bound that the outer loop carries, and nothing else reads, keeps the
    first tile's value (triton-lang/triton, pull request 9036, 2025-12-18).
    """
    return opaque(bound)


@gluon.jit
def nothing(T: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums before the first product."""
    CHUNK: gl.constexpr = T.chunk
    CHUNKS: gl.constexpr = T.chunks
    sums = ()
    for c in gl.static_range(CHUNKS):
        sums = sums + (gl.zeros((64, CHUNK), gl.float32, LAYOUT),)
    return sums


@gluon.jit
def taken_over(T: gl.constexpr, sums, chunk_sums, U: gl.constexpr, stretch, down):
    """Float32 sums after promoting the chunk of unit U of a stage, times its scales.

    By instructions that stay where they are: the compiler would start the next wgmma before, in more registers, and
    spill.
    """
    C: gl.constexpr = U % T.chunks
    if T.a_scale == "tensor":
        z = gl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [sums[C], chunk_sums], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        factor = stretch[U // T.chunks] if T.a_scale == "block" else gl.expand_dims(down, 1)
        given = [chunk_sums, factor, sums[C]]
        z = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", given, dtype=gl.float32, is_pure=False, pack=1
        )
    return sums[:C] + (z,) + sums[C + 1 :]


@gluon.jit
def column_scales(T: gl.constexpr, b_scale, col, n):
    """The factors of the columns from `col` on, if they have scales; 0 outside C.

    Loaded at the start of a tile. 32 threads need each column's scale; until then one thread holds it.
    """
    COLS: gl.constexpr = T.cols
    across = 0.0
    if T.b_scale == "column":
        at = col + gl.arange(0, COLS, gl.BlockedLayout([1], [32], [4], [0]))
        across = gl.load(b_scale + at, mask=at < n, other=0.0)
    return across


@gluon.jit
def parts_of(x, COUNT: gl.constexpr):
    """x [C] as a tuple of COUNT parts, from left to right; no data moves between threads."""
    if COUNT == 1:
        return (x,)
    else:
        HALF: gl.constexpr = x.shape[0] // 2
        left, right = gl.split(gl.permute(gl.reshape(x, [2, HALF]), [1, 0]))
        return parts_of(left, COUNT // 2) + parts_of(right, COUNT // 2)


@gluon.jit
def factors_of_chunks(T: gl.constexpr, across, factor):
    """The factors of the columns of each chunk, as its sums lie in registers; `factor` where columns have no scales."""
    CHUNKS: gl.constexpr = T.chunks
    found = ()
    if T.b_scale == "column":
        WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.cols, 32])
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
        parts = parts_of(gl.convert_layout(across * factor, gl.SliceLayout(0, WIDE)), CHUNKS)
        for c in gl.static_range(CHUNKS):
            one = gl.convert_layout(parts[c], gl.SliceLayout(0, LAYOUT), assert_trivial=True)
            found = found + (gl.expand_dims(one, 0),)
    else:
        for c in gl.static_range(CHUNKS):
            found = found + (factor,)
    return found


@gluon.jit
def row_scales(T: gl.constexpr, LAYOUT: gl.constexpr, a_scale, row, m):
    """The factors of the rows from `row` on, if rows have scales; 0 outside C.

    As loaded, because the first wgmma of a tile would wait for any computation on it.
    """
    down = 0.0
    if T.a_scale == "row":
        r = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        down = gl.load(a_scale + r, mask=r < m, other=0.0)
    return down


@gluon.jit
def scaled(T: gl.constexpr, sums, C: gl.constexpr, down, factors):
    """Chunk C of a tile's sums, times the scales of its columns, and of its rows unless promotion applied them."""
    z = sums[C] * factors[C]
    if T.a_scale == "row":
        if T.promote == 0:
            z = z * gl.expand_dims(down, 1)
    return z


@gluon.jit
def left_operand(T: gl.constexpr, LAYOUT: gl.constexpr, a_s, place, ROW0: gl.constexpr):
    """A warpgroup's rows of the `promote` pieces from `place` on, in registers: not every chunk reads them again."""
    PROMOTE: gl.constexpr = T.promote
    found = ()
    for i in gl.static_range(PROMOTE):
        a = a_s.index(place + i).slice(ROW0, 64)
        found = found + (a.load(gl.DotOperandLayout(0, LAYOUT, 4)),)
    return found


@gluon.jit
def two_sums(T: gl.constexpr, LAYOUT: gl.constexpr):
    """The registers of the two chunks that the tensor cores sum by turns."""
    CHUNK: gl.constexpr = T.chunk
    even = warpgroup_mma_init(gl.zeros((64, CHUNK), gl.float32, LAYOUT))
    odd = warpgroup_mma_init(gl.zeros((64, CHUNK), gl.float32, LAYOUT))
    return even, odd


@gluon.jit
def started(T: gl.constexpr, WG: gl.constexpr, rows_of_a, b_s, slot, U: gl.constexpr, two):
    """`two` after the start of unit U of a stage: the products of `promote` pieces and one chunk of columns.

    They replace its sums. In a new tensor, ptxas would start them before all of the last sum is promoted, and
    spill.
    """
    PROMOTE: gl.constexpr = T.promote
    CHUNK: gl.constexpr = T.chunk
    FIRST: gl.constexpr = U // T.chunks * T.promote
    C: gl.constexpr = U % T.chunks
    acc = two[U % 2]
    for i in gl.static_range(PROMOTE):
        b = b_s.index((slot * T.pieces + FIRST + i) * T.wg_n + WG // T.wg_m).slice(C * CHUNK, CHUNK)
        acc = warpgroup_mma(rows_of_a[i], b.permute((1, 0)), acc, use_acc=i > 0, is_async=True)
    return two[: U % 2] + (acc,) + two[U % 2 + 1 :]


@gluon.jit
def promoted(T: gl.constexpr, sums, U: gl.constexpr, IN_FLIGHT: gl.constexpr, two, stretch, down):
    """The float32 sums with unit U, and `two`. Waits for that unit; `IN_FLIGHT` later products continue."""
    chunk_sums = warpgroup_mma_wait(IN_FLIGHT, deps=(two[U % 2],))
    sums = taken_over(T, sums, chunk_sums, U, stretch, down)
    return sums, two[: U % 2] + (warpgroup_mma_init(chunk_sums),) + two[U % 2 + 1 :]


@gluon.jit
def multiply(T: gl.constexpr, WG: gl.constexpr, c_desc, lists, scales, before, beside, ring, c_s):
    """Consumer warpgroup WG: accumulates its 64 x cols of every tile, and stores them during the next tile.

    `lists` is (tiles, starts); `scales` (of A, of B, alpha); `before` (bias, rows and columns of C, workspace);
    `ring` (A slots, B slots, full, empty); `beside` (other matrix, its leading stride / 8, rows, columns / 8 of C in
    memory, beta).
    """
    tiles, starts = lists
    a_scale, b_scale, alpha = scales
    bias, m, n, part_sums = before
    a_s, b_s, full, empty = ring
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    CHUNK: gl.constexpr = T.chunk
    CHUNKS: gl.constexpr = T.chunks
    STAGES: gl.constexpr = T.stages
    PROMOTE: gl.constexpr = T.promote
    EVERY: gl.constexpr = T.every
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    COL0: gl.constexpr = T.cols * (WG // T.wg_m)
    BOXES: gl.constexpr = owned_boxes(T, WG)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.chunk, 32])
    stage = c_s.index(WG)
    boxes = boxed(T, c_desc, stage)
    first, last, factor = begun(T, starts, scales)
    slot = 0
    phase = 0
    unsent = 0  # boxes of the previous tile that are still staged in shared memory, and their destination
    old_row = 0
    old_col = 0
    begin, end, row, col, part = record(tiles, first)
    stretch = block_scales(T, a_scale, begin, end, 0)
    if PROMOTE > 0:
        two = two_sums(T, LAYOUT)
    for t in range(first, last):
        pieces = carried(gl.maximum(1, (end - begin) * PER))  # a tile without steps gets a stage of zeros
        down = row_scales(T, LAYOUT, a_scale, row + ROW0, m)
        across = column_scales(T, b_scale, col + COL0, n)
        if T.bias:
            shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
        if PROMOTE == 0:
            acc = warpgroup_mma_init(gl.zeros((64, CHUNK), gl.float32, LAYOUT))
        else:
            sums = nothing(T, LAYOUT)
        for q in range(0, pieces, PIECES):
            due = (unsent > 0) & (q // PIECES % EVERY == EVERY // 2 * WG % EVERY)
            ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, due)
            later = block_scales(T, a_scale, begin, end, q + PIECES)
            mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
            if PROMOTE == 0:
                for i in gl.static_range(PIECES):
                    a = a_s.index(slot * PIECES + i).slice(ROW0, 64)
                    b = b_s.index((slot * PIECES + i) * T.wg_n + WG // T.wg_m)
                    acc = warpgroup_mma(a, b.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(PIECES, deps=(acc,))  # the previous stage has been read
                acc = warpgroup_mma_init(acc)
                if q > 0:
                    mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
                if due:  # in parallel with this stage's wgmma
                    send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                    unsent -= 1
            else:
                UNITS: gl.constexpr = units(T)
                for u in gl.static_range(UNITS):
                    if u % CHUNKS == 0:
                        rows_of_a = left_operand(T, LAYOUT, a_s, slot * PIECES + u // CHUNKS * PROMOTE, ROW0)
                    two = started(T, WG, rows_of_a, b_s, slot, u, two)
                    if u == min(1, UNITS - 1):
                        if due:  # in parallel with the products of two units
                            send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                            unsent -= 1
                    if u > 0:
                        sums, two = promoted(T, sums, u - 1, PROMOTE, two, stretch, down)
                sums, two = promoted(T, sums, UNITS - 1, 0, two, stretch, down)
                mbarrier.arrive(empty.index(slot), count=1)
            stretch = later
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1
        if PROMOTE == 0:
            sums = (warpgroup_mma_wait(0, deps=(acc,)),)
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        factors = factors_of_chunks(T, across, factor)
        if T.split and part >= 0:
            coming = record(tiles, t + 1)
            for c in gl.static_range(CHUNKS):
                r = ROW0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
                x = COL0 + c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
                at = (part * T.rows + gl.expand_dims(r, 1)) * T.block_cols + gl.expand_dims(x, 0)
                gl.store(part_sums + at, scaled(T, sums, c, down, factors))
        else:
            while unsent > 0:  # the tile was too short to store all boxes during its stages
                ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, True)
                send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                unsent -= 1
            tma_store_wait(0)  # until TMA has read the staged tile, which is overwritten next
            coming = record(tiles, t + 1)  # latency is hidden here; one spare record ends the schedule
            for c in gl.static_range(CHUNKS):
                z = scaled(T, sums, c, down, factors)
                if T.bias:
                    z = z + gl.expand_dims(shift, 1)
                if T.c_col:
                    stage.slice(c * CHUNK, CHUNK).permute((1, 0)).store(z.to(c_desc.dtype))
                else:
                    stage.slice(c * CHUNK, CHUNK, dim=1).store(z.to(c_desc.dtype))
            fence_async_shared()
            unsent = BOXES + 0
            old_row = row + ROW0
            old_col = col
        begin, end, row, col, part = coming
        stretch = block_scales(T, a_scale, begin, end, 0)
    while unsent > 0:
        ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, True)
        send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
        unsent -= 1
    tma_store_wait(0)  # shared memory must outlive the copies that read it
