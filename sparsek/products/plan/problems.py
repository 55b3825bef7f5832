"""Problems of matrix products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.products.formats.storage import BlockStats, Storage
from sparsek.products.reference.epilogue import Combine, EpilogueActivation


class ProductProblem:
    """Fields shared by matrix products [batch, m, n] over k, with `nnzb` stored blocks of `block`."""

    card: Card
    dtype: str
    tf32: bool
    m: int
    k: int
    n: int
    batch: int = 1
    block: tuple[int, int]
    nnzb: int

    @property
    def on_cpu(self) -> bool:
        return self.card.is_cpu

    @property
    def rate_name(self) -> str:
        return "tf32" if self.dtype == "fp32" and self.tf32 else self.dtype

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of the product."""
        return -(-self.m // self.block[0]), -(-self.n // self.block[1])

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        cells = self.grid[0] * self.grid[1]
        return self.nnzb / cells if cells else 0.0

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.batch


@dataclass(frozen=True)
class DenseSpec:
    """The layout of a dense matrix X [..., R, C] that a product reads or writes.

    `layout` is "row" for row-major, "col" for the transpose view of a row-major matrix, "strided" for any other.
    An FP8 matrix has a `scale` per "column" or for the whole "tensor". `rounds` is the dtype of an input that the call
    rounds to FP8.
    """

    dtype: str
    layout: str = "row"
    scale: str = ""
    rounds: str = ""


@dataclass(frozen=True)
class SpmmProblem(ProductProblem):
    """C [batch, m, n] = A [m, k] @ B [batch, k, n] with a sparse A, stored as `a` describes, and dense B and C.

    `aligned`: pointers and leading strides of A's values, B and C are multiples of 16 bytes. c.layout is "col" if C
    is the transpose view of a row-major [n, m], which is computed as B^T A^T. The epilogue
    (`reference.epilogue.Epilogue`): `has_alpha` (alpha is not 1), `bias`, `activation`, and `combine`: "add" or "mul"
    with another matrix, "" without one. `in_place`: the other matrix is C. `slope`: a second matrix gets the
    derivative of the activation. `rounded_before`: B is rounded by a launch of its own, whatever kernel multiplies,
    because a given C may lie in its memory.

    A quantized A has a quantized B, whose values are contiguous along k: C = act(alpha * scale_A[m] * scale_B[n] *
    (A8 @ B8) + bias), and so on. A scale per block of A is inside the sum.
    """

    op: ClassVar[str] = "spmm"

    a: Storage
    b: DenseSpec
    c: DenseSpec
    m: int
    k: int
    n: int
    card: Card
    batch: int = 1
    aligned: bool = True
    tf32: bool = False
    has_alpha: bool = False
    bias: bool = False
    activation: EpilogueActivation = ""
    combine: Combine | Literal[""] = ""
    in_place: bool = False
    slope: bool = False
    rounded_before: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of A's values."""
        return self.a.dtype

    @property
    def storage(self) -> str:
        """The kind of storage of A."""
        return self.a.kind

    @property
    def rate_name(self) -> str:
        return "fp8" if self.a.quantized else super().rate_name

    @property
    def stats(self) -> BlockStats:
        """The stored blocks of A, as oriented in the product."""
        assert self.a.blocks is not None, "all of A is stored"
        return self.a.blocks

    @property
    def block(self) -> tuple[int, int]:
        """(bm, bk): the sides of A's blocks along m and along k."""
        return self.stats.block

    @property
    def nnzb(self) -> int:
        return self.stats.nnzb

    @property
    def row_max(self) -> int:
        """The largest number of stored blocks in a block row; 0 without blocks."""
        return 0 if self.a.blocks is None else self.a.blocks.row_max

    @property
    def row_long(self) -> int:
        """`row_max` for predictions; 0, less than the mean, for rows that count as even, as nobody has read them."""
        return 0 if self.a.blocks is None or self.a.blocks.unread else self.row_max

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of A."""
        return -(-self.m // self.block[0]), -(-self.k // self.block[1])

    @property
    def c_row(self) -> int:
        """Numbers that are adjacent in C."""
        return self.m if self.c.layout == "col" else self.n

    @property
    def stored(self) -> int:
        """Number of stored values of A."""
        whole = self.m * self.k if self.a.blocks is None else self.nnzb * self.block[0] * self.block[1]
        return whole // 2 if self.a.two_four else whole

    @property
    def useful_flops(self) -> float:
        """2 FLOP per stored value and column of B."""
        return 2.0 * self.stored * self.n * self.batch

    @property
    def dense_bytes(self) -> float:
        """B before rounding, as far as blocks can need it, and the epilogue's matrices read once, C and slopes written
        once; float32 row and column scales.
        """
        of_c = (self.batch * self.n * (1 + bool(self.combine) + self.slope) + self.bias) * self.m
        rows = self.k if self.a.blocks is None else min(self.k, self.nnzb * self.block[1])
        of_b = self.batch * self.n * rows * dtypes.itemsize(self.b.rounds or self.b.dtype)
        scales = 0
        if self.a.quantized:
            scales = self.batch * self.n if self.b.scale == "column" else 1
            scales += self.m if self.a.scale == "row" else 1
        return float(of_b + of_c * dtypes.itemsize(self.c.dtype) + 4 * scales)

    @property
    def compulsory_bytes(self) -> float:
        """Stored values, metadata and indices read once, and `dense_bytes`."""
        index = self.stored // 4 if self.a.two_four else 0
        if self.a.blocks is not None:
            index += 4 * (self.nnzb + self.grid[0] + 1)
        return float(self.stored * dtypes.itemsize(self.dtype) + index + self.dense_bytes)

    def plain(self, dtype: str) -> SpmmProblem:
        """The same product in another dtype, without scales."""
        a = replace(self.a, dtype=dtype, scale="", fast_accum=False)
        b = replace(self.b, dtype=dtype, scale="", rounds="")
        return replace(self, a=a, b=b, c=replace(self.c, dtype=dtype))

    @property
    def unpacked(self) -> SpmmProblem:
        """The same product of the BSR that holds all the values of a BSR24's blocks."""
        return replace(self, a=replace(self.a, two_four=False))


@dataclass(frozen=True)
class SddmmProblem(ProductProblem):
    """S = X [m, k] @ Y [k, n] at the `nnzb` stored blocks of a pattern in blocks of (bm, bn).

    `row_max` is the largest number of stored blocks in a block row. `x_layout` and `y_layout` are "row" for
    row-major, "col" for the transpose view of a row-major matrix, "strided" for any other. `aligned`: pointers and
    leading strides of X and Y are multiples of 16 bytes.
    """

    op: ClassVar[str] = "sddmm"

    m: int
    k: int
    n: int
    block: tuple[int, int]
    nnzb: int
    dtype: str
    card: Card
    x_layout: str = "row"
    y_layout: str = "row"
    aligned: bool = True
    tf32: bool = False
    row_max: int = 0

    @property
    def useful_flops(self) -> float:
        """2 FLOP per stored element and column of X."""
        return 2.0 * self.nnzb * self.block[0] * self.block[1] * self.k

    @property
    def compulsory_bytes(self) -> float:
        """X and Y read once where stored blocks need them, the values written once, the indices read once."""
        size = dtypes.itemsize(self.dtype)
        rows = min(self.m, self.nnzb * self.block[0])
        columns = min(self.n, self.nnzb * self.block[1])
        values = self.nnzb * self.block[0] * self.block[1] * size
        return float((rows + columns) * self.k * size + values + 4 * (self.nnzb + self.grid[0] + 1))


@dataclass(frozen=True)
class SpgemmProblem(ProductProblem):
    """C [m, n] = A [m, k] @ B [k, n], both in BSR, with blocks (bm, bk) of A and (bk, bn) of B.

    `pairs`: the products of a block of A with a block of B. C is dense if `dense_out`, otherwise it has `nnzb_out`
    stored blocks of (bm, bn). For a dense C, `nnzb_out` counts blocks with at least one pair. `a_transposed` and
    `b_transposed`: the operand is a `.T` view. `aligned`: pointers and the leading stride of a dense C are multiples
    of 16 bytes. `pairs_max` is the largest number of pairs of a block of C.
    """

    op: ClassVar[str] = "spgemm"

    m: int
    k: int
    n: int
    a_block: tuple[int, int]
    b_block: tuple[int, int]
    nnzb_a: int
    nnzb_b: int
    nnzb_out: int
    pairs: int
    pairs_max: int
    dtype: str
    card: Card
    dense_out: bool = True
    a_transposed: bool = False
    b_transposed: bool = False
    aligned: bool = True
    tf32: bool = False

    @property
    def block(self) -> tuple[int, int]:
        """(bm, bn): the blocks of C."""
        return self.a_block[0], self.b_block[1]

    @property
    def nnzb(self) -> int:
        return self.nnzb_out

    @property
    def useful_flops(self) -> float:
        """2 FLOP per multiplication of two stored elements."""
        return 2.0 * self.pairs * self.block[0] * self.block[1] * self.a_block[1]

    @property
    def compulsory_bytes(self) -> float:
        """The values of A and B read once, C written once."""
        size = dtypes.itemsize(self.dtype)
        bm, bn = self.block
        read = self.nnzb_a * bm * self.a_block[1] + self.nnzb_b * self.b_block[0] * bn
        written = self.m * self.n if self.dense_out else self.nnzb_out * bm * bn
        return float((read + written) * size + 8 * self.pairs)
