"""The time of a call by kernels, gaps between them, and the host; and a trace for a browser."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparsek.core.clock import wait, wall_rounds
from sparsek.engine.plan.plan import time_text

# What of a trace runs on a GPU.
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = 20
# The GPU waits for a host that is busy for this share of a call.
HOST_BOUND = 0.9


@dataclass(frozen=True)
class Breakdown:
    """Seconds of one of many calls in a row: `wall` from the first to an idle device; `kernels` on the GPU, summed, by
    the trace; `host` until it is queued. `launches`: seconds by the name of each kernel.
    """

    wall: float
    kernels: float
    host: float
    launches: Mapping[str, float]

    @property
    def gaps(self) -> float:
        """Seconds in which no kernel of the call runs."""
        return max(0.0, self.wall - self.kernels)

    @property
    def sentence(self) -> str:
        if self.host >= HOST_BOUND * self.wall and self.gaps > 0.1 * self.wall:
            limit = "The GPU waits for the host; a CUDA graph would remove these gaps."
        else:
            limit = "The host is ahead of the GPU."
        return (
            f"Calls in a row: {time_text(self.wall)} each: kernels {time_text(self.kernels)}, gaps "
            f"{time_text(self.gaps)}; the host is busy for {time_text(self.host)}. {limit}"
        )

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gaps": self.gaps}


def broken_down(call: Callable[[], object], device: torch.device, trace: Path, rounds: int = 5) -> Breakdown:
    """Times calls without a profiler, then writes a chrome trace of some of them (chrome://tracing, Perfetto).

    acc_events: without it the profilers of torch 2.10 to 2.12 warn at every start that cycles lose their events.
    """
    wall = wall_rounds({"": call}, device, rounds, count=CALLS)[""].median / 1e3
    host = wall_rounds({"": call}, device, rounds, count=CALLS, until_idle=False)[""].median / 1e3
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(CALLS):
            call()
        wait(device)
    profiler.export_chrome_trace(str(trace))
    launches = {
        name: seconds / CALLS
        for name, seconds in on_gpu(json.loads(trace.read_text(encoding="utf-8"))).items()
    }
    return Breakdown(wall, sum(launches.values()), host, launches)


def on_gpu(trace: Mapping[str, Any]) -> dict[str, float]:
    """Seconds on the GPU by the name of each kernel or copy in a chrome trace, whose durations are microseconds."""
    found: dict[str, float] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in ON_GPU:
            found[event["name"]] = found.get(event["name"], 0.0) + event["dur"] / 1e6
    return found
