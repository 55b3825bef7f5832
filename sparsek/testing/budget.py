"""Error budgets of products: twice the error of the dense product in the same precision, or what rounding explains.

Errors are relative, in the Frobenius norm, against the product in float64. The dense product may be accurate by
chance: another CPU adds in another order. So no budget lies below what `sum_variance` expects of sums taken one term
after another. Moreover, no single element may have an error beyond its own roundings, or twice the dense product's
worst.
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
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import Matrix, Quantized
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.reference.epilogue import ACTIVATIONS, PLAIN, Epilogue, in_float64
from sparsek.products.reference.quantized import product as quantized_product
from sparsek.products.reference.quantized import product_of

FACTOR = 2.0
FLOOR = 1e-12
UNIT = 3 / (8 * math.log(2))  # the mean of (2^floor(log2 x) / x)^2 where the logarithm of x is uniform
ROUNDED = UNIT / 3  # the mean square of one rounding's error, in units of (unit roundoff * |x|)^2
TAIL = 4.0  # standard deviations by which the norm of all errors may exceed the expected one
RARE = 1e-6  # how often an element of a right result may have more than its allowed error
TENSOR_CORE = 2.0**-21  # the unit roundoff of sums of 16-bit terms: tensor cores align and truncate terms
TF32 = 2.0**-10  # the largest relative error of truncating a number to TF32
SLOPE = 1.13  # of the steepest activation, GELU
CORE = 2.0**-11  # the error of a tensor core's short sums of FP8, see `fp8_bound`
BITS = 13  # that a tensor core keeps of FP8 products below the largest number of a step
# The largest error of one rounding to float32, twice: for the scale of a row and that of a column.
SCALED = 2.0**-24


@dataclass(frozen=True)
class Gate:
    """The error of a result, its budget, and whether it holds.

    If only single elements exceed their budgets, `error` is the budget times the worst excess.
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
    """The expected square of the error of a sum of `terms` products, taken one after another with unit roundoff
    `unit`.

    `total` S is the sum and `squares` Q^2 the sum of the products' squares, which stays if S cancels. The model is
    that of probabilistic rounding analysis (Higham and Mary, "A new approach to probabilistic rounding error
    analysis", SIAM J. Sci. Comput. 41, 2019; Connolly, Higham and Mary, same journal 43, 2021): fl(x) = x (1 + d)
    with |d| <= u, and a mean of 0 whatever was rounded before. So the errors of steps do not correlate, and their
    squares add up. An error is uniform within half a unit in the last place, and leading digits are distributed
    evenly by their logarithm: the mean of d^2 is u^2 / 3 * 3 / (8 ln 2) = ROUNDED u^2, about (0.42 u)^2.

    A sum of n terms rounds each partial sum s_i, so its error has the variance ROUNDED u^2 sum(s_i^2). If the order
    is independent of the values, s_i is a sample of i of the n terms without replacement: the mean of s_i^2 is
    (i/n)^2 S^2 + (i/n)(1 - i/n) Q^2, and the sum over i is n (S^2 / 3 + Q^2 / 6). The products' own roundings, if not
    fused, add Q^2. For terms of random sign that is 0.3 u sqrt(n) relative to S. Sums taken in pairs, in blocks or in
    several accumulators have fewer steps at each size, and so smaller errors. `sum_tail` is how far single errors go.
    """
    return ROUNDED * unit**2 * (terms * (total.square() / 3 + squares / 6) + squares)


def sum_tail(rarity: float) -> float:
    """How many standard deviations of `sum_variance` an error exceeds with a probability of exp(-rarity) at most.

    Of a Gaussian these are sqrt(2 rarity). But the variance is a mean over orders: partial sums that go far before
    they cancel are rounded more coarsely. If terms have random signs and cancel, partial sums are a Brownian bridge b,
    and with its integral I of b^2, whose mean is 1/6, the variance is proportional to I. E exp(x^2 I / 2) is
    sqrt(x / sin x) for x < pi (Anderson and Darling, Ann. Math. Statist. 23, 1952), so Chernoff's bound of m standard
    deviations is exp(-m x / sqrt(6)) sqrt(x / sin x): exponential, not Gaussian. This is m for the best x.
    """
    slopes = (math.pi * at / 256 for at in range(1, 256))
    return min(math.sqrt(6) * (rarity + math.log(x / math.sin(x)) / 2) / x for x in slopes)


