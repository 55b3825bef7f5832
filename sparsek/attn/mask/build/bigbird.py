"""Masks of BigBird: a window, global blocks, and blocks drawn at random by a generator that counts.

The i-th number of a row is a function of the seed, the row and i, so that a kernel draws the same blocks.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sparsek.attn.mask.build.banded import Band, on_gpu, summed_rows
from sparsek.attn.mask.build.structured import of_blocks
from sparsek.attn.mask.data import Mask
from sparsek.attn.mask.layout import Counted, Room
from sparsek.attn.mask.lists import Frame, Place, Runs, Sizes
from sparsek.attn.mask.recorded import of_options
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.tracing import not_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Philox 4x32 with ten rounds: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
LOW = 0xFFFFFFFF


class BigBird(NamedTuple):
    """The numbers of a mask, the window and the globals in blocks; `seed` below 2^64."""

    near: int
    wide: int
    globals: int
    random: int
    seed: int
    causal: bool

    def rows(self, place: Place, band: Band) -> tuple[np.ndarray, ...]:
        """Of each tile: its blocks before `first` and from `left` to `right`, of those before `end`; and how many of
        them come before `edge`, from which on no block is full. int64 [Mb].
        """
        bk = place.block[1]
        top, bottom = place.first, place.last
        edge = band.bounds(top - place.q_offset, place.kv_len)[1] // bk
        end = -(-band.bounds(bottom - place.q_offset, place.kv_len)[1] // bk)
        first = np.where(top < self.globals, end, np.minimum(self.wide, end))
        left = np.minimum(np.maximum(top // bk - self.near + 1, first), end)
        right = np.minimum(np.maximum(bottom // bk + (1 if self.causal else self.near), left), end)
        return first, left, right, end, edge

    def capacity(self, place: Place) -> int:
        """The most entries of a row that does not see every block."""
        (bq, bk), columns = place.block, place.grid[1]
        most = min(self.wide, columns) + 2 * min(self.near, columns) + (bq - 1) // bk + 1 + self.random
        return max(min(most, columns), 1)

    def room(self, place: Place, heads: int) -> Room:
        """The room of a mask with a draw for each head."""
        entries = place.grid[1] + place.grid[0] * heads * self.capacity(place)
        return Room(entries, bounds=1 if self.causal or place.kv_len % place.block[1] else 0)


@of_options
@not_traced("a block mask")
def bigbird(
    cls: type[Mask],
    seq_len: int | None = None,
    window: int | None = None,
    globals: int = 0,
    random: int = 0,
    seed: int = 0,
    causal: bool = False,
    heads: int = 1,
    **frame: Unpack[Frame],
) -> Mask:
    """Return the mask of window, global and random blocks of BigBird.

    All queries see the first `globals` keys, rounded up to blocks. Tiles with a query among the first `globals`
    positions see all keys. Every other tile sees the window of `strided` and `random` further blocks, distinct and
    nearly uniform, or fewer where fewer are left. The draw depends on `seed` and the shape, not on the device: CPU and
    GPU draw the same blocks. On a GPU `sizes` are bounds where a drawn block may reach beyond kv_len.

    Args:
        seq_len: Queries and keys, in tokens, where there are as many of both.
        window: Keys near the query, in tokens; counted in blocks, as in `strided`.
        globals: First keys that all queries see, in tokens.
        random: Random blocks of each tile.
        seed: The seed of the draw, 0 or greater.
        causal: Whether a query sees no keys after its own.
        heads: Heads with a draw of their own; they share one list where nothing is drawn.
        **frame: `q_len` and `kv_len` where they differ, `block`, `device` and `q_offset`: see `Frame`.

    Returns:
        A mask shared by all batch items. Made without a host sync.

    Raises:
        InvalidInput: For numbers out of range, and lengths, blocks or devices that no mask has.

    Source: Big Bird, Zaheer et al., arXiv:2007.14062.

    Example:
        >>> import sparsek as sk
        >>> sk.BlockMask.bigbird(4096, window=256, globals=128, random=3, heads=8).heads
        8
    """
    place = Place.of(seq_len, **frame)
    window, seed = arguments.integer("window", window, 1), arguments.integer("seed", seed)
    globals, random = arguments.integer("globals", globals), arguments.integer("random", random)
    heads = arguments.integer("heads", heads, 1, INT32_MAX // max(place.grid[0], 1))
    causal = arguments.flag("causal", causal)
    label = f"bigbird({window}, {globals}, {random}, seed={seed}{', causal' if causal else ''})"
    bird = BigBird(place.blocks(window), place.blocks(globals), globals, random, seed % 2**64, causal)
    band = Band.of(place, None, 1 if causal else None)
    heads = heads if has_draws(place, band, bird) else 1
    count = partial(counted_bird, place, band, bird, heads)
    room = partial(bird.room, place, heads)
    made = on_gpu(cls, place, "mask_of_bigbird", (band, bird, heads), count, room, label, heads=heads)
    if made is not None:
        return made
    first, left, right, end, _ = (np.tile(each, heads) for each in bird.rows(place, band))
    rank, drawn = draws(bird.seed, left - first + end - right, random)
    column = first + rank
    before = column < left
    column = np.where(before, column, column + right - left)
    stored = Runs.between(np.zeros_like(first), first).then(Runs.single(column, drawn & before))
    stored = stored.then(Runs.between(left, right)).then(Runs.single(column, drawn & ~before))
    return of_blocks(cls, place, stored, causal, label, heads)


@lru_cache(maxsize=256)
def has_draws(place: Place, band: Band, bird: BigBird) -> bool:
    """Whether some tile draws a block."""
    first, left, right, end, _ = bird.rows(place, band)
    return bird.random > 0 and bool((left - first + end - right).any())


@lru_cache(maxsize=256)
def counted_bird(place: Place, band: Band, bird: BigBird, heads: int) -> Counted:
    """The sizes; bounds where the number of partial blocks depends on what is drawn."""
    first, left, right, end, edge = bird.rows(place, band)
    others = left - first + end - right
    drawn = np.minimum(others, bird.random)
    window = right - left
    cut = np.maximum(first - edge, 0) + window - np.maximum(np.minimum(right, edge) - left, 0)
    # Blocks that may be drawn and are partial, if they are drawn.
    chance = np.maximum(left - np.maximum(first, edge), 0) + np.maximum(end - np.maximum(right, edge), 0)
    exact = not ((chance > 0) & (drawn > 0) & (drawn < others)).any()
    cut = cut + np.minimum(chance, drawn)
    stored = first + window + drawn
    (most, partial_blocks, longest, _), heavy = summed_rows(stored - cut, cut, heads)
    return Counted(Sizes(most, partial_blocks, longest, exact), heavy)


def draws(seed: int, n: np.ndarray, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct ranks for each row.

    Of row r `each` ranks below n[r], ascending, or all of them, and which of them count: int64 and bool [each, rows].
    Draws `each` numbers up to n - each, sorts them and adds i to the i-th. Every set can be drawn, each rank about
    equally likely.
    """
    most = min(each, int(n.max(initial=0)))
    at = np.arange(most)[:, None]
    drawn = at < n
    room = (n - np.minimum(most, n) + 1).astype(np.uint64)
    rank = (philox(seed, np.arange(n.size)[None], at) * room >> np.uint64(32)).astype(np.int64)
    return np.sort(np.where(drawn, rank, INT32_MAX), 0) + at, drawn


def philox(seed: int, one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """A number below 2^32 for each pair of counters, uint64 of their common shape."""
    shape = np.broadcast_shapes(one.shape, two.shape)
    low = np.uint64(LOW)
    a, b = (np.broadcast_to(each.astype(np.uint64), shape) for each in (one, two))
    c = d = np.zeros(shape, np.uint64)
    keys = seed & LOW, seed >> 32
    for _ in range(ROUNDS):
        left, right = a * np.uint64(MULTIPLIERS[0]), c * np.uint64(MULTIPLIERS[1])
        a, b, c, d = (
            (right >> np.uint64(32)) ^ b ^ np.uint64(keys[0]),
            right & low,
            (left >> np.uint64(32)) ^ d ^ np.uint64(keys[1]),
            left & low,
        )
        keys = (keys[0] + WEYL[0]) & LOW, (keys[1] + WEYL[1]) & LOW
    return a
