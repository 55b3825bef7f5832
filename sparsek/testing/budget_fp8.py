"""How wrong FP8 products may be: twice as wrong as a dense product of the same FP8 values on a tensor core.

Compared are products of the same FP8 values and scales, in float64. What rounding to FP8 itself costs is no part of it:
`Scaled.error` and `ScaledTensor.error` tell that.

The dense product is summed in float32 and rounded to C's dtype. A tensor core is not as good: Hopper's aligns the
products of a step to the largest and keeps some 13 bits below it, before they enter a float32 sum. CORE is what that
costs where no more than a few hundred of K are summed so, the same for every K: relative to C or, where C is what is
left of larger products, to the root of their sum of squares. A kernel that leaves all of a long K to the tensor core
loses bits with every step: with sums cut so, K of 8192 is caught in float32.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.formats.scaled import Scaled
from sparsek.formats.scaled_tensor import ScaledTensor
from sparsek.reference.epilogue import PLAIN, Epilogue, in_float64
from sparsek.reference.scaled import scaled
from sparsek.testing.budget import FACTOR, FLOOR, Gate, error, judge, using_tf32

CORE = 2.0**-11


def check_scaled(
    a: Scaled, b: ScaledTensor, out: Tensor, epilogue: Epilogue = PLAIN, *, core: float = CORE
) -> Gate:
    """Judges out [..., M, N] as the product of `a` and b [..., K, N] with `epilogue`, in any of C's dtypes.

    `epilogue` as in `budget.check_spmm`. core=0 for kernels that sum in float32 throughout.
    """
    with torch.no_grad(), using_tf32(False), dtypes.as_given(out.device):
        exact = scaled(a, b, in_float64(epilogue), torch.float64)
        left, right = a.to_dense(torch.float32), b.dequantize(torch.float32)
        bias, other = (None if x is None else x.float() for x in (epilogue.bias, epilogue.other))
        dense = replace(epilogue, bias=bias, other=other).apply(left @ right).to(out.dtype)
        spread = abs(epilogue.alpha) * (left.square() @ right.square()).sqrt()
        if epilogue.other is not None and epilogue.combine == "mul":
            spread = spread * epilogue.other.float().abs()
        size = float(torch.linalg.vector_norm(exact))
        from_core = core * max(1.0, float(torch.linalg.vector_norm(spread.double())) / size) if size else 0.0
        return judge(out, exact, max(FLOOR, FACTOR * (error(dense, exact) + from_core)))


def check_linear_fp8(
    x: ScaledTensor,
    w: Scaled,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    *,
    core: float = CORE,
) -> Gate:
    """Judges out [..., N] as act(x @ W.T + bias) + residual for x [..., K], as `check_scaled` does with an epilogue."""
    rows = x.rows()
    tokens = rows.shape[0]
    rest = None if residual is None else residual.reshape(tokens, w.shape[0]).mT
    epilogue = Epilogue(bias=bias, activation=activation or "", other=rest)
    return check_scaled(w, rows.mT, out.reshape(tokens, w.shape[0]).mT, epilogue, core=core)
