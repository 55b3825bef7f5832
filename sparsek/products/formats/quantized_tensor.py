"""QuantizedTensor, a dense operand with FP8 values and float32 scales, made once for many products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import by_kernel
from sparsek.core.record import Record, record
from sparsek.core.tracing import check_has_values, of_values
from sparsek.products.formats.base import Multiplied, check_readable
from sparsek.products.formats.float8 import MOST, NAMES, largest_of, relative_error, rounded, scales_of

DenseScale: TypeAlias = Literal["tensor", "row"]
SCALES = get_args(DenseScale)


class ScaledTensor(Record):
    """What a QuantizedTensor and QuantizedHeads share: dense values in FP8, and float32 scales."""

    values: Tensor
    scale: Tensor

    if TYPE_CHECKING:

        @property
        def shape(self) -> torch.Size: ...
        def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor: ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values, torch.float8_e4m3fn or torch.float8_e5m2."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of values and scales."""
        return self.values.device

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.values.ndim

    def error(self, x: Tensor) -> float:
        """Return the relative error of the quantization, ||scale * values - x|| / ||x||, in Frobenius norms.

        Computed in float64, with one sync. Raises InvalidInput if `x` has another shape or device.
        """
        if arguments.tensor("x", x, dtypes.FLOATS).shape != self.shape or x.device != self.device:
            raise InvalidInput(
                f"this is the quantized form of a tensor {list(self.shape)} on {self.device}; "
                f"got {list(x.shape)} on {x.device}"
            )
        check_has_values("error reads values", "call it outside", x, self.values)
        both = x, self.dequantize(torch.float64)
        return of_values(relative_error, *both, reads="error reads values", instead="call it outside")


@record(leaves=("values", "scale"), own=("values", "scale"))
@dataclass(frozen=True, eq=False, repr=False)
class QuantizedTensor(Multiplied, ScaledTensor):
    """A dense tensor [..., K] with FP8 values and float32 scales: scale * values. `sparsek.quantize` makes one.

    It is the dense operand of products with a `Quantized`; made once, it saves each product the rounding. FP8 tensor
    cores read both operands along K, so K is always the contiguous side. Construction checks the parts, and that every
    scale is positive and finite, with one sync.

    As an attribute of a torch.nn.Module it is neither parameter nor buffer: it is not in `state_dict()`, and `.to()` of
    the module leaves it as it is.

    Attributes:
        values: [..., K] in torch.float8_e4m3fn or torch.float8_e5m2, contiguous and aligned to 16 bytes.
        scale: float32, contiguous, on the device of the values: [...], one for each row of K values, or [], one for
            all.
        turned: Whether this is the transpose of the last two dims: shape [..., K, T] for values [..., T, K].

    Raises:
        InvalidInput: For parts that do not fit.
    """

    values: Tensor
    scale: Tensor
    turned: bool = False
    _as_tensor = "x.dequantize()"

    def __post_init__(self) -> None:
        if check_fp8_values(self.values).ndim < 1:
            raise InvalidInput("values must be [..., K], got a single number")
        _check_shape(self.scale, self.values)
        if arguments.flag("turned", self.turned) and self.values.ndim < 2:
            raise InvalidInput("values are a vector, which has no transpose")

    @property
    def shape(self) -> torch.Size:
        """The shape [..., K], or [..., K, T] of a transpose."""
        if not self.turned:
            return self.values.shape
        *batch, rows, columns = self.values.shape
        return torch.Size((*batch, columns, rows))

    @property
    def kind(self) -> DenseScale:
        """What shares a scale: each "row" of `values`, or the whole "tensor"."""
        return "row" if self.scale.ndim == self.values.ndim - 1 else "tensor"

    @property
    def mT(self) -> QuantizedTensor:  # noqa: N802
        """The transpose of the last two dims, a view."""
        if self.ndim < 2:
            raise InvalidInput(f"a transpose needs two dims, this has shape {list(self.shape)}")
        return QuantizedTensor.unchecked(self.values, self.scale, not self.turned)

    @property
    def T(self) -> QuantizedTensor:  # noqa: N802
        """The transpose of a 2-D tensor, a view; `.mT` is for more dimensions."""
        if self.ndim != 2:
            raise InvalidInput(f".T is for matrices, this has shape {list(self.shape)}; use .mT")
        return self.mT

    def rows(self) -> QuantizedTensor:
        """Return a view with the leading dims joined: values [T, K], scale [T] or []. Not for a transpose."""
        if self.turned:
            raise InvalidInput("rows of a transpose do not lie side by side")
        if self.ndim == 2:
            return self
        k = self.values.shape[-1]
        scale = self.scale.reshape(-1) if self.kind == "row" else self.scale
        return QuantizedTensor.unchecked(self.values.reshape(self.values.shape[:-1].numel(), k), scale)

    def to(self, device: str | torch.device | None = None) -> QuantizedTensor:
        """Return this tensor on `device`; the same object if it is there already. `dequantize` changes the dtype."""
        if isinstance(device, torch.dtype):
            raise InvalidInput(f"a QuantizedTensor is FP8; .dequantize({device}) is it in another dtype")
        target = self.device if device is None else arguments.device("device", device)
        if target == self.device:
            return self
        return QuantizedTensor.unchecked(self.values.to(target), self.scale.to(target), self.turned)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return scale * values as a torch.Tensor of this shape. No sync.

        Args:
            dtype: bf16, fp16, fp32 or fp64. The product is computed in float32 (float64 for fp64), then rounded.
        """
        arguments.dtype("dtype", dtype)
        wide = torch.promote_types(dtype, torch.float32)
        scale = self.scale.unsqueeze(-1) if self.kind == "row" else self.scale
        made = (self.values.to(wide) * scale).to(dtype)
        return made.mT if self.turned else made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values as bytes, because torch pickles no FP8 tensor."""
        return _of_bytes, (self.values.view(torch.uint8), self.dtype, self.scale, self.turned)

    def __repr__(self) -> str:
        if not isinstance(self.values, Tensor) or not isinstance(self.scale, Tensor):
            return "QuantizedTensor(values not concrete)"
        size = (self.values.nbytes + self.scale.nbytes) / 1e6
        turned = ", transposed view" if self.turned else ""
        sides = "x".join(map(str, self.shape))
        what = f"{sides} {NAMES.get(self.dtype, self.dtype)}, scale per {self.kind}"
        return f"QuantizedTensor({what}, {size:.3g} MB, {self.device}{turned})"


