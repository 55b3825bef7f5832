"""cpu.spmm: C = A @ B on CPU tensors, in batched torch, with an epilogue.

    rows of equal length        A[r]  [bm, per*bk]   (blocks of one block row, side by side)
    in one bmm                  G[r]  [per*bk, w]    (their block rows of B, gathered)
                                C[r]  [bm, w]   = epilogue(A[r] @ G[r])

Every stored value is used once per `w` columns, and only stored blocks are touched. Each row of C is one dot product
over all its blocks, so it is rounded once. A step gathers no more than fits in the cache. The epilogue is applied to
a step's rows while they are cached, in float32 or float64. Processors with bf16 units multiply bf16 with them by
default: the units round the product, and the epilogue's result is rounded again, as in a dense torch layer. `wide`
rounds once.

Time over the faster of torch.sparse BSR and dense matmul, 12.5 % stored, two EPYC cores (AVX-512), torch 2.13.0,
2026-11-20. float32, sides 1024 to 4096, N 16 to 1024: blocks of 32 0.22 to 0.84, of 64 0.19 to 0.43, of 128 0.16 to
0.39. bfloat16 0.23 to 0.64, float16 under 0.05, float64 0.20 to 0.57. Zipf(1.2) rows 0.3 to 1.8, worst with thin B
and small blocks, where each row length takes a step of its own.

CPU time of gelu(x @ W.T + bias), which is column-major, over torch's linear and gelu, 12.5 % stored, sides 1024 and
2048, one EPYC core (AVX-512 BF16), torch 2.13.0, 2026-11-21. 16 to 1024 tokens: float32 0.23 to 0.39, bfloat16 0.4 to
1.1, worst with 16 tokens. One token: 1.2 and 1.4, all of it call overhead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import CpuConfig, CpuKernel
from sparsek.products.formats.bsr import BSR
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

MAX_COLUMNS = 1024
MIN_COLUMNS = 64
STEP_SECONDS = 3e-5


class CpuSpmmStep(NamedTuple):
    """Block rows of equal length `per`. `rows` is a slice of block rows, or their numbers."""

    per: int
    rows: "slice | Tensor"
    height: int
    blocks: "slice | Tensor"
    columns: Tensor


@dataclass(frozen=True)
class CpuSpmmWork:
    """`steps` cover every block row once. `width`: columns of C computed at a time. `items`: batch items among them."""

    steps: tuple[CpuSpmmStep, ...]
    width: int
    items: int


class CpuSpmm(CpuKernel):
    """Batched torch. Chosen for CPU tensors, never for CUDA ones."""

    name = "cpu.spmm"
    storages = ("bsr",)

    def seconds(self, p: SpmmProblem, c: CpuConfig) -> float:
        bm, bk = p.block
        size = 4 if c.wide else dtypes.itemsize(p.dtype)
        columns = max(1, p.n * p.batch)
        gathered = p.nnzb * bk * columns * size
        packed = p.nnzb * bm * bk * size * -(-columns // MAX_COLUMNS)
        steps = max((gathered + packed) / c.step_bytes, _distinct_lengths(p))
        rate = p.card.tflops["fp32" if c.wide else p.dtype] * 1e12
        parts = p.has_alpha + p.bias + bool(p.activation) + bool(p.combine)
        finished = 2 * parts * p.m * columns * (8 if p.dtype == "fp64" else 4)
        moved = 2 * (gathered + packed) + finished + p.compulsory_bytes
        return p.useful_flops / rate + moved / p.card.bandwidth + steps * STEP_SECONDS

    def prepare(self, p: SpmmProblem, c: CpuConfig, a: BSR) -> CpuSpmmWork:
        size = 4 if c.wide else a.values.element_size()
        longest = max(1, p.row_max) * p.block[1] * size
        fitting = max(MIN_COLUMNS, 8 * c.step_bytes // longest // MIN_COLUMNS * MIN_COLUMNS)
        limit = min(MAX_COLUMNS, fitting)
        items = min(max(1, p.batch), max(1, limit // p.n)) if p.n else 1
        width = min(p.n, limit)
        row_bytes = size * p.block[1] * (width * items + p.block[0])
        return CpuSpmmWork(tuple(_steps(a, max(1, c.step_bytes // max(1, row_bytes)))), width, items)

    def launch(
        self, c: CpuConfig, work: CpuSpmmWork, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad():
            batch = out.shape[:-2].numel()
            flat_b, flat_out = (x.reshape(batch, *x.shape[-2:]) for x in (b, out))
            if epilogue.other is not None:
                epilogue = replace(epilogue, other=epilogue.other.reshape(flat_out.shape))
            _all_columns(c, work, a, flat_b, flat_out, epilogue)
            if flat_out.data_ptr() != out.data_ptr():  # a copy, because no view joins these batch dimensions
                out.copy_(flat_out.view(out.shape))


def _all_columns(c: CpuConfig, work: CpuSpmmWork, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Yields column slices of C: `items` batch items side by side, or `width` columns of one item."""
    batch, _, n = b.shape
    for item in range(0, batch, work.items):
        for first in range(0, n, work.width):
            part = (slice(item, item + work.items), slice(None), slice(first, first + work.width))
            seen = epilogue
            if epilogue.other is not None:
                seen = replace(epilogue, other=epilogue.other[part].permute(1, 0, 2))
            _column_slice(c, work.steps, a, b[part].permute(1, 0, 2), out[part].permute(1, 0, 2), seen)


