"""One call, described without tensors, so that it can be planned anywhere and compared by value."""

from dataclasses import dataclass

from sparsek.core import dtypes
from sparsek.core.device import Card


@dataclass(frozen=True)
class SpmmProblem:
    """C [batch, m, n] = A [m, k] @ B [batch, k, n] with A in BSR.

    `block` is (bm, bk) of A, `nnzb` its stored blocks. `row_max` is the largest number of stored blocks in a block row.
    `b_layout` is "row" for row-major B, "col" for the transpose view of a row-major [n, k], "strided" for any other.
    `aligned` says that pointers and leading strides of B and C are multiples of 16 bytes.
    `transposed` says that A is a `.T` view. `touches_all_columns` says that every block column of A has a block.
    `merged` holds (R, steps) for factors R > 1: what is left to do when R block rows share a tile is the distinct
    block columns of each R rows, summed over groups of R block rows.
    """

    m: int
    k: int
    n: int
    block: tuple[int, int]
    nnzb: int
    dtype: str
    card: Card
    batch: int = 1
    b_layout: str = "row"
    aligned: bool = True
    transposed: bool = False
    tf32: bool = False
    row_max: int = 0
    touches_all_columns: bool = True
    merged: tuple[tuple[int, int], ...] = ()

    @property
    def on_cpu(self) -> bool:
        return self.card.is_cpu

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of A."""
        return -(-self.m // self.block[0]), -(-self.k // self.block[1])

    @property
    def density(self) -> float:
        cells = self.grid[0] * self.grid[1]
        return self.nnzb / cells if cells else 0.0

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every stored element and column of B."""
        return 2.0 * self.nnzb * self.block[0] * self.block[1] * self.n * self.batch

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.batch

    @property
    def compulsory_bytes(self) -> float:
        """Stored values and indices read once, B read once, C written once."""
        size = dtypes.itemsize(self.dtype)
        values = self.nnzb * self.block[0] * self.block[1] * size
        dense = self.batch * self.n * (self.k + self.m) * size
        return float(values + dense + 4 * (self.nnzb + self.grid[0] + 1))
