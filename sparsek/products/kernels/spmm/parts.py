"""Tile schedules on the device, and block rows that are split over several CTAs.

The parts of a split row write float32 sums of a tile to slots of a workspace, which are added here:

    C tile = epilogue(sum of the slots of its parts, in order)

A program adds ROWS rows of one tile. Every slot is read once, in a fixed order, so results are reproducible bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from sparsek.engine.launch.launch import launch
from sparsek.engine.plan.kernel import unless_near
from sparsek.products.kernels.common.epilogue import constants, finished
from sparsek.products.kernels.spmm.multiply import RECORD, Tile
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import Cut, ProductSchedule, UnitSteps, balance, cut, part_limit
from sparsek.products.reference.epilogue import Epilogue

ROWS = 16


class SplitTiles(NamedTuple):
    """`table` int32 [tiles, 4]: first slot, number of slots, row and column of C. A part's slots of all columns are
    adjacent.

    `slots`: tiles in the workspace. `columns`: column tiles of C.
    """

    table: Tensor
    slots: int
    columns: int

    def workspace(self, rows: int, cols: int) -> Tensor:
        """Uninitialized float32 [slots, rows, cols] from torch's caching allocator, so no stream waits for it."""
        return torch.empty(max(1, self.slots), rows, cols, dtype=torch.float32, device=self.table.device)


