"""Device pieces of Hopper's matrix products: the consumer warpgroups, and the path of a tile to memory.

    load  -- ring of stages -->  multiply (1 or 2 warpgroups)  -- staged tile -->  C

Each product has its own producer, which fills the ring. Consumer warpgroups multiply from shared memory with wgmma,
round their 64 x cols of a tile, and stage it in shared memory. It is stored to C box by box, in parallel with the
wgmma of the next tile. An activation, or the product or sum with another matrix, is applied to a box just before it
is stored. The next wgmma waits for that, so boxes with an epilogue are small and spread over the tile. Tiles of full
height have a second way, through registers (spmm/multiply_register_tile.py), without slopes. Alternatives that were
tried (docs/notes/products-hopper.md): the epilogue in registers before staging; two extra warps, too slow for short
tiles; four extra warps, which leave 128 registers a thread, fewer than 64 x 256 sums need.

T is a Config with the fields of `Tile`. A record of `tiles` has RECORD numbers: first step, end step, row and column
of C, column of B, workspace slot or -1, row inside the block of A, 1 if the steps are walked backwards. In a sampled
product (sddmm) a tile is several stored blocks of one block row, and its record is: 0, end step, row inside the block,
number of the group of blocks, row of X, -1, 0, 0.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from sparsek.engine.launch.gluon import reinterpret, tma_load, tma_store, tma_store_wait
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.products.kernels.spmm.activation import activation_ptx, slope_ptx

RECORD = gl.constexpr(8)

Shape = TypeVar("Shape", bound="Tile")


class Beside(NamedTuple):
    """A matrix in C's layout: the other one of the epilogue, of leading stride 8 * lead8 and `rows` x 8 * cols8 in
    memory, and beta. `desc`: with `slope`, of the matrix of slopes, whose boxes are in `shared`; with `preload`, of the
    other one, of whose boxes `shared` has barriers.
    """

    other: Any
    lead8: Any
    rows: Any
    cols8: Any
    beta: Any
    desc: Any
    shared: Any


@dataclass(frozen=True, repr=False)
class Tile(KernelConfig):
    """A tile of C and the ring that feeds it. All of it is known at compile time.

    `wg_m` x `wg_n` consumer warpgroups own 64 x `cols` of C each. A piece is `width` deep in K; a stage holds
    `pieces` of them. `block` is a block of A (of S, for a sampled product); `joined_rows` block rows share a tile.
    `a_col`, `b_col`, `c_col`: the matrix is stored as its transpose, row-major. `every`: the number of stages between
    two stores of C boxes. `box`: the most rows or columns of one. With `every` 0, for tiles of few stages, all
    boxes are stored at once; with `direct` also without TMA, whose queue would delay later loads. `slope`: a second
    matrix gets the derivative of the activation; a warpgroup holds one box of it in shared memory. `preload`: the other
    matrix of `combine` is loaded into the staged tile, box by box as these are stored, and joins the sums in float32.
    `held`: the finished tile waits in registers, in pieces of so many columns (spmm/multiply_register_tile.py); 0: it
    is staged.
    """

    block: tuple[int, int]
    wg_m: int
    wg_n: int
    cols: int
    width: int
    pieces: int
    stages: int
    joined_rows: int = 1
    a_col: bool = False
    b_col: bool = False
    c_col: bool = False
    bias: bool = False
    has_alpha: bool = False
    activation: str = ""
    combine: str = ""
    split: bool = False
    every: int = 2
    box: int = 64
    direct: bool = False
    slope: bool = False
    preload: bool = False
    held: int = 0

    sampled: ClassVar[bool] = False
    # Whether step s of the schedule is stored block s of A, always walked forwards, and a tile without steps gets a
    # stage of zeros (spmm/load.py).
    in_order: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        return 64 * self.wg_m

    @property
    def block_cols(self) -> int:
        return self.cols * self.wg_n

    @property
    def height(self) -> int:
        """Rows of the tile that belong to C."""
        return min(self.block[0] * self.joined_rows, self.rows)

    @property
    def owned_cols(self) -> int:
        """Columns of the tile that belong to C."""
        return self.block_cols

    @property
    def a_box(self) -> int:
        """Rows of one A box. A box taller than its block reads the next block's rows, which are never stored."""
        bm = self.block[0]
        return bm if bm < self.rows and bm & (bm - 1) == 0 else self.rows

    @property
    def a_rows(self) -> int:
        """Rows of A in a piece."""
        return self.rows if self.a_col else self.a_box * self.joined_rows

    @property
    def c_box(self) -> int:
        """Rows of one C box: the largest power of two that divides each warpgroup's part."""
        return min(64 if self.c_col or self.held else self.box, self.height & -self.height)

    @property
    def panel(self) -> int:
        """Columns of one C box."""
        return self.held or min(self.box if self.c_col else 64, self.cols)

    @property
    def held_boxes(self) -> int:
        """Boxes of shared memory that the pieces of a warpgroup's held tile leave through, in turn."""
        return 4 if self.preload else 2

    @property
    def c_shape(self) -> tuple[int, int]:
        """Shape of one C box in memory."""
        return (self.panel, self.c_box) if self.c_col else (self.c_box, self.panel)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.pieces * self.width * (self.a_rows + self.block_cols)

    @property
    def smem_bytes(self) -> int:
        ring = 2 * self.stages * self.pieces * self.width * (self.rows + self.block_cols)
        box = 2 * self.wg_m * self.wg_n * self.c_box * self.panel
        staged = self.held_boxes * box if self.held else 2 * self.rows * self.block_cols + box * self.slope
        return ring + staged + 16 * self.stages + 1024

    @property
    def finishes(self) -> bool:
        """Whether an epilogue is applied to boxes before they are stored."""
        return bool(self.activation or (self.combine and not self.preload))

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.wg_m * self.wg_n == 1 else 1

    @property
    def options(self) -> dict[str, int]:
        """Compiler options: registers for two CTAs on an SM."""
        return {"maxnreg": 128} if self.ctas_per_sm == 2 else {}


