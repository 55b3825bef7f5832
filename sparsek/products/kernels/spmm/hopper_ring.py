"""The predicted times of hopper.spmm and hopper.spmm_fp8: their tiles as rings (engine/plan/ring.py).

`c` is a Config of the kernel.
"""

from typing import Any

from sparsek.engine.plan.plan import arithmetic_seconds
from sparsek.engine.plan.ring import BUSY_SLOTS, GLUON_LAUNCHES, Ring, flops_per_second, ring_seconds
from sparsek.products.kernels.spmm.parts import drift, tall
from sparsek.products.plan.kernels import rounding_seconds
from sparsek.products.plan.problems import SpmmProblem

RATE_FP8 = 1.56  # over that of dense 16-bit products: promotion leaves 78 % of twice it (fitted)
RATE_FAST = 1.9  # with sums in the tensor cores (an H100, in ratios to cuBLAS FP8, 2026-11-26)
# Of a step, where wgmma has 128 columns or fewer instead of 256 (fitted to 17 products on an H200, 2026-11-26).
NARROW = 1.1


def seconds(p: SpmmProblem, c: Any) -> float:
    """Of hopper.spmm."""
    return _empty(p) if p.nnzb == 0 or p.n == 0 else _whole(p, c, *ring_of(p, c))


def seconds_fp8(p: SpmmProblem, c: Any) -> float:
    """Of hopper.spmm_fp8, with the rounding of B."""
    empty = p.nnzb == 0 or p.n == 0
    return rounding_seconds(p) + (_empty(p) if empty else _whole(p, c, *ring_of_fp8(p, c)))


def _empty(p: SpmmProblem) -> float:
    """Without blocks or columns: the launches of a batch, which write C."""
    moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
    return p.batch * p.card.launch_seconds + (moved if p.m and p.n else 0.0)


def _whole(p: SpmmProblem, c: Any, ring: Ring, added: float) -> float:
    """The launches of a batch and the ring of all tiles, no faster than the card sustains, and the sums of `added`
    seconds.
    """
    busy = ring_seconds(p.card, ring, p.compulsory_bytes) * (1 + 0.12 * drift(p, c, ring.steps))
    taken = max(busy, arithmetic_seconds(p))
    return taken + added + GLUON_LAUNCHES * p.batch * p.card.launch_seconds


def ring_of(p: SpmmProblem, c: Any) -> tuple[Ring, float]:
    """The tiles, and the seconds of adding the parts of split rows.

    L2 serves rows of 128 bytes 1.5 times as fast as shorter ones (fitted), and B's rows of 32 bytes 0.65 times:
    x @ W.T in blocks of 16 takes 1.92 times as long as A @ B, in blocks of 32 1.10 times (H100, 2026-11-26). Where
    rows of B are no whole 128 bytes, a row of a box lies in two lines.
    """
    joined, depth = c.joined_rows, p.block[1]
    slices = max(1, -(-p.block[0] // c.rows)) if joined == 1 else 1
    units = -(-p.grid[0] // joined) * slices
    steps = slices * (dict(p.stats.merged).get(joined, p.nnzb) if joined > 1 else p.nnzb)
    cols = min(c.block_cols, -(-p.n // 8) * 8)
    wide = 1.5 if c.width >= 64 else 1.0
    of_b = 1.5 if not c.b_col else 0.65 if c.width < 32 else wide
    if (p.k if c.b_col else p.n) % 64:
        of_b /= 2
    lines = c.a_rows / (1.5 if c.a_col else wide) + cols / of_b
    slower = NARROW if c.block_cols <= 128 * c.wg_n else 1.0
    return _ring(
        p, c, units, steps,
        multiply=2 * c.rows * c.block_cols * depth * slower / flops_per_second(p.card),
        copied=2 * depth * (c.a_rows + c.block_cols),
        crossing=2 * depth * lines,
        in_flight=(c.stages - BUSY_SLOTS) * c.stage_bytes * c.ctas_per_sm,
        boxes=c.per_block * ((c.rows // 64 if c.a_col else joined) + c.wg_n),
        stored=2 * c.rows * cols,
        more=max(0.25, c.rows * c.block_cols / 32768) * epilogue_seconds(c),
    )  # fmt: skip


def ring_of_fp8(p: SpmmProblem, c: Any) -> tuple[Ring, float]:
    """As `ring_of`."""
    depth, slices = p.block[1], max(1, -(-p.block[0] // c.rows))
    units, steps = p.grid[0] * slices, p.nnzb * slices
    cols, rate = min(c.block_cols, -(-p.n // 8) * 8), RATE_FP8 if c.promote else RATE_FAST
    return _ring(
        p, c, units, steps,
        multiply=2 * c.rows * c.block_cols * depth / (rate * flops_per_second(p.card)),
        copied=depth * (c.rows + c.block_cols),
        crossing=depth * (c.rows + cols),
        in_flight=(c.stages - BUSY_SLOTS) * c.pieces * c.width * (c.rows + c.block_cols) * c.ctas_per_sm,
        boxes=-(-depth // c.width) * (1 + c.wg_n),
        stored=c.c_bytes * c.rows * cols,
        more=max(0.25, c.rows * c.block_cols / 32768) * (0.5e-6 if c.held else 0.7e-6) * c.finishes,
    )  # fmt: skip


def _ring(p: SpmmProblem, c: Any, units: int, steps: float, **tile: float) -> tuple[Ring, float]:
    """The ring of `units` rows of tiles, `steps` in all, and the seconds of adding the parts of split rows."""
    longest, added = tall(p, c, steps, units)
    columns, launches = -(-p.n // c.block_cols), max(1, p.batch)
    ring = Ring(units, columns, p.card.sm_count, steps / units, longest, launches=launches, **tile)
    return ring, added


def epilogue_seconds(c: Any) -> float:
    """What the epilogue of a tile of 128x256 takes besides (H200, 2026-11-20 and 26)."""
    if c.held:
        return 0.7e-6 if c.activation or c.preload else 0.0
    if c.finishes:  # stages 32 deep leave little time for it
        return (2.5e-6 if c.pieces * c.width <= 32 else 0.7e-6) + 1.0e-6 * c.slope + 2.5e-6 * bool(c.combine)
    return 1.0e-6 if c.preload else 0.0
