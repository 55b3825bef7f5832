"""Packs and unpacks 2:4 matrices in plain Triton, bit for bit as `products/formats/two_four.py`.

    dense   a b c d | e f g h     values   two of a..d, two of e..h     meta   a byte: their columns

`pack24` reads a matrix once and writes values and metadata, without a sync or a workspace. It compares values as
integers: magnitudes have the order of their bits without the sign, and every NaN is above infinity.

    by rows      a lane has two adjacent pieces of 16 bytes of a row, and writes 16 bytes of values. A group lies in one
                 lane, so lanes exchange nothing. A contiguous matrix is one long row.
    by columns   for the transpose of a row-major matrix, and for any other strides: a lane has 16 bytes of each of
                 eight columns, and packs the groups of its rows. The result is transposed in shared memory and written
                 by rows.

`unpack24` is the inverse, for contiguous parts, and `unpacked_blocks` writes blocks for the products that read them
(spmm/unpacked.py). All are limited by memory. An earlier version packed 8192^2 in bf16 by rows in 0.052 ms on an H200
(2026-11-22), at copy bandwidth; columns and `unpack24` are not timed.

`products/ops/packing.py` registers functions with `products/formats/two_four.py`, which import this file at the first
CUDA tensor. So formats depend on no kernel, and `import sparsek` loads no Triton.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import env
from sparsek.engine.launch import tensors
from sparsek.engine.launch.launch import launch
from sparsek.engine.launch.tensors import times
from sparsek.products.formats.two_four import BITS, STEP

# Lanes of a program by rows, two per thread. If the matrix is not one row, so many lanes span it: 1 KB.
LANES, ACROSS = 256, 32
# Rows of a program by columns, and bytes of metadata in each.
TALL, BYTES = 64, 16
WARPS = 4
UNPACK_LANES, UNPACK_WARPS = 256, 8  # one byte of metadata per thread: 16-bit values then stay in it
GRID = 65535  # programs along the second and third axis
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _key(bits, COLUMN: tl.constexpr, INFINITY: tl.constexpr):
    """Key of a float from its top 16 bits: its magnitude, every NaN above infinity; in the low bits 3 - COLUMN."""
    return tl.minimum((bits & 0x7FFF0000) + (3 - COLUMN), (INFINITY + 1 << 16) + (3 - COLUMN))


@triton.jit
def _flag(kept, COLUMN: tl.constexpr):
    """Key of a byte of a mask: whether it is kept; in the low bits 3 - COLUMN."""
    return kept.to(tl.int32) * 4 + (3 - COLUMN)


@triton.jit
def _largest(ka, kb, kc, kd):
    """3 minus the columns of the two largest of four distinct keys, in the order of columns."""
    more, less = tl.maximum(ka, kb), tl.minimum(ka, kb)
    others_more, others_less = tl.maximum(kc, kd), tl.minimum(kc, kd)
    one = tl.maximum(more, others_more) & 3
    two = tl.maximum(tl.minimum(more, others_more), tl.maximum(less, others_less)) & 3
    return tl.maximum(one, two), tl.minimum(one, two)


@triton.jit
def _halves(x, y, ma, mb, mc, md, INFINITY: tl.constexpr):
    """The kept pair and the nibble of a group of 16-bit values, two in x and two in y, the first in the low half.

    `ma` to `md` are their mask flags, or None.
    """
    if ma is None:
        ka, kb = _key(x << 16, 0, INFINITY), _key(x, 1, INFINITY)
        kc, kd = _key(y << 16, 2, INFINITY), _key(y, 3, INFINITY)
        left, right = _largest(ka, kb, kc, kd)
    else:
        left, right = _largest(_flag(ma, 0), _flag(mb, 1), _flag(mc, 2), _flag(md, 3))
        x &= tl.where(ma != 0, 0xFFFF, 0) | tl.where(
            mb != 0, -65536, 0
        )  # a group is filled up from a and b only
    four = (y.to(tl.int64) << 32) | (x.to(tl.int64) & 0xFFFFFFFF)
    lower = (four >> (48 - 16 * left).to(tl.int64)).to(tl.int32)
    upper = (four >> (48 - 16 * right).to(tl.int64)).to(tl.int32)
    return lower & 0xFFFF | upper << 16, 15 - left - 4 * right


@triton.jit
def _majority(x, y, z):
    return (x & y) | (z & (x | y))


@triton.jit
def _singles(a, b, c, d, ma, mb, mc, md, INFINITY: tl.constexpr):
    """The kept two and the nibble of a group of 32-bit values by six comparisons, as in
    products/formats/two_four.py.
    """
    if ma is None:
        ka, kb = tl.minimum(a & 0x7FFFFFFF, INFINITY + 1), tl.minimum(b & 0x7FFFFFFF, INFINITY + 1)
        kc, kd = tl.minimum(c & 0x7FFFFFFF, INFINITY + 1), tl.minimum(d & 0x7FFFFFFF, INFINITY + 1)
    else:
        ka, kb, kc, kd = ma, mb, mc, md
        a, b = (
            tl.where(ma != 0, a, 0),
            tl.where(mb != 0, b, 0),
        )  # a group is not filled up from c and d
    ab, ac, ad, bc, bd, cd = ka >= kb, ka >= kc, ka >= kd, kb >= kc, kb >= kd, kc >= kd
    first, second = _majority(ab, ac, ad), _majority(~ab, bc, bd)
    third, fourth = _majority(~ac, ~bc, cd), ~_majority(ad, bd, cd)
    lower = tl.where(first, a, tl.where(second, b, c))
    upper = tl.where(fourth, d, tl.where(third, c, b))
    nibble = tl.where(first, 0, tl.where(second, 1, 2)) | tl.where(fourth, 12, tl.where(third, 8, 4))
    return lower, upper, nibble


@triton.jit
def _load(ptr, live, RAGGED: tl.constexpr):
    return tl.load(ptr, mask=live, other=0) if RAGGED else tl.load(ptr)


@triton.jit
def _store(ptr, x, live, RAGGED: tl.constexpr):
    if RAGGED:
        tl.store(ptr, x, mask=live)
    else:
        tl.store(ptr, x)


@triton.jit
def _fours(x):
    """Every first, second, third and fourth of [T, .]."""
    even, odd = tl.split(tl.reshape(x, (x.numel // 4, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _piece(w, mask, flags, live, mask_col, HALF: tl.constexpr, INFINITY: tl.constexpr, RAGGED: tl.constexpr):
    """The kept values, int32 [T, 2], and nibbles [T * 2] or [T], of 16 bytes at each of `w` [T] and `flags` [T]."""
    T: tl.constexpr = w.numel
    words = _load(w[:, None] + tl.arange(0, 4)[None, :], live[:, None], RAGGED)
    ma, mb, mc, md = None, None, None, None
    if mask is not None:
        columns = tl.arange(0, 8 if HALF else 4)
        kept = _load(flags[:, None] + (columns * mask_col)[None, :], live[:, None], RAGGED)
        ma, mb, mc, md = _fours(kept)
    if HALF:
        x, y = tl.split(tl.reshape(words, (2 * T, 2)))
        pair, nibble = _halves(x, y, ma, mb, mc, md, INFINITY)
        return tl.reshape(pair, (T, 2)), nibble
    else:
        a, b, c, d = _fours(words)
        lower, upper, nibble = _singles(a, b, c, d, ma, mb, mc, md, INFINITY)
        return tl.join(lower, upper), nibble


@triton.jit(do_not_specialize=("rows", "steps"))
def _by_rows(
    w, mask, values, meta, rows, steps, w_batch, w_row, mask_batch, mask_row, mask_col,
    LANES: tl.constexpr, ACROSS: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr,
    INFINITY: tl.constexpr,
):  # fmt: skip
    """A program has LANES // ACROSS rows, and ACROSS lanes of each; a lane has a byte of metadata, two if HALF. If
    ACROSS is LANES, the matrix is one row, and programs use the first axis of the grid only.

    `w` and `values` are int32, two elements per word if HALF, and w's strides are in words. A row has `steps` bytes
    of metadata, a multiple of a lane's if EVEN.
    """
    PER_LANE: tl.constexpr = 2 if HALF else 1
    steps = times(steps, PER_LANE if EVEN else 1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    lane = tl.arange(0, LANES)
    row = tl.program_id(0).to(tl.int64) * (LANES // ACROSS) + lane // ACROSS
    step = tl.program_id(1).to(tl.int64) * (ACROSS * PER_LANE) + lane % ACROSS * PER_LANE
    if ACROSS == LANES:
        row, step = batch, tl.program_id(0).to(tl.int64) * (LANES * PER_LANE) + lane * PER_LANE
    live = (row < rows) & (step < steps)
    also = live
    if HALF and not EVEN:
        also = (row < rows) & (step + 1 < steps)
    w += batch * w_batch + row * w_row + step * (8 // PER_LANE)
    flags = w
    if mask is not None:
        flags = mask + (batch * mask_batch + row * mask_row + step * 8 * mask_col)
    v0, n0 = _piece(w, mask, flags, live, mask_col, HALF, INFINITY, RAGGED)
    if mask is not None:
        flags += 4 * PER_LANE * mask_col
    v1, n1 = _piece(w + 4, mask, flags, also, mask_col, HALF, INFINITY, RAGGED)

    v = tl.reshape(tl.permute(tl.join(v0, v1), (0, 2, 1)), (LANES, 4))
    n = tl.join(n0, n1)
    if HALF:
        n0, n1 = tl.split(tl.permute(tl.reshape(n, (LANES, 2, 2)), (0, 2, 1)))
        n = n0 | n1 << 4
    else:
        n = tl.expand_dims(n0 | n1 << 4, 1)
    place = ((batch * rows + row) * steps + step)[:, None]
    word, byte = tl.arange(0, 4)[None, :], tl.arange(0, PER_LANE)[None, :]
    to_values, to_meta = values + (place * (4 // PER_LANE) + word), meta + (place + byte)
    live = live[:, None]
    if HALF and not EVEN:
        _store(to_values, v, live & (step[:, None] + word // 2 < steps), RAGGED)
        _store(to_meta, n.to(tl.uint8), live & (step[:, None] + byte < steps), RAGGED)
    else:
        _store(to_values, v, live, RAGGED)
        _store(to_meta, n.to(tl.uint8), live, RAGGED)


@triton.jit
def _group(w, mask, live, w_col, mask_col, HALF: tl.constexpr, INFINITY: tl.constexpr, RAGGED: tl.constexpr):
    """The kept values of four columns at w [S, R] and mask [S, R]: int32 [S, R], or [S, R, 2]; and nibbles [S, R]."""
    a, b = _load(w, live, RAGGED), _load(w + w_col, live, RAGGED)
    c, d = _load(w + 2 * w_col, live, RAGGED), _load(w + 3 * w_col, live, RAGGED)
    ma, mb, mc, md = None, None, None, None
    if mask is not None:
        ma, mb = _load(mask, live, RAGGED), _load(mask + mask_col, live, RAGGED)
        mc, md = _load(mask + 2 * mask_col, live, RAGGED), _load(mask + 3 * mask_col, live, RAGGED)
    if HALF:
        x = a.to(tl.int32) & 0xFFFF | b.to(tl.int32) << 16
        y = c.to(tl.int32) & 0xFFFF | d.to(tl.int32) << 16
        return _halves(x, y, ma, mb, mc, md, INFINITY)
    else:
        lower, upper, nibble = _singles(a, b, c, d, ma, mb, mc, md, INFINITY)
        return tl.join(lower, upper), nibble


@triton.jit(do_not_specialize=("rows", "steps"))
def _by_columns(
    w, mask, values, meta, rows, steps, w_batch, w_row, w_col, mask_batch, mask_row, mask_col,
    TALL: tl.constexpr, BYTES: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, RAGGED: tl.constexpr,
    HALF: tl.constexpr, INFINITY: tl.constexpr,
):  # fmt: skip
    """A program has TALL of the rows, whose number is a multiple of UNIT, and BYTES bytes of metadata of each.

    `w` is int16 or int32, `values` int32. A row has `steps` bytes of metadata, an even number if EVEN.
    """
    WORDS: tl.constexpr = 2 if HALF else 4  # of values per byte
    rows = times(rows, UNIT)
    steps = times(steps, 2 if EVEN else 1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * TALL + tl.arange(0, TALL)
    first = tl.program_id(1).to(tl.int64) * BYTES
    step = first + tl.arange(0, BYTES)
    live = (step < steps)[:, None] & (row < rows)[None, :]
    w += batch * w_batch + (step * 8 * w_col)[:, None] + (row * w_row)[None, :]
    flags = w
    if mask is not None:
        flags = mask + (batch * mask_batch + (step * 8 * mask_col)[:, None] + (row * mask_row)[None, :])
    v0, n0 = _group(w, flags if mask is not None else None, live, w_col, mask_col, HALF, INFINITY, RAGGED)
    w += 4 * w_col
    if mask is not None:
        flags += 4 * mask_col
    v1, n1 = _group(w, flags if mask is not None else None, live, w_col, mask_col, HALF, INFINITY, RAGGED)

    v = tl.join(v0, v1)
    if HALF:
        v = tl.permute(v, (1, 0, 2))
    else:
        v = tl.permute(v, (1, 0, 3, 2))
    v = tl.reshape(v, (TALL, BYTES * WORDS))
    n = tl.trans((n0 | n1 << 4).to(tl.uint8))
    line = ((batch * rows + row) * steps)[:, None]
    word, byte = (first * WORDS + tl.arange(0, BYTES * WORDS))[None, :], step[None, :]
    inside = (row < rows)[:, None]
    _store(values + (line * WORDS + word), v, inside & (word < steps * WORDS), RAGGED)
    _store(meta + (line + byte), n, inside & (byte < steps), RAGGED)


@triton.jit
def unpacked(values, nibbles, R: tl.constexpr, C: tl.constexpr):
    """Dense [R, C] of values [R, C/2] and metadata [R, C/8], each as loaded."""
    low, high = tl.split(tl.reshape(values, (R, C // 4, 2)))
    nibble = tl.reshape(tl.join(nibbles & 15, nibbles >> 4), (R, C // 4))
    i0, i1 = nibble & 3, nibble >> 2
    zero = tl.zeros_like(low)
    c0 = tl.where(i0 == 0, low, zero)
    c1 = tl.where(i0 == 1, low, tl.where(i1 == 1, high, zero))
    c2 = tl.where(i0 == 2, low, tl.where(i1 == 2, high, zero))
    c3 = tl.where(i1 == 3, high, zero)
    # Joining puts the pair last: (c0 c2) (c1 c3) joined again is [.., 2 (high bit), 2 (low bit)].
    return tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (R, C))


@triton.jit(do_not_specialize=("rows", "steps"))
def _unpack(
    values, meta, dense, rows, steps, LANES: tl.constexpr, RAGGED: tl.constexpr, TALL: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """LANES bytes of metadata, and the four values of each, become eight columns each.

    `dense` is in the order of the values, or, with TALL > 0, in blocks of TALL rows and BYTES bytes of metadata, row of
    blocks after row of blocks; what the last ones have beyond `rows` rows of `steps` bytes is 0.
    """
    first = tl.program_id(0).to(tl.int64) * LANES
    lane = tl.arange(0, LANES)
    source, live = first + lane, lane < LANES
    if TALL > 0:
        across = tl.cdiv(steps, BYTES)
        block = tl.program_id(0) // (TALL * BYTES // LANES)
        inside = tl.program_id(0) % (TALL * BYTES // LANES) * LANES
        row = block // across * TALL + (inside + lane) // BYTES
        step = block % across * BYTES + lane % BYTES
        source = row.to(tl.int64) * steps + step
        if RAGGED:
            live = (row < rows) & (step < steps)
    elif RAGGED:
        live = source < steps
    live = live[:, None]
    v = _load(values + (source[:, None] * 4 + tl.arange(0, 4)[None, :]), live, RAGGED)
    n = _load(meta + source[:, None], live, RAGGED)
    to = dense + first * 8 + (lane[:, None] * 8 + tl.arange(0, 8)[None, :])
    _store(to, unpacked(v, n, LANES, 8), live, RAGGED and TALL == 0)


class PackLaunch(NamedTuple):
    """The arguments of one launch except tensors; the kernel sees `w` and the mask as [batch, rows, K]."""

    kernel: Any
    grid: tuple[int, int, int]
    sizes: tuple[int, ...]  # rows, steps and the strides that the kernel takes
    constants: dict[str, Any]


def pack24(w: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
    """(values [..., K/2], meta uint8 [..., K/8]) of w [..., K], bit for bit those of `two_four.pack`. No sync.

    bf16, fp16 or fp32, in any strides; `mask` is bool and of w's shape. None for unsupported inputs: other dtypes, an
    empty or lazily negated w, and leading dims that do not collapse to one dim of at most 65535.
    """
    integers, _ = BITS[w.dtype]
    if integers == torch.int64 or w.is_neg() or not (w.is_cuda or env.interpreting()) or w.numel() == 0:
        return None
    w3, flags = _matrices(w), None if mask is None else _matrices(mask)
    if w3 is None or (flags is None and mask is not None):
        return None
    launch = _launch(w3, flags)
    if max(launch.grid[1:]) > GRID:
        return None
    values = w.new_empty((*w.shape[:-1], w.shape[-1] // 2))
    meta = w.new_empty((*w.shape[:-1], w.shape[-1] // STEP), dtype=torch.uint8)
    bits = w3.view(torch.int32 if launch.kernel is _by_rows else integers)
    kept = None if flags is None else flags.view(torch.int8)
    with torch.cuda.device_of(w):
        launch.kernel[launch.grid](
            bits, kept, values.view(torch.int32), meta, *launch.sizes, **launch.constants, num_warps=WARPS
        )
    return values, meta


def _launch(w: Tensor, mask: Tensor | None) -> PackLaunch:
    """The launch for w [batch, rows, K] and its mask, or None."""
    integers, infinity = BITS[w.dtype]
    batch, rows, columns = w.shape
    half, steps = integers == torch.int16, columns // STEP
    of_w, of_mask = tensors.strides(w), tensors.strides(mask)
    constants = {"HALF": half, "INFINITY": infinity}
    flat = w.is_contiguous() and (mask is None or mask.is_contiguous())
    if (flat or of_w[2] == 1) and not (half and _is_odd(w)):
        across, each = ACROSS, 2 if half else 1
        if flat:
            rows, steps, across = 1, w.numel() // STEP, LANES
            of_w, of_mask = (0, 0, 1), (0, 0, of_mask[2])
        down, across_steps = LANES // across, across * each
        tiles = -(-rows // down), -(-steps // across_steps)
        constants |= {"LANES": LANES, "ACROSS": across}
        constants |= {"RAGGED": bool(rows % down or steps % across_steps), "EVEN": steps % 2 == 0}
        sizes = rows, steps, *(stride // each for stride in of_w[:2]), *of_mask
        return PackLaunch(_by_rows, (tiles[1], 1, 1) if flat else (*tiles, batch), sizes, constants)
    constants |= {"TALL": TALL, "BYTES": BYTES, "UNIT": tensors.unit(rows, w), "EVEN": steps % 2 == 0}
    constants |= {"RAGGED": bool(rows % TALL or steps % BYTES)}
    grid = -(-rows // TALL), -(-steps // BYTES), batch
    return PackLaunch(_by_columns, grid, (rows, steps, *of_w, *of_mask), constants)


def _is_odd(w: Tensor) -> bool:
    """Whether some row of 16-bit values does not begin at a multiple of 32 bits, or torch has no such view."""
    return bool(w.data_ptr() % 4 or w.storage_offset() % 2 or any(stride % 2 for stride in w.stride()[:-1]))


def unpack24(values: Tensor, meta: Tensor) -> Tensor | None:
    """The dense [..., K] of values [..., K/2] and meta [..., K/8], as `two_four.unpack`. No sync.

    None if a part is not contiguous, or empty, or `values` is lazily negated.
    """
    if not (values.is_cuda or env.interpreting()) or values.is_neg() or values.numel() == 0:
        return None
    if not (values.is_contiguous() and meta.is_contiguous()):
        return None
    dense = values.new_empty((*values.shape[:-1], 2 * values.shape[-1]))
    _write(values, meta, dense, 1, meta.numel(), 0, 0)
    return dense


def unpacked_blocks(values: Tensor, meta: Tensor, block: tuple[int, int]) -> Tensor:
    """A matrix of values [M, K/2] and meta [M, K/8] as all its blocks [Mb * Kb, bm, bk], row of blocks after row of
    blocks, or stored blocks [nnzb, bm, bk/2] as [nnzb, bm, bk]. Contiguous, aligned parts of any dtype. No sync.
    """
    bm, bk = block
    if values.ndim == 3:
        dense, tall, across = values.new_empty((values.shape[0], bm, bk)), 0, meta.numel()
    else:
        down, right = -(-values.shape[0] // bm), -(-2 * values.shape[1] // bk)
        dense, tall, across = values.new_empty((down * right, bm, bk)), bm, meta.shape[1]
    if dense.numel():
        _write(values, meta, dense, meta.shape[0], across, tall, bk // STEP)
    return dense


def _write(
    values: Tensor, meta: Tensor, dense: Tensor, rows: int, steps: int, tall: int, across: int
) -> None:
    """Launches `_unpack`: `rows` rows of `steps` bytes become `dense`, in blocks of `tall` rows and `across` bytes if
    `tall` is not 0.
    """
    integers = INTEGERS[values.element_size()]
    count = dense.numel() // STEP
    ragged = bool(rows % tall or steps % across) if tall else count % UNPACK_LANES != 0
    with torch.cuda.device_of(values):
        launch(
            _unpack, (-(-count // UNPACK_LANES),),
            values.view(integers), meta, dense.view(integers), rows, steps,
            LANES=UNPACK_LANES, RAGGED=ragged, TALL=tall, BYTES=across, num_warps=UNPACK_WARPS,
        )  # fmt: skip


def _matrices(x: Tensor) -> Tensor | None:
    """x [..., K] as a view [batch, rows, K], if there is one."""
    if x.ndim < 3:
        return x.view(1, -1, x.shape[-1]) if x.ndim == 1 else x[None]
    try:
        return x.view(-1, *x.shape[-2:])
    except RuntimeError:
        return None
