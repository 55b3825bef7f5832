"""The protocol of a peer: something else that a user could run, measured in the same rounds as the kernels.

A peer that cannot run says why. A sparse peer's result passes the same gate as a kernel's, or it gets no
time.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparsek.bench.engine.case import unknown
from sparsek.core.errors import SparseKError
from sparsek.testing.budget import Gate


@dataclass(frozen=True)
class Ready:
    """A peer that is set up: one call per operand set, and its chosen settings.

    `flops`: what one call computes, where that is more than the stored elements: all of them for a dense peer.
    """

    calls: tuple[Callable[[], object], ...]
    note: str = ""
    flops: float | None = None


class UnavailableError(SparseKError):
    """A peer found out only while it was set up that it cannot run this case."""


@dataclass(frozen=True)
class Peer:
    """`name` is the key in records, `title` a heading of tables. `device` is "cuda", "cpu", or "" for both.

    Tables show peers in the order of PEERS.
    """

    name: str
    title: str
    device: str = ""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        """Every reason why this peer cannot run the case; [] means it can be tried."""
        if self.device in ("", device.type):
            return []
        return [f"runs on {self.device}, the case is on {device.type}"]

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> Ready:
        """Sets up and tunes; `tried(text)` reports progress. Raises UnavailableError with the reason."""
        raise NotImplementedError


def accepted(gate: Gate, what: str) -> None:
    """Raises UnavailableError unless the gate passed."""
    if not gate.passed:
        raise UnavailableError(f"{what} is wrong here: error {gate.error:.2e}, budget {gate.budget:.2e}")


@contextmanager
def setting_up(what: str = "") -> Iterator[None]:
    """Peers warn, compile and refuse in many ways: what they raise becomes the reason why they are not measured, after
    `what` or the name of the error.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (UnavailableError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnavailableError(f"{what or type(error).__name__}: {first_line(error)}") from None


def peers_named(table: Iterable[Peer], names: Iterable[str] | None, device: torch.device) -> tuple[Peer, ...]:
    """The named peers in the table's order; None: those meant for the device. InvalidInput for others."""
    known = tuple(table)
    if names is None:
        return tuple(peer for peer in known if peer.device in ("", device.type))
    wanted = list(names)
    for name in wanted:
        if name not in (peer.name for peer in known):
            raise unknown("peer", name, (peer.name for peer in known))
    return tuple(peer for peer in known if peer.name in wanted)


def first_line(error: BaseException) -> str:
    """The first 160 characters of what an error says, or its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One callable that runs the given ones in turns, so that successive calls touch different buffers."""
    state = 0

    def call() -> object:
        nonlocal state
        state = (state + 1) % len(calls)
        return calls[state]()

    return call
