"""Gradients by the portable kernels in Triton's interpreter. test_gradients.py runs this with TRITON_INTERPRET=1."""

import pytest
import torch

from sparsek.core import env
from tests.ops.gradients import FORMS, hold, inputs_of

assert env.interpreting(), "run through test_gradients.py, which sets TRITON_INTERPRET=1"
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
