"""C = A @ B for a BSR A and up to 64 columns of B, in plain Triton: reads A once, at the card's bandwidth.

    block row of A, cut into parts of about `part` stored blocks     B        one program: tile_m rows of one part

      | b0 b1 b2 b3 | b4 b5 b6 b7 |         x                      [K, N]  =  sum over the part, float32 [tile_m, N]
           part 0        part 1

The kernel of portable.spmm (`spmm/portable.py`), where a tile has all columns.

Bytes of A dominate, so the bytes in flight count: an SM needs more than 32 KB in flight to draw its share of 4.28
TB/s. The programs that share an SM (limited by shared memory), each with a ring of num_stages steps, hold about 150
KB together. `part` is chosen so that all programs fit on the card at once. Splitting rows costs a write and a read of
float32 sums, which stay in L2, and one round trip between programs.

The program that arrives last differs from run to run, but its result does not: the bits repeat. Counters return to
zero at the end of every launch; a launch that a CUDA error aborts invalidates the context anyway. Calls of one plan
on two streams may overlap, so each stream has slots and counters of its own, made at its first call. So has each call
that a CUDA graph captures, and graphs may replay concurrently.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.engine.launch import tensors
from sparsek.engine.launch.tensors import SIZE_LIMIT
from sparsek.engine.plan.kernel import beside
from sparsek.engine.plan.ring import DRIVER_LAUNCHES
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized import Quantized
from sparsek.products.kernels.spmm.portable import Config, PortableSpmm, Work
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem

WIDEST = 64
SPARE = 16  # see `Work.room`
FIELDS = 8  # of `Work.rows`


def _tile_n(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


# Tile_m, tile_k, warps, stages; best guess first, by the padded N.
# fmt: off
LOW: dict[int, tuple[tuple[int, int, int, int], ...]] = {
    16: ((64, 128, 4, 5), (64, 128, 4, 4), (32, 128, 4, 4), (64, 64, 4, 8),
         (32, 128, 4, 6), (128, 128, 4, 3), (128, 64, 4, 6), (64, 128, 4, 3),
         (16, 128, 2, 6), (32, 256, 4, 3), (16, 256, 4, 4)),
    32: ((64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 4), (128, 128, 4, 3),
         (128, 64, 4, 6), (64, 128, 4, 3), (16, 128, 2, 4)),
    64: ((64, 128, 4, 3), (64, 64, 4, 6), (128, 128, 8, 3), (128, 64, 4, 6),
         (128, 64, 8, 6), (64, 64, 4, 4), (32, 128, 4, 3), (32, 64, 4, 6),
         (16, 64, 2, 6)),
}
FULL = ((64, 32, 4, 6), (32, 64, 4, 4), (32, 32, 4, 6), (64, 64, 4, 3),
        (16, 64, 2, 4))
# fmt: on


def _stage(p: SpmmProblem, c: Config) -> int:
    """Room of a step in shared memory, in values of A."""
    return c.tile_k * (c.tile_m + (dtypes.itemsize(p.b.rounds) if p.b.rounds else 1) * c.tile_n)


def _resident(p: SpmmProblem, c: Config) -> int:
    """Programs that an SM holds at once."""
    if p.on_cpu:
        return 1
    stage = _stage(p, c) * dtypes.itemsize(p.dtype)
    return max(1, min(2048 // (32 * c.num_warps), 8, p.card.smem_bytes // (c.num_stages * stage + 1024)))


def _subs(p: SpmmProblem, c: Config) -> int:
    return -(-p.block[0] // c.tile_m)


def _most_parts(length: int, part: int) -> int:
    """Number of parts of a row of `length` blocks: the nearest number of parts of `part` blocks, at least one."""
    return max(1, (length + part // 2) // part) if part else 1


def _counts(p: SpmmProblem, c: Config) -> tuple[int, int]:
    """Upper bounds from `p` alone, for one batch item: the parts, and those of rows in several parts."""
    rows = p.grid[0]
    if _most_parts(p.row_max, c.part) == 1:
        return rows, 0
    parts = min(p.nnzb // c.part + rows, rows * _most_parts(p.row_max, c.part))
    return parts, min(parts, 4 * p.nnzb // (3 * c.part))


def _parts(a: BSR, most: int, part: int) -> Tensor:
    """`Work.rows` with `most` entries: rows split evenly, longest parts first, ties by position, padding last."""
    rows = a.grid[0]
    if rows == 0:
        return torch.zeros((most, FIELDS), dtype=torch.int32, device=a.device)
    lengths = a.pattern.row_lengths.long()
    count = ((lengths + part // 2) // part).clamp(min=1) if part else torch.ones_like(lengths)
    ends = count.cumsum(0)
    cut = count > 1
    slot_ends, cut_ends = (count * cut).cumsum(0), cut.cumsum(0)
    place = torch.arange(most, device=a.device)
    found = torch.searchsorted(ends, place, right=True)
    row = found.clamp(max=rows - 1)
    inside = place - (ends - count)[row]
    begin, end = (which * lengths[row] // count[row] for which in (inside, inside + 1))
    first_slot = (slot_ends - count)[row]
    padding = found >= rows
    fields = (
        row.masked_fill(padding, -1),
        a.pattern.indptr[row] + begin,
        end - begin,
        first_slot + inside,
        first_slot,
        count[row],
        cut_ends[row] - 1,
    )
    size = (end - begin).masked_fill(padding, -1)
    table = torch.stack((*fields, torch.zeros_like(row)), 1)
    return table[torch.argsort(size, descending=True, stable=True)].int()


class PortableSpmmSkinny(PortableSpmm):
    """Up to 64 columns of B."""

    name = "portable.spmm_skinny"
    widest = WIDEST

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless(self.storage):
            return foreign
        why = self.unable(p)
        if p.n > self.widest:
            why.append(f"multiplies up to {self.widest} columns of B; got {p.n}")
        if max(p.m, p.k) > SIZE_LIMIT:
            why.append(f"M and K must be at most {SIZE_LIMIT}; got {p.m}, {p.k}")
        if not why:
            c = self.default(p)
            if _counts(p, c)[0] * _subs(p, c) * p.batch > SIZE_LIMIT:
                why.append(f"more than {SIZE_LIMIT} programs")
        return why

    def default(self, p: SpmmProblem) -> Config:
        """The first of `configs` with whole rows, if rows are even and fill half of the SMs; else the first.

        Few programs with whole rows were faster than four times as many with rows in parts (docs/notes/portable.md).
        """
        found = list(self.configs(p))
        mean = p.nnzb / max(1, p.grid[0])
        whole = [c for c in found if c.part == 0]
        even = p.row_max <= 4 * mean
        if whole and even and 2 * p.grid[0] * _subs(p, whole[0]) * p.batch >= p.card.sm_count - 4:
            return whole[0]
        return found[0]

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Tiles of the table for N, limited by the block, the rows and shared memory. Each with parts for half a
        wave, one and two waves of programs, and with whole rows.
        """
        tallest = 1 << (p.block[0] - 1).bit_length()
        seen = set()
        for c in self.table(p):
            c = replace(c, tile_m=min(c.tile_m, tallest))
            c = replace(c, num_stages=tensors.stages(p, c.num_stages, _stage(p, c)))
            programs = p.card.sm_count * _resident(p, c)
            for wave in (1.0, 0.5, 2.0, 0.0):
                part = int(-(-p.nnzb * _subs(p, c) * p.batch // (programs * wave))) if wave else 0
                part = max(part, -(-c.tile_k // p.block[1])) if part else 0
                if _most_parts(p.row_max, part) == 1:
                    part = 0
                config = replace(c, part=part)
                if config not in seen:
                    seen.add(config)
                    yield config

    def table(self, p: SpmmProblem) -> Iterator[Config]:
        """Tiles for all of N, best guess first, no deeper than a row."""
        deepest = max(32, 1 << (max(p.row_max * p.block[1], 1) - 1).bit_length())
        for tile_m, tile_k, warps, stages in FULL if p.dtype == "fp32" else LOW[_tile_n(p.n)]:
            yield Config(tile_m, _tile_n(p.n), min(tile_k, deepest), warps, stages, group=1)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch + two beside each other: the longer of compulsory bytes at 92 % of copy bandwidth and, from L2, A, B
        for each tile of A, and sums of parts; and the longest part at 2.7 times one SM's share of the bandwidth, which
        is what one program has in flight. Plus 1 us for each further wave of programs and for combining parts. Fitted
        to 20 rows of op planner (H200, 2026-11-23).
        """
        parts, slots = _counts(p, c)
        tiles = p.nnzb * _subs(p, c) * p.batch
        if p.on_cpu:  # the interpreter: about a millisecond per program and step
            return 1e-3 * (parts * _subs(p, c) * p.batch + tiles * p.block[1] / c.tile_k)
        size, tile_n = dtypes.itemsize(p.dtype), _tile_n(p.n)
        block = p.block[1] * (c.tile_m + min(p.n, tile_n)) * size
        sums = 8.0 * slots * _subs(p, c) * p.batch * c.tile_m * p.n
        programs = parts * _subs(p, c) * p.batch
        waves = -(-programs // (p.card.sm_count * _resident(p, c)))
        longest = (
            -(-p.row_max // _most_parts(p.row_max, c.part)) * block / (p.card.bandwidth / p.card.sm_count)
        )
        moved = max(
            p.compulsory_bytes / (0.92 * p.card.bandwidth), (tiles * block + sums) / (0.75 * p.card.fabric)
        )
        late = 1e-6 * (waves - 1 + (slots > 0))
        return DRIVER_LAUNCHES * p.card.launch_seconds + beside(moved, longest / 2.7) + late

    def prepare(self, p: SpmmProblem, c: Config, a: Any) -> Work:
        """The parts of all block rows and the slots of split rows; on A's device, without a sync."""
        matrix = a.matrix if isinstance(a, Quantized) else a
        most, slots = _counts(p, c)
        counters = slots // 2
        tiles = _subs(p, c) * p.batch
        spare = torch.zeros((SPARE if slots else 0, counters * tiles), dtype=torch.int32, device=a.device)
        rows = _parts(matrix, most, c.part if slots else 0)
        sizes = slots * tiles * c.tile_m * c.tile_n, counters * tiles
        return Work(rows, p.tf32, slots, counters, sizes, spare=list(spare))


KERNEL: SpmmKernel = PortableSpmmSkinny()