def _column_slice(
    c: CpuConfig, steps: tuple[CpuSpmmStep, ...], a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue
) -> None:
    """b [K, items, w], and out and the epilogue's other matrix [M, items, w], any strides."""
    bm, bk = a.block
    k, items, w = b.shape
    columns = a.grid[1]
    if k == columns * bk:
        tall = b.reshape(k, items * w).contiguous()
    else:
        tall = b.new_zeros(columns * bk, items * w)
        tall[:k].view(k, items, w).copy_(b)
    blocks_of_b = tall.view(columns, bk * items * w)
    by_columns = out.stride(0) == 1 and out.stride(2) != 1
    direct = items == 1 and out.is_contiguous() and not c.wide and epilogue.is_plain
    for step in steps:
        blocks, rows = _blocks(out, step, bm)
        if step.per == 0 and epilogue.is_plain:
            blocks[rows] = 0
            continue
        if step.per == 0:
            product = torch.zeros_like(blocks[rows])
        else:
            left = _side_by_side(a, step)
            right = blocks_of_b.index_select(0, step.columns).view(-1, step.per * bk, items * w)
            if c.wide:
                left, right = left.float(), right.float()
            if direct and isinstance(rows, slice):
                torch.bmm(left, right, out=blocks[rows].view(-1, step.height, w))
                continue
            # A column-major result is computed column-major: copying it across would be slow.
            product = torch.bmm(right.mT, left.mT).mT if by_columns else torch.bmm(left, right)
            product = product.view(-1, step.height, items, w)
        if not epilogue.is_plain:
            product = _finished(product, step, bm, epilogue)
        if isinstance(rows, slice):
            blocks[rows].copy_(product)
        else:
            blocks.index_copy_(0, rows, product.to(out.dtype))


def _blocks(x: Tensor, step: CpuSpmmStep, bm: int) -> "tuple[Tensor, slice | Tensor]":
    """x [M, ...] as blocks [rows, height, ...] of the step's height, and the indices of the step's blocks."""
    if step.height != bm:
        return x[-step.height :].unsqueeze(0), slice(0, 1)
    return x[: x.shape[0] // bm * bm].unflatten(0, (-1, bm)), step.rows


def _finished(product: Tensor, step: CpuSpmmStep, bm: int, epilogue: Epilogue) -> Tensor:
    """Applies the epilogue to a step's product [rows, height, items, w], in float32 or float64."""

    def of_step(x: Tensor) -> Tensor:
        blocks, rows = _blocks(x, step, bm)
        return blocks[rows]

    bias = None if epilogue.bias is None else of_step(epilogue.bias).unsqueeze(-1)
    other = None if epilogue.other is None else of_step(epilogue.other)
    return replace(epilogue, bias=bias, other=other).apply(
        product.to(torch.promote_types(product.dtype, torch.float32))
    )


def _side_by_side(a: BSR, step: CpuSpmmStep) -> Tensor:
    """The blocks of each row of a step as one matrix [rows, height, per*bk]."""
    bm, bk = a.block
    chosen = (
        a.values[step.blocks] if isinstance(step.blocks, slice) else a.values.index_select(0, step.blocks)
    )
    if a.order is not None:
        return chosen.view(-1, step.per * bk, bm)[:, :, : step.height].transpose(1, 2)
    rows = chosen.view(-1, step.per, bm, bk)[:, :, : step.height].transpose(1, 2)
    return rows.reshape(-1, step.height, step.per * bk)


def _steps(a: BSR, blocks_per_step: int) -> Iterator[CpuSpmmStep]:
    """Block rows grouped by length, each group cut to `blocks_per_step`; a ragged last block row has its own step."""
    indptr = a.pattern.host.indptr.astype(np.int64)
    order = None if a.order is None else a.order.numpy().astype(np.int64)
    columns = a.pattern.indices.to(torch.int64)
    lengths = np.diff(indptr)
    bm, ragged = a.block[0], a.shape[0] % a.block[0]
    last = len(lengths) - 1 if ragged else len(lengths)
    by_length = np.argsort(lengths[:last], kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[by_length])) + 1
    groups = [(rows, bm) for rows in np.split(by_length, cuts) if rows.size]
    if ragged:
        groups.append((np.array([last]), ragged))
    for rows, height in groups:
        per = int(lengths[rows[0]])
        at_once = max(1, blocks_per_step // max(1, per))
        for start in range(0, rows.size, at_once):
            yield _step(rows[start : start + at_once], per, height, indptr, columns, order)


def _step(
    rows: np.ndarray, per: int, height: int, indptr: np.ndarray, columns: Tensor, order: "np.ndarray | None"
) -> CpuSpmmStep:
    logical = (indptr[rows][:, None] + np.arange(per)).reshape(-1)
    run = rows[-1] - rows[0] == rows.size - 1
    where = slice(int(rows[0]), int(rows[-1]) + 1) if run else torch.from_numpy(rows.astype(np.int64))
    if order is not None:
        blocks = torch.from_numpy(order[logical])
    elif run and per:
        blocks = slice(int(logical[0]), int(logical[-1]) + 1)
    else:
        blocks = torch.from_numpy(logical)
    return CpuSpmmStep(per, where, height, blocks, columns[torch.from_numpy(logical)])


def _distinct_lengths(p: SpmmProblem) -> int:
    """An estimate of the number of distinct row lengths: one when rows are even."""
    even = p.row_max * p.grid[0] <= p.nnzb
    return 1 if even else min(p.row_max, p.grid[0])


KERNEL: SpmmKernel = CpuSpmm()
