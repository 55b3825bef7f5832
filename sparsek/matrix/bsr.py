"""A block-sparse matrix: a pattern and the values of its blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.eager import check_aligned, concrete, untransformed
from sparsek.core.errors import InvalidInput
from sparsek.core.record import Record, record
from sparsek.matrix.base import ALIGNMENT, OfBlocks
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.storage import Parts, Storage, block_stats

if TYPE_CHECKING:
    from scipy import sparse

# What Dynamo (torch 2.13) calls an arithmetic operator between a tensor and a BSR, which it hands over in this order
# whichever stood first, and the BSR's method for it.
COMPILED_TENSOR_AND_BSR = {
    "mul": "__rmul__",
    "__rdiv__": "__truediv__",
    "add": "__radd__",
    "sub": "__rsub__",
    "__rsub__": "__sub__",
}
NOT_PICKLED = (
    "a BSR is not pickled (torch.save pickles too); use sparsek.save(A, 'file.safetensors'), or "
    "torch.save(A.state_dict(), 'file.pt') and BSR.from_state_dict"
)


@record(leaves=("pattern", "values", "order"), own=("values",), picklable=NOT_PICKLED)
@dataclass(frozen=True, eq=False, repr=False)
class BSR(OfBlocks, Record):
    """An M x K matrix whose stored blocks are dense and whose other elements are zero.

    `values` is [nnzb, bm, bk] in bf16, fp16, fp32 or fp64: contiguous, 16-byte aligned, on the pattern's
    device; block p of the pattern is values[p]. Where a side is not a multiple of the block, the values
    outside the matrix are zero: whoever writes to `values` in place calls `zero_padding_` afterwards.

    `order` is None, except in a transposed view as `.T` makes it: there block p is values[order[p]]
    transposed, and `values` is [nnzb, bk, bm]. A view shares the values of the matrix it was taken from.

    Construction raises InvalidInput for values that do not fit the pattern. It syncs only if a side is ragged
    (to see that the padding is zero) or if `order` was not taken from the pattern.
    """

    pattern: BlockPattern
    values: Tensor
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, BlockPattern):
            raise InvalidInput(f"pattern must be a BlockPattern, got {arguments.told(self.pattern)}")
        _check_order(self)
        _check_values(self)
        outside = padding_nonzeros(self)
        if outside:
            raise InvalidInput(
                f"{outside} values in the padding of a {self.shape[0]}x{self.shape[1]} matrix in blocks of "
                f"{self.block[0]}x{self.block[1]} are not zero; values outside the matrix must be 0"
            )

    @property
    def T(self) -> BSR:  # noqa: N802
        """The transposed matrix, by index only: values stay in place. `.T.T` has this pattern again."""
        # Inside torch.compile the index is traced, and dropped where only products read the view: they take the matrix
        # it was taken from. That one is at hand in a view; elsewhere a look for a kept index would guard on it.
        traced = torch.compiler.is_compiling() and self.order is None
        flipped, perm = self.pattern.flip() if traced else self.pattern.transposed
        return BSR.unchecked(flipped, self.values, perm if self.order is None else None)

    def _at(self, device: torch.device, dtype: torch.dtype) -> BSR:
        if self.order is not None:
            return self.T._at(device, dtype).T
        return BSR.unchecked(self.pattern.to(device), self.values.to(device, dtype))

    def _each(self, change: Callable[[Tensor], Tensor]) -> BSR:
        return BSR.unchecked(self.pattern, change(self.values), self.order)

    def _zero_outside(self, values: Tensor) -> Tensor:
        return zero_outside(self.pattern if self.order is None else self.pattern.T, values)

    def _layer(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.T)

    def storage(self, transposed: bool = False) -> Storage:
        """How this matrix, or its transpose, is stored, for the planner."""
        pattern, view = (
            (self.pattern.T if transposed else self.pattern),
            (self.order is not None) != transposed,
        )
        return Storage(dtypes.shown(self.dtype), block_stats(pattern, not view), transposed=view)

    def parts(self, transposed: bool = False) -> Parts:
        """The tensors and numbers of this matrix, or of its transpose, for ops of torch.library."""
        pattern = self.pattern if self.order is None else self.pattern.T
        sizes, view = [*pattern.shape, *pattern.block], (self.order is not None) != transposed
        return Parts(self.values, None, None, pattern.indptr, pattern.indices, sizes, "", False, view)

    def logical_values(self) -> Tensor:
        """The blocks in the pattern's order, [nnzb, bm, bk]: `values`, or a copy for a transposed view."""
        check_stored(self)
        if self.order is None:
            return self.values
        return self.values.index_select(0, self.order).mT.contiguous()

    def to_dense(self) -> Tensor:
        """The dense [M, K] matrix, contiguous. Differentiable in the values."""
        from sparsek.matrix import convert

        return convert.to_dense(self)

    def to_torch(self) -> Tensor:
        """The same matrix as torch.sparse_bsr; see `convert.to_torch`."""
        from sparsek.matrix import convert

        return convert.to_torch(self)

    def to_scipy(self) -> sparse.bsr_array:
        """The same matrix as scipy.sparse.bsr_array on the host; see `convert.to_scipy`."""
        from sparsek.matrix import convert

        return convert.to_scipy(self)

    @classmethod
    def from_dense(
        cls,
        w: Tensor,
        block: int | tuple[int, int],
        *,
        mask: Tensor | None = None,
        threshold: float | None = None,
        keep: float | None = None,
        scope: str = "global",
    ) -> BSR:
        """Blocks of a dense [M, K] matrix, by `mask`, `threshold` or `keep`; see `convert.from_dense`."""
        from sparsek.matrix import convert

        return convert.from_dense(w, block, mask=mask, threshold=threshold, keep=keep, scope=scope)

    @classmethod
    def from_torch(cls, matrix: Tensor) -> BSR:
        """From a torch.sparse_bsr tensor; see `convert.from_torch`."""
        from sparsek.matrix import convert

        return convert.from_torch(matrix)

    @classmethod
    def from_scipy(cls, matrix: Any, block: int | tuple[int, int] | None = None) -> BSR:
        """From any SciPy sparse matrix; see `convert.from_scipy`."""
        from sparsek.matrix import convert

        return convert.from_scipy(matrix, block)

    @classmethod
    def from_coo_blocks(cls, rows: Tensor, cols: Tensor, blocks: Tensor, shape: tuple[int, int]) -> BSR:
        """From blocks [n, bm, bk] at block coordinates, in any order; see `convert.from_coo_blocks`."""
        from sparsek.matrix import convert

        return convert.from_coo_blocks(rows, cols, blocks, shape)

    def spy(self, path: str | os.PathLike[str] | None = None, max_pixels: int = 1024) -> str:
        """A text picture of the stored blocks; see `sparsek.pictures.blocks`."""
        from sparsek.pictures import blocks as spy

        return spy.spy(self, path, max_pixels)

    def sum(self, dim: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Sum of all elements [], of each column (dim 0) [K] or of each row (dim 1) [M]; see `arithmetic.total`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.total(self, dim, dtype)

    def norm(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The Frobenius norm []; see `arithmetic.norm`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.norm(self, dtype)

    def block_norms(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The Frobenius norm of each stored block [nnzb], in the pattern's order; see `arithmetic.block_norms`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.block_norms(self, dtype)

    def block_row_slice(self, start: int, stop: int) -> BSR:
        """Block rows `start` to `stop - 1`, in the same memory; see `arithmetic.block_row_slice`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.block_row_slice(self, start, stop)

    def zero_padding_(self) -> BSR:
        """Writes 0 into the values outside the matrix, for values that were written to in place. Returns this object.

        No gradient. Syncs the first time a ragged pattern is asked what lies outside.
        """
        base = self if self.order is None else self.T
        with torch.no_grad():
            zero_padding(base.pattern, base.values)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> BSR:
        """Makes the values ask for a gradient, or not. Returns this object; views of it share the values."""
        asked = arguments.flag("requires_grad", requires_grad)
        if self.values.is_inference() and asked:
            raise InvalidInput(
                "values that were made in inference mode can have no gradient; clone them outside of it"
            )
        if self.values.grad_fn is not None and not asked:
            raise InvalidInput(
                "the values were computed from others, which ask for a gradient; use .detach()"
            )
        self.values.requires_grad_(asked)
        return self

    @property
    def grad(self) -> BSR | None:
        """The gradient of the values as a matrix with this pattern, sharing `values.grad`; None if there is none."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.gradient(self)

    def state_dict(self) -> dict[str, Tensor]:
        """All of this matrix as tensors by name, nothing copied; see `arithmetic.state_dict`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.state_dict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> BSR:
        """What `state_dict` gave, as it was; see `arithmetic.from_state_dict`."""
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.from_state_dict(state)

    def __mul__(self, factor: Any) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.scale(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.divide(self, divisor)

    def __neg__(self) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.negate(self)

    def __add__(self, other: Any) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.subtract(self, other)

    def __rsub__(self, other: Any) -> BSR:
        from sparsek.matrix import algebra as arithmetic

        return arithmetic.add(arithmetic.negate(self), other)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Besides torch.matmul, what Dynamo makes of an arithmetic operator between a tensor and a BSR arrives here."""
        operator = COMPILED_TENSOR_AND_BSR.get(func.__name__) if torch.compiler.is_compiling() else None
        if operator and not kwargs and len(args) == 2 and isinstance(args[1], BSR):
            return getattr(args[1], operator)(args[0])
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        rows, columns = self.shape
        if not isinstance(self.values, Tensor):
            return f"BSR({rows}x{columns}, block {self.block[0]}x{self.block[1]}, values not concrete)"
        size = f"{self.values.numel() * self.values.element_size() / 1e6:.3g} MB"
        kind = "" if self.order is None else ", transposed view"
        return (
            f"BSR({rows}x{columns} {dtypes.shown(self.dtype)}, block {self.block[0]}x{self.block[1]}, "
            f"{self.pattern.summary}, {size}, {self.device}{kind})"
        )


def padding_nonzeros(a: BSR) -> int:
    """How many values outside the true shape are not zero; NaN counts. Syncs only if a side is ragged."""
    if not a.pattern.is_ragged:
        return 0
    base = a if a.order is None else a.T
    values = concrete(
        base.values, "the padding is looked for in values", "BSR.unchecked(pattern, values) takes it as it is"
    )

    def count() -> int:
        at, outside = padding_of(base.pattern)
        edge = values.detach().index_select(0, at)
        return int(torch.count_nonzero(edge.masked_fill(~outside, 0)))

    return untransformed(count)


def zero_padding(pattern: BlockPattern, values: Tensor) -> Tensor:
    """Writes 0, in place, into values [nnzb, bm, bk] outside the true shape. Returns the same tensor."""
    if pattern.is_ragged:
        at, outside = padding_of(pattern)
        values[at] = values.index_select(0, at).masked_fill(outside, 0)
    return values


def zero_outside(pattern: BlockPattern, values: Tensor, columns: Tensor | None = None) -> Tensor:
    """Values [nnzb, bm, bk] with 0 outside the true shape; the same tensor where no side is ragged. No sync.

    `columns`: in which column of its block each value stands, if values do not stand side by side.
    """
    (m, k), (bm, bk), here = pattern.shape, pattern.block, values.device
    if m % bm:
        rows = pattern.block_rows[:, None] * bm + torch.arange(bm, dtype=torch.int32, device=here)
        values = values.masked_fill((rows >= m)[:, :, None], 0)
    if k % bk:
        if columns is None:
            columns = torch.arange(bk, dtype=torch.int32, device=here)
        values = values.masked_fill(pattern.indices[:, None, None] * bk + columns >= k, 0)
    return values


def padding_of(pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """Positions [e] of the stored blocks that reach over an edge, and bool [e, bm, bk]: what lies outside.

    Kept with a ragged pattern; the first time it syncs.
    """
    return pattern.derived("padding", lambda: _padding(pattern))


def _padding(pattern: BlockPattern) -> tuple[Tensor, Tensor]:
    """Positions [e] of the stored blocks that reach over an edge, and bool [e, bm, bk]: what lies outside."""
    indptr, indices = pattern.host
    (rows, columns), (bm, bk), (last_row, last_column) = pattern.shape, pattern.block, _last(pattern.grid)
    in_last_row = np.arange(indices.size) >= indptr[last_row]
    in_last_column = indices == last_column
    at = np.flatnonzero((in_last_row & bool(rows % bm)) | (in_last_column & bool(columns % bk)))
    below = (np.arange(bm) >= rows - last_row * bm)[None, :, None] & in_last_row[at, None, None]
    beside = (np.arange(bk) >= columns - last_column * bk)[None, None, :] & in_last_column[at, None, None]
    return torch.tensor(at, device=pattern.device), torch.tensor(below | beside, device=pattern.device)


def _last(grid: tuple[int, int]) -> tuple[int, int]:
    return max(grid[0] - 1, 0), max(grid[1] - 1, 0)


def check_stored(a: BSR) -> None:
    """InvalidInput unless `values` still have as many blocks as the pattern.

    A BlockSparseLinear that loads another pattern gives its `values` another shape, those of `weight` taken before too.
    """
    if a.values.shape[0] != a.pattern.nnzb:
        raise InvalidInput(
            f"the pattern stores {a.pattern.nnzb} blocks and values hold {a.values.shape[0]}: the layer that this "
            "matrix was taken from has loaded another pattern; take layer.weight again"
        )


def _check_values(a: BSR) -> None:
    values, pattern = a.values, a.pattern
    arguments.tensor("values", values, dtypes.FLOATS)
    wanted = (pattern.nnzb, *(pattern.block if a.order is None else pattern.block[::-1]))
    if tuple(values.shape) != wanted:
        raise InvalidInput(f"values have shape {tuple(values.shape)}; the pattern needs {wanted}")
    if values.device != pattern.device:
        raise InvalidInput(
            f"values are on {values.device} and the pattern on {pattern.device}; put both on one device"
        )
    if not values.is_contiguous():
        raise InvalidInput("values must be contiguous; call .contiguous()")
    check_aligned("values", values, ALIGNMENT)


def _check_order(a: BSR) -> None:
    """The order of a view is decided by its pattern: it undoes the pattern's own transposition."""
    if a.order is None:
        return
    right = a.pattern.T.transposed[1]
    if a.order is right:
        return
    order = a.order
    fits = isinstance(order, Tensor) and (order.dtype, order.layout) == (torch.int32, torch.strided)
    if not fits or order.device != right.device:
        raise InvalidInput(f"order must be an int32 tensor on {right.device}; transposed views come from .T")
    if not torch.equal(order, right):
        raise InvalidInput(
            "order is not the one of this pattern's transposition; transposed views come from .T"
        )
