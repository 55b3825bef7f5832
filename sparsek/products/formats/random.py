"""Seeded random matrices, block-sparse and dense, for tests, benchmarks and demos."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
import torch

from sparsek.core import arguments
from sparsek.core.tracing import outside_inference
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.padding import zero_padding
from sparsek.products.formats.pattern import BlockPattern, HostPattern, block_sides, grid_of, matrix_sides

Spread: TypeAlias = Literal["uniform", "banded", "powerlaw"]
ZIPF = 1.2
SEEDS = 2**64  # torch takes seeds below this


@outside_inference
def random_bsr(
    m: int,
    k: int,
    block: int | tuple[int, int],
    density: float,
    *,
    pattern: Spread = "uniform",
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> BSR:
    """Make a random BSR [m, k] with about a share `density` of its blocks stored.

    Values are N(0, 1) / sqrt(stored elements per row): the product with an N(0, 1) matrix has unit scale. The pattern
    depends on the seed alone, the values also on the kind of device.

    Args:
        m: The number of rows.
        k: The number of columns.
        block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
        density: Stored blocks over all blocks, 0 to 1.
        pattern: How the blocks are spread; the number of blocks is the same for all. "uniform": every block row has
            max(1, round(density * Kb)) blocks in random columns, none if density is 0. "banded": as many, adjacent,
            around the diagonal. "powerlaw": row lengths follow Zipf's law, rank^-1.2, over shuffled rows; some may be
            empty.
        dtype: bf16, fp16, fp32 or fp64.
        device: "cpu", "cuda", "cuda:0" or a torch.device.
        seed: 0 to 2^64 - 1.

    Raises:
        InvalidInput: For an argument outside these ranges, and for a device that this machine does not have.

    Examples:
        >>> sk.random_bsr(1024, 1024, block=64, density=0.125, seed=1)
        BSR(1024x1024 fp32, block 64x64, 32 of 256 blocks, 12.5 %, 0.524 MB, cpu)
    """
    target = arguments.device("device", device)
    dtype, seed = arguments.dtype("dtype", dtype), arguments.integer("seed", seed, 0, SEEDS - 1)
    made = random_pattern(m, k, block, density, pattern=pattern, device=target, seed=seed)
    draw = torch.Generator(target).manual_seed(seed)
    values = torch.randn((made.nnzb, *made.block), generator=draw, dtype=dtype, device=target)
    values /= math.sqrt(max(1, made.nnzb // max(1, made.grid[0]) * made.block[1]))
    return BSR.unchecked(made, zero_padding(made, values))


def random_pattern(
    m: int,
    k: int,
    block: int | tuple[int, int],
    density: float,
    *,
    pattern: Spread = "uniform",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> BlockPattern:
    """The pattern of `random_bsr` with these arguments, which are checked."""
    block = block_sides(block)
    shape = matrix_sides((arguments.integer("m", m), arguments.integer("k", k)), block)
    target = arguments.device("device", device)
    density, seed = arguments.number("density", density, 0, 1), arguments.integer("seed", seed, 0, SEEDS - 1)
    draw_pattern = PATTERNS[arguments.one_of("pattern", pattern, PATTERNS)]
    rows, columns = grid_of(shape, block)
    each = min(columns, max(1, round(density * columns))) if density > 0 else 0
    host = draw_pattern(np.random.default_rng(seed), (rows, columns), each)
    return BlockPattern.from_host(shape, block, host, target)


def even_pattern(m: int, k: int, block: int | tuple[int, int], count: int) -> BlockPattern:
    """A pattern of `count` blocks in random columns, the same at every call: equally many in each block row, or one
    more in the first ones.
    """
    block = block_sides(block)
    rows, columns = grid_of((m, k), block)
    each, more = divmod(count, max(rows, 1))
    host = _scattered(np.random.default_rng(0), columns, each + (np.arange(rows) < more))
    return BlockPattern.from_host((m, k), block, host, torch.device("cpu"))


def _uniform(rng: np.random.Generator, grid: tuple[int, int], each: int) -> HostPattern:
    return _scattered(rng, grid[1], np.full(grid[0], each))


def _banded(rng: np.random.Generator, grid: tuple[int, int], each: int) -> HostPattern:
    rows, columns = grid
    centers = (np.arange(rows) + 0.5) * columns / max(rows, 1)
    starts = np.clip(np.round(centers - each / 2).astype(np.int64), 0, columns - each)
    return _pattern(np.full(rows, each), (starts[:, None] + np.arange(each)).reshape(-1))


def _powerlaw(rng: np.random.Generator, grid: tuple[int, int], each: int) -> HostPattern:
    lengths = powerlaw_lengths(grid[0], grid[1], each * grid[0])
    return _scattered(rng, grid[1], rng.permutation(lengths))


PATTERNS: dict[str, Callable[[np.random.Generator, tuple[int, int], int], HostPattern]] = {
    "uniform": _uniform,
    "banded": _banded,
    "powerlaw": _powerlaw,
}


def powerlaw_lengths(rows: int, columns: int, total: int, exponent: float = ZIPF) -> np.ndarray:
    """Descending int64 lengths [rows] in proportion to rank^-exponent, at most `columns`, with the sum `total`.

    The excess of the longest rows is divided among the others in proportion, the last few by largest remainder.
    """
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    full = 0
    while True:
        shares = (total - full * columns) * weights[full:] / max(weights[full:].sum(), 1e-300)
        over = int((shares >= columns).sum())
        if over == 0 or columns == 0:
            break
        full += over
    lengths = np.concatenate((np.full(full, columns), np.floor(shares).astype(np.int64)))
    missing = total - int(lengths.sum())
    lengths[full + np.argsort(np.floor(shares) - shares, kind="stable")[:missing]] += 1
    return -np.sort(-lengths)


def _scattered(rng: np.random.Generator, columns: int, lengths: np.ndarray) -> HostPattern:
    """Random distinct columns in each row."""
    rows = [np.sort(rng.choice(columns, n, replace=False, shuffle=False)) for n in lengths if n]
    return _pattern(lengths, np.concatenate(rows) if rows else np.empty(0))


def _pattern(lengths: np.ndarray, indices: np.ndarray) -> HostPattern:
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    return HostPattern(indptr.astype(np.int32), indices.astype(np.int32))


def random_dense(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """N(0, 1) values, drawn on the device. Never zeros: on an H200 their product runs 13 % faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)
