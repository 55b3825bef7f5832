"""C = act(alpha * (A @ B) + bias[:, None]) for a BSR A in blocks of 16 x 16 on Hopper, by mma.sync: host side.

A wgmma multiplies 64 rows: blocks of 16 fill it only with zeros, or where four block rows have the same column. The
warps of hopper_mma.cu multiply 16 rows each. It is CUDA C++, because Gluon gives no warp a loop of its own. NVRTC
compiles it on first use.

A @ B of 8192^3 in bf16 at 6.25, 12.5, 25 % on a hot H200 (2026-12-01): 386, 598, 1237 us; x @ W.T at 12.5 % 668. In the
same rounds on a cool one: 1.27, 1.43, 1.30 of hopper.spmm_paired's rate, x @ W.T 2.08, 2.30, 1.81 of it. At 12.5 %
shared memory is 90 % busy, L2 71 %, tensor cores 44 %.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsek.core.streams import tensors_in
from sparsek.engine.launch import driver, nvrtc
from sparsek.engine.launch.driver import by_rows
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch_cuda
from sparsek.engine.launch.nvrtc import Program
from sparsek.engine.plan.kernel import beside, unless_hopper, unless_near
from sparsek.engine.plan.plan import arithmetic_seconds
from sparsek.engine.plan.ring import fullest, norm
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.kernels.spmm import hopper
from sparsek.products.kernels.spmm.hopper_24 import ACTS
from sparsek.products.kernels.spmm.pairs import WINDOW, matched
from sparsek.products.plan.kernels import SpmmKernel, unless_dense_sides, unless_stored
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import UnitSteps, balance
from sparsek.products.reference.epilogue import PLAIN, Epilogue

PROGRAM = Program(Path(__file__).with_name("hopper_mma.cu"), "mma_kernel")
SIDE = 16  # of blocks
WARPS, ROWS = 16, 2  # of a tile, that multiply; block rows of a warp
COLS = 64  # of a tile
DEPTH = 16  # block columns in a slot
AHEAD = 8  # blocks of A of a warp under way
THREADS = 32 * (WARPS + 4)
SLOT_BYTES, BLOCK_BYTES = 2 * DEPTH * SIDE * COLS, 2 * SIDE * SIDE
SPARE = 32  # a warp loads the masks of as many slots at once
# Seconds of a tile for each block of a warp, and those of its begin and end. H200, 2026-11-30.
BLOCK_SECONDS, TILE_SECONDS = 2.3e-7, 1.0e-6
UNEVEN = 0.04  # of a tile's time, for each doubling of the longest row over the mean
ALIKE = 0.8  # of the columns of random rows
# Of `card.fabric`, which is that of larger boxes.
FABRIC_SHARE = 0.9


@dataclass(frozen=True, repr=False)
class Config(KernelConfig):
    """A compiled kernel. `stages` slots hold rows of B. `half`: fp16."""

    stages: int = 5
    a_col: bool = False
    b_row: bool = True
    c_col: bool = False
    half: bool = False
    has_alpha: bool = False
    bias: bool = False
    activation: str = ""

    @property
    def texts(self) -> list[str]:
        lies = {"A": self.a_col, "B": not self.b_row, "C": self.c_col}
        return [
            f"tile of {WARPS * ROWS} block rows and {COLS} columns for {WARPS} warps",
            f"{self.stages} stages of {DEPTH} block columns",
            *(f"{'col' if col else 'row'}-major {name}" for name, col in lies.items()),
            *self.true_values("half", "bias", "has_alpha", "activation"),
        ]

    @property
    def smem(self) -> int:
        """Slots of B, blocks of A, and two barriers a slot."""
        return self.stages * (SLOT_BYTES + 16) + WARPS * AHEAD * BLOCK_BYTES

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_mma.cu."""
        names = {
            "STAGES": self.stages, "A_COL": int(self.a_col), "B_ROW": int(self.b_row), "C_COL": int(self.c_col),
            "HALF": int(self.half), "HAS_ALPHA": int(self.has_alpha), "BIAS": int(self.bias),
            "ACT": ACTS.index(self.activation), "SMEM_BYTES": self.smem, "WARPS": WARPS, "THREADS": THREADS,
            "SIDE": SIDE, "COLS": COLS, "DEPTH": DEPTH, "AHEAD": AHEAD,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in names.items()]


LISTS = ("tiles", "starts", "rows", "slots", "masks", "begins", "order")


