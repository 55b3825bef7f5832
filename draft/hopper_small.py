"""C = A @ B on Hopper for a BSR A with blocks of 16 or 32 rows that store much: host side.

    hopper.spmm        a tile is a block row: rows of B come once for each block row that needs them
    hopper.spmm_small  a tile is 256 rows of C, 8 or 16 block rows: rows of B come once for all of them, and a slab of
                       64 rows multiplies them if one of its block rows needs them

The kernel, hopper_small.cu, is CUDA C++: Gluon has no ldmatrix into registers that wgmma reads. Its lists are made here,
on the host: stages of pieces of B for each row of tiles, and where each warp finds its part of A in a stage.

Bottleneck (H200, 8192^3 bf16, blocks of 16, 12.5 % stored; docs/lab-notes.md): the instructions of a stage, which
a warp issues one after another while its tensor core waits. L2 and the tensor pipe would allow 1.7 times the rate.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsek.core.streams import tensors_in
from sparsek.kernels.lang import driver, nvrtc
from sparsek.kernels.lang.driver import Boxed
from sparsek.kernels.lang.launch import launch_cuda
from sparsek.kernels.spmm import hopper
from sparsek.matrix.bsr import BSR
from sparsek.plan.kernel import SpmmKernel, beside, unless_hopper
from sparsek.plan.problem import SpmmProblem
from sparsek.plan.schedule import Walk, balance, walk
from sparsek.reference.epilogue import PLAIN, Epilogue

SOURCE = Path(__file__).with_name("hopper_small.cu")
ENTRY = "small_kernel"
OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17", "-lineinfo")
ROWS, COLS, DEPTH = 256, 128, 64  # a tile of C; rows of B in a stage
SLABS, WARPS, THREADS = 4, 16, 640  # slabs of 64 rows, and warps, of 16 rows each, that multiply
PARTS = 16  # of A in a stage; a part is 16 rows of a block
ABSENT, SKIPPED = (
    -1,
    -2,
)  # places of a warp without rows of a block, in a slab that multiplies a piece or that does not
SIDES = (16, 32)


STAGE_SECONDS, PRODUCT_SECONDS, TILE_SECONDS = 3.2e-7, 3e-8, 1.5e-6


@dataclass(frozen=True)
class Config:
    """A compiled kernel for blocks of `block`. `half`: fp16 instead of bf16."""

    block: tuple[int, int]
    b_row: bool = True
    c_col: bool = False
    half: bool = False

    @property
    def pieces(self) -> int:
        """Pieces of B in a stage, each the rows under one block column."""
        return DEPTH // self.block[1]

    @property
    def part_bytes(self) -> int:
        return 32 * self.block[1]

    @property
    def stage_bytes(self) -> int:
        """Bytes of B, A, places and two barriers."""
        return 2 * DEPTH * COLS + PARTS * self.part_bytes + 4 * WARPS * self.pieces + 16

    @property
    def stages(self) -> int:
        return 8 if self.block[1] == 16 else 6

    @property
    def smem(self) -> int:
        return self.stages * self.stage_bytes + SLABS * 8192

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_small.cu."""
        names = {
            "BM": self.block[0], "BK": self.block[1], "B_ROW": int(self.b_row), "C_COL": int(self.c_col),
            "HALF": int(self.half), "STAGES": self.stages, "SMEM_BYTES": self.smem,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in names.items()]


def code_of(c: Config) -> bytes:
    """The cubin of `c`."""
    return nvrtc.compiled(SOURCE.read_text(encoding="utf-8"), SOURCE.name, [*OPTIONS, *c.defines])


@cache
def _function(c: Config, device: int) -> ctypes.c_void_p:
    return driver.function(code_of(c), ENTRY, c.smem, device)


