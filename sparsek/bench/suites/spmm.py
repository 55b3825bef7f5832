"""Products of a BSR and a dense matrix as a benchmark: its cases, their operands, its suites."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparsek.bench.engine.bench import Bench, Table
from sparsek.bench.engine.case import Schema, SuiteRow, check_choice
from sparsek.bench.engine.data import random_dense, revalued, sets_of
from sparsek.bench.engine.options import BLOCK, DENSITY, DTYPE, Option
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, USEFUL_NOTE
from sparsek.bench.suites.product import A_AT_B, PATTERN, BlocksCase, ProductOperands, form_name, sides
from sparsek.core import dtypes
from sparsek.matrix.bsr import BSR
from sparsek.matrix.random import random_bsr
from sparsek.testing.poison import poisoned

FORMS = (A_AT_B, "A.T@B", "B@A", "B@A.T")


@dataclass(frozen=True)
class SpmmCase(BlocksCase):
    """A product of A [m, k], `density` of whose blocks are stored in a seeded random pattern, and a dense B.

    `form` says which product; `n` is the side of B that A does not meet. "A@B": B is [k, n]. "A.T@B": B is [m, n].
    "B@A": B is [n, m]. "B@A.T": B is [n, k].
    """

    op: ClassVar[str] = "spmm"

    form: str = A_AT_B

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("a form of the product", self.form, FORMS)

    @property
    def name(self) -> str:
        """As for all such cases, after the form unless it is A @ B."""
        return super().name if self.form == A_AT_B else f"{form_name(self.form)} {super().name}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by form first."""
        return FORMS.index(self.form), *super().order

    @property
    def b_shape(self) -> tuple[int, int]:
        met = self.k if self.form in (A_AT_B, "B@A.T") else self.m
        return (self.n, met) if self.form.startswith("B") else (met, self.n)

    @property
    def out_shape(self) -> tuple[int, int]:
        left = self.m if self.form in (A_AT_B, "B@A.T") else self.k
        return (self.n, left) if self.form.startswith("B") else (left, self.n)

    def make(self, device: torch.device, seed: int = 0) -> tuple[BSR, torch.Tensor]:
        """A [m, k] and B, N(0, 1) values (A scaled so that A @ B has unit scale), one seed one pair."""
        dtype = dtypes.parse(self.dtype)
        given = {"pattern": self.pattern, "dtype": dtype, "device": device, "seed": seed}
        a = random_bsr(self.m, self.k, self.block, self.density, **given)
        return a, random_dense(*self.b_shape, dtype=dtype, device=device, seed=seed + 1)

    def operands(self, device: torch.device, seed: int = 0) -> list[ProductOperands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache."""
        a, b = self.make(device, seed)
        given = {"dtype": b.dtype, "device": device}
        footprint = (a.values.numel() + (self.k + self.m) * self.n) * b.element_size()

        def one(index: int) -> ProductOperands:
            mine = revalued(a, seed + 100 + index) if index else a
            other = random_dense(*self.b_shape, **given, seed=seed + 200 + index) if index else b
            return ProductOperands(mine, other, poisoned(self.out_shape, b.dtype, device), self.form)

        return sets_of(device, footprint, one)


def _square(block: int, density: float, **more: Any) -> SpmmCase:
    return SpmmCase(8192, 8192, 8192, (block, block), density, **more)


# Speed over density, one line for each block.
BY_DENSITY: tuple[SuiteRow, ...] = tuple(
    SuiteRow(_square(block, density), ("hopper.spmm",))
    for block in (128, 64, 32, 16)
    for density in (0.5, 0.25, 0.125, 0.0625, 0.03125)
)
# A @ B by block and density. 512x112 with 16 blocks in each of 16 rows holds as many values as
# block 128 with 14 blocks in each of 64 rows: 14,680,064.
BY_BLOCK: tuple[SuiteRow, ...] = (
    SuiteRow(_square(128, 0.5), ("hopper.spmm",)),
    SuiteRow(_square(128, 0.25), ("hopper.spmm",)),
    SuiteRow(_square(128, 0.125), ("hopper.spmm", "portable.spmm")),
    SuiteRow(_square(128, 0.0625), ("hopper.spmm",)),
    SuiteRow(_square(64, 0.125), ("hopper.spmm", "portable.spmm")),
    SuiteRow(_square(32, 0.125), ("hopper.spmm", "portable.spmm")),
    SuiteRow(_square(16, 0.125), ("hopper.spmm",)),
    SuiteRow(SpmmCase(8192, 8192, 8192, (512, 112), 16 / 74), ("hopper.spmm",)),
    SuiteRow(_square(128, 14 / 64), ("hopper.spmm",)),
    SuiteRow(_square(128, 0.125, pattern="powerlaw"), ("hopper.spmm",)),
    SuiteRow(SpmmCase(16384, 16384, 16, (64, 64), 0.25), ("hopper.spmm",)),
    SuiteRow(SpmmCase(16384, 16384, 16, (128, 128), 0.25), ("hopper.spmm",)),
)
# The other three products of the same size, next to A @ B and its tuned peers.
BY_FORM: tuple[SuiteRow, ...] = tuple(
    SuiteRow(_square(128, 0.125, form=form), ("hopper.spmm",)) for form in FORMS
)
# Sides that no tile divides, and uneven rows: the schedule must hold up here too.
RAGGED: tuple[SuiteRow, ...] = (
    SuiteRow(SpmmCase(8200, 8136, 8104, (128, 128), 0.125), ("hopper.spmm",)),
    SuiteRow(SpmmCase(5000, 7000, 3000, (64, 64), 0.125, "powerlaw"), ("hopper.spmm",)),
    SuiteRow(SpmmCase(4096, 11008, 4096, (128, 128), 0.125), ("hopper.spmm",)),
)
SUITES: Mapping[str, tuple[SuiteRow, ...]] = {
    "density": BY_DENSITY,
    "blocks": BY_BLOCK,
    "forms": BY_FORM,
    "ragged": RAGGED,
}


OPTIONS: tuple[Option, ...] = (
    *sides("Rows of A", "Columns of A", "The side of B that A does not meet"),
    BLOCK,
    DENSITY,
    PATTERN,
    DTYPE,
    Option("form", A_AT_B, f"Products: {', '.join(FORMS)}."),
)

TABLE = Table(
    op="spmm",
    title="BSR x dense",
    columns=(CASE, MS, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} Dense is cuBLAS on dense random data. torch.sparse runs with the best of all four parameters "
        "of its kernel, cuSPARSE on Blocked-ELL."
    ),
    beside=("torch_sparse", "cusparse"),
    usual=("bf16",),
    kernels=("hopper.spmm",),
)
BENCH = Bench(
    "spmm",
    suites=SUITES,
    schemas={"spmm": Schema(SpmmCase, later={"form": A_AT_B})},
    tables=(TABLE,),
    options=OPTIONS,
    make=SpmmCase,
)
