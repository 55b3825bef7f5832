"""C = A @ B for a 2:4 A, or for its transpose, by unpacking A first: off the sparse tensor cores.

    A, 2:4       -- one kernel, at the speed of memory -->   a BSR with the zeros, in a workspace of this call
    the BSR, B   -- a kernel of BSR matrices -->             C, with the whole epilogue

A Semi24 becomes a BSR with all blocks of 128, a BSR24 the same stored blocks; FP8 stays FP8, with its scales. Sparse
tensor cores read pairs along K only, so these kernels compute every product with the transpose of a 2:4 matrix, and
with it the gradient of the dense operand. They run in all layouts, and on all cards from sm_80.

The kernel that multiplies is the fastest by prediction of those for BSR matrices. Nothing is kept between calls. The
products of the zeros are computed too: a NaN or Inf in a row of B reaches every row of C, and with a BSR24 the rows of
the stored blocks that it meets.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.plan.plan import time_text
from sparsek.engine.plan.ring import TRITON_LAUNCHES
from sparsek.engine.plan.select import Choice, select
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import BlockPattern, HostPattern, grid_of
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import BlockStats
from sparsek.products.kernels.pack.to_24 import unpacked_blocks
from sparsek.products.kernels.spmm import (
    hopper,
    hopper_fp8,
    hopper_paired,
    portable,
    portable_fp8,
    portable_skinny,
)
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

WHOLE = (128, 128)  # the blocks of an unpacked Semi24
KERNELS_OF_BSR: dict[str, Any] = {
    each.name: each
    for each in (
        hopper.KERNEL, hopper_paired.KERNEL, portable.KERNEL, portable_skinny.KERNEL, hopper_fp8.KERNEL,
        portable_fp8.KERNEL,
    )
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Config(KernelConfig):
    """The kernel that multiplies the unpacked matrix, by name, and its config."""

    kernel: str
    config: Any

    @property
    def texts(self) -> list[str]:
        return [f"A unpacked, then {self.kernel}: {self.config}"]


class Work(NamedTuple):
    """Whether A is transposed in the product; the work of the kernel that multiplies; and the tensors of the unpacked
    matrix's pattern, for which calls on other streams wait. The pattern itself would keep its plans alive for ever.
    """

    transposed: bool
    inner: Any
    lists: tuple[Tensor | None, ...]

    @property
    def imbalance(self) -> Any:
        return getattr(self.inner, "imbalance", None)


def whole(p: SpmmProblem) -> SpmmProblem:
    """The same product of the unpacked matrix, without slopes: the planner gives none to these kernels."""
    p = replace(p, slope=False)
    if p.a.blocks is not None:
        return p.unpacked
    rows, columns = grid_of((p.m, p.k), WHOLE)
    return replace(p, a=replace(p.a, two_four=False, blocks=BlockStats(WHOLE, rows * columns, columns)))


@lru_cache(maxsize=256)
def _choice(p: SpmmProblem) -> Choice:
    """The kernel for the unpacked matrix."""
    return select(p, KERNELS_OF_BSR.values())


def unpacking_seconds(p: SpmmProblem) -> float:
    """Seconds to read values and metadata and to write the workspace: a launch, and the longer of bytes at 85 % of copy
    bandwidth and 1.2e12 columns a second (H200, 2026-11-28: 62 us for 8192x8192 in bf16, 57 us in FP8).
    """
    stored, written = p.stored, whole(p).stored
    if p.on_cpu:  # the interpreter
        return 2e-3 * (1 + written / 2048)
    moved = (stored + written) * dtypes.itemsize(p.dtype) + stored / 4
    columns = written / (1.2e12 * p.card.pace)
    return TRITON_LAUNCHES * p.card.launch_seconds + max(moved / (0.85 * p.card.bandwidth), columns)


class Unpacked:
    """The products of one kind of 2:4 storage."""

    def __init__(self, storage: str) -> None:
        self.storage, self.name = storage, f"unpacked.{storage}"

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons why `p` cannot run here: those of the portable kernel of BSR matrices, which takes any layout."""
        if foreign := p.a.unless(self.storage):
            return foreign
        return (portable_fp8 if p.a.quantized else portable).KERNEL.why_not(whole(p))

    def default(self, p: SpmmProblem) -> Config:
        choice = _choice(whole(p))
        return Config(choice.kernel.name, choice.config)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Those of every kernel that could multiply the unpacked matrix."""
        q = whole(p)
        for kernel in KERNELS_OF_BSR.values():
            if not kernel.why_not(q):
                yield from (Config(kernel.name, each) for each in kernel.configs(q))

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Unpacking, then the product of all values."""
        return unpacking_seconds(p) + KERNELS_OF_BSR[c.kernel].seconds(whole(p), c.config)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        q = whole(p)
        size, time = q.stored * dtypes.itemsize(p.dtype) / 1e6, time_text(unpacking_seconds(p))
        reached = "every row of C" if p.a.blocks is None else "all rows of the blocks that it meets"
        return [
            f"unpacks A in each call, into a workspace of {size:.4g} MB: {time} of the prediction",
            f"multiplies the zeros of A too: a NaN or Inf in a row of B reaches {reached}",
            *getattr(KERNELS_OF_BSR[c.kernel], "notes", lambda *_: [])(q, c.config),
        ]

    def prepare(self, p: SpmmProblem, c: Config, a: Any) -> Work:
        """The pattern of the unpacked matrix, kept with the metadata, and the work of the kernel that multiplies."""
        pattern, order = _pattern(a, p.a.transposed)
        block = pattern.block if order is None else pattern.block[::-1]
        shown = a.values.new_empty(1).expand(pattern.nnzb, *block)  # of the right shape; no memory is read
        inner = KERNELS_OF_BSR[c.kernel].prepare(whole(p), c.config, _as_bsr(a, pattern, shown, order))
        return Work(p.a.transposed, inner, (pattern.indptr, pattern.indices, order))

    def launch(self, c: Config, work: Work, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        if out.numel() == 0:
            return
        matrix = a.matrix if isinstance(a, Quantized) else a
        pattern, order = _pattern(a, work.transposed)
        values = unpacked_blocks(
            matrix.values, matrix.meta, pattern.block if order is None else pattern.block[::-1]
        )
        made = _as_bsr(a, pattern, values, order)
        KERNELS_OF_BSR[c.kernel].launch(c.config, work.inner, made, b, out, epilogue)


def _as_bsr(a: Any, pattern: BlockPattern, values: Tensor, order: Tensor | None) -> BSR | Quantized:
    """The unpacked matrix: a BSR, with the scales of `a` if it has some."""
    made = BSR.unchecked(pattern, values, order)
    return a._with(made, a.scale) if isinstance(a, Quantized) else made


def _pattern(a: Any, transposed: bool) -> tuple[BlockPattern, Tensor | None]:
    """The pattern and order of the unpacked matrix: that of a BSR24, and all blocks of a Semi24."""
    matrix = a.matrix if isinstance(a, Quantized) else a
    if isinstance(matrix, BSR24):
        stored = matrix.pattern
    else:
        stored = matrix.plan_owner().derived("all blocks", lambda: _all_blocks(matrix))
    return stored.transposed if transposed else (stored, None)


def _all_blocks(a: Semi24) -> BlockPattern:
    rows, columns = grid_of(a.shape, WHOLE)
    indptr = np.arange(rows + 1, dtype=np.int32) * columns
    indices = np.tile(np.arange(columns, dtype=np.int32), rows)
    return BlockPattern.from_host(a.shape, WHOLE, HostPattern(indptr, indices), a.device)


KERNELS: dict[str, SpmmKernel] = {
    each.name: each for each in map(Unpacked, ("semi24", "bsr24", "semi24_fp8", "bsr24_fp8"))
}
