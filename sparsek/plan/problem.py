"""Problems: calls without tensors, which can be planned on any machine and are compared by value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.matrix.storage import BlockStats, Storage
from sparsek.reference.epilogue import Combine, EpilogueActivation


class Problem(Protocol):
    """The fields that the planner reads of any operation's problem. Problems are frozen and hashable."""

    op: ClassVar[str]
    """The operation's name in the kernels' table."""

    @property
    def card(self) -> Card: ...

    @property
    def rate_name(self) -> str:
        """The card's name for the rate of this arithmetic."""
        ...

    @property
    def useful_flops(self) -> float:
        """FLOP of the stored elements."""
        ...

    @property
    def dense_flops(self) -> float:
        """FLOP if everything were stored."""
        ...

    @property
    def compulsory_bytes(self) -> float:
        """Bytes that any kernel has to read and write."""
        ...


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
    `gapless`: every item of the batch is contiguous, or the transpose view of a contiguous matrix. An FP8 matrix has
    a `scale` per "column" or for the whole "tensor". `rounds` is the dtype of an input that the call rounds to FP8.
    """

    dtype: str
    layout: str = "row"
    gapless: bool = True
    scale: str = ""
    rounds: str = ""


@dataclass(frozen=True)
class SpmmProblem(ProductProblem):
    """C [batch, m, n] = A [m, k] @ B [batch, k, n] with a sparse A, stored as `a` describes, and dense B and C.

    `aligned`: pointers and leading strides of A's values, B and C are multiples of 16 bytes. c.layout is "col" if C
    is the transpose view of a row-major [n, m], which is computed as B^T A^T. The epilogue
    (`reference.epilogue.Epilogue`): `has_alpha` (alpha is not 1), `bias`, `activation`, and `combine`: "add" or "mul"
    with another matrix, "" without one. `in_place`: the other matrix is C. `slope`: a second matrix gets the
    derivative of the activation.

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

    @property
    def dtype(self) -> str:
        """The dtype of A's values."""
        return self.a.dtype

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
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns of A."""
        return -(-self.m // self.block[0]), -(-self.k // self.block[1])

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
        """B before rounding and the epilogue's matrices read once, C and slopes written once; float32 row and column
        scales.
        """
        of_c = (self.batch * self.n * (1 + bool(self.combine) + self.slope) + self.bias) * self.m
        of_b = self.batch * self.n * self.k * dtypes.itemsize(self.b.rounds or self.b.dtype)
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


@dataclass(frozen=True)
class AttentionProblem:
    """out [batch, q_heads, q_len, v_dim] of q [batch, q_heads, q_len, dim] over kv_heads heads of kv_len keys.

    `block` is (bq, bk) of the mask. `mask_batch` is 1 or batch; `mask_heads` is 1, kv_heads or q_heads. `stored` and
    `partial` count blocks over all rows of the mask, `longest` those of its longest row: upper bounds unless `exact`.
    `by_interval` and `by_bits`: the rules that its partial blocks may have. `unit_stride`: the last dims of q, k and
    v are contiguous. `aligned`: moreover their pointers and all other strides are multiples of 16 bytes. `lse`: the
    logarithms of the rows' sums are returned. `softcap`, `alibi`: scores are capped, or biased by ALiBi slopes.
    `sink_logits`: the dtype of the learned sinks, "" without.
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
    softcap: bool = False
    alibi: bool = False
    sink_logits: str = ""

    @property
    def on_cpu(self) -> bool:
        return self.card.is_cpu

    @property
    def rate_name(self) -> str:
        return self.dtype

    @property
    def group(self) -> int:
        """Query heads per head of keys."""
        return self.q_heads // self.kv_heads

    @property
    def changes(self) -> list[str]:
        """What changes the scores, in words."""
        sinks = [f"{self.sink_logits} sinks"] if self.sink_logits else []
        named = [name for name, there in (("softcap", self.softcap), ("ALiBi", self.alibi)) if there]
        return named + sinks

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def cells(self) -> int:
        """Number of blocks of the mask, stored or not."""
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
        """2 FLOP per pair in a visited block and column of K and V; blocks count with their mean size."""
        return self.density * self.dense_flops

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.batch * self.q_heads * self.q_len * self.kv_len * (self.dim + self.v_dim)

    @property
    def compulsory_bytes(self) -> float:
        """q and the visited keys and values read once, out (and lse) written once, an index for each stored block.

        Of a head of keys, no more counts than its visited blocks could reach.
        """
        queries = self.batch * self.q_heads * self.q_len
        heads = self.batch * self.kv_heads
        keys = min(heads * self.kv_len, self.visited * self.block[1])
        size = dtypes.itemsize(self.dtype)
        tensors = (queries + keys) * (self.dim + self.v_dim) * size
        return float(tensors + 4 * self.stored + (4 * queries if self.lse else 0))


