"""Measures the host's side of calls: how long the host is busy with one, or how long one takes in eager mode."""

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sparsek.bench.engine import records
from sparsek.bench.engine.run import GateError, Outcome, facts, in_order, passed
from sparsek.bench.engine.sensors import Sensors
from sparsek.bench.engine.wall import wall_rounds
from sparsek.bench.suites.host import TORCH, HostCase
from sparsek.bench.suites.host_calls import CALLS, HostCall
from sparsek.core import env
from sparsek.core.clock import Times
from sparsek.core.errors import Unsupported
from sparsek.testing.budget import Gate

# Calls of a sample, so few that the launch queue of CUDA, about a thousand, never makes the host wait; a call with its
# backward pass may be ten launches.
CALLS_EACH = 80
CALLS_BACKWARD = 40
# Samples for each round that was asked for: they are short, and the host's time scatters more than the GPU's.
SAMPLES = 3
FIRST_ROUNDS = 2
CHILD = "sparsek.bench.suites.host_calls"
CHILD_SECONDS = 120
# By call, the folder of caches that its last process left behind.
_FILLED: dict[HostCase, tempfile.TemporaryDirectory[str]] = {}


@dataclass(frozen=True)
class Called:
    """The module that is called, in the place of a kernel."""

    kernel: str
    config: None = None


def run_host_time(
    case: HostCase, *, device: torch.device, rounds: int, report: Callable[[str], None] = lambda text: None
) -> Outcome:
    """The record of one case: after a gate, samples of this library's call and torch's in turns.

    Raises GateError for a wrong result.
    """
    if case.is_first:
        return _first_calls(case, device, min(rounds, FIRST_ROUNDS), report)
    report("operands")
    made = CALLS[case.call](case, device)
    with torch.set_grad_enabled(case.trains):
        try:
            gate = passed(case, case.module, made.judge(made.ours()))
        except Unsupported as error:
            return Outcome(case, (), {case.module: [str(error)]}, {})
        report("samples")
        gc.collect()
        calls = {"ours": made.ours, TORCH: made.torchs}
        seen = Sensors(device)
        count = None if case.on_wall else (CALLS_BACKWARD if case.trains else CALLS_EACH)
        times = wall_rounds(
            calls, device, rounds * SAMPLES, count=count, until_idle=case.on_wall, on_sample=seen.sample
        )
    return _outcome(case, gate, times["ours"], {TORCH: times[TORCH]}, device, seen)


def _outcome(
    case: HostCase, gate: Gate, took: Times, peers: dict[str, Times], device: torch.device, seen: Sensors
) -> Outcome:
    record = facts(case.op, case, Called(case.module), took, gate, device, seen)
    record["peers"] = {name: {"ms": records.times_of(each), "tflops": None} for name, each in peers.items()}
    record["ratio"] = {name: round(each.median / took.median, 4) for name, each in peers.items()}
    return Outcome(case, (in_order(record),), {}, {})


def _first_calls(case: HostCase, device: torch.device, rounds: int, report: Callable[[str], None]) -> Outcome:
    """Each sample is a process of its own: with empty caches in a new folder each, else after one that filled them,
    which may be a sample of the same call with empty ones.
    """
    call = replace(case, caches="")
    samples: list[dict[str, Any]] = []
    seen = Sensors(device)
    while len(samples) < rounds:
        report(f"process {len(samples) + 1} of {rounds}")
        fills = case.caches == "empty" or call not in _FILLED
        if fills:
            _drop_caches(call)
            _FILLED[call] = tempfile.TemporaryDirectory()
        sample = _in_a_process(case, device, Path(_FILLED[call].name))
        if not fills or case.caches == "empty":
            samples.append(sample)
            seen.sample()
    if case.caches == "filled":
        _drop_caches(call)
    worst = max(samples, key=lambda each: each["error"])
    gate = passed(
        case, case.module, Gate(worst["error"], worst["budget"], all(each["passed"] for each in samples))
    )
    times = Times.of([each["seconds"] * 1e3 for each in samples])
    return _outcome(case, gate, times, {}, device, seen)


def _drop_caches(call: HostCase) -> None:
    if call in _FILLED:
        _FILLED.pop(call).cleanup()


def _in_a_process(case: HostCase, device: torch.device, folder: Path) -> dict[str, Any]:
    """Seconds and gate of the call, the first of a process whose caches are in `folder`."""
    named = {each.name: getattr(case, each.name) for each in fields(HostCall)}
    command = [sys.executable, "-m", CHILD, json.dumps(named), str(device)]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        check=False,
        env=env.with_caches_in(folder),
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1]
        raise GateError(f"{case.name}: the process failed: {last[:300]}")
    return json.loads(ran.stdout.splitlines()[-1])
