"""Measures the planner: for every layer all options of `sk.choose_format` are made, checked and timed in the same
rounds, and what it would choose is held against the fastest of them: without timing, and by rounds of its
own, timed before.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.bench.engine import records
from sparsek.bench.engine.layer_gate import Expected
from sparsek.bench.engine.run import GateError, Outcome, in_order
from sparsek.bench.engine.sensors import Sensors
from sparsek.bench.engine.several import worst
from sparsek.bench.suites.case import random_dense
from sparsek.bench.suites.planner import LAYERS, PLANNER, Layer, PlannerCase
from sparsek.core import dtypes
from sparsek.core.clock import Times
from sparsek.core.device import card_of
from sparsek.ops.choose import BLOCK, Bound, Option, choose, consider, measure
from sparsek.ops.linear import linear
from sparsek.ops.weight_formats import Way, ways
from sparsek.testing.budget import Gate

# A choice within this of the best counts as good.
NEAR = 1.05
GATE_TOKENS = 64
# Fifty layers with a dozen options each are to take a minute and a half.
INNER_MS = 2.0
OWN_ROUNDS = 3


class Judged(NamedTuple):
    """One layer: its options with both times, those that predictions and a measurement choose, and the worst gate."""

    layer: Layer
    options: tuple[Option, ...]
    times: Mapping[str, Times]
    choice: str
    measured: str
    gate: Gate

    @property
    def best(self) -> str:
        return min(self.times, key=lambda name: self.times[name].median)

    @property
    def of_best(self) -> float:
        """The time of the predictions' choice over the best one's."""
        return self.times[self.choice].median / self.times[self.best].median

    @property
    def measured_of_best(self) -> float:
        """The same of the option that the planner's own rounds chose."""
        return self.times[self.measured].median / self.times[self.best].median

    def as_config(self) -> dict[str, Any]:
        """The layer in a record: every option with predicted and measured microseconds."""
        micros = {
            each.name: [round(each.predicted * 1e6, 2), round(self.times[each.name].median * 1e3, 2)]
            for each in self.options
            if each.name in self.times
        }
        kernels = {each.name: each.kernel for each in self.options}
        return {
            "layer": self.layer.name,
            "choice": self.choice,
            "kernel": kernels[self.choice],
            "measured": self.measured,
            "best": self.best,
            "of_best": round(self.of_best, 4),
            "us": micros,
        }


def run_planner(
    case: PlannerCase, *, device: torch.device, rounds: int, report: Callable[[str], None]
) -> Outcome:
    """One record of all layers. Raises GateError if a result of any option is outside its budget."""
    layers = LAYERS[case.layers]
    judged: list[Judged] = []
    seen = Sensors(device)
    for number, layer in enumerate(layers, start=1):
        report(f"layer {number} of {len(layers)}: {layer.name}")
        judged.append(_judge(layer, case, device, rounds))
        seen.sample()
    notes = {"planner": _missed(judged), "measured over predicted, median and range": _off(judged)}
    return Outcome(case, (_record(case, judged, device, seen),), {}, notes)


def _judge(layer: Layer, case: PlannerCase, device: torch.device, rounds: int) -> Judged:
    kind = dtypes.parse(case.dtype)
    w = random_dense(layer.n, layer.k, dtype=kind, device=device, seed=1).mul_(layer.k**-0.5)
    x = random_dense(layer.tokens, layer.k, dtype=kind, device=device, seed=2)
    listed: list[Way] = list(ways(case.listed, BLOCK, [layer.keep]))
    with torch.no_grad():
        found = list(consider(w, x, listed, card_of(device)))
        gates = [_gated(layer, option, weight, x) for option, weight in found if weight is not None]
        own = measure(found, x, card_of(device), OWN_ROUNDS, INNER_MS)
        times = measure(found, x, card_of(device), rounds, INNER_MS)
    options = tuple(option for option, _ in found)
    timed = [replace(option, measured=own[at].median / 1e3) for at, option in enumerate(options) if at in own]
    by_name = {options[at].name: each for at, each in times.items()}
    chosen = [choose(each, Bound()).name for each in (options, timed)]
    return Judged(layer, options, by_name, *chosen, gate=worst(gates))


def _gated(layer: Layer, option: Option, weight: Any, x: Tensor) -> Gate:
    step = max(1, x.shape[0] // GATE_TOKENS)
    y = linear(x, weight, kernel=option.way.kernel)
    gate = Expected.of(x[::step], weight).judge(y[::step])
    if not gate.passed:
        raise GateError(
            f"{option.name} by {option.kernel} on {layer.name}: error {gate.error:.3e} exceeds the budget "
            f"{gate.budget:.3e}"
        )
    return gate


def _record(
    case: PlannerCase, judged: Sequence[Judged], device: torch.device, seen: Sensors
) -> records.Record:
    chosen = _total([each.times[each.choice] for each in judged])
    peers = {
        "best": _total([each.times[each.best] for each in judged]),
        "measured": _total([each.times[each.measured] for each in judged]),
    }
    for name in ("dense", "2:4"):
        if all(name in each.times for each in judged):
            peers[name] = _total([each.times[name] for each in judged])
    gate = worst([each.gate for each in judged])
    record = {
        "op": case.op,
        "case": case.as_record(),
        "kernel": PLANNER,
        "config": {"layers": [each.as_config() for each in judged]},
        "ms": records.times_of(chosen),
        "tflops": None,
        "gbps": None,
        "roofline": None,
        "gate": {"error": gate.error, "budget": gate.budget, "passed": bool(gate.passed)},
        "peers": {
            name: {"ms": records.times_of(times), "tflops": case.dense_flops / times.median / 1e9}
            for name, times in peers.items()
        },
        "ratio": {name: round(times.median / chosen.median, 4) for name, times in peers.items()},
        "env": records.environment(device, seen),
        "source_hash": records.hash_of(case.op, PLANNER),
        "date": records.now(),
        "near": sum(each.of_best <= NEAR for each in judged),
        "near_measured": sum(each.measured_of_best <= NEAR for each in judged),
        "count": len(judged),
        "worst": round(max(each.of_best for each in judged), 4),
    }
    return in_order(record)


def _total(times: Sequence[Times]) -> Times:
    """All of them one after another."""
    return Times(
        sum(each.median for each in times),
        sum(each.min for each in times),
        sum(each.max for each in times),
        min(each.rounds for each in times),
    )


def _missed(judged: Sequence[Judged]) -> str:
    """In words: how many choices are good, and which are not."""
    bad = [each for each in judged if each.of_best > NEAR]
    own = sum(each.measured_of_best <= NEAR for each in judged)
    head = (
        f"{len(judged) - len(bad)} of {len(judged)} choices within {(NEAR - 1) * 100:.0f} % of the best by prediction, "
        f"{own} by the planner's own rounds"
    )
    lines = [
        f"{each.layer.name}: {each.choice} takes {each.of_best:.2f}x {each.best}"
        for each in sorted(bad, key=lambda each: -each.of_best)
    ]
    return "; ".join([head, *lines])


def _off(judged: Sequence[Judged]) -> str:
    """How far predictions are off, by kernel: "torch 1.02 (0.91 to 1.20), ..."."""
    ratios: dict[str, list[float]] = {}
    for each in judged:
        for option in each.options:
            if option.name in each.times:
                took = each.times[option.name].median / 1e3
                ratios.setdefault(option.kernel, []).append(took / option.predicted)
    return ", ".join(
        f"{kernel} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
        for kernel, found in sorted(ratios.items())
    )
