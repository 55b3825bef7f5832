"""Quest's kernels in Triton's interpreter."""

from typing import Any

import pytest
import torch

from sparsek.attn.kernels.paged import quest
from tests.attn.kernels.paged import quest_cases as cases


@cases.choices
def test_pages_are_those_of_the_highest_bounds(case: Any) -> None:
    cases.check_choice(case, "cpu", torch.float16, seeds=1)


@cases.updates
def test_summaries_follow_the_cache(page: int, dim: int, tokens: int) -> None:
    cases.check_update(page, dim, tokens, torch.float16, "cpu")


def test_slots_are_compared_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quest, "MANY", 64)
    cases.check_update(16, 8, 130, torch.float32, "cpu", seed=4)


def test_a_request_grows() -> None:
    cases.check_steps("cpu", torch.float16)


def test_nan() -> None:
    cases.check_nan("cpu")
