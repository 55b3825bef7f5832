"""Cases that every kernel of 2:4 products must get right: small, and awkward in every way that is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.random import random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.reference.epilogue import Epilogue
from sparsek.testing.poison import poisoned
from sparsek.testing.product_cases import laid_out


@dataclass(frozen=True)
class Case24:
    """C = act(alpha * (A @ B) + bias[:, None]), then + beta * other or * other, for a stored A of `rows` x `columns`.

    `block` makes A a BSR24 of that `density` of blocks, without one it is a Semi24. `transposed` multiplies A.T.
    `layouts` are those of B ("row", "col", "strided", "wide", as in SddmmCase), of C and of the other matrix ("row" or
    "col"). `batch` are leading dims of B and C.
    """

    rows: int
    columns: int
    n: int
    note: str
    block: tuple[int, int] | None = None
    density: float = 0.5
    transposed: bool = False
    alpha: float = 1.0
    bias: bool = False
    activation: str = ""
    combine: str = ""
    beta: float = 1.0
    layouts: tuple[str, str, str] = ("row", "row", "row")
    batch: tuple[int, ...] = ()

    def __str__(self) -> str:
        block = f"-b{self.block[0]}x{self.block[1]}" if self.block else ""
        turned = "-T" if self.transposed else ""
        return f"{self.rows}x{self.columns}x{self.n}{block}{turned}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str = "cpu", dtype: torch.dtype = torch.float16, seed: int = 0
    ) -> tuple[Semi24 | BSR24, Tensor, Epilogue, Tensor]:
        """A, B, the epilogue and an output full of NaN: N(0, 1) on `device`."""
        dtypes.name(dtype)
        draw = torch.Generator("cpu").manual_seed(seed)
        if self.block is None:
            dense = torch.randn(
                self.rows, self.columns, generator=draw, dtype=torch.float32, device="cpu"
            ).to(device, dtype)
            a: Semi24 | BSR24 = Semi24.from_dense(dense)
        else:
            made = random_bsr(
                self.rows, self.columns, self.block, self.density, dtype=dtype, device=device, seed=seed
            )
            a = BSR24.from_bsr(made)
        m, k = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        b = laid_out(self.layouts[0], (*self.batch, k, self.n), dtype, device, seed + 1)
        shape = (*self.batch, m, self.n)
        bias = laid_out("row", (1, m), dtype, device, seed + 2)[0] if self.bias else None
        other = laid_out(self.layouts[2], shape, dtype, device, seed + 3) if self.combine else None
        epilogue = Epilogue(self.alpha, bias, self.activation, other, self.combine or "add", self.beta)
        out = poisoned(shape, dtype, device)
        if self.layouts[1] == "col":
            out = poisoned((*self.batch, self.n, m), dtype, device).mT
        return a, b, epilogue, out


B64, B128 = (64, 64), (128, 64)
COL = ("col", "col", "col")

SEMI24_CASES: tuple[Case24, ...] = (
    Case24(64, 128, 32, "plain"),
    Case24(128, 64, 64, "tall", alpha=0.5),
    Case24(100, 72, 37, "ragged", bias=True, activation="gelu"),
    Case24(1, 8, 1, "smallest"),
    Case24(7, 24, 130, "few rows", activation="relu", combine="add", beta=-2.0),
    Case24(65, 200, 16, "one more row than a tile", layouts=("col", "row", "row")),
    Case24(96, 136, 40, "linear", layouts=COL, bias=True, activation="silu", combine="add"),
    Case24(40, 64, 24, "gate", layouts=COL, combine="mul"),
    Case24(48, 80, 12, "batch", batch=(2, 3), bias=True, combine="mul"),
    Case24(48, 80, 12, "batch of columns", batch=(3,), layouts=("col", "row", "row")),
    Case24(50, 64, 20, "strided", layouts=("strided", "row", "row"), activation="gelu_tanh"),
    Case24(50, 64, 20, "wide", layouts=("wide", "col", "row"), combine="add"),
    Case24(64, 128, 32, "transposed", transposed=True),
    Case24(100, 72, 37, "transposed ragged", transposed=True, bias=True, activation="gelu"),
    Case24(3, 136, 17, "transposed of few rows", transposed=True, layouts=COL, combine="add"),
    Case24(130, 8, 40, "transposed of few columns", transposed=True, batch=(2,), alpha=2.0),
    Case24(0, 64, 8, "no rows"),
    Case24(32, 0, 8, "no inner side", bias=True),
    Case24(32, 64, 0, "no columns"),
    Case24(0, 64, 8, "transposed without rows", transposed=True, activation="silu"),
)

BSR24_CASES: tuple[Case24, ...] = (
    Case24(128, 256, 32, "plain", B64),
    Case24(256, 192, 24, "block 128x64", B128, bias=True, activation="gelu"),
    Case24(192, 128, 20, "block 192x128", (192, 128), 1.0, alpha=2.0),
    Case24(100, 200, 37, "ragged", B64, 0.7, bias=True, combine="add", beta=0.5),
    Case24(320, 128, 24, "empty rows", B64, 0.2, bias=True, activation="relu"),
    Case24(128, 192, 16, "no blocks", B64, 0.0, bias=True),
    Case24(130, 136, 40, "linear", B128, layouts=COL, bias=True, activation="silu", combine="add"),
    Case24(128, 128, 12, "batch", B64, batch=(2, 3), layouts=("strided", "row", "row")),
    Case24(64, 128, 1, "one column", B64, combine="mul"),
    Case24(128, 256, 32, "transposed", B64, transposed=True),
    Case24(250, 130, 24, "transposed ragged", B128, 0.6, transposed=True, bias=True, activation="gelu"),
    Case24(192, 256, 16, "transposed of wide blocks", (64, 128), transposed=True, layouts=COL, combine="add"),
    Case24(64, 320, 9, "transposed with empty rows", B64, 0.3, transposed=True, batch=(2,)),
    Case24(0, 128, 8, "no rows", B64),
    Case24(128, 0, 8, "no inner side", B64, bias=True),
    Case24(128, 128, 0, "no columns", B64),
)
