"""Odd arguments for all that is public, and for what stands in for other libraries: own errors or right results only.

SPARSEK_FUZZ_CALLS=200 draws so many calls of each function, SPARSEK_FUZZ_SEED=1 others.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.fuzz import (
    calls_distributed,
    calls_formats,
    calls_integrations,
    calls_models,
    calls_nn,
    calls_ops,
    calls_policies,
)
from tests.fuzz.engine import attack, count_of, public_names

DRAWN = {  # the calls of each file, and how many of each
    "formats": (calls_formats.CALLS, 1000),
    "ops": (calls_ops.CALLS, 1000),
    "policies": (calls_policies.CALLS, 500),
    "nn": (calls_nn.CALLS, 1000),
    "models": (calls_models.CALLS, 500),
    "distributed": (calls_distributed.CALLS, 240),
    "integrations": (calls_integrations.CALLS, 240),
}


def of_policies(module: str) -> bool:
    return module.startswith("sparsek.attn.policies")


ELSEWHERE = (calls_formats.here, of_policies, calls_nn.here, calls_models.here, calls_distributed.here)
ROOMS = {
    "formats": (calls_formats, calls_formats.here),
    "ops": (calls_ops, lambda module: not any(inside(module) for inside in ELSEWHERE)),
    "policies": (calls_policies, of_policies),
    "nn": (calls_nn, calls_nn.here),
    "models": (calls_models, calls_models.here),
    "distributed": (calls_distributed, calls_distributed.here),
}


@pytest.mark.parametrize(("file", "name"), [(file, name) for file in DRAWN for name in DRAWN[file][0]])
def test_odd_arguments_are_refused_or_right(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # pictures and matrices are written by relative paths
    calls, count = DRAWN[file]
    with calls_distributed.one_process() if file == "distributed" else nullcontext():
        faults = attack(name, calls[name], count_of(count))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_function_is_drawn_or_says_why_not(room: str) -> None:
    calls, inside = ROOMS[room]
    reasons = {name: {name, name.rpartition(".")[2]} & calls.REASONS.keys() for name in public_names(inside)}
    missing = [name for name, found in sorted(reasons.items()) if name not in calls.CALLS and not found]
    assert not missing, "neither drawn nor in REASONS"
    assert not calls.REASONS.keys() - set().union(*reasons.values()), "reasons for nothing"
