"""Device pieces of attention kernels: both products, the rules of partial blocks and the online softmax, by wgmma.

A warpgroup holds 64 rows of scores s [64, T.keys] in wgmma's accumulator layout: a thread has two rows, and two
adjacent keys of every eight. No function here moves a score to another thread. T is a kernel's Config.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

# A row's scaling may lag behind its maximum by a factor of 2^8, harmless in float32 sums.
LAG = gl.constexpr(8.0)


@gluon.jit
def scores(T: gl.constexpr, q, k_s, slot):
    """Issues S = Q K^T."""
    KEYS: gl.constexpr = T.keys
    DIM: gl.constexpr = T.dim
    k = k_s.index(slot).reshape((KEYS, DIM)).permute((1, 0))
    zero = gl.zeros((64, KEYS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16]))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def capped(s, cap):
    """tanh(cap s / (2 log2(e))), -1 to 1: scores over the softcap, where `cap` has the softmax scale over it.

    1 - 2 / (1 + exp(2x)), which ex2 and rcp round to 2^-23 of 1. tanh.approx is one instruction less, but its
    relative error of 2^-11 is one of 1 % in the weight of a capped score of 20.
    """
    RCP: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    rest = gl.inline_asm_elementwise(
        RCP, "=f,f", [gl.exp2(s * cap) + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * rest


@gluon.jit
def distances(s, away):
    """|c - away[r]| for row r and column c of scores s, float32. away: int32 [rows], exact below 2^24.

    Viewed as [rows, columns / 8, 4, 2], where a thread has one of the four: columns are constants there, so that no
    column number is converted or kept.
    """
    ROWS: gl.constexpr = s.shape[0]
    EIGHTS: gl.constexpr = s.shape[1] // 8
    cube = s.reshape((ROWS, EIGHTS, 4, 2))
    CUBE: gl.constexpr = cube.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, CUBE)))
    eight = gl.arange(0, EIGHTS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, CUBE)))) * 8
    pair = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, CUBE)))) * 2
    one = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, CUBE))))
    first = gl.convert_layout(away, ROW)[:, None, None, None] - pair[None, None, :, None]
    rest = eight[None, :, None, None] + one[None, None, None, :]
    found = gl.abs(rest.to(gl.float32) - first.to(gl.float32))
    return gl.convert_layout(found.reshape((ROWS, EIGHTS * 8)), s.type.layout)


@gluon.jit
def biased(s, scale, slope, away):
    """ALiBi: scale s - slope |c - away| for column c. slope and away [rows], away in int32."""
    return s * scale - distances(s, away) * gl.expand_dims(slope, 1)


@gluon.jit
def with_sink(m, l, sink):
    """m and l of rows after one more score in base 2 that has no value, and the factor by which sums before it shrank.

    -inf for no sink.
    """
    top = gl.maximum(m, sink)
    base = gl.where(top == float("-inf"), 0.0, top)
    kept = gl.exp2(m - base)
    return top, l * kept + gl.exp2(sink - base), kept


@gluon.jit
def softmax(T: gl.constexpr, s, m, l, scale, DTYPE: gl.constexpr):
    """One step of the online softmax in base 2 (Milakov and Gimelshein 2018; Dao 2023).

    Returns P in pairs, the rows' scaling m and sums l, and the factor by which they shrank. If the maximum grew by
    less than 2^LAG, m is unchanged.
    """
    top = gl.maximum(m, gl.max(s, 1) * scale)
    m_new = gl.where(top > m + LAG, top, m)
    base = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key yet: exp2(-inf - 0) is 0, not NaN
    alpha = gl.exp2(m - base)
    p = gl.exp2(s * scale - gl.expand_dims(base, 1))
    l = l * alpha + gl.sum(p, 1)
    # Two adjacent scores in one register. Triton carries a tensor of halves through the loop as single halves, which
    # 64 instructions a step packed again (2026-11-21).
    HALF: gl.constexpr = T.keys // 2
    # fmt: off
    PACK: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    # fmt: on
    even, odd = p.reshape((64, HALF, 2)).split()
    pairs = gl.inline_asm_elementwise(PACK, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    return pairs, m_new, l, alpha


@gluon.jit
def unpacked(T: gl.constexpr, pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """P as the left operand of wgmma."""
    KEYS: gl.constexpr = T.keys
    UNPACK: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    even, odd = gl.inline_asm_elementwise(
        UNPACK, "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.convert_layout(gl.join(even, odd).reshape((64, KEYS)).to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def weighted(T: gl.constexpr, pairs, v_s, slot, acc, DTYPE: gl.constexpr):
    """Issues acc + P V."""
    KEYS: gl.constexpr = T.keys
    VDIM: gl.constexpr = T.v_dim
    p = unpacked(T, pairs, DTYPE, gl.DotOperandLayout(0, acc.type.layout, 2))
    return warpgroup_mma(p, v_s.index(slot).reshape((KEYS, VDIM)), acc, is_async=True)


@gluon.constexpr_function
def scale_unless_one(n):
    """PTX: n accumulators times n factors, skipped if all factors of the warp are 1. The factors of a thread's two
    rows are operands 0 and 2: two adjacent elements of one row, then two of the other.
    """
    lines = ["{ .reg .pred p, q;"]
    lines += [f"setp.eq.f32 p, ${2 * n}, 0f3F800000;", f"setp.eq.and.f32 p, ${2 * n + 2}, 0f3F800000, p;"]
    lines += ["vote.sync.all.pred q, p, 0xffffffff;"]
    lines += [f"mov.f32 ${i}, ${n + i};" for i in range(n)]
    lines += ["@q bra SAME;"]
    lines += [f"mul.f32 ${i}, ${n + i}, ${2 * n + i};" for i in range(n)]
    lines += ["SAME: }"]
    return "\n".join(lines)


@gluon.constexpr_function
def operands(n):
    return ",".join(["=f"] * n + ["f"] * (2 * n))


@gluon.jit
def rescaled(T: gl.constexpr, acc, alpha):
    """acc times alpha, row by row."""
    N: gl.constexpr = T.v_dim // 2
    PTX: gl.constexpr = scale_unless_one(N)
    OPERANDS: gl.constexpr = operands(N)
    factor = gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1) + gl.zeros_like(
        acc
    )
    return gl.inline_asm_elementwise(PTX, OPERANDS, [acc, factor], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def prefetch(pointer):
    """Prefetches a line into the SM's L1, where the warpgroups will read their next record."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointer.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
