"""What the matrices of all formats have in common: products with @ and F.linear, and the methods of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes, operations
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import check_aligned
from sparsek.matrix.pattern import BlockPattern

if TYPE_CHECKING:
    from typing_extensions import Self

ALIGNMENT = 16  # bytes: what kernels read at once
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "mv")


class NotDense(InvalidInput, TypeError):
    """A function of torch or numpy that takes dense tensors only was called with a matrix of another kind.

    It is a TypeError too: Python then tries the matrix's own operator.
    """


class Multiplied:
    """`A @ B` and `B @ A` for a matrix A of a class of its own: both go to what `register_matmul` was given."""

    _matmul: ClassVar[Callable[[Any, Any], Any] | None] = None
    _linear: ClassVar[Callable[..., Tensor] | None] = None
    _as_tensor: ClassVar[str] = "A.to_dense()"
    __array_ufunc__ = None  # numpy arrays then leave `array @ A` to __rmatmul__
    shape: Any

    @classmethod
    def register_matmul(cls, multiply: Callable[[Any, Any], Any]) -> None:
        """Makes `A @ B` and `B @ A` call `multiply` with both in that order. The operations, above formats, do this."""
        cls._matmul = staticmethod(multiply)

    @classmethod
    def register_linear(cls, linear: Callable[..., Tensor]) -> None:
        """Makes F.linear(x, A, bias) call `linear(x, A, bias)`."""
        cls._linear = staticmethod(linear)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Refuses: no product has a gradient for the values. A BSR has a `requires_grad_` of its own."""
        name = type(self).__name__
        raise InvalidInput(f"products have no gradient for the values of a {name}, as they have for a BSR's")

    def __matmul__(self, other: Any) -> Any:
        if _is_vector(other):
            return self._multiply(self, other.unsqueeze(1)).squeeze(1)
        return self._multiply(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        if _is_vector(other):
            return self._multiply(other.unsqueeze(1).mT, self).squeeze(0)
        return self._multiply(other, self)

    @property
    def _multiply(self) -> Callable[[Any, Any], Any]:
        if type(self)._matmul is None:
            operations.load()
        multiply = type(self)._matmul
        if multiply is None:
            raise InvalidInput("a product with @ needs the operations; import sparsek")
        return multiply

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise NotDense(
            f"numpy has no {type(self).__name__}; {self._as_tensor} is a dense tensor, and "
            f"{self._as_tensor}.numpy(force=True) an array"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Lets torch.matmul(A, B), mm and mv, F.linear(x, A) and, inside torch.compile, A @ B arrive here.

        Dynamo (torch 2.13) hands over both A @ B and B @ A as matmul(B, A). Shapes tell which one was meant, unless
        both fit; then this raises and asks for sparsek.spmm(A, B). Other torch functions are refused.
        """
        name = getattr(func, "__name__", str(func))
        if name in PRODUCTS and len(args) == 2 and not kwargs:
            return _product(cls, *args)
        if name == "linear":
            return _linear(*args, **(kwargs or {}))
        raise NotDense(
            f"torch's {name} takes dense tensors, not a {cls.__name__}. Products are A @ B, sparsek.spmm(A, B) and "
            f"sparsek.linear(x, A), or F.linear(x, A, bias); for all else {cls._as_tensor} is a dense tensor"
        )


def check_readable(name: str, x: Tensor) -> None:
    """InvalidInput unless `x` is contiguous and begins on a multiple of ALIGNMENT bytes, as kernels read it."""
    if not x.is_contiguous():
        raise InvalidInput(f"{name} must be contiguous; call .contiguous()")
    check_aligned(name, x, ALIGNMENT)


def _is_vector(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 1


def _product(cls: type[Multiplied], first: Any, second: Any) -> Any:
    """first @ second; one of them is of this class."""
    if isinstance(first, cls):
        return first.__matmul__(second)
    if torch.compiler.is_compiling():
        below = first.shape[0] if first.ndim == 1 else first.shape[-2]
        before, behind = first.shape[-1] == second.shape[0], below == second.shape[1]
        if before and behind:
            vector = ".unsqueeze(-1)" if first.ndim == 1 else ""
            raise InvalidInput(
                f"torch.compile does not tell A @ B from B @ A here; write sparsek.spmm(A, B{vector})"
            )
        if not before:
            return second.__matmul__(first)
    return second.__rmatmul__(first)


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """torch.nn.functional.linear with a sparse weight [N, K]."""
    if not isinstance(input, Tensor) or not isinstance(weight, Matrix):
        raise NotDense(
            f"F.linear(x, W, bias) takes a dense x and a sparse W, not a {type(input).__name__} and a "
            f"{type(weight).__name__}; A @ B is the product of others"
        )
    if type(weight)._linear is None:
        operations.load()
    linear = type(weight)._linear
    assert linear is not None
    return linear(input, weight, bias)


class Matrix(Multiplied):
    """The methods that a 2-D tensor has, for a matrix that is made of tensors."""

    if TYPE_CHECKING:
        # Attributes or properties of the classes below.
        shape: Any
        T: Any

        @property
        def dtype(self) -> torch.dtype: ...
        @property
        def device(self) -> torch.device: ...

    def _at(self, device: torch.device, dtype: torch.dtype) -> Self:
        """This matrix there and in that dtype, which differ."""
        raise NotImplementedError

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """This matrix with other values, made of its own; all else is shared."""
        raise NotImplementedError

    def _checked_dtype(self, dtype: Any) -> torch.dtype:
        if isinstance(dtype, torch.dtype) and dtype in dtypes.FP8:
            raise InvalidInput(
                f"a matrix in FP8 needs scales: sparsek.quantize(A, {dtype}) is this one in {dtype}"
            )
        return arguments.dtype("dtype", dtype)

    def to(
        self, device: str | torch.device | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """This matrix on `device` and in `dtype`, or in the dtype that stands alone; this very object if nothing
        changes. Differentiable.
        """
        if isinstance(device, torch.dtype):
            if dtype is not None:
                raise InvalidInput(
                    f".to({device}, {arguments.shown(dtype)}) has two dtypes; write .to(device, dtype)"
                )
            device, dtype = None, device
        target = self.device if device is None else arguments.device("device", device)
        wanted = self.dtype if dtype is None else self._checked_dtype(dtype)
        return self if (target, wanted) == (self.device, self.dtype) else self._at(target, wanted)

    def cuda(self, device: int | str | torch.device | None = None) -> Self:
        """This matrix on a CUDA device, the current one if none is named."""
        if isinstance(device, int):
            device = f"cuda:{arguments.integer('device', device)}"
        target = arguments.device("device", "cuda" if device is None else device)
        if target.type != "cuda":
            raise InvalidInput(f"device is {target}; .cuda() goes to CUDA devices, .to(device) to any")
        return self.to(target)

    def cpu(self) -> Self:
        """This matrix on the CPU."""
        return self.to("cpu")

    def bfloat16(self) -> Self:
        """This matrix in torch.bfloat16."""
        return self.to(torch.bfloat16)

    def half(self) -> Self:
        """This matrix in torch.float16."""
        return self.to(torch.float16)

    def float(self) -> Self:
        """This matrix in torch.float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """This matrix in torch.float64."""
        return self.to(torch.float64)

    def detach(self) -> Self:
        """This matrix on the same memory, outside autograd."""
        return self._each(Tensor.detach)

    def clone(self) -> Self:
        """A copy with values of its own; pattern and metadata, which nobody writes to, are shared. Differentiable."""
        return self._each(Tensor.clone)

    @property
    def mT(self) -> Any:  # noqa: N802
        """`.T`."""
        return self.T

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    def dim(self) -> int:
        """2."""
        return 2

    def numel(self) -> int:
        """M * K, as of a dense matrix. `values.numel()` are stored."""
        return self.shape[0] * self.shape[1]

    def size(self, dim: int | None = None) -> Any:
        """torch.Size([M, K]), or one of both."""
        return torch.Size(self.shape) if dim is None else self.shape[arguments.integer("dim", dim, -2, 1)]


class Stored(Matrix):
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

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """This matrix with fn(values) for its values: `A.map(torch.relu)`. Pattern and metadata stay.

        `fn` works element by element and returns as many, in any dtype that matrices have. Elements that are not stored
        stay 0, whatever fn(0) is. Differentiable. Raises InvalidInput for another shape or device.
        """

        if not callable(fn):
            raise InvalidInput(f"fn is {arguments.shown(fn)}; it must be a function of the values")

        def change(values: Tensor) -> Tensor:
            made = arguments.tensor("what fn returns", fn(values), dtypes.FLOATS)
            if made.shape != values.shape or made.device != values.device:
                raise InvalidInput(
                    f"fn makes {list(made.shape)} on {made.device} of values {list(values.shape)} on {values.device}; "
                    "it must work element by element"
                )
            made = made.contiguous()
            check_aligned("what fn returns", made, ALIGNMENT)
            return self._zero_outside(made)

        return self._each(change)

    def _zero_outside(self, values: Tensor) -> Tensor:
        """Values with 0 outside the matrix; the same tensor where nothing is outside."""
        return values


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
