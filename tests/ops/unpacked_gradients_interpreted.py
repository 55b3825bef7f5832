"""Gradients of unpacked 2:4 matrices in Triton's interpreter."""

import pytest
import torch

from tests.ops.storages import TWO_FOUR
from tests.ops.test_semi24_gradients import hold


@pytest.mark.parametrize("name", ["batch of X @ A", "linear relu", "linear None with a residual"])
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_gradients_are_within_the_error_budget(kind: str, name: str):
    hold(name, kind, f"unpacked.{kind}", torch.float16)
