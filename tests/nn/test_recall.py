"""Training a transformer whose attention has a sliding window and sinks: the loss curve of dense attention with a mask.

The task: tokens of 16 positions ago come again, and at every marker the first token of the text, which only the sinks
still hold, is to be told.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk

LENGTH, WINDOW, SINKS, PERIOD = 192, 24, 4, 16
TOKENS, MARKER = 8, 8
WIDTH, HEADS, KV_HEADS = 32, 4, 2
BATCH, STEPS = 4, 200

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """x + attention, then + an MLP, each of the normed x."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        dim = WIDTH // HEADS
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * dim)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        seen = self.attend(*parts.split((HEADS, KV_HEADS, KV_HEADS), 1))
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class Transformer(nn.Module):
    """Predicts the answer at every position."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.place = nn.Embedding(TOKENS + 1, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer = Layer(attend)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.token(tokens) + self.place.weight))


def batch(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens, and answers from position PERIOD on: the next token, or the first one at a marker."""
    some = torch.randint(TOKENS, (BATCH, PERIOD), generator=draw)
    text = some.repeat(1, LENGTH // PERIOD + 1)[:, : LENGTH + 1]
    tokens, answers = text[:, :LENGTH].clone(), text[:, 1:].clone()
    marked = torch.rand(BATCH, LENGTH, generator=draw) < 0.15
    marked[:, : PERIOD + 1] = False
    answers = torch.where(marked, tokens[:, :1], answers)
    return tokens.masked_fill(marked, MARKER), answers[:, PERIOD:]


def train(attend: Attend) -> list[float]:
    """The loss of every step; parameters and batches are drawn by seeds."""
    model = Transformer(attend)
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        tokens, answers = batch(draw)
        found = model(tokens)[:, PERIOD:]
        loss = functional.cross_entropy(found.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_follows_the_loss_curve_of_dense_attention_with_a_mask(one_thread: None):
    mask = sk.BlockMask.sliding_window(LENGTH, WINDOW, sinks=SINKS, block=64, device="cpu")
    seen = mask.to_dense()

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)

    ours = train(lambda q, k, v: sk.attention(q, k, v, mask))
    theirs = train(dense)
    assert mask.stored_blocks < 3 * 3, "some blocks are not visited"
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6)
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-2
    assert sum(ours[-20:]) == pytest.approx(sum(theirs[-20:]), rel=0.02)
    assert sum(ours[-20:]) / 20 < 0.2 * ours[0]