@dataclass(frozen=True)
class AttentionGradProblem(AttentionProblem):
    """dq, dk and dv of attention from q, k, v, out, lse and grad, the gradient of out.

    Sizes and lists are those of the forward pass; `longest` is a row of query tiles, because only the mask's
    transposed lists have the lengths of key blocks. `unit_stride` and `aligned` include grad. `lse` is always true
    here, and `sink_logits` "", because lse has the sinks. `deterministic`: the same inputs must give the same bits, so
    sums have a fixed order.
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

        Two indices per stored block: its own and that in the transposed lists.
        """
        queries = self.batch * self.q_heads * self.q_len
        keys = self.batch * self.kv_heads * self.kv_len
        visited = min(keys, self.visited * self.block[1])
        size = dtypes.itemsize(self.dtype)
        tensors = (2 * queries + keys + visited) * (self.dim + self.v_dim) * size
        return float(tensors + 8 * self.stored + 4 * queries)


TYPICAL = 16


@dataclass(frozen=True)
class PagedProblem:
    """out [tokens, q_heads, v_dim] of a ragged batch of `requests`, whose keys and values lie in pages of `page` rows.

    A request has at most `max_q` queries and `max_k` keys. `kv_dtype` is that of the pages: `dtype`, or "e4m3", with
    scales per "tensor" or "head" (`scale_per`), or without ("").
    Visibility: `causal`, with the last query at the last key; the last `window` keys (0: all) and the first `sinks`
    ones; or lists of key blocks for `list_heads` heads (0: no lists) in blocks `list_block`: (queries, keys).
    `softcap`: scores are capped. `sink_logits`: every head has a learned sink. `unit_stride`: the last dims of q and
    of the pages are contiguous. `aligned`: moreover their pointers and all other strides are multiples of 16 bytes.
    `lse`: the logarithms of the rows' sums are returned.
    """

    op: ClassVar[str] = "attention_paged"

    tokens: int
    requests: int
    q_heads: int
    kv_heads: int
    dim: int
    v_dim: int
    page: int
    max_q: int
    max_k: int
    dtype: str
    kv_dtype: str
    card: Card
    causal: bool = True
    window: int = 0
    sinks: int = 0
    softcap: bool = False
    sink_logits: bool = False
    scale_per: str = ""
    list_heads: int = 0
    list_block: tuple[int, int] = (0, 0)
    listed: int = 0
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
        """Query heads per head of keys."""
        return self.q_heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Query rows of a request that share a head of keys: at most `max_q` positions of `group` heads."""
        return self.max_q * self.group

    @property
    def typical(self) -> PagedProblem:
        """The same with TYPICAL requests of `max_q` queries each, for choices that do not depend on the batch."""
        return replace(self, requests=TYPICAL, tokens=TYPICAL * self.max_q)

    @property
    def seen(self) -> int:
        """Keys that one query sees, at most."""
        if self.list_heads:
            return min(self.max_k, self.listed * self.list_block[1])
        return min(self.max_k, self.window + self.sinks) if self.window else self.max_k

    @property
    def useful_flops(self) -> float:
        """2 FLOP per pair of query and seen key and column of K and V, by the bounds of lengths."""
        return 2.0 * self.tokens * self.q_heads * self.seen * (self.dim + self.v_dim)

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.tokens * self.q_heads * self.max_k * (self.dim + self.v_dim)

    @property
    def compulsory_bytes(self) -> float:
        """q and the seen keys and values read once, out (and lse) written once, by the bounds of lengths."""
        width = self.dim + self.v_dim
        more = self.seen + self.max_q
        if (
            self.list_heads
        ):  # each tile of queries, and each list of one head of keys, may have blocks of its own
            more = self.seen * -(-self.max_q // self.list_block[0]) * max(1, self.list_heads // self.kv_heads)
        seen = min(self.max_k, more)
        keys = self.requests * self.kv_heads * seen * width * dtypes.itemsize(self.kv_dtype)
        queries = self.tokens * self.q_heads * (width * dtypes.itemsize(self.dtype) + (4 if self.lse else 0))
        return float(keys + queries)
