"""cpu.sddmm: S = X @ Y at the stored blocks of a pattern, on CPU tensors, in batched torch.

    some stored blocks p            X[row of p]     [bm, K]   (one block row of X for all of them, or gathered)
    in one bmm                      Y[:, column of p]  [K, bn]   (gathered)
                                    S[p]            [bm, bn]

Every element is one dot product over K, so it is rounded once. A step gathers no more than fits in the cache. For
small blocks, gathering costs more than it saves. If the model predicts this, a *strip* of block rows is multiplied
with all of Y, and the stored blocks are selected. Either way NaN in X or Y spreads as in the reference. If a side is
ragged, X or Y is copied with zero padding.

CPU time over dense matmul, 12.5 % stored, sides 1024 and 2048, K 64 to 2048, one EPYC core (AVX-512 BF16), torch
2.13.0, 2026-11-21. float32: blocks of 16 0.25 to 0.34, of 32 0.18 to 0.26, of 64 and 128 0.13 to 0.20. bfloat16: of
16 0.6 to 0.9, of 32 0.3 to 0.6, of 64 0.20 to 0.28, of 128 0.14 to 0.21. float64 0.20 to 0.53, float16 under 0.01.
Strips with every block stored: 1.2 to 2.1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import dtypes
from sparsek.kernels.kinds import CpuConfig, CpuKernel, goes_wide, widths
from sparsek.matrix.padding import zero_padding
from sparsek.matrix.pattern import BlockPattern
from sparsek.plan.product_kernels import SddmmKernel
from sparsek.plan.product_problems import SddmmProblem

STEP_SECONDS = 2e-5


@dataclass(frozen=True)
class CpuSddmmConfig(CpuConfig):
    """`step_bytes`: the most that one step gathers, or a strip computes. `wide`: multiply 16-bit inputs as float32.
    `strips`: multiply all of Y, and select the stored blocks.
    """

    strips: bool = False

    def __repr__(self) -> str:
        size = f"{self.step_bytes >> 10} KiB"
        kind = f"strips of X times all of Y, {size} of S each" if self.strips else f"steps of {size}"
        return f"{kind}{', in float32' if self.wide else ''}"


class Step(NamedTuple):
    """Stored blocks `first` to `last` - 1, in block rows `rows` [one each], or all in block row `row`."""

    first: int
    last: int
    row: int
    rows: "Tensor | None"
    columns: Tensor


class Strip(NamedTuple):
    """Stored blocks `first` to `last` - 1: all those of block rows `row` to `end` - 1."""

    first: int
    last: int
    row: int
    end: int
    rows: Tensor
    columns: Tensor


class CpuSddmm(CpuKernel):
    """Batched torch. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.sddmm"

    def default(self, p: SddmmProblem) -> CpuSddmmConfig:
        wide = goes_wide(p)
        both = (CpuSddmmConfig(wide=wide), CpuSddmmConfig(wide=wide, strips=True))
        return min(both, key=lambda c: self.seconds(p, c))

    def configs(self, p: SddmmProblem) -> Iterable[CpuSddmmConfig]:
        return [
            CpuSddmmConfig(1 << shift, each, strips)
            for each in widths(p)
            for strips in (False, True)
            for shift in (19, 20, 21, 22)
        ]

    def seconds(self, p: SddmmProblem, c: CpuSddmmConfig) -> float:
        bm, bn = p.block
        size = 4 if c.wide else dtypes.itemsize(p.dtype)
        rate = p.card.tflops["fp32" if c.wide else p.dtype] * 1e12
        if c.strips:
            moved = 2 * p.m * p.n * size + p.compulsory_bytes
            steps = max(p.grid[0] / max(1, c.step_bytes // max(1, bm * p.n * size)), 1)
            return p.dense_flops / rate + moved / p.card.bandwidth + steps * STEP_SECONDS
        gathered = p.nnzb * p.k * bn * size
        steps = max(gathered / c.step_bytes, 1)
        moved = 3 * gathered + p.compulsory_bytes
        return p.useful_flops / rate + moved / p.card.bandwidth + steps * STEP_SECONDS

    def prepare(
        self, p: SddmmProblem, c: CpuSddmmConfig, pattern: BlockPattern
    ) -> "tuple[Step | Strip, ...]":
        size = 4 if c.wide else dtypes.itemsize(p.dtype)
        if c.strips:
            return tuple(_strips(pattern, max(1, c.step_bytes // max(1, p.block[0] * p.n * size))))
        return tuple(_steps(pattern, c.step_bytes // max(1, size * p.k), c.step_bytes))

    def launch(
        self,
        c: CpuSddmmConfig,
        work: "tuple[Step | Strip, ...]",
        x: Tensor,
        y: Tensor,
        pattern: BlockPattern,
        values: Tensor,
    ) -> None:
        bm, bn = pattern.block
        with torch.no_grad():
            left, right = _padded(x, bm), _padded(y.mT, bn)
            if c.wide and c.strips:
                left, right = left.float(), right.float()
            of_x, of_y = left.unflatten(0, (-1, bm)), right.unflatten(0, (-1, bn))
            for step in work:
                place = values[step.first : step.last]
                if isinstance(step, Strip):
                    strip = torch.mm(left[step.row * bm : step.end * bm], right.mT)
                    cells = strip.view(step.end - step.row, bm, -1, bn).transpose(1, 2)
                    place.copy_(cells[step.rows, step.columns])
                    continue
                if step.rows is None:
                    rows = of_x[step.row].expand(step.last - step.first, -1, -1)
                else:
                    rows = _gather(of_x, step.rows)
                columns = _gather(of_y, step.columns).mT
                if c.wide:
                    place.copy_(torch.bmm(rows.float(), columns.float()))
                else:
                    torch.bmm(rows, columns, out=place)
            zero_padding(pattern, values)


def _padded(x: Tensor, size: int) -> Tensor:
    """x [S, K] with rows of zeros up to a multiple of `size`; x itself if no padding is needed."""
    more = -x.shape[0] % size
    if not more:
        return x
    return functional.pad(x.mT, (0, more)).mT if _by_columns(x) else functional.pad(x, (0, 0, 0, more))


def _by_columns(x: Tensor) -> bool:
    return x.stride(-2) == 1 and x.stride(-1) != 1


def _gather(tiles: Tensor, which: Tensor) -> Tensor:
    """Some of tiles [n, size, K], each with its strides unchanged."""
    if _by_columns(tiles):
        return tiles.mT.index_select(0, which).mT
    return tiles.index_select(0, which)


def _steps(pattern: BlockPattern, lines: int, step_bytes: int) -> Iterator[Step]:
    """Blocks of many short block rows, with their rows of X, or blocks of one. `lines`: lines of K that fit a step."""
    bm, bn = pattern.block
    rows, columns = pattern.block_rows.long(), pattern.indices.long()
    ends = pattern.host.indptr.tolist()
    longest = max((b - a for a, b in pairwise(ends)), default=0)
    together = lines // (bm + bn)
    if together > 2 * longest:
        for first in range(0, pattern.nnzb, together):
            last = min(first + together, pattern.nnzb)
            yield Step(first, last, 0, rows[first:last], columns[first:last])
        return
    at_once = max(1, lines // bn)
    for row, (start, end) in enumerate(pairwise(ends)):
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            yield Step(first, last, row, None, columns[first:last])


def _strips(pattern: BlockPattern, height: int) -> Iterator[Strip]:
    """Strips of `height` block rows, without empty ones."""
    rows, columns = pattern.block_rows.long(), pattern.indices.long()
    ends = pattern.host.indptr.tolist()
    for row in range(0, pattern.grid[0], height):
        end = min(row + height, pattern.grid[0])
        first, last = ends[row], ends[end]
        if first < last:
            yield Strip(first, last, row, end, rows[first:last] - row, columns[first:last])


KERNEL: SddmmKernel = CpuSddmm()
