"""A block-sparse matrix whose stored blocks are 2:4: a pattern, and two of every four values of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput
from sparsek.formats import two_four
from sparsek.formats.bsr import BSR, padding_nonzeros
from sparsek.formats.pattern import BlockPattern

LEAVES = ("pattern", "values", "meta")
BLOCK_STEP = 64


@dataclass(frozen=True, eq=False, repr=False)
class BSR24(two_four.Multiplied):
    """An M x K matrix of stored blocks, of whose rows every four neighbours hold two stored values; the rest is zero.

    `pattern` has blocks whose sides are multiples of 64. `values` is [nnzb, bm, bk/2] in bf16, fp16, fp32 or fp64;
    `meta` is uint8 [nnzb, bm, bk/8] and says in which columns they stand, as `formats/two_four.py` describes. Both
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
            raise InvalidInput(f"pattern must be a BlockPattern, got {type(self.pattern).__name__}")
        _check_block(self.pattern)
        _check_values(self)
        count, at, nibble = two_four.malformed(self.meta)
        if count:
            raise InvalidInput(two_four.fault(count, 2 * self.meta.numel(), nibble, at))
        outside = padding_nonzeros(self.to_bsr()) if self.pattern.is_ragged else 0
        if outside:
            raise InvalidInput(
                f"{outside} values outside a {self.shape[0]}x{self.shape[1]} matrix in blocks of "
                f"{self.block[0]}x{self.block[1]} are not zero; values outside the matrix must be 0"
            )

    @classmethod
    def unchecked(cls, pattern: BlockPattern, values: Tensor, meta: Tensor) -> BSR24:
        """A BSR24 from parts that are known to fit: no check, no sync."""
        made = object.__new__(cls)
        for name, part in zip(LEAVES, (pattern, values, meta), strict=True):
            object.__setattr__(made, name, part)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """True (M, K)."""
        return self.pattern.shape

    @property
    def block(self) -> tuple[int, int]:
        """(bm, bk)."""
        return self.pattern.block

    @property
    def grid(self) -> tuple[int, int]:
        """Block rows and block columns (Mb, Kb)."""
        return self.pattern.grid

    @property
    def nnzb(self) -> int:
        """Number of stored blocks."""
        return self.pattern.nnzb

    @property
    def density(self) -> float:
        """Stored values over all elements of the grid of blocks: half the density of the pattern."""
        return self.pattern.density / 2

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Whether the values ask for a gradient."""
        return self.values.requires_grad

    @property
    def T(self) -> NoReturn:  # noqa: N802
        raise InvalidInput(
            "a BSR24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W), and A.to_bsr().T is a BSR"
        )

    def detach(self) -> BSR24:
        """This matrix on the same memory, outside autograd."""
        return BSR24.unchecked(self.pattern, self.values.detach(), self.meta)

    def to(self, device: str | int | torch.device | None = None, dtype: torch.dtype | None = None) -> BSR24:
        """This matrix on `device` and in `dtype`; this very object if nothing changes. Differentiable."""
        target, wanted = two_four.place(self, device, dtype)
        if (target, wanted) == (self.device, self.dtype):
            return self
        return BSR24.unchecked(self.pattern.to(target), self.values.to(target, wanted), self.meta.to(target))

    @classmethod
    def from_bsr(cls, a: BSR, *, exact: bool = False) -> BSR24:
        """The pattern of a BSR, and of every four neighbours in the rows of its blocks the two of largest magnitude."""
        _check_block(a.pattern)
        return cls.unchecked(a.pattern, *two_four.pack(a.logical_values()))

    def to_bsr(self) -> BSR:
        """The same matrix with all the values of its blocks, on the same pattern. No sync. Differentiable."""
        return BSR.unchecked(self.pattern, two_four.unpack(self.values, self.meta))

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense matrix [M, K], contiguous, in `dtype` or its own. No sync. Differentiable in the values."""
        return self.to(dtype=dtype).to_bsr().to_dense()


def _check_block(pattern: BlockPattern) -> None:
    if any(side % BLOCK_STEP for side in pattern.block):
        raise InvalidInput(
            f"block {pattern.block[0]}x{pattern.block[1]}: the sides of 2:4 blocks must be multiples of {BLOCK_STEP}"
        )


def _check_values(a: BSR24) -> None:
    bm, bk = a.block
    wanted = (a.nnzb, bm, bk // 2)
    if isinstance(a.values, Tensor) and tuple(a.values.shape) != wanted:
        raise InvalidInput(f"values have shape {tuple(a.values.shape)}; the pattern needs {wanted}")
    two_four.check_parts(a.values, a.meta)
    if a.device != a.pattern.device:
        raise InvalidInput(
            f"values are on {a.device} and the pattern on {a.pattern.device}; put both on one device"
        )


def _flatten(a: BSR24) -> tuple[list[Any], Any]:
    return [a.pattern, a.values, a.meta], None


def _flatten_with_keys(a: BSR24) -> tuple[list[tuple[Any, Any]], Any]:
    return [(_pytree.GetAttrKey(name), getattr(a, name)) for name in LEAVES], None


def _unflatten(parts: Any, context: Any) -> BSR24:
    return BSR24.unchecked(*parts)


_pytree.register_pytree_node(
    BSR24,
    _flatten,
    _unflatten,
    serialized_type_name="sparsek.BSR24",
    flatten_with_keys_fn=_flatten_with_keys,
)
