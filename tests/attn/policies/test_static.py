"""Streaming, SlidingTile and Radial against loops over tokens; masks made once."""

import itertools
import math
from typing import Any

import pytest
import torch

import sparsek as sk
from tests.attn.policies.drawn import chosen, normal
from tests.refusals import refused

policies = sk.policies


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 128)])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "q_offset"), [(300, 300, None), (100, 500, 200), (200, 130, 0), (90, 200, -100)]
)
@pytest.mark.parametrize(("window", "sinks"), [(64, 0), (150, 64), (1000, 1)])
def test_streaming_keeps_sinks_and_near_blocks(
    causal: bool,
    block: tuple[int, int],
    q_len: int,
    kv_len: int,
    q_offset: int | None,
    window: int,
    sinks: int,
) -> None:
    q, k = normal(1, 2, q_len, 8), normal(1, 1, kv_len, 8)
    policy = policies.Streaming(window=window, sinks=sinks, block=block, causal=causal)
    found = chosen(policy.mask(q, k, q_offset=q_offset))[0, 0]
    offset, local = kv_len - q_len if q_offset is None else q_offset, -(-window // block[1])
    for i, j in itertools.product(*map(range, found.shape)):
        first, last = i * block[0] + offset, min((i + 1) * block[0], q_len) - 1 + offset
        near = first // block[1] - local < j <= last // block[1] + (0 if causal else local - 1)
        wanted = (near or j < -(-sinks // block[1])) and not (causal and j * block[1] > last)
        assert bool(found[i, j]) == wanted, (i, j)


def test_a_static_mask_is_made_once_and_follows_lengths_of_blocks() -> None:
    q = normal(1, 2, 256, 8)
    policy = policies.Streaming(window=64, sinks=64, block=64, causal=False)
    assert policy.mask(q, q) is policy.mask(q, q * 2)
    lengths = torch.tensor([64, 0, 5, 64], dtype=torch.int32)
    dense = policy.mask(q, q, kv_lengths=lengths).to_dense()
    exists = torch.arange(256) % 64 < lengths.repeat_interleave(64)
    assert torch.equal(dense, policy.mask(q, q).to_dense() & exists)


TILES = [
    ((4, 16, 16), (1, 3, 3), (4, 4, 4), 64),
    ((2, 16, 24), (3, 1, 3), (1, 8, 8), 64),
    ((6, 8, 16), (3, 9, 1), (2, 8, 8), (128, 64)),
]


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize(("shape", "window", "tile", "block"), TILES)
@pytest.mark.parametrize("text", [0, 70])
def test_a_sliding_tile_sees_its_window(
    shape: Any, window: Any, tile: Any, block: Any, clamped: bool, text: int
) -> None:
    """By tokens: each token's tile, from its place in the order of tiles."""
    counts = [size // side for size, side in zip(shape, tile, strict=True)]
    tiles = list(itertools.product(*map(range, counts)))
    tokens = math.prod(shape)
    q = normal(1, 1, tokens + text, 8)
    policy = policies.SlidingTile(shape, window, tile, block, clamped)
    found = chosen(policy.mask(q, q))[0, 0]
    bq, bk = policy.sides
    for i, j in itertools.product(*map(range, found.shape)):
        a, b = i * bq, j * bk
        wanted = a >= tokens or b >= tokens
        if not wanted:
            mine, other = (tiles[at // math.prod(tile)] for at in (a, b))
            wanted = True
            for x, y, wide, count in zip(mine, other, window, counts, strict=True):
                reach = wide // 2
                centre = min(max(x, reach), count - 1 - reach) if clamped and wide < count else x
                wanted &= abs(centre - y) <= reach or (clamped and wide >= count)
        assert bool(found[i, j]) == wanted, (i, j)


def radial_rule(frames: int, size: int, decay: float, model: str | None, side: int) -> torch.Tensor:
    """bool [tokens, tokens]: the band of each pair of frames."""
    place = torch.arange(size)
    seen = torch.zeros(frames * size, frames * size, dtype=torch.bool)
    for f, g in itertools.product(range(frames), repeat=2):
        distance = abs(f - g)
        width = 2 ** len(bin(size)[2:]) / 2 ** (len(bin(distance)[2:]) if distance else 0)
        band = width * decay if width * decay >= side else side
        if model and distance <= 1:
            band = size if distance == 0 or model == "hunyuan" else size // 2
        local = (place[:, None] - place).abs() <= band
        if width < side and distance % int(side / width):
            local[:] = False
        if model == "wan" and g == 0:
            local[:] = True
        seen[f * size : (f + 1) * size, g * size : (g + 1) * size] = local
    return seen


@pytest.mark.parametrize(
    ("frames", "size", "decay", "model", "block"),
    [
        (8, 128, 1.0, None, 64),
        (5, 150, 0.5, "wan", 64),
        (9, 70, 1.0, "hunyuan", 64),
        (4, 256, 0.3, None, (128, 64)),
    ],
)
def test_radial_keeps_blocks_that_the_band_fills(
    frames: int, size: int, decay: float, model: str | None, block: Any
) -> None:
    """Pair of frames by pair of frames: a block is kept if most of its touched columns hold a third of its queries."""
    policy = policies.Radial(frames, size, decay, model, block)
    (bq, bk), tokens = policy.sides, frames * size
    q = normal(1, 1, tokens, 8)
    found = chosen(policy.mask(q, q))[0, 0]
    rule = radial_rule(frames, size, decay, model, max(bq, bk))
    wanted = torch.zeros_like(found)
    for f, g in itertools.product(range(frames), repeat=2):
        pair = torch.zeros(found.shape[0] * bq, found.shape[1] * bk)
        rows, columns = slice(f * size, (f + 1) * size), slice(g * size, (g + 1) * size)
        pair[rows, columns] = rule[rows, columns].float()
        share = pair.unflatten(0, (-1, bq)).mean(1).unflatten(1, (-1, bk))
        wanted |= (share > 1 / 3).sum(2) > 0.6 * (share > 0).sum(2).clamp(min=1)
    wanted[tokens // bq :] = True
    wanted[:, tokens // bk :] = True
    assert torch.equal(found, wanted)
    assert found.float().mean() < 1


def test_near_frames_have_wider_bands() -> None:
    q = normal(1, 1, 16 * 256, 8)
    found = chosen(policies.Radial(16, 256, block=64).mask(q, q))[0, 0].view(16, 4, 16, 4)
    of_distance = [found[8, :, 8 + d].sum() for d in (0, 1, 2, 4)]
    assert of_distance == sorted(of_distance, reverse=True)
    assert of_distance[0] > of_distance[-1] > 0


WRONG: dict[str, Any] = {
    r"window is \(2, 3, 3\); it must be odd": lambda: policies.SlidingTile((4, 8, 8), (2, 3, 3)),
    r"shape is \(4, 9, 8\); it must be multiples of the tile": lambda: policies.SlidingTile(
        (4, 9, 8), (1, 3, 3)
    ),
    "has 64 tokens; it must be a multiple of the block": lambda: policies.SlidingTile(
        (4, 8, 8), (1, 1, 1), block=128
    ),
    "tile is 4; it must be three ints": lambda: policies.SlidingTile((4, 8, 8), (1, 1, 1), 4),  # type: ignore[arg-type]
    "model is 'sora'; use one of wan, hunyuan": lambda: policies.Radial(4, 64, model="sora"),
    "frames is 0": lambda: policies.Radial(0, 64),
    "window is 0": lambda: policies.Streaming(window=0),
    "is a video of 256 tokens; q and k have 100": lambda: policies.SlidingTile((4, 8, 8), (1, 1, 1)).mask(
        normal(1, 1, 100, 8), normal(1, 1, 100, 8)
    ),
    "as many queries as keys, in the same places; got 256 queries from position 44 on and 300 keys": (
        lambda: policies.Radial(4, 64).mask(normal(1, 1, 256, 8), normal(1, 1, 300, 8))
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_options_that_do_not_fit_are_refused(message: str) -> None:
    refused(message, WRONG[message])
