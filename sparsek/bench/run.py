"""Runs one case: gate first, then interleaved rounds of the kernels and their peers, then records."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparsek.bench import records
from sparsek.bench.cases import Case, random_dense
from sparsek.bench.peer import Operands, Peer, Ready, UnavailableError, rotating
from sparsek.core.clock import Times, host_seconds, time_rounds
from sparsek.core.device import Card, card_of
from sparsek.core.errors import SparseKError, Unsupported
from sparsek.formats.bsr import BSR
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.poison import poisoned

# The sets together exceed the last-level cache this many times, so that nothing sits in it by accident.
CACHE_MULTIPLE = 4
MAX_SETS = 64


class GateError(SparseKError):
    """A kernel's result is outside the error budget, so no time is reported."""


@dataclass(frozen=True)
class Outcome:
    """What one case gave: a record per kernel, and why the others and which peers gave nothing."""

    case: Case
    records: tuple[records.Record, ...]
    unavailable: dict[str, list[str]]
    notes: dict[str, str]


def make_sets(case: Case, device: torch.device, seed: int = 0) -> list[Operands]:
    """Operand sets that share one pattern and no memory: 2 to 64, together several times the cache."""
    a, b = case.make(device, seed)
    count = set_count(card_of(device), a, b)
    sets = []
    for index in range(count):
        if index:
            generator = torch.Generator(device=device).manual_seed(seed + 100 + index)
            # Blocks change places; in ragged matrices they stay, since those at the edge hold padding.
            shuffle = torch.randperm(a.pattern.nnzb, generator=generator, device=device)
            full = case.m % case.block[0] == 0 and case.k % case.block[1] == 0
            values = a.values[shuffle] if full else a.values.clone()
            one = BSR.unchecked(a.pattern, values)
            other = random_dense(case.k, case.n, b.dtype, device, seed + 200 + index)
        else:
            one, other = a, b
        sets.append(Operands(one, other, poisoned((case.m, case.n), b.dtype, device)))
    return sets


