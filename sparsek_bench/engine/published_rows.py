"""Every published row in one go: which are fresh already, how long the others will take, and when to stop."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from sparsek_bench.engine import records
from sparsek_bench.engine.bench import BY_OP
from sparsek_bench.engine.case import Case, SuiteRow

# What must be the same for a record to stand.
SAME = ("gpu", "torch", "triton", "cuda")


def stale_rows(
    rows: Iterable[SuiteRow], found: Iterable[records.Record], device: torch.device
) -> list[SuiteRow]:
    """Those for which some kernel has no record of today's source, this card and these versions."""
    here = records.environment(device)
    measured: dict[Case, dict[str, bool]] = defaultdict(dict)
    ours = records.newest(each for each in found if each["env"]["gpu"] == here["gpu"])
    for record in sorted(ours, key=records.when):
        same = all(record["env"][name] == here[name] for name in SAME)
        measured[records.case_of(record)][record["kernel"]] = same and records.is_fresh(record)
    return [row for row in rows if not _is_fresh(row.kernels, measured[row.case])]


def _is_fresh(wanted: Sequence[str], kernels: dict[str, bool]) -> bool:
    """Whether every wanted kernel is fresh; "auto" is whichever is not named beside it, the last one of several."""
    named = [name for name in wanted if name != "auto"]
    auto = [fresh for name, fresh in kernels.items() if name not in named][-1:] == [True]
    return all(auto if name == "auto" else kernels.get(name, False) for name in wanted)


class RowProgress(NamedTuple):
    """A row that was measured: how long it took, how many are left, and for how many seconds."""

    row: SuiteRow
    seconds: float
    rows_left: int
    seconds_left: float


def walk(
    rows: Sequence[SuiteRow],
    measure: Callable[[SuiteRow], None],
    limit: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RowProgress]:
    """Measures the rows in turn, the first in any case, and stops before one that may not end within `limit` seconds
    of the beginning. A row may take as long as the longest of its op so far but the first, which compiles and imports;
    before there are two, as its benchmark's `slowest`. Those left are taken to be as long as those done, on average.
    """
    begin = clock()
    took: dict[str, list[float]] = defaultdict(list)
    for at, row in enumerate(rows):
        started, of_op = clock(), took[row.case.op]
        longest = max(of_op[1:], default=BY_OP[row.case.op].slowest)
        if at and limit is not None and started - begin + longest > limit:
            return
        measure(row)
        of_op.append(clock() - started)
        rest = len(rows) - at - 1
        yield RowProgress(row, of_op[-1], rest, rest * (clock() - begin) / (at + 1))
