"""How plain Triton kernels address tensors and divide, and which problems they support."""

import math
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparsek.core import dtypes, env

# Sizes stay this far below 2^31 so that int32 row and column numbers of a last tile do not wrap.
SIZE_LIMIT = 2**31 - 2048
# In a quotient, the remainder x - q s has 24 bits below those of x, and x down to 2^-17 of a scale counts. With scales
# below SMALL some bits would lie below the last bit of a subnormal float32: x and the scales are scaled up.
SMALL, LIFT = (tl.constexpr(each) for each in (2.0**-80, 2.0**64))


@triton.jit
def at(x, wide: tl.constexpr):
    """An index as int64 where offsets may pass 2^31."""
    return x.to(tl.int64) if wide else x


@triton.jit
def times(x, unit: tl.constexpr):
    """`x`, a multiple of `unit`, in a form from which the compiler can infer this."""
    if unit > 1:
        x = x // unit * unit
    return x


def folded(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Tensors of the same batch dims as [batch, ., .] views: one tuple if all collapse, else several. None stays."""
    first = next(x for x in tensors if x is not None)
    if first.ndim == 2:
        yield tuple(None if x is None else x[None] for x in tensors)
    elif first.ndim == 3:
        yield tensors
    else:
        batch = math.prod(first.shape[:-2])
        try:
            views = tuple(None if x is None else x.view(batch, *x.shape[-2:]) for x in tensors)
        except RuntimeError:
            for at_first in range(first.shape[0]):
                yield from folded(*(None if x is None else x[at_first] for x in tensors))
        else:
            yield views


def strides(x: Tensor | None) -> tuple[int, int, int]:
    """Strides of x [batch, ., .]; 0 for a dim of one element and for no tensor, so that equal calls have equal
    strides.

    An expanded dim has stride 0 too, so a stride implies nothing about a size.
    """
    if x is None:
        return 0, 0, 0
    batch, rows, columns = (s if size > 1 else 0 for s, size in zip(x.stride(), x.shape, strict=True))
    return batch, rows, columns


def unit(size: int, x: Tensor) -> int:
    """The unit of a size for `times`: the elements in 16 bytes, or 1."""
    vector = 16 // x.element_size()
    return vector if size % vector == 0 else 1


def units(x: Tensor | None) -> tuple[int, int]:
    """The units for `times` of the row and column strides of x [batch, ., .]: 1 for a contiguous dim; for the other
    dim `unit`, if the batch stride is a multiple of it too.
    """
    if x is None:
        return 1, 1
    batch, rows, columns = strides(x)
    if rows == 1:
        return 1, min(unit(columns, x), unit(batch, x))
    return min(unit(rows, x), unit(batch, x)), 1


def extent(x: Tensor | None) -> int:
    """The largest offset inside one item of x [batch, ., .]."""
    if x is None:
        return 0
    return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))


def tile_side(size: int, across: int, widest: int = 128) -> int:
    """The side of a tile for blocks of `size`, at most `widest`, with the most useful FLOP per byte; padding does not
    count as useful. The tile's other side is `across`.
    """
    sides = (side for side in (128, 64, 32, 16) if side <= widest)
    return max(sides, key=lambda side: side * across / (side + across) * size / (-(-size // side) * side))


def stages(p: Any, wanted: int, elements: int) -> int:
    """How many of the `wanted` stages of so many elements fit into the card's shared memory; at least one."""
    room = p.card.smem_bytes - 1024
    return wanted if p.on_cpu else max(1, min(wanted, room // (elements * dtypes.itemsize(p.dtype))))


def why_not(p: Any, multiplied: tuple[str, ...] = ("bf16", "fp16", "fp32")) -> list[str]:
    """Why no plain Triton kernel for these dtypes runs problem `p`: its device or its dtype."""
    why = []
    if p.on_cpu and not env.interpreting():
        why.append("CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before the import)")
    if p.on_cpu and p.dtype == "bf16":
        why.append(f"bf16 is wrong in Triton's interpreter; use {' or '.join(multiplied[1:])} there")
    if not p.on_cpu and p.card.capability < (8, 0):
        has = ".".join(map(str, p.card.capability))
        why.append(f"needs compute capability 8.0 or newer; {p.card.name} has {has}")
    if p.dtype not in multiplied:
        why.append(f"dtype must be {', '.join(multiplied[:-1])} or {multiplied[-1]}, not {p.dtype}")
    return why


@triton.jit
def quotients(x, scale, DIVIDE: tl.constexpr):
    """x / scale[:, None] in float32, rounded to nearest.

    Markstein, IBM J. Res. Dev. 34 (1990): with r = 1 / s rounded, q = x r, and q + r (x - q s) by two fused
    multiply-adds; the first is exact. DIVIDE: Triton's interpreter has no fused multiply-add.
    """
    if DIVIDE:
        return tl.math.div_rn(x, scale[:, None] + tl.zeros(x.shape, dtype=tl.float32))
    lift = tl.where(scale < SMALL, LIFT, 1.0)
    lifted = scale * lift
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), lifted)
    endless = scale == float("inf")  # x / inf: 0, or NaN for an infinite x
    lifted, inverse = tl.where(endless, 0.0, lifted), tl.where(endless, 0.0, inverse)
    x = x * lift[:, None]
    q = x * inverse[:, None]
    q = tl.math.fma(tl.math.fma(q, -lifted[:, None], x), inverse[:, None], q)
    sign = x.to(tl.int32, bitcast=True) & -0x80000000  # of -0, which the sum of two zeros loses
    return (q.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
