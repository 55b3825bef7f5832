"""Attention in FP8 as a benchmark, over this library's in bf16: its cases, their operands, its suite.

q, k and v are quantized before any time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from sparsek.attn.mask.quantized_heads import SCALES, AttentionHeads, HeadScale, quantize_heads
from sparsek.testing.attention_fp8_budget import check_attention_fp8
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench
from sparsek_bench.engine.case import Bar, Case, SuiteRow, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import Own
from sparsek_bench.engine.tables import CASE, MS, RATE, SPEEDUP, target
from sparsek_bench.peers.attention_fp8 import FP8_PEERS
from sparsek_bench.suites.attention import EIGHTH, PEERS, SMALL, TABLE, AttentionCase, AttentionOperands


@dataclass(frozen=True)
class AttentionFp8Operands(AttentionOperands):
    """A set whose q, k and v are quantized: `heads`."""

    heads: AttentionHeads

    @property
    def given(self) -> tuple[Any, ...]:
        return *self.heads, self.mask

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the attention of this set, by all queries or by a sample of the query tiles."""
        return check_attention_fp8(*self.heads, self.mask, out, rows=self.sample())

    @cached_property
    def wider(self) -> AttentionOperands:
        """The same in the dtype that was quantized."""
        return AttentionOperands(
            **{each.name: getattr(self, each.name) for each in fields(AttentionOperands)}
        )


@dataclass(frozen=True)
class AttentionFp8Case(AttentionCase):
    """Attention of q, k and v in e4m3, with a result in `dtype`. `scale`: what shares a scale."""

    op: ClassVar[str] = "attention_fp8"

    scale: HeadScale = options.choice("What shares a scale", SCALES, usual="head")

    @property
    def name(self) -> str:
        """As in bf16, with what shares a scale."""
        return super().name + ("" if self.scale == "head" else f", scale per {self.scale}")

    def one_set(self, draw: Draw, *parts: Any) -> AttentionFp8Operands:
        """With q, k and v in FP8."""
        return AttentionFp8Operands(
            *parts, heads=quantize_heads(parts[0], parts[1], parts[2], self.scale, check=False)
        )


def _wider(case: AttentionFp8Case, one: AttentionFp8Operands, index: int) -> AttentionOperands:
    """This library's attention of the tensors that were quantized."""
    return one.wider


_case = AttentionFp8Case.square
HOPPER = ("hopper.attention_fp8",)
DENSE, SPARSE = _case("full", 32, scale="head"), _case(EIGHTH, 32, scale="head")
PUBLISHED: tuple[SuiteRow, ...] = (
    *rows(HOPPER, DENSE, SPARSE),
    *rows(HOPPER, *(replace(each, scale="block") for each in (DENSE, SPARSE))),
    *rows(HOPPER, _case("causal", 32, scale="head"), _case("window:2048", 32, scale="head")),
    *rows(HOPPER, _case(EIGHTH, 8, scale="head"), _case(EIGHTH, 32, dim=64, scale="head")),
)
BARS: dict[Case, tuple[Bar, ...]] = dict.fromkeys((DENSE, SPARSE), (Bar("bf16", 1.3, 1.45),))
FP8_TABLE = replace(
    TABLE,
    op="attention_fp8",
    title="attention in FP8",
    columns=(CASE, MS, SPEEDUP, RATE, target(BARS)),
    note=(
        "q, k and v are quantized to E4M3 before they are timed, with a float32 scale for each head, or for each block "
        "of 128 rows; out is bf16. Useful TFLOPS count the pairs that the mask admits, the roofline whole blocks. "
        "Dense is cuDNN in bf16: causal where the mask is causal, else with every pair. A target is over SparseK in "
        "bf16. v is transposed before, as quantize_heads does; FlashAttention-3, in the records, does it in its kernel."
    ),
    beside=("bf16",),
    kernels=HOPPER,
)
BENCH = Bench(
    "attention-fp8",
    suites={"published": PUBLISHED},
    kinds=(AttentionFp8Case,),
    peers=(
        Own("bf16", "this library in bf16", other=_wider),
        *(each for each in PEERS if each.name in ("cudnn", "sdpa")),
        *FP8_PEERS,
    ),
    tables=(FP8_TABLE,),
    small=SMALL,
    slowest=60.0,
)
