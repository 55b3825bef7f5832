"""Checks of public arguments: each returns the plain value or raises InvalidInput.

Every check takes the argument's name and its value, in this order. A message names the value and what would be right,
and shows at most a line of the value: for a tensor its dtype and shape, not its elements.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    unwrap_if_dead,
)
from torch.compiler import is_compiling
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput

UNINITIALIZED = (UninitializedParameter, UninitializedBuffer)
INT32_MAX = 2**31 - 1  # of lengths, and of all that indices count
LONGEST = 80  # characters of a value in a message
MOVE = "move one of them, SparseK does not"
LOCAL = "pass .to_local(), the shard of this process, or .full_tensor()"
TENSORS = (Tensor, torch.nn.Parameter)
"""Tensor classes that do not intercept ops, as other subclasses may."""


def shown(value: Any) -> str:
    """A value as messages show it: its repr if that is short, else its type and, for a tensor, dtype and shape."""
    if isinstance(value, Tensor):
        if value.is_nested or isinstance(value, UNINITIALIZED):
            return f"a torch.Tensor, {value.dtype}, {'nested' if value.is_nested else 'uninitialized'}"
        layout = "" if value.layout == torch.strided else f", layout {value.layout}"
        return f"a torch.Tensor, {value.dtype} {list(value.shape)}{layout}"
    if isinstance(value, np.ndarray):
        return f"a numpy.ndarray, {value.dtype} {list(value.shape)}"
    try:
        text = repr(value)
    except Exception:  # a value's own repr may raise anything
        return f"a {type(value).__name__}"
    if "\n" in text or len(text) > LONGEST:
        return f"a {type(value).__name__} ({' '.join(text.split())[: LONGEST - 20]}...)"
    return text


def integer(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """A plain int from `least` to `most`. A bool is refused; so is a tensor, because reading it would synchronise."""
    try:
        found = None if isinstance(value, (bool, np.bool_, Tensor)) else operator.index(value)
    except TypeError:
        found = None
    if found is not None and found >= least and (most is None or found <= most):
        return found
    right = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InvalidInput(f"{name} is {shown(value)}; it must be an int {right}")


def power_of_two(name: str, value: Any, least: int, most: int) -> int:
    """A plain int that is a power of two from `least` to `most`."""
    found = integer(name, value, least, most)
    if found & (found - 1):
        raise InvalidInput(f"{name} is {found}; it must be a power of two from {least} to {most}")
    return found


def number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite float from `least` to `most`. No NaN, no bool, no text, and no tensor: reading it would synchronise."""
    if type(value) is float and least <= value <= most and -math.inf < value < math.inf:
        return value
    try:
        found = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        found = math.nan
    # Comparisons, because torch.compile cannot trace isfinite of a symbol.
    if -math.inf < found < math.inf and least <= found <= most:
        return found
    if math.isinf(least) and math.isinf(most):
        right = ""
    elif math.isinf(most):
        right = f", {least:g} or greater"
    else:
        right = f" from {least:g} to {most:g}"
    hint = f"; write float({name}), which waits for the device" if isinstance(value, Tensor) else ""
    raise InvalidInput(f"{name} is {shown(value)}; it must be a finite number{right}{hint}")


def flag(name: str, value: Any) -> bool:
    """True or False; numbers are refused."""
    if isinstance(value, bool):
        return value
    raise InvalidInput(f"{name} is {shown(value)}; it must be True or False")


def one_of(name: str, value: Any, choices: Collection[str]) -> str:
    """`value`, if it is one of the given texts."""
    if isinstance(value, str) and value in choices:
        return value
    raise InvalidInput(f"{name} is {shown(value)}; use one of {', '.join(choices)}")


def text(name: str, value: Any) -> str:
    """A str."""
    if isinstance(value, str):
        return value
    raise InvalidInput(f"{name} is {shown(value)}; it must be a text")


def encodable(name: str, value: Any) -> str:
    """A str without halves of surrogate pairs, which neither torch's ops nor files take."""
    if not text(name, value).isascii() and any("\ud800" <= each <= "\udfff" for each in value):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a text that UTF-8 can hold")
    return value