def summing_unit(dtype: torch.dtype) -> float:
    """The unit roundoff of sums of products of this dtype."""
    return TENSOR_CORE if dtype in dtypes.LOW else rounding_unit(dtype)


def rounding_unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to this dtype."""
    return torch.finfo(dtype).eps / 2


def stored_variance(sizes: Tensor, dtype: torch.dtype, unit: float = 0.0) -> Tensor:
    """The expected square of the error of rounding to `dtype`, or with a larger unit roundoff, of numbers of `sizes`,
    which are squares of numbers or sums of squares.

    Below the smallest normal number errors are no longer relative, and float32 may be flushed to zero.
    """
    info = torch.finfo(dtype)
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).tiny + info.tiny * info.eps
    return ROUNDED * max(FLOOR, unit, rounding_unit(dtype)) ** 2 * sizes + least**2


@dataclass(frozen=True)
class Rounding:
    """Rounding errors of each element of a result of `dtype`, as variances.

    `sums` is of its sums. `each` is of everything else that may be rounded to `dtype` (or to TF32): the element, its
    terms, and the steps of an epilogue. None if that is unknown.
    """

    sums: Tensor
    each: Tensor | None
    dtype: torch.dtype

    def map(self, move: Callable[[Tensor], Tensor]) -> Rounding:
        """The same after `move` has selected or rearranged elements."""
        return Rounding(move(self.sums), None if self.each is None else move(self.each), self.dtype)

    def norm(self, exact64: Tensor) -> float:
        """A bound of the norm of the errors of a right result, whatever the order of its sums.

        Independent Gaussian errors e of standard deviations s have a norm below ||s|| + t max(s) except with
        probability exp(-t^2 / 2), t being TAIL: a norm is 1-Lipschitz. Errors of sums have the longer tail of
        `sum_tail` in place of t. If rows or columns of an operand are alike, so are errors: for those of sums the norm
        of a row or column replaces that of an element.
        """
        if not exact64.numel():
            return 0.0
        last = ROUNDED * rounding_unit(self.dtype) ** 2 * exact64.square()
        whole = float((self.sums.sum() + last.sum()).sqrt())
        lines = max(float(self.sums.sum(dim).max()) for dim in range(-min(2, exact64.ndim), 0))
        return whole + sum_tail(TAIL**2 / 2) * math.sqrt(lines) + TAIL * float(last.max().sqrt())


class Bound:
    """The bound of a result: the exact result, its rounding errors, and the dense products in the same precision.
    `lost` is added to the allowed errors of those, relative.
    """

    def __init__(
        self, exact64: Tensor, rounding: Rounding, dense: Sequence[Tensor], lost: float = 0.0
    ) -> None:
        self.exact = exact64
        rarity = math.log(max(1, exact64.numel()) / RARE)
        gaussian = math.sqrt(2 * rarity)
        longer = (sum_tail(rarity) / gaussian) ** 2 - 1  # as a variance, beside errors that are Gaussian
        self.spread = None if rounding.each is None else (rounding.each + longer * rounding.sums).sqrt()
        # A sum whose terms cancel to 0 leaves its rounding noise.
        self.size = float(rounding.sums.sum().sqrt())
        whole = float(torch.linalg.vector_norm(exact64)) or self.size
        of_roundings = rounding.norm(exact64) / whole if whole else 0.0
        of_dense = max(error(each, exact64, self.size) for each in dense)
        self.allowed = max(FLOOR, FACTOR * (of_dense + lost), of_roundings)
        self.most = max(gaussian, FACTOR * max(self._worst(each) for each in dense))

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
    """Rounding errors of left [M, K] @ right [..., K, N] with `epilogue`, stored in `dtype`.

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
    # The steps of the epilogue, several for an activation, are as exact as the sums.
    variance = (then.alpha * gain).square() * variance + 4 * ROUNDED * summing**2 * size
    return Rounding(variance, variance + stored_variance(size, dtype, unit), dtype)


