"""vendor.cusparselt: C = A @ B for a Semi24 A by NVIDIA's library, through torch's functions for it.

    prepare     A is unpacked once and compressed into the library's layout; the algorithm is chosen by timing
    launch      torch._cslt_sparse_mm, which allocates C; C is copied if the caller gave `out`

Runs only by name, because it keeps a second copy of A, 9/16 of the dense size, and times algorithms. All plans of a
matrix share one copy, which lives as long as its values and is renewed after a write to them (`Tensor._version`). A
captured CUDA graph keeps the copy it was captured with. Algorithms are timed once per problem, never during capture,
where a new problem gets the library's default.

The library's own search is never called: on an H200 (0.8, by torch 2.11) it tried an algorithm that ended in an
illegal instruction for fp16 products of 512 x 1024 x 512 and 64 x 128 x 32, and no CUDA context survives that.
Instead the algorithms in TRIED are timed, if there are several; `config=` names one of them. `sparsek bench semi24`
tries all algorithms, in processes of their own.

A bias is part of the library's product. Any other epilogue is applied by torch to the rounded product, in float32,
and rounded again. Sparse tensor cores read only the rows of B that a row of A selects, so a NaN in another row has no
effect.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsek.core import dtypes
from sparsek.core.clock import time_rounds
from sparsek.core.streams import captured
from sparsek.kernels.lang.memo import Memo
from sparsek.matrix.semi24 import Semi24
from sparsek.plan.operands import readable
from sparsek.plan.product_kernels import SpmmKernel
from sparsek.plan.product_problems import SpmmProblem
from sparsek.reference.epilogue import PLAIN, Epilogue

# The library's requirements for 16-bit matrices: sides of the 2:4 one, and of dense ones.
SPARSE_UNIT, DENSE_UNIT = 16, 8
REMEMBERED = 1024
# A guess: 930 to 1002 dense-equivalent TFLOPS were measured at 8192^3 in bf16 on an H200, where cuBLAS has 690.
OVER_DENSE = 1.4


# The algorithms that are timed, by the library's ids. 0 is its default.
TRIED: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class CusparseltConfig:
    """The library's id of the algorithm; None: the fastest of TRIED."""

    alg_id: int | None = None

    def __repr__(self) -> str:
        if self.alg_id is not None:
            return f"cuSPARSELt, algorithm {self.alg_id}, a compressed copy of A"
        return f"cuSPARSELt, the fastest of algorithms {', '.join(map(str, TRIED))}, a compressed copy of A"


@dataclass(frozen=True, eq=False)
class Work:
    """The algorithm, and the copy of the planned matrix."""

    alg_id: int
    compressed: Memo


_COPIES: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # values -> Memo, their copy
_ALGORITHMS: dict[tuple[SpmmProblem, int], int] = {}


def _compressed(kept: Memo, a: Semi24) -> Tensor:
    """`a` in the library's layout."""
    return kept.of(lambda: torch._cslt_compress(a.to_dense().detach()), a.values, a.meta)


def missing() -> list[str]:
    """What this machine lacks for the library."""
    why = []
    if not torch.cuda.is_available():
        why.append("torch sees no CUDA device here")
    if not torch.backends.cusparselt.is_available():
        why.append(f"torch {torch.__version__} was built without cuSPARSELt")
    return why


