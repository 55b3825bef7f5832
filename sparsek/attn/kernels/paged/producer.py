"""The producer warp of hopper.attention_paged: Q of every tile, then K and V of its steps, from pages, by TMA."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from sparsek.attn.kernels.forward.softmax import prefetch
from sparsek.attn.kernels.paged.steps import RECORD, masked_key, tile_at, tile_number, whole_key
from sparsek.engine.launch.gluon import reinterpret, tma_load


@gluon.jit
def page_of(T: gl.constexpr, table, step, pages, key, seen):
    """The page of the box of keys from `key` on; where no query sees one, a page that does not exist: TMA reads zeros.

    `seen`: end of the keys, first key in a window, end of the sinks. A page before these may be another request's.
    """
    length, first, sinks = seen
    there = key < length
    if T.window:
        near = key + T.box > first
        if T.sinks:
            near = near | (key < sinks)
        there = there & near
    page = gl.load(table + (key // T.page) * step, mask=there, other=0)
    return gl.where(there, gl.minimum(gl.maximum(page, 0), pages - 1), pages)


@gluon.jit
def cleared(T: gl.constexpr, lines_s, slot, tail):
    """Writes zeros to rows of V in `slot` from `tail` on to the end of their box.

    `lines_s` are 8 rows of 64 columns each, 8 lines of 128 bytes, in which TMA's swizzle moves 16 bytes at a time.
    """
    KEYS: gl.constexpr = T.keys
    PARTS: gl.constexpr = T.v_dim // 64
    CHUNKS: gl.constexpr = T.box // 8
    WORDS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.arange(0, 256, WORDS) // 32
    first = tail // T.box * T.box
    for chunk in range(CHUNKS):
        at = first + chunk * 8
        if at + 8 > tail:
            for part in gl.static_range(PARTS):
                line = lines_s.index(((slot * PARTS + part) * KEYS + at) // 8)
                line.store(gl.where(at + row >= tail, 0, line.load(WORDS)))


@gluon.jit
def warp_sync():
    """Orders what the lanes of the producer warp wrote before an arrival, which one lane makes."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, $1;", "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load(
    T: gl.constexpr, q_desc, k_desc, v_desc, tiles, count, lists, table, sizes, q_s, k_s, v_s, bars
):  # fmt: skip
    """Producer warp: Q of every tile, then K and V of its steps."""
    DTYPE: gl.constexpr = q_desc.dtype
    POSITIONS: gl.constexpr = 64 // T.pack
    KEYS: gl.constexpr = T.keys
    GROUPS: gl.constexpr = T.groups
    BOX: gl.constexpr = T.box
    BOXES: gl.constexpr = T.keys // T.box
    STAGES: gl.constexpr = T.stages
    K_PARTS: gl.constexpr = T.dim // T.k_box[1]
    V_PARTS: gl.constexpr = T.v_dim // T.v_box[1]
    k_boxes = reinterpret(k_s, DTYPE, [STAGES * K_PARTS * BOXES] + k_desc.block_type.shape, k_desc.layout)
    v_boxes = reinterpret(v_s, DTYPE, [STAGES * V_PARTS * BOXES] + v_desc.block_type.shape, v_desc.layout)
    LINES: gl.constexpr = T.stages * (T.v_dim // 64) * T.keys // 8
    lines_s = reinterpret(v_s, gl.int32, [LINES, 256], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    units, group, pages, table_row, table_step, window, sinks = sizes
    slot = 0
    phase = 1  # waiting on the phase before a barrier's first returns at once, so every slot starts empty
    q_slot = 0
    q_phase = 1
    tail_phase = 0
    for t in range(gl.program_id(0), gl.load(count) * units, gl.num_programs(0)):
        total = gl.load(count) * units
        number = tile_number(t, total)
        record = tiles + RECORD * (number // units)
        h = number % units * T.pack
        kv = h // group
        row_0 = gl.load(record)
        length = gl.load(record + 4)
        entries = table + gl.load(record + 1).to(gl.int64) * table_row
        masked, steps, where = tile_at(T, record, h, lists)
        blocks = gl.load(record + 13)
        seen = (length, gl.load(record + 2) - window + 1, sinks)
        following = t + gl.num_programs(0)
        prefetch(tiles + RECORD * (tile_number(gl.where(following < total, following, t), total) // units))
        for w in gl.static_range(GROUPS):
            # Wait until warpgroup w has finished with this slot's Q.
            mbarrier.wait(q_empty.index(q_slot * GROUPS + w), q_phase)
            landed = q_full.index(q_slot * GROUPS + w)
            mbarrier.expect(landed, 64 * T.dim * 2)
            tma_load(
                q_desc, [h // T.pack, row_0 + w * POSITIONS, 0, 0], landed, q_s.index(q_slot * GROUPS + w)
            )
        q_slot += 1
        if q_slot == T.q_slots:
            q_slot = 0
            q_phase ^= 1
        for i in range(steps):
            if i < masked:
                key = masked_key(T, where, lists, i)
            else:
                key = whole_key(T, where, blocks, lists, i - masked)
            first_page = page_of(T, entries, table_step, pages, key, seen)
            # Wait until every warpgroup has multiplied the K in this slot.
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), KEYS * T.dim * 2)
            for j in gl.static_range(BOXES):
                page = first_page
                if j > 0:
                    page = page_of(T, entries, table_step, pages, key + j * BOX, seen)
                for part in gl.static_range(K_PARTS):
                    tma_load(
                        k_desc, [page, kv, (key + j * BOX) % T.page, part * T.k_box[1]], k_full.index(slot),
                        k_boxes.index((slot * K_PARTS + part) * BOXES + j),
                    )  # fmt: skip
            mbarrier.wait(v_empty.index(slot), phase)  # and the V
            # If the keys end inside a box, V lands at a barrier of the producer's own.
            tail = length - key
            ends = (tail > 0) & (tail < KEYS) & (tail % BOX > 0)
            landed = v_full.index(gl.where(ends, STAGES, slot))
            mbarrier.expect(landed, KEYS * T.v_dim * 2)
            for j in gl.static_range(BOXES):
                page = first_page
                if j > 0:
                    page = page_of(T, entries, table_step, pages, key + j * BOX, seen)
                for part in gl.static_range(V_PARTS):
                    tma_load(
                        v_desc, [page, kv, (key + j * BOX) % T.page, part * T.v_box[1]], landed,
                        v_boxes.index((slot * V_PARTS + part) * BOXES + j),
                    )  # fmt: skip
            if ends:
                mbarrier.wait(landed, tail_phase)  # until V has landed
                tail_phase ^= 1
                cleared(T, lines_s, slot, tail)
                fence_async_shared()
                warp_sync()
                mbarrier.arrive(v_full.index(slot), count=1)
            slot += 1
            if slot == T.stages:
                slot = 0
                phase ^= 1
