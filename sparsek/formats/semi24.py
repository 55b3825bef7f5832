"""A 2:4 matrix: of every four neighbours in a row two are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats import two_four

LEAVES = ("values", "meta")


@dataclass(frozen=True, eq=False, repr=False)
class Semi24(two_four.Multiplied):
    """An M x K matrix of which every four neighbours in a row hold two stored values; the others are zero.

    `values` is [M, K/2] in bf16, fp16, fp32 or fp64; `meta` is uint8 [M, K/8] and says in which columns they stand,
    as `formats/two_four.py` describes. Both are contiguous, 16-byte aligned and on one device. K is a multiple of 8.

    Construction raises InvalidInput for parts that do not fit, and for metadata that names a column twice or two
    columns in falling order. One sync, to read the metadata.
    """

    values: Tensor
    meta: Tensor

    def __post_init__(self) -> None:
        if isinstance(self.values, Tensor) and self.values.ndim != 2:
            raise InvalidInput(f"values must be 2-D [M, K/2], got shape {tuple(self.values.shape)}")
        two_four.check_parts(self.values, self.meta)
        count, at, nibble = two_four.malformed(self.meta)
        if count:
            raise InvalidInput(two_four.fault(count, 2 * self.meta.numel(), nibble, at))

    @classmethod
    def unchecked(cls, values: Tensor, meta: Tensor) -> Semi24:
        """A Semi24 from parts that are known to fit: no check, no sync."""
        made = object.__new__(cls)
        object.__setattr__(made, "values", values)
        object.__setattr__(made, "meta", meta)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K)."""
        return self.values.shape[0], 2 * self.values.shape[1]

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
            "a Semi24 has no .T: its pairs lie along rows, where sparse tensor cores read them, and those of the "
            "transpose would lie along columns; x @ W.T is sparsek.linear(x, W)"
        )

    def detach(self) -> Semi24:
        """This matrix on the same memory, outside autograd."""
        return Semi24.unchecked(self.values.detach(), self.meta)

    def to(self, device: str | int | torch.device | None = None, dtype: torch.dtype | None = None) -> Semi24:
        """This matrix on `device` and in `dtype`; this very object if nothing changes. Differentiable."""
        target, wanted = two_four.place(self, device, dtype)
        if (target, wanted) == (self.device, self.dtype):
            return self
        return Semi24.unchecked(self.values.to(target, wanted), self.meta.to(target))

    @classmethod
    def from_dense(cls, w: Tensor, mask: Tensor | None = None, *, exact: bool = False) -> Semi24:
        """Two of every four neighbours in the rows of a dense w [M, K], K a multiple of 8.

        Without a mask the two of largest magnitude; of equal ones, and of NaN, which counts as largest, the lower.
        """
        values, meta = two_four.pack(w, mask)
        return cls.unchecked(values, meta)

    def to_dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense matrix [M, K], contiguous, in `dtype` or its own. No sync. Differentiable in the values."""
        wanted = self.dtype if dtype is None else dtype
        dtypes.name(wanted)
        return two_four.unpack(self.values.to(wanted), self.meta)


def _flatten(a: Semi24) -> tuple[list[Any], Any]:
    return [a.values, a.meta], None


def _flatten_with_keys(a: Semi24) -> tuple[list[tuple[Any, Any]], Any]:
    return [(_pytree.GetAttrKey(name), getattr(a, name)) for name in LEAVES], None


def _unflatten(parts: Any, context: Any) -> Semi24:
    return Semi24.unchecked(*parts)


_pytree.register_pytree_node(
    Semi24,
    _flatten,
    _unflatten,
    serialized_type_name="sparsek.Semi24",
    flatten_with_keys_fn=_flatten_with_keys,
)
