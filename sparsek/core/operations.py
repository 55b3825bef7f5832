"""Operations as rooms below reach them: they register themselves when they load. Schemas and tags of torch.library."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_origin, get_type_hints

import torch
from torch import Tensor

from sparsek.core import doors

# Of torch.library ops. Plans are cached across calls, and would outlive the memory pool of a CUDA graph that
# torch.compile captures itself.
TAGS = tuple(tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None)

SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Sequence[Tensor | None]: "Tensor?[]",
    Sequence[int]: "SymInt[]",
    bool: "bool",
    float: "float",
    float | None: "float?",
    str: "str",
    str | None: "str?",
    torch.dtype: "ScalarType",
}

# By name, functions that pack or round in one kernel: the same bits as torch's code, or None for unsupported inputs.
KERNELS: dict[str, Callable[..., Any]] = {}


def by_kernel(name: str, *given: Any) -> Any:
    """The result of the kernel of that name for CUDA tensors without gradient and tracing, or None."""
    if name not in KERNELS:
        load()
    return KERNELS[name](*given)


def load() -> None:
    """Loads all operations. Called by a matrix that was made, or unpickled, before any operation was loaded."""
    doors.enter("operations")


def schema_of(args: Any, returns: str = "Tensor", without: Sequence[str] = ()) -> str:
    """The schema of an op from the named arguments of a class or a function. A NamedTuple stands for its fields."""
    kinds: dict[str, Any] = {}
    hints = get_type_hints(args)
    hints.pop("return", None)
    for name, kind in hints.items():
        kinds |= get_type_hints(kind) if hasattr(kind, "_fields") else {name: kind}
    words = {
        name: "str" if get_origin(kind) is Literal else SCHEMA_TYPES[kind] for name, kind in kinds.items()
    }
    named = ", ".join(f"{kind} {name}" for name, kind in words.items() if name not in without)
    return f"({named}) -> {returns}"
