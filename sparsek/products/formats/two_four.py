"""The 2:4 storage of Semi24 and BSR24: two values of every four neighbours, and a nibble with their columns.

Four neighbours of a row, columns 4g to 4g + 3, are a group. A group keeps two values; its nibble is i0 | i1 << 2, where
0 <= i0 < i1 <= 3 are their columns in the group. A byte of `meta` holds two groups, the first in its low nibble. Sparse
tensor cores read this layout (PTX ISA, "Sparse matrix storage" of mma.sp and wgmma.mma_async.sp).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.tracing import bits_of, of_values
from sparsek.products.formats.base import check_readable
from sparsek.products.formats.pattern import BlockPattern

GROUP = 4
STEP = 2 * GROUP  # columns of a byte of metadata
# The `what` and `hint` of `refuse_crowded`, for these flags.
NONZEROS = "nonzeros", "without exact=True the two largest are kept"
MASKED = "elements of the mask", "a mask for 2:4 has at most two"
# The integer type as wide as a float type, and the bits of its infinity. Magnitudes order as their bits without sign.
BITS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F80_0000),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000),
}


def _goes_to_kernels(x: Tensor) -> bool:
    return (
        x.is_cuda and not torch.compiler.is_compiling() and not (x.requires_grad and torch.is_grad_enabled())
    )


def pack(w: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pack w [..., K], K a multiple of 8, into values [..., K/2] and meta uint8 [..., K/8].

    Each group keeps its two largest magnitudes; of equal ones, and of NaN, which counts as largest, those in the lower
    columns. With `mask`, bool like w and true at most twice in a group, it keeps the elements where that is true, and
    zeros at the lowest free columns. A -0.0 that is not kept becomes 0.0. No sync and no sort: six
    comparisons decide a group. Any float dtype and strides. Differentiable in w.
    """
    made = by_kernel("pack24", w, mask) if _goes_to_kernels(w) else None
    if made is not None:
        return made
    if mask is None:
        keys = _magnitudes(w.detach())
    else:
        keys = bits_of(mask, torch.int8)
        w = w.masked_fill(~mask, 0)
    a, b, c, d = groups(keys).unbind(-1)
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    first, second = _majority(ab, ac, ad), _majority(~ab, bc, bd)
    third, fourth = _majority(~ac, ~bc, cd), ~_majority(ad, bd, cd)
    nibbles = _as_bytes(third | fourth) << 1  # from the top bit down: i1 = 3, 2 or 1, then i0 = 0, 1 or 2
    # Not |= and <<=, which torch.func.functionalize refuses.
    nibbles.bitwise_or_(_as_bytes(fourth | ~third)).bitwise_left_shift_(1)
    nibbles.bitwise_or_(_as_bytes(~(first | second))).bitwise_left_shift_(1)
    nibbles.bitwise_or_(_as_bytes(~first & second))
    p, q, r, s = groups(w).unbind(-1)
    lower = torch.where(first, p, torch.where(second, q, r))
    upper = torch.where(fourth, s, torch.where(third, r, q))
    values = _interleaved(lower, upper)
    return values, (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous()


def unpack(values: Tensor, meta: Tensor) -> Tensor:
    """Unpack values [..., K/2] and meta [..., K/8] to the dense [..., K]. No sync. Differentiable."""
    made = by_kernel("unpack24", values, meta) if _goes_to_kernels(values) else None
    if made is not None:
        return made
    within = _within_groups(meta)
    i0, i1 = within[..., 0::2], within[..., 1::2]
    lower, upper = values[..., 0::2], values[..., 1::2]
    zero = values.new_zeros(())
    parts = [torch.where(i0 == at, lower, torch.where(i1 == at, upper, zero)) for at in range(GROUP)]
    return _interleaved(*parts)


def stored(dense: Tensor, meta: Tensor) -> Tensor:
    """The elements [..., K/2] of a dense [..., K] that `meta` [..., K/8] stores. No sync. Differentiable in `dense`."""
    if _goes_to_kernels(dense):
        every = torch.ones(*meta.shape[:-1], GROUP * meta.shape[-1], dtype=torch.uint8, device=meta.device)
        made = by_kernel("pack24", dense, unpack(every, meta).view(torch.bool))
        if made is not None:
            return made[0]
    return dense.gather(-1, columns(meta).long())


def complement(meta: Tensor) -> Tensor:
    """Metadata of the two of every four neighbours that `meta` does not store. No sync."""
    between = (meta ^ meta >> 2) & 0x33  # i0 ^ i1 of each nibble
    adjacent = between & ~(between >> 1) & 0x11  # columns 0 and 1, or 2 and 3
    return meta ^ 0x55 ^ adjacent * 15


def _interleaved(*parts: Tensor) -> Tensor:
    """Element i of each part, then element i + 1, along the last dim. torch.autocast, which refuses to stack one half
    type where it casts to the other, has no part in it.
    """
    with dtypes.as_given(parts[0].device):
        return torch.stack(parts, dim=-1).flatten(-2)


def columns(meta: Tensor) -> Tensor:
    """The column of each of values [..., K/2], int32. No sync."""
    within = _within_groups(meta)
    first = torch.arange(within.shape[-1] // 2, dtype=torch.int32, device=meta.device) * GROUP
    return within + first.repeat_interleave(2)


def _within_groups(meta: Tensor) -> Tensor:
    """The column within its group of each of values [..., K/2], uint8."""
    return torch.stack((meta & 3, meta >> 2 & 3, meta >> 4 & 3, meta >> 6), dim=-1).flatten(-2)


def groups(w: Tensor) -> Tensor:
    """A view [..., K/4, 4] of [..., K]."""
    return w.unflatten(-1, (w.shape[-1] // GROUP, GROUP))


def refuse_crowded(flags: Tensor, what: str, hint: str, pattern: BlockPattern | None = None) -> None:
    """Raise InvalidInput if a group of bool flags [M, K] has more than two true elements. One or two synchronizations.

    The message has the number of such groups and the position of the first. `what` names the flagged elements, and
    `hint` ends the message. With `pattern` the flags are [nnzb, bm, bk], of its stored blocks.
    """

    def look(flags: Tensor) -> tuple[int, tuple[int, ...]]:
        over = groups(flags).sum(-1, dtype=torch.uint8) > 2
        count = int(torch.count_nonzero(over))
        return count, tuple(torch.nonzero(over)[0].tolist()) if count else ()

    reads = "exact=True and masks are checked by their values"
    count, at = of_values(look, flags, reads=reads, instead="check outside")
    if not count:
        return
    *block, row, group = at
    where = ""
    if pattern is not None:
        top, left = pattern._corner(block[0])
        row, group, where = row + top, group + left // GROUP, " in the stored blocks"
    raise InvalidInput(
        f"{count} of {flags.numel() // GROUP} groups of four neighbours{where} have more than two {what}; "
        f"the first is {group_place(row, group)}; {hint}"
    )


def element_mask(mask: Any, w: Tensor) -> Tensor:
    """Return `mask`. Raise InvalidInput unless it is a bool tensor with the shape and device of w."""
    if arguments.tensor("mask", mask, (torch.bool,)).shape != w.shape:
        raise InvalidInput(f"mask has shape {list(mask.shape)}; it must be of elements {list(w.shape)}")
    arguments.one_device("mask is", mask.device, "w", w.device)
    return mask


def megabytes(a: Any) -> str:
    """The size of values and metadata, as text: "75.5 MB"."""
    return f"{(a.values.nbytes + a.meta.nbytes) / 1e6:.3g} MB"


def _magnitudes(w: Tensor) -> Tensor:
    """Integers that order as the magnitudes of w. Every NaN is one more than infinity."""
    bits, infinity = BITS[w.dtype]
    return (bits_of(w, bits) & torch.iinfo(bits).max).clamp(max=infinity + 1)


def _majority(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x & y) | (z & (x | y))


def _as_bytes(flags: Tensor) -> Tensor:
    return bits_of(flags, torch.uint8)


def check_parts(values: Any, meta: Any) -> None:
    """Check values and metadata as far as possible without reading them."""
    arguments.tensor("values", values, dtypes.FLOATS)
    arguments.tensor("meta", meta, (torch.uint8,))
    wanted = (*values.shape[:-1], values.shape[-1] // GROUP)
    if values.shape[-1] % GROUP:
        raise InvalidInput(
            f"values have shape {tuple(values.shape)}, of {2 * values.shape[-1]} columns; "
            f"K must be a multiple of {STEP}"
        )
    if tuple(meta.shape) != wanted:
        raise InvalidInput(
            f"meta has shape {tuple(meta.shape)}; values {tuple(values.shape)} need {wanted}: a byte for {GROUP} values"
        )
    arguments.one_device("values are", values.device, "meta", meta.device)
    arguments.check_distributed("values", values, "meta", meta)
    check_readable("values", values)
    check_readable("meta", meta)


def group_place(row: int, group: int) -> str:
    """The position of a group, as text."""
    return f"row {row}, columns {GROUP * group} to {GROUP * group + GROUP - 1}"


def check_nibbles(meta: Tensor) -> None:
    """Raise InvalidInput, with number and first position, if a nibble does not have i0 < i1. One sync."""

    def look(meta: Tensor) -> tuple[int, list[int], int]:
        low, high = (meta & 3) >= (meta >> 2 & 3), (meta >> 4 & 3) >= (meta >> 6)
        count = int(torch.count_nonzero(low) + torch.count_nonzero(high))
        if not count:
            return 0, [], 0
        at = torch.nonzero(torch.stack((low, high), dim=-1).flatten(-2))[0].tolist()
        return count, at, int(meta[(*at[:-1], at[-1] // 2)]) >> 4 * (at[-1] % 2) & 15

    reads = "metadata is checked by its values"
    count, at, nibble = of_values(look, meta, reads=reads, instead="make the matrix outside")
    if not count:
        return
    *before, group = at
    place = group_place(before[-1], group)
    if len(before) > 1:
        place = f"stored block {before[0]}, {place}"
    raise InvalidInput(
        f"{count} of {2 * meta.numel()} groups have malformed metadata; the first, at {place}, has the nibble "
        f"{nibble:#06b}: columns {nibble & 3} and {nibble >> 2}, which must rise"
    )
