"""Bars for the time of a CPU kernel beside others, which hold on a machine that does something else as well."""

import fcntl
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from sparsek.core.clock import time_rounds

# Of each try; all of them where the machine was busy, a second or two.
ROUNDS = (1, 7, 21, 63)
# A single round passes only so far below the bar: bf16 of torch takes seconds on a CPU without instructions for it.
FAR = 4


def hold(calls: Mapping[str, Callable[[], object]], bar: float) -> None:
    """The first call takes at most `bar` times as long as the quickest of the others.

    Of interleaved rounds the quickest counts, because what disturbs a round only makes it longer; where that is over
    the bar, more rounds follow. One process of this machine does so at a time.
    """
    with Path(tempfile.gettempdir(), "sparsek-timed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _hold(calls, bar)


def _hold(calls: Mapping[str, Callable[[], object]], bar: float) -> None:
    name, *others = calls
    ratio, quickest = float("inf"), dict.fromkeys(calls, float("inf"))
    for rounds in ROUNDS:
        times = time_rounds(
            calls, device=torch.device("cpu"), rounds=rounds, warmup=min(2, rounds), inner_ms=5
        )
        quickest = {each: min(quickest[each], times[each].min) for each in calls}
        ratio = quickest[name] / min(quickest[other] for other in others)
        if ratio <= (bar / FAR if rounds == 1 else bar):
            return
    raise AssertionError(f"{name} took {ratio:.3g} times as long as the quickest of {others}, not {bar:g}")
