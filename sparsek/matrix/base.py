"""What the matrices of all formats have in common: the @ operator, and what their parts say of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.matrix.pattern import BlockPattern


class Multiplied:
    """`A @ B` and `B @ A` for a matrix A of a class of its own: both go to what `register_matmul` was given."""

    _matmul: ClassVar[Callable[[Any, Any], Any] | None] = None
    __array_ufunc__ = None  # numpy arrays then leave `array @ A` to __rmatmul__
    shape: Any

    @classmethod
    def register_matmul(cls, multiply: Callable[[Any, Any], Any]) -> None:
        """Makes `A @ B` and `B @ A` call `multiply` with both in that order. The operations, above formats, do this."""
        cls._matmul = staticmethod(multiply)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuses: no product has a gradient for the values. A BSR has a `requires_grad_` of its own."""
        name = type(self).__name__
        raise InvalidInput(f"products have no gradient for the values of a {name}, as they have for a BSR's")

    def __matmul__(self, other: Any) -> Any:
        return self._multiply()(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return self._multiply()(other, self)

    def _multiply(self) -> Callable[[Any, Any], Any]:
        multiply = type(self)._matmul
        if multiply is None:
            raise InvalidInput("a product with @ needs the operations; import sparsek")
        return multiply

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Lets torch.matmul(A, B) and, inside torch.compile, A @ B arrive here; other torch functions refuse it.

        Dynamo (torch 2.13) hands over both A @ B and B @ A as matmul(B, A). Shapes tell which one was meant, unless
        both fit; then this raises and asks for sparsek.spmm(A, B).
        """
        if kwargs or len(args) != 2 or func.__name__ not in ("matmul", "__matmul__", "__rmatmul__"):
            return NotImplemented
        first, second = args
        if isinstance(first, cls):
            return first.__matmul__(second)
        if torch.compiler.is_compiling():
            after = first.shape[-1] == second.shape[0]
            if after and first.ndim > 1 and first.shape[-2] == second.shape[1]:
                raise InvalidInput(
                    "torch.compile does not tell A @ B from B @ A here; write sparsek.spmm(A, B)"
                )
            if not after:
                return second.__matmul__(first)
        return second.__rmatmul__(first)


class Stored(Multiplied):
    """A matrix whose stored elements are `values`."""

    values: Tensor

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

    def _place(self, device: Any, dtype: Any) -> tuple[torch.device, torch.dtype]:
        """Where `to(device, dtype)` goes, and in which dtype. Raises InvalidInput for what is neither."""
        if isinstance(device, torch.dtype):
            raise InvalidInput(f"the first argument of .to is the device; write .to(dtype={device})")
        target = self.device if device is None else arguments.device("device", device)
        return target, self.dtype if dtype is None else arguments.dtype("dtype", dtype)


class OfBlocks(Stored):
    """A matrix whose stored blocks are those of `pattern`."""

    pattern: BlockPattern

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
        """Stored blocks over all blocks."""
        return self.pattern.density

    def home(self) -> BlockPattern:
        """Where its plans are kept."""
        return self.pattern
