"""A matrix in each way that A of a product may be stored, and what is expected of its products."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

import sparsek as sk
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.product_budget import check_linear

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TWO_FOUR = ("semi24", "bsr24")
WIDE = ("bsr", *TWO_FOUR)
IN_FP8 = ("bsr_fp8", "semi24_fp8", "bsr24_fp8")
STORAGES = (*WIDE, *IN_FP8)
# An FP8 matrix with a scale for each row stands on the left only.
ON_RIGHT = (*WIDE, "bsr_fp8 tensor", "bsr_fp8 block")
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(WIDE, (BF16, F16, F32, F64)),
    **dict.fromkeys(IN_FP8, (BF16, F16, F32)),
}

# The kernels that run on a CPU, first the one that a plan takes.
KERNELS = {
    "bsr": ("cpu.spmm", "reference.spmm", "vendor.dense"),
    "semi24": ("reference.semi24",),
    "bsr24": ("cpu.bsr24", "reference.bsr24"),
    **dict.fromkeys(IN_FP8, ("reference.spmm_fp8", "vendor.cublas_fp8")),
}

# Their sums are in float32 on a CPU, whatever the dtype; those of cuBLAS are judged by a wider budget.
SUMS_IN_FLOAT32 = {kernel for names in KERNELS.values() for kernel in names} - {"vendor.cublas_fp8"}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda b: b,
    "col": lambda b: b.T.contiguous().T,
    "slice of rows": lambda b: torch.cat((b, b, b), 1)[:, 40:80],
    "slice of a col": lambda b: torch.cat((b, b), 0).T.contiguous().T[: b.shape[0]],
    "every second column": lambda b: b.repeat_interleave(2, 1)[:, ::2],
    "every fourth row": lambda b: b.repeat_interleave(4, 0)[::4],
    "one column for all": lambda b: b[:, :1].expand(-1, 40),
    "one row for all": lambda b: b[:1].expand(b.shape[0], -1),
    "one matrix for all": lambda b: b.expand(3, -1, -1),
    "swapped batches": lambda b: torch.stack([b, -b, b + 1, b * 2, b, b]).view(2, 3, -1, 40).transpose(0, 1),
    "batches of cols": lambda b: torch.stack((b.T, -b.T)).mT,
    "batch innermost": lambda b: torch.stack((b, -b), 2).permute(2, 0, 1),
    "one column": lambda b: b[:, 7:8],
    "seven columns": lambda b: b[:, :7],
    "odd start": lambda b: torch.cat((b.flatten()[:1], b.flatten()))[1:].view(b.shape),
}


def matrix(storage: str, dtype: torch.dtype = BF16, device: str = "cpu", m: int = 128, k: int = 192) -> Any:
    """A random A [128, 192] with about half of its blocks of 64 stored, all of its first block row and a last one.

    "bsr_fp8 block" has a scale for each block, "bsr_fp8" one for each row.
    """
    name, _, scale = storage.partition(" ")
    dense = torch.randn(m, k, device=device)
    if name.startswith("semi24"):
        a: Any = sk.Semi24.from_dense(dense if name in IN_FP8 else dense.to(dtype))
    else:
        mask = torch.rand(-(-m // 64), -(-k // 64), device=device) < 0.6
        mask[0], mask[-1, -1] = True, True
        a = sk.BSR.from_dense(dense if name in IN_FP8 else dense.to(dtype), 64, mask=mask)
        a = sk.BSR24.from_bsr(a) if name.startswith("bsr24") else a
    return sk.quantize(a, scale=cast(Any, scale or "row")) if name in IN_FP8 else a


def twin(a: Any) -> Any:
    """A matrix with other values at the same places."""
    if isinstance(a, sk.Quantized):
        return sk.Quantized.unchecked(a.matrix, 2 * a.scale, a.kind)
    where = (a.pattern,) if isinstance(a, sk.BSR | sk.BSR24) else ()
    return type(a).unchecked(*where, -a.values, *(() if isinstance(a, sk.BSR) else (a.meta,)))


def learning(a: Any) -> Any:
    """The same matrix, whose values ask for a gradient."""
    where = (a.pattern,) if isinstance(a, sk.BSR | sk.BSR24) else ()
    return type(a).unchecked(
        *where, a.values.clone().requires_grad_(), *(() if isinstance(a, sk.BSR) else (a.meta,))
    )


def read(a: Any, b: Tensor) -> Any:
    """b [..., K, N] as its product with `a` reads it: rounded to FP8, a scale for each column, where `a` is in FP8."""
    return sk.quantize(b.mT).mT if isinstance(a, sk.Quantized) else b


def judged(a: Any, b: Tensor, c: Tensor, *epilogue: Any, **how: Any) -> Gate:
    """The gate of c = a @ b."""
    assert c.shape == (*b.shape[:-2], a.shape[0], b.shape[-1])
    return check_spmm(a, read(a, b), c, *epilogue, **how)


def judged_right(x: Tensor, a: Any, y: Tensor, *epilogue: Any, **how: Any) -> Gate:
    """The gate of y = x @ a. `epilogue` is about y.mT."""
    assert y.shape == (*x.shape[:-1], a.shape[1])
    if isinstance(a, sk.Semi24 | sk.BSR24):
        return check_spmm(a, x.mT, y.mT, *epilogue, transposed=True, **how)
    return check_spmm(a.T, read(a, x.mT), y.mT, *epilogue, **how)


def judged_layer(x: Tensor, w: Any, y: Tensor, *more: Any) -> Gate:
    """The gate of y = sk.linear(x, w, *more)."""
    assert y.shape == (*x.shape[:-1], w.shape[0])
    return check_linear(sk.quantize(x) if isinstance(w, sk.Quantized) else x, w, y, *more)
