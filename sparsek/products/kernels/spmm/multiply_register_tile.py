"""Consumer warpgroups of Hopper's products that hold a finished tile in registers, not in shared memory.

    sums [64, cols]  -- rounded, two in a register -->  held: pieces of T.held columns
    while the next tile is multiplied, one piece after another:
        held piece  -- activation in float32, rounded -->  a box of shared memory  -- TMA -->  C
        other matrix  -- TMA -->  box;  held piece and box, combined in float32, rounded -->  box  -- TMA -->  C

spmm/multiply.py stages the whole tile in shared memory. It reads and writes each box there once more to apply an
activation, and nothing is multiplied while it stages a tile. Shared memory is what wgmma and TMA wait for. Here a tile
passes through it once, in two boxes for each warpgroup, and the ring gets a further stage. A piece of the other
matrix is loaded into the box that the combined piece leaves by, two pieces ahead; so there are four.

The registers of a tile have constant indices only. So the loop over the stages of a tile is cut into one for every
piece, and one for the rest. The sums of a tile, its predecessor and the addresses take up to 224 registers a thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.engine.launch.gluon import tma_load, tma_store, tma_store_wait
from sparsek.products.kernels.spmm.multiply import RECORD, activated, bias_of


@gluon.jit
def halves(x):
    """The left and the right half of x [64, 2 C]; no data moves between threads."""
    C: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [64, 2, C]), [0, 2, 1]))


@gluon.jit
def pieces_of(words, COUNT: gl.constexpr):
    """x [64, C] as a tuple of COUNT pieces, from left to right."""
    if COUNT == 1:
        return (words,)
    else:
        left, right = halves(words)
        return pieces_of(left, COUNT // 2) + pieces_of(right, COUNT // 2)


@gluon.jit
def hold(T: gl.constexpr, sums, DTYPE: gl.constexpr):
    """The sums of a tile, rounded, two neighbours in a 32-bit word, in pieces of T.held columns."""
    C: gl.constexpr = sums.shape[1] // 2
    low, high = gl.split(gl.reshape(sums, [64, C, 2]))
    KIND: gl.constexpr = "f16x2" if DTYPE == gl.float16 else "bf16x2"
    PTX: gl.constexpr = "cvt.rn." + KIND + ".f32 $0, $2, $1;"
    words = gl.inline_asm_elementwise(PTX, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)
    return pieces_of(words, T.cols // T.held)


@gluon.jit
def unfold(T: gl.constexpr, words, DTYPE: gl.constexpr):
    """A held piece [64, held] in float32, in wgmma's layout."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.held, 16])
    low = (words & 65535).to(gl.int16).to(DTYPE, bitcast=True)
    high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    both = gl.reshape(gl.join(low, high), [64, T.held])
    return gl.convert_layout(both, LAYOUT, assert_trivial=True).to(gl.float32)


