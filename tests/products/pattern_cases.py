"""Cases of SDDMM and of BSR x BSR for every kernel: small, and awkward in every allowed way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern, HostPattern
from sparsek.products.formats.random import Spread, random_bsr
from sparsek.testing.product_budget import met_rows, unmet_filled
from tests.products.cases import Case, laid_out


@dataclass(frozen=True)
class SddmmCase:
    """S [m, n] = X [m, k] @ Y [k, n] at a pattern. `density`, `pattern` and `blocks` as in `Case`.

    `layouts` are those of X and Y (`laid_out`).
    """

    m: int
    n: int
    k: int
    block: tuple[int, int]
    density: float
    note: str
    pattern: Spread = "uniform"
    dtype: str = "fp16"
    blocks: int | None = None
    layouts: tuple[str, str] = ("row", "row")

    def __str__(self) -> str:
        bm, bn = self.block
        return f"{self.m}x{self.n}x{self.k}-b{bm}x{bn}-{self.dtype}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[Tensor, Tensor, BlockPattern]:
        """N(0, 1) matrices X and Y and the pattern on `device`, in the case's dtype unless another is given."""
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        case = Case(
            self.m, self.n, 0, self.block, self.note, self.density, pattern=self.pattern, blocks=self.blocks
        )
        a, *_ = case.make(device, kind, seed)
        x = laid_out(self.layouts[0], (self.m, self.k), kind, device, seed + 1)
        return x, laid_out(self.layouts[1], (self.k, self.n), kind, device, seed + 2), a.pattern


@dataclass(frozen=True)
class SpgemmCase:
    """C [m, n] = A [m, k] @ B [k, n] in blocks of `blocks` = (bm, bk, bn), at densities of A and B.

    `views` makes A or B a transposed view. `wanted` is the density of C's pattern; None for every block with a pair.
    `kept` is the number of blocks of A and of B; None for all.
    """

    m: int
    k: int
    n: int
    blocks: tuple[int, int, int]
    densities: tuple[float, float]
    note: str
    pattern: Spread = "uniform"
    dtype: str = "fp16"
    views: tuple[bool, bool] = (False, False)
    wanted: float | None = None
    kept: tuple[int | None, int | None] = (None, None)

    def __str__(self) -> str:
        sides = "x".join(map(str, self.blocks))
        return f"{self.m}x{self.k}x{self.n}-b{sides}-{self.dtype}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[BSR, BSR, BlockPattern | None]:
        """A, B and the wanted pattern on `device`, in the case's dtype unless another is given."""
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        bm, bk, bn = self.blocks
        parts = []
        for index, (rows, columns, block) in enumerate(
            ((self.m, self.k, (bm, bk)), (self.k, self.n, (bk, bn)))
        ):
            case = Case(
                rows,
                columns,
                0,
                block,
                self.note,
                self.densities[index],
                view=self.views[index],
                pattern=self.pattern,
                blocks=self.kept[index],
            )
            parts.append(case.make(device, kind, seed + index)[0])
        if self.wanted is None:
            return parts[0], parts[1], None
        of_c = random_bsr(self.m, self.n, (bm, bn), self.wanted, dtype=kind, device=device, seed=seed + 2)
        return parts[0], parts[1], of_c.pattern


