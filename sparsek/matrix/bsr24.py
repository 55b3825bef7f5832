"""A block-sparse matrix whose stored blocks are 2:4: a pattern, and two of every four values of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.record import Record, record
from sparsek.core.tracing import outside_inference
from sparsek.matrix import two_four
from sparsek.matrix.base import OfBlocks
from sparsek.matrix.bsr import BSR
from sparsek.matrix.padding import padding_of, zero_outside
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.storage import Parts, Signature, Storage, block_stats

BLOCK_STEP = 64


@record(leaves=("pattern", "values", "meta"), own=("values",))
@dataclass(frozen=True, eq=False, repr=False)
class BSR24(OfBlocks, Record):
    """An M x K matrix of stored blocks, of whose rows every four neighbours hold two stored values; the rest is zero.

    `pattern` has blocks whose sides are multiples of 64. `values` is [nnzb, bm, bk/2] in bf16, fp16, fp32 or fp64;
    `meta` is uint8 [nnzb, bm, bk/8] and says in which columns they stand, as `matrix/two_four.py` describes. Both
    are contiguous, 16-byte aligned and on the pattern's device. Where a side of the matrix is not a multiple of the
    block, the values outside the matrix are zero.

    Construction raises InvalidInput for parts that do not fit, and for metadata that names a column twice or two
    columns in falling order. One sync to read the metadata, and one more if a side is ragged.
    """

    pattern: BlockPattern
    values: Tensor
    meta: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, BlockPattern):
            raise InvalidInput(f"pattern must be a BlockPattern, got {arguments.shown(self.pattern)}")
        _check_block(self.pattern.block)
        _check_values(self)
        two_four.check_nibbles(self.meta)
        outside = _padding_nonzeros(self)
        if outside:
            raise InvalidInput(
                f"{outside} values outside a {self.shape[0]}x{self.shape[1]} matrix in blocks of "
                f"{self.block[0]}x{self.block[1]} are not zero; values outside the matrix must be 0"
            )

    @property
    def T(self) -> NoReturn:  # noqa: N802
        raise InvalidInput(
            "a BSR24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W), and A.to_bsr().T is a BSR"
        )

    def _at(self, device: torch.device, dtype: torch.dtype) -> BSR24:
        return BSR24.unchecked(self.pattern.to(device), self.values.to(device, dtype), self.meta.to(device))

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """How this matrix, or its transpose, is stored, for the planner. `counted`: with its blocks' statistics."""
        blocks = block_stats(self.pattern.T if transposed else self.pattern, False) if counted else None
        return Storage(dtypes.shown(self.dtype), blocks, True, transposed=transposed)

    def parts(self, transposed: bool = False) -> Parts:
        """The tensors and numbers of this matrix, or of its transpose, for ops of torch.library."""
        pattern = self.pattern
        sizes = [*pattern.shape, *pattern.block]
        return Parts(
            self.values, None, self.meta, pattern.indptr, pattern.indices, sizes, "", False, transposed
        )

    def signature(self) -> Signature:
        """What a bound call reads of it. What a call makes of the metadata watches them."""
        return self.pattern, (BSR24, id(self.meta)), (self.values, self.meta)

    def _each(self, change: Callable[[Tensor], Tensor]) -> BSR24:
        return BSR24.unchecked(self.pattern, change(self.values), self.meta)

    def _zero_outside(self, values: Tensor) -> Tensor:
        return zero_outside(self.pattern, values, two_four.columns(self.meta))

    @classmethod
    @outside_inference
    def from_bsr(cls, a: BSR, *, exact: bool = False) -> BSR24:
        """The pattern of a BSR, and two of every four neighbours in the rows of its blocks, whose sides 64 divides.

        The two of largest magnitude; of equal ones, and of NaN, which counts as largest, the lower columns. A -0.0
        that is not kept becomes 0.0. `exact=True` refuses to drop a nonzero: then at most two of every four may not
        be zero; one sync. Otherwise none. Differentiable in a's values. A `.T` view is copied first. Raises
        InvalidInput, which counts the groups that have too many nonzeros and tells where the first one is.
        """
        if not isinstance(a, BSR):
            raise InvalidInput(
                f"expected a BSR, got {arguments.shown(a)}; a dense matrix goes to BSR24.from_dense"
            )
        _check_block(a.block)
        values = a.logical_values()
        if arguments.flag("exact", exact):
            two_four.refuse_crowded(values != 0, *two_four.NONZEROS, a.pattern)
        return cls.unchecked(a.pattern, *two_four.pack(values))

    @classmethod
    @outside_inference
    def from_dense(
        cls,
        w: Tensor,
        block: int | tuple[int, int],
        *,
        mask: Tensor | None = None,
        threshold: float | None = None,
        keep: float | None = None,
        scope: str = "global",
        exact: bool = False,
    ) -> BSR24:
        """Blocks of a dense w [M, K], chosen as `BSR.from_dense` does, by `mask`, `threshold` or `keep`, then 2:4.

        `keep` is the fraction of blocks to store, those of largest Frobenius norm before 2:4: half as many values. In
        the stored blocks two of every four neighbours are kept as by `from_bsr`, which `exact` is for too. A mask of
        elements [M, K] must be true at most twice in every four neighbours; it and `exact` take a sync each.
        """
        made = BSR.from_dense(w, block, mask=mask, threshold=threshold, keep=keep, scope=scope)
        if mask is not None and mask.shape == w.shape and mask.shape != made.grid:
            flags = BSR.from_dense(mask.to(w.dtype), block, mask=mask).values != 0
            two_four.refuse_crowded(flags, *two_four.MASKED, made.pattern)
        return cls.from_bsr(made, exact=exact)

    def to_bsr(self) -> BSR:
        """The same matrix with all the values of its blocks, on the same pattern. No sync. Differentiable."""
        return BSR.unchecked(self.pattern, two_four.unpack(self.values, self.meta))

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense matrix [M, K], contiguous, in `dtype` or its own. No sync. Differentiable in the values."""
        return self.to(dtype=dtype).to_bsr().to_dense()

    kept_norm = two_four.kept_norm

    def __repr__(self) -> str:
        size, block = f"{self.shape[0]}x{self.shape[1]}", f"block {self.block[0]}x{self.block[1]}"
        if not isinstance(self.values, Tensor):
            return f"BSR24({size}, {block}, values not concrete)"
        return (
            f"BSR24({size} {dtypes.shown(self.dtype)}, {block}, {self.pattern.summary}, "
            f"{two_four.megabytes(self)}, {self.device})"
        )


def _padding_nonzeros(a: BSR24) -> int:
    """How many values outside the true shape are not zero; NaN counts. Syncs only if a side is ragged."""
    if not a.pattern.is_ragged:
        return 0
    at, outside = padding_of(a.pattern)
    edge = two_four.unpack(*(part.detach().index_select(0, at) for part in (a.values, a.meta)))
    return int(torch.count_nonzero(edge.masked_fill(~outside, 0)))


def _check_block(block: tuple[int, int]) -> None:
    if any(side % BLOCK_STEP for side in block):
        raise InvalidInput(
            f"block {block[0]}x{block[1]}: the sides of 2:4 blocks must be multiples of {BLOCK_STEP}"
        )


def _check_values(a: BSR24) -> None:
    bm, bk = a.block
    wanted = (a.nnzb, bm, bk // 2)
    if tuple(arguments.tensor("values", a.values).shape) != wanted:
        raise InvalidInput(f"values have shape {tuple(a.values.shape)}; the pattern needs {wanted}")
    two_four.check_parts(a.values, a.meta)
    arguments.one_device("values are", a.device, "the pattern", a.pattern.device)
