"""Device pieces of FP8 products: scales on their way into float32 sums of a tile.

T is a Config of hopper.spmm_fp8. Scales of blocks come in with every sum that float32 takes over from the tensor cores,
scales of rows and columns once, when the tile is done.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def block_scales(T: gl.constexpr, a_scale, begin, end, q):
    """The scales of the blocks whose sums float32 takes over in the stage that begins at piece q; () if they are not
    per block. Where a step is missing there is nothing but zeros to scale."""
    COUNT: gl.constexpr = T.pieces // T.promote
    found = ()
    if T.a_scale == "block":
        for g in gl.static_range(COUNT):
            step = begin + (q + g * T.promote) // T.per_block
            found = found + (gl.load(a_scale + step, mask=step < end, other=0.0),)
    return found


@gluon.jit
def taken_over(T: gl.constexpr, sums, chunk_sums, U: gl.constexpr, stretch):
    """Float32 sums with unit U of a stage, which the tensor cores have summed up, in its chunk."""
    C: gl.constexpr = U % T.chunks
    if T.a_scale == "block":
        chunk_sums = chunk_sums * stretch[U // T.chunks]
    return sums[:C] + (sums[C] + chunk_sums,) + sums[C + 1 :]


@gluon.jit
def scales_of(T: gl.constexpr, LAYOUT: gl.constexpr, scales, row, col, m, n):
    """What the rows from `row` on are multiplied with, and each chunk of the columns from `col` on; 0 outside C.

    Asked for while a tile begins. A column's scale is needed by 32 threads; until then one keeps it.
    """
    a_scale, b_scale, factor = scales
    CHUNK: gl.constexpr = T.chunk
    CHUNKS: gl.constexpr = T.chunks
    down = factor
    if T.a_scale == "row":
        r = row + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        down = gl.load(a_scale + r, mask=r < m, other=0.0) * factor
    across = ()
    if T.b_scale == "column":
        for c in gl.static_range(CHUNKS):
            at = col + c * CHUNK + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [4], [0]))
            across = across + (gl.load(b_scale + at, mask=at < n, other=0.0),)
    return down, across


@gluon.jit
def scaled(T: gl.constexpr, LAYOUT: gl.constexpr, sums, C: gl.constexpr, down, across):
    """Chunk C of a tile's sums, times the scales that `scales_of` gave."""
    z = sums[C]
    if T.b_scale == "column":
        over = gl.convert_layout(across[C], gl.SliceLayout(0, LAYOUT))
        if T.a_scale != "row":
            over = over * down
        z = z * gl.expand_dims(over, 0)
    if T.a_scale == "row":
        z = z * gl.expand_dims(down, 1)
    elif T.b_scale != "column":
        z = z * down
    return z
