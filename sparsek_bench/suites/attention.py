"""Attention as a benchmark: its cases, their operands, its suites. What a new mask costs is `fresh`'s."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sparsek.attn.mask.lists import BLOCK_SIZES
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention, plan_attention
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.memory import peak_bytes
from sparsek.core.parsing import is_count, parse_block
from sparsek.testing.attention_budget import ExpectedAttention, expected_attention
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import Case, Operands, SuiteRow, block_name, length_name, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.tables import CASE, MS, RATE, SPEEDUP
from sparsek_bench.peers.attention import PEERS
from sparsek_bench.suites.attention_masks import MASK_FORMS, MaskForm, parse_mask

if TYPE_CHECKING:
    from typing_extensions import Self

# Up to this many scores of one head a gate looks at every query, beyond at the first, the last and some random tiles.
GATED_WHOLE = 2**26
GATED_TILES = 16


@dataclass(frozen=True)
class AttentionOperands(Operands):
    """One of the rotating sets: its own q [B, Hq, S, D], k [B, Hkv, T, D] and v [B, Hkv, T, Dv], and the shared mask.

    `make` builds the mask anew. `flops_per_pair`: of one query and one key that it sees.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: BlockMask
    make: Callable[[], BlockMask]
    flops_per_pair: float

    @property
    def useful_flops(self) -> float:
        """FLOPs of the queries and keys that the mask lets meet, over all heads and batch items."""
        batch, heads = self.q.shape[:2]
        meet = self.mask.elements * (batch // self.mask.batch) * (heads // self.mask.heads)
        return self.flops_per_pair * meet

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def plan(self, kernel: str | None) -> AttentionPlan:
        return plan_attention(*self.given, kernel=kernel)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.q, self.k, self.v, self.mask

    def eager(self, plan: AttentionPlan) -> Callable[[], object]:
        return partial(attention, *self.given, kernel=plan.kernel)

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what a call gives."""
        return (self.out_shape,)

    def anew(self, kernel: str) -> Callable[[], object]:
        """A call that builds its mask, plans and runs."""
        q, k, v, *_ = self.given
        return lambda: attention(q, k, v, self.make(), kernel=kernel)

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the attention of this set, by all queries or by a sample of the query tiles."""
        return self.expected.judge(out)

    @cached_property
    def expected(self) -> ExpectedAttention:
        """The reference, computed once for the kernels and peers of a case."""
        q, k, v = (x.detach() for x in (self.q, self.k, self.v))
        return expected_attention(q, k, v, self.mask, rows=self.sample())

    def sample(self) -> list[int] | None:
        """The tiles of queries that a gate looks at; None for all of them."""
        mask = self.mask
        return None if mask.q_len * mask.kv_len <= GATED_WHOLE else sampled(mask.grid[0])

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        """What `peer_extra` finds of a call that builds its mask, plans and runs."""
        return self.peer_extra(self.anew(kernel))

    def peer_extra(self, call: Callable[[], object]) -> dict[str, Any]:
        """`memory`: the largest allocation of a call beyond its results, over the bytes of q, k, v and the output."""
        peak = peak_bytes(call, self.q.device)
        own = sum(map(math.prod, self.results)) * self.q.element_size()
        whole = math.prod(self.out_shape) * self.q.element_size()
        whole += sum(x.nbytes for x in (self.q, self.k, self.v))
        return {"memory": None if peak is None else round(max(0, peak - own) / whole, 6)}


def sampled(tiles: int) -> list[int] | None:
    """The first, the last and some random ones of so many tiles; None for all of a few."""
    if tiles <= GATED_TILES:
        return None
    draw = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randperm(tiles - 2, generator=draw, device="cpu")[: GATED_TILES - 2] + 1
    return sorted([0, tiles - 1, *drawn.tolist()])


def parse_lengths(text: str) -> tuple[int, int]:
    """Queries and keys: "32K" -> (32768, 32768); "1Kx4000" -> (1024, 4000)."""
    parts = re.fullmatch(r"\d+K?(X\d+K?)?", text.strip().upper())
    if parts is None:
        raise InvalidInput(
            f"a length is written as 8192, as 8K, or as 1Kx8K for queries and keys, got {text!r}"
        )
    lengths = [int(n) * (1024 if kilo else 1) for n, kilo in re.findall(r"(\d+)(K?)", parts[0])]
    return lengths[0], lengths[-1]


def parse_pair(text: str) -> tuple[int, int]:
    """ "32" -> (32, 32); "32:4" -> (32, 4): heads of queries and of keys, or head sizes of keys and of values."""
    parts = text.split(":")
    if len(parts) > 2 or not all(is_count(part.strip()) for part in parts):
        raise InvalidInput(f"heads and head sizes are written as 32 or as 32:4, got {text!r}")
    return int(parts[0]), int(parts[-1])


def lengths(help: str, default: str) -> Any:
    """The option --seq, of q_len and kv_len."""
    return options.size(help, default, parse_lengths, name="seq", fields=("q_len", "kv_len"))


def _mask_block(name: str, block: tuple[int, int]) -> None:
    if not set(block) <= set(BLOCK_SIZES):
        known = " or ".join(map(str, BLOCK_SIZES))
        raise InvalidInput(f"a mask's block sides are {known}, got {block_name(block)}")


@dataclass(frozen=True)
class AttentionCase(Case):
    """softmax(q k^T / sqrt(dim)) v over a mask: q [batch, heads, q_len, dim], k and v [batch, kv_heads, kv_len, ...].

    `mask` is a text of `attention_masks.MASK_FORMS`, over blocks (bq, bk). `passes`: what is measured.
    """

    op: ClassVar[str] = "attention"
    extra: ClassVar[tuple[str, ...]] = ("memory",)
    peer_extra: ClassVar[tuple[str, ...]] = ("memory",)
    passes: ClassVar[tuple[str, ...]] = ("forward",)
    # How many products have the sides of keys and of values.
    products: ClassVar[tuple[int, int]] = (1, 1)

    batch: int = options.size("Batch sizes.", "1")
    heads: int = options.size(
        "Heads of queries, or of queries and keys: 16,32:4.", "16", parse_pair, fields=("heads", "kv_heads")
    )
    kv_heads: int = options.checked(options.positive)
    q_len: int = lengths("Lengths, or queries and keys: 8K,32768,1Kx8K.", "8K")
    kv_len: int = options.checked(options.positive)
    dim: int = options.size(
        "Head sizes, or those of keys and values: 64,192:128.", "128", parse_pair, fields=("dim", "v_dim")
    )
    v_dim: int = options.checked(options.positive)
    mask: str = options.field(
        "blocks:0.125",
        f"Masks, with numbers for the letters: {', '.join(kind.form for kind in MASK_FORMS)}.",
        check=lambda name, mask: parse_mask(mask),
    )
    block: tuple[int, int] = options.field(
        "128",
        "Blocks of queries and keys: 128,64,64x128.",
        parse_block,
        _mask_block,
        usual=(128, 128),
    )
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.heads % self.kv_heads:
            raise InvalidInput(f"{self.heads} query heads do not divide among {self.kv_heads} heads of keys")

    @classmethod
    def square(
        cls,
        mask: str,
        kilo: int,
        block: int = 128,
        dim: int = 128,
        heads: tuple[int, int] = (16, 16),
        **more: Any,
    ) -> Self:
        """One of so many queries and keys, in 1024."""
        return cls(1, heads[0], heads[1], kilo * 1024, kilo * 1024, dim, dim, mask, (block, block), **more)

    @property
    def mask_text(self) -> MaskForm:
        return parse_mask(self.mask)

    @property
    def name(self) -> str:
        """One short line: "32K window 2048, block 128, 16 heads, D 128, bf16"."""
        q, kv = length_name(self.q_len), length_name(self.kv_len)
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}:{self.kv_heads}"
        dim = str(self.dim) if self.dim == self.v_dim else f"{self.dim}:{self.v_dim}"
        return (
            f"{q if q == kv else f'{q}x{kv}'} {self.mask_text.words}, block {block_name(self.block)}, "
            f"{f'batch {self.batch}, ' if self.batch > 1 else ''}{heads} heads, D {dim}, {self.dtype}"
        )

    @property
    def flops_per_pair(self) -> float:
        """FLOPs for one query and one key that it sees."""
        return 2.0 * (self.products[0] * self.dim + self.products[1] * self.v_dim)

    @property
    def dense_flops(self) -> float:
        return self.flops_per_pair * self.batch * self.heads * self.q_len * self.kv_len

    @property
    def causal_flops(self) -> float:
        """FLOPs of the pairs that a causal mask admits; queries and keys end together."""
        seen = min(self.q_len, self.kv_len)
        pairs = seen * (self.kv_len - seen) + seen * (seen + 1) // 2
        return self.flops_per_pair * self.batch * self.heads * pairs

    @property
    def operand_bytes(self) -> int:
        """Bytes of q, k, v and the output."""
        return sum(map(math.prod, (*self.shapes, self.out_shape))) * dtypes.itemsize(self.dtype)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of q, k and v."""
        keys = (self.batch, self.kv_heads, self.kv_len)
        return (self.batch, self.heads, self.q_len, self.dim), (*keys, self.dim), (*keys, self.v_dim)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.batch, self.heads, self.q_len, self.v_dim

    @property
    def grid(self) -> tuple[int, int]:
        """Query tiles and key blocks of one head."""
        return -(-self.q_len // self.block[0]), -(-self.kv_len // self.block[1])

    @property
    def frame(self) -> dict[str, Any]:
        """Lengths and block, as builders of masks take them."""
        return {"q_len": self.q_len, "kv_len": self.kv_len, "block": self.block}

    def mask_maker(self, device: torch.device, seed: int = 0) -> Callable[[], BlockMask]:
        """A call that builds the mask on `device`; its random numbers are drawn now."""
        return self.mask_text.prepare(self, Draw(device, self.drawn, seed), *self.mask_text.numbers)

    def sets(self, draw: Draw) -> Callable[[Draw], Any]:
        """Sets share one mask."""
        make = self.mask_maker(draw.device, draw.seed)
        mask = make()
        mask.verify(wait=True)  # plans then know its true sizes, as they do from the second call on
        more = mask, make, self.flops_per_pair
        return lambda draw: self.one_set(draw, *(draw.normal(*shape) for shape in self.shapes), *more)

    def one_set(self, draw: Draw, *parts: Any) -> AttentionOperands:
        """The operands of q, k, v, the mask, its maker and the FLOPs of a pair."""
        return AttentionOperands(*parts)


_case = AttentionCase.square
HOPPER = ("hopper.attention_fwd",)
BOTH = (*HOPPER, "portable.attention_fwd")
EIGHTH = "blocks:0.125"
LONG = "window:4096+sinks:128"
# 5 of 256 block rows and columns are global, 2 %; other rows keep 3 blocks of window and 3 random ones.
BIGBIRD = "256:640:3"
# Masks, lengths, blocks, head sizes and fp16.
PUBLISHED: tuple[SuiteRow, ...] = (
    *rows(BOTH, _case(EIGHTH, 8)),
    *rows(HOPPER, _case(EIGHTH, 32)),
    *rows(BOTH, _case("window:2048", 32)),
    *rows(HOPPER, _case("causal", 32), _case("documents:1000", 32), _case("full", 8), _case("full", 32)),
    *rows(BOTH, _case(EIGHTH, 8, 64)),
    *rows(HOPPER, _case(EIGHTH, 32, 64)),
    *rows(HOPPER, _case(EIGHTH, 8, dim=64), _case(EIGHTH, 32, dim=64)),
    *rows(HOPPER, _case(f"bigbird:{BIGBIRD}", 32), _case(f"uniform-like-bigbird:{BIGBIRD}", 32)),
    *rows(HOPPER, _case("window:2048", 32, heads=(32, 4)), _case("window:2048", 32, heads=(32, 32))),
    *rows(HOPPER, *(_case(LONG, kilo, heads=(8, 8)) for kilo in (128, 256, 512))),
    *rows(HOPPER, _case(EIGHTH, 8, dim=96), _case(EIGHTH, 8, dim=256)),
    *rows(HOPPER, _case(EIGHTH, 8, dtype="fp16"), _case("causal", 32, dtype="fp16")),
)
# Rates over the length, and memory beside them: of one window up to the lengths of PUBLISHED.
BY_LENGTH = rows(
    HOPPER,
    *(_case("causal", kilo) for kilo in (2, 8, 32, 128)),
    *(_case(EIGHTH, kilo) for kilo in (2, 8, 32, 128)),
    *(_case(LONG, kilo, heads=(8, 8)) for kilo in (8, 32)),
)
# Rates over the share of blocks that a mask keeps.
BY_DENSITY = rows(HOPPER, *(_case(f"blocks:{share:g}", 32) for share in (0.5, 0.25, 0.125, 0.0625)))
SMALL = "--seq 1K --heads 2 --dim 64 --dtype fp32"
TABLE = Table(
    op="attention",
    title="attention",
    dense=("cudnn", "sdpa"),
    columns=(CASE, MS, SPEEDUP, RATE),
    note=(
        "Useful TFLOPS count the pairs that the mask admits, the roofline whole blocks. Dense is cuDNN: causal where "
        "the mask is causal, else with every pair. Over a peer: 1.50 means 1.5 times as fast. FlashAttention-4 "
        "runs on its own layout; FlexAttention with its default options, for blocks of 64 with tiles of 64. "
        "Records have cuDNN's FlexAttention, FlashInfer and both builds of FlashAttention-3 too."
    ),
    beside=("fa4", "flex", "cudnn_bsa"),
    usual=("block 128", "16 heads", "D 128", "bf16"),
    kernels=HOPPER,
)
BENCH = Bench(
    "attention",
    suites={"published": PUBLISHED, "length": BY_LENGTH, "density": BY_DENSITY},
    kinds=(AttentionCase,),
    peers=PEERS,
    tables=(TABLE,),
    small=SMALL,
    slowest=90.0,
)
