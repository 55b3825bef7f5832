"""Odd arguments for everything public in sk.policies."""

import pytest

from tests.fuzz.calls_policies import CALLS, REASONS
from tests.fuzz.engine import attack, count_of, public_names


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_or_right(name: str) -> None:
    faults = attack(name, CALLS[name], count_of(500))
    assert not faults, "\n".join(faults)


def test_every_public_function_is_drawn_or_says_why_not() -> None:
    names = public_names(lambda module: module.startswith("sparsek.attn.policies"))
    told = CALLS.keys() | REASONS.keys()
    missing = [name for name in sorted(names) if not {name, name.rpartition(".")[2]} & told]
    assert not missing, "neither drawn nor in REASONS"
