"""Train a small language model on one long sequence of packed documents, which the ranks of a mesh share.

    python examples/long_context.py                                         one process
    torchrun --nproc-per-node 4 examples/long_context.py                    four, by gloo or on four GPUs by NCCL
    torchrun --nproc-per-node 8 examples/long_context.py --tokens 131072    longer

Documents are the first bytes of Python's own modules. A query sees the last `--window` bytes of its document. The
losses are the same for any number of processes, up to rounding. Expected output of four processes on a CPU:

    gather over 4 ranks: fullest rank 1.022 of the mean, 0.9 MB received a layer
    step 0: 5.85 nats a byte
    step 5: 3.26 nats a byte
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import sparsek as sk

WIDTH, HEADS, KV_HEADS, LAYERS = 128, 4, 2, 2
DIM = WIDTH // HEADS
LONGEST = 1500  # bytes of a document


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE of [B, H, S, D] at the places of the tokens."""
    angle = positions[:, None] * 10000.0 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    (a, b), sin, cos = x.chunk(2, -1), angle.sin(), angle.cos()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Block(nn.Module):
    """Attention over the mesh and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, plan: sk.distributed.MeshPlan, positions: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        seen = sk.distributed.attention(rotated(q, positions), rotated(k, positions), v, plan)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


class LanguageModel(nn.Module):
    """Logits [B, S_r, 256] of the next byte, of the tokens of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, plan: sk.distributed.MeshPlan, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, plan, positions)
        return self.head(x)


def documents(tokens: int) -> tuple[Tensor, Tensor]:
    """Bytes [1, tokens] of Python's modules, and cu_seqlens of the modules."""
    texts, ends = [], [0]
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_bytes()[: min(LONGEST, tokens - ends[-1])])
        ends.append(ends[-1] + len(texts[-1]))
        if ends[-1] == tokens:
            break
    return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8).long()[None], torch.tensor(ends)


def train(options: argparse.Namespace, device: str) -> None:
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("sequence",))
    whole, cu_seqlens = documents(options.tokens)
    mask = sk.MaskPolicy(window=options.window).packed(cu_seqlens)
    plan = sk.distributed.plan(mask, mesh["sequence"], options.how)
    labels = torch.cat((whole[:, 1:], whole[:, :1]), 1)  # shifted before they are sharded
    tokens, labels = (sk.distributed.shard_sequence(x, plan, dim=1).to(device) for x in (whole, labels))
    positions = sk.distributed.positions(plan, device=device)
    if not plan.rank:
        most = plan.received(1, HEADS, KV_HEADS, DIM, dtype=torch.float32).max() / 1e6
        print(
            f"{options.how} over {ranks} ranks: fullest rank {plan.imbalance:.3f} of the mean, {most:.1f} MB received "
            "a layer"
        )
    torch.manual_seed(0)  # the same model on all ranks
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        logits = model(tokens, plan, positions)
        loss = (
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / options.tokens
        )
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # sums over the tokens of all ranks
            dist.all_reduce(parameter.grad)
        optimizer.step()
        dist.all_reduce(loss.detach_())
        if not plan.rank and step % 5 == 0:
            print(f"step {step}: {loss.item():.2f} nats a byte")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="bytes of the sequence")
    parser.add_argument("--window", type=int, default=1024, help="bytes that a query sees")
    parser.add_argument("--how", default="gather", choices=("gather", "heads"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(given)
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:  # of torchrun
        if options.device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(options, options.device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
