"""Wall-clock times, from an idle device to an idle one: whatever the host does not hide is in them."""

import time
from collections.abc import Callable, Mapping

import torch

from sparsek.core.clock import Times

CALLS = 20
WARMUP = 3


def wall_rounds(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    *,
    count: int | None = None,
    until_idle: bool = True,
    on_sample: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Milliseconds per call: `count` calls back to back, CALLS unless given, the named ones interleaved.

    `until_idle=False` stops the clock when the host has queued them: its own time, if all of them fit the launch queue.
    `on_sample()` is called after each sample.
    """
    count = CALLS if count is None else count
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(WARMUP):
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
