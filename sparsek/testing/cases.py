"""Cases that every kernel of an operation must get right: small, and awkward in every way that is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr


@dataclass(frozen=True)
class Case:
    """C [m, n] = A [m, k] @ B [k, n]. `density` and `pattern` as in random_bsr; `blocks` keeps only the first so many.

    `note` says what is special.
    """

    m: int
    k: int
    n: int
    block: tuple[int, int]
    density: float
    note: str
    pattern: str = "uniform"
    dtype: str = "fp16"
    blocks: int | None = None

    def __str__(self) -> str:
        bm, bk = self.block
        return f"{self.m}x{self.k}x{self.n}-b{bm}x{bk}-{self.dtype}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[BSR, Tensor]:
        """A and an N(0, 1) matrix B on `device`, in the case's dtype unless another is given."""
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        a = random_bsr(
            self.m,
            self.k,
            self.block,
            self.density,
            pattern=self.pattern,
            dtype=kind,
            device=device,
            seed=seed,
        )
        if self.blocks is not None:
            kept = slice(0, self.blocks)
            parts = a.pattern.block_rows[kept], a.pattern.indices[kept], a.values[kept]
            a = BSR.from_coo_blocks(*parts, a.shape)
        draw = torch.Generator(a.device).manual_seed(seed + 1)
        return a, torch.randn(self.k, self.n, generator=draw, dtype=kind, device=a.device)


SPMM_CASES: tuple[Case, ...] = (
    Case(256, 256, 64, (64, 64), 0.25, "square"),
    Case(128, 512, 64, (32, 32), 0.25, "wide"),
    Case(512, 128, 64, (32, 32), 0.25, "tall"),
    Case(256, 384, 200, (128, 128), 0.4, "block 128"),
    Case(256, 384, 200, (128, 128), 0.4, "block 128 bf16", dtype="bf16"),
    Case(128, 128, 64, (16, 16), 0.25, "block 16"),
    Case(128, 128, 64, (16, 16), 0.25, "block 16 bf16", dtype="bf16"),
    Case(160, 128, 64, (32, 32), 0.5, "fp32", dtype="fp32"),
    Case(512, 256, 64, (256, 128), 0.5, "block over 128"),
    Case(1024, 448, 64, (512, 112), 0.5, "largest block rows"),
    Case(192, 288, 64, (48, 96), 0.3, "no power of two"),
    Case(64, 256, 64, (16, 64), 0.3, "flat block"),
    Case(384, 64, 64, (128, 16), 0.5, "upright block"),
    Case(250, 256, 64, (64, 64), 0.5, "ragged M"),
    Case(256, 250, 64, (64, 64), 0.5, "ragged K"),
    Case(100, 77, 61, (32, 32), 0.6, "ragged M K N"),
    Case(5, 3, 7, (16, 16), 1.0, "smaller than a block"),
    Case(128, 128, 0, (32, 32), 0.5, "no columns"),
    Case(128, 128, 1, (32, 32), 0.5, "one column"),
    Case(128, 128, 7, (64, 64), 0.5, "seven columns"),
    Case(128, 128, 8, (64, 64), 0.5, "eight columns"),
    Case(256, 256, 16, (64, 64), 0.25, "decode"),
    Case(64, 64, 8200, (32, 32), 0.5, "many columns"),
    Case(512, 256, 64, (32, 32), 0.1, "banded", pattern="banded"),
    Case(512, 256, 64, (32, 32), 0.1, "powerlaw with empty rows", pattern="powerlaw"),
    Case(512, 128, 64, (16, 16), 0.3, "powerlaw of small blocks", pattern="powerlaw"),
    Case(256, 128, 64, (64, 64), 0.0, "no blocks"),
    Case(256, 128, 64, (64, 64), 0.5, "one block", blocks=1),
    Case(256, 256, 64, (64, 64), 1.0, "full"),
    Case(0, 128, 16, (64, 64), 0.5, "no rows"),
    Case(128, 0, 16, (64, 64), 0.5, "no inner side"),
)
