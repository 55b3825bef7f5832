"""Quantized, a BSR, Semi24 or BSR24 with FP8 values and float32 scales; and `quantize`.

The number formats, rounding and scales are in `products/formats/float8.py`, the dense FP8 operand in
`products/formats/quantized_tensor.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeAlias, get_args, overload

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.record import Record, record
from sparsek.core.tracing import check_has_values, of_values
from sparsek.products.formats import two_four
from sparsek.products.formats.base import Matrix as AnyMatrix
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.float8 import NAMES, largest_of, relative_error, rounded, scales_of
from sparsek.products.formats.quantized_tensor import SCALES as DENSE_SCALES
from sparsek.products.formats.quantized_tensor import (
    DenseScale,
    QuantizedTensor,
    check_finite,
    check_fp8_values,
    check_scale,
    quantize_dense,
)
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.storage import Parts, Signature, Storage

# Here a format is registered: products, files and type checkers read it. By the `Storage.kind`, the class.
Matrix: TypeAlias = BSR | Semi24 | BSR24
FORMATS: dict[str, Any] = {each.__name__.lower(): each for each in get_args(Matrix)}

Scale: TypeAlias = Literal["tensor", "row", "block"]
SCALES = get_args(Scale)
NOT_PICKLED = "a Quantized is not pickled; use sparsek.save(q, 'file.safetensors')"


@overload
def quantize(
    a: Matrix,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Scale = "row",
    *,
    fast_accum: bool = False,
    check: bool = True,
) -> Quantized: ...


@overload
def quantize(
    a: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, scale: DenseScale = "row", *, check: bool = True
) -> QuantizedTensor: ...


def quantize(
    a: Matrix | Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Scale = "row",
    *,
    fast_accum: bool = False,
    check: bool = True,
) -> Quantized | QuantizedTensor:
    """Round a sparse matrix or a dense tensor to FP8, with float32 scales.

    A scale maps the largest magnitude of the values that share it to the largest FP8 number. Values are rounded to
    nearest, ties to even. The result is outside autograd.

    Args:
        a: A BSR, Semi24 or BSR24 [M, K], whose pattern or metadata is shared, or a dense tensor [..., K]. A transposed
            view of a BSR gives a view.
        dtype: torch.float8_e4m3fn (up to 448, 3 mantissa bits) or torch.float8_e5m2 (up to 57344, 2 mantissa bits).
        scale: What shares a scale: each "row", the whole "tensor", or each "block" of a BSR or BSR24. A dense tensor
            has one for each row of K values, or one for all.
        fast_accum: Let products of this matrix accumulate in the tensor cores, in about 14 bits, which is faster and
            less accurate the larger K is; see `Quantized`. Not for a scale per block, and not for a dense tensor.
        check: Refuse NaN and Inf, with one sync. Without it there is none, and a NaN or Inf makes NaN of all
            values that share its scale. torch.compile traces check=False only.

    Returns:
        A Quantized for a sparse matrix, a QuantizedTensor for a dense tensor.

    Raises:
        InvalidInput: For NaN and Inf, and for float64 values whose scale overflows float32: the message has their
            number and the position of the first. For a scale per row of a transposed view, or per block of a Semi24.

    Examples:
        >>> A = sk.random_bsr(256, 256, block=64, density=0.5)
        >>> q = sk.quantize(A)
        >>> q
        Quantized(BSR 256x256 e4m3, block 64x64, 8 of 16 blocks, 50 %, scale per row, 0.0338 MB, cpu)
        >>> q.error(A) < 0.03
        True
    """
    arguments.dtype("dtype", dtype, NAMES)
    check = arguments.flag("check", check)
    if isinstance(a, Tensor):
        arguments.one_of("scale", scale, DENSE_SCALES)
        if arguments.tensor("x", a, dtypes.FLOATS).ndim < 1:
            raise InvalidInput("x must be [..., K], got a single number")
        if arguments.flag("fast_accum", fast_accum):
            raise InvalidInput(
                "how a product sums is up to its sparse matrix: write fast_accum=True where that one is quantized"
            )
        return quantize_dense(a, dtype, scale, check)
    if not isinstance(a, Matrix):
        raise InvalidInput(f"expected a BSR, Semi24, BSR24 or dense torch.Tensor, got {arguments.shown(a)}")
    _check_kind(a, scale, "scale")
    arguments.dtype("the dtype of a", a.dtype)
    _check_fast_accum(fast_accum, scale)
    values = a.values.detach()
    parts = _largest(values, scale)
    if check:
        check_finite(values, parts, dtype, "stored values", lambda at: _place(a, at))
    scales = scales_of(_joined(a, parts, scale), dtype)
    made = rounded(values / _stretched(a, scales, scale), dtype)
    return Quantized.unchecked(a._each(lambda _: made), scales, scale, fast_accum)


@record(leaves=("matrix", "scale"), own=("matrix", "scale"), picklable=NOT_PICKLED)
@dataclass(frozen=True, eq=False, repr=False)
class Quantized(AnyMatrix, Record):
    """A BSR, Semi24 or BSR24 with FP8 values and float32 scales. `sparsek.quantize` makes one.

    `A @ B`, `B @ A` and `sparsek.linear(x, A)` multiply it with a dense tensor, which gets a gradient. It is
    frozen, and a pytree node. Construction checks the parts: those of the inner matrix on a copy in fp16, and that
    every scale is positive and finite, with one sync more than the class of the inner matrix.

    As an attribute of a torch.nn.Module it is neither parameter nor buffer: it is not in `state_dict()`, and `.to()` of
    the module leaves it as it is. `sparsek.nn.SparseLinear` is the module for it.

    Attributes:
        matrix: A BSR, Semi24 or BSR24 with values in torch.float8_e4m3fn or torch.float8_e5m2.
        scale: float32, contiguous, on the device of the values: [] for the kind "tensor", [M] for "row", [nnzb] for
            "block". scale[p] of "block" belongs to values[p], in a transposed view too.
        kind: What shares a scale: "tensor", "row" or "block".
        fast_accum: How products may accumulate. False: in float32, or in tensor cores for at most 512 columns at a
            time. True: in tensor cores to the end of a sum, as with use_fast_accum of torch._scaled_mm. Those of Hopper
            have about 14 bits, so the error grows with K: about 2^-13 sqrt(K / 11) for products of random sign, and far
            more for products of one sign (docs/how-to/fp8.md). Kernels that gain nothing by it accumulate in float32.

    Raises:
        InvalidInput: For parts that do not fit.
    """

    matrix: Matrix
    scale: Tensor
    kind: Scale
    fast_accum: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.matrix, Matrix):
            raise InvalidInput(f"matrix must be a BSR, Semi24 or BSR24, got {arguments.shown(self.matrix)}")
        _check_kind(self.matrix, self.kind, "kind")
        _check_fast_accum(self.fast_accum, self.kind)
        _check_float8(self.matrix)
        _check_scale(self)

    def with_fast_accum(self, fast_accum: bool = True) -> Quantized:
        """Return this matrix, on the same memory, with another `fast_accum`; see the class."""
        _check_fast_accum(fast_accum, self.kind)
        return Quantized.unchecked(self.matrix, self.scale, self.kind, fast_accum)

    def _with(self, matrix: Matrix, scale: Tensor) -> Quantized:
        """A copy with other parts, and the same kind and `fast_accum`."""
        return Quantized.unchecked(matrix, scale, self.kind, self.fast_accum)

    @property
    def values(self) -> Tensor:
        """The FP8 values, without scales, in the layout of the inner matrix."""
        return self.matrix.values

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """Return how this matrix, or its transpose, is stored, for the planner. Internal."""
        return replace(self.matrix.storage(transposed, counted), scale=self.kind, fast_accum=self.fast_accum)

    def parts(self, transposed: bool = False) -> Parts:
        """Return the tensors and numbers of this matrix, or of its transpose, for torch.library ops. Internal."""
        plain = self.matrix.parts(transposed)
        return plain._replace(scale=self.scale, scale_kind=self.kind, fast_accum=self.fast_accum)

    def plan_owner(self) -> PlanOwner:
        """Return the object that caches the plans of this matrix. Internal."""
        return self.matrix.plan_owner()

    def signature(self) -> Signature:
        """Return the part of this matrix in the key of a recorded call. Internal."""
        owner, form, tensors = self.matrix.signature()
        return owner, (self.kind, self.fast_accum, form), (self.scale, *tensors)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        return self.matrix.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, torch.float8_e4m3fn or torch.float8_e5m2."""
        return self.matrix.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of values, indices and scales."""
        return self.matrix.values.device

    @property
    def T(self) -> Quantized:  # noqa: N802
        """The transposed view of a quantized BSR: no value moves.

        Raises InvalidInput for a scale per row, and for a Semi24 or BSR24.
        """
        if self.kind == "row":
            raise InvalidInput(
                "a Quantized with a scale for each row has no .T: there it would be one for each column, which no "
                "product takes out of its sums; quantize with scale='tensor' or 'block'"
            )
        return self._with(self.matrix.T, self.scale)

    def _at(self, device: torch.device, dtype: torch.dtype) -> Quantized:
        return self._with(self.matrix._at(device, dtype), self.scale.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        return self._with(self.matrix._each(change), change(self.scale))

    def _checked_dtype(self, dtype: Any) -> torch.dtype:
        """Refuse another dtype, which `dequantize` makes."""
        if not isinstance(dtype, torch.dtype) or dtype != self.dtype:
            raise InvalidInput(
                f"a Quantized is FP8; .dequantize({arguments.shown(dtype)}) is the matrix in another dtype"
            )
        return dtype

    def map(self, fn: Callable[[Tensor], Tensor]) -> NoReturn:
        """Raise InvalidInput: other values need other scales. Map the dequantized matrix instead."""
        raise InvalidInput(
            "a Quantized is FP8, and other values need other scales: sparsek.quantize(A.dequantize().map(fn))"
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Matrix:
        """Return scale * matrix as a BSR, Semi24 or BSR24, on the same pattern or metadata. No sync.

        Args:
            dtype: bf16, fp16, fp32 or fp64. The product is computed in float32 (float64 for fp64), then rounded.
        """
        arguments.dtype("dtype", dtype)
        values = self.matrix.values.to(dtype)  # exact
        values.mul_(_stretched(self.matrix, self.scale, self.kind))
        return self.matrix._each(lambda _: values)

    def to_dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense matrix scale * matrix [M, K], contiguous, in `dtype`. No sync."""
        return self.dequantize(dtype).to_dense()

    def error(self, a: Matrix) -> float:
        """Return the relative error of the quantization, ||scale * matrix - a|| / ||a||, in Frobenius norms.

        Computed in float64. One sync, and more if the pattern or metadata of `a` is equal but another
        object.

        Args:
            a: The matrix that this one was quantized from.

        Returns:
            The error; 0.0 if `a` is all zeros.

        Raises:
            InvalidInput: If `a` is of another class or shape, or stores other elements.
        """
        _check_original(self.matrix, a)
        check_has_values("error reads values", "call it outside", a.values, self.matrix.values)
        both = a.values, self.dequantize(torch.float64).values
        return of_values(relative_error, *both, reads="error reads values", instead="call it outside")

    def __repr__(self) -> str:
        if not isinstance(self.scale, Tensor):
            return "Quantized(values not concrete)"
        matrix = self.matrix
        words = [f"{type(matrix).__name__} {self.shape[0]}x{self.shape[1]} {NAMES[self.dtype]}"]
        meta = 0
        if not isinstance(matrix, Semi24):
            words += [f"block {matrix.block[0]}x{matrix.block[1]}", matrix.pattern.summary]
        if not isinstance(matrix, BSR):
            meta = matrix.meta.nbytes
        size = (matrix.values.nbytes + meta + self.scale.nbytes) / 1e6
        words.append(f"scale per {self.kind}")
        if self.fast_accum:
            words.append("fast_accum")
        words += [f"{size:.3g} MB", str(self.device)]
        if _is_view(matrix):
            words.append("transposed view")
        return f"Quantized({', '.join(words)})"


