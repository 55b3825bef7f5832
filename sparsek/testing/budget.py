"""How wrong a result may be: twice as wrong as the dense product in the same precision, or as rounding explains.

Errors are relative, in the Frobenius norm, against the product in float64. The dense product may be lucky: on another
CPU it adds in another order. So no budget lies below what `sum_variance` expects of sums taken one term after another.
Besides, no single element may be off by more than its own roundings explain, or twice the dense product's worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.dense8 import QuantizedTensor
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import Matrix, Quantized
from sparsek.matrix.semi24 import Semi24
from sparsek.reference.bsr24 import bsr24
from sparsek.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue, in_float64
from sparsek.reference.quantized import product as quantized_product
from sparsek.reference.semi24 import semi24
from sparsek.reference.spmm import spmm

FACTOR = 2.0
FLOOR = 1e-12
UNIT = 3 / (8 * math.log(2))  # the mean of (2^floor(log2 x) / x)^2 where the logarithm of x is uniform
ROUNDED = UNIT / 3  # the mean square of one rounding's error, in units of (unit roundoff * |x|)^2
TAIL = 4.0  # standard deviations by which the norm of all errors may be above the expected one
RARE = 1e-6  # how often an element of a right result may be further off than it is allowed to be
TENSOR_CORE = 2.0**-21  # the unit roundoff of sums of 16-bit terms: tensor cores align terms, and cut them
TF32 = 2.0**-10  # the largest relative error of cutting a number to TF32
SLOPE = 1.13  # of the steepest activation, GELU
CORE = 2.0**-11  # what a tensor core's short sums of FP8 cost, see `fp8_bound`
BITS = 13  # that a tensor core keeps of FP8 products below the largest number of a step
# What one rounding to float32 costs at most: twice that for the scale of a row and that of a column.
SCALED = 2.0**-24


@dataclass(frozen=True)
class Gate:
    """The error of a result, what it may be, and whether it holds.

    Where an element is further off than it may be though the whole is not, `error` is the budget times by how much.
    """

    error: float
    budget: float
    passed: bool


def error(out: Tensor, exact64: Tensor, size: float = 0.0) -> float:
    """||out - exact64|| / ||exact64||; 0 for 0/0, and inf for NaN, Inf or anything over zero.

    Both have one shape and device; `exact64` is float64. Where it is 0, errors are relative to `size`. Raises
    InvalidInput if the shapes differ.
    """
    if out.shape != exact64.shape:
        raise InvalidInput(f"out has shape {tuple(out.shape)}; the exact result has {tuple(exact64.shape)}")
    wrong = float(torch.linalg.vector_norm(out.detach().double() - exact64.detach()))
    scale = float(torch.linalg.vector_norm(exact64.detach())) or size
    if wrong == 0:
        return 0.0
    return wrong / scale if scale > 0 and math.isfinite(wrong / scale) else math.inf


def sum_variance(total: Tensor, squares: Tensor, terms: Tensor | int, unit: float) -> Tensor:
    """The expected square of the error of a sum of `terms` products, taken one after another with unit roundoff `unit`.

    `total` S is the sum and `squares` Q^2 the sum of the products' squares, which stays where S cancels. The model is
    that of probabilistic rounding analysis (Higham and Mary, "A new approach to probabilistic rounding error
    analysis", SIAM J. Sci. Comput. 41, 2019; Connolly, Higham and Mary, same journal 43, 2021): fl(x) = x (1 + d) with
    |d| <= u, and a mean of 0 whatever was rounded before. So the errors of steps do not correlate, and their squares
    add up. An error is uniform within half a unit in the last place, and leading digits are distributed evenly by
    their logarithm: the mean of d^2 is u^2 / 3 * 3 / (8 ln 2) = ROUNDED u^2, about (0.42 u)^2.

    A sum of n terms rounds each partial sum s_i, so its error has the variance ROUNDED u^2 sum(s_i^2). Where the order
    has nothing to do with the values, s_i is a sample of i of the n terms without replacement: the mean of s_i^2 is
    (i/n)^2 S^2 + (i/n)(1 - i/n) Q^2, and the sum over i is n (S^2 / 3 + Q^2 / 6). The products' own roundings, where
    they are not fused, add Q^2. For terms of random sign that is 0.3 u sqrt(n) relative to S. Sums taken in pairs, in
    blocks or in several accumulators have fewer steps at each size, and so smaller errors.
    """
    return ROUNDED * unit**2 * (terms * (total.square() / 3 + squares / 6) + squares)


def summing_unit(dtype: torch.dtype) -> float:
    """The unit roundoff of sums of products of this dtype."""
    return TENSOR_CORE if dtype in dtypes.LOW else rounding_unit(dtype)


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to this dtype."""
    return torch.finfo(dtype).eps / 2


def stored_variance(sizes: Tensor, dtype: torch.dtype, unit: float = 0.0) -> Tensor:
    """The expected square of the error of rounding to `dtype`, or with a larger unit roundoff, of numbers of `sizes`,
    which are squares of numbers or sums of such.

    Below the smallest normal number errors are no longer relative, and float32 may be flushed to zero.
    """
    info = torch.finfo(dtype)
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny + info.tiny * info.eps
    return ROUNDED * max(FLOOR, unit, rounding_unit(dtype)) ** 2 * sizes + least**2


@dataclass(frozen=True)
class Rounding:
    """What roundings may do to each element of a result of `dtype`, as variances.

    `sums` is of its sums. `each` is besides of all that may be rounded to `dtype` (or to TF32) on the way: the element,
    the terms that it is summed of, and what an epilogue goes through. None if that is not known.
    """

    sums: Tensor
    each: Tensor | None
    dtype: torch.dtype

    def map(self, move: Callable[[Tensor], Tensor]) -> Rounding:
        """The same of elements that `move` has chosen or laid out otherwise."""
        return Rounding(move(self.sums), None if self.each is None else move(self.each), self.dtype)

    def norm(self, exact64: Tensor) -> float:
        """What the norm of the errors of a right result stays below, however its sums are ordered.

        Independent errors e of standard deviations s have a norm below ||s|| + t max(s) but for exp(-t^2 / 2) of all
        cases, t being TAIL: a norm is 1-Lipschitz. Where rows or columns of an operand are alike, so are errors: for
        those of sums the norm of a row or column takes the place of an element.
        """
        if not exact64.numel():
            return 0.0
        last = ROUNDED * rounding_unit(self.dtype) ** 2 * exact64.square()
        whole = float((self.sums.sum() + last.sum()).sqrt())
        lines = max(float(self.sums.sum(dim).max()) for dim in range(-min(2, exact64.ndim), 0))
        return whole + TAIL * (math.sqrt(lines) + float(last.max().sqrt()))


class Bound:
    """What a result is held to: the exact one, what roundings may do to it, and what dense products in the same
    precision have made of it. `lost` is added to what those may be wrong by, relative.
    """

    def __init__(
        self, exact64: Tensor, rounding: Rounding, dense: Sequence[Tensor], lost: float = 0.0
    ) -> None:
        self.exact = exact64
        self.spread = None if rounding.each is None else rounding.each.sqrt()
        # A sum whose terms cancel to 0 leaves its noise.
        self.size = float(rounding.sums.sum().sqrt())
        whole = float(torch.linalg.vector_norm(exact64)) or self.size
        of_roundings = rounding.norm(exact64) / whole if whole else 0.0
        of_dense = max(error(each, exact64, self.size) for each in dense)
        self.allowed = max(FLOOR, FACTOR * (of_dense + lost), of_roundings)
        self.most = max(
            math.sqrt(2 * math.log(max(1, exact64.numel()) / RARE)),
            FACTOR * max(self._worst(each) for each in dense),
        )

    def judge(self, out: Tensor) -> Gate:
        """The gate of a result. NaN and Inf never pass."""
        gate = _gate(error(out, self.exact, self.size), self.allowed)
        beyond = self._worst(out) / self.most
        return gate if not gate.passed or beyond <= 1 else Gate(self.allowed * beyond, self.allowed, False)

    def _worst(self, out: Tensor) -> float:
        """The largest error of an element in its standard deviations."""
        if self.spread is None or not self.exact.numel():
            return 0.0
        wrong = (out.detach().double() - self.exact).abs()
        worst = float((wrong / self.spread).masked_fill(wrong == 0, 0).max())
        return worst if math.isfinite(worst) else math.inf


def product_rounding(
    left: Tensor, right: Tensor, dtype: torch.dtype, epilogue: Epilogue = PLAIN, *, tf32: bool = False
) -> Rounding:
    """What roundings may do to left [M, K] @ right [..., K, N] with `epilogue`, stored in `dtype`.

    Sums are of products of the operands' dtype, and zeros in `left` are no terms.
    """
    summing = summing_unit(left.dtype)
    unit = TF32 if tf32 and left.dtype == torch.float32 else 0.0
    wide = torch.promote_types(left.dtype, torch.float32)
    left, right = left.to(wide), right.to(wide)
    tall, broad = (float(x.abs().max()) or 1.0 if x.numel() else 1.0 for x in (left, right))
    stretch = (tall * broad) ** 2
    squares = ((left / tall).square() @ (right / broad).square()).double() * stretch
    z = (left @ right).double()
    variance = sum_variance(z, squares, (left != 0).sum(-1, keepdim=True), summing)
    if epilogue.is_plain:
        return Rounding(variance, variance + stored_variance(squares + z.square(), dtype, unit), dtype)
    then = in_float64(epilogue)
    scaled = then.alpha * z
    biased = scaled if then.bias is None else scaled + then.bias[:, None]
    active = ACTIVATIONS[then.activation](biased)
    gain = torch.full_like(z, SLOPE if then.activation else 1.0)
    size = active.square()
    if then.other is not None and then.combine == "mul":
        gain, size = gain * then.other, size * then.other.square()
    elif then.other is not None:
        joined = then.beta * then.other
        size = size + joined.square() + (active + joined).square()
    size = size + gain.square() * (then.alpha**2 * (squares + z.square()) + biased.square())
    # The epilogue's own steps, of which an activation takes several, are as exact as the sums.
    variance = (then.alpha * gain).square() * variance + 4 * ROUNDED * summing**2 * size
    return Rounding(variance, variance + stored_variance(size, dtype, unit), dtype)


def product_bound(
    left: Tensor, right: Tensor, exact64: Tensor, epilogue: Epilogue = PLAIN, *, tf32: bool = False
) -> Bound:
    """What left [M, K] @ right [..., K, N] with `epilogue` is held to in the operands' dtype, on their device.

    The dense product is that of torch.matmul, then the epilogue. float32 is multiplied without TF32 unless `tf32`.
    """
    with torch.no_grad(), dtypes.as_given(right.device):
        with using_tf32(tf32):
            dense = epilogue.apply(torch.matmul(left, right))
        with using_tf32(False):
            rounding = product_rounding(left, right, dense.dtype, epilogue, tf32=tf32)
        return Bound(exact64, rounding, [dense])


def budget(
    a_dense: Tensor, b: Tensor, exact64: Tensor, epilogue: Epilogue = PLAIN, *, tf32: bool = False
) -> float:
    """The relative error that the product may have, as in `product_bound`; 1e-12 at least."""
    return product_bound(a_dense, b, exact64, epilogue, tf32=tf32).allowed


def check_spmm(
    a: Matrix | Quantized,
    b: Tensor | QuantizedTensor,
    out: Tensor,
    epilogue: Epilogue = PLAIN,
    *,
    transposed: bool = False,
    tf32: bool = False,
    core: float = CORE,
) -> Gate:
    """Judges out [..., M, N] as the product of `a`, or its transpose, and b [..., K, N] against float64.

    `epilogue` is what was done to the product; where its other matrix was written over, it must be given a copy made
    before. Rows of b that meet no stored block may hold anything, NaN too: they are no part of the product. `core` is
    of FP8 operands, as in `fp8_bound`.
    """
    with torch.no_grad():
        if isinstance(a, Quantized):
            assert isinstance(b, QuantizedTensor)
            return fp8_bound(a, b, out.dtype, epilogue, core=core).judge(out)
        assert isinstance(b, Tensor)
        wide, b64, then = a.to(dtype=torch.float64), b.double(), in_float64(epilogue)
        if isinstance(wide, Semi24):
            exact = semi24(wide, b64, then, transposed=transposed)
        else:
            if isinstance(wide, BSR24):
                exact = bsr24(wide, b64, then, transposed=transposed)
            else:
                exact = spmm(wide.T if transposed else wide, b64, then)
            b = met(wide.pattern.T if transposed else wide.pattern, b)
        dense = a.to_dense().mT if transposed else a.to_dense()
        return product_bound(dense, b, exact, epilogue, tf32=tf32).judge(out)


def fp8_bound(
    a: Quantized,
    b: QuantizedTensor,
    dtype: torch.dtype,
    epilogue: Epilogue = PLAIN,
    *,
    core: float = CORE,
) -> Bound:
    """What the product of `a` and b [..., K, N] with `epilogue` is held to in C's `dtype`.

    Compared are products of the same FP8 values and scales, in float64. What rounding to FP8 itself costs is no part of
    it: `Quantized.error` and `QuantizedTensor.error` tell that.

    The dense product is summed in float32 and rounded to C's dtype. A tensor core is not as good: Hopper's aligns the
    products of a step to the largest and keeps some 13 bits below it, before they enter a float32 sum. `core` is what
    that costs where no more than a few hundred of K are summed so, the same for every K: relative to C or, where C is
    what is left of larger products, to the root of their sum of squares. A kernel that leaves all of a long K to the
    tensor core loses bits with every step: with sums cut so, K of 8192 is caught in float32. Where the matrix allows
    that, by its `fast_accum`, `tensor_core_error` says what such a sum loses, and takes the place of `core` where it is
    more.

    core=0 for kernels that sum in float32 throughout, whatever a.fast_accum is: they may still multiply a sum with its
    scales, which the dense product has in its values. Of few elements that is more than twice the error of the dense
    product.
    """
    with torch.no_grad(), using_tf32(False), dtypes.as_given(b.device):
        exact = quantized_product(a, b, in_float64(epilogue), torch.float64)
        left, right = a.to_dense(torch.float32), b.dequantize(torch.float32)
        bias, other = (None if x is None else x.float() for x in (epilogue.bias, epilogue.other))
        dense = replace(epilogue, bias=bias, other=other).apply(left @ right).to(dtype)
        lost = core * (left.square() @ right.square()).sqrt()
        if core and a.fast_accum:
            lost = torch.maximum(lost, tensor_core_error(left, right))
        lost = abs(epilogue.alpha) * lost
        if epilogue.other is not None and epilogue.combine == "mul":
            lost = lost * epilogue.other.float().abs()
        size = float(torch.linalg.vector_norm(exact))
        from_core = max(core, SCALED, float(torch.linalg.vector_norm(lost.double())) / size) if size else 0.0
        rounding = product_rounding(left, right, dtype, epilogue)
        assert rounding.each is not None
        # What a tensor core cuts from a sum depends on the walk of that sum, and all cuts go one way: no Gaussian.
        cut = FACTOR * lost.double() if core and a.fast_accum else lost.double()
        each = rounding.each + cut.square() + (core * exact).square()
        return Bound(exact, replace(rounding, each=each), [dense], from_core)


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


def met(pattern: BlockPattern, b: Tensor) -> Tensor:
    """b [..., K, N] with zeros in the rows that meet no stored block of the pattern of A [M, K]."""
    touched = torch.zeros(pattern.grid[1], dtype=torch.bool, device=b.device)
    touched[pattern.indices] = True
    return b.masked_fill(~touched.repeat_interleave(pattern.block[1])[: pattern.shape[1], None], 0)


def judge(out: Tensor, exact64: Tensor, allowed: float) -> Gate:
    """The gate of a result whose error may be `allowed`. An infinite error never passes."""
    return _gate(error(out, exact64), allowed)


def _gate(found: float, allowed: float) -> Gate:
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
