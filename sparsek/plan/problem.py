"""One call, described without tensors, so that it can be planned anywhere and compared by value."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

from sparsek.core import dtypes
from sparsek.core.device import Card


class Problem(Protocol):
    """What the planner reads of any operation's problem. Problems are frozen and hashable."""

    op: ClassVar[str]
    """The operation's name in the kernels' table."""

    @property
    def card(self) -> Card: ...

    @property
    def rate_name(self) -> str:
        """Under which name the card lists the rate of this arithmetic."""
        ...

    @property
    def useful_flops(self) -> float:
        """FLOP of what is stored."""
        ...

    @property
    def dense_flops(self) -> float:
        """FLOP if everything were stored."""
        ...

    @property
    def compulsory_bytes(self) -> float:
        """What any kernel has to read and write."""
        ...


class ProductProblem:
    """What problems of matrix products have in common."""

    card: Card
    dtype: str
    tf32: bool

    @property
    def on_cpu(self) -> bool:
        return self.card.is_cpu

    @property
    def rate_name(self) -> str:
        return "tf32" if self.dtype == "fp32" and self.tf32 else self.dtype


class OfBlocks(ABC):
    """What problems with a pattern of blocks have in common."""

    nnzb: int

    @property
    @abstractmethod
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns."""

    @property
    def density(self) -> float:
        """Stored blocks over all blocks."""
        cells = self.grid[0] * self.grid[1]
        return self.nnzb / cells if cells else 0.0


class WithDense(ProductProblem):
    """What products with a dense matrix have in common: C [batch, m, n] = A [m, k] @ B [batch, k, n], an epilogue."""

    m: int
    k: int
    n: int
    batch: int
    bias: bool
    combine: str

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n * self.batch

    @property
    def dense_bytes(self) -> float:
        """B and the epilogue's matrices read once, C written once."""
        of_c = self.m * (2 if self.combine else 1)
        elements = self.batch * self.n * (self.k + of_c) + (self.m if self.bias else 0)
        return float(elements * dtypes.itemsize(self.dtype))


@dataclass(frozen=True)
class SpmmProblem(WithDense, OfBlocks):
    """C [batch, m, n] = A [m, k] @ B [batch, k, n] with A in BSR.

    `block` is (bm, bk) of A, `nnzb` its stored blocks. `row_max` is the largest number of stored blocks in a block row.
    `b_layout` is "row" for row-major B, "col" for the transpose view of a row-major [n, k], "strided" for any other.
    `aligned` says that pointers and leading strides of A's values, B and C are multiples of 16 bytes.
    `transposed` says that A is a `.T` view. `touches_all_columns` says that every block column of A has a block.
    `merged` holds (R, steps) for factors R > 1: what is left to do when R block rows share a tile is the distinct
    block columns of each R rows, summed over groups of R block rows.
    `out_layout` is "row", or "col" where C is the transpose view of a row-major [n, m]: B^T A^T is computed so.
    What `reference.epilogue.Epilogue` does to the product: `scaled` (alpha is not 1), `bias`, `activation`, and
    `combine`: "add" or "mul" with another matrix, "" without one. `in_place` says that the other matrix is C.
    """

    op: ClassVar[str] = "spmm"

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
    out_layout: str = "row"
    scaled: bool = False
    bias: bool = False
    activation: str = ""
    combine: str = ""
    in_place: bool = False

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of A."""
        return -(-self.m // self.block[0]), -(-self.k // self.block[1])

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every stored element and column of B."""
        return 2.0 * self.nnzb * self.block[0] * self.block[1] * self.n * self.batch

    @property
    def compulsory_bytes(self) -> float:
        """Stored values and indices read once, B and the epilogue's matrices read once, C written once."""
        size = dtypes.itemsize(self.dtype)
        values = self.nnzb * self.block[0] * self.block[1] * size
        return float(values + self.dense_bytes + 4 * (self.nnzb + self.grid[0] + 1))