class MmaParams(ctypes.Structure):
    """The struct Params of hopper_mma.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*LISTS, "values", "bias", "c")),
        ("ld", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("count", "m", "n")),
        ("alpha", ctypes.c_float),
    ]


class WarpLists(NamedTuple):
    """What the warps of each unit, the rows of a tile, multiply.

    `rows` [units, WARPS, ROWS]: block rows, -1 for none. Unit u has slots first[u] to end[u]. `slots` [slots + SPARE]:
    the first block column of each. `masks` [WARPS, slots + SPARE]: bit 31 - (ROWS * column + row) for a stored block.
    `begins` [units * WARPS + 1]: a warp's blocks in `order` [nnzb], column by column. `costs` [units]: a tile's, in
    slots and blocks of its longest warp.
    """

    rows: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    slots: NDArray[np.int64]
    masks: NDArray[np.uint32]
    begins: NDArray[np.int64]
    order: NDArray[np.int64]
    costs: NDArray[np.int64]


class Work(NamedTuple):
    """WarpLists and a schedule on the device, as in MmaParams."""

    tiles: Tensor
    starts: Tensor
    rows: Tensor
    slots: Tensor
    masks: Tensor
    begins: Tensor
    order: Tensor
    ctas: int
    imbalance: float


def lists_of(pattern: BlockPattern) -> WarpLists:
    """Block rows in pairs, pairs in units: of three ways the first one that costs least.

    Pairs that share columns (pairs.py) read less of B. Where rows are uneven, a long one with a short one is best: the
    warps of a tile wait for the longest pair. Of a band, neighbours need the same slots.
    """
    lengths = np.append(np.diff(pattern.host.indptr.astype(np.int64)), 0)  # the last is that of no row
    rows = np.argsort(-lengths[:-1], kind="stable")
    if len(rows) % 2:
        rows = np.append(rows, -1)
    uneven, neighbours = np.stack((rows, rows[::-1]), 1)[: len(rows) // 2], np.sort(rows)
    neighbours = np.append(neighbours[neighbours >= 0], neighbours[neighbours < 0]).reshape(-1, 2)
    ways = [each[np.argsort(-lengths[each].sum(1), kind="stable")] for each in (_pairs(pattern), uneven)]
    found = [_lists(pattern, each) for each in (*ways, neighbours)]
    return min(found, key=lambda each: int(each.costs.sum()))


def _pairs(pattern: BlockPattern) -> NDArray[np.int64]:
    """All block rows in pairs of WINDOW neighbours, -1 for none."""
    (indptr, indices), found = pattern.host, []
    for at in range(0, pattern.grid[0], WINDOW):
        count = min(WINDOW, pattern.grid[0] - at)
        has = np.zeros((count, max(1, pattern.grid[1])), np.bool_)
        bounds = indptr[at : at + count + 1]
        has[np.repeat(np.arange(count), np.diff(bounds)), indices[bounds[0] : bounds[-1]]] = True
        pairs = matched(has, together=True)
        found.append(np.where(pairs < 0, -1, pairs + at))
    return np.concatenate(found)


def _lists(pattern: BlockPattern, pairs: NDArray[np.int64]) -> WarpLists:
    """Units of WARPS pairs in this order."""
    units, width = -(-len(pairs) // WARPS), max(1, -(-pattern.grid[1] // DEPTH))
    rows = np.full((units * WARPS, ROWS), -1)
    rows[: len(pairs)] = pairs
    place = np.empty(pattern.grid[0], np.int64)  # of a block row: warp of all units, and which of its rows
    place[rows[rows >= 0]] = np.flatnonzero(rows.ravel() >= 0)
    columns = pattern.host.indices.astype(np.int64)
    warp, row = np.divmod(np.repeat(place, np.diff(pattern.host.indptr)), ROWS)
    order = np.argsort((warp * (width * DEPTH) + columns) * ROWS + row, kind="stable")
    counts = np.bincount(warp, minlength=units * WARPS)
    keys, slot = np.unique(warp // WARPS * width + columns // DEPTH, return_inverse=True)
    masks = np.zeros((WARPS, len(keys) + SPARE), np.uint32)
    bits = np.uint32(1) << (31 - (columns % DEPTH * ROWS + row)).astype(np.uint32)
    np.bitwise_or.at(masks, (warp % WARPS, slot), bits)
    bounds = np.searchsorted(keys // width, np.arange(units + 1))
    slots = np.append(keys % width * DEPTH, np.zeros(SPARE, np.int64))
    costs = np.diff(bounds) + counts.reshape(units, WARPS).max(1)
    begins = np.append(0, np.cumsum(counts))
    return WarpLists(
        rows.reshape(units, WARPS, ROWS), bounds[:-1], bounds[1:], slots, masks, begins, order, costs
    )


def slots_needed(p: SpmmProblem) -> float:
    """Slots of a unit in which any of its block rows has a block: of rows at random, or of neighbours that are alike.

    Those have fewer block columns than random rows would (`stats.merged`), and those lie together, in a slot more than
    they fill.
    """
    slots, density = -(-p.grid[1] // DEPTH), min(1.0, p.density)
    random = slots * (1 - (1 - density) ** (WARPS * ROWS * DEPTH))
    merged = sorted(p.stats.merged)
    if len(merged) < 2:
        return random
    (few, before), (many, after) = ((rows, steps * rows / p.grid[0]) for rows, steps in merged[-2:])
    if after > ALIKE * p.grid[1] * (1 - (1 - density) ** many):
        return random
    columns = after + (after - before) / (many - few) * (WARPS * ROWS - many)
    return min(random, columns / DEPTH + 1)


class HopperMma(SpmmKernel):
    name = "hopper.spmm_mma"
    successor: SpmmKernel = hopper.KERNEL

    def only_by_name(self, p: SpmmProblem) -> str:
        if not p.a.blocks or not p.a.blocks.unread:
            return ""
        return f"the host makes its lists, and the blocks may move soon; {self.successor.name}'s are made on the device"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr"):
            return foreign
        reasons = unless_hopper(p)
        if not reasons:
            reasons += nvrtc.missing()
        if p.block != (SIDE, SIDE):
            reasons.append(f"multiplies blocks of {SIDE}x{SIDE}, not {p.block[0]}x{p.block[1]}")
        reasons += unless_stored(p) + unless_dense_sides(p)
        if p.combine or p.slope:
            reasons.append("neither joins another matrix nor writes slopes; hopper.spmm does")
        return reasons + unless_near("M, K, N and the number of stored blocks", p.nnzb, p.m, p.k, p.n)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        c = Config(
            a_col=p.a.transposed, b_row=p.b.layout == "row", c_col=p.c.layout == "col", half=p.dtype == "fp16",
            has_alpha=p.has_alpha, bias=p.bias, activation=p.activation,
        )  # fmt: skip
        yield replace(c, stages=(p.card.smem_bytes - replace(c, stages=0).smem) // (SLOT_BYTES + 16))

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Predicted time: tiles of the fullest CTA for each item of a batch, at least all bytes from memory once.

        A tile takes a smooth maximum of its warps' products and of what L2 reads for it, slots and blocks of A, and
        more where rows are uneven.
        """
        if not (p.m and p.n and p.nnzb):
            return p.card.launch_seconds
        units, columns = -(-p.grid[0] // (WARPS * ROWS)), -(-p.n // COLS)
        blocks, row = p.nnzb / units, p.nnzb / p.grid[0]
        read = slots_needed(p) * SLOT_BYTES + blocks * BLOCK_BYTES
        read *= p.card.sm_count / (FABRIC_SHARE * p.card.fabric)
        own = BLOCK_SECONDS / p.card.pace
        uneven = 1 + UNEVEN * math.log2(max(1.0, p.row_long / row))
        tile = norm(3, blocks / WARPS * own, read) * uneven + TILE_SECONDS
        longest = max(tile, (p.row_long + row) * own + TILE_SECONDS)
        busy = p.batch * fullest(units, columns, p.card.sm_count, tile, longest)
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return max(beside(busy, moved), arithmetic_seconds(p)) + p.batch * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        lists = a.pattern.derived("mma_lists", lambda: lists_of(a.pattern))
        none = np.zeros(0, np.int32)
        units = len(lists.costs)
        deal = balance(
            UnitSteps(np.zeros(units, np.int64), lists.costs, np.arange(units), none, none),
            p.n,
            COLS,
            p.card.sm_count,
        )
        tiles = deal.tiles.copy()
        tiles[:-1, 0], tiles[:-1, 1] = lists.first[deal.unit], lists.end[deal.unit]
        rows = np.where(lists.rows < 0, -(-p.m // SIDE), lists.rows) * SIDE

        def put(array: Any) -> Tensor:
            return torch.from_numpy(np.array(array).astype(np.int32)).to(a.device)

        order = put(np.append(lists.order, np.zeros(AHEAD + 1, np.int64)))  # warps copy so many too many
        if a.order is not None:  # positions among the stored values
            order = a.order[order.long()].contiguous()
        if a.values.is_cuda:  # a launch that is captured must not load the kernel
            with torch.cuda.device_of(a.values):
                nvrtc.loaded(PROGRAM, c, a.values.device.index)
        masks = put(lists.masks.view(np.int32))
        made = (
            put(tiles),
            put(deal.starts),
            put(rows),
            put(lists.slots * SIDE),
            masks,
            put(lists.begins),
            order,
        )
        return Work(*made, deal.ctas, deal.imbalance)

    def launch(
        self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        index = b.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(c, work, a, b, out, epilogue)
        driver.enter(index)  # in a new thread torch may not have set a context yet
        function, held = nvrtc.loaded(PROGRAM, c, index), list(tensors_in(work))
        bias = None if epilogue.bias is None else epilogue.bias.data_ptr()
        for at in np.ndindex(*b.shape[:-2]):
            of_b = by_rows(b[at], (COLS, DEPTH * SIDE)) if c.b_row else by_rows(b[at].mT, (COLS, COLS))
            of_c = out[at].mT if c.c_col else out[at]
            params = MmaParams(
                **{name: getattr(work, name).data_ptr() for name in LISTS},
                values=a.values.data_ptr(), bias=bias, c=of_c.data_ptr(), ld=of_c.stride(0),
                count=work.masks.shape[1], m=out.shape[-2], n=out.shape[-1], alpha=float(epilogue.alpha),
            )  # fmt: skip
            launch_cuda(function, work.ctas, THREADS, c.smem, index, (of_b, params), held)


KERNEL: SpmmKernel = HopperMma()
