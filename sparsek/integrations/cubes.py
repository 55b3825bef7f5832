"""The tokens of a video in the order of cubes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Cubes(NamedTuple):
    """The tokens of a video in the order of its cubes, each padded to its full size."""

    source: Tensor  # int64 [places]: the token at each place; 0 where there is none
    target: Tensor  # int64 [tokens]: the place of each token
    lengths: Tensor  # int32 [cubes]: the tokens of each cube
    there: Tensor  # bool [places, 1]: whether there is a token


@functools.lru_cache(maxsize=32)
def cubes_of(grid: tuple[int, ...], tile: tuple[int, ...], device: torch.device) -> Cubes:
    """The order for a video of `grid` tokens in cubes of `tile`, (frames, height, width) both. Kept."""
    counts = [-(-side // part) for side, part in zip(grid, tile, strict=True)]
    at = torch.arange(math.prod(grid), device="cpu").view(grid)
    padding = [
        n for side, part, count in zip(grid, tile, counts, strict=True) for n in (count * part - side, 0)
    ]
    whole = functional.pad(at, padding[::-1], value=-1)
    cut = whole.view(counts[0], tile[0], counts[1], tile[1], counts[2], tile[2]).permute(0, 2, 4, 1, 3, 5)
    cubes = cut.reshape(math.prod(counts), math.prod(tile))
    there = cubes >= 0
    # The tokens of a cube come first in it, in their order.
    order = (~there).to(torch.uint8).argsort(dim=1, stable=True)
    cubes = cubes.gather(1, order).flatten()
    places = torch.nonzero(cubes >= 0)[:, 0]
    target = torch.empty_like(places)
    target[cubes[places]] = places
    parts = cubes.clamp(min=0), target, there.sum(1, dtype=torch.int32), (cubes >= 0)[:, None]
    return Cubes(*(x.to(device) for x in parts))
