"""What Semi24 and BSR24 share: two values of every four neighbours, and a nibble that says which two.

Four neighbours of a row, columns 4g to 4g + 3, are a group. A group keeps two values; its nibble is i0 | i1 << 2, where
0 <= i0 < i1 <= 3 are their columns in the group. A byte of `meta` holds two groups, the first in its low nibble. So do
sparse tensor cores take it (PTX ISA, "Sparse matrix storage" of mma.sp and wgmma.mma_async.sp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.pattern import as_device

GROUP = 4
STEP = 2 * GROUP  # columns of a byte of metadata
ALIGNMENT = 16
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Multiplied:
    """`A @ B` and `B @ A` for a matrix A of a class of its own: both go to what `register_matmul` was given."""

    _matmul: ClassVar[Callable[[Any, Any], Any] | None] = None
    __array_ufunc__ = None  # numpy arrays then leave `array @ A` to __rmatmul__
    shape: Any

    @classmethod
    def register_matmul(cls, multiply: Callable[[Any, Any], Any]) -> None:
        """Makes `A @ B` and `B @ A` call `multiply` with both in that order. The operations, above formats, do this."""
        cls._matmul = staticmethod(multiply)

    def __matmul__(self, other: Any) -> Any:
        return self._multiply()(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._multiply()(other, self)

    def _multiply(self) -> Callable[[Any, Any], Any]:
        multiply = type(self)._matmul
        if multiply is None:
            raise InvalidInput("a product with @ needs the operations; import sparsek")
        return multiply

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Lets torch.matmul(A, B) and, inside torch.compile, A @ B arrive here; other torch functions refuse it.

        Dynamo (torch 2.13) hands over both A @ B and B @ A as matmul(B, A). Shapes tell which one was meant, unless
        both fit; then this raises and asks for sparsek.spmm(A, B).
        """
        if kwargs or len(args) != 2 or func.__name__ not in ("matmul", "__matmul__", "__rmatmul__"):
            return NotImplemented
        first, second = args
        if isinstance(first, cls):
            return first.__matmul__(second)
        if torch.compiler.is_compiling():
            after = first.shape[-1] == second.shape[0]
            if after and first.ndim > 1 and first.shape[-2] == second.shape[1]:
                raise InvalidInput(
                    "torch.compile does not tell A @ B from B @ A here; write sparsek.spmm(A, B)"
                )
            if not after:
                return second.__matmul__(first)
        return second.__rmatmul__(first)


