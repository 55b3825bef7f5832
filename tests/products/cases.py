"""Cases of A @ B for every kernel of spmm: small, and awkward in every allowed way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Scale, SparseMatrix, quantize
from sparsek.products.formats.quantized_tensor import DenseScale, QuantizedTensor
from sparsek.products.formats.random import Spread, random_bsr
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import Combine, Epilogue, EpilogueActivation
from sparsek.testing.poison import poisoned

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class ScaleScopes:
    """The scopes of scales, and the FP8 dtypes: of A and of B. `fast`: A's `fast_accum`."""

    a: Scale = "row"
    b: DenseScale = "row"
    dtype: torch.dtype = E4M3
    b_dtype: torch.dtype = E4M3
    fast: bool = False


@dataclass(frozen=True)
class Case:
    """C = act(alpha * (A @ B) + bias[:, None]), then + beta * other or * other, for a sparse A [m, k] and B [k, n].

    A is a BSR of `block`, with `two_four` a BSR24; without `block` it is a Semi24. `scales` quantizes A and B to FP8.
    `density` and `pattern` of blocks as in random_bsr; `blocks` keeps only the first so many. `view`: A is stored
    transposed.

    `combine` is "add", "mul" or "" for no other matrix, which is C itself if `in_place`. `layouts` are those of B, of
    C and of the other matrix (`laid_out`); C's is "row" or "col". `batch` are leading dims of B and C. `note`
    describes the special feature.
    """

    m: int
    k: int
    n: int
    block: tuple[int, int] | None
    note: str
    density: float = 0.5
    alpha: float = 1.0
    bias: bool = False
    activation: EpilogueActivation = ""
    combine: Combine | Literal[""] = ""
    beta: float = 1.0
    in_place: bool = False
    layouts: tuple[str, str, str] = ("row", "row", "row")
    batch: tuple[int, ...] = ()
    view: bool = False
    dtype: str = "fp16"
    pattern: Spread = "uniform"
    blocks: int | None = None
    two_four: bool = False
    scales: ScaleScopes | None = None

    @property
    def op(self) -> str:
        """The operation's name in the kernels' table."""
        stored = "semi24" if self.block is None else "bsr24" if self.two_four else "spmm"
        return stored + ("" if self.scales is None else "_fp8")

    @property
    def turned(self) -> bool:
        """Whether a call must pass that A is stored transposed. A BSR is a view with its own pattern."""
        return self.view and not self.op.startswith("spmm")

    def __str__(self) -> str:
        block = "" if self.block is None else f"-b{self.block[0]}x{self.block[1]}"
        view = "-T" if self.view else ""
        return f"{self.op}-{self.m}x{self.k}x{self.n}{block}{view}-{self.dtype}-{self.note.replace(' ', '_')}"

    def make(
        self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, seed: int = 0
    ) -> tuple[Any, Any, Epilogue, Tensor]:
        """A, B, the epilogue and an output: full of NaN, or the epilogue's other matrix if `in_place`.

        Of N(0, 1) numbers on `device`, in `dtype`, else the case's; for FP8 operands that is C's dtype, else float32.
        """
        kind = torch.float32 if self.scales else dtypes.parse(self.dtype)
        kind = kind if dtype is None else dtype
        shape = (*self.batch, self.m, self.n)
        of_b, of_c, of_other = self.layouts
        a, b = self._operands(of_b, kind, device, seed)
        bias = laid_out("row", (1, self.m), kind, device, seed + 2)[0] if self.bias else None
        other = None
        if self.combine:
            other = laid_out(of_c if self.in_place else of_other, shape, kind, device, seed + 3)
        epilogue = Epilogue(self.alpha, bias, self.activation, other, self.combine or "add", self.beta)
        if self.in_place:
            assert other is not None
            return a, b, epilogue, other
        lies = (*self.batch, self.n, self.m) if of_c == "col" else shape
        out = poisoned(lies, kind, device)
        return a, b, epilogue, out.mT if of_c == "col" else out

    def _operands(
        self, layout: str, dtype: torch.dtype, device: str | torch.device, seed: int
    ) -> tuple[SparseMatrix, Tensor | QuantizedTensor]:
        sides = (*self.batch, self.k, self.n)
        if self.scales is None:
            a = self._stored(dtype, device, seed)
            b: Tensor | QuantizedTensor = laid_out(layout, sides, dtype, device, seed + 1)
        else:
            # Rows of A and columns of B differ in size by powers of two, so a misplaced scale is detected.
            a = self._stored(torch.float32, device, seed)
            a.values.mul_(_sizes((*a.values.shape[:-1], 1), device, seed))
            a = quantize(a, self.scales.dtype, self.scales.a, fast_accum=self.scales.fast)
            x = laid_out("col", sides, torch.float32, device, seed + 1).mT
            x = x * _sizes((*x.shape[:-1], 1), device, seed + 1)
            b = quantize(x, self.scales.b_dtype, self.scales.b).mT
        return a.T if self.view and not self.turned else a, b

    def _stored(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> Any:
        """A as stored, before it is quantized."""
        m, k = (self.k, self.m) if self.view else (self.m, self.k)
        if self.block is None:
            return Semi24.from_dense(laid_out("row", (m, k), dtype, device, seed))
        bm, bk = self.block[::-1] if self.view else self.block
        a = random_bsr(
            m, k, (bm, bk), self.density, pattern=self.pattern, dtype=dtype, device=device, seed=seed
        )
        if self.blocks is not None:
            kept = slice(0, self.blocks)
            parts = a.pattern.block_rows[kept], a.pattern.indices[kept], a.values[kept]
            a = BSR.from_coo_blocks(*parts, a.shape)
        return BSR24.from_bsr(a) if self.two_four else a


def judged_by(epilogue: Epilogue) -> Epilogue:
    """The same epilogue with its other matrix copied, to judge a result written in place."""
    return epilogue if epilogue.other is None else replace(epilogue, other=epilogue.other.clone())


def laid_out(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, seed: int
) -> Tensor:
    """An N(0, 1) tensor [..., rows, columns] with layout "row", "col" (the transpose view of a row-major matrix),
    "strided" (every other column of one), or "wide" (some columns of a wider one, from an address that is no multiple
    of 16 bytes).
    """
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


def _sizes(shape: tuple[int, ...], device: str | torch.device, seed: int) -> Tensor:
    draw = torch.Generator(device).manual_seed(seed)
    return torch.exp2(torch.randint(-3, 4, shape, generator=draw, device=device).float())


B64, B128 = (64, 64), (128, 64)
COL = ("col", "col", "col")

SPMM_CASES: tuple[Case, ...] = (
    Case(256, 256, 64, (64, 64), "square", 0.25),
    Case(128, 512, 64, (32, 32), "wide", 0.25),
    Case(512, 128, 64, (32, 32), "tall", 0.25),
    Case(256, 384, 200, (128, 128), "block 128", 0.4),
    Case(256, 384, 200, (128, 128), "block 128 bf16", 0.4, dtype="bf16"),
    Case(128, 128, 64, (16, 16), "block 16", 0.25),
    Case(128, 128, 64, (16, 16), "block 16 bf16", 0.25, dtype="bf16"),
    Case(160, 128, 64, (32, 32), "fp32", 0.5, dtype="fp32"),
    Case(512, 256, 64, (256, 128), "block over 128", 0.5),
    Case(1024, 448, 64, (512, 112), "largest block rows", 0.5),
    Case(192, 288, 64, (48, 96), "no power of two", 0.3),
    Case(64, 256, 64, (16, 64), "flat block", 0.3),
    Case(384, 64, 64, (128, 16), "upright block", 0.5),
    Case(250, 256, 64, (64, 64), "ragged M", 0.5),
    Case(256, 250, 64, (64, 64), "ragged K", 0.5),
    Case(100, 77, 61, (32, 32), "ragged M K N", 0.6),
    Case(5, 3, 7, (16, 16), "smaller than a block", 1.0),
    Case(128, 128, 0, (32, 32), "no columns", 0.5),
    Case(128, 128, 1, (32, 32), "one column", 0.5),
    Case(128, 128, 7, (64, 64), "seven columns", 0.5),
    Case(128, 128, 8, (64, 64), "eight columns", 0.5),
    Case(256, 256, 16, (64, 64), "decode", 0.25),
    Case(64, 64, 8200, (32, 32), "many columns", 0.5),
    Case(512, 256, 64, (32, 32), "banded", 0.1, pattern="banded"),
    Case(512, 256, 64, (32, 32), "powerlaw with empty rows", 0.1, pattern="powerlaw"),
    Case(512, 128, 64, (16, 16), "powerlaw of small blocks", 0.3, pattern="powerlaw"),
    Case(256, 128, 64, (64, 64), "no blocks", 0.0),
    Case(256, 128, 64, (64, 64), "one block", 0.5, blocks=1),
    Case(256, 256, 64, (64, 64), "full", 1.0),
    Case(0, 128, 16, (64, 64), "no rows", 0.5),
    Case(128, 0, 16, (64, 64), "no inner side", 0.5),
)

_SMALL = (128, 192, 64, (32, 32))

EPILOGUE_CASES: tuple[Case, ...] = (
    *(
        Case(*_SMALL, f"{name} and bias", bias=True, activation=name)
        for name in ("relu", "silu", "gelu", "gelu_tanh")
    ),
    Case(*_SMALL, "gelu and bias bf16", bias=True, activation="gelu", dtype="bf16"),
    Case(*_SMALL, "gelu and bias fp32", bias=True, activation="gelu", dtype="fp32"),
    Case(*_SMALL, "silu alone", activation="silu"),
    Case(*_SMALL, "alpha", alpha=-0.5),
    Case(*_SMALL, "bias", bias=True),
    Case(*_SMALL, "added", combine="add"),
    Case(*_SMALL, "added twice over", combine="add", beta=2.0, alpha=0.5),
    Case(*_SMALL, "multiplied", combine="mul"),
    Case(*_SMALL, "added in place", combine="add", beta=-1.5, alpha=2.0, in_place=True),
    Case(*_SMALL, "multiplied in place", combine="mul", bias=True, in_place=True),
    Case(*_SMALL, "everything added", 0.4, 0.5, True, "gelu", "add", 0.25),
    Case(*_SMALL, "everything multiplied", 0.4, 0.5, True, "silu", "mul"),
    Case(128, 192, 200, (128, 64), "linear", bias=True, activation="gelu", combine="add", layouts=COL),
    Case(128, 192, 64, (64, 64), "linear plain", layouts=COL),
    Case(128, 192, 64, (64, 64), "linear of a view", bias=True, layouts=COL, view=True),
    Case(*_SMALL, "linear in place", combine="add", in_place=True, layouts=COL),
    Case(*_SMALL, "B by columns", bias=True, layouts=("col", "row", "row")),
    Case(*_SMALL, "C by columns", bias=True, layouts=("row", "col", "row")),
    Case(*_SMALL, "C by columns other by rows", combine="mul", layouts=("row", "col", "row")),
    Case(*_SMALL, "C by rows other by columns", combine="add", layouts=("row", "row", "col")),
    Case(*_SMALL, "other strided", combine="mul", layouts=("row", "row", "strided")),
    Case(*_SMALL, "other not aligned", combine="add", layouts=("wide", "row", "wide")),
    Case(100, 77, 61, (32, 32), "ragged", 0.6, 0.5, True, "gelu", "add", 0.25),
    Case(100, 77, 61, (32, 32), "ragged linear", 0.6, 0.5, True, "silu", "mul", layouts=COL),
    Case(96, 144, 40, (48, 48), "no power of two", bias=True, activation="gelu"),
    Case(256, 128, 1, (64, 64), "one column", bias=True, activation="gelu"),
    Case(256, 128, 1, (64, 64), "one token", bias=True, activation="gelu", layouts=COL),
    Case(256, 128, 7, (64, 64), "seven tokens", bias=True, combine="add", layouts=COL),
    Case(256, 128, 16, (128, 128), "decode", bias=True, activation="silu", layouts=COL),
    Case(128, 128, 48, (16, 16), "rows without blocks", 0.0, 2.0, True, "gelu", "add", 0.5),
    Case(128, 0, 16, (32, 32), "no inner side", bias=True, activation="relu"),
    Case(0, 128, 16, (32, 32), "no rows", bias=True, activation="relu"),
    Case(128, 128, 0, (32, 32), "no columns", bias=True, activation="relu"),
    Case(64, 96, 24, (32, 32), "batch", 0.5, 0.5, True, "gelu", "add", batch=(3,)),
    Case(64, 96, 24, (32, 32), "batch by columns", bias=True, combine="mul", batch=(2, 2), layouts=COL),
)

SEMI24_CASES: tuple[Case, ...] = (
    Case(64, 128, 32, None, "plain"),
    Case(128, 64, 64, None, "tall", alpha=0.5),
    Case(100, 72, 37, None, "ragged", bias=True, activation="gelu"),
    Case(1, 8, 1, None, "smallest"),
    Case(7, 24, 130, None, "few rows", activation="relu", combine="add", beta=-2.0),
    Case(65, 200, 16, None, "one more row than a tile", layouts=("col", "row", "row")),
    Case(96, 136, 40, None, "linear", layouts=COL, bias=True, activation="silu", combine="add"),
    Case(40, 64, 24, None, "gate", layouts=COL, combine="mul"),
    Case(48, 80, 12, None, "batch", batch=(2, 3), bias=True, combine="mul"),
    Case(48, 80, 12, None, "batch of columns", batch=(3,), layouts=("col", "row", "row")),
    Case(50, 64, 20, None, "strided", layouts=("strided", "row", "row"), activation="gelu_tanh"),
    Case(50, 64, 20, None, "wide", layouts=("wide", "col", "row"), combine="add"),
    Case(128, 64, 32, None, "transposed", view=True),
    Case(72, 100, 37, None, "transposed ragged", view=True, bias=True, activation="gelu"),
    Case(136, 3, 17, None, "transposed of few rows", view=True, layouts=COL, combine="add"),
    Case(8, 130, 40, None, "transposed of few columns", view=True, batch=(2,), alpha=2.0),
    Case(0, 64, 8, None, "no rows"),
    Case(32, 0, 8, None, "no inner side", bias=True),
    Case(32, 64, 0, None, "no columns"),
    Case(64, 0, 8, None, "transposed without rows", view=True, activation="silu"),
)

BSR24_CASES: tuple[Case, ...] = tuple(
    replace(case, two_four=True)
    for case in (
        Case(128, 256, 32, B64, "plain"),
        Case(256, 192, 24, B128, "block 128x64", bias=True, activation="gelu"),
        Case(192, 128, 20, (192, 128), "block 192x128", 1.0, alpha=2.0),
        Case(100, 200, 37, B64, "ragged", 0.7, bias=True, combine="add", beta=0.5),
        Case(320, 128, 24, B64, "empty rows", 0.2, bias=True, activation="relu"),
        Case(128, 192, 16, B64, "no blocks", 0.0, bias=True),
        Case(130, 136, 40, B128, "linear", layouts=COL, bias=True, activation="silu", combine="add"),
        Case(128, 128, 12, B64, "batch", batch=(2, 3), layouts=("strided", "row", "row")),
        Case(64, 128, 1, B64, "one column", combine="mul"),
        Case(256, 128, 32, B64, "transposed", view=True),
        Case(130, 250, 24, (64, 128), "transposed ragged", 0.6, view=True, bias=True, activation="gelu"),
        Case(256, 192, 16, B128, "transposed of wide blocks", view=True, layouts=COL, combine="add"),
        Case(320, 64, 9, B64, "transposed with empty rows", 0.3, view=True, batch=(2,)),
        Case(0, 128, 8, B64, "no rows"),
        Case(128, 0, 8, B64, "no inner side", bias=True),
        Case(128, 128, 0, B64, "no columns"),
    )
)

ROW = ScaleScopes()
TENSOR, BLOCK, FAST = ScaleScopes("tensor", "tensor"), ScaleScopes("block"), ScaleScopes(fast=True)
LAYER: dict[str, Any] = {"layouts": COL, "bias": True}

FP8_CASES: tuple[Case, ...] = (
    Case(128, 192, 40, B64, "plain", scales=ROW),
    Case(96, 160, 24, (32, 32), "block 32", scales=ROW, bias=True, activation="gelu"),
    Case(64, 80, 16, (16, 16), "block 16", scales=BLOCK),
    Case(256, 256, 32, (128, 128), "block 128", 0.6, scales=BLOCK, layouts=COL),
    Case(96, 144, 20, (48, 96), "no power of two", 0.7, scales=TENSOR),
    Case(250, 130, 33, (64, 32), "ragged", 0.6, scales=ROW, activation="silu", combine="add", beta=-0.5),
    Case(192, 128, 8, (32, 64), "empty rows", 0.2, scales=ROW, bias=True, activation="relu"),
    Case(128, 128, 24, B64, "no blocks", scales=ROW, density=0.0, bias=True),
    Case(128, 192, 48, B64, "layer", scales=ROW, **LAYER, activation="gelu_tanh", combine="add"),
    Case(64, 128, 1, B64, "one token", scales=ROW, layouts=COL, combine="mul"),
    Case(128, 128, 12, B64, "batch", batch=(2, 3), alpha=2.0, scales=ScaleScopes("row", "tensor")),
    Case(128, 96, 32, (32, 64), "view", scales=BLOCK, view=True, layouts=COL),
    Case(100, 72, 17, (32, 16), "ragged view", 0.7, scales=TENSOR, view=True, bias=True),
    Case(128, 128, 32, B64, "e5m2", scales=ScaleScopes("row", "row", E5M2)),
    Case(128, 128, 32, B64, "both e5m2", scales=ScaleScopes("tensor", "row", E5M2, E5M2)),
    Case(128, 640, 24, B64, "fast", scales=FAST, bias=True),
    Case(0, 128, 16, B64, "no rows", scales=ROW),
    Case(128, 0, 16, B64, "no inner side", scales=ROW, bias=True),
    Case(128, 128, 0, B64, "no columns", scales=ROW),
    Case(64, 128, 32, None, "plain", scales=ROW),
    Case(100, 72, 37, None, "ragged", bias=True, activation="gelu", scales=TENSOR),
    Case(7, 24, 50, None, "few rows", scales=ROW, alpha=0.5, combine="add", beta=2.0),
    Case(96, 136, 40, None, "layer", scales=ROW, **LAYER, activation="silu", combine="mul"),
    Case(48, 80, 12, None, "batch", batch=(2,), scales=ScaleScopes("row", "row", E5M2)),
    Case(64, 640, 40, None, "fast", scales=FAST, **LAYER),
    Case(1, 8, 1, None, "smallest", scales=ROW, layouts=COL),
    Case(32, 0, 8, None, "no inner side", scales=ROW, bias=True),
    Case(128, 256, 32, B64, "plain", two_four=True, scales=ROW),
    Case(256, 192, 24, (128, 64), "block 128x64", two_four=True, scales=BLOCK, bias=True, activation="gelu"),
    Case(
        130, 136, 40, (128, 64), "layer", two_four=True, scales=ROW, **LAYER, activation="silu", combine="add"
    ),
    Case(320, 128, 24, B64, "empty rows", two_four=True, density=0.2, bias=True, scales=TENSOR),
    Case(
        128,
        128,
        12,
        (64, 128),
        "batch",
        two_four=True,
        batch=(2, 2),
        scales=ScaleScopes("block", "row", E5M2),
    ),
    Case(128, 640, 24, (64, 128), "fast", two_four=True, scales=FAST),
    Case(128, 192, 16, B64, "no blocks", two_four=True, scales=ROW, density=0.0, combine="mul"),
)
