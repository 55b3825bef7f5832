"""S = X @ Y at the blocks of a pattern as a benchmark: its cases, their operands, its suites."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine.bench import Bench, Table
from sparsek.bench.engine.case import Operands, Schema, SuiteRow
from sparsek.bench.engine.data import random_dense, sets_of
from sparsek.bench.engine.options import BLOCK, DENSITY, DTYPE
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL, USEFUL_NOTE
from sparsek.bench.suites.product import PATTERN, BlocksCase, sides
from sparsek.core import dtypes
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.random import random_bsr
from sparsek.ops.sddmm import plan_sddmm
from sparsek.plan.sddmm import SddmmPlan
from sparsek.testing.budget import Gate
from sparsek.testing.product_budget import check_sddmm


@dataclass(frozen=True)
class SddmmOperands(Operands):
    """One of the rotating sets: its own X [m, k] and Y [k, n], and the shared pattern of S [m, n]."""

    x: Tensor
    y: Tensor
    pattern: BlockPattern

    @property
    def useful_flops(self) -> float:
        return 2.0 * self.pattern.nnzb * self.pattern.block[0] * self.pattern.block[1] * self.x.shape[1]

    @property
    def given(self) -> tuple[Any, ...]:
        return self.x, self.y, self.pattern

    def plan(self, kernel: str | None) -> SddmmPlan:
        return plan_sddmm(*self.given, kernel=kernel)

    def shapes(self, plan: SddmmPlan) -> list[tuple[int, ...]]:
        return [(self.pattern.nnzb, *self.pattern.block)]

    def judge(self, out: BSR, *, tf32: bool = False) -> Gate:
        """Whether `out` is the product of this set at the blocks of its pattern."""
        return check_sddmm(self.x, self.y, out, tf32=tf32)

    def dense(self, seed: int) -> Callable[[], object]:
        """All of X @ Y; both are dense and random already."""
        out = self.x.new_empty(self.pattern.shape)
        return lambda: torch.matmul(self.x, self.y, out=out)


@dataclass(frozen=True)
class SddmmCase(BlocksCase):
    """S [m, n] = X [m, k] @ Y [k, n] at `density` of the blocks of S, in a seeded random pattern."""

    op: ClassVar[str] = "sddmm"

    def operands(self, device: torch.device, seed: int = 0) -> list[SddmmOperands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache.

        X is N(0, 1), Y scaled so that S has unit scale.
        """
        dtype = dtypes.parse(self.dtype)
        drawn = random_bsr(
            self.m, self.n, self.block, self.density, pattern=self.pattern, device=device, seed=seed
        )
        values = drawn.nnzb * self.block[0] * self.block[1]
        footprint = (self.k * (self.m + self.n) + values) * dtype.itemsize

        def one(index: int) -> SddmmOperands:
            x = random_dense(self.m, self.k, dtype=dtype, device=device, seed=seed + 10 * index + 1)
            y = random_dense(self.k, self.n, dtype=dtype, device=device, seed=seed + 10 * index + 2)
            return SddmmOperands(x, y.mul_(self.k**-0.5), drawn.pattern)

        return sets_of(device, footprint, one)


BOTH = ("hopper.sddmm", "portable.sddmm")
PUBLISHED: tuple[SuiteRow, ...] = tuple(
    SuiteRow(SddmmCase(8192, 8192, 8192, (block, block), 0.125), BOTH) for block in (128, 64)
)
OPTIONS = (*sides("Rows of X", "Columns of X", "Columns of Y"), BLOCK, DENSITY, PATTERN, DTYPE)

TABLE = Table(
    op="sddmm",
    title="SDDMM",
    columns=(CASE, MS, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} Dense is cuBLAS. torch.sparse is the kernel of its BSR sampled_addmm with the best tile of K, "
        "stages and warps."
    ),
    beside=("torch_sparse",),
    usual=("bf16",),
    kernels=("hopper.sddmm",),
)
BENCH = Bench(
    "sddmm",
    suites={"published": PUBLISHED},
    schemas={"sddmm": Schema(SddmmCase)},
    tables=(TABLE,),
    options=OPTIONS,
    make=SddmmCase,
)
