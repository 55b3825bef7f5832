"""Semi24, a 2:4 semi-structured matrix: two of every four neighbours in a row are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor, to_sparse_semi_structured

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.record import Record, record
from sparsek.core.tracing import of_values, outside_inference
from sparsek.products.formats import two_four
from sparsek.products.formats.base import Stored, check_finite
from sparsek.products.formats.storage import Parts, Signature, Storage, owner_of


@record(leaves=("values", "meta"), own=("values",))
@dataclass(frozen=True, eq=False, repr=False)
class Semi24(Stored, Record):
    """A 2:4 semi-structured matrix [M, K]: two stored values in every four neighbours of a row, zero elsewhere.

    Sparse tensor cores multiply this format. K is a multiple of 8. `A @ B`, `B @ A` and `sparsek.linear(x, A)` multiply
    it with a dense tensor. It is frozen, and a pytree node. Construction checks the parts, with one sync to read the
    metadata.

    As an attribute of a torch.nn.Module it is neither parameter nor buffer: it is not in `state_dict()`, and `.to()` of
    the module leaves it as it is. `sparsek.nn.SparseLinear` is the module for it.

    Attributes:
        values: The stored values [M, K/2] in bf16, fp16, fp32 or fp64, contiguous and aligned to 16 bytes.
        meta: uint8 [M, K/8], the columns of the values in their groups of four, as sparse tensor cores read them
            (PTX ISA, "Sparse matrix storage" of mma.sp). Contiguous, aligned to 16 bytes, on the device of the values.

    Raises:
        InvalidInput: For parts that do not fit, and for a group whose two columns do not rise.

    Examples:
        >>> A = sk.Semi24.from_dense(torch.tensor([[3.0, 1.0, 0.0, -2.0] * 2]))
        >>> A.to_dense()
        tensor([[ 3.,  0.,  0., -2.,  3.,  0.,  0., -2.]])
    """

    values: Tensor
    meta: Tensor

    def __post_init__(self) -> None:
        if arguments.tensor("values", self.values).ndim != 2:
            raise InvalidInput(f"values must be 2-D [M, K/2], got shape {tuple(self.values.shape)}")
        two_four.check_parts(self.values, self.meta)
        two_four.check_nibbles(self.meta)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def T(self) -> NoReturn:  # noqa: N802
        """Not available: raises InvalidInput, which names the product to use instead."""
        raise InvalidInput(
            "a Semi24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W)"
        )

    def _at(self, device: torch.device, dtype: torch.dtype) -> Semi24:
        return Semi24.unchecked(self.values.to(device, dtype), self.meta.to(device))

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """Return how this matrix, or its transpose, is stored, for the planner. Internal."""
        return Storage(dtypes.shown(self.dtype), two_four=True, transposed=transposed)

    def parts(self, transposed: bool = False) -> Parts:
        """Return the tensors of this matrix, or of its transpose, for torch.library ops. Internal."""
        return Parts(self.values, None, self.meta, None, None, [], "", False, transposed)

    def plan_owner(self) -> PlanOwner:
        """Return the object that caches the plans of matrices with this metadata. Internal."""
        return owner_of(self.meta)

    def signature(self) -> Signature:
        """Return the part of this matrix in the key of a recorded call. Internal."""
        return owner_of(self.meta), Semi24, (self.values, self.meta)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Semi24:
        return Semi24.unchecked(change(self.values), self.meta)

    @classmethod
    @outside_inference
    def from_dense(cls, w: Tensor, mask: Tensor | None = None, *, exact: bool = False) -> Semi24:
        """Prune a dense matrix to 2:4: keep two of every four neighbours in a row. Differentiable in `w`.

        Works on the device of `w`. A mask costs one sync, `exact` another; otherwise there is none. NaN and Inf among
        the stored values are refused on a CPU. On a GPU that would wait, so there they count as largest, and are kept.

        Args:
            w: The dense matrix [M, K] in bf16, fp16, fp32 or fp64, with any strides. K is a multiple of 8.
            mask: bool [M, K], true at most twice in every four neighbours: the elements to keep. Without it the two of
                largest magnitude are kept; of equal ones those in the lower columns.
            exact: Refuse to drop a nonzero. Then `w` has at most two nonzeros in every four neighbours, and none
                outside the mask.

        Raises:
            InvalidInput: For a K that is no multiple of 8, for groups with too many elements (the message has their
                number and the position of the first), and for NaN or Inf.
        """
        arguments.tensor("w", w, dtypes.FLOATS, ndim=2)
        exact = arguments.flag("exact", exact)
        if not torch.compiler.is_compiling() and arguments.wraps(w):
            raise InvalidInput(f"w is a {type(w).__name__}, which wraps other tensors; pass a plain tensor")
        if w.shape[1] % two_four.STEP:
            raise InvalidInput(f"w has {w.shape[1]} columns; K must be a multiple of {two_four.STEP}")
        if mask is not None:
            two_four.refuse_crowded(two_four.element_mask(mask, w), *two_four.MASKED)
            if exact:
                _refuse_outside(w, mask)
        elif exact:
            two_four.refuse_crowded(w != 0, *two_four.NONZEROS)
        made = cls.unchecked(*two_four.pack(w, mask))
        check_finite("w", made.values, wait=False)
        return made

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense matrix [M, K], contiguous, in `dtype` or this one's own. Differentiable. No sync."""
        return two_four.unpack(self.to(dtype=dtype).values, self.meta)

    @classmethod
    @outside_inference
    def from_torch(cls, matrix: Tensor) -> Semi24:
        """Make a Semi24 of a torch.sparse.SparseSemiStructuredTensor [M, K] in bf16 or fp16. One sync.

        The conversion goes through the dense matrix, which torch computes as a product with the identity. An Inf or NaN
        spreads over its row there, and is refused.

        Raises:
            InvalidInput: For another kind of tensor.
            Unsupported: Where torch cannot make the dense matrix, with its reason: of a transposed tensor, and of most
                on a CPU.
        """
        if not isinstance(matrix, SparseSemiStructuredTensor):
            raise InvalidInput(
                f"expected a torch.sparse.SparseSemiStructuredTensor, got {arguments.shown(matrix)}; "
                "a dense matrix goes to Semi24.from_dense(w, exact=True)"
            )
        what = f"{type(matrix).__name__} {tuple(matrix.shape)} to Semi24"
        _refuse_not_halves(matrix.dtype, what)
        with _torch_refuses(what):
            dense = matrix.detach().to_dense()
        return cls.from_dense(dense, exact=True)

    def to_torch(self) -> Tensor:
        """Return this matrix as a torch.sparse.SparseSemiStructuredTensor, which torch packs from the dense matrix.

        Raises:
            Unsupported: With torch's reason: on a CPU, in a dtype other than bf16 and fp16, and for some sides.
        """
        what = f"{self!r} to torch.sparse.SparseSemiStructuredTensor"
        _refuse_not_halves(self.dtype, what)
        dense = self.detach().to_dense()
        with _torch_refuses(what):
            return to_sparse_semi_structured(dense)

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor):
            return "Semi24(values not concrete)"
        size = f"{self.shape[0]}x{self.shape[1]}"
        return f"Semi24({size} {dtypes.shown(self.dtype)}, {two_four.megabytes(self)}, {self.device})"


def _refuse_outside(w: Tensor, mask: Tensor) -> None:
    def look(w: Tensor, mask: Tensor) -> tuple[int, list[int]]:
        dropped = (w != 0) & ~mask
        count = int(torch.count_nonzero(dropped))
        return count, torch.nonzero(dropped)[0].tolist() if count else []

    count, first = of_values(look, w, mask, reads="exact=True reads values", instead="check outside")
    if count:
        row, column = first
        raise InvalidInput(
            f"{count} nonzeros lie outside the mask, the first at row {row}, column {column}; without exact=True "
            "they are dropped"
        )


def _refuse_not_halves(dtype: torch.dtype, what: str) -> None:
    if dtype not in dtypes.LOW:
        raise Unsupported(what, {"torch.sparse": [f"{dtype}: only bf16 and fp16 are 2:4 there"]})


@contextmanager
def _torch_refuses(what: str) -> Iterator[None]:
    """Convert the errors of torch for a device, shape or backend that it does not support to Unsupported."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        raise Unsupported(what, {"torch.sparse": [str(error).partition("\n")[0] or repr(error)]}) from error
