"""Odd arguments for everything public in products, layers and attention: SparseK's own errors or right results.

SPARSEK_FUZZ_CALLS=200 draws so many calls of each function, SPARSEK_FUZZ_SEED=1 others.
"""

import pytest

from tests.fuzz.calls_formats import here
from tests.fuzz.calls_ops import CALLS, REASONS
from tests.fuzz.engine import attack, count_of, public_names


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_or_right(name: str) -> None:
    faults = attack(name, CALLS[name], count_of(1000))
    assert not faults, "\n".join(faults)


def test_every_public_function_is_drawn_or_says_why_not() -> None:
    names = public_names(lambda module: not here(module) and not module.startswith("sparsek.attn.policies"))
    missing = [name for name in sorted(names) if name not in CALLS and not _reason(name)]
    assert not missing, "neither drawn nor in REASONS"


def _reason(name: str) -> str | None:
    return REASONS.get(name) or REASONS.get(name.rpartition(".")[2])
