"""The producer warp of Hopper's products of BSR matrices: loads the operands' pieces by TMA into the ring.

    tiles of the CTA  -->  steps of each  -->  pieces of A's block and of B's rows  -- TMA -->  a slot of the ring

hopper.spmm, hopper.spgemm and hopper.spmm_fp8 share it. T is the Config of hopper.spmm or of hopper.spmm_fp8, which
multiplies the stored blocks in their order (`in_order`).

In hopper.spmm the CTAs read all of A at about the same time, and again for the next columns of B. C, and the matrix
that it is combined with, stream through L2 meanwhile and displace A. So every other tile of a CTA walks its blocks
backwards, and the blocks that were read last are still in L2. The sums of these tiles are added in that order. Where
rows are lopsided, CTAs turn at different times and read B's rows from both ends, which costs more than A does: all
tiles walk forwards. The schedule decides.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsek.engine.launch.gluon import tma_load
from sparsek.products.kernels.spmm.multiply import RECORD


@gluon.jit
def indices(T: gl.constexpr, steps, begin, end, q, back):
    """Block columns (or blocks of B) and blocks of A of the stage that begins at piece q of a tile's steps.

    `back`: the tile walks its steps from the last to the first. Pieces beyond them are outside A and B, where TMA fills
    in zeros.
    """
    cols, blocks, no_col, no_block = steps
    PER: gl.constexpr = T.per_block
    PIECES: gl.constexpr = T.pieces
    IN_ORDER: gl.constexpr = T.in_order
    MERGE: gl.constexpr = T.joined_rows
    js = ()
    bs = ()
    for i in gl.static_range(PIECES):
        step = begin + (q + i) // PER
        inside = step < end
        if not IN_ORDER and not T.b_stack:
            step = gl.where(back, begin + end - 1 - step, step)
        js = js + (gl.load(cols + step, mask=inside, other=no_col),)
        if not IN_ORDER:
            for r in gl.static_range(MERGE):
                bs = bs + (gl.load(blocks + step * MERGE + r, mask=inside, other=no_block),)
    return js, bs


@gluon.jit
def block_of(T: gl.constexpr, bs, steps, begin, end, q, I: gl.constexpr, R: gl.constexpr):
    """The block of A in joined row R of piece I of the stage that begins at piece q."""
    if T.in_order:
        step = begin + (q + I) // T.per_block
        return gl.where(step < end, step, steps[3])
    else:
        return bs[I * T.joined_rows + R]


@gluon.jit
def load(T: gl.constexpr, a_desc, b_desc, lists, steps, ring):
    """Producer warp: for each tile of the CTA, loads the pieces of its blocks into the ring.

    `steps` is (block columns or blocks of B, blocks of A or None, an index outside B, an index outside A). Records are
    prefetched two tiles ahead and indices one stage ahead, so a tile of one stage waits for neither.
    """
    tiles, starts = lists
    a_s, b_s, full, empty = ring
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    MERGE: gl.constexpr = T.joined_rows
    BM: gl.constexpr = T.block[0]
    BK: gl.constexpr = T.block[1]
    WIDTH: gl.constexpr = T.width
    COLS: gl.constexpr = T.cols
    A_BOXES: gl.constexpr = T.rows // T.a_boxed
    B_BOXES: gl.constexpr = T.wg_n
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 1  # waiting on the phase before a barrier's first returns at once, so every slot starts empty
    at = tiles + RECORD * first
    begin = gl.load(at)
    end = gl.load(at + 1)
    col = gl.load(at + 4)
    a_row = gl.load(at + 6)
    back = gl.load(at + 7) > 0
    next_begin = gl.load(at + RECORD)
    next_end = gl.load(at + RECORD + 1)
    next_col = gl.load(at + RECORD + 4)
    next_row = gl.load(at + RECORD + 6)
    next_back = gl.load(at + RECORD + 7) > 0
    js, bs = indices(T, steps, begin, end, 0, back)
    for t in range(first, last):
        at = tiles + RECORD * t + 2 * RECORD
        then_begin = gl.load(at)
        then_end = gl.load(at + 1)
        then_col = gl.load(at + 4)
        then_row = gl.load(at + 6)
        then_back = gl.load(at + 7) > 0
        next_js, next_bs = indices(T, steps, next_begin, next_end, 0, next_back)
        pieces = (end - begin) * PER
        if T.in_order:
            pieces = gl.maximum(1, pieces)
        for q in range(0, pieces, PIECES):
            later_js, later_bs = indices(T, steps, begin, end, q + PIECES, back)
            mbarrier.wait(empty.index(slot), phase)  # until every warpgroup has read the slot
            landed = full.index(slot)
            mbarrier.expect(landed, T.stage_bytes)
            for i in gl.static_range(PIECES):
                part = slot * PIECES + i
                k = (q + i) % PER * WIDTH
                if T.a_col:  # a box of 64 columns extends past a narrower block, where TMA fills in zeros
                    for w in gl.static_range(A_BOXES):
                        tma_load(
                            a_desc, [bs[i] * BK + k, a_row + w * 64], landed, a_s.index(part * A_BOXES + w)
                        )
                else:
                    for r in gl.static_range(MERGE):
                        row = block_of(T, bs, steps, begin, end, q, i, r) * BM + a_row
                        tma_load(a_desc, [row, k], landed, a_s.index(part * A_BOXES + r))
                for w in gl.static_range(B_BOXES):
                    b_part = b_s.index(part * B_BOXES + w)
                    along = col + w * COLS
                    if T.b_stack:
                        if T.b_col:
                            tma_load(b_desc, [js[i], along, k], landed, b_part)
                        else:
                            tma_load(b_desc, [js[i], k, along], landed, b_part)
                    elif T.b_col:
                        tma_load(b_desc, [along, js[i] * BK + k], landed, b_part)
                    else:
                        tma_load(b_desc, [js[i] * BK + k, along], landed, b_part)
            js = later_js
            bs = later_bs
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1
        js = next_js
        bs = next_bs
        begin = next_begin
        end = next_end
        col = next_col
        a_row = next_row
        back = next_back
        next_begin = then_begin
        next_end = then_end
        next_col = then_col
        next_row = then_row
        next_back = then_back
