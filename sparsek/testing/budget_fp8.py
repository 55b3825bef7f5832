"""How wrong FP8 products may be: twice as wrong as a dense product of the same FP8 values on a tensor core.

Compared are products of the same FP8 values and scales, in float64. What rounding to FP8 itself costs is no part of it:
`Quantized.error` and `QuantizedTensor.error` tell that.

The dense product is summed in float32 and rounded to C's dtype. A tensor core is not as good: Hopper's aligns the
products of a step to the largest and keeps some 13 bits below it, before they enter a float32 sum. CORE is what that
costs where no more than a few hundred of K are summed so, the same for every K: relative to C or, where C is what is
left of larger products, to the root of their sum of squares. A kernel that leaves all of a long K to the tensor core
loses bits with every step: with sums cut so, K of 8192 is caught in float32. Where the matrix allows that, by its
`fast_accum`, `tensor_core_error` says what such a sum loses, and takes the place of CORE where it is more.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.quantized import Quantized
from sparsek.reference.epilogue import PLAIN, Epilogue, in_float64
from sparsek.reference.quantized import product
from sparsek.testing.budget import FACTOR, UNIT, Bound, Gate, product_rounding, using_tf32

CORE = 2.0**-11
SCALED = (
    2.0**-24
)  # what one rounding to float32 costs at most: twice that for the scale of a row and that of a column
BITS = 13  # that a tensor core keeps below the largest number of a step


def check_quantized(
    a: Quantized, b: QuantizedTensor, out: Tensor, epilogue: Epilogue = PLAIN, *, core: float = CORE
) -> Gate:
    """Judges out [..., M, N] as the product of `a` and b [..., K, N] with `epilogue`, in any of C's dtypes.

    `epilogue` as in `budget.check_spmm`. core=0 for kernels that sum in float32 throughout, whatever a.fast_accum is:
    they may still multiply a sum with its scales, which the dense product has in its values. Of few elements that is
    more than twice the error of the dense product.
    """
    with torch.no_grad(), using_tf32(False), dtypes.as_given(out.device):
        exact = product(a, b, in_float64(epilogue), torch.float64)
        left, right = a.to_dense(torch.float32), b.dequantize(torch.float32)
        bias, other = (None if x is None else x.float() for x in (epilogue.bias, epilogue.other))
        dense = replace(epilogue, bias=bias, other=other).apply(left @ right).to(out.dtype)
        lost = core * (left.square() @ right.square()).sqrt()
        if core and a.fast_accum:
            lost = torch.maximum(lost, tensor_core_error(left, right))
        lost = abs(epilogue.alpha) * lost
        if epilogue.other is not None and epilogue.combine == "mul":
            lost = lost * epilogue.other.float().abs()
        size = float(torch.linalg.vector_norm(exact))
        from_core = max(core, SCALED, float(torch.linalg.vector_norm(lost.double())) / size) if size else 0.0
        rounding = product_rounding(left, right, out.dtype, epilogue)
        assert rounding.each is not None
        # What a tensor core cuts from a sum depends on the walk of that sum, and all cuts go one way: no Gaussian.
        cut = FACTOR * lost.double() if core and a.fast_accum else lost.double()
        each = rounding.each + cut.square() + (core * exact).square()
        rounding = replace(rounding, each=each)
        return Bound(exact, rounding, [dense], from_core).judge(out)


def tensor_core_error(left: Tensor, right: Tensor) -> Tensor:
    """How wrong each element of left [M, K] @ right [..., K, N] may be expected where a tensor core keeps all of a sum.

    A step aligns its products with the running sum s to the largest of them and cuts each towards zero, BITS below it
    (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science, 2021, for the cut; DeepSeek-V3,
    arXiv:2412.19437, 3.3.2, for the bits). With unit u = 2^(floor(log2 |s|) - BITS) a product loses u / 2 on average,
    with a variance of u^2 / 12. Of n products that are not zero, of which d more are positive than negative, the sum
    so loses about sqrt(n / 12 + d^2 / 4) u. On its way to S, in steps in any order, s^2 is S^2 / 3 + Q^2 / 6 on
    average, Q^2 being the sum of the products' squares: a walk that ends at S. For products of random sign this makes
    2^-13 sqrt(K / 11) relative to S. That is 1.3 to 2.3 times what a model of the cut loses from K = 8192 on, and more
    for short sums, whose products are often whole units.
    """
    n = (left != 0).float() @ (right != 0).float()
    d = left.sign() @ right.sign()
    square = (left @ right).square() / 3 + (left.square() @ right.square()) / 6
    return 2.0**-BITS * (UNIT * square * (n / 12 + d.square() / 4)).sqrt()


def check_linear_fp8(
    x: QuantizedTensor,
    w: Quantized,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    *,
    core: float = CORE,
) -> Gate:
    """Judges out [..., N] as act(x @ W.T + bias) + residual for x [..., K], as `check_quantized` does."""
    rows = x.rows()
    tokens = rows.shape[0]
    rest = None if residual is None else residual.reshape(tokens, w.shape[0]).mT
    epilogue = Epilogue(bias=bias, activation=activation or "", other=rest)
    return check_quantized(w, rows.mT, out.reshape(tokens, w.shape[0]).mT, epilogue, core=core)
