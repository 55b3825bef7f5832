"""How wrong a result may be: twice as wrong as the dense product in the same precision, and no more.

Errors are relative, in the Frobenius norm, against the product in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern
from sparsek.reference.epilogue import PLAIN, Epilogue, in_float64
from sparsek.reference.spmm import spmm

FACTOR = 2.0
FLOOR = 1e-12


@dataclass(frozen=True)
class Gate:
    """The error of a result, what it may be, and whether it holds."""

    error: float
    budget: float
    passed: bool


def error(out: Tensor, exact64: Tensor) -> float:
    """||out - exact64|| / ||exact64||; 0 for 0/0, and inf for NaN, Inf or anything over zero.

    Both have one shape and device; `exact64` is float64. Raises InvalidInput if the shapes differ.
    """
    if out.shape != exact64.shape:
        raise InvalidInput(f"out has shape {tuple(out.shape)}; the exact result has {tuple(exact64.shape)}")
    wrong = float(torch.linalg.vector_norm(out.detach().double() - exact64.detach()))
    scale = float(torch.linalg.vector_norm(exact64.detach()))
    if wrong == 0:
        return 0.0
    return wrong / scale if scale > 0 and math.isfinite(wrong / scale) else math.inf


def budget(
    a_dense: Tensor, b: Tensor, exact64: Tensor, epilogue: Epilogue = PLAIN, *, tf32: bool = False
) -> float:
    """Twice the error of torch.matmul and the epilogue in the inputs' own dtype, on their device; 1e-12 at least.

    float32 is multiplied without TF32 unless `tf32` is set. `b` is [..., K, N].
    """
    with using_tf32(tf32), torch.no_grad(), dtypes.as_given(b.device):
        dense = epilogue.apply(torch.matmul(a_dense, b))
    return max(FLOOR, FACTOR * error(dense, exact64))


def check_spmm(a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN, *, tf32: bool = False) -> Gate:
    """Judges out [..., M, N] as the product of `a` and b [..., K, N] against the reference in float64.

    `epilogue` is what was done to the product; where its other matrix was written over, it must be given a copy made
    before. Rows of b that meet no stored block may hold anything, NaN too: they are no part of the product.
    """
    with torch.no_grad():
        exact = spmm(a.to(dtype=torch.float64), b.double(), in_float64(epilogue))
        allowed = budget(a.to_dense(), met(a.pattern, b), exact, epilogue, tf32=tf32)
        return judge(out, exact, allowed)


def met(pattern: BlockPattern, b: Tensor) -> Tensor:
    """b [..., K, N] with zeros in the rows that meet no stored block of the pattern of A [M, K]."""
    touched = torch.zeros(pattern.grid[1], dtype=torch.bool, device=b.device)
    touched[pattern.indices] = True
    return b.masked_fill(~touched.repeat_interleave(pattern.block[1])[: pattern.shape[1], None], 0)


def judge(out: Tensor, exact64: Tensor, allowed: float) -> Gate:
    """The gate of a result whose error may be `allowed`. An infinite error never passes."""
    found = error(out, exact64)
    return Gate(found, allowed, math.isfinite(found) and found <= allowed)


@contextmanager
def using_tf32(allow: bool) -> Iterator[None]:
    """Inside, torch multiplies float32 on a GPU as TF32, or as float32 (IEEE)."""
    # The older switch, allow_tf32, raises once the newer one has been used.
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    if (before == "tf32") == allow:
        yield
        return
    matmul.fp32_precision = "tf32" if allow else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before
