"""Cases of SDDMM, of BSR x BSR and of epilogues that every kernel must get right: small, and awkward in every way."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.bsr import BSR, zero_padding
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.reference.epilogue import Epilogue
from sparsek.reference.spgemm import pairs
from sparsek.testing.cases import Case
from sparsek.testing.poison import poisoned


@dataclass(frozen=True)
class SddmmCase:
    """S [m, n] = X [m, k] @ Y [k, n] at a pattern. `density`, `pattern` and `blocks` as in `Case`.

    `layouts` are those of X and Y: "row", "col" (the transpose view of a row-major matrix), "strided" (every other
    column of one), or "wide" (some columns of a wider one, from an address that is no multiple of 16 bytes).
    """

    m: int
    n: int
    k: int
    block: tuple[int, int]
    density: float
    note: str
    pattern: str = "uniform"
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
        case = Case(self.m, self.n, 0, self.block, self.density, self.note, self.pattern, blocks=self.blocks)
        a, _ = case.make(device, kind, seed)
        x = laid_out(self.layouts[0], (self.m, self.k), kind, device, seed + 1)
        return x, laid_out(self.layouts[1], (self.k, self.n), kind, device, seed + 2), a.pattern


@dataclass(frozen=True)
class SpgemmCase:
    """C [m, n] = A [m, k] @ B [k, n] in blocks of `blocks` = (bm, bk, bn), at densities of A and B.

    `views` makes A or B a transposed view. `wanted` is the density of C's pattern, None for every block that some
    pair adds to. `kept` is how many blocks of A and of B are left, -1 for all.
    """

    m: int
    k: int
    n: int
    blocks: tuple[int, int, int]
    densities: tuple[float, float]
    note: str
    pattern: str = "uniform"
    dtype: str = "fp16"
    views: tuple[bool, bool] = (False, False)
    wanted: float | None = None
    kept: tuple[int, int] = (-1, -1)

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
        for index, (shape, block) in enumerate((((self.m, self.k), (bm, bk)), ((self.k, self.n), (bk, bn)))):
            view = self.views[index]
            rows, columns = shape[::-1] if view else shape
            count = self.kept[index]
            sides = (block[1], block[0]) if view else block
            case = Case(rows, columns, 0, sides, self.densities[index], self.note, self.pattern)
            made, _ = replace(case, blocks=None if count < 0 else count).make(device, kind, seed + index)
            parts.append(made.T if view else made)
        if self.wanted is None:
            return parts[0], parts[1], None
        of_c = random_bsr(self.m, self.n, (bm, bn), self.wanted, dtype=kind, device=device, seed=seed + 2)
        return parts[0], parts[1], of_c.pattern


@dataclass(frozen=True)
class EpilogueCase:
    """C = act(alpha * (A @ B) + bias[:, None]), then + beta * other or * other; sizes and A as in `Case`.

    `combine` is "add", "mul" or "" for no other matrix, which is C itself if `in_place`. `layouts` are those of B (as
    in SddmmCase), of C, and of the other matrix; C's is "row" or "col". `batch` are leading dims of B and C.
    """

    m: int
    k: int
    n: int
    block: tuple[int, int]
    note: str
    density: float = 0.4
    alpha: float = 1.0
    bias: bool = False
    activation: str = ""
    combine: str = ""
    beta: float = 1.0
    in_place: bool = False
    layouts: tuple[str, str, str] = ("row", "row", "row")
    batch: tuple[int, ...] = ()
    view: bool = False
    dtype: str = "fp16"

    def __str__(self) -> str:
        bm, bk = self.block
        return f"{self.m}x{self.k}x{self.n}-b{bm}x{bk}-{self.dtype}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[BSR, Tensor, Epilogue, Tensor]:
        """A, B, the epilogue and an output to be written: full of NaN, or the epilogue's other matrix if `in_place`."""
        kind = dtypes.parse(self.dtype) if dtype is None else dtype
        bm, bk = self.block
        case = Case(self.m, self.k, 0, (bm, bk), self.density, self.note)
        if self.view:
            case = replace(case, m=self.k, k=self.m, block=(bk, bm))
        a, _ = case.make(device, kind, seed)
        b = laid_out(self.layouts[0], (*self.batch, self.k, self.n), kind, device, seed + 1)
        shape = (*self.batch, self.m, self.n)
        bias = laid_out("row", (1, self.m), kind, device, seed + 2)[0] if self.bias else None
        other = None
        if self.combine:
            lies = self.layouts[1] if self.in_place else self.layouts[2]
            other = laid_out(lies, shape, kind, device, seed + 3)
        made = Epilogue(self.alpha, bias, self.activation, other, self.combine or "add", self.beta)
        if self.in_place:
            assert other is not None
            return a.T if self.view else a, b, made, other
        out = poisoned(shape, kind, device)
        if self.layouts[1] == "col":
            out = poisoned((*self.batch, self.n, self.m), kind, device).mT
        return a.T if self.view else a, b, made, out


