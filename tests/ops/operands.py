"""One pair of operands, and what is expected of their product."""

from typing import Any

import torch
from torch import Tensor

from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.testing.budget import check_spmm

BF16 = torch.bfloat16


def pair(
    m: int = 128, k: int = 96, n: int = 40, block: Any = 32, dtype: torch.dtype = BF16, device: str = "cpu"
) -> tuple[BSR, Tensor]:
    """A with block rows of uneven lengths, and an N(0, 1) matrix B [k, n]."""
    a = random_bsr(m, k, block, 0.5, pattern="powerlaw", dtype=dtype, device=device, seed=0)
    draw = torch.Generator(device).manual_seed(1)
    return a, torch.randn(k, n, generator=draw, dtype=dtype, device=device)


def check(a: BSR, b: Tensor, out: Tensor) -> None:
    assert out.shape == (*b.shape[:-2], a.shape[0], b.shape[-1])
    assert out.dtype == b.dtype
    gate = check_spmm(a, b, out)
    assert gate.passed, f"{a} times {tuple(b.shape)}, strides {b.stride()}: {gate}"
