"""A default device and dtype of torch that only SparseK's own calls see, for a whole run of the tests.

    SPARSEK_TEST_DEFAULTS=meta,float64 pytest tests/ops ...

Tests make tensors of their own without a device, so torch.set_default_device would break them and not SparseK. A call
of torch counts as SparseK's if the frame that makes it is in sparsek/. A factory call without device= then gives a
tensor of that device, "meta" on any machine, and what is made of Python numbers and ints has that dtype.
`tests/ops/test_defaults.py` does the same with torch's own settings to every public function.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

import sparsek

FOLDER = str(Path(sparsek.__file__).parent) + os.sep
# Between a caller and a mode stand these where a function of torch is written in Python.
BETWEEN = ("overrides.py", "_tensor.py", "functional.py", "_jit_internal.py")
OF_TORCH = str(Path(torch.__file__).parent) + os.sep


class OddDefaults(TorchFunctionMode):
    """What torch.set_default_device and torch.set_default_dtype do, for calls from sparsek/ alone."""

    def __init__(self, device: str | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.device, self.dtype = device, dtype
        self.factories = _device_constructors()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.compiler.is_compiling() or not _is_of_sparsek(sys._getframe(1)):
            return func(*args, **kwargs)
        if self.device and func in self.factories and kwargs.get("device") is None:
            kwargs["device"] = self.device
        if self.dtype is None:
            return func(*args, **kwargs)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)


def _is_of_sparsek(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(OF_TORCH):
        if not frame.f_code.co_filename.endswith(BETWEEN):
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(FOLDER)


def asked_for() -> OddDefaults | None:
    """What the environment variable SPARSEK_TEST_DEFAULTS names: a device, a dtype, or both with a comma."""
    device = dtype = None
    for name in filter(None, os.environ.get("SPARSEK_TEST_DEFAULTS", "").split(",")):
        named = getattr(torch, name, None)
        device, dtype = (device, named) if isinstance(named, torch.dtype) else (name, dtype)
    return OddDefaults(device, dtype) if device or dtype else None