@gluon.jit
def place(T: gl.constexpr, WG: gl.constexpr, PIECE: gl.constexpr, row, col):
    """The position in memory of a piece of the tile whose part of the warpgroup begins at row `row` of C."""
    along = col + T.cols * (WG // T.wg_m) + PIECE * T.held
    if T.c_col:
        return along, row
    else:
        return row, along


@gluon.jit
def ask(T: gl.constexpr, WG: gl.constexpr, PIECE: gl.constexpr, row, col, boxes, beside):
    """Starts to load a piece of the other matrix into its box."""
    BOX: gl.constexpr = T.held_boxes * WG + PIECE % T.held_boxes
    tma_store_wait(2)  # until TMA has read this box; two later pieces may still be on their way to C
    landed = beside.shared.index(BOX)
    down, along = place(T, WG, PIECE, row, col)
    mbarrier.expect(landed, 128 * T.held)
    tma_load(beside.desc, [down, along], landed, boxes.index(BOX))


@gluon.jit
def combined(T: gl.constexpr, z, box, beta):
    """A held piece in float32 with the other matrix's, which is in its box."""
    if T.c_col:
        box = box.permute((1, 0))
    other = box.load(z.type.layout).to(gl.float32)
    if T.combine == "mul":
        return z * other
    else:
        return z + beta * other


@gluon.jit
def leave(
    T: gl.constexpr, WG: gl.constexpr, PIECE: gl.constexpr, c_desc, words, row, col, boxes, beside, tile
):
    """Applies the epilogue to a piece of the CTA's tile number `tile`, which is held, and stores it to global memory.

    The load of another matrix's piece after the next begins here.
    """
    DTYPE: gl.constexpr = c_desc.dtype
    BOXES: gl.constexpr = T.held_boxes
    COUNT: gl.constexpr = T.cols // T.held
    BOX: gl.constexpr = BOXES * WG + PIECE % BOXES
    box = boxes.index(BOX)
    z = unfold(T, words, DTYPE)
    if T.preload:
        turn = tile * (COUNT // BOXES) + PIECE // BOXES  # how often this box was loaded before
        mbarrier.wait(beside.shared.index(BOX), turn & 1)  # until TMA has written it
        y = combined(T, z, box, beside.beta).to(DTYPE)
    else:
        y = activated(T, z, DTYPE).to(DTYPE)
        tma_store_wait(1)  # until TMA has read this box, which the piece before the last one left through
    if T.c_col:
        box.permute((1, 0)).store(y)
    else:
        box.store(y)
    fence_async_shared()
    down, along = place(T, WG, PIECE, row, col)
    tma_store(c_desc, [down, along], box)
    if T.preload:
        if PIECE + 2 < COUNT:
            ask(T, WG, PIECE + 2, row, col, boxes, beside)


@gluon.jit
def stage(T: gl.constexpr, WG: gl.constexpr, acc, REPLACES: gl.constexpr, q, slot, phase, ring):
    """Multiplies the stage that begins at piece q of a tile, asynchronously, and frees the tile's stage before.

    With REPLACES its products replace the sums. Returns the sums, and the next slot and phase.
    """
    a_s, b_s, full, empty = ring
    PIECES: gl.constexpr = T.pieces
    STAGES: gl.constexpr = T.stages
    WG_M: gl.constexpr = T.wg_m
    WG_N: gl.constexpr = T.wg_n
    mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
    for i in gl.static_range(PIECES):
        if T.a_col:
            a = a_s.index((slot * PIECES + i) * WG_M + WG % WG_M).permute((1, 0))
        else:
            a = a_s.index(slot * PIECES + i).slice(64 * (WG % WG_M), 64)
        b = b_s.index((slot * PIECES + i) * WG_N + WG // WG_M)
        if T.b_col:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=i > 0 or not REPLACES, is_async=True)
    acc = warpgroup_mma_wait(PIECES, deps=(acc,))  # the previous stage has been read
    acc = warpgroup_mma_init(acc)
    if q > 0:
        mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
    slot += 1
    if slot == STAGES:
        slot = 0
        phase ^= 1
    return acc, slot, phase


@gluon.jit
def multiply_held(T: gl.constexpr, WG: gl.constexpr, c_desc, lists, before, beside, ring, boxes):
    """Consumer warpgroup WG. The arguments are those of `multiply`, but `boxes` are T.held_boxes for each warpgroup.

    In `beside` every box of the other matrix has a barrier.
    """
    tiles, starts = lists
    bias, m, alpha, part_sums = before
    empty = ring[3]
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    STAGES: gl.constexpr = T.stages
    COLS: gl.constexpr = T.cols
    COUNT: gl.constexpr = T.cols // T.held
    GAP: gl.constexpr = T.every * T.pieces
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.cols, 16])
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 0
    old_row = 0
    old_col = 0
    held = hold(T, gl.zeros((64, COLS), gl.float32, LAYOUT), c_desc.dtype)
    begin = gl.load(tiles + RECORD * first)
    end = gl.load(tiles + RECORD * first + 1)
    row = gl.load(tiles + RECORD * first + 2)
    col = gl.load(tiles + RECORD * first + 3)
    for t in range(first, last):
        # The next tile's record is prefetched during a whole tile; the schedule ends with one spare record.
        next_begin = gl.load(tiles + RECORD * t + RECORD)
        next_end = gl.load(tiles + RECORD * t + RECORD + 1)
        next_row = gl.load(tiles + RECORD * t + RECORD + 2)
        next_col = gl.load(tiles + RECORD * t + RECORD + 3)
        pieces = (end - begin) * PER
        if T.bias:
            shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
        acc = warpgroup_mma_init(gl.zeros((64, COLS), gl.float32, LAYOUT))
        for i in gl.static_range(COUNT):
            for q in range(i * GAP, gl.minimum(pieces, (i + 1) * GAP), PIECES):
                acc, slot, phase = stage(T, WG, acc, False, q, slot, phase, ring)
            if t > first:  # in parallel with the last stage's wgmma
                leave(T, WG, i, c_desc, held[i], old_row, old_col, boxes, beside, t - first - 1)
            if T.preload:
                if i + 2 >= COUNT:  # what the first pieces of this tile will be combined with
                    ask(T, WG, i + 2 - COUNT, row + ROW0, col, boxes, beside)
        for q in range(COUNT * GAP, pieces, PIECES):
            acc, slot, phase = stage(T, WG, acc, False, q, slot, phase, ring)
        out = warpgroup_mma_wait(0, deps=(acc,))
        if pieces > 0:
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        if T.has_alpha:
            out = out * alpha
        if T.bias:
            out = out + gl.expand_dims(shift, 1)
        held = hold(T, out, c_desc.dtype)
        old_row = row + ROW0
        old_col = col
        begin = next_begin
        end = next_end
        row = next_row
        col = next_col
    if last > first:
        for i in gl.static_range(COUNT):
            leave(T, WG, i, c_desc, held[i], old_row, old_col, boxes, beside, last - first - 1)
    tma_store_wait(0)  # shared memory must outlive the copies that read it