def pair(name: str, value: Any, least: int = 0, most: int | None = None) -> tuple[int, int]:
    """Two ints from `least` to `most`, as a tuple."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == 2:
        return integer(f"{name}[0]", value[0], least, most), integer(f"{name}[1]", value[1], least, most)
    raise InvalidInput(f"{name} is {shown(value)}; it must be two ints")


def dtype(name: str, value: Any, choices: Collection[torch.dtype] = dtypes.FLOATS) -> torch.dtype:
    """A torch dtype out of `choices`."""
    if isinstance(value, torch.dtype) and value in choices:
        return value
    right = "it must be" if len(choices) == 1 else "use one of"
    raise InvalidInput(f"{name} is {shown(value)}; {right} {', '.join(map(str, choices))}")


def device(name: str, value: Any) -> torch.device:
    """A CPU or CUDA device that this machine has, with its index. An int is refused: write "cuda:0"."""
    if not isinstance(value, (str, torch.device)):
        raise InvalidInput(f"{name} is {shown(value)}; it must be a torch device: 'cpu' or 'cuda:0'")
    try:
        found = torch.device(value)
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(
            f"{name} is {shown(value)}; it must be a torch device: 'cpu' or 'cuda:0'"
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise InvalidInput(f"{name} is {shown(value)}; use a CUDA device or the CPU")
    if found.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0 or (found.index or 0) >= count:
        raise InvalidInput(f"{name} {found} is not on this machine; torch sees {count} CUDA devices")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def supported(name: str, value: torch.device) -> None:
    """InvalidInput unless SparseK has kernels for this device."""
    if value.type not in ("cpu", "cuda"):
        raise InvalidInput(f"{name} is on {value}, which is not supported; use a CUDA device or the CPU")


def one_device(
    what: str, here: torch.device, other: str, there: torch.device, cure: str = "put both on one device"
) -> None:
    """InvalidInput unless both devices are one: "values are on cpu and scale on cuda:0; put both on one device"."""
    if here != there:
        raise InvalidInput(f"{what} on {here} and {other} on {there}; {cure}")


def tensor(
    name: str, value: Any, choices: Collection[torch.dtype] | None = None, ndim: int | None = None
) -> Tensor:
    """A dense tensor on the CPU or a CUDA device, not lazily negated or conjugated, of one of these dtypes and with
    `ndim` dimensions.
    """
    dense(name, value)
    supported(name, value.device)
    if choices is not None:
        dtype(f"the dtype of {name}", value.dtype, choices)
    if ndim is not None and value.ndim != ndim:
        raise InvalidInput(f"{name} has shape {list(value.shape)}; it must be {ndim}-D")
    if not is_compiling() and value.is_conj():  # the op checks again
        raise InvalidInput(f"{name} is a lazily conjugated view of other memory; call .resolve_conj()")
    return value


def dense(name: str, value: Any) -> Tensor:
    """As `tensor`, on any device and of any dtype: for a tensor that is compared with another, or only predicted."""
    if is_ordinary(value):
        return value
    if not isinstance(value, Tensor):
        plain = isinstance(value, (list, tuple)) and all(isinstance(each, (int, float)) for each in value)
        cure = f": torch.tensor({name})" if plain else ""
        if isinstance(value, torch.fx.Proxy):
            cure = " of torch.fx; sparse layers are leaves of a trace (Tracer.is_leaf_module), or use torch.export"
        raise InvalidInput(f"{name} must be a dense torch.Tensor, got {type(value).__name__}{cure}")
    if not is_dense(value):
        raise InvalidInput(f"{name} must be a dense torch.Tensor, got {_other_kind(name, value)}")
    if is_compiling():  # the op checks again
        return value
    check_untraced()
    if value.is_neg():
        raise InvalidInput(
            f"{name} is a lazily negated view, whose memory has the other sign; call .resolve_neg()"
        )
    if value._is_zerotensor():
        raise InvalidInput(f"{name} is a tensor of zeros without memory, as tangents may be; call .clone()")
    if wraps(value) and not value.is_floating_point():
        raise InvalidInput(
            f"{name} is a {type(value).__name__}, which wraps other tensors and hides its ints; pass a plain tensor"
        )
    return living(name, value)


def check_untraced() -> None:
    """InvalidInput inside torch.jit.trace."""
    if not is_compiling() and torch._C._is_tracing():
        raise InvalidInput(
            "torch.jit.trace, and torch.onnx.export(dynamo=False), do not record SparseK's kernels; use "
            "torch.compile or torch.export.export"
        )


def dense_beside(name: str, value: Any, other: str, like: Any) -> Tensor:
    """As `dense`, for an operand beside `like`, called `other`: see `check_real`."""
    found = dense(name, value)
    check_real(other, like, name, found)
    return found


def check_real(what: str, x: Any, other: str, y: Any) -> None:
    """InvalidInput if one of both is fake and the other has values, unless their FakeTensorMode takes both; and if one
    alone is a DTensor.
    """
    if is_compiling() or not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return
    wrapped = is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(y)
    if type(x) in TENSORS and type(y) in TENSORS and not wrapped and not faking():
        return
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    while is_functorch_wrapped_tensor(y):
        y = get_unwrapped(y)
    check_distributed(what, x, other, y)
    fake = is_fake(x), is_fake(y)
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if all(fake) or (mode is None and not any(fake)):
        return
    held: Any = x if fake[0] else y
    if (held.fake_mode if mode is None else mode).allow_non_fake_inputs:
        return
    real = other if fake[0] else what
    raise InvalidInput(
        f"a call takes FakeTensors, which have no values, or real tensors, and not both: {real} is real; convert it by "
        "the FakeTensorMode's from_tensor, or make that mode with allow_non_fake_inputs=True"
    )


def check_distributed(what: str, x: Tensor, other: str, y: Tensor) -> None:
    """InvalidInput if one of both is a DTensor and the other is not."""
    if is_distributed(x) != is_distributed(y):
        kinds = ("a DTensor", "a plain tensor")[:: 1 if is_distributed(x) else -1]
        raise InvalidInput(f"{what} and {other} are {' and '.join(kinds)}; {LOCAL}")


def is_distributed(x: Tensor) -> bool:
    """Whether it is a DTensor, which stands for the shards of several processes."""
    if type(x) in TENSORS:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_ordinary(value: Any) -> bool:
    """Whether `dense` need look no further, as at most tensors: it has memory of its own, and nothing traces it."""
    return (
        type(value) in TENSORS
        and not is_compiling()
        and value.layout is torch.strided
        and not (
            value.is_nested
            or value.is_quantized
            or value.is_neg()
            or value._is_zerotensor()
            or is_functorch_wrapped_tensor(value)
        )
        and not torch._C._is_tracing()
    )


def is_dense(value: Tensor) -> bool:
    """Whether a tensor has a shape and strided memory, or can have: not one of `_other_kind`."""
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        return False
    return value.__class__ is Tensor or not isinstance(value, (*UNINITIALIZED, torch.masked.MaskedTensor))


def wraps(value: Tensor) -> bool:
    """Whether it is of a subclass that wraps other tensors, such as a DTensor: it has no memory of its own."""
    return value.__class__ is not Tensor and is_traceable_wrapper_subclass(value)


def living(name: str, value: Tensor) -> Tensor:
    """A tensor that is not wrapped by a transform of torch.func that has ended: kernels cannot read its memory."""
    if not is_ended(value):
        return value
    if is_batchedtensor(value):
        raise InvalidInput(
            f"{name} was made inside a function that torch.func.vmap mapped, and is used after it; return it from "
            "that function"
        )
    raise InvalidInput(
        f"{name} was made inside a function that torch.func transformed, and is used after it; call .clone()"
    )


def is_ended(value: Tensor) -> bool:
    """Whether a tensor is wrapped by a transform of torch.func that has ended."""
    if is_compiling() or not is_functorch_wrapped_tensor(value):
        return False
    return unwrap_if_dead(value) is not value or not torch._C._are_functorch_transforms_active()


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has a shape and no values, as those by which torch.compile traces."""
    if type(x) is Tensor:
        return False
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(x, module.FakeTensor)


def faking() -> bool:
    """Whether tensors made now are fake."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _other_kind(name: str, value: Tensor) -> str:
    """What a tensor that is not dense is, and what makes it dense."""
    if value.is_nested:
        return f"a nested tensor; pad it: torch.nested.to_padded_tensor({name}.contiguous(), 0.0)"
    if isinstance(value, UNINITIALIZED):
        return "an uninitialized parameter, which has no shape; call its lazy module once with an input"
    if value.is_quantized:
        return "a quantized tensor; call .dequantize()"
    if isinstance(value, torch.masked.MaskedTensor):
        return "a MaskedTensor; call .to_tensor(0.0)"
    return f"layout {value.layout}; call .to_dense()"


def kept(name: str, value: Tensor) -> Tensor:
    """A tensor that autograd can save for a backward pass; inference tensors are refused."""
    if is_compiling():
        return value
    held = value
    while is_functorch_wrapped_tensor(held):
        held = get_unwrapped(held)
    if held.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidInput(
            f"{name} was made in torch.inference_mode, and no backward pass can keep it; make it under torch.no_grad, "
            "or .clone() it outside of inference mode"
        )
    return value
