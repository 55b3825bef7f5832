"""The table of kernels: the rows of all rooms of kernels. A kernel's module is loaded on first use."""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from sparsek.core import doors
from sparsek.core.errors import InvalidInput, Unsupported


class KernelRow(NamedTuple):
    """A kernel: its operation, name, module, and the storage that it multiplies, "" where there is no choice of one."""

    op: str
    name: str
    module: str
    storage: str


@cache
def rows() -> tuple[KernelRow, ...]:
    """All kernels; those of one operation in order of preference."""
    return tuple(
        KernelRow(op, name, f"{room.__package__}.{module}", storage)
        for room in doors.enter("kernels")
        for op, name, module, storage in room.KERNELS
    )


@cache
def removed() -> dict[str, str]:
    """Removed kernels, and the successor of each."""
    return {old: new for room in doors.enter("kernels") for old, new in room.REMOVED.items()}


def refuse_removed(name: str, known: tuple[str, ...] = ()) -> None:
    """Raises Unsupported for the name of a removed kernel. `known`: the kernels of a call that names it."""
    if name in removed():
        successor = removed()[name]
        right = successor if not known or successor in known else f"one of {', '.join(known)}"
        raise Unsupported(f"{name} was removed: name {right}, or no kernel to have one chosen", {})


def load(name: str) -> Any:
    """The kernel called `name` ("hopper.spmm"). Raises InvalidInput for a name that is not in the table."""
    refuse_removed(name)
    module = next((row.module for row in rows() if row.name == name), None)
    if module is None:
        raise InvalidInput(
            f"no kernel is called {name!r:.80}; known: {', '.join(row.name for row in rows())}"
        )
    found = import_module(module)
    return found.KERNELS[name] if hasattr(found, "KERNELS") else found.KERNEL


def names_for(op: str, storage: str | None = None) -> tuple[str, ...]:
    """Names of the kernels of one operation, in order of preference; for spmm, those for one kind of storage."""
    wanted = {storage, "fp8" if storage is not None and storage.endswith("_fp8") else storage}
    return tuple(row.name for row in rows() if row.op == op and (storage is None or row.storage in wanted))
