"""Every published row in one go: which are fresh already, how long the others will take, and when to stop."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from sparsek.bench.engine import records
from sparsek.bench.engine.bench import Bench
from sparsek.bench.engine.case import SuiteRow

# What must be the same for a record to stand.
SAME = ("gpu", "torch", "triton", "cuda")


class Row(NamedTuple):
    """One entry of one benchmark."""

    bench: Bench
    entry: SuiteRow

    @property
    def name(self) -> str:
        return f"{self.entry.op}: {self.entry.case.name}"


def rows_of(benches: Iterable[Bench]) -> list[Row]:
    """All rows, in the order of the benchmarks and their suites."""
    return [Row(bench, entry) for bench in benches for entry in bench.rows]


def stale_rows(rows: Iterable[Row], found: Iterable[records.Record], device: torch.device) -> list[Row]:
    """Those for which some kernel has no record of today's source, this card and these versions."""
    here = records.environment(device)
    measured: dict[tuple[object, ...], dict[str, bool]] = defaultdict(dict)
    for record in records.newest(each for each in found if each["env"]["gpu"] == here["gpu"]):
        same = all(record["env"][name] == here[name] for name in SAME)
        key = record["op"], records.case_of(record)
        measured[key][record["kernel"]] = same and records.is_fresh(record)
    return [row for row in rows if not _is_fresh(row.entry, measured[row.entry.op, row.entry.case])]


def _is_fresh(entry: SuiteRow, kernels: dict[str, bool]) -> bool:
    """Whether every kernel of the entry is fresh; "auto" is whichever is not named beside it."""
    named = [name for name in entry.kernels if name != "auto"]
    free = [fresh for name, fresh in kernels.items() if name not in named]
    autos = [any(free)] * (len(entry.kernels) - len(named))
    return all([*autos, *(kernels.get(name, False) for name in named)])


class Done(NamedTuple):
    """One row, done: how long it took, how many are left, and for how many seconds."""

    row: Row
    seconds: float
    rows_left: int
    seconds_left: float


def walk(
    rows: Sequence[Row],
    measure: Callable[[Row], None],
    limit: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Done]:
    """Measures the rows in turn, the first in any case, and stops before one that may not end within `limit` seconds
    of the beginning. A row may take as long as the longest of its op so far but the first, which compiles and imports;
    before there are two, as its benchmark's `slowest`. Those left are taken to be as long as those done, on average.
    """
    begin = clock()
    took: dict[str, list[float]] = defaultdict(list)
    for at, row in enumerate(rows):
        started, of_op = clock(), took[row.entry.op]
        longest = max(of_op[1:], default=row.bench.slowest)
        if at and limit is not None and started - begin + longest > limit:
            return
        measure(row)
        of_op.append(clock() - started)
        rest = len(rows) - at - 1
        yield Done(row, of_op[-1], rest, rest * (clock() - begin) / (at + 1))
