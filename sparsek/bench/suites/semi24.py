"""Products of 2:4 matrices, whole or in stored blocks, with dense ones as a benchmark: cases, operands, suites.

Rates count what a dense product does: 2 * m * k * n FLOPs of a Semi24, 2 * n for every value in the blocks of a BSR24,
stored or not. Half of that is multiplied.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from sparsek.bench.engine.bench import Bench, Column, Table
from sparsek.bench.engine.case import Bar, Case, Schema, SuiteRow, check_case, check_choice
from sparsek.bench.engine.data import random_dense, sets_of
from sparsek.bench.engine.names import block_name, stored_name
from sparsek.bench.engine.options import DENSITY, DTYPE, Option, parse_block
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, target, useful
from sparsek.bench.suites import story
from sparsek.bench.suites.product import (
    A_AT_B,
    LINEAR,
    ProductOperands,
    SidesCase,
    check_24_sides,
    form_name,
    matrices,
    sides,
)
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix import two_four
from sparsek.testing.poison import poisoned

FORMS = (LINEAR, A_AT_B)


@dataclass(frozen=True)
class Semi24Case(SidesCase):
    """A 2:4 matrix [m, k] times a dense one: "x@W.T", a layer of n tokens, or "A@B" with B [k, n].

    Without `block` it is a Semi24. With one it is a BSR24 of which `density` of the blocks is stored.
    """

    op: ClassVar[str] = "semi24"

    form: str = LINEAR
    block: tuple[int, int] | None = None
    density: float = 1.0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.block is not None:
            check_24_sides(self.block)
        check_case(self, "m", "k", "n")
        check_choice("a form of the product", self.form, FORMS)
        if self.block is None and self.density != 1.0:
            raise InvalidInput(
                f"density {self.density} is that of blocks; a 2:4 matrix without blocks has none"
            )
        if self.k % two_four.STEP:
            raise InvalidInput(f"K of a 2:4 matrix is a multiple of {two_four.STEP}, got {self.k}")

    @property
    def whole(self) -> bool:
        """A Semi24."""
        return self.block is None

    @property
    def in_blocks(self) -> bool:
        """A BSR24."""
        return self.block is not None

    @property
    def name(self) -> str:
        """One short line: "x @ W.T 8192³ 2:4 bf16", "A @ B 8192³ 2:4 in block 128 12.5 % bf16"."""
        stored = self.dtype
        if self.block is not None:
            stored = f"in {stored_name(block_name(self.block), self.density, self.dtype)}"
        return f"{form_name(self.form)} {self.shape_name} 2:4 {stored}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by kind, self.size, then block, falling density, and form."""
        block = self.block or ()
        return self.in_blocks, self.size, block, -self.density, FORMS.index(self.form), self.dtype

    def operands(self, device: torch.device, seed: int = 0) -> list[ProductOperands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache.

        The dense operand is N(0, 1), the 2:4 one holds the larger two of every four such values, times k**-0.5.
        """
        dtype = dtypes.parse(self.dtype)
        stored = self.m * self.k * self.density * 9 / 16
        matrix = matrices("bsr24" if self.in_blocks else "semi24", self, dtype, device, seed)
        linear = self.form == LINEAR

        def one(index: int) -> ProductOperands:
            shape = (self.n, self.k) if linear else (self.k, self.n)
            b = random_dense(*shape, dtype=dtype, device=device, seed=seed + 10 * index + 1)
            out = None if linear else poisoned((self.m, self.n), dtype, device)
            return ProductOperands(matrix(index), b, out, self.form)

        return sets_of(device, int(stored + self.n * (self.k + self.m)) * dtype.itemsize, one)


SQUARE = (8192, 8192, 8192)
WHOLE = tuple(Semi24Case(*SQUARE, form) for form in FORMS)
IN_BLOCKS = tuple(Semi24Case(*SQUARE, form, (128, 128), 0.125) for form in FORMS)
PUBLISHED: tuple[SuiteRow, ...] = (
    *(SuiteRow(case, ("hopper.semi24", "portable.semi24")) for case in WHOLE),
    *(SuiteRow(case, ("hopper.bsr24", "portable.bsr24")) for case in IN_BLOCKS),
)
BARS: Mapping[Case, tuple[Bar, ...]] = {
    **dict.fromkeys(WHOLE, (Bar("cusparselt", 1.05, 1.25), Bar("cublas", 1.45, 1.7))),
    **dict.fromkeys(IN_BLOCKS, (Bar("bsr", 1.25, 1.45),)),
}


def parse_blocks(text: str) -> tuple[int, int] | None:
    """ "none" -> None, for a 2:4 matrix without blocks; "128" -> (128, 128)."""
    return None if text == "none" else parse_block(text)


def make(*, block: tuple[int, int] | None, density: float, **fields: Any) -> Semi24Case:
    """A case; one without blocks has one density, 1."""
    return Semi24Case(**fields, block=block, density=1.0 if block is None else density)


OPTIONS: tuple[Option, ...] = (
    *sides("Rows of the 2:4 matrix", "Its columns", "Rows of x, or columns of B"),
    Option("form", LINEAR, f"Products: {', '.join(FORMS)}."),
    Option("block", "none", "Stored blocks, or none: none,128.", parse_blocks),
    replace(DENSITY, default="1"),
    DTYPE,
)

TABLE = Table(
    op="semi24",
    title="2:4",
    columns=(CASE, MS, SPEEDUP, Column("dense-equivalent TFLOPS", useful), ROOF, target(BARS)),
    note=(
        "TFLOPS are dense-equivalent: they count all four values of a group, two of them not stored. "
        "Dense is cuBLAS. A target is a peer's time over SparseK's. cuSPARSELt is the fastest of its algorithms in all "
        "layouts of B and C; its B is in that layout before it is timed. The BSR stores all values of the same blocks. "
        "The roofline counts the stored values at the dense rate."
    ),
    usual=("bf16",),
    kernels=("hopper.semi24", "hopper.bsr24"),
)
BENCH = Bench(
    "semi24",
    suites={"published": PUBLISHED, "story": story.STORY},
    schemas={"semi24": Schema(Semi24Case), "story": Schema(story.StoryCase)},
    tables=(TABLE, story.TABLE),
    options=OPTIONS,
    make=make,
)