def pack(w: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values [..., K/2], meta uint8 [..., K/8]) of w [..., K], K a multiple of 8, in any float dtype and strides.

    Each group keeps its two largest magnitudes; of equal ones, and of NaN, which counts as largest, the lower columns.
    With `mask`, bool like w and true at most twice in a group, it keeps the elements where that is true and fills up
    with zeros at the lowest free columns. No sync, no sort: six comparisons decide a group. Differentiable in w.
    """
    if mask is None:
        keys = _magnitudes(w.detach())
    else:
        keys = mask.view(torch.int8)
        w = w.masked_fill(~mask, 0)
    a, b, c, d = _groups(keys).unbind(-1)
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    first, second = _majority(ab, ac, ad), _majority(~ab, bc, bd)
    third, fourth = _majority(~ac, ~bc, cd), ~_majority(ad, bd, cd)
    nibbles = _as_bytes(third | fourth) << 1  # from the top bit down: i1 = 3, 2 or 1, then i0 = 0, 1 or 2
    nibbles |= _as_bytes(fourth | ~third)
    nibbles <<= 1
    nibbles |= _as_bytes(~(first | second))
    nibbles <<= 1
    nibbles |= _as_bytes(~first & second)
    p, q, r, s = _groups(w).unbind(-1)
    lower = torch.where(first, p, torch.where(second, q, r))
    upper = torch.where(fourth, s, torch.where(third, r, q))
    values = torch.stack((lower, upper), dim=-1).flatten(-2)
    return values, nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(values: Tensor, meta: Tensor) -> Tensor:
    """The dense [..., K] of values [..., K/2] and meta [..., K/8]; what is not kept is 0. No sync. Differentiable."""
    columns = torch.stack((meta & 3, meta >> 2 & 3, meta >> 4 & 3, meta >> 6), dim=-1).flatten(-2)
    i0, i1 = columns[..., 0::2], columns[..., 1::2]
    lower, upper = values[..., 0::2], values[..., 1::2]
    zero = values.new_zeros(())
    parts = [torch.where(i0 == at, lower, torch.where(i1 == at, upper, zero)) for at in range(GROUP)]
    return torch.stack(parts, dim=-1).flatten(-2)


def _groups(w: Tensor) -> Tensor:
    """A view [..., K/4, 4]."""
    return w.unflatten(-1, (w.shape[-1] // GROUP, GROUP))


def _magnitudes(w: Tensor) -> Tensor:
    """Integers in the order of the magnitudes of w. Every NaN is one more than infinity."""
    bits = BITS[w.dtype.itemsize]
    infinity = torch.full((), math.inf, dtype=w.dtype).view(bits)
    return (w.view(bits) & torch.iinfo(bits).max).clamp_(max=int(infinity) + 1)


def _majority(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return (x & y) | (z & (x | y))


def _as_bytes(flags: Tensor) -> Tensor:
    return flags.view(torch.uint8)


def place(a: Any, device: Any, dtype: torch.dtype | None) -> tuple[torch.device, torch.dtype]:
    """Where `a.to(device, dtype)` goes, and in which dtype. Raises InvalidInput for what is neither."""
    if isinstance(device, torch.dtype):
        raise InvalidInput(f"the first argument of .to is the device; write .to(dtype={device})")
    wanted = a.dtype if dtype is None else dtype
    dtypes.name(wanted)
    return a.device if device is None else as_device(device), wanted


def check_parts(values: Any, meta: Any) -> None:
    """Everything about values and metadata that can be seen without reading them."""
    for name, part in (("values", values), ("meta", meta)):
        if not isinstance(part, Tensor):
            raise InvalidInput(f"{name} must be a torch.Tensor, got {type(part).__name__}")
    dtypes.name(values.dtype)
    if meta.dtype != torch.uint8:
        raise InvalidInput(f"meta must be torch.uint8, got {meta.dtype}")
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
    if meta.device != values.device:
        raise InvalidInput(f"values are on {values.device} and meta on {meta.device}; put both on one device")
    for name, part in (("values", values), ("meta", meta)):
        if part.layout != torch.strided or not part.is_contiguous():
            raise InvalidInput(f"{name} must be a dense contiguous tensor; call .contiguous()")
        if part.data_ptr() % ALIGNMENT:
            raise InvalidInput(
                f"{name} start {part.data_ptr() % ALIGNMENT} bytes past a multiple of {ALIGNMENT} bytes, "
                "as a storage offset can make them; call .clone()"
            )


def malformed(meta: Tensor) -> tuple[int, tuple[int, ...], int]:
    """(how many nibbles do not have i0 < i1, where the first one is as indices of a group, the nibble). One sync."""
    low, high = (meta & 3) >= (meta >> 2 & 3), (meta >> 4 & 3) >= (meta >> 6)
    count = int(torch.count_nonzero(low) + torch.count_nonzero(high))
    if not count:
        return 0, (), 0
    bad = torch.stack((low, high), dim=-1).flatten(-2)
    at = tuple(torch.nonzero(bad)[0].tolist())
    byte = int(meta[(*at[:-1], at[-1] // 2)])
    return count, at, byte >> 4 * (at[-1] % 2) & 15


def fault(count: int, groups: int, nibble: int, at: tuple[int, ...]) -> str:
    """The message for malformed metadata, whose first fault is at indices `at`, the last of them a group."""
    *before, group = at
    place = f"row {before[-1]}, columns {GROUP * group} to {GROUP * group + GROUP - 1}"
    if len(before) > 1:
        place = f"stored block {before[0]}, {place}"
    return (
        f"{count} of {groups} groups have malformed metadata; the first, at {place}, has the nibble {nibble:#06b}, "
        f"columns {nibble & 3} and {nibble >> 2}; they must rise"
    )
