"""vendor.dense: A written out dense, then torch.matmul (cuBLAS on a GPU). Only by name: nothing is densified unasked.

It is in the table so that a plan can say "dense would win here" honestly.

The dense copy holds [Mb*bm, Kb*bk] values. All plans share it, one for every tensor of values and CUDA stream, and it
goes when the values go. It is renewed, into the same memory, when torch has counted a write to the values
(`Tensor._version`); writes through `.data` are not counted, and values made in inference mode carry no count and are
copied on every call. In a CUDA graph they are copied too, so that replays see what the values hold then.

A stored zero and a missing block are the same to a dense product: a NaN in a row of B reaches every row of C.
Problems with block columns that nothing is stored in are therefore refused. float32 is multiplied as torch's own TF32
setting says at the time of the call.
"""

import os
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import dtypes
from sparsek.formats.bsr import BSR
from sparsek.plan.kernel import SpmmKernel
from sparsek.plan.problem import SpmmProblem

# values -> {CUDA stream: dense copy}. A copy is written and read in the order of its stream; the lock keeps threads on
# one stream, or on the CPU, from coming between a copy and its product.
_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_LOCK = threading.Lock()


@dataclass(frozen=True)
class DenseConfig:
    """Nothing to choose: the vendor's library does."""

    def __repr__(self) -> str:
        return "dense copy of A, torch.matmul"


class DenseCopy:
    """The dense copy of one A, and which state of its values it shows."""

    def __init__(self, a: BSR) -> None:
        (bm, bk), (mb, kb) = a.block, a.grid
        self.pattern = weakref.ref(a.pattern)
        self.rows = a.pattern.block_rows.to(torch.int64)
        self.columns = a.pattern.indices.to(torch.int64)
        self.cells = a.values.new_zeros(mb, bm, kb, bk)
        self.dense = self.cells.view(mb * bm, kb * bk)[: a.shape[0], : a.shape[1]]
        self.version = -1

    def follow(self, a: BSR) -> None:
        """Copies the values unless they are known to be as they were copied last."""
        counted = not a.values.is_inference()
        if counted and self.version == a.values._version:
            return
        self.cells.permute(0, 2, 1, 3)[self.rows, self.columns] = a.logical_values().detach()
        self.version = a.values._version if counted else -1


def dense_copy(a: BSR) -> Tensor:
    """A as a dense matrix that shows its present values, valid until the next call on this stream."""
    if a.values.is_cuda and torch.cuda.is_current_stream_capturing():
        copy = DenseCopy(a)  # lives in the graph's own memory, so it is not kept here
    else:
        stream = torch.cuda.current_stream(a.device).cuda_stream if a.values.is_cuda else 0
        copies: Any = _COPIES.setdefault(a.values, {})
        copy = copies.get(stream)
        if copy is None or copy.pattern() is not a.pattern:
            copy = copies[stream] = DenseCopy(a)
    copy.follow(a)
    return copy.dense


class VendorDense:
    """Dense matmul. Any device; blocks outside the pattern are zeros."""

    name = "vendor.dense"
    only_by_name = "it keeps a dense copy of A"

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

    def prepare(self, p: SpmmProblem, c: DenseConfig, a: BSR) -> None:
        with torch.no_grad(), _LOCK:
            dense_copy(a)

    def launch(self, c: DenseConfig, work: None, a: BSR, b: Tensor, out: Tensor) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad(), _LOCK:
            dense = dense_copy(a)
            torch.matmul(dense.expand(*b.shape[:-2], *dense.shape), b, out=out)


def _dense_bytes(p: SpmmProblem) -> int:
    (bm, bk), (mb, kb) = p.block, p.grid
    return mb * bm * kb * bk * dtypes.itemsize(p.dtype)


def _limit_bytes(p: SpmmProblem) -> int:
    """Half of the memory of the card, or of this machine for CPU tensors."""
    if p.card.is_cpu:
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if hasattr(os, "sysconf")
            else 4 << 30
        )
    return p.card.memory_bytes // 2


KERNEL: SpmmKernel = VendorDense()
