"""`python -m benchmarks.token_lists`: train a small model with native sparse attention, and record what it chooses.

The model reads bytes: 4 layers of 512 features with 64 heads of q and 4 of k and v, 16 blocks of 64 keys for each
token, windows of 8,192 bytes of the training texts of `benchmarks.whole_models`. The lists are those of the third layer
on 8,192 bytes of text that it was not trained on. The mask `tokens:recorded` of `sparsek bench tokens` reads the file.
"""

from __future__ import annotations

import argparse
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsek as sk
from benchmarks.whole_models import texts

HEADS, KV_HEADS, BLOCK, TOPK, LAYERS, WIDTH = 64, 4, 64, 16, 4, 512
RECORDED_LAYER = 2


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.policy = sk.policies.NSA(topk=TOPK, block=BLOCK)
        self.attention = sk.nn.NativeSparseAttention(
            width, HEADS, self.policy, kv_heads=KV_HEADS, head_dim=head_dim, window=256
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))

    @torch.no_grad()
    def lists(self, x: Tensor) -> Tensor:
        """The blocks of each token for the layer's input x: int32 [B, KV_HEADS, S, TOPK]."""
        layer, x = self.attention, self.norms[0](x)
        assert layer.other_kv is not None
        assert layer.compress_k is not None
        q, k, _ = layer._heads(layer.qkv(x)).split((HEADS, KV_HEADS, KV_HEADS), 1)
        keys = layer._heads(layer.other_kv(x)).chunk(4, 1)[0]
        return self.policy.lists(q, k, compressed=layer.compress_k(keys)).indices


class Reader(nn.Module):
    """The next byte of each: uint8 [B, S] as int64 to logits [B, S, 256]."""

    def __init__(self, width: int = WIDTH, head_dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width, head_dim) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def chosen(self, ids: Tensor) -> Tensor:
        """The blocks that RECORDED_LAYER chooses: int32 [B, KV_HEADS, S, TOPK]."""
        x, layers = self.embedding(ids), list(self.layers)
        for layer in layers[:RECORDED_LAYER]:
            x = layer(x)
        chooser = layers[RECORDED_LAYER]
        assert isinstance(chooser, Layer)
        return chooser.lists(x)


def windows(documents: list[str], length: int, device: torch.device) -> Tensor:
    """Documents one after the other: uint8 [windows, length + 1]."""
    whole = torch.frombuffer(bytearray("\n\n".join(documents).encode()), dtype=torch.uint8)
    return whole[: len(whole) // (length + 1) * (length + 1)].view(-1, length + 1).to(device)


def loss_of(model: Reader, rows: Tensor) -> Tensor:
    rows = rows.long()
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.device.type == "cuda"):
        logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


def train(model: Reader, rows: Tensor, seconds: float, batch: int, rate: float = 1e-3) -> int:
    """AdamW with a warm-up and a cosine over the time; the number of steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), fused=rows.device.type == "cuda"
    )
    draw = torch.Generator(rows.device).manual_seed(0)
    begin, done, step = time.perf_counter(), 0.0, 0
    while done < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * (1.02 + math.cos(math.pi * done)) / 2
        loss = loss_of(model, rows[torch.randint(len(rows), (batch,), generator=draw, device=rows.device)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 25 == 0 or step == 1:
            print(f"step {step}: {loss.item() / math.log(2):.3f} bits a byte", flush=True)
        done = (time.perf_counter() - begin) / seconds
    return step


def write(path: Path, indices: Tensor) -> None:
    """Write lists [heads, tokens, blocks] of blocks 0 to 254, or -1, sorted, by their steps from token to token."""
    places = indices.cpu().sort(-1).values.transpose(1, 2).contiguous().numpy().astype(np.uint8)
    path.write_bytes(lzma.compress(np.diff(places, axis=-1, prepend=np.uint8(0)).tobytes()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.token_lists", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--texts", type=Path, default=Path("build/whole_models/texts.xz"))
    parser.add_argument("--out", type=Path, default=Path("sparsek_bench/suites/recorded_lists.xz"))
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--head-dim", type=int, default=64)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = texts.read(given.texts)
    torch.manual_seed(0)
    model = Reader(given.width, given.head_dim).to(device)
    steps = train(
        model,
        windows(known.documents["train"], given.length, device),
        given.seconds,
        given.batch,
    )
    held = windows(known.documents["validation"], given.length, device)
    with torch.no_grad():
        bits = torch.stack([loss_of(model, row[None]) for row in held[:8]]).mean().item() / math.log(2)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        chosen = model.chosen(held[:1, :-1].long())
    write(given.out, chosen[0])
    union = sk.TokenLists(chosen, BLOCK)
    print(f"{steps} steps, {bits:.3f} bits a byte on held-out text, {union}, {given.out}", flush=True)


if __name__ == "__main__":
    main()
