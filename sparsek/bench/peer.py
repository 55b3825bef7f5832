"""The protocol of a peer: something else that a user could run, measured in the same rounds as the kernels.

A peer that cannot run says why. A sparse peer's result passes the same gate as a kernel's, or it gets no
time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsek.bench.cases import Case
from sparsek.core.errors import SparseKError
from sparsek.formats.bsr import BSR


@dataclass(frozen=True)
class Operands:
    """One of the rotating sets of a case: its own values of A, B and output, and the shared pattern."""

    a: BSR
    b: Tensor
    out: Tensor


@dataclass(frozen=True)
class Ready:
    """A peer that is set up: one call per operand set, and its chosen settings.

    `dense`: its rate counts all FLOPs of the dense product, not those of the stored blocks alone.
    """

    calls: tuple[Callable[[], object], ...]
    note: str = ""
    dense: bool = False


class UnavailableError(SparseKError):
    """A peer found out only while it was set up that it cannot run this case."""


class Peer(Protocol):
    """`name` is the key in records, `title` what people read."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def why_not(self, case: Case, device: torch.device) -> list[str]:
        """Every reason why this peer cannot run the case; [] means it can be tried."""
        ...

    def ready(self, case: Case, sets: Sequence[Operands], tried: Callable[[str], None]) -> Ready:
        """Sets up and tunes; `tried(text)` reports progress. Raises UnavailableError with the reason."""
        ...


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One callable that runs the given ones in turns, so that successive calls touch different buffers."""
    state = 0

    def call() -> object:
        nonlocal state
        state = (state + 1) % len(calls)
        return calls[state]()

    return call
