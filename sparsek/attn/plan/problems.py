"""Problems of attention: forward, backward and over pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from sparsek.core import dtypes
from sparsek.core.device import Card

if TYPE_CHECKING:
    from typing_extensions import Self

TILE_ROWS = 128  # of a tile of tokens times heads
MOST_HEADS = 64  # of a token, in a tile: kernels take as many rows a step


class Heads:
    """What problems of attention have in common."""

    card: Card
    dtype: str
    q_heads: int
    kv_heads: int

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


@dataclass(frozen=True)
class AttentionProblem(Heads):
    """out [batch, q_heads, q_len, v_dim] of q [batch, q_heads, q_len, dim] over kv_heads heads of kv_len keys.

    `block` is (bq, bk) of the mask. `mask_batch` is 1 or batch; `mask_heads` is 1, kv_heads or q_heads. `stored` and
    `partial` count blocks over all rows of the mask, `longest` those of its longest row: upper bounds unless `exact`.
    `by_interval` and `by_bits`: the rules that its partial blocks may have. `members`: the rows of a token, 0 unless
    partial blocks are by members; `member_ends`: queries see keys at the ends of their intervals without a bit;
    `paired`: the two halves of a block have bits of their own.
    `unit_stride`: the last dims of q, k and v are contiguous. `aligned`: moreover their pointers and all other strides
    are multiples of 16 bytes. `lse`: the logarithms of the rows' sums are returned. `softcap`, `alibi`: scores are
    capped, or biased by ALiBi slopes.
    `sink_logits`: the dtype of the learned sinks, "" without. `whole`: of a call with a part of a mask, the problem of
    one process.
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
    members: int = 0
    member_ends: bool = False
    paired: bool = False
    aligned: bool = True
    unit_stride: bool = True
    lse: bool = False
    softcap: bool = False
    alibi: bool = False
    sink_logits: str = ""
    whole: Self | None = None

    @property
    def leading(self) -> Self:
        """The problem that kernel, config and the parts of tiles are chosen for."""
        return self.whole or self

    @property
    def changes(self) -> list[str]:
        """What changes the scores, in words."""
        sinks = [f"{self.sink_logits} sinks"] if self.sink_logits else []
        named = [name for name, there in (("softcap", self.softcap), ("ALiBi", self.alibi)) if there]
        return named + sinks

    @property
    def change_price(self) -> float:
        """The time of a step whose scores change over that of another: guessed by their instructions."""
        return (2.0 if self.softcap else 1.0) * (1.5 if self.alibi else 1.0)

    @property
    def pack(self) -> int:
        """The heads of a token that may be rows of one tile: of a mask by members, as far as they share lists."""
        if self.members != 1:
            return 1
        rows = min(MOST_HEADS, TILE_ROWS // self.block[0])
        return gcd(rows, self.group if self.mask_heads in (1, self.kv_heads) else 1)

    @property
    def packed(self) -> Self:
        """This problem with `pack` heads of each token as rows."""
        pack, (bq, bk) = self.pack, self.block
        if pack == 1:
            return self
        heads = {"q_heads": self.q_heads // pack, "q_len": self.q_len * pack}
        whole = self.whole and self.whole.packed
        return replace(self, **heads, block=(bq * pack, bk), members=pack, whole=whole)

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
    sums have a fixed order. `wide`: dk and dv are wanted in float32, which kernels with `widens` give.
    """

    op: ClassVar[str] = "attention_backward"

    lse: bool = True
    deterministic: bool = True
    wide: bool = False

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
class PagedProblem(Heads):
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
    listed: int = 0  # prose: allow
    aligned: bool = True
    unit_stride: bool = True
    lse: bool = False

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
