"""C = A @ B for FP8 operands with scales, and an epilogue: the specification, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Matrix, Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.bsr24 import bsr24
from sparsek.products.reference.epilogue import PLAIN, Epilogue, check_epilogue, in_float64
from sparsek.products.reference.semi24 import semi24
from sparsek.products.reference.spmm import spmm


def product(
    a: Quantized, b: QuantizedTensor, epilogue: Epilogue = PLAIN, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """C[m, n] = epilogue(scale_A * scale_B * sum over k of A8[m, k] B8[k, n]), in `dtype`.

    `a` is [M, K], `b` [..., K, N]; C is [..., M, N], contiguous. The epilogue's tensors have `dtype`. Both operands
    are multiplied by their scales in float64, which is exact. Everything is summed in float64 and rounded once at the
    end. Raises InvalidInput for shapes, dtypes or devices that do not fit. No gradients.
    """
    if not isinstance(a, Quantized) or not isinstance(b, QuantizedTensor):
        raise InvalidInput(
            f"needs a Quantized and a QuantizedTensor, got {type(a).__name__} and {type(b).__name__}"
        )
    if b.ndim < 2 or b.shape[-2] != a.shape[1]:
        raise InvalidInput(f"A is {list(a.shape)} and b {list(b.shape)}; it needs [..., {a.shape[1]}, N]")
    check_epilogue(epilogue, (*b.shape[:-2], a.shape[0], b.shape[-1]), dtype, b.device)
    wide, dense, then = a.dequantize(torch.float64), b.dequantize(torch.float64), in_float64(epilogue)
    return product_of(wide, dense, then).to(dtype)


def product_of(a: Matrix, b: Tensor, epilogue: Epilogue = PLAIN, *, transposed: bool = False) -> Tensor:
    """C = A @ B, or A.T @ B if `transposed`, by the specification for A's format."""
    if isinstance(a, Semi24):
        return semi24(a, b, epilogue, transposed=transposed)
    if isinstance(a, BSR24):
        return bsr24(a, b, epilogue, transposed=transposed)
    return spmm(a.T if transposed else a, b, epilogue)
