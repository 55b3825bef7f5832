"""Products of FP8 matrices with FP8 dense operands as a benchmark: its cases, their operands, its suites.

Both operands are in FP8 before any time, the dense one with a scale for each token; C is in bf16. Rates count, as in
`bench/suites/semi24.py`, every value in stored blocks, and of 2:4 matrices the values that are not there too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine.bench import Bench, Table
from sparsek.bench.engine.case import Bar, Case, Schema, SuiteRow, check_case, check_choice
from sparsek.bench.engine.data import random_dense, sets_of
from sparsek.bench.engine.names import block_name, stored_name
from sparsek.bench.engine.options import BLOCK, DENSITY, Option
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, target
from sparsek.bench.suites.product import (
    LINEAR,
    WIDE,
    ProductOperands,
    SidesCase,
    check_24_sides,
    form_name,
    matrices,
    sides,
)
from sparsek.bench.suites.semi24 import FORMS
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.kernels import names_for
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized, Scale, quantize
from sparsek.matrix.semi24 import Semi24
from sparsek.testing.poison import poisoned

BSR_, SEMI24, BSR24_ = STORED = ("bsr", "semi24", "bsr24")
OPS = {BSR_: "spmm_fp8", SEMI24: "semi24_fp8", BSR24_: "bsr24_fp8"}
SCALES = ("tensor", "row", "block")
DTYPES = {name: dtype for dtype, name in dtypes.FP8.items()}


@dataclass(frozen=True)
class Fp8Operands(ProductOperands):
    """One of the rotating sets: its own FP8 matrix [m, k] and FP8 x [n, k], and C [m, n], unless a layer makes it."""

    a: Quantized
    b: QuantizedTensor

    @property
    def x(self) -> QuantizedTensor:
        """[n, k] of both forms."""
        return self.b if self.is_linear else self.b.mT

    def dense_values(self) -> Tensor:
        """The FP8 values of the matrix [m, k] with zeros where it stores none: exact, FP8 fits into bf16."""
        m = self.a.matrix
        wide = m.values.to(WIDE)
        if isinstance(m, BSR):
            return BSR.unchecked(m.pattern, wide).to_dense().to(self.a.dtype)
        made = (
            Semi24.unchecked(wide, m.meta)
            if isinstance(m, Semi24)
            else BSR24.unchecked(m.pattern, wide, m.meta)
        )
        return made.to_dense().to(self.a.dtype)


def fp8_product(values: Tensor, scale: Tensor, x: Tensor, x_scale: Tensor, *, fast: bool) -> Tensor:
    """scale * values [m, k] @ (x_scale * x).T for FP8 x [n, k], in bf16, by cuBLAS: scales of rows, or one for all.

    `fast` sums in fewer bits than float32 has.
    """
    return torch._scaled_mm(
        values,
        x.mT,
        scale[:, None] if scale.ndim else scale,
        x_scale[None] if x_scale.ndim else x_scale,
        out_dtype=WIDE,
        use_fast_accum=fast,
    )


@dataclass(frozen=True)
class Fp8Case(SidesCase):
    """An FP8 matrix [m, k] times a dense FP8 one: "x@W.T", a layer of n tokens, or "A@B" with B [k, n].

    `stored` is "bsr", "semi24" or "bsr24"; `block` and `density` are those of stored blocks. `scale` says what of the
    matrix shares a scale. `dtype` is that of its values: "e4m3" or "e5m2"; the dense operand is in E4M3. `fast_accum`:
    sums may stay in the tensor cores.
    """

    op: ClassVar[str] = "fp8"

    stored: str = BSR_
    block: tuple[int, int] | None = (128, 128)
    density: float = 1.0
    form: str = LINEAR
    scale: Scale = "row"
    dtype: str = "e4m3"
    fast_accum: bool = False

    def __post_init__(self) -> None:
        choices = {"stored": STORED, "form": FORMS, "scale": SCALES, "dtype": DTYPES}
        for name, allowed in choices.items():
            check_choice(name, getattr(self, name), allowed)
        check_case(self, "m", "k", "n", dtype=False)
        if (self.block is None) != (self.stored == SEMI24):
            raise InvalidInput("bsr and bsr24 have blocks, semi24 has none")
        if self.block is None and (self.density != 1.0 or self.scale == "block"):
            raise InvalidInput("a 2:4 matrix without blocks has neither a density nor a scale of blocks")
        if self.block is not None and self.stored == BSR24_:
            check_24_sides(self.block)
        if self.fast_accum and self.scale == "block":
            raise InvalidInput("scales of blocks are applied to float32 sums, which fast_accum does without")
        if self.k % 16:
            raise InvalidInput(f"K of an FP8 product is a multiple of 16 here, got {self.k}")

    @property
    def whole(self) -> bool:
        """A Semi24."""
        return self.stored == SEMI24

    @property
    def name(self) -> str:
        """One short line: "x @ W.T 8192³ block 128 12.5 % e4m3"; the scale is named unless it is that of rows."""
        words = [self.dtype, "" if self.scale == "row" else f"scale per {self.scale}"]
        words += ["fast_accum"] if self.fast_accum else []
        if self.block is None:
            stored = " ".join(filter(None, ("2:4", *words)))
        else:
            stored = stored_name(block_name(self.block), self.density, *words)
            stored = f"2:4 in {stored}" if self.stored == BSR24_ else stored
        return f"{form_name(self.form)} {self.shape_name} {stored}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by format, self.size, block, falling density, sums, form, scale."""
        more = self.fast_accum, FORMS.index(self.form), SCALES.index(self.scale), self.dtype
        return STORED.index(self.stored), self.size, self.block or (), -self.density, *more

    def operands(self, device: torch.device, seed: int = 0) -> list[Fp8Operands]:
        """Sets of their own memory, of one pattern: 2 to 64, together several times the cache; N(0, 1) before FP8."""
        footprint = int(self.m * self.k * self.density) + self.n * (self.k + 2 * self.m)
        matrix, linear = matrices(self.stored, self, WIDE, device, seed), self.form == LINEAR

        def one(index: int) -> Fp8Operands:
            x = quantize(random_dense(self.n, self.k, dtype=WIDE, device=device, seed=seed + 10 * index + 1))
            a8 = quantize(matrix(index), DTYPES[self.dtype], self.scale, fast_accum=self.fast_accum)
            out = None if linear else poisoned((self.m, self.n), WIDE, device)
            return Fp8Operands(a8, x if linear else x.mT, out, self.form)

        return sets_of(device, footprint, one)


