"""What formats give at equal stored values: x @ W.T with a W in 2:4, in blocks, and in 2:4 blocks, in the same rounds.

A matrix may store half of its values in two of every four neighbours, in half of its blocks, or in all of its blocks of
which each is 2:4. An eighth is an eighth of its blocks, or a quarter of its blocks in 2:4.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine.bench import Column, Table
from sparsek.bench.engine.case import SuiteRow, check_case
from sparsek.bench.engine.data import random_dense, random_weight, sets_of
from sparsek.bench.engine.names import block_name
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, useful
from sparsek.bench.suites.product import LINEAR, ProductOperands, SidesCase, check_24_sides
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.kernels import KERNELS
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.random import random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate

STORAGE_OF = {name: storage for _, name, _, storage in KERNELS}
HALF = 0.5


@dataclass(frozen=True)
class StoryOperands(ProductOperands):
    """One of the rotating sets: a layer's own x [n, k], and its W [m, k] in each format that can store so much of it.

    Where there is one, `a` is the 2:4 matrix.
    """

    case: "StoryCase | None" = None
    formats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def useful_flops(self) -> float:
        assert self.case is not None
        return self.case.stored * self.case.dense_flops

    def _of(self, kernel: str | None) -> ProductOperands:
        """The layer of the matrix that the kernel multiplies."""
        assert self.case is not None
        form = "bsr" if kernel is None else STORAGE_OF.get(kernel, "")
        known = {"bsr": "BSR", "bsr24": "a BSR24", "semi24": "a Semi24"}
        if form not in known:
            raise InvalidInput(f"{kernel!r} is no kernel of spmm, bsr24, semi24")
        if form not in self.formats:
            why = f"{known[form]} cannot store {self.case.stored * 100:.4g} % of the values"
            raise Unsupported(self.case.name, {str(kernel): [why]})
        return ProductOperands(self.formats[form], self.b, form=LINEAR)

    def plan(self, kernel: str | None) -> SpmmPlan:
        return self._of(kernel).plan(kernel)

    def planned(self, plan: SpmmPlan) -> Callable[[], Tensor]:
        return self._of(plan.kernel).planned(plan)

    def gate(self, plan: SpmmPlan) -> Gate:
        return self._of(plan.kernel).gate(plan)


@dataclass(frozen=True)
class StoryCase(SidesCase):
    """x [n, k] @ W.T for a W [m, k] of whose values the share `stored`, at most a half, is there; blocks of `block`."""

    op: ClassVar[str] = "story"

    stored: float
    block: tuple[int, int] = (128, 128)
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_24_sides(self.block)
        check_case(self, "m", "k", "n")
        if self.m % self.block[0] or self.k % self.block[1]:
            raise InvalidInput(f"{self.m} x {self.k} is not a multiple of {block_name(self.block)}")
        beside = self.stored * self.k / self.block[1]
        if not 0 < self.stored <= HALF or beside != round(beside):
            raise InvalidInput(
                f"stored is a share of at most {HALF} that is whole blocks of a block row, got {self.stored} of "
                f"{self.k // self.block[1]} blocks"
            )

    @property
    def whole(self) -> bool:
        """Whether a Semi24 stores as much."""
        return self.stored == HALF

    @property
    def in_blocks(self) -> bool:
        """BSR is among the kernels here, not a peer."""
        return False

    @property
    def name(self) -> str:
        """One short line: "8192³, 12.5 % of the values, bf16"."""
        shown = f", block {block_name(self.block)}" if self.block != (128, 128) else ""
        return f"{self.shape_name}, {self.stored * 100:.4g} % of the values{shown}, {self.dtype}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by self.size, then falling share."""
        return self.size, -self.stored, self.block, self.dtype

    def operands(self, device: torch.device, seed: int = 0) -> list[StoryOperands]:
        """Sets of their own memory: 2 to 64, together several times the cache; N(0, 1), W times k**-0.5."""
        dtype = dtypes.parse(self.dtype)
        footprint = int(self.m * self.k * self.stored + self.n * (self.k + self.m)) * dtype.itemsize
        given = {"dtype": dtype, "device": device}

        def one(index: int) -> StoryOperands:
            start = seed + 10 * index
            shares = (("bsr", self.stored), ("bsr24", 2 * self.stored))
            formats: dict[str, Any] = {
                name: random_bsr(self.m, self.k, self.block, share, seed=start + place, **given)
                for place, (name, share) in enumerate(shares)
            }
            formats["bsr24"] = BSR24.from_bsr(formats["bsr24"])
            if self.whole:
                w = random_weight(self.m, self.k, seed=start + 2, **given)
                formats["semi24"] = Semi24.from_dense(w)
            x = random_dense(self.n, self.k, seed=start + 3, **given)
            a = formats.get("semi24", formats["bsr"])
            return StoryOperands(a, x, form=LINEAR, case=self, formats=formats)

        return sets_of(device, footprint, one)


STORY: tuple[SuiteRow, ...] = tuple(
    SuiteRow(StoryCase(8192, 8192, 8192, share), ("hopper.semi24", "hopper.bsr24", "hopper.spmm"))
    for share in (0.5, 0.25, 0.125, 0.0625)
)


TABLE = Table(
    op="story",
    title="equal stored values",
    columns=(CASE, MS, SPEEDUP, Column("TFLOPS of stored values", useful), ROOF),
    note=(
        "x @ W.T where W stores the given share of its values: hopper.semi24 stores two of every four neighbours, "
        "hopper.bsr24 twice that share of the blocks of 128, each 2:4, and hopper.spmm that share of the blocks, "
        "whole. Dense is cuBLAS."
    ),
    beside=("cusparselt",),
    usual=("bf16",),
    kernels=(),
)