class Params(ctypes.Structure):
    """The struct of hopper_small.cu."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("values", "tiles", "starts", "cols", "places", "part_starts", "parts")
    ]


class Stages(NamedTuple):
    """The stages of all units, one after another: unit u has those from starts[u] to starts[u + 1].

    `cols` [stages, pieces]: the block column of every piece, -1 for none. `places` [stages, warps, pieces]: the offset of
    a warp's part in the stage's A, ABSENT or SKIPPED. Stage s loads `parts` part_starts[s] to part_starts[s + 1]: 16 rows
    of blocks, counted over all values. All but `starts` go on, because the kernel reads ahead.
    """

    starts: NDArray[np.int64]
    cols: NDArray[np.int32]
    places: NDArray[np.int32]
    part_starts: NDArray[np.int32]
    parts: NDArray[np.int32]


def stages_of(units: Walk, c: Config, nnzb: int) -> Stages:
    """The stages of units of ROWS rows, each with as many steps as it has room for."""
    split = c.block[0] // 16  # parts of a block
    stored = units.blocks < nnzb
    stage, piece, starts = _grouped(units, stored.sum(1) * split, c.pieces)
    count = int(starts[-1])
    cols = np.full((count + 1, c.pieces), -1, np.int32)
    cols[stage, piece] = units.cols
    step, row = np.nonzero(stored)
    step, warp = step.repeat(split), (row[:, None] * split + np.arange(split)).ravel()
    parts = np.zeros(len(step) + 3 * 32, np.int32)
    parts[: len(step)] = (units.blocks[stored][:, None] * split + np.arange(split)).ravel()
    part_starts = np.zeros(count + 3, np.int32)
    part_starts[1 : count + 1] = np.cumsum(np.bincount(stage[step], minlength=count))
    part_starts[count + 1 :] = part_starts[count]
    places = np.full((count + 3, WARPS, c.pieces), SKIPPED, np.int32)
    for each in range(4):  # all four warps of a slab take part in a wgmma
        places[stage[step], warp // 4 * 4 + each, piece[step]] = ABSENT
    slot = np.arange(len(step)) - part_starts[stage[step]]
    places[stage[step], warp, piece[step]] = slot * c.part_bytes
    return Stages(starts, cols, places, part_starts, parts)


def _grouped(units: Walk, parts: NDArray[np.int64], pieces: int) -> tuple[NDArray[np.int64], ...]:
    """Stage of every step and its place in it, and the first stage of every unit: at most `pieces` steps, PARTS parts."""
    stage, place, starts, count = [], [], [0], 0
    sizes = parts.tolist()
    for begin, end in zip(units.begin.tolist(), units.end.tolist(), strict=True):
        held, room = pieces, 0
        for size in sizes[begin:end]:
            if held == pieces or size > room:
                count, held, room = count + 1, 0, PARTS
            stage.append(count - 1)
            place.append(held)
            held, room = held + 1, room - size
        starts.append(count)
    return np.array(stage, np.int64), np.array(place, np.int64), np.array(starts)


def distinct(p: SpmmProblem, rows: int) -> float:
    """The block columns that groups of `rows` rows store blocks in, summed over the groups.

    Of more block rows than the statistics have, as if two groups were independent.
    """
    joined = rows // p.block[0]
    if joined <= 1:
        return float(p.nnzb)
    known = dict(p.stats.merged).get(joined)
    if known is not None:
        return float(known)
    cells = -(-p.grid[0] // joined) * p.grid[1]
    share = min(1.0, distinct(p, rows // 2) / max(1, 2 * cells))
    return cells * (1 - (1 - share) ** 2)


class Work(NamedTuple):
    """A schedule on the device, as in Params."""

    tiles: Tensor
    starts: Tensor
    cols: Tensor
    places: Tensor
    part_starts: Tensor
    parts: Tensor
    ctas: int
    imbalance: float


class HopperSmall:
    """Implements the Kernel protocol for hopper_small.cu."""

    name = "hopper.spmm_small"
    # The kernel of a retargeted plan, whose lists are made on the device.
    successor: SpmmKernel = hopper.KERNEL

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("bsr"):
            return foreign
        reasons = unless_hopper(p)
        if not reasons and torch.cuda.is_available() and nvrtc.library() is None:
            reasons.append("NVRTC, which compiles it, is not here: install nvidia-cuda-nvrtc or set $NVRTC")
        if p.block[0] not in SIDES or p.block[1] not in SIDES:
            reasons.append(f"the sides of blocks must be 16 or 32, not {p.block[0]}x{p.block[1]}")
        if not p.nnzb:
            reasons.append("A has no stored blocks, and TMA needs a valid address")
        if p.a.transposed:
            reasons.append("A is a transposed view, whose blocks ldmatrix would have to transpose")
        if p.has_alpha or p.bias or p.activation or p.combine:
            reasons.append("applies no epilogue; hopper.spmm does")
        if not p.aligned:
            reasons.append("TMA needs pointers and leading strides of B and C that are multiples of 16 bytes")
        if (p.m if p.c.layout == "col" else p.n) % 8:
            reasons.append("TMA writes whole 16 bytes, so a row of C must hold a multiple of 8")
        if p.b.layout == "strided":
            reasons.append(
                "TMA reads a row-major B or its transpose view; this B has gaps between its elements"
            )
        if max(p.nnzb * p.block[0] // 16, p.m, p.k, p.n) > 2**31 - 1024:
            reasons.append("TMA coordinates and lists are 32 bits: sides must stay 1024 below 2^31")
        return reasons

    def default(self, p: SpmmProblem) -> Config:
        return Config(p.block, p.b.layout == "row", p.c.layout == "col", p.dtype == "fp16")

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        yield self.default(p)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        return ["a NaN or Inf in B under a stored block reaches the 64 rows of C around that block"]

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Predicted time: the stages of a CTA's share of tiles, but no less than all bytes from memory once.

        Constants of an H200, fitted to blocks of 16 and 32 at 6 to 50 % (8192^3, 2026-11-26).
        """
        if not (p.m and p.n):
            return p.card.launch_seconds
        tall, slabs = distinct(p, ROWS), distinct(p, 64)
        parts = p.nnzb * p.block[0] / 16
        stages = max(tall / c.pieces, 1.1 * parts / PARTS)
        products = slabs * p.block[1] / 16  # of 64 x 128 x 16
        columns, units = -(-p.n // COLS), -(-p.m // ROWS)
        tile = (stages * STAGE_SECONDS + products * PRODUCT_SECONDS) / units / p.card.pace + TILE_SECONDS
        rounds = max(1.0, 1.03 * units * columns * p.batch / p.card.sm_count)
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return beside(rounds * tile, moved) + p.batch * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        joined = ROWS // p.block[0]
        units = a.pattern.derived(("walk", ROWS, joined), lambda: walk(a.pattern, ROWS, joined))
        stages = a.pattern.derived(("stages", c.block), lambda: stages_of(units, c, a.nnzb))
        deal = balance(
            units._replace(begin=stages.starts[:-1], end=stages.starts[1:]), p.n, COLS, p.card.sm_count
        )

        def put(array: Any) -> Tensor:
            return torch.from_numpy(np.array(array, order="C")).to(a.device)

        # The kernel reads two tiles ahead.
        tiles = np.concatenate((deal.tiles, np.zeros((1, 4), np.int32)))
        return Work(*map(put, (tiles, deal.starts, *stages[1:])), deal.ctas, deal.imbalance)

    def launch(
        self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        index = b.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(c, work, a, b, out)
        driver.enter(index)  # in a new thread torch may not have set a context yet
        params = Params(values=a.values.data_ptr())
        for name in ("tiles", "starts", "cols", "places", "part_starts", "parts"):
            setattr(params, name, getattr(work, name).data_ptr())
        function, held = _function(c, index), list(tensors_in(work))
        b_box = (64, c.block[1]) if c.b_row else (c.block[1], COLS)
        for at in np.ndindex(*b.shape[:-2]):
            b_lies, c_lies = b[at] if c.b_row else b[at].mT, out[at].mT if c.c_col else out[at]
            arguments = _by_rows(b_lies, b_box), _by_rows(c_lies, (64, 64)), params
            launch_cuda(function, work.ctas, THREADS, c.smem, index, arguments, held)


def _by_rows(x: Tensor, box: tuple[int, int]) -> Boxed:
    """A row-major matrix. A single row may have any stride, and gets one that TMA accepts."""
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else -(-columns // 8) * 8
    return Boxed(x.data_ptr(), x.dtype, (columns, rows), stride, box)


KERNEL: SpmmKernel = HopperSmall()
