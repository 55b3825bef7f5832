"""All published rows in one go: which are stale, how long the others take, when the walk stops."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsek.engine import table
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import published_rows, records
from sparsek_bench.engine.bench import TABLES
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.published_rows import stale_rows, walk
from sparsek_bench.suites.linear import LinearCase
from sparsek_bench.suites.sddmm import SddmmCase
from sparsek_bench.suites.spmm import SpmmCase

CPU = torch.device("cpu")
SMALL = [SpmmCase(64, 96, n, (32, 32), 0.5, dtype="fp32") for n in (16, 32, 48)]
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
Make = Callable[..., records.Record]


ROWS = [row for bench in BENCHES.values() for row in bench.rows]


def rows(*kernels: str) -> list[SuiteRow]:
    return [SuiteRow(case, kernels or ("auto",)) for case in SMALL]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of an operation is taken to last 4 seconds, of SDDMM 9."""
    for op, seconds in (("spmm", 4.0), ("sddmm", 9.0)):
        changed = replace(BENCHES[op], slowest=seconds)
        monkeypatch.setattr(published_rows, "BY_OP", {**published_rows.BY_OP, op: changed})


@pytest.fixture
def here(make_record: Make) -> Make:
    """Makes a record of this machine."""
    env = records.environment(CPU)
    return lambda case, **changes: make_record(case, **({"env": env | {"driver": "1"}} | changes))


def test_every_table_and_every_record_belongs_to_a_row() -> None:
    known = {row.case for row in ROWS}
    published = {entry.case for table in TABLES.values() for entry in table.suite}
    assert published <= known
    measured = records.read(RESULTS)
    assert {records.case_of(record) for record in measured} <= known
    kernels = {row.case: row.kernels for row in ROWS}
    portable = {name for _, name, *_ in table.rows() if name.startswith("portable")}
    asked = {
        (each["kernel"], kernels[records.case_of(each)]) for each in measured if each["kernel"] in portable
    }
    assert [name for name, each in asked if name not in each and "auto" not in each] == []


def test_no_two_benchmarks_share_a_row_or_a_file() -> None:
    listed = [row.case for row in ROWS]
    assert len(set(listed)) == len(listed)
    assert len({bench.file for bench in BENCHES.values()}) == len(BENCHES)


def test_rows_with_fresh_records_are_left_out(here: Make) -> None:
    assert stale_rows(rows(), [here(SMALL[0]), here(SMALL[2])], CPU) == rows()[1:2]
    assert stale_rows(rows("cpu.spmm"), [here(case) for case in SMALL], CPU) == []
    assert stale_rows(rows("cpu.spmm", "reference.spmm"), [here(case) for case in SMALL], CPU) != []


@pytest.mark.parametrize("name", published_rows.SAME, ids="field {}".format)
def test_a_record_of_another_card_or_version_is_stale(here: Make, name: str) -> None:
    env = records.environment(CPU) | {name: "another"}
    assert len(stale_rows(rows(), [here(case, env=env) for case in SMALL], CPU)) == 3


def test_a_record_of_another_source_or_op_is_stale(here: Make) -> None:
    assert len(stale_rows(rows(), [here(case, source_hash="0" * 16) for case in SMALL], CPU)) == 3
    fresh = [here(case, date="2026-11-21T00:00:00+00:00") for case in SMALL]
    linear = [LinearCase(16, 64, 64, (32, 32), 0.5)]
    older = [here(case, source_hash="0" * 16, date="2026-11-20T00:00:00+00:00") for case in SMALL]
    assert stale_rows(rows(), [*fresh, *older], CPU) == []
    other = [here(case) for case in linear]
    assert len(stale_rows(rows(), other, CPU)) == 3


def test_auto_is_the_kernel_that_is_not_named_beside_it(here: Make) -> None:
    mixed, named = rows("auto", "cpu.spmm"), [here(case) for case in SMALL]
    assert len(stale_rows(mixed, named, CPU)) == 3
    source = records.hash_of("spmm", "reference.spmm")
    others = [here(case, kernel="reference.spmm", source_hash=source) for case in SMALL]
    assert stale_rows(mixed, [*named, *others], CPU) == []


def test_auto_is_the_kernel_that_was_measured_last(here: Make) -> None:
    """Before or after a fresh one, another kernel was chosen, whose source has changed since."""
    source = records.hash_of("spmm", "reference.spmm")
    for day, left in (("20", 0), ("22", 3)):
        fresh = [
            here(case, kernel="reference.spmm", source_hash=source, date="2026-11-21T00:00:00+00:00")
            for case in SMALL
        ]
        stale = [here(case, source_hash="0" * 16, date=f"2026-11-{day}T00:00:00+00:00") for case in SMALL]
        for both in ([*fresh, *stale], [*stale, *fresh]):
            assert len(stale_rows(rows(), both, CPU)) == left


class Clock:
    """A clock that rows move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> Callable[[SuiteRow], None]:
        def measure(row: SuiteRow) -> None:
            self.now += seconds

        return measure


def test_each_step_says_what_is_left(slow: None) -> None:
    clock = Clock()
    done = list(walk(rows(), clock.spend(4.0), clock=clock))
    assert [(each.seconds, each.rows_left, each.seconds_left) for each in done] == [
        (4.0, 2, 8.0),
        (4.0, 1, 4.0),
        (4.0, 0, 0.0),
    ]


@pytest.mark.parametrize(("limit", "count"), [(0.0, 1), (7.9, 1), (8.0, 2), (11.9, 2), (12.0, 3), (None, 3)])
def test_the_walk_stops_before_its_limit(slow: None, limit: float | None, count: int) -> None:
    clock = Clock()
    assert len(list(walk(rows(), clock.spend(4.0), limit, clock))) == count


@pytest.mark.parametrize(("limit", "count"), [(23.9, 1), (24.0, 2), (29.9, 2), (30.0, 3)])
def test_a_row_may_take_as_long_as_the_longest_of_its_op(slow: None, limit: float, count: int) -> None:
    """What the first row compiles and imports is no longer to be done; 4 seconds are the benchmark's `slowest`."""
    clock = Clock()
    spent = iter((20.0, 5.0, 2.0))

    def measure(row: SuiteRow) -> None:
        clock.now += next(spent)

    assert len(list(walk(rows(), measure, limit, clock))) == count


def test_ops_have_limits_of_their_own(slow: None) -> None:
    clock = Clock()
    first, *_ = rows()
    other = SuiteRow(SddmmCase(64, 96, 32, (32, 32), 0.5))
    assert len(list(walk([first, first, other], clock.spend(2.0), 12.9, clock))) == 2
    assert len(list(walk([first, first, other], clock.spend(2.0), 13.0, clock))) == 3
