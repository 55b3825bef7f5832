"""BSR, a block-sparse matrix: a pattern and the values of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.record import record
from sparsek.core.tracing import of_values
from sparsek.pictures.blocks import BlockPicture, Drawable
from sparsek.products.formats.algebra import Arithmetic
from sparsek.products.formats.base import check_readable
from sparsek.products.formats.convert import Conversions
from sparsek.products.formats.padding import padding_of, zero_outside, zero_padding
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.storage import Parts, Signature, Storage, block_stats, unread_stats

if TYPE_CHECKING:
    from sparsek.products.formats.quantized_tensor import QuantizedTensor

# Dynamo's (torch 2.13) name of an arithmetic operator between a tensor and a BSR, which it passes in this order
# whichever was written first, and the method of the BSR for it.
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
class BSR(Conversions, Arithmetic, Drawable):
    """A block-sparse matrix [M, K]: dense stored blocks, zero elsewhere. The format is block compressed sparse row.

    `A @ B` and `B @ A` multiply it with a dense tensor, `A @ A2` with another BSR. It is frozen, and a pytree node.
    Construction checks the parts; it synchronizes only for a ragged side, to see that the padding is zero, and for an
    `order` that does not come from `.T`.

    As an attribute of a torch.nn.Module it is neither parameter nor buffer: it is not in `state_dict()`, and `.to()` of
    the module leaves it as it is. `sparsek.nn.BlockSparseLinear.from_bsr(A)` is a module that has it as its weight.

    Attributes:
        pattern: The BlockPattern: which blocks are stored.
        values: The stored blocks [nnzb, bm, bk] in bf16, fp16, fp32 or fp64, on the device of the pattern, contiguous
            and aligned to 16 bytes. values[p] is block p of the pattern. Where a side of the matrix is not a multiple
            of the block, the values outside the matrix are 0; after a write in place call `zero_padding_`.
        order: None, except in the transposed view that `.T` returns. There block p is values[order[p]] transposed,
            `values` is [nnzb, bk, bm], and the memory is that of the viewed matrix.

    Raises:
        InvalidInput: For values that do not fit the pattern.

    Examples:
        >>> A = sk.BSR.from_dense(torch.randn(256, 256), block=64, keep=0.25)
        >>> A
        BSR(256x256 fp32, block 64x64, 4 of 16 blocks, 25 %, 0.0655 MB, cpu)
        >>> (A @ torch.randn(256, 10)).shape
        torch.Size([256, 10])
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
        """The transposed view [K, M]: no value moves. `.T.T` has the original pattern object."""
        # Inside torch.compile the index is traced, and eliminated where only products read the view: they take the
        # viewed matrix. A view has the index of that one; elsewhere a look-up of a cached index would add a guard on
        # it.
        traced = torch.compiler.is_compiling() and self.order is None
        flipped, perm = self.pattern.flip() if traced else self.pattern.transposed
        return BSR.unchecked(flipped, self.values, perm if self.order is None else None)

    def _at(self, device: torch.device, dtype: torch.dtype) -> BSR:
        if self.order is not None:
            return self.T._at(device, dtype).T
        return BSR.unchecked(self.pattern.to(device), self.values.to(device, dtype))

    def _each(self, change: Callable[[Tensor], Tensor]) -> BSR:
        return BSR.of_fields({"pattern": self.pattern, "values": change(self.values), "order": self.order})

    def _zero_outside(self, values: Tensor) -> Tensor:
        return zero_outside(self.pattern if self.order is None else self.pattern.T, values)

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """Return how this matrix, or its transpose, is stored; `counted`: with BlockStats. Internal."""
        pattern, view = self.pattern.T if transposed else self.pattern, (self.order is not None) != transposed
        unread = _is_unread(pattern, view)
        blocks = (unread_stats(pattern) if unread else block_stats(pattern, not view)) if counted else None
        return Storage(dtypes.shown(self.dtype), blocks, transposed=view)

    @property
    def is_unread(self) -> bool:
        """Whether products with this matrix on the left are planned without reading its pattern. Internal."""
        return _is_unread(self.pattern, self.order is not None)

    def parts(self, transposed: bool = False) -> Parts:
        """Return the tensors and numbers of this matrix, or of its transpose, for torch.library ops. Internal."""
        pattern = self.pattern if self.order is None else self.pattern.T
        sizes, view = [*pattern.shape, *pattern.block], (self.order is not None) != transposed
        return Parts(self.values, None, None, pattern.indptr, pattern.indices, sizes, "", False, view)

    def signature(self) -> Signature:
        """Return the part of this matrix in the key of a recorded call. Internal."""
        return self.pattern, "BSR" if self.order is None else "BSR.T", (self.values,)

    def logical_values(self) -> Tensor:
        """Return the blocks in the order of the pattern, [nnzb, bm, bk]: `values`, or a copy for a transposed view."""
        check_stored(self)
        if self.order is None:
            return self.values
        return self.values.index_select(0, self.order).mT.contiguous()

    if TYPE_CHECKING:

        @overload
        def __matmul__(self, other: BSR) -> BSR: ...
        @overload
        def __matmul__(self, other: Tensor | QuantizedTensor) -> Tensor: ...
        def __matmul__(self, other: Any) -> Any: ...

    def drawn(self) -> BlockPicture:
        """Return the data of its pictures: the blocks, coloured by norm. Synchronizes. Internal."""

        def norms() -> np.ndarray:
            wide = torch.promote_types(self.dtype, torch.float32)
            return self.detach().block_norms(dtype=wide).cpu().numpy().astype(np.float64)

        pattern = self.pattern.drawn()
        name = f"{pattern.name} {dtypes.name(self.dtype)}"
        return replace(pattern, name=name, described=repr(self), norms=norms)

    def zero_padding_(self) -> BSR:
        """Set the values outside the matrix to 0, after a write to `values` in place. Return this object.

        Outside autograd. The first call for a ragged pattern synchronizes.
        """
        base = self if self.order is None else self.T
        with torch.no_grad():
            zero_padding(base.pattern, base.values)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Dispatch torch.matmul, and Dynamo's form of an arithmetic operator between a tensor and a BSR."""
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


