"""A line on the terminal while a kernel is compiled that takes longer than two seconds."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

PATIENCE = 2.0
_launched: set[Any] = set()  # kernels and their constants: a second launch compiles nothing


@contextmanager
def patient_with(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Iterator[None]:
    """`patient` for a launch through Triton's JIT, which compiles the kernel unless it knows it."""
    if not _on_terminal():
        yield
        return
    constants = [arg for arg, param in zip(args, kernel.params, strict=False) if param.is_constexpr]
    key = id(kernel), str(constants), str(named)
    if key in _launched:
        yield
        return
    _launched.add(key)
    with patient(kernel.fn.__name__):
        yield


@contextmanager
def patient(name: str) -> Iterator[None]:
    """Says on a terminal that a kernel is being compiled, if what runs inside takes longer than PATIENCE."""
    if not _on_terminal():
        yield
        return
    timer = threading.Timer(PATIENCE, _say, [name])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _on_terminal() -> bool:
    """False also where a service runs without stderr, or with a closed one, or one of its own."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _say(name: str) -> None:
    sys.stderr.write(f"sparsek: compiling {name} for this kind of call; it is kept on disk\n")