def _of_bytes(values: Tensor, dtype: torch.dtype, scale: Tensor, turned: bool) -> QuantizedTensor:
    """The inverse of `QuantizedTensor.__reduce__`."""
    return QuantizedTensor.unchecked(values.view(dtype), scale, turned)


def quantize_dense(
    x: Tensor, dtype: torch.dtype, scale: str, check: bool, together: bool = False
) -> QuantizedTensor:
    """Quantize a dense x [..., K]; `sparsek.quantize` has checked the arguments. On a GPU one kernel scales and rounds
    rows. `together`: values and scales may be views of one allocation."""
    x = x.detach()
    if check:
        check_finite(x, None, dtype, "values", str)
    plain = x.is_cuda and scale == "row" and not torch.compiler.is_compiling()
    made = by_kernel("round_rows", x, dtype, together) if plain else None
    if made is None:
        made = _rounded(x, dtype, by_row=scale == "row")
    return QuantizedTensor.unchecked(*made)


def _rounded(x: Tensor, dtype: torch.dtype, by_row: bool) -> tuple[Tensor, Tensor]:
    """The values, and the scale of each row, or of all."""
    scale = scales_of(largest_of(x, (-1,) if by_row else tuple(range(x.ndim))), dtype)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return rounded(wide / (scale.unsqueeze(-1) if by_row else scale), dtype).contiguous(), scale


def check_finite(
    values: Tensor, largest: Tensor | None, dtype: torch.dtype, what: str, place: Callable[[list[int]], str]
) -> None:
    """Raise InvalidInput if a value is not finite, or its scale in `dtype` would not be. One sync otherwise.

    `largest`: magnitudes that are checked first. place(indices of a value): its position, as text.
    """
    if torch.compiler.is_compiling():
        raise InvalidInput("torch.compile cannot wait to see NaN and Inf; write quantize(..., check=False)")
    limit = min(torch.finfo(values.dtype).max, torch.finfo(dtype).max * MOST)

    def look(values: Tensor, largest: Tensor | None) -> None:
        if not int(torch.count_nonzero(~((values.abs() if largest is None else largest) <= limit))):
            return
        strange = ~(values.abs() <= limit)
        huge = f" or beyond {limit:.3g}, where scales leave float32" if values.dtype == torch.float64 else ""
        raise InvalidInput(
            f"{int(torch.count_nonzero(strange))} of {values.numel()} {what} are NaN or Inf{huge}; the first is at "
            f"{place(torch.nonzero(strange)[0].tolist())}; FP8 with scales holds finite values"
        )

    reads = "quantize looks for NaN and Inf in values"
    of_values(look, values, largest, reads=reads, instead="write quantize(..., check=False)")


def check_fp8_values(values: Any) -> Tensor:
    """Return `values`. Raise InvalidInput unless they are dense, contiguous and aligned FP8."""
    arguments.tensor("values", values)
    if values.dtype not in NAMES:
        raise InvalidInput(
            f"values must be FP8, one of {', '.join(map(str, NAMES))}, got {values.dtype}; sparsek.quantize makes them"
        )
    check_readable("values", values)
    return values


def _check_shape(scale: Any, values: Tensor) -> None:
    arguments.tensor("scale", scale, (torch.float32,))
    if scale.shape not in ((), values.shape[:-1]):
        raise InvalidInput(
            f"scale has shape {list(scale.shape)}; values {list(values.shape)} need {list(values.shape[:-1])}, one for "
            "each row, or [], one for all"
        )
    check_scale(scale, values.device)


def check_scale(scale: Tensor, device: torch.device) -> None:
    """Raise InvalidInput unless float32 scales are contiguous, on `device`, positive and finite. One sync."""
    arguments.one_device("values are", device, "scale", scale.device)
    if not scale.is_contiguous():
        raise InvalidInput("scale must be contiguous; call .contiguous()")
    count = of_values(
        lambda scale: int(torch.count_nonzero(~((scale > 0) & (scale <= MOST)))),
        scale, reads="scales are checked by their values", instead="make it outside",
    )  # fmt: skip
    if count:
        raise InvalidInput(f"{count} of {scale.numel()} scales are not positive and finite")
