"""Policies for the tokens of a video, chosen by their places in it: SlidingTile, Radial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsek.attn.mask.lists import Place
from sparsek.attn.policies.static import Static
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

Triple = tuple[int, int, int]


def triple(name: str, value: Any, least: int = 1) -> Triple:
    """Three ints, (frames, rows, columns)."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) == 3:
        t, h, w = (arguments.integer(f"{name}[{at}]", each, least) for at, each in enumerate(value))
        return t, h, w
    raise InvalidInput(f"{name} is {arguments.shown(value)}; it must be three ints: frames, rows, columns")


def check_video(place: Place, tokens: int, label: str) -> None:
    """InvalidInput unless queries and keys are a video of so many tokens, and tokens after it."""
    if place.q_len != place.kv_len or place.q_offset:
        raise InvalidInput(
            f"{label} is for as many queries as keys, in the same places; got {place.q_len} queries from position "
            f"{place.q_offset} on and {place.kv_len} keys"
        )
    if place.q_len < tokens:
        raise InvalidInput(f"{label} is a video of {tokens} tokens; q and k have {place.q_len}")


@dataclass(frozen=True)
class SlidingTile(Static):
    """Keeps, for each tile of a video, the tiles in a window around it.

    Tokens are in the order of tiles: all tokens of the first tile, then those of the next, with tiles in the order of
    frames, rows, columns. Tokens after the video, such as text, see all tokens and are seen by all.

    Args:
        shape: The video in tokens, (frames, rows, columns); multiples of `tile`.
        window: The window in tiles, odd numbers; a number past the video's own counts as all tiles.
        tile: The tile in tokens; its volume is a multiple of both sides of `block`.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.
        clamped: Whether a window that would reach beyond the video is moved inside, so that all tiles see equally many,
            as in the source; else it is cut off, as in NABLA.

    Raises:
        InvalidInput: For options that do not go together. By `mask`: for q and k of fewer tokens than the video.

    Source: Sliding Tile Attention, Zhang et al., arXiv:2502.04507 (tile (6, 8, 8)).

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 2, 4 * 16 * 16, 64).unbind()
        >>> policy = sk.policies.SlidingTile(shape=(4, 16, 16), window=(1, 3, 3), tile=(4, 4, 4), block=64)
        >>> policy.mask(q, k).density
        0.5625
    """

    shape: Triple
    window: Triple
    tile: Triple = (4, 4, 4)
    block: int | tuple[int, int] = 64
    clamped: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shape", "window", "tile"):
            object.__setattr__(self, name, triple(name, getattr(self, name)))
        arguments.flag("clamped", self.clamped)
        if any(each % 2 == 0 for each in self.window):
            raise InvalidInput(f"window is {self.window}; it must be odd numbers of tiles, centred on a tile")
        if any(size % side for size, side in zip(self.shape, self.tile, strict=True)):
            raise InvalidInput(f"shape is {self.shape}; it must be multiples of the tile, {self.tile}")
        if any(math.prod(self.tile) % side for side in self.sides):
            raise InvalidInput(
                f"a tile of {self.tile} has {math.prod(self.tile)} tokens; it must be a multiple of the block, "
                f"{self.sides}"
            )

    def near(self) -> np.ndarray:
        """bool [tiles, tiles]: which tiles each tile sees."""
        counts = [size // side for size, side in zip(self.shape, self.tile, strict=True)]
        return near_tiles(counts, self.window, self.clamped)

    def pairs(self, place: Place) -> np.ndarray:
        """bool [Mb, Nb]: which key blocks each tile of queries visits."""
        tokens, volume = math.prod(self.shape), math.prod(self.tile)
        check_video(place, tokens, self.label)
        seen = np.ones(place.grid, bool)
        down, across = (volume // side for side in place.block)
        video = self.near().repeat(down, 0).repeat(across, 1)
        seen[: video.shape[0], : video.shape[1]] = video
        return seen


def near_tiles(counts: Sequence[int], window: Sequence[int], clamped: bool) -> np.ndarray:
    """bool [tiles, tiles]: which tiles of a video with `counts` tiles each sees, window // 2 of them to each side. A
    window that is `clamped` is moved inside the video.
    """
    seen = np.ones((1, 1), bool)
    for count, wide in zip(counts, window, strict=True):
        reach = wide // 2
        centre = at = np.arange(count)
        everything = clamped and 2 * reach >= count - 1
        if clamped and not everything:
            centre = at.clip(reach, count - 1 - reach)
        axis = (abs(centre[:, None] - at) <= reach) | everything
        tiles = seen.shape[0] * count
        seen = (seen[:, None, :, None] & axis[None, :, None, :]).reshape(tiles, tiles)
    return seen


@dataclass(frozen=True)
class Radial(Static):
    """Keeps, for each pair of frames of a video, a band around the same place, narrower for more distant frames.

    Frames at distance d have a band of p / 2^bits(d) * decay places on either side, where p is the power of two over
    `frame_tokens` and bits(d) the bits of d: the width halves with each power of two. Where it would be narrower than a
    block it is a block wide, and only every (block / width)-th distance has a band. A block is kept if more than 0.6 of
    the key columns that the band touches in it hold more than a third of its queries, as in the source. Tokens are in
    the order of frames. Tokens after the video see all tokens and are seen by all, in whole blocks.

    Args:
        frames: Frames of the video, in latents.
        frame_tokens: Tokens of a frame.
        decay: The factor of the widths; the source uses 0.2 to 1.
        model: "wan": a frame sees all of itself and of the first frame, and half a frame at distance 1; "hunyuan": all
            of the frames up to distance 1; None: none of these.
        block: The block in tokens: 64 or 128, or a pair (queries, keys) of them.

    Raises:
        InvalidInput: For options that are out of range. By `mask`: for q and k of fewer tokens than the video.

    Source: Radial Attention, Li et al., arXiv:2506.19852, and mit-han-lab/radial-attention.

    Example:
        >>> import torch, sparsek as sk
        >>> q, k = torch.randn(2, 1, 2, 16 * 512, 64).unbind()
        >>> sk.policies.Radial(frames=16, frame_tokens=512, decay=0.2).mask(q, k).summary
        '2240 of 4096 blocks, 54.7 %, 0 partial'
    """

    frames: int
    frame_tokens: int
    decay: float = 1.0
    model: str | None = None
    block: int | tuple[int, int] = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("frames", "frame_tokens"):
            object.__setattr__(self, name, arguments.integer(name, getattr(self, name), 1))
        object.__setattr__(self, "decay", arguments.number("decay", self.decay, 0.0))
        if self.model is not None:
            arguments.one_of("model", self.model, ("wan", "hunyuan"))

    def width(self, frame: int, other: int, side: int) -> float:
        """The places on either side that queries of `frame` see of the frame `other`; -1 for none."""
        distance = abs(frame - other)
        if self.model == "wan" and other == 0:
            return math.inf
        if self.model == "wan" and distance <= 1:
            wide = float(self.frame_tokens if distance == 0 else self.frame_tokens // 2)
        elif self.model == "hunyuan" and distance <= 1:
            wide = float(self.frame_tokens)
        else:
            wide = max(self._halved(distance) * self.decay, side)
        every = side / self._halved(distance)
        return wide if every <= 1 or distance % int(every) == 0 else -1

    def _halved(self, distance: int) -> float:
        return 2 ** (self.frame_tokens.bit_length() - distance.bit_length())

    def pairs(self, place: Place) -> np.ndarray:
        """bool [Mb, Nb]: which key blocks each tile of queries visits."""
        tokens = self.frames * self.frame_tokens
        check_video(place, tokens, self.label)
        seen = np.zeros(place.grid, bool)
        for frame in range(self.frames):
            for other in range(self.frames):
                wide = self.width(frame, other, max(place.block))
                if wide >= 0:
                    self._add_band(
                        seen, place.block, frame * self.frame_tokens, other * self.frame_tokens, wide
                    )
        seen[tokens // place.block[0] :] = True
        seen[:, tokens // place.block[1] :] = True
        return seen

    def _add_band(self, seen: np.ndarray, block: tuple[int, int], row: int, column: int, wide: float) -> None:
        """Adds the blocks of one pair of frames, whose tokens start at `row` and `column`."""
        size, (bq, bk) = self.frame_tokens, block
        wide = min(wide, size)
        tiles = np.arange(row // bq, -(-(row + size) // bq))
        keys = np.arange(column // bk * bk, -(-(column + size) // bk) * bk)
        start, end = ((tiles + each) * bq - row for each in (0, 1))
        place = np.where((keys >= column) & (keys < column + size), keys - column, np.inf)
        low = np.maximum(np.maximum(start, 0)[:, None], place - wide)
        high = np.minimum(np.minimum(end, size)[:, None], place + wide + 1)
        inside = np.where(np.isfinite(place), np.maximum(high - low, 0), 0).reshape(tiles.size, -1, bk)
        touched, held = (inside > 0).sum(2), (3 * inside > bq).sum(2)
        kept = held > 0.6 * np.maximum(touched, 1)
        seen[tiles[0] : tiles[-1] + 1, keys[0] // bk : keys[-1] // bk + 1] |= kept
