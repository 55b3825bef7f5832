"""C = A @ B of two BSR matrices as a benchmark: its cases, their operands, its suites."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparsek.core.clock import wall_rounds
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import parse_block
from sparsek.products.formats.bsr import BSR, zero_padding
from sparsek.products.formats.pattern import BlockPattern, block_sides
from sparsek.products.ops.spgemm import matcher, plan_spgemm, spgemm
from sparsek.products.plan.spgemm import SpgemmPlan
from sparsek.testing.budget import Gate
from sparsek.testing.product_budget import check_spgemm
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Operands, block_name, rows, stored_name
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import CUBLAS, TORCH_DENSE
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL
from sparsek_bench.suites.product import SidesCase

OUTPUTS = ("dense", "bsr")
SYMBOLIC_ROUNDS = 5
# What is timed beside the kernel: the symbolic phase.
EXTRA = ("symbolic_ms", "symbolic_share", "symbolic_gpu_ms", "symbolic_gpu_share")


@dataclass(frozen=True)
class SpgemmOperands(Operands):
    """One of the rotating sets: its own values of A and B, the shared patterns, and the storage of the product."""

    a: BSR
    b: BSR
    out: Any
    useful_flops: float

    @property
    def given(self) -> tuple[BSR, BSR]:
        return self.a, self.b

    def plan(self, kernel: str | None) -> SpgemmPlan:
        return plan_spgemm(self.a, self.b, self.out, kernel=kernel)

    def eager(self, plan: SpgemmPlan) -> Callable[[], object]:
        return partial(spgemm, self.a, self.b, self.out, kernel=plan.kernel)

    def judge(self, out: Any, *, tf32: bool = False) -> Gate:
        """Whether `out`, dense or BSR, is the product of this set."""
        return check_spgemm(self.a, self.b, out, tf32=tf32)

    def dense(self, seed: int) -> Callable[[], object]:
        draw = Draw(self.a.device, self.a.dtype, seed)
        first, second = draw.weight(*self.a.shape), draw.normal(*self.b.shape)
        out = first.new_empty((first.shape[0], second.shape[1]))
        return partial(torch.matmul, first, second, out=out)

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        """`symbolic_ms`: what depends on the patterns alone, host included: which blocks meet, as `spgemm` finds it out
        on this device, and the kernel's list of work. `symbolic_share`: of a call on new patterns, which does both and
        then runs. `symbolic_gpu_ms`, `symbolic_gpu_share`: the same of the GPU's own time; null on a CPU.
        """
        made, match = self.plan(kernel), matcher(self.a.device)

        def symbolic() -> object:
            matches = match(new_pattern(self.a), new_pattern(self.b), None)
            return made.choice.kernel.prepare(made.problem, made.config, matches)

        def whole() -> object:
            first, second = (BSR.unchecked(new_pattern(one), one.values) for one in (self.a, self.b))
            return spgemm(first, second, self.out, kernel=kernel)

        times = wall_rounds({"symbolic": symbolic, "whole": whole}, self.a.device, SYMBOLIC_ROUNDS)
        alone = times["symbolic"].median
        found = [round(alone, 6), round(alone / times["whole"].median, 4), None, None]
        if self.a.device.type == "cuda":
            busy = gpu_ms(symbolic)
            found[2:] = round(busy, 6), round(busy / gpu_ms(whole), 4)
        return dict(zip(EXTRA, found, strict=True))


def gpu_ms(call: Callable[[], object], calls: int = 20) -> float:
    """Milliseconds of a call's kernels and copies, as the profiler adds them up: no gap between them is in it.

    acc_events: without it the profilers of torch 2.10 to 2.12 warn at every start that cycles lose their events.
    """
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spent = (each.device_time_total for each in seen.key_averages() if each.device_type == DeviceType.CUDA)
    return sum(spent) / 1e3 / calls


def new_pattern(a: BSR) -> BlockPattern:
    """The pattern of `a` without anything that was derived from it but its host copy."""
    p = a.pattern
    return BlockPattern.unchecked(p.shape, p.block, p.indptr, p.indices, p.host)


def parse_blocks(text: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Blocks of A and of B: "128" -> ((128, 128), (128, 128)); "512x112:112x128" -> ((512, 112), (112, 128))."""
    first, *others = map(parse_block, text.split(":"))
    if len(others) > 1:
        raise InvalidInput(f"blocks are written as 128, or as 512x112:112x128 for A and B, got {text!r}")
    return first, others[0] if others else first