class VendorCusparselt:
    """NVIDIA's 2:4 products, through torch."""

    name = "vendor.cusparselt"
    only_by_name = "it keeps a compressed copy of A and times algorithms"

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Reasons of the machine, then of the problem."""
        if foreign := p.a.unless("semi24"):
            return foreign
        why = missing()
        if p.on_cpu:
            why.append("runs on CUDA tensors only")
        elif p.card.capability < (8, 0):
            why.append(f"{p.card.name} has no sparse tensor cores; they came with compute capability 8.0")
        if p.dtype not in ("bf16", "fp16"):
            also = "; it would round float32 to TF32" if p.dtype == "fp32" else ""
            why.append(f"dtype must be bf16 or fp16, not {p.dtype}{also}")
        if p.a.transposed:
            why.append(
                "A stands transposed, and its pairs then lie along the rows of C, where no tensor core takes them"
            )
        if p.m % SPARSE_UNIT or p.k % SPARSE_UNIT or not p.m or not p.k:
            why.append(f"A must have sides that are multiples of {SPARSE_UNIT}, not {p.m} x {p.k}")
        if p.n % DENSE_UNIT:
            why.append(f"N must be a multiple of {DENSE_UNIT}, not {p.n}")
        if not p.b.gapless:
            why.append("B must be contiguous, or the transpose view of a contiguous matrix")
        if not p.aligned:
            why.append("pointers and leading strides must be multiples of 16 bytes")
        return why

    def default(self, p: SpmmProblem) -> CusparseltConfig:
        return CusparseltConfig()

    def configs(self, p: SpmmProblem) -> Iterable[CusparseltConfig]:
        return [CusparseltConfig(), *map(CusparseltConfig, TRIED)]

    def seconds(self, p: SpmmProblem, c: CusparseltConfig) -> float:
        """OVER_DENSE times the dense rate, or the compulsory bytes at 80 % of copy bandwidth, and passes over C."""
        rate = p.card.tflops[p.dtype] * 1e12 * OVER_DENSE
        product = max(p.dense_flops / rate, p.compulsory_bytes / (0.8 * p.card.bandwidth))
        parts = p.has_alpha + bool(p.activation) + bool(p.combine)
        passes = 1 + parts if parts or (p.bias and p.has_alpha) else 0
        finished = 2 * passes * p.m * p.n * p.batch * dtypes.itemsize(p.dtype) / p.card.bandwidth
        return product + finished + (p.batch + passes) * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: CusparseltConfig, a: Semi24) -> Work:
        """Compresses A and times algorithms; both at the first plan of this matrix and of this problem."""
        with torch.no_grad(), torch.cuda.device_of(a.values):
            compressed: Any = _COPIES.setdefault(a.values, Memo())
            packed = _compressed(compressed, a)
            return Work(_algorithm(p, packed) if c.alg_id is None else c.alg_id, compressed)

    def launch(
        self,
        c: CusparseltConfig,
        work: Work,
        a: Semi24,
        b: Tensor,
        out: Tensor,
        epilogue: Epilogue = PLAIN,
    ) -> None:
        if out.numel() == 0:
            return
        by_columns = out.stride(-2) == 1 and out.stride(-1) != 1
        along, rest = _split(epilogue)
        with torch.no_grad():
            made = _products(work, a, b, along, by_columns)
            seen = [z.mT if by_columns else z for z in made]
            z = seen[0] if b.ndim == 2 else torch.stack(seen).view(out.shape)
            out.copy_(z if rest.is_plain else rest.apply(z.float()))

    def make(
        self,
        c: CusparseltConfig,
        work: Work,
        a: Semi24,
        b: Tensor,
        epilogue: Epilogue,
        by_columns: bool,
    ) -> Tensor | None:
        """C row-major ([N, M] if `by_columns`), in the tensor that torch makes; None for a batch of several products,
        or for an epilogue that the library lacks.
        """
        along, rest = _split(epilogue)
        if b.ndim != 2 or not rest.is_plain:
            return None
        with torch.no_grad():
            return _products(work, a, b, along, by_columns)[0]


def _split(epilogue: Epilogue) -> tuple[Tensor | None, Epilogue]:
    """The bias that the library can add, if alpha does not come first, and the rest of the epilogue."""
    if epilogue.alpha != 1:
        return None, epilogue
    return epilogue.bias, replace(epilogue, bias=None)


def _products(work: Work, a: Semi24, b: Tensor, bias: Tensor | None, by_columns: bool) -> list[Tensor]:
    """A @ b [..., K, N] + bias for each item of the batch: [M, N], or [N, M] if `by_columns`, row-major."""
    with torch.cuda.device_of(b):
        packed = _compressed(work.compressed, a)
        # The library reads a bias 16 bytes at a time; an unaligned one ends in a misaligned address (H200,
        # 2026-11-22).
        bias = None if bias is None else readable(bias)
        how = {"bias": bias, "transpose_result": by_columns, "alg_id": work.alg_id}
        return [torch._cslt_sparse_mm(packed, b[at], **how) for at in np.ndindex(*b.shape[:-2])]


def _algorithm(p: SpmmProblem, packed: Tensor) -> int:
    """The fastest of TRIED for `p` on this device; the library's default during graph capture."""
    key = p, packed.device.index
    found = _ALGORITHMS.get(key)
    if found is None:
        if captured(packed):
            return TRIED[0]
        found = _ALGORITHMS[key] = _fastest(p, packed)
        while len(_ALGORITHMS) > REMEMBERED:
            _ALGORITHMS.pop(next(iter(_ALGORITHMS)))
    return found


def _fastest(p: SpmmProblem, packed: Tensor) -> int:
    """Times those of TRIED that the library accepts for `p`, on normally distributed numbers in B's layout."""
    if len(TRIED) == 1:
        return TRIED[0]
    shape = (p.n, p.k) if p.b.layout == "col" else (p.k, p.n)
    b = torch.randn(shape, dtype=packed.dtype, device=packed.device)
    b = b.mT if p.b.layout == "col" else b
    how = {"bias": None, "transpose_result": p.c.layout == "col"}
    calls: dict[int, Callable[[], Tensor]] = {}
    for alg_id in TRIED:
        call = partial(torch._cslt_sparse_mm, packed, b, alg_id=alg_id, **how)
        try:
            call()
        except RuntimeError:  # not an algorithm for this problem
            continue
        calls[alg_id] = call
    named = {str(alg_id): call for alg_id, call in calls.items()}
    times = time_rounds(named, device=packed.device, rounds=3, inner_ms=2.0, settle_ms=0.0)
    return min(calls, key=lambda alg_id: times[str(alg_id)].median, default=TRIED[0])


KERNEL: SpmmKernel = VendorCusparselt()
