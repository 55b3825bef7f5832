"""q and k with structure, for tests and benchmarks of policies: white noise, a smooth video, needles in noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsek.core.aliases import earlier_names

__getattr__ = earlier_names(__name__)


class Data(NamedTuple):
    """q [B, Hq, S, D] and k [B, Hkv, S, D], and the shape of the video that they are, in tokens."""

    q: Tensor
    k: Tensor
    shape: tuple[int, int, int]


class HeadSizes(NamedTuple):
    """The sizes of q and k: batch items, heads of q and of k, head dim."""

    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    dim: int = 64


SIZES = HeadSizes()


def white(shape: tuple[int, int, int], sizes: HeadSizes = SIZES, seed: int = 0, device: str = "cpu") -> Data:
    """N(0, 1) numbers. Every key has nearly the same weight, so no choice of blocks is good."""
    draw = torch.Generator(device).manual_seed(seed)
    tokens, dim = math.prod(shape), sizes.dim
    q, k = (
        torch.randn((sizes.batch, heads, tokens, dim), generator=draw, device=device, dtype=torch.float32)
        for heads in (sizes.heads, sizes.kv_heads)
    )
    return Data(q, k, shape)


def smooth(
    shape: tuple[int, int, int],
    sizes: HeadSizes = SIZES,
    seed: int = 0,
    device: str = "cpu",
    *,
    tile: tuple[int, int, int] = (4, 4, 4),
    strength: float = 10.0,
    noise: float = 0.5,
) -> Data:
    """A video: tokens at near places are alike. Tokens are in the order of tiles.

    q . k / sqrt(D) is about strength * exp(-distance^2 / 2), where each head of k has lengths of its own along time and
    space, from 1.5 to 12 tokens; plus white noise. Random Fourier features (Rahimi and Recht, 2007).
    """
    draw = torch.Generator(device).manual_seed(seed)
    places = tile_order(shape, tile, device)
    noisy = white(shape, sizes, seed + 1, device)
    lengths = 1.5 * 8 ** torch.rand(
        (sizes.kv_heads, 1, 3), generator=draw, device=device, dtype=torch.float32
    )
    waves = torch.randn(
        (sizes.kv_heads, sizes.dim // 2, 3), generator=draw, device=device, dtype=torch.float32
    )
    phase = (waves / lengths) @ places.T  # [Hkv, D / 2, S]
    features = torch.cat((phase.cos(), phase.sin()), 1).mT * math.sqrt(2 / sizes.dim)
    features = features * math.sqrt(strength) * sizes.dim**0.25
    group = sizes.heads // sizes.kv_heads
    q, k = features.repeat_interleave(group, 0), features
    return Data(q + noise * noisy.q, k + noise * noisy.k, shape)


def needle(
    shape: tuple[int, int, int],
    sizes: HeadSizes = SIZES,
    seed: int = 0,
    device: str = "cpu",
    *,
    needles: int = 8,
    wide: int = 32,
    strength: float = 12.0,
) -> Data:
    """White noise, and for every head of k some runs of `wide` keys that a random eighth of the queries look for.

    q . k / sqrt(D) of these queries with their runs is about `strength`. Queries come in runs of `wide` too.
    """
    q, k, _ = white(shape, sizes, seed + 1, device)
    draw = torch.Generator(device).manual_seed(seed)
    tokens, dim, group = math.prod(shape), sizes.dim, sizes.heads // sizes.kv_heads
    size = math.sqrt(strength) * dim**0.25
    runs = max(tokens // wide, 1)
    for b in range(sizes.batch):
        for h in range(sizes.kv_heads):
            directions = torch.randn((needles, dim), generator=draw, device=device, dtype=torch.float32)
            directions = size * directions / directions.norm(dim=1, keepdim=True)
            places = torch.randperm(runs, generator=draw, device=device)[:needles]
            for each, place in enumerate(places.tolist()):
                k[b, h, place * wide : (place + 1) * wide] += directions[each]
            for head in range(h * group, (h + 1) * group):
                asking = torch.randperm(runs, generator=draw, device=device)[: max(runs // 8, 1)]
                which = torch.randint(needles, (asking.numel(),), generator=draw, device=device)
                rows = (asking[:, None] * wide + torch.arange(wide, device=device)).clamp(max=tokens - 1)
                q[b, head, rows.flatten()] += directions[which].repeat_interleave(wide, 0)
    return Data(q, k, shape)


GENERATORS: dict[str, Callable[..., Data]] = {"white": white, "smooth": smooth, "needle": needle}


def tile_order(shape: tuple[int, int, int], tile: tuple[int, int, int], device: str) -> Tensor:
    """float32 [S, 3]: the place (frame, row, column) of each token, in the order of tiles."""
    at = frame_numbers(shape, tile, device)
    _, h, w = shape
    return torch.stack((at // (h * w), at // w % h, at % w), 1).float()


def frame_numbers(shape: tuple[int, int, int], tile: tuple[int, int, int], device: str) -> Tensor:
    """int64 [S]: the number of each token of the order of tiles in the order of frames, rows, columns."""
    (t, h, w), (a, b, c) = shape, tile
    numbers = torch.arange(t * h * w, device=device).view(t // a, a, h // b, b, w // c, c)
    return numbers.permute(0, 2, 4, 1, 3, 5).flatten()
