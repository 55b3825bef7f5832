"""Packing a dense matrix into Semi24 or BSR as a benchmark: its cases, their operands, its peer, its suites.

What is timed is the call as users write it: `Semi24.from_dense(w)`, and `BSR.from_dense(w, block, keep=...)` with the
choice of its blocks and its synchronization. Nothing is multiplied: rates are bytes a second, of w read once and of
what is stored written once, and a record has no TFLOPS.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.operations import by_kernel
from sparsek.products.formats import convert, two_four
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.semi24 import Semi24
from sparsek.testing.budget import Gate
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Table
from sparsek_bench.engine.case import Bar, Case, OperandSet, block_name, rows
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.pack_budget import check_bsr, check_semi24
from sparsek_bench.engine.peer import Function
from sparsek_bench.engine.tables import CASE, GBPS, MS, ROOF, target
from sparsek_bench.engine.timed_call import Timed

SEMI24, TO_BSR = TARGETS = ("semi24", "bsr")


@dataclass(frozen=True)
class PackCase(Case):
    """A dense [m, k] to a Semi24, or to a BSR of `block` that keeps the share `keep` of its blocks, by norm."""

    op: ClassVar[str] = "pack"
    rated: ClassVar[bool] = False
    sources: ClassVar[tuple[str, ...]] = ("lang.launch",)
    dense_flops: ClassVar[float] = 0.0  # nothing is multiplied

    m: int = options.size("Rows of the dense matrix")
    k: int = options.size("Its columns")
    to: str = options.choice("Formats", TARGETS, ",".join(TARGETS))
    block: tuple[int, int] | None = options.block(usual=None)
    keep: float = options.share("Fraction of blocks that a BSR keeps.", usual=1.0)
    dtype: str = options.dtype()

    def check(self) -> None:
        if (self.block is None) != (self.to == SEMI24):
            raise InvalidInput("a BSR is packed in blocks, a Semi24 is not")
        steps = self.block or (1, two_four.STEP)
        if self.m % steps[0] or self.k % steps[1]:
            raise InvalidInput(f"{self.m} x {self.k} is not a multiple of {block_name(steps)}")

    @classmethod
    def of(cls, **fields: Any) -> "PackCase":
        """A case; blocks and shares are a BSR's alone."""
        return cls(**fields | ({"block": None, "keep": 1.0} if fields["to"] == SEMI24 else {}))

    @property
    def name(self) -> str:
        """One short line: "8192² bf16 to 2:4", "8192² bf16 to BSR, block 128, 12.5 % kept"."""
        size = f"{self.m}²" if self.m == self.k else f"{self.m}×{self.k}"
        if self.block is None:
            return f"{size} {self.dtype} to 2:4"
        return f"{size} {self.dtype} to BSR, block {block_name(self.block)}, {self.keep * 100:.4g} % kept"

    @property
    def dense_bytes(self) -> float:
        """Bytes of w."""
        return float(self.m * self.k * dtypes.itemsize(self.dtype))

    @property
    def blocks(self) -> int:
        """How many blocks a BSR keeps."""
        return max(1, round(self.keep * self.m * self.k / math.prod(self.block or (1, 1))))

    @property
    def moved(self) -> float:
        """Bytes of w and of what is stored: values, and metadata or indices."""
        if self.block is None:
            return 1.5 * self.dense_bytes + self.m * self.k / 8
        values = self.blocks * self.block[0] * self.block[1] * dtypes.itemsize(self.dtype)
        return self.dense_bytes + values + 4 * (self.blocks + self.m // self.block[0] + 1)

    def packed(self, w: Tensor) -> Any:
        """What is timed."""
        if self.block is None:
            return Semi24.from_dense(w)
        return BSR.from_dense(w, self.block, keep=self.keep, scope="global")

    def packer(self, w: Tensor) -> str:
        """The module that packs w: a kernel, or torch's calls where it takes no such w."""
        if self.block is None:
            made = by_kernel("pack24", w, None) if w.is_cuda else None
            return "matrix.two_four" if made is None else "pack.to_24"
        rule = convert.Rule(None, None, self.keep, "global")
        made = by_kernel("pack_bsr", w, self.block, rule) if w.is_cuda else None
        return "matrix.convert" if made is None else "pack.to_bsr"

    def plan(self, w: Tensor, kernel: str | None = None) -> Timed:
        name = self.packer(w)
        if kernel not in (None, name):
            raise Unsupported(self.name, {kernel: [f"{name} packs here; there is nothing to choose"]})
        bound = self.moved / card_of(w.device).bandwidth
        return Timed(name, partial(self.packed, w), self.moved, bound)

    def judge(self, w: Tensor, out: Any) -> Gate:
        """Whether `out` holds the values of w that it should, and nothing else."""
        return check_semi24(w, out) if self.block is None else check_bsr(w, out, self.blocks)

    def sets(self, draw: Draw) -> Callable[[Draw], OperandSet]:
        """Bytes stand in the place of FLOPs: see the module."""

        def one(draw: Draw) -> OperandSet:
            w = draw.normal(self.m, self.k)
            return OperandSet((w,), self.plan, partial(self.judge, w), self.moved)

        return one


def _copy(case: PackCase, one: OperandSet, index: int) -> Callable[[], Tensor]:
    """torch's copy of w into another tensor: read once and written once."""
    (w,) = one.given
    return partial(torch.empty_like(w).copy_, w)


CASES = (PackCase(8192, 8192, SEMI24), PackCase(8192, 8192, TO_BSR, (128, 128), 0.125))
BARS: Mapping[Case, tuple[Bar, ...]] = dict.fromkeys(CASES, (Bar("copy", 0.5, 0.8),))
BENCH = Bench(
    "pack",
    suites={"published": rows("auto", *CASES)},
    kinds=(PackCase,),
    peers=(Function("copy", "a copy", call=_copy, flops=lambda case: 2 * case.dense_bytes),),
    tables=(
        Table(
            op="pack",
            title="packing",
            dense=("copy",),
            columns=(CASE, MS, GBPS, ROOF, target(BARS, "")),
            note=(
                "Semi24.from_dense(w), and BSR.from_dense(w, block, keep=...) with the choice of blocks and its "
                "synchronization. GB/s count the dense matrix, read once, and what is stored, written once: values "
                "with metadata or indices. A target is this rate over that of torch's copy of the same matrix."
            ),
        ),
    ),
    small="",
    kernels="",
)