def deepened(t: Shape, smem: int) -> Shape:
    """The same tile with as many stages, 2 to 12, as shared memory holds next to the staged tile."""
    room = smem // t.ctas_per_sm - 1024
    spare = room - replace(t, stages=0).smem_bytes
    one = replace(t, stages=1).smem_bytes - replace(t, stages=0).smem_bytes
    return replace(t, stages=max(2, min(12, spare // one)))


@gluon.constexpr_function
def owned_rows(t: Tile, wg: int) -> int:
    """Rows of boxes of C that warpgroup `wg` owns."""
    return min(64, t.height - 64 * (wg % t.wg_m)) // t.c_box


@gluon.constexpr_function
def owned_boxes(t: Tile, wg: int) -> int:
    """Boxes of C that warpgroup `wg` owns."""
    columns = max(0, min(t.cols, t.owned_cols - t.cols * (wg // t.wg_m)))
    return owned_rows(t, wg) * (columns // t.panel)


def most_boxes(t: Tile) -> int:
    """Boxes of the warpgroup that owns the most."""
    return max(owned_boxes(t, wg) for wg in range(t.wg_m * t.wg_n))


@gluon.constexpr_function
def box_layout(t: Tile) -> gl.BlockedLayout:
    """The distribution of a box over threads: 8 contiguous elements each."""
    across = t.c_shape[1] // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def box_at(T: gl.constexpr, WG: gl.constexpr, box):
    """Row and column of box number `box` in the warpgroup's part, and its position in the stage."""
    OWNED: gl.constexpr = owned_rows(T, WG)
    panel = box // OWNED
    r = box % OWNED
    if T.c_col:
        place = r * (T.cols // T.panel) + panel
    else:
        place = panel * (64 // T.c_box) + r
    return r * T.c_box, panel * T.panel, place


@gluon.jit
def boxed(T: gl.constexpr, c_desc, stage):
    """A warpgroup's stage viewed as its boxes of C."""
    COUNT: gl.constexpr = 64 // T.c_box * (T.cols // T.panel)
    SHAPE: gl.constexpr = [COUNT, T.c_shape[0], T.c_shape[1]]
    return reinterpret(stage, c_desc.dtype, SHAPE, c_desc.layout)


@gluon.jit
def bias_of(T: gl.constexpr, LAYOUT: gl.constexpr, bias, row, m):
    """The bias of a warpgroup's rows from `row` on; 0 below the matrix."""
    r = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return gl.load(bias + r, mask=r < m, other=0.0).to(gl.float32)


@gluon.jit
def activated(T: gl.constexpr, z, DTYPE: gl.constexpr):
    """The activation in float32, to be rounded to DTYPE. Few instructions: the next stage's wgmma waits for them."""
    if T.activation == "":
        return z
    elif T.activation == "relu":
        return gl.where(z < 0, 0.0, z)
    else:
        PTX: gl.constexpr = activation_ptx(T.activation, DTYPE == gl.float16)
        return gl.inline_asm_elementwise(PTX, "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def activated_with_slope(T: gl.constexpr, z, DTYPE: gl.constexpr):
    """The activation and its slope in float32, to be rounded to DTYPE."""
    PTX: gl.constexpr = slope_ptx(T.activation, DTYPE == gl.float16)
    return gl.inline_asm_elementwise(
        PTX, "=f,=f,f", [z], dtype=(gl.float32, gl.float32), is_pure=True, pack=1
    )


@gluon.jit
def corner(T: gl.constexpr, WG: gl.constexpr, box, row, col, ahead):
    """The position in C of box number `box` of the warpgroup's part at (row, col), and its index among the boxes.

    In a sampled product: row `row` of the block whose position was prefetched.
    """
    r, c, place = box_at(T, WG, box)
    if T.sampled:
        stored, shift = ahead
        down = stored * T.block[0] + row + r
        along = shift + c % T.piece
    else:
        down = row + r
        along = col + T.cols * (WG // T.wg_m) + c
    if T.c_col:
        down, along = along, down
    return down, along, place


@gluon.jit
def cells(T: gl.constexpr, WG: gl.constexpr, box, row, col, beside):
    """Pointers to the elements of box number `box` in a matrix of C's layout, and the mask of those that exist."""
    HIGH: gl.constexpr = T.c_shape[0]
    WIDE: gl.constexpr = T.c_shape[1]
    LAYOUT: gl.constexpr = box_layout(T)
    down, along, place = corner(T, WG, box, row, col, 0)
    y = down + gl.expand_dims(gl.arange(0, HIGH, gl.SliceLayout(1, LAYOUT)), 1)
    # Boxes begin at multiples of 8 columns, and C has a multiple of 8: with this hint, 16 bytes are one access.
    x = along // 8 * 8 + gl.expand_dims(gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT)), 0)
    return beside.other + y.to(gl.int64) * (beside.lead8 * 8) + x, (y < beside.rows) & (x < beside.cols8 * 8)


@gluon.jit
def look_ahead(T: gl.constexpr, WG: gl.constexpr, box, row, col, beside, due):
    """Prefetches what box number `box` needs; the wait for the next stage hides the latency.

    This is the matching part of the other matrix, or the index and first column of its stored block.
    """
    if T.sampled:
        columns, stored = beside
        r, c, place = box_at(T, WG, box)
        at = col * T.groups + (T.cols * (WG // T.wg_m) + c) // T.piece
        return gl.load(stored + at, mask=due, other=0), gl.load(columns + at, mask=due, other=0) % T.side
    elif T.combine != "" and not T.preload:
        at, there = cells(T, WG, box, row, col, beside)
        return gl.load(at, mask=there & due, other=0.0)
    else:
        return 0


@gluon.jit
def send_box(T: gl.constexpr, WG: gl.constexpr, c_desc, box, row, col, boxes, ahead, beside):
    """Applies the epilogue to box number `box` and stores it, and its slopes, to global memory."""
    LAYOUT: gl.constexpr = box_layout(T)
    down, along, place = corner(T, WG, box, row, col, ahead)
    at = boxes.index(place)
    if T.finishes:
        z = at.load(LAYOUT).to(gl.float32)
        if T.slope:
            z, slope = activated_with_slope(T, z, c_desc.dtype)
            slopes = beside.shared.index(WG)
            tma_store_wait(0)  # until TMA has read the slopes of the box before
            slopes.store(slope.to(c_desc.dtype))
        else:
            z = activated(T, z, c_desc.dtype)
        if T.combine == "mul":
            z = z * ahead.to(gl.float32)
        elif T.combine == "add":
            z = z + beside.beta * ahead.to(gl.float32)
        at.store(z.to(c_desc.dtype))
        fence_async_shared()
    tma_store(c_desc, [down, along], at)
    if T.slope:
        tma_store(beside.desc, [down, along], slopes)


@gluon.jit
def ask_box(T: gl.constexpr, WG: gl.constexpr, box, row, col, boxes, beside):
    """Starts to load box number `box` of the other matrix to its place in the stage."""
    landed = beside.shared.index(WG)
    down, along, place = corner(T, WG, box, row, col, 0)
    mbarrier.expect(landed, 2 * T.c_box * T.panel)
    tma_load(beside.desc, [down, along], landed, boxes.index(place))


@gluon.jit
def combined(T: gl.constexpr, sums, staged, beta):
    """The sums of a tile with the other matrix, which is staged."""
    if T.c_col:
        staged = staged.permute((1, 0))
    other = staged.load(sums.type.layout).to(gl.float32)
    if T.combine == "mul":
        return sums * other
    else:
        return sums + beta * other


@gluon.jit
def put_box(T: gl.constexpr, WG: gl.constexpr, box, row, col, boxes, beside):
    """Writes box number `box` to C as streaming data (.cs), so that operands that are read again stay cached."""
    LAYOUT: gl.constexpr = box_layout(T)
    r, c, place = box_at(T, WG, box)
    to, there = cells(T, WG, box, row, col, beside)
    gl.store(to, boxes.index(place).load(LAYOUT), mask=there, cache_modifier=".cs")


@gluon.jit
def multiply(T: gl.constexpr, WG: gl.constexpr, c_desc, lists, before, beside, ring, c_s):
    """Consumer warpgroup WG: accumulates its 64 x cols of every tile, and stores them during the next tile.

    `lists` is (tiles, starts); `before` (bias, rows of C, alpha, workspace); `ring` (A slots, B slots, full, empty).
    `beside` is (first columns, positions among the stored blocks) in a sampled product, `groups` of each for a tile.
    """
    tiles, starts = lists
    bias, m, alpha, part_sums = before
    a_s, b_s, full, empty = ring
    PIECES: gl.constexpr = T.pieces
    PER: gl.constexpr = T.per_block
    STAGES: gl.constexpr = T.stages
    COLS: gl.constexpr = T.cols
    EVERY: gl.constexpr = max(T.every, 1)
    ROW0: gl.constexpr = 64 * (WG % T.wg_m)
    COL0: gl.constexpr = T.cols * (WG // T.wg_m)
    WG_M: gl.constexpr = T.wg_m
    WG_N: gl.constexpr = T.wg_n
    BOXES: gl.constexpr = owned_boxes(T, WG)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.cols, 16])
    stage = c_s.index(WG)
    boxes = boxed(T, c_desc, stage)
    first = gl.load(starts + gl.program_id(0))
    last = gl.load(starts + gl.program_id(0) + 1)
    slot = 0
    phase = 0
    loaded = 0  # the phase of the barrier of the other matrix
    unasked = 0  # boxes of it that are to be loaded for this tile
    unsent = 0  # boxes of the previous tile that are still staged in shared memory, and their destination
    old_row = 0
    old_col = 0
    begin = gl.load(tiles + RECORD * first)
    end = gl.load(tiles + RECORD * first + 1)
    row = gl.load(tiles + RECORD * first + 2)
    col = gl.load(tiles + RECORD * first + 3)
    part = gl.load(tiles + RECORD * first + 5)
    if T.bias:
        shift = bias_of(T, LAYOUT, bias, row + ROW0, m)
    for t in range(first, last):
        # The next tile's record is prefetched during a whole tile; the schedule ends with one spare record.
        next_begin = gl.load(tiles + RECORD * t + RECORD)
        next_end = gl.load(tiles + RECORD * t + RECORD + 1)
        next_row = gl.load(tiles + RECORD * t + RECORD + 2)
        next_col = gl.load(tiles + RECORD * t + RECORD + 3)
        next_part = gl.load(tiles + RECORD * t + RECORD + 5)
        pieces = (end - begin) * PER
        if T.preload:
            unasked = BOXES + 0
        start = gl.zeros((64, COLS), gl.float32, LAYOUT)
        if T.bias:
            if not T.has_alpha and not T.split:
                start = start + gl.expand_dims(shift, 1)
        acc = warpgroup_mma_init(start)
        for q in range(0, pieces, PIECES):
            due = (unsent + unasked > 0) & (q // PIECES % EVERY == EVERY // 2 * WG % EVERY)
            ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, due)
            mbarrier.wait(full.index(slot), phase)  # until TMA has written the whole slot
            for i in gl.static_range(PIECES):
                if T.a_col:
                    a = a_s.index((slot * PIECES + i) * WG_M + WG % WG_M).permute((1, 0))
                else:
                    a = a_s.index(slot * PIECES + i).slice(ROW0, 64)
                b = b_s.index((slot * PIECES + i) * WG_N + WG // WG_M)
                if T.b_col:
                    b = b.permute((1, 0))
                acc = warpgroup_mma(a, b, acc, is_async=True)
            if T.preload:
                if due:  # one box is stored, and the one before, which TMA has read, makes room
                    tma_store_wait(0)
                    if unasked > unsent:
                        ask_box(T, WG, BOXES - unasked, row + ROW0, col, boxes, beside)
                        unasked -= 1
                    if unsent > 0:
                        send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                        unsent -= 1
            elif not T.finishes and T.every > 0:
                if due:
                    send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                    unsent -= 1
            acc = warpgroup_mma_wait(PIECES, deps=(acc,))  # the previous stage has been read
            acc = warpgroup_mma_init(acc)
            if q > 0:
                mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
            if T.finishes:
                if due:  # in parallel with this stage's wgmma
                    send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                    unsent -= 1
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
        if T.bias:
            next_shift = bias_of(T, LAYOUT, bias, next_row + ROW0, m)
        out = warpgroup_mma_wait(0, deps=(acc,))
        if pieces > 0:
            mbarrier.arrive(empty.index((slot + STAGES - 1) % STAGES), count=1)
        if T.preload:
            while unsent > 0:
                send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, 0, beside)
                unsent -= 1
            tma_store_wait(0)
            while unasked > 0:
                ask_box(T, WG, BOXES - unasked, row + ROW0, col, boxes, beside)
                unasked -= 1
            mbarrier.wait(beside.shared.index(WG), loaded)  # until TMA has written the whole stage
            loaded ^= 1
        if T.split and part >= 0:
            r = ROW0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
            c = COL0 + gl.arange(0, COLS, gl.SliceLayout(0, LAYOUT))
            at = (part * T.rows + gl.expand_dims(r, 1)) * T.block_cols + gl.expand_dims(c, 0)
            gl.store(part_sums + at, out)
        else:
            if T.has_alpha:
                out = out * alpha
            if T.bias:
                if T.has_alpha or T.split:
                    out = out + gl.expand_dims(shift, 1)
            if T.preload:
                out = combined(T, out, stage, beside.beta)
            elif not T.direct:
                while unsent > 0:  # the tile was too short to store all boxes during its stages
                    ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, True)
                    send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
                    unsent -= 1
                tma_store_wait(0)  # until TMA has read the staged tile, which is overwritten next
            if T.c_col:
                stage.permute((1, 0)).store(out.to(c_desc.dtype))
            else:
                stage.store(out.to(c_desc.dtype))
            if T.direct:
                for box in range(BOXES):
                    put_box(T, WG, box, row + ROW0, col, boxes, beside)
            else:
                fence_async_shared()
                if T.every > 0:
                    unsent = BOXES + 0
                    old_row = row + ROW0
                    old_col = col
                else:
                    for box in range(BOXES):
                        send_box(T, WG, c_desc, box, row + ROW0, col, boxes, 0, beside)
        begin = next_begin
        end = next_end
        row = next_row
        col = next_col
        part = next_part
        if T.bias:
            shift = next_shift
    if not T.direct:
        while unsent > 0:
            ahead = look_ahead(T, WG, BOXES - unsent, old_row, old_col, beside, True)
            send_box(T, WG, c_desc, BOXES - unsent, old_row, old_col, boxes, ahead, beside)
            unsent -= 1
        tma_store_wait(0)  # shared memory must outlive the copies that read it
