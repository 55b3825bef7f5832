"""Odd arguments for the calls that stand in for other libraries': SparseK's own errors or right results."""

import pytest

from tests.fuzz.calls_integrations import CALLS
from tests.fuzz.engine import attack, count_of


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_or_right(name: str) -> None:
    faults = attack(name, CALLS[name], count_of(240))
    assert not faults, "\n".join(faults)