def put(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device."""
    return torch.from_numpy(array.copy()).to(device)


def parts_of(cut: Cut, columns: int, tile_cols: int, device: torch.device) -> SplitTiles:
    """The split tiles of C; every unit has `columns` of them."""
    several = np.flatnonzero(cut.slot >= 0)
    unit, first, count = np.unique(cut.unit[several], return_index=True, return_counts=True)
    at = several[first]
    table = np.zeros((len(unit), columns, 4), np.int32)
    table[:, :, 0] = cut.slot[at][:, None] * columns + np.arange(columns)
    table[:, :, 1] = count[:, None]
    table[:, :, 2] = cut.parts.row[at][:, None]
    table[:, :, 3] = np.arange(columns) * tile_cols
    return SplitTiles(put(table.reshape(-1, 4), device), len(several) * columns, columns)


class SplitSchedule(NamedTuple):
    """A schedule on the device: tile records, the first record of each CTA, and the block column of every step."""

    tiles: Tensor
    starts: Tensor
    cols: Tensor
    ctas: int
    imbalance: float | None
    parts: SplitTiles | None = None


def dealt(units: UnitSteps, c: Tile, p: SpmmProblem, device: torch.device) -> SplitSchedule:
    """Assigns the tiles of all units over the columns of B to the card's CTAs; long units in parts if `c.split`."""
    columns, sms = -(-p.n // c.block_cols), p.card.sm_count
    parts, slots, whole = None, -1, units
    if c.split:
        made = cut(units, part_limit(float((units.end - units.begin).sum()) * columns, sms))
        whole = made.parts
    deal = balance(whole, p.n, c.block_cols, sms * c.ctas_per_sm)
    if c.split:
        row, col = made.slot[deal.unit], deal.tiles[:-1, 3] // c.block_cols
        slots = np.append(np.where(row < 0, -1, row * columns + col), -1)
        parts = parts_of(made, columns, c.block_cols, device)
    lists = (put(each, device) for each in (records(deal, c.block[0], slots), deal.starts, whole.cols))
    return SplitSchedule(*lists, deal.ctas, deal.imbalance, parts)


def records(deal: ProductSchedule, bm: int, slots: Any) -> Any:
    """The tiles of a schedule as the kernel reads them, padded because it reads two records ahead."""
    begin, end, row, col = deal.tiles.T
    made = np.zeros((len(deal.tiles) + 1, RECORD.value), np.int32)
    for at, part in enumerate((begin, end, row, col, col, slots, row % bm)):
        made[:-1, at] = part
    if deal.turns:
        nth = np.arange(len(deal.unit)) - np.repeat(deal.starts[:-1], np.diff(deal.starts))
        made[:-2, 7] = nth % 2
    return made


def uneven(p: SpmmProblem) -> bool:
    """Whether the longest block row exceeds the mean work of a CTA."""
    mean = p.nnzb / max(1, p.grid[0])
    shared = p.nnzb * -(-p.n // 256) * max(1, p.block[0] // 128) / p.card.sm_count
    return p.row_long > 2 * mean and p.row_long > 0.7 * shared and p.row_long >= 8


def limits(p: SpmmProblem, configs: Callable[[SpmmProblem], list[Any]], reasons: list[str]) -> list[str]:
    """`reasons`, plus limits of sizes and tiles."""
    reasons = reasons + unless_near(
        "M, K, N and the rows of all stored blocks", p.nnzb * max(p.block), p.m, p.k, p.n
    )
    if not reasons and not configs(p):
        reasons.append(
            f"tiles of blocks of {p.block[0]} rows overlap, and C would be added to itself twice there"
        )
    return reasons


def busy_seconds(
    p: SpmmProblem, c: Any, steps: int, units: int, step: float, fixed: float
) -> tuple[float, float]:
    """Seconds of the fullest SM, and of adding the parts of split rows.

    `steps` of `step` seconds in `units` rows of tiles; each row takes `fixed` more if its tiles are 128x256.
    """
    sms, tiles, mean = p.card.sm_count, units * -(-p.n // c.block_cols) * p.batch, steps / units
    longest, extra = tall(p, c, steps, units)
    tile = mean * step + fixed * max(0.25, c.rows * c.block_cols / 32768)
    if longest <= 1.25 * mean:
        return -(-tiles // sms) * tile, extra
    return max(tiles / sms, longest / mean) * tile * (1 + 0.18 * drift(p, c, mean)), extra


def tall(p: SpmmProblem, c: Any, steps: float, units: int) -> tuple[float, float]:
    """The steps of the longest tile, and the seconds of adding the parts of split rows, for `steps` in `units` rows of
    tiles.

    Few CTAs add them, at a quarter of the bandwidth: 5000x7000x3000, Zipf, blocks of 64, took 100 us with 156 parts
    and 85 us unsplit (H200, 2026-11-23 and 2026-11-20).
    """
    columns, mean = -(-p.n // c.block_cols), steps / units
    longest = max(mean, min(p.row_long, p.grid[1]))
    if not c.split:
        return longest, 0.0
    most = part_limit(steps * columns, p.card.sm_count)
    parts = max(2 * max(0.0, longest - most) / most * columns * p.batch, p.card.sm_count)
    added = p.card.launch_seconds + parts * 8 * c.rows * c.block_cols / (0.25 * p.card.bandwidth)
    return min(longest, float(most)), added


def drift(p: SpmmProblem, c: Any, mean: float) -> float:
    """How far CTAs with tiles of `mean` steps drift apart, 0 to 1: they then read columns of B at different times.

    Where the longest row has 2.6 to 8 times the mean, staged tiles of 128x256 lost 7 to 16 %, those of 128x128 with
    twice as many steps under way 4 to 7 %; held, 128x256 took 220 to 225 us, 128x128 235 (H200, 2026-11-26). Few
    blocks drawn at random are no such rows, though the longest has mean + 3 sqrt(mean): with 4 in a row tiles of
    128x256 take 224 us, of 128x128 285 (H100, 2026-11-26).
    """
    usual = max(mean, (mean + 3 * mean**0.5) / 2)
    lopsided = min(1.0, max(0.0, (max(mean, min(p.row_long, p.grid[1])) / usual - 2) / 0.6))
    return lopsided * max(0.0, 2 * c.rows * c.block_cols / 32768 - 1)


def beside_c(other: Tensor | None, c_col: bool, beta: float, none: Tensor) -> tuple[Any, ...]:
    """Kernel arguments for the epilogue's matrix: it, its leading stride / 8, rows and columns / 8, beta."""
    if other is None:
        return none, 0, 0, 0, 0.0
    lies = other.mT if c_col else other
    return other, lies.stride(0) // 8, lies.shape[0], lies.shape[1] // 8, float(beta)


@triton.jit(do_not_specialize=["m", "n", "columns", "height", "alpha", "beta"])
def _merge(
    sums, table, bias, other, c,
    m, n, columns, height, alpha, beta, sc_m, sc_n, so_m, so_n,
    TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr, ROWS: tl.constexpr,
    SCALED: tl.constexpr, ACTIVATION: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    entry = table + tl.program_id(0) * 4
    slot = tl.load(entry)
    count = tl.load(entry + 1)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, TILE_COLS)
    row = tl.load(entry + 2) + i
    col = tl.load(entry + 3) + j
    inside = (i[:, None] * TILE_COLS) + j[None, :]
    z = tl.zeros((ROWS, TILE_COLS), dtype=tl.float32)
    for s in range(count):
        z += tl.load(sums + (slot + s * columns).to(tl.int64) * (TILE_ROWS * TILE_COLS) + inside)
    live = ((i < height) & (row < m))[:, None] & (col < n)[None, :]
    wide_row = row.to(tl.int64)
    wide_col = col.to(tl.int64)
    if bias is not None:
        bias += row
    if COMBINE != "":
        other += wide_row[:, None] * so_m + wide_col[None, :] * so_n
    z = finished(z, alpha, bias, row < m, other, live, beta, SCALED, ACTIVATION, COMBINE)
    tl.store(c + (wide_row[:, None] * sc_m + wide_col[None, :] * sc_n), z.to(c.dtype.element_ty), mask=live)


def merge_parts(parts: SplitTiles, sums: Tensor, height: int, out: Tensor, epilogue: Epilogue) -> None:
    """Adds the slots of every split tile into `out` [M, N], of any strides.

    `height` is how many rows of a tile belong to C.
    """
    tiles = parts.table.shape[0]
    if tiles == 0:
        return
    _, rows, cols = sums.shape
    other = out if epilogue.other is None else epilogue.other
    with torch.cuda.device_of(out):
        launch(
            _merge, (tiles, -(-height // ROWS)),
            sums, parts.table, epilogue.bias, other, out,
            *out.shape, parts.columns, height, float(epilogue.alpha), float(epilogue.beta),
            *out.stride(), *other.stride(), TILE_ROWS=rows, TILE_COLS=cols, ROWS=ROWS, **constants(epilogue),
        )  # fmt: skip