def judged_by(epilogue: Epilogue) -> Epilogue:
    """The same epilogue with its other matrix copied: what a result written in place is to be judged by."""
    return epilogue if epilogue.other is None else replace(epilogue, other=epilogue.other.clone())


def laid_out(layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """An N(0, 1) tensor [..., rows, columns] that lies in memory as `layout` says (SddmmCase)."""
    *lead, rows, columns = shape
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*sides: int) -> Tensor:
        return torch.randn(*lead, *sides, generator=draw, dtype=torch.float32, device=device).to(dtype)

    if layout == "col":
        return normal(columns, rows).mT
    if layout == "strided":
        return normal(rows, 2 * columns)[..., ::2]
    if layout == "wide":
        return normal(rows, columns + 5)[..., 3 : columns + 3]
    return normal(rows, columns)


def unmet_rows_poisoned(x: Tensor, y: Tensor, pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """X [..., M, K] and Y [..., K, N] with NaN in the rows and columns that meet no block of `pattern`."""
    return x.masked_fill(~met_rows(pattern)[:, None], torch.nan), y.masked_fill(
        ~met_rows(pattern.T), torch.nan
    )


def met_rows(pattern: BlockPattern) -> Tensor:
    """Which rows [M] belong to a block row that has a block."""
    return (pattern.row_lengths > 0).repeat_interleave(pattern.block[0])[: pattern.shape[0]]


def unmet_blocks_poisoned(a: BSR, b: BSR, wanted: BlockPattern | None = None) -> tuple[BSR, BSR]:
    """A and B with NaN in the blocks that have no pair, except in their padding."""
    return _filled(a, b, wanted, torch.nan)


def unmet_blocks_cleared(a: BSR, b: BSR, wanted: BlockPattern | None = None) -> tuple[BSR, BSR]:
    """A and B with 0 in the blocks that have no pair."""
    return _filled(a, b, wanted, 0.0)


def _filled(a: BSR, b: BSR, wanted: BlockPattern | None, value: float) -> tuple[BSR, BSR]:
    found = pairs(a.pattern, b.pattern, wanted)
    made = []
    for matrix, used in ((a, found.left), (b, found.right)):
        unmet = torch.ones(matrix.nnzb, dtype=torch.bool, device=matrix.device)
        unmet[torch.tensor(used, device=matrix.device)] = False
        view = matrix.order is not None
        if view:
            unmet = unmet[matrix.pattern.transposed[1].long()]
        values = matrix.values.detach().masked_fill(unmet[:, None, None], value)
        zero_padding(matrix.pattern.T if view else matrix.pattern, values)
        made.append(BSR.unchecked(matrix.pattern, values, matrix.order))
    return made[0], made[1]


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

_SMALL = (128, 192, 64, (32, 32))
_ROWS, _COLUMNS = ("row", "row", "row"), ("col", "col", "col")

EPILOGUE_CASES: tuple[EpilogueCase, ...] = (
    *(EpilogueCase(*_SMALL, f"{name} and bias", bias=True, activation=name) for name in ("relu", "silu")),
    *(
        EpilogueCase(*_SMALL, f"{name} and bias", bias=True, activation=name)
        for name in ("gelu", "gelu_tanh")
    ),
    EpilogueCase(*_SMALL, "gelu and bias bf16", bias=True, activation="gelu", dtype="bf16"),
    EpilogueCase(*_SMALL, "gelu and bias fp32", bias=True, activation="gelu", dtype="fp32"),
    EpilogueCase(*_SMALL, "silu alone", activation="silu"),
    EpilogueCase(*_SMALL, "alpha", alpha=-0.5),
    EpilogueCase(*_SMALL, "bias", bias=True),
    EpilogueCase(*_SMALL, "added", combine="add"),
    EpilogueCase(*_SMALL, "added twice over", combine="add", beta=2.0, alpha=0.5),
    EpilogueCase(*_SMALL, "multiplied", combine="mul"),
    EpilogueCase(*_SMALL, "added in place", combine="add", beta=-1.5, alpha=2.0, in_place=True),
    EpilogueCase(*_SMALL, "multiplied in place", combine="mul", bias=True, in_place=True),
    EpilogueCase(*_SMALL, "everything added", 0.4, 0.5, True, "gelu", "add", 0.25),
    EpilogueCase(*_SMALL, "everything multiplied", 0.4, 0.5, True, "silu", "mul"),
    EpilogueCase(
        128, 192, 200, (128, 64), "linear", bias=True, activation="gelu", combine="add", layouts=_COLUMNS
    ),
    EpilogueCase(128, 192, 64, (64, 64), "linear plain", layouts=_COLUMNS),
    EpilogueCase(128, 192, 64, (64, 64), "linear of a view", bias=True, layouts=_COLUMNS, view=True),
    EpilogueCase(*_SMALL, "linear in place", combine="add", in_place=True, layouts=_COLUMNS),
    EpilogueCase(*_SMALL, "B by columns", bias=True, layouts=("col", "row", "row")),
    EpilogueCase(*_SMALL, "C by columns", bias=True, layouts=("row", "col", "row")),
    EpilogueCase(*_SMALL, "C by columns other by rows", combine="mul", layouts=("row", "col", "row")),
    EpilogueCase(*_SMALL, "C by rows other by columns", combine="add", layouts=("row", "row", "col")),
    EpilogueCase(*_SMALL, "other strided", combine="mul", layouts=("row", "row", "strided")),
    EpilogueCase(*_SMALL, "other not aligned", combine="add", layouts=("wide", "row", "wide")),
    EpilogueCase(100, 77, 61, (32, 32), "ragged", 0.6, 0.5, True, "gelu", "add", 0.25),
    EpilogueCase(100, 77, 61, (32, 32), "ragged linear", 0.6, 0.5, True, "silu", "mul", layouts=_COLUMNS),
    EpilogueCase(96, 144, 40, (48, 48), "no power of two", bias=True, activation="gelu"),
    EpilogueCase(256, 128, 1, (64, 64), "one column", bias=True, activation="gelu"),
    EpilogueCase(256, 128, 1, (64, 64), "one token", bias=True, activation="gelu", layouts=_COLUMNS),
    EpilogueCase(256, 128, 7, (64, 64), "seven tokens", bias=True, combine="add", layouts=_COLUMNS),
    EpilogueCase(256, 128, 16, (128, 128), "decode", bias=True, activation="silu", layouts=_COLUMNS),
    EpilogueCase(128, 128, 48, (16, 16), "rows without blocks", 0.0, 2.0, True, "gelu", "add", 0.5),
    EpilogueCase(128, 0, 16, (32, 32), "no inner side", bias=True, activation="relu"),
    EpilogueCase(0, 128, 16, (32, 32), "no rows", bias=True, activation="relu"),
    EpilogueCase(128, 128, 0, (32, 32), "no columns", bias=True, activation="relu"),
    EpilogueCase(64, 96, 24, (32, 32), "batch", 0.5, 0.5, True, "gelu", "add", batch=(3,)),
    EpilogueCase(
        64, 96, 24, (32, 32), "batch by columns", bias=True, combine="mul", batch=(2, 2), layouts=_COLUMNS
    ),
)
