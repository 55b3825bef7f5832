"""The base classes of all formats: products by @ and F.linear, and the methods of a torch.Tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeGuard, overload

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes, operations
from sparsek.core.arguments import faking, is_fake
from sparsek.core.errors import InvalidInput
from sparsek.core.record import Record
from sparsek.core.tracing import check_aligned, check_has_values, concrete, untransformed
from sparsek.products.formats.pattern import BlockPattern

if TYPE_CHECKING:
    from typing_extensions import Self


ALIGNMENT = 16  # bytes of one load of a kernel
SURE = 1e-12  # a norm from here on lost nothing that counts to squares that underflow in float32
PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "mv")


class NotDense(InvalidInput, TypeError):
    """A function of torch or numpy that takes dense tensors only was called with a sparse or quantized operand.

    Also a TypeError, after which Python tries the operator of the matrix.
    """


class NoTensor(InvalidInput, AttributeError):
    """An attribute that tensors have and a matrix has not. Also an AttributeError, as `hasattr` expects."""


class Multiplied:
    """`A @ B` and `B @ A` for an operand that is no torch.Tensor: both call the function of `register_matmul`."""

    _matmul: ClassVar[Any] = None  # a function of both operands
    _linear: ClassVar[Callable[..., Tensor] | None] = None
    _as_tensor: ClassVar[str] = "A.to_dense()"
    __array_ufunc__ = None  # numpy arrays then leave `array @ A` to __rmatmul__
    shape: Any

    @classmethod
    def register_matmul(cls, multiply: Callable[[Any, Any], Any]) -> None:
        """Set the function that `A @ B` and `B @ A` call, with the operands in that order. Internal."""
        cls._matmul = staticmethod(multiply)
        cls.__matmul__ = multiply  # pyright: ignore[reportAttributeAccessIssue]  # itself: a frame less for the host

    @classmethod
    def register_linear(cls, linear: Callable[..., Tensor]) -> None:
        """Set the function that `torch.nn.functional.linear(x, A, bias)` calls. Internal."""
        cls._linear = staticmethod(linear)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise InvalidInput: FP8 values get no gradient."""
        raise InvalidInput(f"a {type(self).__name__} has FP8 values, for which products have no gradient")

    def __matmul__(self, other: Tensor | Multiplied) -> Tensor:
        """Return self @ other, dense; see `sparsek.spmm`."""
        return (self._matmul or self._loaded())(self, other)

    def __rmatmul__(self, other: Tensor | Multiplied) -> Tensor:
        """Return other @ self, dense; see `sparsek.spmm`."""
        return (self._matmul or self._loaded())(other, self)

    def _loaded(self) -> Callable[[Any, Any], Any]:
        operations.load()
        if self._matmul is None:
            raise InvalidInput("a product with @ needs the operations; import sparsek")
        return self._matmul

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise NotDense(
            f"numpy has no {type(self).__name__}; {self._as_tensor} is a dense tensor, and "
            f"{self._as_tensor}.numpy(force=True) an array"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Dispatch torch.matmul(A, B), mm, mv, F.linear(x, A) and, inside torch.compile, A @ B. Refuse other functions.

        Dynamo (torch 2.13) passes both A @ B and B @ A as matmul(B, A). The shapes decide which one was written; where
        both fit, this raises InvalidInput, and `sparsek.spmm(A, B)` is the cure.
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
    """Raise InvalidInput unless `x` is contiguous and starts at a multiple of ALIGNMENT bytes, as kernels read it."""
    if not x.is_contiguous():
        raise InvalidInput(f"{name} must be contiguous; call .contiguous()")
    check_aligned(name, x, ALIGNMENT)


def check_finite(name: str, values: Tensor, *, wait: bool = True) -> None:
    """Raise InvalidInput for NaN and Inf among the values that a format is to store.

    One sync; with wait=False none, and values on a GPU pass. So do traced ones, and those that vmap maps over.
    """
    if torch.compiler.is_compiling() or faking() or is_fake(values) or (values.is_cuda and not wait):
        return
    try:
        plain = concrete(values, "", "")
    except InvalidInput:  # vmap maps over them
        return
    strange = untransformed(lambda: plain.numel() - int(plain.isfinite().sum()), plain)
    if strange:
        raise InvalidInput(
            f"{name} has {strange} elements that are NaN or Inf; sparse formats store finite values: "
            f"torch.nan_to_num({name})"
        )


def is_vector(x: Any) -> TypeGuard[Tensor]:
    """Whether this is a tensor with one dim."""
    if x.__class__ is not Tensor and (not isinstance(x, Tensor) or isinstance(x, arguments.UNINITIALIZED)):
        return False
    return x.dim() == 1


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
                f"torch.compile cannot distinguish A @ B from B @ A here; write sparsek.spmm(A, B{vector})"
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
    """The methods of a 2-D tensor, for a matrix that consists of several tensors."""

    if TYPE_CHECKING:
        # Attributes or properties of the classes below.
        shape: Any
        T: Any

        @property
        def dtype(self) -> torch.dtype: ...
        @property
        def device(self) -> torch.device: ...

    def _at(self, device: torch.device, dtype: torch.dtype) -> Self:
        """This matrix on `device` in `dtype`; at least one of the two changes."""
        raise NotImplementedError

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """This matrix with its values replaced by change(values); the rest is shared."""
        raise NotImplementedError

    def _checked_dtype(self, dtype: Any) -> torch.dtype:
        if isinstance(dtype, torch.dtype) and dtype in dtypes.FP8:
            raise InvalidInput(
                f"a matrix in FP8 needs scales: sparsek.quantize(A, {dtype}) is this one in {dtype}"
            )
        return arguments.dtype("dtype", dtype)

    @overload
    def to(self, device: torch.dtype) -> Self: ...
    @overload
    def to(self, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Self: ...
    def to(
        self, device: str | torch.device | torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return this matrix on `device` and in `dtype`; the same object if nothing changes. Differentiable.

        Args:
            device: "cpu", "cuda", "cuda:0" or a torch.device. A torch.dtype as the only argument is the dtype.
            dtype: bf16, fp16, fp32 or fp64.

        Raises:
            InvalidInput: For a device that this machine does not have, or an FP8 dtype, which `sparsek.quantize` makes.
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
        """Return this matrix on a CUDA device, the current one by default."""
        if isinstance(device, int):
            device = f"cuda:{arguments.integer('device', device)}"
        target = arguments.device("device", "cuda" if device is None else device)
        if target.type != "cuda":
            raise InvalidInput(f"device is {target}; .cuda() goes to CUDA devices, .to(device) to any")
        return self.to(target)

    def cpu(self) -> Self:
        """Return this matrix on the CPU."""
        return self.to("cpu")

    def bfloat16(self) -> Self:
        """Return this matrix in torch.bfloat16."""
        return self.to(torch.bfloat16)

    def half(self) -> Self:
        """Return this matrix in torch.float16."""
        return self.to(torch.float16)

    def float(self) -> Self:
        """Return this matrix in torch.float32."""
        return self.to(torch.float32)

    def double(self) -> Self:
        """Return this matrix in torch.float64."""
        return self.to(torch.float64)

    def detach(self) -> Self:
        """Return this matrix outside autograd, on the same memory."""
        return self._each(Tensor.detach)

    def clone(self) -> Self:
        """Return a copy with its own values. Pattern and metadata, which are immutable, are shared. Differentiable."""
        return self._each(Tensor.clone)

    @property
    def mT(self) -> Self:  # noqa: N802
        """The transpose, as `.T`."""
        return self.T

    @property
    def ndim(self) -> int:
        """The number of dimensions, 2."""
        return 2

    @property
    def data(self) -> NoReturn:
        """Raise InvalidInput: code that adds to `.data`, as peft's merge does, needs a dense weight."""
        raise NoTensor(
            f"a {type(self).__name__} has no .data; {self._as_tensor} is a dense tensor. A dense update, such as that "
            "of a LoRA adapter, is not zero where nothing is stored: leave it unmerged, or merge it into a "
            "torch.nn.Linear"
        )

    def dim(self) -> int:
        """Return the number of dimensions, 2."""
        return 2

    def numel(self) -> int:
        """Return M * K, as for a dense matrix; `values.numel()` counts what is stored."""
        return self.shape[0] * self.shape[1]

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return torch.Size([M, K]), or one side of it."""
        return torch.Size(self.shape) if dim is None else self.shape[arguments.integer("dim", dim, -2, 1)]


class Stored(Matrix):
    """A matrix whose stored elements are the tensor `values`."""

    values: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values and of the indices."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd computes a gradient for the values."""
        return self.values.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set whether autograd computes a gradient for the values, as of a leaf tensor. Return this object.

        `values.grad` is that of the stored elements. Transposed views of a BSR share the values, and so the gradient,
        which `A.grad` of a BSR returns as one.

        Raises:
            InvalidInput: For values made in inference mode, and to switch off the gradient of computed values.
        """
        asked = arguments.flag("requires_grad", requires_grad)
        if self.values.is_inference() and asked:
            raise InvalidInput(
                "values that were made in inference mode can have no gradient; clone them outside of it"
            )
        if self.values.grad_fn is not None and not asked:
            raise InvalidInput("the values were computed from others that require a gradient; use .detach()")
        self.values.requires_grad_(asked)
        return self

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return this matrix with values fn(values), on the same pattern or metadata. Differentiable.

        Elements that are not stored stay 0, whatever fn(0) is.

        Args:
            fn: An elementwise function. It returns a tensor of the same shape, in bf16, fp16, fp32 or fp64.

        Raises:
            InvalidInput: If `fn` returns another shape, dtype or device.

        Example:
            `A.map(torch.relu)`
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

    def kept_norm(self, w: Tensor) -> float:
        """Return the share of the norm of a dense matrix that this one keeps: ||values|| / ||w||, Frobenius norms.

        Summed in float32, in float64 for float64; in float64 for all where a square overflows or underflows. One
        sync.

        Args:
            w: The dense matrix [M, K] that this one was made from, on the same device.

        Returns:
            A number from 0 to 1; 1.0 if `w` is all zeros.

        Raises:
            InvalidInput: If `w` has another shape or device.
        """
        arguments.tensor("w", w, dtypes.FLOATS, ndim=2)
        w = concrete(w, "kept_norm reads values", "call it outside")
        if tuple(w.shape) != self.shape or w.device != self.device:
            raise InvalidInput(
                f"w is {w.shape[0]}x{w.shape[1]} on {w.device}; "
                f"this matrix is {self.shape[0]}x{self.shape[1]} on {self.device}"
            )
        kept = whole = 0.0
        values = concrete(self.values, "kept_norm reads values", "call it outside")
        check_has_values("kept_norm reads values", "call it outside", w, values)
        for dtype in (torch.promote_types(w.dtype, torch.float32), torch.float64):
            norms = [torch.linalg.vector_norm(x.detach(), dtype=dtype) for x in (values, w)]
            kept, whole = torch.stack(norms).tolist()
            if SURE < whole < math.inf:
                break
        return kept / whole if whole else 1.0

    def _zero_outside(self, values: Tensor) -> Tensor:
        """The values with 0 outside the matrix; the same tensor where no side is ragged."""
        return values


class OfBlocks(Stored):
    """A matrix whose stored blocks are those of `pattern`."""

    pattern: BlockPattern

    @property
    def shape(self) -> tuple[int, int]:
        """(M, K), without padding."""
        return self.pattern.shape

    @property
    def block(self) -> tuple[int, int]:
        """The sides (bm, bk) of a block."""
        return self.pattern.block

    @property
    def grid(self) -> tuple[int, int]:
        """The numbers of block rows and block columns, (Mb, Kb)."""
        return self.pattern.grid

    @property
    def nnzb(self) -> int:
        """The number of stored blocks."""
        return self.pattern.nnzb

    @property
    def density(self) -> float:
        """Stored blocks over all blocks, 0 to 1."""
        return self.pattern.density

    def plan_owner(self) -> BlockPattern:
        """Return the object that caches the plans of this matrix. Internal."""
        return self.pattern


class OfDenseBlocks(OfBlocks, Record):
    """The parts of a BSR that its methods in `products/formats/convert.py` and `products/formats/algebra.py` read."""

    order: Tensor | None

    if TYPE_CHECKING:

        @property
        def T(self) -> Self: ...  # noqa: N802

        def __init__(self, pattern: BlockPattern, values: Tensor, order: Tensor | None = None) -> None: ...
        def logical_values(self) -> Tensor: ...