SparseMatrix: TypeAlias = Matrix | Quantized
SPARSE: tuple[type, ...] = get_args(SparseMatrix)


def _is_view(a: Matrix) -> bool:
    return isinstance(a, BSR) and a.order is not None


def _check_kind(a: Matrix, kind: Any, name: str) -> None:
    arguments.one_of(name, kind, SCALES)
    if kind == "block" and isinstance(a, Semi24):
        raise InvalidInput("a Semi24 has no blocks; use scale='row' or 'tensor'")
    if kind == "row" and _is_view(a):
        raise InvalidInput(
            "this BSR is a transposed view, whose rows are columns of the stored matrix; use scale='tensor' or "
            "'block', quantize the matrix that it views, or copy it: BSR(a.pattern, a.logical_values())"
        )


def _check_fast_accum(fast_accum: Any, kind: str) -> None:
    if arguments.flag("fast_accum", fast_accum) and kind == "block":
        raise InvalidInput(
            "a scale per block multiplies the float32 sum of a block, and fast_accum leaves sums of all blocks in the "
            "tensor cores; use scale='row' or 'tensor', or fast_accum=False"
        )


def _largest(values: Tensor, kind: str) -> Tensor:
    """Largest magnitudes [], [M], [nnzb], or [nnzb, bm] for rows of blocks; float32 (float64). NaN is largest."""
    if kind == "tensor":
        dims = tuple(range(values.ndim))
    else:
        dims = (values.ndim - 1,) if kind == "row" else (1, 2)
    return largest_of(values, dims)