@dataclass(frozen=True, kw_only=True)
class Problem24(WithDense, ABC):
    """C [batch, m, n] = A [m, k] @ B [batch, k, n] with an A of which every four neighbours in a row hold two values.

    `transposed`: A is the transpose of such a matrix, whose pairs then lie along m. `gapless` says that in every item
    of the batch B is contiguous, or the transpose view of a contiguous [n, k]. Other fields are as in SpmmProblem.
    """

    op: ClassVar[str]

    m: int
    k: int
    n: int
    dtype: str
    card: Card
    batch: int = 1
    b_layout: str = "row"
    aligned: bool = True
    gapless: bool = True
    transposed: bool = False
    tf32: bool = False
    out_layout: str = "row"
    scaled: bool = False
    bias: bool = False
    activation: str = ""
    combine: str = ""
    in_place: bool = False

    @property
    @abstractmethod
    def stored(self) -> int:
        """Stored values of A."""

    @property
    def index_bytes(self) -> int:
        """What says where the values stand: a nibble for two of them, and a pattern's indices."""
        return self.stored // 4

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every stored value and column of B."""
        return 2.0 * self.stored * self.n * self.batch

    @property
    def compulsory_bytes(self) -> float:
        """Values, metadata and indices read once, B and the epilogue's matrices read once, C written once."""
        return float(self.stored * dtypes.itemsize(self.dtype) + self.index_bytes + self.dense_bytes)


@dataclass(frozen=True, kw_only=True)
class Semi24Problem(Problem24):
    """A is a Semi24: all of it is stored."""

    op: ClassVar[str] = "semi24"

    @property
    def stored(self) -> int:
        return self.m * self.k // 2


