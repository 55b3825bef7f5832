"""Runs one case: gate first, then interleaved rounds of the kernels and their peers, then records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparsek.core.clock import Times, time_rounds, wall_rounds
from sparsek.core.errors import SparseKError, Unsupported
from sparsek.testing.budget import Gate
from sparsek_bench.engine import records
from sparsek_bench.engine.case import Case, Operands, SuiteRow
from sparsek_bench.engine.peer import Peer, ReadyPeer, UnavailableError, first_line, rotating
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by

# A dense peer with more FLOPs a call, 0.1 s on an H200, heats the card in its own turn and not before the others'.
LONGEST_HEATER = 6e13


class GateError(SparseKError):
    """A kernel's result is outside the error budget, so no time is reported."""


@dataclass(frozen=True)
class Outcome:
    """What one case gave: a record per kernel, and why the others and which peers gave nothing. `failed`: why the case
    gave nothing at all.
    """

    case: Case
    records: tuple[records.Record, ...]
    unavailable: dict[str, list[str]]
    notes: dict[str, str]
    failed: str = ""


@dataclass(frozen=True)
class PeerResult:
    """A peer's times, its rate in TFLOPS, and what its operation records beside."""

    times: Times
    rate: float
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """What is timed: one callable, and how many calls of the case it runs each time. `results`: of a captured graph."""

    call: Callable[[], object]
    count: int = 1
    results: tuple[Any, ...] = ()

    @staticmethod
    def of(case: Case, calls: Sequence[Callable[[], object]], device: torch.device) -> "Turn":
        """The calls one after another, or a graph that holds all of them."""
        if not case.in_graph:
            return Turn(rotating(calls))
        replay, results = captured(calls, device)
        return Turn(replay, len(calls), results)

    def per_call(self, times: Times) -> Times:
        """The times of one call of the case."""
        count = self.count
        return Times(times.median / count, times.min / count, times.max / count, times.rounds)


def captured(
    calls: Sequence[Callable[[], Any]], device: torch.device
) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """A replay of all calls, one after another, in one CUDA graph, and the result of each that it writes.

    The calls run once before, on the stream of the capture: what they make on first use is there then. The replay has
    them, so that what they hold stays, as the state of an optimizer. Raises RuntimeError if one cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = tuple(call() for call in calls)
    return partial(_replay, graph, calls), results


def _replay(graph: torch.cuda.CUDAGraph, calls: Sequence[Callable[[], Any]]) -> None:
    graph.replay()


def measure(
    entry: SuiteRow,
    *,
    peers: Sequence[Peer],
    rounds: int,
    device: torch.device,
    report: Callable[[str], None],
) -> Outcome:
    """The records of a row of a suite. Only device times have peers. Raises GateError for a wrong result."""
    given = {"kernels": entry.kernels, "rounds": rounds, "device": device, "report": report}
    return entry.case.run(**given) or run_case(entry.case, peers=peers, **given)


def run_case(
    case: Case,
    *,
    kernels: Sequence[str] = ("auto",),
    peers: Sequence[Peer] = (),
    rounds: int = 7,
    device: torch.device,
    report: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measures `kernels` ("auto" is the planner's choice) and `peers` on one case, all in the same rounds.

    `report(text)` is called before every step. A kernel that is unsupported here lands in `unavailable` with its
    reasons. Raises GateError when a kernel's result is outside its error budget.
    """
    if case.in_graph and device.type != "cuda":
        why = (
            f"its calls are replayed in a CUDA graph, which needs an NVIDIA GPU; the case is on {device.type}"
        )
        return Outcome(case, (), {name: [why] for name in kernels}, {})
    report("data")
    sets = case.operands(device)
    plans, gates, unavailable = planned(case, kernels, sets, report)
    if not plans:
        return Outcome(case, (), unavailable, {})
    turns: dict[str, Turn] = {}
    for name, made in plans.items():
        turn = Turn.of(case, [one.planned(plan) for plan, one in zip(made, sets, strict=True)], device)
        if turn.results:
            report(f"{name}: gate of the graph")
            turn.call()
            passed(case, name, sets[0].judge(turn.results[0]))
        turns[f"kernel {name}"] = turn
    ready: dict[str, ReadyPeer] = {}
    for peer in peers:
        try:
            ready[peer.name], turns[f"peer {peer.name}"] = _set_up(case, peer, sets, device, report)
        except (UnavailableError, torch.OutOfMemoryError) as error:
            unavailable[peer.name] = [str(why).splitlines()[0] for why in error.args]
    seen = Sensors(device)
    calls = {name: turn.call for name, turn in turns.items()}
    timed = (
        wall_rounds(calls, device, rounds, count=case.wall, on_sample=seen.sample)
        if case.wall
        else time_rounds(
            calls,
            device=device,
            rounds=rounds,
            heat=_heater(ready) or next(iter(turns)),
            on_round=lambda index: report(f"round {index + 1} of {rounds}"),
            on_sample=seen.sample,
        )
    )
    times = {name: turn.per_call(timed[name]) for name, turn in turns.items()}
    results = {}
    for name, peer in ready.items():
        # A peer's rate counts its own FLOPs: useful ones for sparse peers, all of them for dense ones.
        flops = sets[0].useful_flops if peer.flops is None else peer.flops
        took = times[f"peer {name}"]
        extra = sets[0].peer_extra(peer.calls[0]) if case.peer_extra else {}
        results[name] = PeerResult(took, flops / took.median / 1e9, extra)

    def record(name: str) -> records.Record:
        plan, took = plans[name][0], times[f"kernel {name}"]
        more = rates(case, sets[0], plan, took, results)
        more |= sets[0].kernel_extra(name) if case.extra else {}
        more |= {"ran": executed_by(sets[0].planned(plan))} if case.hosted else {}
        return record_of(case, plan, took, gates[name], device, seen, **more)

    notes = {name: peer.note for name, peer in ready.items() if peer.note}
    return Outcome(case, tuple(map(record, plans)), unavailable, notes)