def _is_unread(pattern: BlockPattern, view: bool) -> bool:
    """Whether no host reads a passing pattern. Tiles of lower block rows join several, by columns that they share."""
    return pattern.passing and (view or pattern.block[0] >= 64)


def padding_nonzeros(a: BSR) -> int:
    """The number of nonzero values (NaN is one) outside the shape. Synchronizes only for a ragged side."""
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
    """Raise InvalidInput unless `values` have as many blocks as the pattern.

    A BlockSparseLinear that loads another pattern changes the shape of its `values`, and a `weight` taken before shares
    them.
    """
    arguments.check_untraced()
    if a.values.shape[0] != a.pattern.nnzb:
        raise InvalidInput(
            f"the pattern stores {a.pattern.nnzb} blocks and values hold {a.values.shape[0]}. If the layer that this "
            "matrix was taken from has loaded another pattern, take layer.weight again"
        )


def _check_values(a: BSR) -> None:
    values, pattern = a.values, a.pattern
    arguments.tensor("values", values, dtypes.FLOATS)
    wanted = (pattern.nnzb, *(pattern.block if a.order is None else pattern.block[::-1]))
    if tuple(values.shape) != wanted:
        raise InvalidInput(f"values have shape {tuple(values.shape)}; the pattern needs {wanted}")
    arguments.one_device("values are", values.device, "the pattern", pattern.device)
    arguments.check_distributed("values", values, "the pattern", pattern.indptr)
    check_readable("values", values)


def _check_order(a: BSR) -> None:
    """Raise InvalidInput for an `order` other than the inverse of the pattern's transposition."""
    if a.order is None:
        return
    right = a.pattern.T.transposed[1]
    if a.order is right:
        return
    order = a.order
    if isinstance(order, Tensor):
        arguments.dense("order", order)
    if not isinstance(order, Tensor) or (order.dtype, order.device) != (torch.int32, right.device):
        raise InvalidInput(f"order must be an int32 tensor on {right.device}; transposed views come from .T")
    if not torch.equal(order, right):
        raise InvalidInput(
            "order is not the one of this pattern's transposition; transposed views come from .T"
        )
