"""Training on real data: scikit-learn's digits, 1797 scans of 8 x 8 pixels (Alpaydin and Kaynak 1998).

A block-sparse MLP is held to the same MLP with dense weights under a mask: same initial values, same batches.
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsek.nn import BlockSparseLinear
from tests.house.tools import need

STEPS, BATCH = 200, 128


class Masked(nn.Module):
    """act(x @ (weight * mask).T + bias), dense, with the values of a block-sparse layer."""

    mask: Tensor

    def __init__(self, twin: BlockSparseLinear) -> None:
        super().__init__()
        weight = twin.weight.to_dense().detach()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(twin.bias.detach().clone())  # type: ignore[union-attr]
        self.register_buffer("mask", (weight != 0).float())
        self.activation = twin.activation

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight * self.mask, self.bias)
        return functional.gelu(y) if self.activation == "gelu" else y


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    need("sklearn")
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.tensor(np.asarray(found.data), dtype=torch.float32) / 16  # type: ignore[attr-defined]
    return pixels, torch.tensor(np.asarray(found.target))  # type: ignore[attr-defined]


def train(model: nn.Module, pixels: Tensor, labels: Tensor) -> list[float]:
    """The loss of every step; batches are drawn by a seed."""
    draw = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        batch = torch.randint(len(labels), (BATCH,), generator=draw)
        loss = functional.cross_entropy(model(pixels[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_two_hundred_steps_reach_the_loss_of_dense_weights_under_a_mask(
    digits: tuple[Tensor, Tensor], one_thread: None
):
    pixels, labels = digits
    layers = [
        BlockSparseLinear.random(64, 256, 16, 0.5, seed=1, activation="gelu"),
        BlockSparseLinear.random(256, 256, 16, 0.25, seed=2, activation="gelu"),
        BlockSparseLinear.random(256, 10, (16, 32), 0.5, seed=3),
    ]
    sparse = nn.Sequential(*layers)
    dense = nn.Sequential(*map(Masked, layers))
    found, right = train(sparse, pixels, labels), train(dense, pixels, labels)
    with torch.no_grad():
        answers, wanted = sparse(pixels), dense(pixels)
    ours, theirs = (float(functional.cross_entropy(each, labels)) for each in (answers, wanted))
    assert found[0] == pytest.approx(right[0], rel=1e-5)
    assert abs(ours - theirs) < 0.01 * theirs
    assert abs(sum(found[-20:]) - sum(right[-20:])) < 0.01 * sum(right[-20:])
    assert ours < 0.1 * found[0]
    assert float((answers.argmax(1) == labels).float().mean()) > 0.97
    for layer, twin in zip(layers, dense, strict=True):
        assert ((twin.weight * twin.mask - layer.weight.to_dense()).abs() < 1e-2).all()  # type: ignore[operator]
