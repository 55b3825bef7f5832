"""vendor.dense: A written out dense, then torch.matmul (cuBLAS on a GPU). Runs only by name: nothing is densified
silently.

One addition, of a bias or of another matrix, with alpha and beta, is part of the product (torch.addmm,
torch.baddbmm). Any other epilogue is applied by torch to the rounded product, in float32 or float64, and rounded
again.

It is in the table so that a plan can show when the dense product is predicted to be faster.

The dense copy holds [Mb*bm, Kb*bk] values. All plans share it, one per tensor of values, CUDA stream and side (a
matrix and its transposed view have one each). It lives as long as the values. After a write to the values, or
`values.data = other`, it is renewed (`core.streams.Contents`); writes to `values.data` are seen on a CPU only.
Values made in inference mode count no writes and are copied on every call. In a CUDA graph they are copied too, so that
replays use the current values.

The dense copy has zeros for missing blocks, so a NaN in a row of B reaches every row of C. Problems with empty block
columns are therefore refused. float32 follows torch's own TF32 setting at the time of the call.
"""

import os
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.core.streams import Contents
from sparsek.core.tracing import outside_inference
from sparsek.engine.launch.kinds import Fixed, FixedKernel
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

# values -> {(CUDA stream, is a view): dense copy}. A copy is written and read in the order of its stream. The lock
# keeps other threads on this stream, or on the CPU, from writing between a copy and its product.
_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
COPYING = threading.Lock()


class DenseCopy:
    """The dense copy of one A, and what its values held."""

    @outside_inference
    def __init__(self, a: BSR) -> None:
        (bm, bk), (mb, kb) = a.block, a.grid
        self.pattern = weakref.ref(a.pattern)
        self.rows = a.pattern.block_rows.to(torch.int64)
        self.columns = a.pattern.indices.to(torch.int64)
        self.cells = a.values.new_zeros(mb, bm, kb, bk)
        self.dense = self.cells.view(mb * bm, kb * bk)[: a.shape[0], : a.shape[1]]
        self.held: Contents | None = None

    def follow(self, a: BSR) -> None:
        """Copies the values unless they are known to be unchanged since the last copy."""
        if self.held is not None and self.held.are_of(a.values):
            return
        held = Contents.of(a.values)
        self.cells.permute(0, 2, 1, 3)[self.rows, self.columns] = a.logical_values().detach()
        self.held = held


def dense_copy(a: BSR) -> Tensor:
    """A as a dense matrix with its current values, valid until the next call for them on this stream.

    The caller holds COPYING until it has used it.
    """
    if a.values.is_cuda and torch.cuda.is_current_stream_capturing():
        copy = DenseCopy(a)  # owned by the graph's memory pool, so it is not kept here
    else:
        stream = torch.cuda.current_stream(a.device).cuda_stream if a.values.is_cuda else 0
        copies: Any = _COPIES.setdefault(a.values, {})
        key = stream, a.order is not None
        copy = copies.get(key)
        if copy is None or copy.pattern() is not a.pattern or copy.dense.dtype != a.dtype:
            copy = copies[key] = DenseCopy(a)
    copy.follow(a)
    return copy.dense


