"""The protocol of a peer: something else that a user could run, measured in the same rounds as the kernels.

A peer that cannot run gives its reasons. The result of a peer that computes the same passes the same gate as a
kernel's, or it gets no time; a note is there where it rounds a little more.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from sparsek.core.clock import rotating, time_rounds
from sparsek.core.errors import SparseKError, first_line
from sparsek.core.parsing import named
from sparsek.testing.budget import Gate
from sparsek_bench.engine.case import Operands


@dataclass(frozen=True)
class ReadyPeer:
    """A peer that is set up: one call per operand set, and its chosen settings.

    `flops`: what one call computes, where that is more than the stored elements: all of them for a dense peer.
    """

    calls: tuple[Callable[[], object], ...]
    note: str = ""
    flops: float | None = None


class UnavailableError(SparseKError):
    """A peer cannot run this case; its arguments are the reasons, some found only while it was set up."""


@dataclass(frozen=True)
class Peer:
    """`name` is the key in records, `title` a heading of tables. `device` is "cuda", "cpu", or "" for both.
    `unless(case)`: reasons why it cannot run a case, or why the case has no such peer.
    """

    name: str
    title: str
    device: str = ""
    _: KW_ONLY
    unless: Callable[[Any], list[str]] = lambda case: []

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        """Every reason why this peer cannot run the case; [] means it can be tried."""
        where = [f"runs on {self.device}, the case is on {device.type}"]
        return [*(where if self.device not in ("", device.type) else ()), *self.unless(case)]

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        """Sets up and tunes; `tried(text)` reports progress. Raises UnavailableError with the reason."""
        raise NotImplementedError


@dataclass(frozen=True)
class Function(Peer):
    """A peer that computes something else, so that its result is not judged: `call(case, one, index)` makes the call of
    a set, by its place, and `flops(case)` counts it.
    """

    _: KW_ONLY
    call: Callable[[Any, Any, int], Callable[[], Any]]
    flops: Callable[[Any], float]

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        with setting_up(self.title):
            calls = tuple(self.call(case, one, index) for index, one in enumerate(sets))
        return ReadyPeer(calls, flops=self.flops(case))


def dense(name: str, title: str, device: str = "") -> Function:
    """The same call with everything stored, by torch: cuBLAS on a GPU."""
    call = lambda case, one, index: one.dense(1000 + index)  # noqa: E731
    return Function(name, title, device, call=call, flops=lambda case: case.dense_flops)


CUBLAS = dense("cublas", "cuBLAS", "cuda")
TORCH_DENSE = dense("torch_dense", "torch dense", "cpu")


@dataclass(frozen=True)
class Own(Peer):
    """This library by another way: the operands that `other` makes of those of the case, by their place."""

    _: KW_ONLY
    other: Callable[[Any, Any, int], Operands]

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        others = [self.other(case, one, index) for index, one in enumerate(sets)]
        plans = [one.plan(None) for one in others]
        accepted(others[0].gate(plans[0]), self.title)
        calls = tuple(one.planned(plan) for one, plan in zip(others, plans, strict=True))
        return ReadyPeer(calls, ", ".join(sorted({plan.kernel for plan in plans})))


def fastest(
    what: str,
    ways: Mapping[str, Callable[[], Sequence[Callable[[], object]]]],
    device: torch.device,
    tried: Callable[[str], None],
    flops: float | None = None,
) -> ReadyPeer:
    """A peer by the fastest of several ways, in the same rounds. Each makes the calls of all sets, or is left out if it
    raises. Raises UnavailableError with every reason where none is left.
    """
    calls: dict[str, tuple[Callable[[], object], ...]] = {}
    refused: list[str] = []
    for name, made in ways.items():
        try:
            with setting_up(name):
                calls[name] = tuple(made())
        except UnavailableError as error:
            refused.append(str(error))
            tried(f"{what}, {error}")
    if not calls:
        raise UnavailableError("; ".join(refused))
    turns = {name: rotating(each) for name, each in calls.items()}
    times = time_rounds(turns, device=device, rounds=5, inner_ms=10.0)
    for name, found in times.items():
        tried(f"{what}, {name}: {found.median:.3f} ms")
    best = min(calls, key=lambda name: times[name].median)
    return ReadyPeer(calls[best], best, flops)


def holding(reasons: Mapping[str, object]) -> list[str]:
    """The texts of those that hold."""
    return [text for text, holds in reasons.items() if holds]


def accepted(gate: Gate, what: str, most: float = 1.0) -> str:
    """A note if the error of a peer is larger than the budget, by `most` times; else none.

    Raises UnavailableError for a larger one.
    """
    if gate.passed:
        return ""
    if gate.budget < gate.error <= most * gate.budget:
        return f"its error is {gate.error / gate.budget:.2f} of our budget"
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
    known = {peer.name: peer for peer in table}
    if names is None:
        return tuple(peer for peer in known.values() if peer.device in ("", device.type))
    wanted = [named(known, name, "peer").name for name in names]
    return tuple(peer for name, peer in known.items() if name in wanted)