def product_bound(
    left: Tensor, right: Tensor, exact64: Tensor, epilogue: Epilogue = PLAIN, *, tf32: bool = False
) -> Bound:
    """The bound of left [M, K] @ right [..., K, N] with `epilogue` in the operands' dtype, on their device.

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

    `epilogue` is the one that was applied; if its other matrix was overwritten, pass a copy made before. Rows of b
    without a stored block may hold anything, NaN too: they are not part of the product. `core` is for FP8 operands,
    as in `fp8_bound`.
    """
    with torch.no_grad():
        if isinstance(a, Quantized):
            assert isinstance(b, QuantizedTensor)
            return fp8_bound(a, b, out.dtype, epilogue, core=core).judge(out)
        assert isinstance(b, Tensor)
        wide, b64, then = a.to(dtype=torch.float64), b.double(), in_float64(epilogue)
        exact = product_of(wide, b64, then, transposed=transposed)
        if not isinstance(wide, Semi24):
            b = met(wide.pattern.T if transposed else wide.pattern, b)
        dense = a.to_dense().mT if transposed else a.to_dense()
        return product_bound(dense, b, exact, epilogue, tf32=tf32).judge(out)


def fp8_bound(
    a: Quantized, b: QuantizedTensor, dtype: torch.dtype, epilogue: Epilogue = PLAIN, *, core: float = CORE
) -> Bound:
    """The bound of the product of `a` and b [..., K, N] with `epilogue` in C's `dtype`.

    Products of the same FP8 values and scales are compared, in float64. The error of rounding to FP8 itself is not
    included: see `Quantized.error` and `QuantizedTensor.error`.

    The dense product is summed in float32 and rounded to C's dtype. A tensor core is less accurate: Hopper's aligns
    the products of a step to the largest and keeps some 13 bits below it, before they enter a float32 sum. `core` is
    the error of that for sums over at most a few hundred of K, the same for every K. It is relative to C or, if C is
    a small difference of larger products, to the root of their sum of squares. A kernel that leaves all of a long K
    to the tensor core loses bits with every step, and exceeds this bound for K of 8192. If the matrix
    allows it, by its `fast_accum`, the larger of `core` and `tensor_core_error` applies.

    core=0 for kernels that sum in float32 throughout, whatever a.fast_accum is. They may still multiply a sum with
    its scales, which the dense product has in its values. For few elements that is more than twice the error of the
    dense product.
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
        # A tensor core's truncation depends on the order of the sum, and always rounds towards zero: no Gaussian.
        cut = FACTOR * lost.double() if core and a.fast_accum else lost.double()
        each = rounding.each + cut.square() + (core * exact).square()
        return Bound(exact, replace(rounding, each=each), [dense], from_core)


def tensor_core_error(left: Tensor, right: Tensor) -> Tensor:
    """The expected error of each element of left [M, K] @ right [..., K, N] if a tensor core keeps all of a sum.

    A step aligns its products with the running sum s to the largest of them and truncates each, BITS below it (Fasi
    et al., "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science, 2021, for the truncation;
    DeepSeek-V3, arXiv:2412.19437, 3.3.2, for the bits). With unit u = 2^(floor(log2 |s|) - BITS) a product loses u /
    2 on average, with a variance of u^2 / 12. Of n nonzero products with d more positive than negative ones, the sum
    so loses about sqrt(n / 12 + d^2 / 4) u. On its way to S, in steps in any order, s^2 is S^2 / 3 + Q^2 / 6 on
    average, Q^2 being the sum of the products' squares: a walk that ends at S. For products of random sign this makes
    2^-13 sqrt(K / 11) relative to S. That is 1.3 to 2.3 times the loss in a model of the truncation from K = 8192 on,
    and more for short sums, whose products are often whole units.
    """
    n = (left != 0).float() @ (right != 0).float()
    d = left.sign() @ right.sign()
    square = (left @ right).square() / 3 + (left.square() @ right.square()) / 6
    return 2.0**-BITS * (UNIT * square * (n / 12 + d.square() / 4)).sqrt()


def met(pattern: BlockPattern, b: Tensor) -> Tensor:
    """b [..., K, N] with zeros in the rows without a stored block in the pattern of A [M, K]."""
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