@dataclass(frozen=True, kw_only=True)
class BSR24Problem(Problem24, OfBlocks):
    """A is a BSR24 of `nnzb` stored blocks of `block`, sides as they stand in the product: (along m, along k).

    `row_max` is the largest number of stored blocks along m's block rows.
    """

    op: ClassVar[str] = "bsr24"

    block: tuple[int, int]
    nnzb: int
    row_max: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of A."""
        return -(-self.m // self.block[0]), -(-self.k // self.block[1])

    @property
    def stored(self) -> int:
        return self.nnzb * self.block[0] * self.block[1] // 2

    @property
    def index_bytes(self) -> int:
        return self.stored // 4 + 4 * (self.nnzb + self.grid[0] + 1)

    @property
    def unpacked(self) -> SpmmProblem:
        """The same product of the BSR that holds all the values of these blocks."""
        shared = {each.name: getattr(self, each.name) for each in fields(Problem24) if each.name != "gapless"}
        return SpmmProblem(block=self.block, nnzb=self.nnzb, row_max=self.row_max, **shared)


@dataclass(frozen=True, kw_only=True)
class ScaledProblem(WithDense):
    """An FP8 product: C = act(alpha * scale_A[m] * scale_B[n] * sum over k of A8[m, k] B8[k, n] + bias), and so on.

    `dtype` is that of A's values and `b_dtype` that of B's: "e4m3" or "e5m2". C, the bias and the other matrix are in
    `out_dtype`: "bf16", "fp16" or "fp32". `a_scale` says what of A shares a scale: "tensor", "row" or "block", the last
    one inside the sum. `b_scale`: "tensor", or "column" of B, which is a row of x in `linear`. `rounds` is the dtype
    of a B that the call rounds to FP8 before the product, "" for one that came in FP8. `fast_accum`: sums may stay in
    the tensor cores, in fewer bits than float32 has.

    `b_layout` is "col": B is the transpose view of contiguous values [n, k]. `aligned` speaks of these too, so k is
    then a multiple of 16.
    """

    op: ClassVar[str]
    kind: ClassVar[type]
    """The class of the same product without scales."""

    b_layout: str = "col"
    out_dtype: str = "bf16"
    b_dtype: str = "e4m3"
    a_scale: str = "row"
    b_scale: str = "column"
    rounds: str = ""
    fast_accum: bool = False

    @property
    def rate_name(self) -> str:
        return "fp8"

    @property
    def dense_bytes(self) -> float:
        """B as it came read once, the epilogue's matrices and C once in C's dtype, float32 scales."""
        of_c = (self.batch * self.n * (2 if self.combine else 1) + bool(self.bias)) * self.m
        of_b = self.batch * self.n * self.k * dtypes.itemsize(self.rounds or self.b_dtype)
        scales = (self.batch * self.n if self.b_scale == "column" else 1) + (
            self.m if self.a_scale == "row" else 1
        )
        return float(of_b + of_c * dtypes.itemsize(self.out_dtype) + 4 * scales)

    def unscaled(self, dtype: str) -> "SpmmProblem | Semi24Problem | BSR24Problem":
        """The same product in another dtype, without scales."""
        return self.kind(
            **{each.name: getattr(self, each.name) for each in fields(self.kind)} | {"dtype": dtype}
        )


@dataclass(frozen=True, kw_only=True)
class ScaledSpmmProblem(ScaledProblem, SpmmProblem):
    """A is a Scaled BSR, or the transposed view of one."""

    op: ClassVar[str] = "spmm_fp8"
    kind: ClassVar[type] = SpmmProblem


@dataclass(frozen=True, kw_only=True)
class ScaledSemi24Problem(ScaledProblem, Semi24Problem):
    """A is a Scaled Semi24."""

    op: ClassVar[str] = "semi24_fp8"
    kind: ClassVar[type] = Semi24Problem


@dataclass(frozen=True, kw_only=True)
class ScaledBsr24Problem(ScaledProblem, BSR24Problem):
    """A is a Scaled BSR24."""

    op: ClassVar[str] = "bsr24_fp8"
    kind: ClassVar[type] = BSR24Problem


@dataclass(frozen=True)
class SddmmProblem(ProductProblem, OfBlocks):
    """S = X [m, k] @ Y [k, n] at the `nnzb` stored blocks of a pattern in blocks of (bm, bn).

    `row_max` is the largest number of stored blocks in a block row. `x_layout` and `y_layout` are "row" for a row-major
    matrix, "col" for the transpose view of one, "strided" for any other. `aligned` says that pointers and leading
    strides of X and Y are multiples of 16 bytes.
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
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of S."""
        return -(-self.m // self.block[0]), -(-self.n // self.block[1])

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every stored element and every column of X."""
        return 2.0 * self.nnzb * self.block[0] * self.block[1] * self.k

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    @property
    def compulsory_bytes(self) -> float:
        """X and Y read once, as far as stored blocks can reach, the values written once, the indices read once."""
        size = dtypes.itemsize(self.dtype)
        rows = min(self.m, self.nnzb * self.block[0])
        columns = min(self.n, self.nnzb * self.block[1])
        values = self.nnzb * self.block[0] * self.block[1] * size
        return float((rows + columns) * self.k * size + values + 4 * (self.nnzb + self.grid[0] + 1))