def set_count(card: Card, a: BSR, b: torch.Tensor) -> int:
    """How many operand sets exceed the cache of the card several times: 2 if one set is large already."""
    values = a.values.numel() * a.values.element_size()
    footprint = values + (b.numel() + a.shape[0] * b.shape[1]) * b.element_size()
    return max(2, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * card.l2_bytes / max(1, footprint))))


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

    `report(text)` hears of every step. A kernel that is unsupported here lands in `unavailable` with its
    reasons. Raises GateError when a kernel's result is outside its error budget.
    """
    report("data")
    sets = make_sets(case, device)
    plans: dict[str, list[Any]] = {}
    gates: dict[str, Gate] = {}
    unavailable: dict[str, list[str]] = {}
    notes: dict[str, str] = {}
    for asked in kernels:
        try:
            made = [plan_spmm(one.a, one.b, kernel=None if asked == "auto" else asked) for one in sets]
        except Unsupported as error:
            unavailable[asked] = error.reasons.get(asked, [str(error)])
            continue
        name = made[0].kernel
        if name in plans:
            continue
        report(f"{name}: gate")
        gates[name] = _passed(case, name, made[0], sets[0])
        plans[name] = made
    if not plans:
        return Outcome(case, (), unavailable, notes)
    ready = _ready_peers(case, peers, sets, device, unavailable, report)
    notes.update({name: peer.note for name, peer in ready.items() if peer.note})
    calls: dict[str, Callable[[], object]] = {
        f"kernel {name}": rotating([_plan_call(plan, one) for plan, one in zip(made, sets, strict=True)])
        for name, made in plans.items()
    }
    calls.update({f"peer {name}": rotating(peer.calls) for name, peer in ready.items()})
    # The densest work there is keeps the card as hot as sustained use would.
    heat = "peer cublas" if "peer cublas" in calls else next(iter(calls))
    times = time_rounds(
        calls,
        device=device,
        rounds=rounds,
        heat=heat,
        on_round=lambda index: report(f"round {index + 1} of {rounds}"),
    )
    peer_times = {name: (times[f"peer {name}"], peer.dense) for name, peer in ready.items()}
    made_records = tuple(
        _record(case, plans[name][0], times[f"kernel {name}"], gates[name], peer_times, device)
        for name in plans
    )
    return Outcome(case, made_records, unavailable, notes)


def _plan_call(plan: Any, one: Operands) -> Callable[[], object]:
    return lambda: plan(one.a, one.b, out=one.out)


def _passed(case: Case, name: str, plan: Any, one: Operands) -> Gate:
    one.out.copy_(poisoned(tuple(one.out.shape), one.out.dtype, one.out.device))
    plan(one.a, one.b, out=one.out)
    got = check_spmm(one.a, one.b, one.out, tf32=plan.problem.tf32)
    if not got.passed:
        raise GateError(f"{name} on {case.name}: error {got.error:.3e} exceeds the budget {got.budget:.3e}")
    return got


def _ready_peers(
    case: Case,
    peers: Sequence[Peer],
    sets: Sequence[Operands],
    device: torch.device,
    unavailable: dict[str, list[str]],
    report: Callable[[str], None],
) -> dict[str, Ready]:
    ready: dict[str, Ready] = {}
    for peer in peers:
        reasons = peer.why_not(case, device)
        if reasons:
            unavailable[peer.name] = reasons
            continue
        report(f"{peer.title}: set up")
        try:
            ready[peer.name] = peer.ready(case, sets, report)
        except (UnavailableError, torch.OutOfMemoryError) as error:
            unavailable[peer.name] = [str(error).splitlines()[0]]
    return ready


def _record(
    case: Case,
    plan: Any,
    times: Times,
    passed: Gate,
    peers: dict[str, tuple[Times, bool]],
    device: torch.device,
) -> records.Record:
    seconds = times.median / 1e3
    useful = plan.problem.useful_flops / seconds / 1e12
    # A peer's rate counts its own FLOPs: useful ones for sparse peers, all of them for dense ones.
    rates = {
        name: (case.dense_flops if dense else plan.problem.useful_flops) / (peer.median / 1e3) / 1e12
        for name, (peer, dense) in peers.items()
    }
    made = _facts("spmm", case, plan, times, passed, device) | {
        "tflops": {
            "useful": round(useful, 6),
            "dense_equivalent": round(case.dense_flops / seconds / 1e12, 6),
        },
        "gbps": round(plan.problem.compulsory_bytes / seconds / 1e9, 2),
        "roofline": {
            "bound_ms": round(plan.bound_seconds * 1e3, 6),
            "fraction": round(plan.bound_seconds / seconds, 4),
        },
        "peers": {
            name: {"ms": records.times_of(peer), "tflops": round(rates[name], 6)}
            for name, (peer, _) in peers.items()
        },
        "ratio": {name: round(useful / rate, 4) for name, rate in rates.items()},
    }
    return _in_order(made)


def _facts(
    op: str, case: Case, plan: Any, times: Times, passed: Gate, device: torch.device
) -> records.Record:
    """The fields that every record has."""
    return {
        "op": op,
        "case": case.as_record(),
        "kernel": plan.kernel,
        "config": records.config_of(plan.config),
        "ms": records.times_of(times),
        "gate": {"error": passed.error, "budget": passed.budget, "passed": bool(passed.passed)},
        "env": records.environment(device),
        "source_hash": records.source_hash(plan.kernel),
        "date": records.now(),
    }


def _in_order(record: records.Record) -> records.Record:
    return {name: record[name] for name in records.FIELDS}


def run_host(
    case: Case, *, kernels: Sequence[str] = ("auto",), device: torch.device, rounds: int = 7, calls: int = 200
) -> Outcome:
    """Times the host side of one eager `sk.spmm(a, b)` whose plan is cached, in ms.

    Takes `calls` calls a round, fewer than the launch queue holds (about 1000), so the host never waits for
    the GPU.
    """
    a, b = case.make(device)
    made: list[records.Record] = []
    unavailable: dict[str, list[str]] = {}
    for asked in kernels:
        wanted = None if asked == "auto" else asked
        try:
            plan = plan_spmm(a, b, kernel=wanted)
        except Unsupported as error:
            unavailable[asked] = error.reasons.get(asked, [str(error)])
            continue
        passed = _passed(case, plan.kernel, plan, Operands(a, b, poisoned((case.m, case.n), b.dtype, device)))
        call = partial(spmm, a, b, kernel=wanted)
        host_seconds(call, device, calls=10)
        times = Times.of([host_seconds(call, device, calls=calls) * 1e3 for _ in range(rounds)])
        made.append(
            _facts("spmm_host", case, plan, times, passed, device)
            | {"tflops": None, "gbps": None, "roofline": None, "peers": {}, "ratio": {}}
        )
    return Outcome(case, tuple(_in_order(record) for record in made), unavailable, {})
