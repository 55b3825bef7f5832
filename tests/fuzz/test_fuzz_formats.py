"""Odd arguments for all that is public of matrices, masks and files: SparseK's own errors or right results only.

SPARSEK_FUZZ_CALLS=200 draws so many calls of each function, SPARSEK_FUZZ_SEED=1 others.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.calls_formats import CALLS, REASONS, here
from tests.fuzz.engine import attack, count_of, public_names


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path) -> Iterator[None]:
    """Pictures and matrices are written by relative paths."""
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


@pytest.mark.parametrize("name", CALLS)
def test_odd_arguments_are_refused_or_right(name: str) -> None:
    faults = attack(name, CALLS[name], count_of(1000))
    assert not faults, "\n".join(faults)


def test_every_public_function_is_drawn_or_says_why_not() -> None:
    names = public_names(here)
    missing = [name for name in sorted(names) if name not in CALLS and not _reason(name)]
    assert not missing, "neither drawn nor in REASONS"
    known = {name.rpartition(".")[2] for name in names}
    assert not [name for name in REASONS if name not in names and name not in known], "reasons for nothing"


def _reason(name: str) -> str | None:
    return REASONS.get(name) or REASONS.get(name.rpartition(".")[2])
