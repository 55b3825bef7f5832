"""Inputs on a GPU that no run had before. A test names the seed when it fails."""

import os
import random
from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from tests.attn.attention_cases import random_bits


def fresh() -> int:
    """A seed that no run had before, which torch draws by from now on."""
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    torch.manual_seed(seed)
    print("seed", seed)
    return seed


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def layouts_of_attention() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """q [2, 4, 300, 64], k and v [2, 4, 400, 64] in memory in every way that a kernel reads."""
    packed = randn(2, 400, 3, 4, 64).permute(2, 0, 3, 1, 4)
    odd = randn(2 * 4 * 400 * 64 + 1)[1:].view(2, 4, 400, 64)
    shared = randn(2, 1, 1, 400, 64).expand(2, 2, 4, 400, 64)
    return {
        "packed": (packed[0, :, :, :300], packed[1], packed[2]),
        "keys along rows": (randn(2, 4, 64, 300).mT, randn(2, 4, 64, 400).mT, randn(2, 4, 64, 400).mT),
        "spread": (randn(2, 4, 300, 128)[..., ::2], randn(2, 4, 800, 64)[:, :, ::2], randn(2, 4, 400, 64)),
        "shared": (randn(2, 4, 300, 64), shared[0], shared[1]),
        "odd addresses": (odd[:, :, :300], odd, odd),
        "odd strides": (randn(2, 4, 300, 67)[..., :64], randn(2, 4, 400, 65)[..., 1:], randn(2, 4, 400, 64)),
    }


def any_mask(draw: random.Random) -> BlockMask:
    """Of a random builder, with up to 700 queries and keys."""
    block = (draw.choice((64, 128)), draw.choice((64, 128)))
    s, t = draw.randint(1, 700), draw.randint(1, 700)
    frame: dict[str, Any] = {"q_len": s, "kv_len": t, "block": block, "device": "cuda"}
    causal = draw.random() < 0.5
    match draw.randrange(6):
        case 0:
            return BlockMask.causal(**frame)
        case 1:
            return BlockMask.sliding_window(window=draw.randint(1, 300), causal=causal, **frame)
        case 2:
            return BlockMask.strided(stride=2 * block[1], window=draw.randint(1, 200), causal=causal, **frame)
        case 3:
            scores = torch.rand(1, 2, -(-s // block[0]), -(-t // block[1]), device="cuda")
            return BlockMask.topk(scores, draw.randint(1, scores.shape[3]), causal=causal, **frame)
        case 4:
            lengths = [draw.randint(1, 200) for _ in range(draw.randint(1, 5))]
            return BlockMask.block_diagonal(lengths, causal=causal, block=block, device="cuda")
        case _:
            return random_bits("cuda", (s, t), block, heads=2, density=draw.random(), seed=draw.randrange(99))
