"""BSR24, a block-sparse matrix whose stored blocks are 2:4: a pattern, and half of the values of its blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.record import Record, record
from sparsek.core.tracing import outside_inference
from sparsek.products.formats import two_four
from sparsek.products.formats.base import OfBlocks, check_finite
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import Scope
from sparsek.products.formats.padding import padding_of, zero_outside
from sparsek.products.formats.pattern import BlockPattern, block_sides, int_or_pair
from sparsek.products.formats.storage import Parts, Signature, Storage, block_stats

BLOCK_STEP = 64


@record(leaves=("pattern", "values", "meta"), own=("values",))
@dataclass(frozen=True, eq=False, repr=False)
class BSR24(OfBlocks, Record):
    """A block-sparse matrix [M, K] whose stored blocks are 2:4: two values in every four neighbours of a row.

    Sparse tensor cores multiply this format. `A @ B`, `B @ A` and `sparsek.linear(x, A)` multiply it with a dense
    tensor. It is frozen, and a pytree node. Construction checks the parts, with one sync to read the metadata, and one
    more if a side is ragged.

    As an attribute of a torch.nn.Module it is neither parameter nor buffer: it is not in `state_dict()`, and `.to()` of
    the module leaves it as it is. `sparsek.nn.SparseLinear` is the module for it.

    Attributes:
        pattern: The BlockPattern: which blocks are stored. Block sides are multiples of 64.
        values: The stored values [nnzb, bm, bk/2] in bf16, fp16, fp32 or fp64, contiguous and aligned to 16 bytes.
            Where a side of the matrix is not a multiple of the block, the values outside the matrix are 0.
        meta: uint8 [nnzb, bm, bk/8], the columns of the values in their groups of four; see `Semi24`.

    Raises:
        InvalidInput: For parts that do not fit, and for a group whose two columns do not rise.

    Examples:
        >>> A = sk.BSR24.from_dense(torch.randn(256, 256), block=64, keep=0.5)
        >>> A
        BSR24(256x256 fp32, block 64x64, 8 of 16 blocks, 50 %, 0.0696 MB, cpu)
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
        """Not available: raises InvalidInput, which names the product to use instead."""
        raise InvalidInput(
            "a BSR24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W), and A.to_bsr().T is a BSR"
        )

    def _at(self, device: torch.device, dtype: torch.dtype) -> BSR24:
        return BSR24.unchecked(self.pattern.to(device), self.values.to(device, dtype), self.meta.to(device))

    def storage(self, transposed: bool = False, counted: bool = True) -> Storage:
        """Return how this matrix, or its transpose, is stored; `counted`: with BlockStats. Internal."""
        blocks = block_stats(self.pattern.T if transposed else self.pattern, False) if counted else None
        return Storage(dtypes.shown(self.dtype), blocks, True, transposed=transposed)

    def parts(self, transposed: bool = False) -> Parts:
        """Return the tensors and numbers of this matrix, or of its transpose, for torch.library ops. Internal."""
        pattern = self.pattern
        sizes = [*pattern.shape, *pattern.block]
        return Parts(
            self.values, None, self.meta, pattern.indptr, pattern.indices, sizes, "", False, transposed
        )

    def signature(self) -> Signature:
        """Return the part of this matrix in the key of a recorded call, with the identity of the metadata. Internal."""
        return self.pattern, (BSR24, id(self.meta)), (self.values, self.meta)

    def _each(self, change: Callable[[Tensor], Tensor]) -> BSR24:
        return BSR24.unchecked(self.pattern, change(self.values), self.meta)

    def _zero_outside(self, values: Tensor) -> Tensor:
        return zero_outside(self.pattern, values, two_four.columns(self.meta))

    @classmethod
    @outside_inference
    def from_bsr(cls, a: BSR, *, exact: bool = False) -> BSR24:
        """Prune the stored blocks of a BSR to 2:4, on the same pattern. Differentiable in the values of `a`.

        Args:
            a: A BSR with block sides that are multiples of 64. A `.T` view is copied first. Of every four neighbours in
                a row of a block, the two of largest magnitude are kept; of equal ones those in the lower columns.
            exact: Refuse to drop a nonzero. Costs one sync; otherwise there is none.

        Raises:
            InvalidInput: For other block sides, with `exact` for groups with more than two nonzeros (the message has
                their number and the position of the first), and for NaN or Inf, as `Semi24.from_dense`.
        """
        if not isinstance(a, BSR):
            raise InvalidInput(
                f"expected a BSR, got {arguments.shown(a)}; a dense matrix goes to BSR24.from_dense"
            )
        _check_block(a.block)
        values = a.logical_values()
        if arguments.flag("exact", exact):
            two_four.refuse_crowded(values != 0, *two_four.NONZEROS, a.pattern)
        made = cls.unchecked(a.pattern, *two_four.pack(values))
        check_finite("a.values", made.values, wait=False)
        return made

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
        scope: Scope | None = None,
        exact: bool = False,
    ) -> BSR24:
        """Prune a dense matrix to blocks, then the blocks to 2:4. Differentiable in `w`.

        Give exactly one of `keep`, `threshold` and `mask`. A mask of elements and `exact` cost one sync
        each, besides that of `BSR.from_dense`.

        Args:
            w: The dense matrix [M, K] in bf16, fp16, fp32 or fp64, with any strides.
            block: The sides (bm, bk) of a block, or one side of a square one: multiples of 64 up to 512.
            mask: bool [Mb, Kb] of blocks, or [M, K] of elements, true at most twice in every four neighbours of a row.
            threshold: Store the blocks whose Frobenius norm, before 2:4, is greater. 0 stores every block with a
                nonzero.
            keep: The share of the blocks to store, 0 to 1, those of largest norm before 2:4. The values are half.
            scope: Where `keep` chooses: in each block row ("row", the default), or in the whole matrix ("global"); see
                `BSR.from_dense`.
            exact: Refuse to drop a nonzero of a stored block to 2:4; see `from_bsr`.

        Raises:
            InvalidInput: As `BSR.from_dense` and `from_bsr`.
        """
        _check_block(block)
        made = BSR.from_dense(w, block, mask=mask, threshold=threshold, keep=keep, scope=scope)
        if mask is not None and mask.shape == w.shape and mask.shape != made.grid:
            flags = BSR.from_dense(mask.to(w.dtype), block, mask=mask).values != 0
            two_four.refuse_crowded(flags, *two_four.MASKED, made.pattern)
        return cls.from_bsr(made, exact=exact)

    def to_bsr(self) -> BSR:
        """Return this matrix as a BSR with dense blocks, on the same pattern. Differentiable. No sync."""
        return BSR.unchecked(self.pattern, two_four.unpack(self.values, self.meta))

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense matrix [M, K], contiguous, in `dtype` or this one's own. Differentiable. No sync."""
        return self.to(dtype=dtype).to_bsr().to_dense()

    def __repr__(self) -> str:
        size, block = f"{self.shape[0]}x{self.shape[1]}", f"block {self.block[0]}x{self.block[1]}"
        if not isinstance(self.values, Tensor):
            return f"BSR24({size}, {block}, values not concrete)"
        return (
            f"BSR24({size} {dtypes.shown(self.dtype)}, {block}, {self.pattern.summary}, "
            f"{two_four.megabytes(self)}, {self.device})"
        )


def _padding_nonzeros(a: BSR24) -> int:
    """The number of nonzero values (NaN is one) outside the shape. Synchronizes only for a ragged side."""
    if not a.pattern.is_ragged:
        return 0
    at, outside = padding_of(a.pattern)
    edge = two_four.unpack(*(part.detach().index_select(0, at) for part in (a.values, a.meta)))
    return int(torch.count_nonzero(edge.masked_fill(~outside, 0)))


def _check_block(block: Any) -> None:
    sides = int_or_pair(block)
    if sides is not None and any(side % BLOCK_STEP for side in sides):
        raise InvalidInput(
            f"block {sides[0]}x{sides[1]}: the sides of 2:4 blocks must be multiples of {BLOCK_STEP}"
        )
    block_sides(block, BLOCK_STEP)


def _check_values(a: BSR24) -> None:
    bm, bk = a.block
    wanted = (a.nnzb, bm, bk // 2)
    if tuple(arguments.tensor("values", a.values).shape) != wanted:
        raise InvalidInput(f"values have shape {tuple(a.values.shape)}; the pattern needs {wanted}")
    two_four.check_parts(a.values, a.meta)
    arguments.one_device("values are", a.device, "the pattern", a.pattern.device)
