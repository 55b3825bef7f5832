"""reference.spmm, reference.semi24, reference.bsr24 and reference.spmm_fp8: the specification as kernels.

Any device, dtype and layout; slow, and predicted to be. They are the last resort, and the baseline for tests. FP8
products are in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch.kinds import Fixed, FixedKernel, wide_seconds, wide_size
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.storage import FP8
from sparsek.products.plan.kernels import SpmmKernel, rounding_seconds
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue
from sparsek.products.reference.quantized import product, product_of

CALLS_PER_STEP = 6
UNPACK_PASSES, UNPACK_CALLS = 36, 20  # of torch, with strided access to the dense matrix
SCALE_CALLS = 4  # of torch, to multiply both operands by their scales
SCALE_PASSES = 3  # over the operands in float64


def _bsr_seconds(p: SpmmProblem) -> float:
    (bm, bk), size, columns = p.block, wide_size(p), p.n * p.batch
    # Values and B are widened (read, written, read). For each block one row of B is gathered and one of C added.
    values = 3 * p.nnzb * bm * bk * size
    gathered = 2 * p.nnzb * bk * columns * size
    added = 4 * p.nnzb * bm * columns * size
    parts, dense = _passes(p)
    # One step per position in the longest block row.
    calls = CALLS_PER_STEP * (1 + p.row_max) + parts
    return wide_seconds(p, p.useful_flops, values + gathered + added + dense, calls)


def _semi24_seconds(p: SpmmProblem) -> float:
    parts, dense = _passes(p)
    unpacked = UNPACK_PASSES * p.m * p.k * wide_size(p)
    return wide_seconds(p, p.dense_flops, unpacked + dense, UNPACK_CALLS + 6 + parts)


def _bsr24_seconds(p: SpmmProblem) -> float:
    written = UNPACK_PASSES * (2 * p.stored * dtypes.itemsize(p.dtype) / p.card.bandwidth)
    return _bsr_seconds(p.unpacked) + written + UNPACK_CALLS * p.card.launch_seconds


def _fp8_seconds(p: SpmmProblem) -> float:
    whole = p.plain("fp64")
    scaled = SCALE_PASSES * 8 * p.k * (p.m + p.n * p.batch) / p.card.bandwidth
    return SECONDS[whole.a.kind](whole) + scaled + SCALE_CALLS * p.card.launch_seconds + rounding_seconds(p)


def _passes(p: SpmmProblem) -> tuple[int, int]:
    """Passes of the epilogue, each of which reads and writes C; bytes of these passes, of B and of C."""
    parts = p.has_alpha + p.bias + bool(p.activation) + 2 * bool(p.combine)
    return parts, p.n * p.batch * (3 * p.k + (3 + 2 * parts) * p.m) * wide_size(p)


SECONDS = {"bsr": _bsr_seconds, "semi24": _semi24_seconds, "bsr24": _bsr24_seconds}


@dataclass(frozen=True)
class ReferenceSpmm(FixedKernel):
    """The specification of products as a kernel for some storages."""

    name: str
    config: Fixed
    predicted: Callable[[SpmmProblem], float]
    storages: tuple[str, ...]
    writes_slope = True

    def seconds(self, p: SpmmProblem, c: Fixed) -> float:
        return self.predicted(p)

    def prepare(self, p: SpmmProblem, c: Fixed, source: Any) -> bool:
        """Whether A is the transpose of a 2:4 matrix."""
        return p.a.two_four and p.a.transposed

    def launch(self, c: Fixed, work: bool, a: Any, b: Any, out: Tensor, epilogue: Epilogue = PLAIN) -> None:
        with torch.no_grad():
            if isinstance(a, Quantized):
                out.copy_(product(a, b, epilogue, out.dtype))
            else:
                out.copy_(product_of(a, b, epilogue, transposed=work))


_BMM = "one bmm for each place in a block row"
_OF = {
    "reference.spmm": (f"{_BMM}, summed in float32 or float64", _bsr_seconds, ("bsr",)),
    "reference.semi24": ("A written out dense, one matmul in float32 or float64", _semi24_seconds, ("semi24",)),
    "reference.bsr24": (f"blocks written out, then {_BMM}, in float32 or float64", _bsr24_seconds, ("bsr24",)),
    "reference.spmm_fp8": (
        "both operands times their scales in float64, the reference of their product", _fp8_seconds, FP8
    ),
}  # fmt: skip
KERNELS: dict[str, SpmmKernel] = {
    name: ReferenceSpmm(name, Fixed(text), predicted, storages)
    for name, (text, predicted, storages) in _OF.items()
}