def kernels_of(stored: str) -> tuple[str, ...]:
    """The kernels of an FP8 format that run on GPUs and do not make it dense; without any, the planner's choice."""
    found = tuple(
        name for name in names_for("spmm", f"{stored}_fp8") if name.startswith(("hopper.", "portable."))
    )
    return found or ("auto",)


BLOCKS = tuple(Fp8Case(8192, 8192, 8192, BSR_, (128, 128), 0.125, form) for form in FORMS)
WHOLE = tuple(Fp8Case(8192, 8192, 8192, SEMI24, None, form=form) for form in FORMS)
FAST_BLOCKS, FAST_WHOLE = (
    tuple(replace(case, fast_accum=True) for case in cases) for cases in (BLOCKS, WHOLE)
)
# Sums in float32, and as the peers have them. Portable kernels
# sum in float32 whatever is allowed.
PUBLISHED: tuple[SuiteRow, ...] = (
    *(SuiteRow(case, kernels_of(case.stored)) for case in (*BLOCKS, *WHOLE)),
    *(SuiteRow(case, (f"hopper.{OPS[case.stored]}",)) for case in (*FAST_BLOCKS, *FAST_WHOLE)),
)
BARS: Mapping[Case, tuple[Bar, ...]] = {
    **dict.fromkeys((*BLOCKS, *FAST_BLOCKS), (Bar("cublas_fp8", 0.75, 0.9),)),
    **dict.fromkeys((*WHOLE, *FAST_WHOLE), (Bar("cusparselt", 0.95, 1.1),)),
}


def make(*, stored: str, block: tuple[int, int], density: float, **fields: Any) -> Fp8Case:
    """A case; a Semi24 has no blocks."""
    within = (None, 1.0) if stored == SEMI24 else (block, density)
    return Fp8Case(**fields, stored=stored, block=within[0], density=within[1])


OPTIONS: tuple[Option, ...] = (
    *sides("Rows of the FP8 matrix", "Its columns", "Rows of x, or columns of B"),
    Option("stored", "bsr", f"Formats: {', '.join(STORED)}."),
    BLOCK,
    DENSITY,
    Option("form", LINEAR, f"Products: {', '.join(FORMS)}."),
    Option("scale", "row", f"What shares a scale: {', '.join(SCALES)}."),
    Option("dtype", "e4m3", f"{', '.join(DTYPES)}."),
    Option("fast-accum", False, "Sums may stay in the tensor cores.", fields=("fast_accum",)),
)

TABLE = Table(
    op="fp8",
    title="FP8",
    dense=("cublas_fp8", "torch_dense"),
    columns=(CASE, MS, SPEEDUP, USEFUL, ROOF, target(BARS)),
    note=(
        "Both operands are quantized before they are timed, to E4M3 with a float32 scale for each row of W and of x; C "
        "is bf16. Useful TFLOPS count every value in stored blocks, of 2:4 matrices also the values that are not "
        "stored. Dense is cuBLAS FP8: the faster of one scale for all and one for each row, with the accumulation that "
        "is fastest. cuSPARSELt FP8 is the fastest of its algorithms and layouts, without scales. A target is the rate "
        "of useful work over that of the peer. Over SparseK in bf16: its time over that in FP8."
    ),
    beside=("bf16",),
    usual=("e4m3",),
    kernels=("hopper.spmm_fp8", "hopper.semi24_fp8", "hopper.bsr24_fp8"),
)
BENCH = Bench(
    "fp8",
    suites={"published": PUBLISHED},
    schemas={"fp8": Schema(Fp8Case, later={"fast_accum": False})},
    tables=(TABLE,),
    options=OPTIONS,
    make=make,
)
