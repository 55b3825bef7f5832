"""Access to the operations from rooms below them: operations register themselves when they load."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# Of torch.library ops. Plans are cached across calls, and would outlive the memory pool of a CUDA graph that
# torch.compile captures itself.
TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)

# By name, functions that pack or round in one kernel: the same bits as torch's code, or None for unsupported inputs.
KERNELS: dict[str, Callable[..., Any]] = {}


def by_kernel(name: str, *given: Any) -> Any:
    """The result of the kernel of that name for CUDA tensors without gradient and tracing, or None."""
    if name not in KERNELS:
        load()
    return KERNELS[name](*given)


def load() -> None:
    """Loads all operations. Called by a matrix that was made, or unpickled, before any operation was loaded."""
    import_module("sparsek.ops")