def planned(
    case: Case,
    kernels: Sequence[str],
    sets: Sequence[Operands],
    report: Callable[[str], None],
    gate: Callable[[Any], Gate] | None = None,
) -> tuple[dict[str, list[Any]], dict[str, Gate], dict[str, list[str]]]:
    """The plans of each kernel for all sets and its gate, by name; and why other kernels have none. `gate`: unless it
    is the first set's.
    """
    plans: dict[str, list[Any]] = {}
    gates: dict[str, Gate] = {}
    unavailable: dict[str, list[str]] = {}
    for wanted in kernels:
        try:
            made = [one.plan(None if wanted == "auto" else wanted) for one in sets]
        except Unsupported as error:
            unavailable[wanted] = error.reasons.get(wanted, [str(error)])
            continue
        name = made[0].kernel
        if name not in plans:
            report(f"{name}: gate")
            plans[name], gates[name] = made, passed(case, name, (gate or sets[0].gate)(made[0]))
    return plans, gates, unavailable


def _set_up(
    case: Case, peer: Peer, sets: Sequence[Operands], device: torch.device, report: Callable[[str], None]
) -> tuple[ReadyPeer, Turn]:
    """A peer and its turn. Raises UnavailableError with every reason why it has none, or OutOfMemoryError."""
    why_not = peer.why_not(case, device)
    if why_not:
        raise UnavailableError(*why_not)
    report(f"{peer.title}: set up")
    ready = peer.ready(case, sets, report)
    try:
        return ready, Turn.of(case, ready.calls, device)
    except RuntimeError as error:
        raise UnavailableError(f"cannot be captured in a CUDA graph: {first_line(error)}") from None


def _heater(ready: Mapping[str, ReadyPeer]) -> str | None:
    """The densest work there is keeps the card as hot as sustained use would."""
    dense = {name: peer.flops for name, peer in ready.items() if peer.flops and peer.flops <= LONGEST_HEATER}
    return f"peer {max(dense, key=lambda name: dense[name])}" if dense else None


def passed(case: Any, name: str, gate: Gate) -> Gate:
    """The gate of a kernel on a case, if it passed. Raises GateError otherwise."""
    if not gate.passed:
        raise GateError(f"{name} on {case.name}: error {gate.error:.3e} exceeds the budget {gate.budget:.3e}")
    return gate


def record_of(
    case: Case, plan: Any, times: Times, gate: Gate, device: torch.device, seen: Sensors, **more: Any
) -> records.Record:
    """The record of a kernel, or of what stands in its place; `more` are fields of its own. Without them nothing is
    rated and no peer is beside it.
    """
    common = {
        "op": case.op,
        "case": case.as_record(),
        "kernel": plan.kernel,
        "config": records.config_of(plan.config),
        "ms": records.times_of(times),
        "tflops": None,
        "gbps": None,
        "roofline": None,
        "gate": {"error": gate.error, "budget": gate.budget, "passed": bool(gate.passed)},
        "peers": {},
        "ratio": {},
        "env": records.environment(device, seen),
        "source_hash": records.hash_of(case.op, plan.kernel, more.get("ran", ())),
        "date": records.now(),
    }
    return common | more


def rates(
    case: Case, one: Operands, plan: Any, times: Times, peers: Mapping[str, PeerResult]
) -> dict[str, Any]:
    """Fields of a record: its rates, its roofline, and the ratios of rates to peers. What multiplies nothing, whose
    schema is not rated, has bytes in the place of FLOPs, and no TFLOPS.
    """
    seconds = times.median / 1e3
    useful, moved = one.useful_flops / seconds / 1e12, plan.problem.compulsory_bytes
    equivalent = _digits(case.dense_flops / seconds / 1e12)
    return {
        "tflops": {"useful": _digits(useful), "dense_equivalent": equivalent} if case.rated else None,
        "gbps": round(moved / seconds / 1e9, 2),
        "roofline": {
            "bound_ms": round(plan.bound_seconds * 1e3, 6),
            "fraction": round(plan.bound_seconds / seconds, 4),
        },
        **beside(useful, peers, rated=case.rated),
    }


def beside(rate: float, peers: Mapping[str, PeerResult], *, rated: bool) -> dict[str, Any]:
    """Fields of a record: its peers, and the ratios of a rate to theirs, which are recorded where they are `rated`."""
    tflops = {name: _digits(peer.rate) if rated else None for name, peer in peers.items()}
    return {
        "peers": {
            name: {"ms": records.times_of(peer.times), "tflops": tflops[name], **peer.extra}
            for name, peer in peers.items()
        },
        "ratio": {name: round(rate / peer.rate, 4) for name, peer in peers.items()},
    }


def _digits(rate: float) -> float:
    """Eight digits of a rate, slow or fast."""
    return float(f"{rate:.8g}")
