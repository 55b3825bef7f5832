"""Which configs are worth a measurement, and which measured one wins."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from sparsek.core.device import H200
from sparsek.plan import table
from sparsek.plan.tune import Trial, entry_of, shortlist, winner
from tests.problems import spmm_problem

PROBLEM = spmm_problem(4096, 4096, 4096, (128, 128), 128, "bf16", H200)


@dataclass(frozen=True)
class Wide:
    side: int


class Stub:
    """Its own choice is not the one that it predicts to be fastest."""

    name = "cpu.spmm"

    def default(self, p: Any) -> Wide:
        return Wide(64)

    def configs(self, p: Any) -> list[Wide]:
        return [Wide(256), Wide(64), Wide(16), Wide(128), Wide(32)]

    def seconds(self, p: Any, c: Wide) -> float:
        return c.side * 1e-6


def test_the_shortlist_begins_with_the_kernels_own_choice_and_goes_on_by_prediction() -> None:
    assert shortlist(Stub(), PROBLEM, 4) == [Wide(64), Wide(16), Wide(32), Wide(128)]
    assert shortlist(Stub(), PROBLEM, 99) == [Wide(64), Wide(16), Wide(32), Wide(128), Wide(256)]
    assert shortlist(Stub(), PROBLEM, 0) == [Wide(64)]


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ((10, 9, 8), 2),
        ((10, 9.9, 9.81), 0),
        ((10, 9.7, 9.9), 1),
        ((10, math.inf, 11), 0),
        ((math.inf, 5, 6), 1),
    ],
)
def test_another_config_wins_only_by_more_than_rounds_differ(seconds: tuple[float, ...], best: int) -> None:
    trials = [Trial(Wide(at), each) for at, each in enumerate(seconds)]
    assert winner(trials) is trials[best]


def test_an_entry_holds_what_was_measured_and_predicted() -> None:
    found = entry_of(
        Stub(), PROBLEM, [Trial(Wide(64), 1e-4), Trial(Wide(16), 8e-5)], "2026-11-22T00:00:00+00:00"
    )
    assert found is not None
    assert found.key == ("NVIDIA H200", "cpu.spmm", table.key_of(PROBLEM))
    assert found.config == {"side": 16}
    assert (found.seconds, found.default_seconds, found.predicted) == (8e-5, 1e-4, 6.4e-5)
    assert table.is_fresh(found)


def test_without_a_time_of_the_kernels_own_choice_there_is_nothing_to_say() -> None:
    assert entry_of(Stub(), PROBLEM, [Trial(Wide(64), why_not="wrong"), Trial(Wide(16), 1e-5)], "now") is None
