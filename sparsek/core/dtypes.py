"""The supported dtypes and their short names."""

from contextlib import AbstractContextManager, nullcontext

import torch

from sparsek.core.errors import InvalidInput

NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
FLOATS = tuple(NAMES)
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
LOW = (torch.bfloat16, torch.float16)
_BY_NAME = {short: dtype for dtype, short in {**NAMES, **FP8}.items()}


def name(dtype: torch.dtype) -> str:
    """Short name of a dtype: "bf16", "fp16", "fp32" or "fp64". Raises InvalidInput for any other dtype."""
    if dtype not in NAMES:
        raise InvalidInput(f"dtype {dtype} is not supported; use one of {', '.join(map(str, FLOATS))}")
    return NAMES[dtype]


def shown(dtype: torch.dtype) -> str:
    """A printable name for any dtype, including those that are stored but not multiplied."""
    return NAMES.get(dtype) or FP8.get(dtype) or str(dtype)


def parse(text: str) -> torch.dtype:
    """The dtype of a short name ("bf16") or of torch's own name ("bfloat16")."""
    for dtype, short in NAMES.items():
        if text in (short, str(dtype), str(dtype).removeprefix("torch.")):
            return dtype
    raise InvalidInput(f"unknown dtype {text!r}; use one of {', '.join(NAMES.values())}")


def itemsize(dtype_name: str) -> int:
    """Bytes of one element of a dtype given by its short name, FP8 too: "bf16", "e4m3"."""
    return _BY_NAME[dtype_name].itemsize if dtype_name in _BY_NAME else parse(dtype_name).itemsize


def as_given(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch.autocast does not change the operands' dtypes."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):  # autocast does not know "meta"
        return torch.autocast(device.type, enabled=False)
    return _AS_IS


_AS_IS = nullcontext()
