"""Prints a line on the terminal while a kernel compiles for more than two seconds."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PATIENCE = 2.0
_launched: set[Any] = set()  # kernels and their constants: a second launch compiles nothing


def patient_with(kernel: Any, args: Sequence[Any], named: Mapping[str, Any]) -> AbstractContextManager[None]:
    """`patient` for a launch through Triton's JIT, which compiles a kernel on its first launch."""
    if not _on_terminal():
        return nullcontext()
    constants = [arg for arg, param in zip(args, kernel.params, strict=False) if param.is_constexpr]
    key = id(kernel), str(constants), str(named)
    if key in _launched:
        return nullcontext()
    _launched.add(key)
    return patient(kernel.fn.__name__)


@contextmanager
def patient(name: str) -> Iterator[None]:
    """Prints on a terminal that a kernel is being compiled, once the block inside takes longer than PATIENCE."""
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
    """Whether stderr is a terminal. False for a missing, closed or replaced stderr."""
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


def _say(name: str) -> None:
    sys.stderr.write(f"sparsek: compiling {name} for this kind of call; it is kept on disk\n")
