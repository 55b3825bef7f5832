"""What matrices need of the operations, which stand above them and know kernels: it is registered when they load."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

# By name, functions that pack or round by one kernel: the bits that torch makes, or None for what they do not take.
KERNELS: dict[str, Callable[..., Any]] = {}


def by_kernel(name: str, *given: Any) -> Any:
    """What the kernel of that name makes of CUDA tensors that no gradient follows and nothing traces, or None."""
    if name not in KERNELS:
        load()
    return KERNELS[name](*given)


def load() -> None:
    """Loads all operations. A matrix calls this that was made, or unpickled, before any of them was."""
    import_module("sparsek.ops")
