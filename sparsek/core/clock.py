"""Timing in interleaved rounds, so that all competitors run at the same clocks, power and temperature.

A warm card runs slower than a cold one (cuBLAS bf16 on an H200: 780 TFLOPS, then 690). So times of two programs are
comparable only if their rounds are interleaved, after the card has settled.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import torch

# torch.cuda._sleep counts SM clock cycles; an H200 boosts to 1.98 GHz.
CYCLES_PER_SECOND = 1.98e9
HEAT_BATCHES = 2
# Calls per sample; twice as many warm-up calls run before it. A CUDA queue holds about a thousand launches, and a
# call may be three. Calls beyond that are queued during the timing (8 us of an FP8 layer were measured as 28 and 42:
# H200, 2026-11-22).
MOST_CALLS = 100
# Of wall-clock times.
WALL_CALLS = 20
WALL_WARMUP = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds per call over interleaved rounds. `samples`: those of each round, where they are known."""

    median: float
    min: float
    max: float
    rounds: int
    samples: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def of(samples: list[float]) -> "Times":
        return Times(statistics.median(samples), min(samples), max(samples), len(samples), tuple(samples))


@dataclass(frozen=True)
class _Batch:
    """How one competitor is timed: calls per sample, and the host's seconds to queue one call."""

    call: Callable[[], object]
    repeats: int
    host_seconds: float


def time_rounds(
    calls: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    rounds: int = 5,
    warmup: int = 2,
    inner_ms: float = 20.0,
    settle_ms: float = 300.0,
    heat: str | None = None,
    on_round: Callable[[int], None] | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Times every call in interleaved rounds: `rounds` rounds, in each one batch of every call.

    A batch repeats the call until it lasts about `inner_ms`, 100 times at most, and counts as one sample: its mean
    time per call. Each round starts with another competitor, so that none is always first.

    On a GPU, untimed rounds run until `settle_ms` have passed, and two untimed batches of the call named `heat` run
    right before every sample. Otherwise a competitor that draws little power cools the card for the next, and cuBLAS
    on an H200 is timed at 780 TFLOPS where it sustains 690. They run after the pause in which the host queues a
    batch. Otherwise a call with a long host time, such as cuSPARSELt's, would let the card rest, and was timed 10 %
    faster than in a CUDA graph (H200, 2026-11-22).

    CUDA events on a GPU, the performance counter on a CPU. `on_round(i)` is called after round i, `on_sample()` once
    in every sample: on a GPU when the host has queued it and waits.
    """
    measure = _batch_cuda if device.type == "cuda" else _batch_cpu
    batches: dict[str, _Batch] = {}
    for name, call in calls.items():
        for _ in range(warmup):
            call()
        host = host_seconds(call, device, calls=3) if device.type == "cuda" else 0.0
        once = measure(_Batch(call, 1, host), device)
        batches[name] = _Batch(call, max(1, min(MOST_CALLS, round(inner_ms / max(once, 1e-3)))), host)
    settled = time.perf_counter() + settle_ms / 1e3
    while device.type == "cuda" and batches and time.perf_counter() < settled:
        for batch in batches.values():
            measure(batch, device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    heater = batches[heat] if heat is not None and device.type == "cuda" else None
    for index in range(rounds):
        first = index % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(measure(batches[name], device, heater, on_sample))
        if on_round is not None:
            on_round(index)
    return {name: Times.of(values) for name, values in samples.items()}


def rotating(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One callable that runs the given ones round-robin, so that successive calls touch different buffers."""
    turns = cycle((*calls[1:], *calls[:1]))

    def call() -> object:
        return next(turns)()

    return call


def host_seconds(call: Callable[[], object], device: torch.device, *, calls: int) -> float:
    """Seconds the host is busy with one call, mean over `calls`; on a GPU the device work runs later."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = (time.perf_counter() - begin) / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return spent


def _batch_cuda(
    batch: _Batch,
    device: torch.device,
    heater: _Batch | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> float:
    start = torch.cuda.Event(enable_timing=True)
    stop = torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        # The GPU sleeps while the host queues the batch, so launch gaps do not count for short kernels.
        heating = [heater] * (HEAT_BATCHES * heater.repeats) if heater else []
        busy = batch.host_seconds * batch.repeats + sum(each.host_seconds for each in heating)
        torch.cuda._sleep(int(min(1e-4 + 1.5 * busy, 0.05) * CYCLES_PER_SECOND))
        for each in heating:
            each.call()
        # One untimed call after the sleep: the first kernel after an idle gap has higher clocks and a cold TLB.
        batch.call()
        start.record()
        for _ in range(batch.repeats):
            batch.call()
        stop.record()
        on_sample()
        stop.synchronize()
    return start.elapsed_time(stop) / batch.repeats


def _batch_cpu(
    batch: _Batch,
    device: torch.device,
    heater: _Batch | None = None,
    on_sample: Callable[[], None] = lambda: None,
) -> float:
    begin = time.perf_counter()
    for _ in range(batch.repeats):
        batch.call()
    spent = time.perf_counter() - begin
    on_sample()
    return spent * 1e3 / batch.repeats


def wall_rounds(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    *,
    count: int | None = None,
    until_idle: bool = True,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Milliseconds per call: `count` calls back to back, WALL_CALLS unless given, the named ones interleaved.

    `until_idle=False` stops the clock when the host has queued them: its own time, if all of them fit the launch queue.
    `on_sample()` is called after each sample.
    """
    count = WALL_CALLS if count is None else count
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WALL_WARMUP):
            call()
    names = list(calls)
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            wait(device)
            begin = time.perf_counter()
            for _ in range(count):
                calls[name]()
            if until_idle:
                wait(device)
            samples[name].append((time.perf_counter() - begin) / count * 1e3)
            on_sample()
    wait(device)
    return {name: Times.of(values) for name, values in samples.items()}


def wait(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