@dataclass(frozen=True)
class SpgemmProblem(ProductProblem):
    """C [m, n] = A [m, k] @ B [k, n], both in BSR, with blocks (bm, bk) of A and (bk, bn) of B.

    `pairs` counts the products of a block of A with a block of B. C is dense if `dense_out`, otherwise it has
    `nnzb_out` stored blocks of (bm, bn). `nnzb_out` counts blocks with at least one pair in the dense case.
    `a_transposed` and `b_transposed` say that the operand is a `.T` view. `aligned` says that pointers and the
    leading stride of a dense C are multiples of 16 bytes. `pairs_max` is the largest number of pairs of a block of C.
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
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of C."""
        return -(-self.m // self.block[0]), -(-self.n // self.block[1])

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every multiplication of two stored elements."""
        return 2.0 * self.pairs * self.block[0] * self.block[1] * self.a_block[1]

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    @property
    def compulsory_bytes(self) -> float:
        """The values of A and B read once, C written once."""
        size = dtypes.itemsize(self.dtype)
        bm, bn = self.block
        read = self.nnzb_a * bm * self.a_block[1] + self.nnzb_b * self.b_block[0] * bn
        written = self.m * self.n if self.dense_out else self.nnzb_out * bm * bn
        return float((read + written) * size + 8 * self.pairs)


@dataclass(frozen=True)
class AttentionProblem:
    """out [batch, q_heads, q_len, v_dim] of q [batch, q_heads, q_len, dim] over kv_heads heads of kv_len keys.

    `block` is (bq, bk) of the mask. `mask_batch` is 1 or batch; `mask_heads` is 1, kv_heads or q_heads.
    `stored` and `partial` count blocks over all rows of the mask, `longest` those of its longest row: upper bounds
    unless `exact`. `by_interval` and `by_bits` say which rules its partial blocks may have.
    `unit_stride` says that the last dims of q, k and v are contiguous, `aligned` that further their pointers and all
    other strides are multiples of 16 bytes. `lse` says that the logarithms of the rows' sums are wanted.
    """

    op: ClassVar[str] = "attention"

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dim: int
    v_dim: int
    dtype: str
    card: Card
    block: tuple[int, int]
    mask_batch: int
    mask_heads: int
    stored: int
    partial: int
    longest: int
    exact: bool = True
    by_interval: bool = False
    by_bits: bool = False
    aligned: bool = True
    unit_stride: bool = True
    lse: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.card.is_cpu

    @property
    def rate_name(self) -> str:
        return self.dtype

    @property
    def group(self) -> int:
        """Query heads to a head of keys."""
        return self.q_heads // self.kv_heads

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def cells(self) -> int:
        """Blocks of the mask, stored or not."""
        return self.mask_batch * self.mask_heads * self.grid[0] * self.grid[1]

    @property
    def visited(self) -> int:
        """Stored blocks, counted for every batch item and query head."""
        return self.stored * (self.batch // self.mask_batch) * (self.q_heads // self.mask_heads)

    @property
    def density(self) -> float:
        return self.stored / self.cells if self.cells else 0.0

    @property
    def dense(self) -> bool:
        """Every block is stored, and none has a rule."""
        return self.exact and self.stored == self.cells and not self.partial

    @property
    def useful_flops(self) -> float:
        """2 FLOP for every pair in a visited block and every column of K and V; blocks count with their mean size."""
        return self.density * self.dense_flops

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.batch * self.q_heads * self.q_len * self.kv_len * (self.dim + self.v_dim)

    @property
    def compulsory_bytes(self) -> float:
        """q and the visited keys and values read once, out (and lse) written once, an index for each stored block.

        A head of keys is read no further than its visited blocks could reach.
        """
        queries = self.batch * self.q_heads * self.q_len
        heads = self.batch * self.kv_heads
        keys = min(heads * self.kv_len, self.visited * self.block[1])
        size = dtypes.itemsize(self.dtype)
        tensors = (queries + keys) * (self.dim + self.v_dim) * size
        return float(tensors + 4 * self.stored + (4 * queries if self.lse else 0))


@dataclass(frozen=True)
class AttentionGradProblem(AttentionProblem):
    """dq, dk and dv of an attention whose q, k, v, out and lse are there, from grad, the gradient of out.

    Sizes and lists are those of the forward pass; `longest` is a row of query tiles, of key blocks only the mask's
    transposed lists know. `unit_stride` and `aligned` speak of grad too. `lse` is always wanted here. `deterministic`:
    the same inputs must give the same bits, so sums have a fixed order.
    """

    op: ClassVar[str] = "attention_backward"

    lse: bool = True
    deterministic: bool = True

    @property
    def dense_flops(self) -> float:
        """Five products: q k^T, dS k and dS^T q of D columns, grad v^T and P^T grad of Dv."""
        return 2.0 * self.batch * self.q_heads * self.q_len * self.kv_len * (3 * self.dim + 2 * self.v_dim)

    @property
    def compulsory_bytes(self) -> float:
        """q, out, grad, lse and the visited keys and values read once, dq, dk and dv written once.

        Two indices for each stored block: its own and that in the transposed lists.
        """
        queries = self.batch * self.q_heads * self.q_len
        keys = self.batch * self.kv_heads * self.kv_len
        visited = min(keys, self.visited * self.block[1])
        size = dtypes.itemsize(self.dtype)
        tensors = (2 * queries + keys + visited) * (self.dim + self.v_dim) * size
        return float(tensors + 8 * self.stored + 4 * queries)
