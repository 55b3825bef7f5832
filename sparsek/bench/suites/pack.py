"""Packing a dense matrix into Semi24 or BSR as a benchmark: its cases, their operands, its peer, its suites.

What is timed is the call as users write it: `Semi24.from_dense(w)`, and `BSR.from_dense(w, block, keep=...)` with the
choice of its blocks and its synchronization. Nothing is multiplied: rates are bytes a second, of w read once and of
what is stored written once, and a record has no TFLOPS.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine import options
from sparsek.bench.engine.bench import Bench, Table
from sparsek.bench.engine.case import Bar, Case, Operands, Schema, block_name, rows
from sparsek.bench.engine.data import Draw
from sparsek.bench.engine.peer import Function
from sparsek.bench.engine.several import Moved, Named
from sparsek.bench.engine.tables import CASE, GBPS, MS, ROOF, target
from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.matrix import convert, two_four
from sparsek.matrix.bsr import BSR
from sparsek.matrix.semi24 import Semi24
from sparsek.testing.budget import Gate, error, judge

SEMI24, TO_BSR = TARGETS = ("semi24", "bsr")
# Packing rounds nothing. Norms of blocks are summed in float32, so that of two nearly alike either may be kept.
EXACT, NORMS = 1e-12, 1e-6


@dataclass(frozen=True)
class Packing(Named):
    """The module that packs, and the bytes that it moves."""

    _: KW_ONLY
    problem: Moved
    bound_seconds: float


@dataclass(frozen=True)
class PackOperands(Operands):
    """One of the rotating sets: its own w [m, k]."""

    case: "PackCase"
    w: Tensor

    @property
    def useful_flops(self) -> float:
        """Bytes in the place of FLOPs: see the module."""
        return self.case.moved

    @property
    def given(self) -> tuple[Tensor]:
        return (self.w,)

    def plan(self, kernel: str | None) -> Packing:
        name = self._name()
        if kernel not in (None, name):
            raise Unsupported(self.case.name, {kernel: [f"{name} packs here; there is nothing to choose"]})
        bound = self.case.moved / card_of(self.w.device).bandwidth
        return Packing(name, problem=Moved(self.case.moved), bound_seconds=bound)

    def _name(self) -> str:
        case, w = self.case, self.w
        packer, torchs = ("to_bsr", "matrix.convert") if case.to == TO_BSR else ("to_24", "matrix.two_four")
        if not w.is_cuda:
            return torchs
        kernel = import_module(f"sparsek.kernels.pack.{packer}")
        if case.to == TO_BSR:
            made = kernel.pack_bsr(w, case.block, convert.Rule(None, None, case.keep, "global"))
        else:
            made = kernel.pack24(w, None)
        return torchs if made is None else f"pack.{packer}"

    def planned(self, plan: Packing) -> Callable[[], object]:
        return self.eager()

    def eager(self) -> Callable[[], object]:
        if self.case.block is None:
            return partial(Semi24.from_dense, self.w)
        return partial(BSR.from_dense, self.w, self.case.block, keep=self.case.keep)

    def judge(self, out: Any) -> Gate:
        """Whether `out` holds the values of w that it should, and nothing else."""
        dense = out.to_dense()
        if isinstance(out, Semi24):
            return judge(dense, larger_two(self.w), EXACT)
        best, stored = block_norms(self.w, out.block), block_norms(dense, out.block)
        kept = torch.linalg.vector_norm(best.flatten().topk(out.nnzb).values)
        lost = float(1 - torch.linalg.vector_norm(stored) / kept)
        rows, columns = out.block
        absent = (stored == 0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        found = max(lost, 0.0) + error(dense, self.w.double().masked_fill(absent, 0))
        return Gate(found, NORMS, out.nnzb == self.case.blocks and found <= NORMS)

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        return {"tflops": None}

    def peer_extra(self, call: Callable[[], object]) -> dict[str, Any]:
        return {"tflops": None}


def larger_two(w: Tensor) -> Tensor:
    """w in float64, of every four neighbours the two of larger magnitude, of equal ones the lower columns."""
    wide = two_four.groups(w.double())
    order = wide.abs().sort(dim=-1, descending=True, stable=True).indices[..., :2]
    return torch.zeros_like(wide).scatter(-1, order, wide.gather(-1, order)).flatten(-2)


def block_norms(w: Tensor, block: tuple[int, int]) -> Tensor:
    """The Frobenius norm of every block of w [m, k], sides that the block divides, in float64."""
    tiles = w.double().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return torch.linalg.vector_norm(tiles, dim=(1, 3))


@dataclass(frozen=True)
class PackCase(Case):
    """A dense [m, k] to a Semi24, or to a BSR of `block` that keeps the share `keep` of its blocks, by norm."""

    op: ClassVar[str] = "pack"
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

    def sets(self, draw: Draw) -> Callable[[Draw], PackOperands]:
        return lambda draw: PackOperands(self, draw.normal(self.m, self.k))


def _copy(case: PackCase, one: PackOperands, index: int) -> Callable[[], Tensor]:
    """torch's copy of w into another tensor: read once and written once."""
    return partial(torch.empty_like(one.w).copy_, one.w)


CASES = (PackCase(8192, 8192, SEMI24), PackCase(8192, 8192, TO_BSR, (128, 128), 0.125))
BARS: Mapping[Case, tuple[Bar, ...]] = dict.fromkeys(CASES, (Bar("copy", 0.5, 0.8),))
BENCH = Bench(
    "pack",
    suites={"published": rows("auto", *CASES)},
    schemas={"pack": Schema(PackCase, rated=False, sources=("lang.launch",))},
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