class VendorDense(FixedKernel):
    """Dense matmul. Any device; blocks outside the pattern are zeros."""

    name = "vendor.dense"
    only_by_name = "it keeps a dense copy of A"
    config = Fixed("dense copy of A, torch.matmul")
    storages = ("bsr",)

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := super().why_not(p):
            return foreign
        reasons = []
        if not p.stats.touches_all_columns:
            reasons.append(
                "a block column of A is empty: NaN or Inf in rows of B that no stored block touches would reach C"
            )
        return reasons + unless_fits("the dense copy of A takes", _dense_bytes(p), p.card)

    def seconds(self, p: SpmmProblem, c: Fixed) -> float:
        rate = p.card.tflops[p.rate_name] * 1e12
        size = dtypes.itemsize(p.dtype)
        product = max(
            p.dense_flops / rate, (p.m * p.k + p.batch * p.n * (p.k + p.m)) * size / p.card.bandwidth
        )
        # Torch reads and writes C for each part of an epilogue outside the product.
        parts = p.has_alpha + p.bias + bool(p.activation) + bool(p.combine)
        passes = 0 if _goes_along(p.activation, p.bias, p.combine) else 2 + parts
        finished = 2 * passes * p.m * p.n * p.batch * size / p.card.bandwidth
        return product + finished + (1 + passes) * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Fixed, a: BSR) -> None:
        with torch.no_grad(), COPYING:
            dense_copy(a)

    def launch(
        self, c: Fixed, work: None, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        if out.numel() == 0:
            return
        with torch.no_grad(), COPYING:
            dense = dense_copy(a)
            _multiply(dense.expand(*b.shape[:-2], *dense.shape), b, out, epilogue)


def _multiply(dense: Tensor, b: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Writes the product of dense [..., M, K] and b [..., K, N], with the epilogue."""
    bias, other = epilogue.bias, epilogue.other
    combine = "" if other is None else epilogue.combine
    if epilogue.is_plain and _is_written(out):
        torch.matmul(dense, b, out=out)
    elif (
        out.ndim <= 3
        and _is_written(out)
        and epilogue.alpha
        and _goes_along(epilogue.activation, bias is not None, combine)
    ):
        added, beta = out, 0.0
        if bias is not None:
            added, beta = bias[:, None].expand(out.shape), 1.0
        elif other is not None:
            added, beta = other, epilogue.beta
        # With alpha 0 torch's bf16 baddbmm of a matrix expanded over the batch ignores beta (torch 2.13, CPU).
        multiply = torch.addmm if out.ndim == 2 else torch.baddbmm
        multiply(added, dense, b, beta=beta, alpha=epilogue.alpha, out=out)
    else:
        product = torch.matmul(dense, b)
        out.copy_(epilogue.apply(product.to(torch.promote_types(out.dtype, torch.float32))))


def _is_written(out: Tensor) -> bool:
    """Whether the library can write to `out` directly. torch also passes it the strides of dims of one element."""
    (m, n), (rows, columns) = out.shape[-2:], out.stride()[-2:]
    return (columns == 1 and rows >= n) or (rows == 1 and columns >= m)


def _goes_along(activation: str, bias: bool, combine: str) -> bool:
    """Whether the epilogue is one addition that the product can include, with nothing after it."""
    return not activation and combine != "mul" and not (bias and combine)


def _dense_bytes(p: SpmmProblem) -> int:
    (bm, bk), (mb, kb) = p.block, p.grid
    return mb * bm * kb * bk * dtypes.itemsize(p.dtype)


def product_of_blocks(
    left: Tensor, right: Tensor, pattern: BlockPattern, at: tuple[Tensor, Tensor]
) -> Tensor:
    """left @ right at the stored blocks of `pattern`, [nnzb, bm, bn], at block rows and columns `at`."""
    (m, n), (rows, columns), (bm, bn) = pattern.shape, pattern.grid, pattern.block
    make = left.new_zeros if pattern.is_ragged else left.new_empty
    dense = make(pattern.padded_shape)
    torch.matmul(left, right, out=dense[:m, :n])
    return dense.view(rows, bm, columns, bn).transpose(1, 2)[at]


def limit_bytes(card: Card) -> int:
    """Half of the memory of the card, or of this machine for CPU tensors."""
    if card.is_cpu:
        return (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if hasattr(os, "sysconf")
            else 4 << 30
        )
    return card.memory_bytes // 2


def unless_fits(what: str, need: int, card: Card, them: str = "it") -> list[str]:
    """Dense copies get no more than `limit_bytes`. `what` ends with the verb: "the dense copy of A takes"."""
    limit = limit_bytes(card)
    if need <= limit:
        return []
    return [f"{what} {need / 2**30:.1f} GiB; at most {limit / 2**30:.1f} GiB are given to {them}"]


KERNEL: SpmmKernel = VendorDense()
