"""Errors go through copy, pickle and pools of processes with all that they say."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import sparsek_bench.charts
import sparsek_bench.engine.run  # noqa: F401  their errors are found below
from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError, Unsupported

REASONS = {"hopper.spmm": ["no GPU is here", "block 7x7"], "cpu.spmm": []}


class OwnUnsupported(Unsupported):
    """As a user may have one."""


def every_error() -> list[SparseKError]:
    found, waiting = [], [SparseKError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    assert {InvalidFile, InvalidInput, Unsupported, OwnUnsupported} < set(found)
    return [
        kind("no kernel", REASONS) if issubclass(kind, Unsupported) else kind("row 3 is wrong")
        for kind in found
        if kind.__module__.startswith(("sparsek.", __name__))
    ]


@pytest.mark.parametrize("error", every_error(), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, *(lambda e, p=p: pickle.loads(pickle.dumps(e, p)) for p in range(6))],  # noqa: S301
    ids=["copy", "deepcopy", *(f"pickle {p}" for p in range(6))],
)
def test_an_error_comes_back_as_it_was(error: Any, again: Callable[[Any], Any]) -> None:
    error.where = "block row 3"
    found = again(error)
    assert type(found) is type(error)
    assert found is not error
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_what_an_unsupported_says_is_not_shared_by_a_deep_copy() -> None:
    error = Unsupported("no kernel", REASONS)
    assert (error.what, error.reasons) == ("no kernel", REASONS)
    copy.deepcopy(error).reasons["cpu.spmm"].append("later")
    assert error.reasons["cpu.spmm"] == []
