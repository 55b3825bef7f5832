"""Device pieces of attention in FP8: both products and the online softmax, by wgmma over e4m3.

A warpgroup holds 64 rows of scores s [64, T.keys] in wgmma's accumulator layout: of every 16 keys thread t of four has
keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. As the left operand of an 8-bit wgmma it must hold four neighbours, 4 t to
4 t + 3. V's keys are stored in that order (attn/mask/quantized_heads.py), so no weight changes its thread. T is a
kernel's Config.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

# P is 2^PEAK times the weight: e4m3 goes up to 448, and weights down to 2^-17 are not zero.
PEAK = gl.constexpr(8.0)
CHAINS = gl.constexpr(4)  # of a row's scores: a single chain of maxima would wait for itself


@gluon.jit
def scores(T: gl.constexpr, q, k_s, slot):
    """Issues S = Q K^T, summed over D in the tensor core."""
    KEYS: gl.constexpr = T.keys
    DIM: gl.constexpr = T.dim
    k = k_s.index(slot).reshape((KEYS, DIM)).permute((1, 0))
    zero = gl.zeros((64, KEYS), gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32]))
    return warpgroup_mma(q, k, zero, use_acc=False, max_num_imprecise_acc=DIM, is_async=True)


@gluon.jit
def tops(T: gl.constexpr, s, ROW: gl.constexpr):
    """The largest score of each row: first of a thread's own scores, then of the four threads that share the row."""
    KEYS: gl.constexpr = T.keys
    own = gl.max(gl.max(gl.max(s.reshape((64, CHAINS, KEYS // 8 // CHAINS, 4, 2)), 4), 2), 1)
    return gl.convert_layout(gl.max(own, 1), ROW)


@gluon.jit
def weights(T: gl.constexpr, WG: gl.constexpr, FIRST: gl.constexpr, s, m, scale, turns, turn):
    """P times 2^PEAK in float32, the maxima after one more step, and the factor of earlier sums. In base 2.

    With two warpgroups exp2 begins in the phase `turn` of the own barrier of `turns`. ptxas moves arithmetic in front
    of a wait, so its input also depends on a zero that is read behind it.
    """
    ROW: gl.constexpr = scale.type.layout
    top = tops(T, s, ROW) * scale
    if not FIRST:
        top = gl.maximum(m, top)
    base = gl.where(top == float("-inf"), 0.0, top)  # no key yet: exp2(-inf - 0) is 0, not NaN
    shift = base - PEAK
    if T.groups == 2:
        barriers, zeros = turns
        mbarrier.wait(barriers.index(WG), turn)  # until the other warpgroup has computed its exp2
        shift = shift + zeros.load(ROW)
    p = gl.exp2(s * gl.expand_dims(scale, 1) - gl.expand_dims(shift, 1))
    if FIRST:
        alpha = base * 0.0
    else:
        alpha = gl.exp2(m - base)
    return p, top, alpha


@gluon.jit
def own_sums(T: gl.constexpr, p):
    """Sums of the weights that a thread holds of each row, [64, 4]. The four are added once, at the end of a tile."""
    KEYS: gl.constexpr = T.keys
    return gl.sum(gl.sum(gl.sum(p.reshape((64, 2, KEYS // 16, 4, 2)), 2), 3), 1)


@gluon.jit
def packed(T: gl.constexpr, p):
    """P rounded to e4m3, the four weights that a thread holds of 16 keys in one register: int32 [64, keys / 16, 4]."""
    KEYS: gl.constexpr = T.keys
    PACK: gl.constexpr = """{ .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high}; }"""
    even, odd = p.reshape((64, KEYS // 16, 2, 4, 2)).permute((0, 1, 3, 2, 4)).split()
    e0, e1 = even.split()
    o0, o1 = odd.split()
    return gl.inline_asm_elementwise(
        PACK, "=r,f,f,f,f", [e0, o0, e1, o1], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def unpacked(T: gl.constexpr, quads):
    """P as the left operand of wgmma. A register holds four of its elements already: nothing is computed."""
    KEYS: gl.constexpr = T.keys
    LAYOUT: gl.constexpr = gl.DotOperandLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.v_dim, 32]), 4
    )
    pair = gl.join(quads, quads)
    four = gl.convert_layout(gl.join(pair, pair).reshape((64, KEYS)), LAYOUT)
    p = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=False, pack=4
    )
    return p.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def weighted(T: gl.constexpr, p, v_s, slot, acc):
    """Issues P V of one step, summed over its keys in the tensor core. `acc` gives the layout."""
    KEYS: gl.constexpr = T.keys
    VDIM: gl.constexpr = T.v_dim
    v = v_s.index(slot).reshape((VDIM, KEYS)).permute((1, 0))
    return warpgroup_mma(p, v, gl.zeros_like(acc), use_acc=False, max_num_imprecise_acc=KEYS, is_async=True)


@gluon.jit
def next_unit(T: gl.constexpr, v_scale, unit, most, alpha, quads):
    """Where scales are of blocks, acc is in units of the last one: the unit once this step's P V is added, the largest
    scale so far, the factor of acc, and P.

    So the factor of the rows also brings acc to the new unit, and no element of P V is multiplied by a scale. acc is
    less than 2^46 times the largest scale. A step whose scale is below 2^-80 of that would make acc overflow, so it
    keeps the unit and counts as 0.
    """
    if T.by_block:
        most = gl.maximum(most, v_scale)
        far = v_scale * 2.0**80 < most
        v_scale = gl.where(far, unit, v_scale)
        return v_scale, most, alpha * (unit / v_scale), gl.where(far, 0, quads)
    else:
        return unit, most, alpha, quads


@gluon.jit
def promoted(acc, alpha, pv):
    """acc times alpha, row by row, plus P V of a step: in float32."""
    return acc * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout)), 1) + pv
