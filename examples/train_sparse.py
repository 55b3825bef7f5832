"""Train a small language model from scratch whose weights are sparse from the first step, beside a dense one.

    python examples/train_sparse.py

The text is the source of Python's own modules, byte by byte. `--weights blocks` stores half of the blocks of 32 of each
layer and swaps some of them as it learns (RigL, arXiv:1911.11134); `--weights 2:4` stores two of every four neighbours,
chosen anew every ten steps (SR-STE, arXiv:2102.04010).

Expected output, after 40 seconds on one core:

    dense: 2.44 nats a byte after 200 steps
    blocks: 2.51 nats a byte after 200 steps
    2:4: 2.52 nats a byte after 200 steps
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk

WIDTH, HEADS, LAYERS, CONTEXT = 128, 4, 2, 64


class Block(nn.Module):
    """Attention and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class LanguageModel(nn.Module):
    """Logits [B, S, 256] of the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.byte(ids) + self.place.weight[: ids.shape[1]]))


def sources() -> Tensor:
    """The bytes of some modules of the standard library, uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "ast", "dataclasses", "datetime", "inspect", "pathlib", "textwrap", "typing")
    found = (folder / f"{name}.py" for name in names)
    whole = b"\n".join(path.read_bytes() for path in found if path.exists())
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def batch(text: Tensor, rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows of the text [rows, CONTEXT], and the bytes that follow each of theirs."""
    at = torch.randint(len(text) - CONTEXT - 1, (rows, 1), generator=draw) + torch.arange(CONTEXT + 1)
    windows = text[at].long()
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, following: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def train(weights: str, steps: int, rows: int = 16, keep: float = 0.5) -> float:
    """Train a model with "dense", "blocks" or "2:4" weights and return its loss on text that it has not seen."""
    torch.manual_seed(0)
    model, text, draw = LanguageModel(), sources(), torch.Generator().manual_seed(0)
    split = len(text) * 9 // 10
    schedule, layers = None, list[Any]()
    if weights == "blocks":
        sk.sparsify_(model, {"blocks.*": sk.BlockSparse(block=32, keep=keep)})
        schedule = sk.nn.PatternSchedule(
            model, end=steps * 3 // 4 + 1, every=max(1, steps // 20), swapped=0.2
        )
    elif weights == "2:4":
        dense = dict(model.named_modules())
        sk.sparsify_(model, {"blocks.*": sk.SemiSparse()})
        for name, layer in model.named_modules():
            if isinstance(layer, sk.nn.SparseLinear):
                layers.append(layer.keep_pruned(dense[name]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        ids, following = batch(text[:split], rows, draw)
        optimizer.zero_grad()
        if schedule is None:
            loss_of(model, ids, following).backward()
            optimizer.step()
        else:
            with schedule.gradients():
                loss_of(model, ids, following).backward()
            optimizer.step()
            schedule.step(optimizer)
        if step % 10 == 9 and step < steps * 3 // 4:
            for layer in layers:
                layer.choose_again(optimizer=optimizer)
        decay.step()
    with torch.no_grad():
        return float(loss_of(model, *batch(text[split:], 64, torch.Generator().manual_seed(1))))


def main(arguments: Iterable[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", choices=("blocks", "2:4"), nargs="*", default=["blocks", "2:4"])
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args(None if arguments is None else list(arguments))
    losses = {}
    for weights in ("dense", *given.weights):
        losses[weights] = train(weights, given.steps)
        print(f"{weights}: {losses[weights]:.2f} nats a byte after {given.steps} steps", flush=True)
    return losses


if __name__ == "__main__":
    main()
