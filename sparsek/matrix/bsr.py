"""A block-sparse matrix: a pattern and the values of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.record import Record, record
from sparsek.core.tracing import of_values
from sparsek.matrix import algebra, convert
from sparsek.matrix.base import OfBlocks, check_readable
from sparsek.matrix.padding import padding_of, zero_outside, zero_padding
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.storage import Parts, Signature, Storage, block_stats
from sparsek.pictures import blocks as pictures

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
            raise InvalidInput(f"pattern must be a BlockPattern, got {arguments.shown(self.pattern)}")
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

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """How this matrix, or its transpose, is stored, for the planner. `counted`: with its blocks' statistics."""
        pattern, view = self.pattern.T if transposed else self.pattern, (self.order is not None) != transposed
        blocks = block_stats(pattern, not view) if counted else None
        return Storage(dtypes.shown(self.dtype), blocks, transposed=view)

    def parts(self, transposed: bool = False) -> Parts:
        """The tensors and numbers of this matrix, or of its transpose, for ops of torch.library."""
        pattern = self.pattern if self.order is None else self.pattern.T
        sizes, view = [*pattern.shape, *pattern.block], (self.order is not None) != transposed
        return Parts(self.values, None, None, pattern.indptr, pattern.indices, sizes, "", False, view)

    def signature(self) -> Signature:
        """What a bound call reads of it. The order of a view follows from its pattern."""
        return self.pattern, (BSR, self.order is None), (self.values,)

    def logical_values(self) -> Tensor:
        """The blocks in the pattern's order, [nnzb, bm, bk]: `values`, or a copy for a transposed view."""
        check_stored(self)
        if self.order is None:
            return self.values
        return self.values.index_select(0, self.order).mT.contiguous()

    # From and to other forms: `matrix/convert.py`.
    from_dense = classmethod(convert.from_dense)
    from_torch = classmethod(convert.from_torch)
    from_scipy = classmethod(convert.from_scipy)
    from_coo_blocks = classmethod(convert.from_coo_blocks)
    to_dense = convert.to_dense
    to_torch = convert.to_torch
    to_scipy = convert.to_scipy

    # Arithmetic on stored blocks: `matrix/algebra.py`.
    sum = algebra.total
    norm = algebra.norm
    block_norms = algebra.block_norms
    block_row_slice = algebra.block_row_slice
    grad = property(algebra.gradient)
    state_dict = algebra.state_dict
    from_state_dict = classmethod(algebra.from_state_dict)
    __mul__ = __rmul__ = algebra.scale
    __truediv__ = algebra.divide
    __neg__ = algebra.negate
    __add__ = __radd__ = algebra.add
    __sub__ = algebra.subtract
    __rsub__ = algebra.subtract_from

    def drawn(self) -> pictures.Blocks:
        """What pictures show of it: its blocks, coloured by norm. Syncs."""

        def norms() -> np.ndarray:
            wide = torch.promote_types(self.dtype, torch.float32)
            return self.detach().block_norms(dtype=wide).cpu().numpy().astype(np.float64)

        pattern = self.pattern.drawn()
        name = f"{pattern.name} {dtypes.name(self.dtype)}"
        return replace(pattern, name=name, described=repr(self), norms=norms)

    spy = pictures.spy

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

    def count(values: Tensor) -> int:
        at, outside = padding_of(base.pattern)
        edge = values.detach().index_select(0, at)
        return int(torch.count_nonzero(edge.masked_fill(~outside, 0)))

    instead = "BSR.unchecked(pattern, values) takes it as it is"
    return of_values(count, base.values, reads="the padding is looked for in values", instead=instead)


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
    arguments.one_device("values are", values.device, "the pattern", pattern.device)
    check_readable("values", values)


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
