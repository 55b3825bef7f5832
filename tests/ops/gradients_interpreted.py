"""Gradients by the portable kernels, and of unpacked 2:4 matrices, in Triton's interpreter."""

import pytest
import torch

from tests.ops.gradients import FORMS, FORMS_24, SIZES_24, hold, inputs_of
from tests.ops.storages import TWO_FOUR

NAMES = (
    "batch of alpha B @ A.T", "linear relu", "sddmm of transposes", "A @ A2, dense", "A.T @ A2.T at a pattern",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_within_the_error_budget(name: str):
    form = FORMS[name]
    hold(form, *inputs_of(form, {"m": 50, "k": 20, "n": 50}, torch.float32), f"portable.{form.op}")


def test_gradients_of_a_thin_product_are_within_the_error_budget():
    form = FORMS["linear relu"]
    hold(form, *inputs_of(form, {"m": 50, "k": 20, "n": 3}, torch.float32), "portable.spmm_skinny")


@pytest.mark.parametrize("name", ["batch of B @ A", "linear relu", "linear with a residual"])
@pytest.mark.parametrize("kind", TWO_FOUR)
def test_gradients_of_2_4_are_within_the_error_budget(kind: str, name: str):
    form = FORMS_24[name]
    hold(form, *inputs_of(form, SIZES_24, torch.float16, storage=kind), f"unpacked.{kind}")
