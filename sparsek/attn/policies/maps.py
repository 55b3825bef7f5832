"""Maps of the blocks that masks store, bool [B, H, Mb, Nb], on their device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.compose import Placed
from sparsek.attn.mask.mask import BlockMask
from sparsek.core import env
from sparsek.core.arguments import faking


def kernels(name: str, *tensors: Tensor) -> Any:
    """A module of kernels/estimate for tensors on a GPU; None, for torch, on a CPU, without Triton, of fake tensors."""
    if faking() or not all(x.is_cuda or env.interpreting() for x in tensors):
        return None
    try:
        return import_module(f"sparsek.attn.kernels.estimate.{name}")
    except ImportError:
        return None


def block_map(mask: BlockMask) -> Tensor:
    """The stored blocks of a mask, bool [batch, heads, Mb, Nb]. No sync on a GPU."""
    return joined(mask, mask, union=True)


def joined(a: BlockMask, b: BlockMask, union: bool) -> Tensor:
    """The blocks that either mask stores, or both: bool [B, H, Mb, Nb]. No sync on a GPU.

    Both have one grid; batch items are as many or 1, and heads of one a divisor of those of the other.
    """
    shape = max(a.batch, b.batch), max(a.heads, b.heads), *a.grid
    if faking():
        return torch.zeros(shape, dtype=torch.bool, device=a.device)
    by_kernel = kernels("maps", a.full.starts)
    found = torch.zeros(shape, dtype=torch.int8, device=a.device)
    _mark(by_kernel, a, found, None)
    if b is not a:
        within = None
        if not union:
            within, found = found, torch.zeros(shape, dtype=torch.int8, device=a.device)
        _mark(by_kernel, b, found, within)
    return found.view(torch.bool)


def _mark(by_kernel: Any, mask: BlockMask, made: Tensor, within: Tensor | None) -> None:
    if by_kernel is not None:
        by_kernel.mark(mask, made, within)
        return
    cells = Placed(mask, made.shape[0], made.shape[1]).cells
    made.view(-1)[cells] = 1 if within is None else within.view(-1)[cells]
