"""Predicted time of a dense product on a card: the baseline of a sparse one before anything is timed."""

from sparsek.core import dtypes
from sparsek.core.device import Card

# cuBLAS's tiles, each with its share of an SM's rate, and the number of parts it may cut K into. A model, not its
# heuristics.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.88), (64, 256, 0.8), (64, 128, 0.68), (64, 64, 0.45))
SPLITS = (1, 2, 4, 8)
# Rate of an SM below the power limit over that of a card at the limit; and the time of a tile besides multiplying.
UNLIMITED = 1.15
TILE_SECONDS = 1.2e-6
# Of copy bandwidth: 16384^2 in bf16 times 16 columns, 0.131 ms on an H200 (benchmarks/results/h200/spmm.jsonl).
OF_BANDWIDTH = 0.95


def dense_seconds(card: Card, dtype: str, m: int, n: int, k: int, *, tf32: bool = False) -> float:
    """Predicted seconds of C [m, n] = A [m, k] @ B [k, n] by the card's library, launch included.

    The largest of three: all FLOPs at the card's rate; all bytes at its bandwidth; and the waves of tiles on the SMs,
    with the best tile and the best cut of K. On a CPU the first two. `dtype`: a short name, "fp8" for FP8.
    """
    if not m * n * k:
        return card.launch_seconds
    name = "tf32" if dtype == "fp32" and tf32 else dtype
    rate = card.sustained(name) * 1e12
    itemsize = 1 if dtype == "fp8" else dtypes.itemsize(dtype)
    written = max(itemsize, 2)
    moved = (m * k + k * n) * itemsize + m * n * written
    least = max(2.0 * m * n * k / rate, moved / (OF_BANDWIDTH * card.bandwidth))
    if card.is_cpu:
        return card.launch_seconds + least
    of_sm = rate / card.sm_count * UNLIMITED
    best = float("inf")
    for tm, tn, share in TILES:
        tiles = -(-m // tm) * -(-n // tn)
        for parts in SPLITS:
            waves = -(-tiles * parts // card.sm_count)
            one = 2.0 * tm * tn * k / parts / (of_sm * share) + TILE_SECONDS
            sums = 2e-6 + 8.0 * m * n * parts / card.bandwidth if parts > 1 else 0.0
            best = min(best, waves * one + sums)
    return card.launch_seconds + max(least, best)
