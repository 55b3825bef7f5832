"""Predicted time of a dense product on a card: the baseline of a sparse one before anything is timed."""

from collections.abc import Iterator
from functools import lru_cache

from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.engine.plan.ring import norm, throttled

# A model of cuBLAS, not its heuristics; fitted to 25 shapes of op planner (benchmarks/results/h200, 2026-11-23), it is
# within 10 % on these and on 16 others. Tiles have 64 to 256 rows, and columns in steps of 32; K is cut in up to
# 8 parts, at most once for each SM.
ROWS, COLUMNS, LARGEST, SPLITS = (64, 128, 256), range(32, 257, 32), 32768, (1, 2, 4, 8)
# Rate of an SM at boost clocks over that of a card at the power limit; bytes per second into an SM's shared memory,
# in clusters that share loads. An H100, whose L2 is slower, takes as long as an H200 (2026-11-26).
BOOST, FETCH = 1.29, 1.86e11
TILE_SECONDS = 1.3e-6  # of a tile of 128 x 256 besides multiplying
SPLIT_SECONDS = 5.7e-6  # a second launch that adds the parts of K
READ_SHARE = 1.07  # of copy bandwidth
# FP8 with a scale for each row, by torch._scaled_mm: fewer tiles, K uncut, and so many bytes a second for few tokens.
# TILE_SECONDS and the launch are longer, because of the scales.
ROWS_FP8, COLUMNS_FP8, BOOST_FP8, FETCH_FP8 = (64, 128), (128, 256), 1.42, 9.3e10
TILE_SECONDS_FP8, LAUNCH_FP8, FEW, BYTES_OF_FEW = 1.85e-6, 5.7e-6, 64, 3.0e12


@lru_cache(4096)
def dense_seconds(card: Card, dtype: str, m: int, n: int, k: int, *, tf32: bool = False) -> float:
    """Predicted seconds of C [m, n] = A [m, k] @ B [k, n] by the card's library, launch included.

    Waves of tiles on the SMs, with the best tile and the best cut of K, beside the bytes from memory; the power limit
    slows long products. On a CPU all FLOP at its rate or all bytes. `dtype`: a short name, "fp8" for FP8.
    """
    if not m * n * k:
        return card.launch_seconds
    name = "tf32" if dtype == "fp32" and tf32 else dtype
    fp8 = dtype == "fp8"
    itemsize = 1 if fp8 else dtypes.itemsize(dtype)
    bytes_ = (m * k + k * n) * itemsize + m * n * max(itemsize, 2)
    rate = card.sustained(name) * 1e12
    if card.is_cpu:
        return card.launch_seconds + max(2.0 * m * n * k / rate, bytes_ / card.bandwidth)
    of_sm = rate / card.sm_count * (BOOST_FP8 if fp8 else BOOST)
    fetch = FETCH_FP8 if fp8 else FETCH
    best = float("inf")
    for rows, columns in _tiles(fp8):
        tiles = -(-m // rows) * -(-n // columns)
        step = norm(4, 2.0 * rows * columns / of_sm, (rows + columns) * itemsize / fetch)
        fixed = (TILE_SECONDS_FP8 if fp8 else TILE_SECONDS) * max(0.25, rows * columns / LARGEST)
        for parts in (1,) if fp8 else SPLITS:
            sums = SPLIT_SECONDS + 4.0 * m * n * parts / card.bandwidth if parts > 1 else 0.0
            best = min(best, -(-tiles * parts // card.sm_count) * (step * k / parts + fixed) + sums)
    reading = READ_SHARE * card.bandwidth
    if fp8 and m <= FEW:
        reading = min(reading, BYTES_OF_FEW)
    return (LAUNCH_FP8 if fp8 else card.launch_seconds) + throttled(norm(2, best, bytes_ / reading))


def _tiles(fp8: bool) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles: any way round, except in FP8."""
    for rows in ROWS_FP8 if fp8 else ROWS:
        for columns in COLUMNS_FP8 if fp8 else COLUMNS:
            if rows * columns <= LARGEST:
                yield rows, columns
                if not fp8 and rows != columns:
                    yield columns, rows
