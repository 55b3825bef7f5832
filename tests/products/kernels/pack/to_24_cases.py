"""What tests of pack/to_24.py share: floats of any bits in any strides, masks, and what is right."""

import torch
from torch import Tensor

from sparsek.products.formats import two_four
from sparsek.products.kernels.pack import to_24 as portable
from tests.products.formats.two_four import PAIRS, same_bits


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Floats of random bits. Of eight some four are drawn from few, so that magnitudes tie; one has the exponent of an
    infinity, so that it or a NaN with any payload is there; and zeros of both signs.
    """
    integers, infinity = two_four.BITS[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max, shape, dtype=torch.int64)
    few = bits.view(-1)[torch.randint(min(bits.numel(), 5), shape)] ^ (limits.min * torch.randint(2, shape))
    kind = torch.randint(8, shape)
    bits = torch.where(kind < 4, few, bits)
    bits = torch.where(kind == 4, bits | infinity, bits)
    bits = torch.where(kind == 5, bits & limits.min, bits)
    bits = torch.where((kind == 6) & (bits & 1 == 1), (bits & limits.min) | infinity, bits)
    return bits.to(integers).view(dtype)


def flags(shape: tuple[int, ...]) -> Tensor:
    """bool, with none, one or two true elements in every four neighbours."""
    some = torch.tensor([[at in each for at in range(4)] for each in ((), (0,), (1,), (2,), (3,), *PAIRS)])
    return some[torch.randint(len(some), (*shape[:-1], shape[-1] // 4))].view(shape)


def columns(w: Tensor) -> Tensor:
    """In column-major order."""
    return w if w.ndim < 2 else w.mT.contiguous().mT


def wide(w: Tensor) -> Tensor:
    """Rows of a matrix with 64 more columns."""
    return torch.cat((w, w[..., :8].repeat_interleave(8, -1)), -1)[..., : w.shape[-1]]


def odd(w: Tensor) -> Tensor:
    """Rows that begin one element late."""
    return torch.cat((w[..., :1], w), -1)[..., 1:]


def shifted(w: Tensor) -> Tensor:
    """Contiguous, and one element late."""
    return torch.cat((w.reshape(-1)[:1], w.reshape(-1)))[1:].view(w.shape)


def tall(w: Tensor) -> Tensor:
    """In column-major order, of a matrix with eight more rows."""
    return w if w.ndim < 2 else wide(w.mT.contiguous().repeat(*[1] * (w.ndim - 1), 8)[..., : w.shape[-2]]).mT


def spaced(w: Tensor) -> Tensor:
    """Every second element in both directions."""
    apart = w.repeat_interleave(2, -1)[..., ::2]
    return apart if w.ndim < 2 else apart.repeat_interleave(2, -2)[..., ::2, :]


def kept(w: Tensor) -> Tensor:
    """As it is."""
    return w


LAYOUTS = (kept, columns, wide, odd, shifted, tall, spaced)


def same(w: Tensor, mask: Tensor | None = None) -> None:
    """Fails unless the kernels pack w and unpack the parts as torch does on the CPU, bit for bit."""
    right = two_four.pack(w.cpu(), None if mask is None else mask.cpu())
    made = portable.pack24(w, mask)
    assert made is not None
    for part, expected in zip(made, right, strict=True):
        assert part.is_contiguous()
        assert part.device == w.device
        assert same_bits(part.cpu(), expected)
    dense = portable.unpack24(*made)
    assert dense is not None
    assert dense.device == w.device
    assert same_bits(dense.cpu(), two_four.unpack(*right))
