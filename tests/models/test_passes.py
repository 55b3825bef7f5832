"""What sk.prune sees of a model that runs: shared biases, residuals, inputs, and what an error leaves."""

from typing import Any

import torch
from torch import nn

import sparsek as sk

HALF = sk.BlockSparse(block=16, keep=0.5)


def test_layers_whose_bias_is_shared_stay_dense():
    model: Any = nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
        nn.Linear(64, 64),
    )
    model[2].bias = model[0].bias  # a fit for the one would be wrong for the other
    model[4].bias = model[3].bias  # and for a norm
    before = model[3].bias.clone()
    report = sk.prune(model, HALF, calibration=[torch.randn(99, 64)])
    assert [row.name for row in report.replaced] == ["5"]
    assert [row.why_not for row in report.skipped] == [f"shares its bias with {each}" for each in (2, 0, 3)]
    assert torch.equal(model[3].bias, before)