def unmet_rows_poisoned(x: Tensor, y: Tensor, pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """X [..., M, K] and Y [..., K, N] with NaN in the rows and columns without a block of `pattern`."""
    return x.masked_fill(~met_rows(pattern)[:, None], torch.nan), y.masked_fill(
        ~met_rows(pattern.T), torch.nan
    )


def unmet_blocks_poisoned(a: BSR, b: BSR, wanted: BlockPattern | None = None) -> tuple[BSR, BSR]:
    """A and B with NaN in the blocks that have no pair, except in their padding."""
    return unmet_filled(a, b, wanted, torch.nan)


SDDMM_CASES: tuple[SddmmCase, ...] = (
    SddmmCase(256, 256, 128, (64, 64), 0.25, "square"),
    SddmmCase(256, 384, 200, (128, 128), 0.4, "block 128"),
    SddmmCase(256, 384, 200, (128, 128), 0.4, "block 128 bf16", dtype="bf16"),
    SddmmCase(128, 512, 64, (32, 32), 0.25, "wide"),
    SddmmCase(512, 128, 64, (32, 32), 0.25, "tall"),
    SddmmCase(128, 128, 64, (16, 16), 0.25, "block 16"),
    SddmmCase(160, 128, 64, (32, 32), 0.5, "fp32", dtype="fp32"),
    SddmmCase(1024, 224, 48, (512, 112), 0.5, "largest block rows"),
    SddmmCase(192, 288, 96, (48, 96), 0.3, "no power of two"),
    SddmmCase(64, 256, 64, (16, 64), 0.3, "flat block"),
    SddmmCase(384, 64, 64, (128, 16), 0.5, "upright block"),
    SddmmCase(512, 512, 32, (256, 256), 0.5, "block over 128"),
    SddmmCase(250, 256, 64, (64, 64), 0.5, "ragged M"),
    SddmmCase(256, 250, 64, (64, 64), 0.5, "ragged N"),
    SddmmCase(256, 256, 75, (64, 64), 0.5, "K no multiple of 8"),
    SddmmCase(100, 77, 61, (32, 32), 0.6, "ragged M N K"),
    SddmmCase(5, 3, 7, (16, 16), 1.0, "smaller than a block"),
    SddmmCase(128, 128, 0, (32, 32), 0.5, "no inner side"),
    SddmmCase(128, 128, 1, (32, 32), 0.5, "inner side 1"),
    SddmmCase(128, 128, 8, (64, 64), 0.5, "inner side 8"),
    SddmmCase(64, 64, 2056, (32, 32), 0.5, "long inner side"),
    SddmmCase(256, 192, 96, (64, 64), 0.5, "X by columns", layouts=("col", "row")),
    SddmmCase(256, 192, 96, (64, 64), 0.5, "Y by columns", layouts=("row", "col")),
    SddmmCase(250, 190, 88, (64, 64), 0.5, "both by columns ragged", layouts=("col", "col")),
    SddmmCase(128, 192, 96, (64, 64), 0.5, "strided", layouts=("strided", "strided")),
    SddmmCase(128, 192, 96, (64, 64), 0.5, "not aligned", layouts=("wide", "wide")),
    SddmmCase(512, 256, 64, (32, 32), 0.1, "banded", pattern="banded"),
    SddmmCase(512, 256, 64, (32, 32), 0.1, "powerlaw with empty rows", pattern="powerlaw"),
    SddmmCase(512, 128, 64, (16, 16), 0.3, "powerlaw of small blocks", pattern="powerlaw"),
    SddmmCase(256, 128, 64, (64, 64), 0.0, "no blocks"),
    SddmmCase(256, 128, 64, (64, 64), 0.5, "one block", blocks=1),
    SddmmCase(256, 256, 64, (64, 64), 1.0, "full"),
    SddmmCase(0, 128, 16, (64, 64), 0.5, "no rows"),
    SddmmCase(128, 0, 16, (64, 64), 0.5, "no columns"),
)

_SQUARE64, _SQUARE32 = (64, 64, 64), (32, 32, 32)

SPGEMM_CASES: tuple[SpgemmCase, ...] = (
    SpgemmCase(256, 256, 256, _SQUARE64, (0.4, 0.4), "square"),
    SpgemmCase(384, 256, 256, (128, 128, 128), (0.5, 0.5), "block 128"),
    SpgemmCase(384, 256, 256, (128, 128, 128), (0.5, 0.5), "block 128 bf16", dtype="bf16"),
    SpgemmCase(128, 128, 128, (16, 16, 16), (0.25, 0.25), "block 16"),
    SpgemmCase(160, 128, 96, _SQUARE32, (0.5, 0.5), "fp32", dtype="fp32"),
    SpgemmCase(1024, 224, 256, (512, 112, 128), (0.5, 0.5), "512x112 by 112x128"),
    SpgemmCase(600, 250, 200, (512, 112, 128), (0.8, 0.8), "512x112 by 112x128 ragged"),
    SpgemmCase(192, 288, 96, (48, 96, 48), (0.5, 0.5), "48x96 by 96x48"),
    SpgemmCase(192, 96, 288, (96, 48, 96), (0.5, 0.5), "96x48 by 48x96"),
    SpgemmCase(128, 256, 128, (16, 64, 16), (0.4, 0.4), "flat by upright"),
    SpgemmCase(256, 64, 256, (128, 16, 64), (0.5, 0.5), "upright by flat"),
    SpgemmCase(512, 256, 512, (256, 32, 256), (0.5, 0.5), "block over 128"),
    SpgemmCase(250, 128, 128, _SQUARE64, (0.6, 0.6), "ragged M"),
    SpgemmCase(128, 250, 128, _SQUARE64, (0.6, 0.6), "ragged K"),
    SpgemmCase(128, 128, 250, _SQUARE64, (0.6, 0.6), "ragged N"),
    SpgemmCase(100, 77, 61, _SQUARE32, (0.6, 0.6), "ragged M K N"),
    SpgemmCase(5, 3, 7, (16, 16, 16), (1.0, 1.0), "smaller than a block"),
    SpgemmCase(256, 192, 128, (64, 32, 64), (0.5, 0.5), "A a view", views=(True, False)),
    SpgemmCase(256, 192, 128, (64, 32, 64), (0.5, 0.5), "B a view", views=(False, True)),
    SpgemmCase(250, 190, 120, (64, 32, 128), (0.6, 0.6), "both views ragged", views=(True, True)),
    SpgemmCase(512, 512, 256, _SQUARE32, (0.1, 0.1), "banded", pattern="banded"),
    SpgemmCase(512, 256, 256, _SQUARE32, (0.1, 0.1), "powerlaw with empty rows", pattern="powerlaw"),
    SpgemmCase(128, 512, 128, (16, 16, 16), (0.3, 0.3), "powerlaw of small blocks", pattern="powerlaw"),
    SpgemmCase(128, 1024, 64, _SQUARE32, (0.9, 0.9), "long sums"),
    SpgemmCase(256, 128, 128, _SQUARE64, (0.0, 0.5), "A without blocks"),
    SpgemmCase(256, 128, 128, _SQUARE64, (0.5, 0.0), "B without blocks"),
    SpgemmCase(256, 256, 256, _SQUARE64, (0.5, 0.5), "one block of each", kept=(1, 1)),
    SpgemmCase(256, 256, 256, _SQUARE64, (1.0, 1.0), "full"),
    SpgemmCase(0, 128, 128, _SQUARE64, (0.5, 0.5), "no rows"),
    SpgemmCase(128, 0, 128, _SQUARE64, (0.5, 0.5), "no inner side"),
    SpgemmCase(128, 128, 0, _SQUARE64, (0.5, 0.5), "no columns"),
    SpgemmCase(256, 256, 256, _SQUARE64, (0.4, 0.4), "some blocks wanted", wanted=0.3),
    SpgemmCase(256, 256, 256, _SQUARE64, (0.1, 0.1), "wanted blocks that no pair meets", wanted=1.0),
    SpgemmCase(250, 190, 120, (64, 32, 48), (0.5, 0.5), "wanted ragged", wanted=0.6, views=(True, True)),
    SpgemmCase(128, 128, 128, _SQUARE64, (0.5, 0.5), "nothing wanted", wanted=0.0),
    SpgemmCase(128, 128, 128, _SQUARE64, (0.0, 0.5), "wanted without pairs", wanted=0.5),
)


def pattern_of(
    mask: np.ndarray, block: tuple[int, int], shape: tuple[int, int] | None = None
) -> BlockPattern:
    """The pattern that stores the true cells of `mask`."""
    rows, columns = mask.shape
    indptr = np.concatenate(([0], np.cumsum(mask.sum(1)))).astype(np.int32)
    host = HostPattern(indptr, np.nonzero(mask)[1].astype(np.int32))
    sides = shape or (rows * block[0], columns * block[1])
    return BlockPattern.from_host(sides, block, host, torch.device("cpu"))
