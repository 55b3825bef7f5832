"""A 2:4 matrix: of every four neighbours in a row two are stored."""

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
from sparsek.core.home import Home
from sparsek.core.record import Record, record
from sparsek.core.tracing import outside_inference
from sparsek.matrix import two_four
from sparsek.matrix.base import Stored
from sparsek.matrix.storage import Parts, Signature, Storage, home_of


@record(leaves=("values", "meta"), own=("values",))
@dataclass(frozen=True, eq=False, repr=False)
class Semi24(Stored, Record):
    """An M x K matrix of which every four neighbours in a row hold two stored values; the others are zero.

    `values` is [M, K/2] in bf16, fp16, fp32 or fp64; `meta` is uint8 [M, K/8] and says in which columns they stand,
    as `matrix/two_four.py` describes. Both are contiguous, 16-byte aligned and on one device. K is a multiple of 8.

    Construction raises InvalidInput for parts that do not fit, and for metadata that names a column twice or two
    columns in falling order. One sync, to read the metadata.
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
        raise InvalidInput(
            "a Semi24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W)"
        )

    def _at(self, device: torch.device, dtype: torch.dtype) -> Semi24:
        return Semi24.unchecked(self.values.to(device, dtype), self.meta.to(device))

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """How this matrix, or its transpose, is stored, for the planner."""
        return Storage(dtypes.shown(self.dtype), two_four=True, transposed=transposed)

    def parts(self, transposed: bool = False) -> Parts:
        """The tensors of this matrix, or of its transpose, for ops of torch.library."""
        return Parts(self.values, None, self.meta, None, None, [], "", False, transposed)

    def home(self) -> Home:
        """Where its plans are kept."""
        return home_of(self.meta)

    def signature(self) -> Signature:
        """What a bound call reads of it."""
        return home_of(self.meta), Semi24, (self.values, self.meta)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Semi24:
        return Semi24.unchecked(change(self.values), self.meta)

    @classmethod
    @outside_inference
    def from_dense(cls, w: Tensor, mask: Tensor | None = None, *, exact: bool = False) -> Semi24:
        """Two of every four neighbours in the rows of a dense w [M, K], K a multiple of 8; any float dtype and strides.

        Without a mask the two of largest magnitude; of equal ones, and of NaN, which counts as largest, the lower
        columns. With `mask`, bool [M, K], the elements where it is true: at most two of every four, and where there are
        fewer, zeros at the lowest free columns. A -0.0 that is not kept becomes 0.0.

        `exact=True` refuses to drop anything: w must have at most two nonzeros in every four (NaN is one), and none
        outside the mask. Works on w's device. One sync for a mask, one for `exact`, otherwise none. Differentiable
        in w. Raises InvalidInput, which counts the groups that have too many and tells where the first one is.
        """
        arguments.tensor("w", w, dtypes.FLOATS, ndim=2)
        exact = arguments.flag("exact", exact)
        if w.shape[1] % two_four.STEP:
            raise InvalidInput(f"w has {w.shape[1]} columns; K must be a multiple of {two_four.STEP}")
        if mask is not None:
            two_four.refuse_crowded(two_four.element_mask(mask, w), *two_four.MASKED)
            if exact:
                _refuse_outside(w, mask)
        elif exact:
            two_four.refuse_crowded(w != 0, *two_four.NONZEROS)
        return cls.unchecked(*two_four.pack(w, mask))

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense matrix [M, K], contiguous, in `dtype` or its own. No sync. Differentiable in the values."""
        return two_four.unpack(self.to(dtype=dtype).values, self.meta)

    kept_norm = two_four.kept_norm

    @classmethod
    @outside_inference
    def from_torch(cls, matrix: Tensor) -> Semi24:
        """From a torch.sparse.SparseSemiStructuredTensor [M, K] in bf16 or fp16, through its dense matrix.

        torch makes that by a product with the identity: an Inf or NaN spoils its row, and is refused. One sync. Raises
        Unsupported, with torch's reason, where torch cannot: for a transposed one, and for most on a CPU.
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
        """The same matrix as a torch.sparse.SparseSemiStructuredTensor, packed anew by torch from the dense matrix.

        In bf16 or fp16 and on a GPU, with sides that torch takes; raises Unsupported otherwise, with torch's reason.
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
    dropped = (w != 0) & ~mask
    count = int(torch.count_nonzero(dropped))
    if count:
        row, column = torch.nonzero(dropped)[0].tolist()
        raise InvalidInput(
            f"{count} nonzeros lie outside the mask, the first at row {row}, column {column}; without exact=True "
            "they are dropped"
        )


def _refuse_not_halves(dtype: torch.dtype, what: str) -> None:
    if dtype not in dtypes.LOW:
        raise Unsupported(what, {"torch.sparse": [f"{dtype}: only bf16 and fp16 are 2:4 there"]})


@contextmanager
def _torch_refuses(what: str) -> Iterator[None]:
    """Turns what torch raises where it cannot (by device, shape, backend) into Unsupported."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, AssertionError) as error:
        raise Unsupported(what, {"torch.sparse": [str(error).partition("\n")[0] or repr(error)]}) from error
