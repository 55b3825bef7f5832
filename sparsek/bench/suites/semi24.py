"""Products of 2:4 matrices, whole or in stored blocks, with dense ones as a benchmark: cases, operands, suites.

Rates count what a dense product does: 2 * m * k * n FLOPs of a Semi24, 2 * n for every value in the blocks of a BSR24,
stored or not. Half of that is multiplied.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.bench.engine.bench import Bench, Column, Table
from sparsek.bench.engine.case import (
    DENSITY,
    DTYPE,
    Bar,
    Case,
    Operands,
    Option,
    Schema,
    SuiteRow,
    block_name,
    check_case,
    parse_block,
    random_dense,
    set_count,
    shape_name,
    stored_name,
)
from sparsek.bench.engine.tables import CASE, KERNEL, MS, ROOF, SPEEDUP, must_reach, useful
from sparsek.bench.suites import story
from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.matrix import two_four
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.ops.linear import plan_layer
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate
from sparsek.testing.budget24 import check_24, check_linear24
from sparsek.testing.poison import poisoned

LINEAR, A_AT_B = "x@W.T", "A@B"
FORMS = (LINEAR, A_AT_B)


@dataclass(frozen=True)
class Semi24Operands(Operands):
    """One of the rotating sets: its own 2:4 matrix [m, k], and x [n, k] of a layer, or B [k, n] and C [m, n].

    A layer makes its output.
    """

    a: Semi24 | BSR24
    b: Tensor
    out: Tensor | None = None

    @property
    def is_linear(self) -> bool:
        return self.out is None

    @property
    def b_as_factor(self) -> Tensor:
        """The right factor [k, n] of A @ B: x.T of a layer."""
        return self.b.mT if self.is_linear else self.b

    @property
    def pattern(self) -> BlockPattern | None:
        """The stored blocks; None of a Semi24."""
        return self.a.pattern if isinstance(self.a, BSR24) else None

    @property
    def useful_flops(self) -> float:
        return 4.0 * self.a.values.numel() * self.b_as_factor.shape[1]

    def plan(self, kernel: str | None) -> SpmmPlan:
        if self.is_linear:
            return plan_layer(self.b, self.a, kernel=kernel)
        return plan_spmm(self.a, self.b, kernel=kernel)

    def planned(self, plan: SpmmPlan) -> Callable[[], Tensor]:
        if self.is_linear:
            return lambda: plan(self.b, self.a)
        return lambda: plan(self.a, self.b, out=self.out)

    def gate(self, plan: SpmmPlan) -> Gate:
        if self.out is None:
            # A caching allocator hands the memory of a dropped tensor to the next of its size: C begins as NaN.
            poisoned((self.b.shape[0], self.a.shape[0]), self.b.dtype, self.b.device)
        else:
            self.out.fill_(torch.nan)
        return self.judge(self.planned(plan)(), tf32=plan.problem.tf32)

    def judge(self, out: Tensor, *, tf32: bool = False) -> Gate:
        """Whether `out`, [n, m] of a layer and [m, n] otherwise, is the product of this set."""
        if self.is_linear:
            return check_linear24(self.b, self.a, out)
        return check_24(self.a, self.b, out, tf32=tf32)

    def dense(self, seed: int) -> Callable[[], Tensor]:
        m, k = self.a.shape
        w = random_dense(m, k, dtype=self.b.dtype, device=self.b.device, seed=seed).mul_(k**-0.5)
        if self.is_linear:
            return lambda: functional.linear(self.b, w)
        return lambda: torch.matmul(w, self.b, out=self.out)


@dataclass(frozen=True)
class Semi24Case(Case):
    """A 2:4 matrix [m, k] times a dense one: "x@W.T", a layer of n tokens, or "A@B" with B [k, n].

    Without `block` it is a Semi24. With one it is a BSR24 of which `density` of the blocks is stored.
    """

    op: ClassVar[str] = "semi24"

    m: int
    k: int
    n: int
    form: str = LINEAR
    block: tuple[int, int] | None = None
    density: float = 1.0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_case(self, "m", "k", "n")
        if self.form not in FORMS:
            raise InvalidInput(f"a form of the product is one of {', '.join(FORMS)}, got {self.form!r}")
        if self.block is None and self.density != 1.0:
            raise InvalidInput(
                f"density {self.density} is that of blocks; a 2:4 matrix without blocks has none"
            )
        if self.block is not None and any(side % 64 or side < 1 for side in self.block):
            raise InvalidInput(f"sides of 2:4 blocks are multiples of 64, got {block_name(self.block)}")
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
        return f"{self.form.replace('@', ' @ ')} {shape_name(self.m, self.k, self.n)} 2:4 {stored}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by kind, size, then block, falling density, and form."""
        size = self.m * self.k * self.n
        return (
            self.block is not None,
            size,
            self.block or (),
            -self.density,
            FORMS.index(self.form),
            self.dtype,
        )

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    def operands(self, device: torch.device, seed: int = 0) -> list[Semi24Operands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache.

        The dense operand is N(0, 1), the 2:4 one holds the larger two of every four such values, times k**-0.5.
        """
        dtype = dtypes.parse(self.dtype)
        stored = self.m * self.k * self.density * 9 / 16
        footprint = int(stored + self.n * (self.k + self.m)) * dtype.itemsize
        first = self._matrix(device, dtype, seed)
        sets = []
        for index in range(set_count(card_of(device), footprint)):
            a = self._like(first, seed + 10 * index) if index else first
            shape = (self.n, self.k) if self.form == LINEAR else (self.k, self.n)
            b = random_dense(*shape, dtype=dtype, device=device, seed=seed + 10 * index + 1)
            out = None if self.form == LINEAR else poisoned((self.m, self.n), dtype, device)
            sets.append(Semi24Operands(a, b, out))
        return sets

    def _matrix(self, device: torch.device, dtype: torch.dtype, seed: int) -> Semi24 | BSR24:
        if self.block is None:
            w = random_dense(self.m, self.k, dtype=dtype, device=device, seed=seed)
            return Semi24.from_dense(w.mul_(self.k**-0.5))
        given = {"dtype": dtype, "device": device, "seed": seed}
        return BSR24.from_bsr(random_bsr(self.m, self.k, self.block, self.density, **given))

    def _like(self, first: Semi24 | BSR24, seed: int) -> Semi24 | BSR24:
        """Another matrix, of the same pattern if it has one."""
        if isinstance(first, Semi24):
            return self._matrix(first.device, first.dtype, seed)
        generator = torch.Generator(device=first.device).manual_seed(seed)
        if first.pattern.is_ragged:  # blocks at the edge hold padding
            return BSR24.unchecked(first.pattern, first.values.clone(), first.meta.clone())
        places = torch.randperm(first.nnzb, generator=generator, device=first.device)
        return BSR24.unchecked(first.pattern, first.values[places], first.meta[places])


SCHEMAS: Mapping[str, Schema] = {"semi24": Schema(Semi24Case)}
SQUARE = (8192, 8192, 8192)
WHOLE = tuple(Semi24Case(*SQUARE, form) for form in FORMS)
IN_BLOCKS = tuple(Semi24Case(*SQUARE, form, (128, 128), 0.125) for form in FORMS)
PUBLISHED: tuple[SuiteRow, ...] = (
    *(SuiteRow(case, ("hopper.semi24", "portable.semi24")) for case in WHOLE),
    *(SuiteRow(case, ("hopper.bsr24", "portable.bsr24")) for case in IN_BLOCKS),
)
SUITES: Mapping[str, tuple[SuiteRow, ...]] = {"published": PUBLISHED}
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
    Option("m", "8192", "Rows of the 2:4 matrix; comma lists give every combination.", int),
    Option("k", "8192", "Its columns.", int),
    Option("n", "8192", "Rows of x, or columns of B.", int),
    Option("form", LINEAR, f"Products: {', '.join(FORMS)}."),
    Option("block", "none", "Stored blocks, or none: none,128.", parse_blocks),
    replace(DENSITY, default="1"),
    DTYPE,
)

TABLE = Table(
    op="semi24",
    title="2:4",
    columns=(
        CASE,
        KERNEL,
        MS,
        SPEEDUP,
        Column("dense-equivalent TFLOPS", useful),
        ROOF,
        must_reach(BARS),
    ),
    note=(
        "TFLOPS are dense-equivalent: 2 * M * N * K of a 2:4 matrix, 2 * N for every value in the stored blocks of "
        "one in blocks, kept or not; half of that is multiplied. A ratio is this library's rate over the peer's in "
        "the same rounds, cuBLAS on dense random data. cuSPARSELt is the fastest of all its algorithms in all layouts "
        "of B and C, its B laid out before any time; with the same layouts it takes B and makes C as they lie here. "
        "BSR is this library's on the same blocks, with all their values. The roofline counts the stored values at the "
        "dense rate."
    ),
    pages=("README.md", "docs/two-four.md"),
)
BENCH = Bench(
    "semi24",
    {**SUITES, **story.SUITES},
    {**SCHEMAS, **story.SCHEMAS},
    (
        TABLE,
        story.TABLE,
    ),
    OPTIONS,
    make,
)
