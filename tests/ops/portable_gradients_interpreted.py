"""Gradients by the portable kernels in Triton's interpreter."""

import pytest
import torch

from tests.ops.gradients import FORMS, hold, inputs_of

KERNELS = {"spmm": "portable.spmm", "sddmm": "portable.sddmm", "spgemm": "portable.spgemm"}


NAMES = (
    "batch of alpha B @ A.T",
    "linear relu",
    "sddmm of transposes",
    "A @ A2, dense",
    "A.T @ A2.T at a pattern",
)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_within_the_error_budget(name: str):
    form = FORMS[name]
    hold(form, *inputs_of(form, {"m": 50, "k": 20, "n": 50}, torch.float32), KERNELS[form.op])


def test_gradients_of_a_thin_product_are_within_the_error_budget():
    form = FORMS["linear relu"]
    hold(form, *inputs_of(form, {"m": 50, "k": 20, "n": 3}, torch.float32), "portable.spmm_skinny")
