"""What an eager call costs the host: engine/plan/host.json, which the planner and `advise` read, against its
records.
"""

from pathlib import Path
from typing import Any

import pytest

from sparsek.core.device import CARDS
from sparsek.engine.plan import host
from sparsek_bench.engine import records
from sparsek_bench.engine.tables import case_name
from sparsek_bench.suites.host import EAGER

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


@pytest.mark.parametrize("card", host.table())
def test_the_figure_of_a_card_is_that_of_its_newest_record(card: str) -> None:
    found: list[Any] = [each for each in records.read(RESULTS) if each["op"] == "host"]
    if not found:
        pytest.skip(
            "benchmarks/results has no record of host time: `sparsek bench host` makes them on an H200"
        )
    of_card = [each for each in records.newest(found) if each["env"]["gpu"] == card]
    (record,) = (each for each in of_card if records.case_of(each) == EAGER)
    told = host.table()[card]
    assert (told["case"], told["date"]) == (case_name(record), record["date"])
    assert told["seconds"] == pytest.approx(record["ms"]["median"] / 1e3, rel=1e-4)
    known = next(each for each in CARDS.values() if each.name == card)
    assert host.eager_seconds(known) == told["seconds"]
