"""Predicted time of a dense product on a card: the baseline of a sparse one before anything is timed."""

from collections.abc import Iterator
from functools import lru_cache

from sparsek.core import dtypes
from sparsek.core.device import Card
from sparsek.plan.ring import norm, throttled

# A model of cuBLAS, not its heuristics; fitted to 25 shapes of op planner (benchmarks/results/h200, 2026-11-23), it is
# within 10 % on these and on 16 others. Tiles have 64 to 256 rows, and columns in steps of 32; K is cut in up to
# 8 parts, at most once for each SM.
ROWS, COLUMNS, LARGEST, SPLITS = (64, 128, 256), range(32, 257, 32), 32768, (1, 2, 4, 8)
# Rate of an SM at boost clocks over that of a card at the power limit, and L2 to shared memory over that of kernels
# that share nothing in clusters.
BOOST, SHARED = 1.29, 2.27
TILE_SECONDS = 1.3e-6  # of a tile of 128 x 256 besides multiplying
SPLIT_SECONDS = 5.7e-6  # a second launch that adds the parts of K
READ_SHARE = 1.07  # of copy bandwidth
# FP8 with a scale for each row, by torch._scaled_mm: fewer tiles, K uncut, memory at half the speed for few tokens.
# TILE_SECONDS and the launch are longer, because of the scales.
ROWS_FP8, COLUMNS_FP8, BOOST_FP8, SHARED_FP8 = (64, 128), (128, 256), 1.42, 1.14
TILE_SECONDS_FP8, LAUNCH_FP8, FEW, SHARE_OF_FEW = 1.85e-6, 5.7e-6, 64, 0.7


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
    moved = ((m * k + k * n) * itemsize + m * n * max(itemsize, 2)) / card.bandwidth
    rate = card.sustained(name) * 1e12
    if card.is_cpu:
        return card.launch_seconds + max(2.0 * m * n * k / rate, moved)
    of_sm = rate / card.sm_count * (BOOST_FP8 if fp8 else BOOST)
    fabric = card.fabric / card.sm_count * (SHARED_FP8 if fp8 else SHARED)
    best = float("inf")
    for rows, columns in _tiles(fp8):
        tiles = -(-m // rows) * -(-n // columns)
        step = norm(4, 2.0 * rows * columns / of_sm, (rows + columns) * itemsize / fabric)
        fixed = (TILE_SECONDS_FP8 if fp8 else TILE_SECONDS) * max(0.25, rows * columns / LARGEST)
        for parts in (1,) if fp8 else SPLITS:
            sums = SPLIT_SECONDS + 4.0 * m * n * parts / card.bandwidth if parts > 1 else 0.0
            best = min(best, -(-tiles * parts // card.sm_count) * (step * k / parts + fixed) + sums)
    share = (SHARE_OF_FEW if m <= FEW else READ_SHARE) if fp8 else READ_SHARE
    return (LAUNCH_FP8 if fp8 else card.launch_seconds) + throttled(norm(2, best, moved / share))


def _tiles(fp8: bool) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles: any way round, except in FP8."""
    for rows in ROWS_FP8 if fp8 else ROWS:
        for columns in COLUMNS_FP8 if fp8 else COLUMNS:
            if rows * columns <= LARGEST:
                yield rows, columns
                if not fp8 and rows != columns:
                    yield columns, rows
