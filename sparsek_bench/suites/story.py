"""What formats give at equal stored values: x @ W.T with a W in 2:4, in blocks, and in 2:4 blocks, in the same rounds.

A matrix may store half of its values in two of every four neighbours, in half of its blocks, or in all of its blocks,
each 2:4. An eighth is an eighth of its blocks, or a quarter of its blocks in 2:4.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine import table
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Column, Table
from sparsek_bench.engine.case import block_name, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, useful
from sparsek_bench.suites.product import LINEAR, ProductOperands, SidesCase, check_24_sides

STORAGE_OF = {name: storage for _, name, _, storage in table.rows()}
HALF = 0.5


@dataclass(frozen=True)
class StoryOperands(ProductOperands):
    """One of the rotating sets: a layer's own x [n, k], and its W [m, k] in each format that can store so much of it.

    Where there is one, `a` is the 2:4 matrix.
    """

    case: Any = None
    formats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def useful_flops(self) -> float:
        return self.case.stored * self.case.dense_flops

    def _of(self, kernel: str | None) -> ProductOperands:
        """The layer of the matrix that the kernel multiplies."""
        form = "bsr" if kernel is None else STORAGE_OF[kernel]
        if form not in self.formats:
            why = f"a Semi24 cannot store {self.case.stored * 100:.4g} % of the values"
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
    """x [n, k] @ W.T for a W [m, k] that stores the share `stored` of its values, at most a half; blocks of `block`.

    BSR is among the kernels, not a peer.
    """

    op: ClassVar[str] = "story"

    m: int = options.size("Rows of W")
    k: int = options.size("Columns of W")
    n: int = options.size("Rows of x")
    stored: float = options.checked(options.fraction)
    block: tuple[int, int] = options.block(usual=(128, 128))
    dtype: str = options.dtype()

    def check(self) -> None:
        check_24_sides(self.block)
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
    def name(self) -> str:
        """One short line: "8192³, 12.5 % of the values, bf16"."""
        shown = f", block {block_name(self.block)}" if self.block != (128, 128) else ""
        return f"{self.shape_name}, {self.stored * 100:.4g} % of the values{shown}, {self.dtype}"

    def sets(self, draw: Draw) -> Callable[[Draw], StoryOperands]:
        def one(draw: Draw) -> StoryOperands:
            sizes = (self.m, self.k, self.block)
            formats: dict[str, Any] = {"bsr": draw.blocks(*sizes, self.stored)}
            formats["bsr24"] = BSR24.from_bsr(draw.blocks(*sizes, 2 * self.stored))
            if self.whole:
                formats["semi24"] = Semi24.from_dense(draw.weight(self.m, self.k))
            a = formats.get("semi24", formats["bsr"])
            return StoryOperands(a, draw.normal(self.n, self.k), None, LINEAR, self, formats)

        return one


STORY = (  # 2:4 alone stores half
    *rows(("hopper.semi24", "hopper.bsr24", "hopper.spmm"), StoryCase(8192, 8192, 8192, 0.5)),
    *rows(
        ("hopper.bsr24", "hopper.spmm"),
        *(StoryCase(8192, 8192, 8192, share) for share in (0.25, 0.125, 0.0625)),
    ),
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
    kernels=(),
)
