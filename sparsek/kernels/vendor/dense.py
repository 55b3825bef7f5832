"""vendor.dense: A is written out dense once, then torch.matmul (cuBLAS on a GPU).

It is there so that the planner can say "dense wins here" honestly.

The dense copy holds [Mb*bm, Kb*bk] values. All plans for one tensor of values share it, and it goes when they go. It is
renewed, into the same memory, when the values have changed: another tensor, or an in-place write that torch counts
(`Tensor._version`). Writes that torch does not count (through `.data`, or from another program) need a new tensor.
Values made in inference mode carry no count and are copied on every call; so are all values in a CUDA graph, whose
replays must see what the values hold then.

float32 is multiplied as torch's own TF32 setting says at the time of the call.

A stored zero and a missing block are the same to a dense product: a NaN in a row of B reaches every row of C.
Problems with block columns that nothing is stored in are therefore refused.
"""

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import dtypes
from sparsek.formats.bsr import BSR
from sparsek.plan.problem import SpmmProblem

GPU_LIMIT = 64 << 30
_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class DenseConfig:
    """Nothing to choose: the vendor's library does."""

    def __repr__(self) -> str:
        return "dense copy of A, torch.matmul"


class DenseCopy:
    """The dense copy of one A, and which state of which values it shows."""

    def __init__(self, a: BSR) -> None:
        (bm, bk), (mb, kb) = a.block, a.grid
        self.pattern = weakref.ref(a.pattern)
        self.rows = a.pattern.block_rows.to(torch.int64)
        self.columns = a.pattern.indices.to(torch.int64)
        self.cells = a.values.new_zeros(mb, bm, kb, bk)
        self.dense = self.cells.view(mb * bm, kb * bk)[: a.shape[0], : a.shape[1]]
        self.source: Tensor | None = None
        self.version = -1
        self.follow(a)

    def shows(self, a: BSR) -> bool:
        """Whether this is a copy for `a`'s pattern."""
        return self.pattern() is a.pattern

    def follow(self, a: BSR) -> None:
        """Copies the values again if they are not the ones that were copied last."""
        captured = a.values.is_cuda and torch.cuda.is_current_stream_capturing()
        counted = not (captured or a.values.is_inference())
        known = self.source is not None and self.source.data_ptr() == a.values.data_ptr()
        if counted and known and self.version == a.values._version:
            return
        self.cells.permute(0, 2, 1, 3)[self.rows, self.columns] = a.logical_values().detach()
        # Holding the tensor keeps its memory from being handed to other values that would look like it.
        self.source = a.values.detach()
        self.version = a.values._version if counted else -1


class VendorDense:
    """Dense matmul. Any device; blocks outside the pattern are zeros."""

    name = "vendor.dense"

    def why_not(self, p: SpmmProblem) -> list[str]:
        reasons = []
        if not p.touches_all_columns:
            reasons.append(
                "a block column of A is empty: NaN or Inf in rows of B that no stored block touches would reach C"
            )
        need, limit = _dense_bytes(p), _limit_bytes(p)
        if need > limit:
            reasons.append(
                f"the dense copy of A takes {need / 2**30:.1f} GiB; at most {limit / 2**30:.1f} GiB are given to it"
            )
        return reasons

    def default(self, p: SpmmProblem) -> DenseConfig:
        return DenseConfig()

    def configs(self, p: SpmmProblem) -> Iterable[DenseConfig]:
        return [DenseConfig()]

    def seconds(self, p: SpmmProblem, c: DenseConfig) -> float:
        rate = p.card.tflops["tf32" if p.tf32 and p.dtype == "fp32" else p.dtype] * 1e12
        moved = (p.m * p.k + p.batch * p.n * (p.k + p.m)) * dtypes.itemsize(p.dtype)
        return max(p.dense_flops / rate, moved / p.card.bandwidth) + p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: DenseConfig, a: BSR) -> DenseCopy:
        with torch.no_grad():
            copy = _COPIES.get(a.values)
            if copy is None or not copy.shows(a):
                copy = _COPIES[a.values] = DenseCopy(a)
            return copy

    def launch(self, c: DenseConfig, work: DenseCopy, a: BSR, b: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            work.follow(a)
            if out.numel() == 0:
                return
            torch.matmul(work.dense.expand(*b.shape[:-2], *work.dense.shape), b, out=out)


def _dense_bytes(p: SpmmProblem) -> int:
    (bm, bk), (mb, kb) = p.block, p.grid
    return mb * bm * kb * bk * dtypes.itemsize(p.dtype)


def _limit_bytes(p: SpmmProblem) -> int:
    """Half of the memory of this machine for CPU tensors; on a GPU what leaves an H200 room for A, B and C."""
    if p.on_cpu:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return GPU_LIMIT


KERNEL = VendorDense()