@dataclass(frozen=True)
class SpgemmCase(SidesCase):
    """C [m, n] = A [m, k] @ B [k, n], with `density` of the blocks of either stored; `out` is the storage of C.

    Every block row of A and every block column of B holds as many blocks, in random places: each block of C is the sum
    of about density² * (k / block) pairs.
    """

    op: ClassVar[str] = "spgemm"
    extra: ClassVar[tuple[str, ...]] = EXTRA
    sources: ClassVar[tuple[str, ...]] = ("plan.matches",)

    m: int = options.size("Rows of A")
    k: int = options.size("Columns of A")
    n: int = options.size("Columns of B")
    a_block: tuple[int, int] = options.block(
        help="Blocks, of A and of B: 128,512x112:112x128.",
        parse=parse_blocks,
        name="block",
        fields=("a_block", "b_block"),
    )
    b_block: tuple[int, int] = options.checked(lambda name, block: block_sides(block))
    density: float = options.share("Fraction of blocks that either stores.")
    out: str = options.choice("Storage of C", OUTPUTS, name="result", usual="dense")
    dtype: str = options.dtype()

    def check(self) -> None:
        if self.a_block[1] != self.b_block[0]:
            raise InvalidInput(
                f"blocks of {block_name(self.a_block)} meet blocks with {self.a_block[1]} rows, not "
                f"{block_name(self.b_block)}"
            )

    @property
    def name(self) -> str:
        """One short line: "8192³ block 128 12.5 % bf16 to dense"."""
        alike = self.a_block == self.b_block and self.a_block[0] == self.a_block[1]
        blocks = block_name(self.a_block)
        blocks = blocks if alike else f"{blocks}·{block_name(self.b_block)}"
        return f"{self.shape_name} {stored_name(blocks, self.density, self.dtype)} to {self.out}"

    def sets(self, draw: Draw) -> Callable[[Draw], SpgemmOperands]:
        """A is scaled so that its product with a dense matrix has unit scale; B has N(0, 1) values."""
        a = draw.blocks(self.m, self.k, self.a_block, self.density)
        across = draw.blocks(self.n, self.k, (self.b_block[1], self.b_block[0]), self.density)
        pattern = across.pattern.T
        values = draw.normal(pattern.nnzb, *self.b_block)
        b = BSR.unchecked(pattern, zero_padding(pattern, values))
        pairs = int(b.pattern.row_lengths[a.pattern.indices].sum())
        flops = 2.0 * pairs * math.prod(self.a_block) * self.b_block[1]
        return lambda draw: SpgemmOperands(draw.revalued(a), draw.revalued(b), self.out, flops)


HOPPER = "hopper.spgemm"
# K is 72 blocks of 112: as many as divide 8192 but for 128 rows. Both A's block rows and B's block columns hold `topk`
# of them, so that a block of C has about topk² / 72 pairs: 0.9, 3.6, 14 and 57.
TOPK = tuple(SpgemmCase(8192, 112 * 72, 8192, (512, 112), (112, 128), topk / 72) for topk in (8, 16, 32, 64))
SPARSE = tuple(SpgemmCase(side, side, side, (64, 64), (64, 64), 0.03, "bsr") for side in (8192, 32768))
PUBLISHED = (
    *rows((HOPPER, "portable.spgemm"), SpgemmCase(8192, 8192, 8192, (128, 128), (128, 128), 0.125)),
    *rows(HOPPER, *TOPK, *SPARSE),
)


def _symbolic(heading: str, name: str) -> Column:
    def cell(record: Record) -> str:
        ms, share = record[f"{name}_ms"], record[f"{name}_share"]
        return "" if ms is None or share is None else f"{ms:.3f} ({share * 100:.0f} %)"

    return Column(heading, cell)


SYMBOLIC = (
    _symbolic("symbolic phase, ms (of a first call)", "symbolic"),
    _symbolic("on the GPU, ms (of that call)", "symbolic_gpu"),
)
BENCH = Bench(
    "spgemm",
    suites={"published": PUBLISHED},
    kinds=(SpgemmCase,),
    peers=(CUBLAS, TORCH_DENSE),
    tables=(
        Table(
            op="spgemm",
            title="BSR x BSR",
            columns=(CASE, MS, SPEEDUP, USEFUL, ROOF, *SYMBOLIC),
            note=(
                "A and B store the given share of their blocks, the same number in every block row of A and in every "
                "block column of B. Useful TFLOPS count pairs of stored blocks that meet; dense is cuBLAS. The "
                "symbolic phase finds these pairs and schedules them. Its time is wall time from an idle GPU to an "
                "idle GPU, and its share is of the first call on two patterns, which also plans and multiplies. On the "
                "GPU: its kernels and copies alone, and their share of the GPU time of that call."
            ),
            kernels=(HOPPER,),
        ),
    ),
)