def _joined(a: Matrix, parts: Tensor, kind: str) -> Tensor:
    """Largest magnitudes in the shape of the scales: those of one row in several blocks are joined."""
    if kind != "row" or isinstance(a, Semi24):
        return parts
    index = a.pattern.block_rows.long()[:, None].expand(parts.shape)
    rows = parts.new_zeros(a.pattern.grid[0], a.pattern.block[0])
    return rows.scatter_reduce_(0, index, parts, "amax").reshape(-1)[: a.shape[0]]


def _stretched(a: Matrix, scale: Tensor, kind: str) -> Tensor:
    """Scales that broadcast to the values. A row outside the matrix has the scale 1."""
    dims = a.values.ndim
    if kind == "tensor":
        return scale.reshape((1,) * dims)
    if kind == "block" or isinstance(a, Semi24):
        return scale.reshape(-1, *(1,) * (dims - 1))
    rows, bm = a.pattern.grid[0], a.pattern.block[0]
    by_block = functional.pad(scale, (0, rows * bm - a.shape[0]), value=1.0).view(rows, bm)
    return by_block.index_select(0, a.pattern.block_rows).unsqueeze(-1)


def _place(a: Matrix, at: list[int]) -> str:
    """Row and column of a stored value, by its indices in `values`."""
    *block, row, slot = at
    column = slot
    if not isinstance(a, BSR):
        group, second = divmod(slot, 2)
        nibble = int(a.meta[(*block, row, group // 2)]) >> 4 * (group % 2)
        column = two_four.GROUP * group + (nibble >> 2 * second & 3)
    if not isinstance(a, Semi24):
        top, left = (a.pattern.T if _is_view(a) else a.pattern)._corner(block[0])
        row, column = row + top, column + left
    if _is_view(a):
        row, column = column, row
    return f"row {row}, column {column}"


def _check_float8(a: Matrix) -> None:
    """Check the parts of `a` as its class does, but for FP8 values."""
    values = check_fp8_values(a.values)
    wide = values.detach().to(torch.float16)  # exact: nothing becomes zero, and no zero anything else
    a._each(lambda _: wide)._checked()


def _check_scale(q: Quantized) -> None:
    scale, a = q.scale, q.matrix
    arguments.tensor("scale", scale, (torch.float32,))
    wanted = () if q.kind == "tensor" else a.shape[:1] if q.kind == "row" else a.values.shape[:1]
    if tuple(scale.shape) != tuple(wanted):
        raise InvalidInput(f"scale has shape {tuple(scale.shape)}; one per {q.kind} needs {tuple(wanted)}")
    check_scale(scale, q.device)


def _check_original(matrix: Matrix, a: Any) -> None:
    if type(a) is not type(matrix) or (a.shape, a.values.shape) != (matrix.shape, matrix.values.shape):
        found = f"{type(a).__name__} {a.shape}" if isinstance(a, Matrix) else arguments.shown(a)
        raise InvalidInput(
            f"this is the quantized form of a {type(matrix).__name__} {matrix.shape} with values "
            f"{tuple(matrix.values.shape)}; got {found}"
        )
    arguments.dtype("the dtype of a", a.dtype)
    arguments.one_device("this is", matrix.values.device, "the original", a.device)
    if not _stores_the_same(matrix, a):
        raise InvalidInput("the original stores other elements than this, so this was not quantized from it")


def _stores_the_same(a: Matrix, b: Matrix) -> bool:
    """Whether both, of one class, store the same elements in one order. Synchronizes unless patterns are one object."""
    if _is_view(a) != _is_view(b):
        return False
    if not isinstance(a, Semi24) and not isinstance(b, Semi24) and not a.pattern.same_as(b.pattern):
        return False
    if isinstance(a, BSR) or isinstance(b, BSR):
        return True
    return a.meta is b.meta or torch.equal(a.meta, b.meta)
