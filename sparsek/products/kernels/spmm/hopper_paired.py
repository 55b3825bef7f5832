"""C = act(alpha * (A @ B) + bias[:, None]) for a BSR A with low blocks on Hopper, in clusters that share B: host side.

Blocks of few rows reuse little of B: what bounds hopper.spmm is L2 to shared memory. Here 64 / rows block rows that
have many columns in common share a tile (`joined`), and two such tiles a cluster (spmm/pairs.py); what both need of B
is read once. The kernel, hopper_paired.cu, is CUDA C++, because Gluon has no multicast. NVRTC compiles it on first use.

A joined block row is multiplied with zeros where it lacks a block that another row of its tile has.

A @ B of 8192^3 in bf16 at 12.5 % on an H100 (2026-11-26), in blocks of 64, 32, 16: 285, 465, 798 us, which is 1.06,
1.23, 1.43 of hopper.spmm's rate; x @ W.T 317, 570, 1467 us, 1.08, 1.11, 1.49 of it. The bottleneck is L2's output: 80 %
busy in blocks of 16, where tensor cores are 58 % busy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsek.core.device import H200
from sparsek.core.streams import tensors_in
from sparsek.engine.launch import driver, nvrtc
from sparsek.engine.launch.driver import by_rows
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch_cuda
from sparsek.engine.launch.nvrtc import Program
from sparsek.engine.plan.kernel import beside, unless_hopper, unless_near
from sparsek.engine.plan.plan import arithmetic_seconds
from sparsek.engine.plan.ring import flops_per_second, fullest, norm, share_of_h200
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.spmm import hopper
from sparsek.products.kernels.spmm.hopper_24 import ACTS, BOX_BYTES
from sparsek.products.kernels.spmm.pairs import Pairs, pairs_of
from sparsek.products.plan.kernels import SpmmKernel, unless_dense_sides, unless_stored
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.plan.schedule import UnitSteps, balance
from sparsek.products.reference.epilogue import PLAIN, Epilogue

PROGRAM = Program(Path(__file__).with_name("hopper_paired.cu"), "paired_kernel")
COLS = 512  # each on a line of its own: sparsek_bench/engine/sources.py hashes constants of one name
CLUSTER = 2
THREADS = 384
SIDES = (16, 32, 64)  # of blocks
LESS = 0.90  # of the columns of neighbours, where blocks lie at random
# Seconds of TMA for a line of so many bytes in shared memory, from L2 or by multicast, while all SMs load: of an H100,
# over 1.15, by which hopper.spmm is faster on an H200 (2026-11-26). Of other cards by their fabric for each SM.
LINE_SECONDS = {128: 1.6e-9, 64: 1.05e-9, 32: 0.8e-9}
TILE_SECONDS = 1.0e-6
# At least for a step: in blocks of 16, 0.28 to 0.29 us at every density, on an H200 and an H100 (2026-11-26).
STEP_SECONDS = 2.75e-7
SPARE = 32  # a warp loads as many steps at once


@dataclass(frozen=True, repr=False)
class Config(KernelConfig):
    """A compiled kernel for blocks of `block`; `joined` block rows share the 64 rows of a tile.

    `stages` slots hold rows of B for one warpgroup each. `boxes` of its part of C are staged at once. `half`: fp16.
    """

    block: tuple[int, int]
    joined: int = 1
    stages: int = 4
    boxes: int = 2
    b_row: bool = True
    c_col: bool = False
    half: bool = False
    has_alpha: bool = False
    bias: bool = False
    activation: str = ""

    @property
    def texts(self) -> list[str]:
        return [
            f"two tiles 64x{COLS} for blocks {self.block[0]}x{self.block[1]}",
            f"{self.joined} block rows joined" * (self.joined > 1), f"{self.stages} stages",
            f"{self.boxes} boxes" * (self.boxes != 2),
            *self.true_names("b_row", "c_col", "half", "has_alpha", "bias"), self.activation,
        ]  # fmt: skip

    @property
    def slice(self) -> int:
        """Columns of A in a slot."""
        return min(self.block[1], 32) if self.b_row else self.block[1]

    @property
    def smem(self) -> int:
        """Slots of B and of A, boxes of C, and barriers."""
        a_stages = self.stages // 2 + 2
        slots = self.slice * (self.stages * COLS + a_stages * 128)  # of 256 columns, of 64 rows
        return slots + 2 * self.boxes * BOX_BYTES + 16 * (self.stages + a_stages)

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_paired.cu."""
        names = {
            "CLUSTER": CLUSTER, "BM": self.block[0], "BK": self.block[1], "JOINED": self.joined, "STAGES": self.stages,
            "C_BOXES": self.boxes, "B_ROW": int(self.b_row), "C_COL": int(self.c_col), "HALF": int(self.half),
            "HAS_ALPHA": int(self.has_alpha), "BIAS": int(self.bias), "ACT": ACTS.index(self.activation),
            "SMEM_BYTES": self.smem,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in names.items()]

    def deepened(self, smem: int) -> Config:
        """The config with as many stages as fit into `smem` bytes, an even number: each slot serves one warpgroup.

        No fewer than 4: a warpgroup frees a slot when the next one has landed.
        """
        return max(
            (c for c in (replace(self, stages=each) for each in range(4, 25, 2)) if c.smem <= smem),
            key=lambda c: c.stages,
        )


class PairedParams(ctypes.Structure):
    """The struct Params of hopper_paired.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tiles", "starts", "rows", "steps", "values", "bias")),
        *((name, ctypes.c_int) for name in ("count", "nnzb", "m")),
        ("alpha", ctypes.c_float),
    ]


class Work(NamedTuple):
    """A schedule on the device, as in PairedParams."""

    tiles: Tensor
    starts: Tensor
    rows: Tensor
    steps: Tensor
    clusters: int
    imbalance: float


def entries(pairs: Pairs, nowhere: int) -> Any:
    """The steps as the kernel reads them, with SPARE ones at the end; `nowhere` is a block column outside A."""
    _, count, joined = pairs.blocks.shape
    made = np.zeros((2, count + SPARE, {1: 2, 2: 4, 4: 8}[joined]), np.int32)
    cols = np.where(pairs.cols < 0, nowhere, pairs.cols)
    made[:, :count, 0] = np.where(pairs.shared, ~cols, cols)
    made[:, :count, 1 : 1 + joined] = pairs.blocks
    return made


def columns_needed(p: SpmmProblem, rows: int) -> float:
    """The block columns that groups of `rows` matched block rows store blocks in, summed over the groups.

    The statistics count groups of neighbours. Matched rows have fewer.
    """
    if rows == 1:
        return float(p.nnzb)
    known = dict(p.stats.merged).get(rows)
    if known is None:  # as if two groups were independent
        cells = -(-p.grid[0] // rows) * p.grid[1]
        share = min(1.0, columns_needed(p, rows // 2) / max(1, 2 * cells))
        return cells * (1 - (1 - share) ** 2)
    return max(known * LESS, p.nnzb / rows)


class HopperPaired(SpmmKernel):
    name = "hopper.spmm_paired"
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
        bm, bk = p.block
        if bm not in SIDES or bk not in SIDES:
            reasons.append(f"the sides of blocks must be 16, 32 or 64, not {bm}x{bk}")
        reasons += unless_stored(p) + unless_dense_sides(p)
        if p.a.transposed:
            reasons.append("A is a transposed view; hopper.spmm reads its blocks transposed")
        if p.combine or p.slope:
            reasons.append("neither joins another matrix nor writes slopes; hopper.spmm does")
        if p.b.layout == "row" and p.n % 64:
            reasons.append(f"a row of a row-major B must hold whole panels of 64, not {p.n}")
        return reasons + unless_near("M, K, N and the number of stored blocks", p.nnzb, p.m, p.k, p.n)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        c = Config(
            p.block, b_row=p.b.layout == "row", c_col=p.c.layout == "col", half=p.dtype == "fp16",
            has_alpha=p.has_alpha, bias=p.bias, activation=p.activation,
        )  # fmt: skip
        for joined in (4, 2, 1):
            if joined * p.block[0] <= 64:
                yield replace(c, joined=joined).deepened(p.card.smem_bytes)

    def notes(self, p: SpmmProblem, c: Config) -> list[str]:
        spread = (
            "a NaN or Inf in B under a stored block reaches the rows of all block rows that share its tile"
        )
        return [spread] if c.joined > 1 else []

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Predicted time: tiles of the fullest cluster for each item of a batch, but no less than all bytes from memory
        once.

        A step takes the longest of what its CTA multiplies, what L2 reads for it, the lines that TMA writes, and its
        least.
        """
        if not (p.m and p.n and p.nnzb):
            return p.card.launch_seconds
        bm, bk = p.block
        units, pairs = -(-p.grid[0] // c.joined), -(-p.grid[0] // (2 * c.joined))
        steps = columns_needed(p, c.joined) / units
        loads = columns_needed(p, 2 * c.joined) / pairs / 2
        multiply = 2 * 64 * COLS * bk / flops_per_second(p.card)
        of_a, of_b = 2 * bm * bk * p.nnzb / units, 2 * bk * COLS
        fetch = (of_a + loads * of_b) / steps * p.card.sm_count / p.card.fabric
        line = 128 if c.b_row else 2 * bk
        slower = H200.fabric / p.card.fabric * share_of_h200(p.card)
        arrive = of_b / line * LINE_SECONDS[line] * slower
        step = norm(4, multiply, max(fetch, arrive, STEP_SECONDS))
        longest = max(steps, min(p.row_max, p.grid[1])) * step + TILE_SECONDS
        columns, clusters = -(-p.n // COLS), p.card.sm_count // CLUSTER
        busy = p.batch * fullest(pairs, columns, clusters, steps * step + TILE_SECONDS, longest)
        moved = p.compulsory_bytes / (0.92 * p.card.bandwidth)
        return max(beside(busy, moved), arithmetic_seconds(p)) + p.batch * p.card.launch_seconds

    def prepare(self, p: SpmmProblem, c: Config, a: BSR) -> Work:
        pairs = a.pattern.derived(("pairs", c.joined), lambda: pairs_of(a.pattern, c.joined))
        none = np.zeros(0, np.int32)
        units = UnitSteps(pairs.begin, pairs.end, np.arange(len(pairs.begin)), none, none)
        deal = balance(units, p.n, COLS, p.card.sm_count // CLUSTER)
        rows = np.where(pairs.rows < 0, -(-p.m // c.block[0]), pairs.rows) * c.block[0]

        def put(array: Any) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32, order="C")).to(a.device)

        steps = entries(pairs, a.grid[1])
        if a.values.is_cuda:  # a launch that is captured must not load the kernel
            with torch.cuda.device_of(a.values):
                nvrtc.loaded(PROGRAM, c, a.values.device.index)
        return Work(*map(put, (deal.tiles, deal.starts, rows, steps)), deal.ctas, deal.imbalance)

    def launch(
        self, c: Config, work: Work, a: BSR, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        index = b.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(c, work, a, b, out, epilogue)
        driver.enter(index)  # in a new thread torch may not have set a context yet
        params = PairedParams(
            values=a.values.data_ptr(), count=work.steps.shape[1], nnzb=a.nnzb, m=out.shape[-2],
            alpha=float(epilogue.alpha),
        )  # fmt: skip
        params.bias = None if epilogue.bias is None else epilogue.bias.data_ptr()
        for name in ("tiles", "starts", "rows", "steps"):
            setattr(params, name, getattr(work, name).data_ptr())
        function, held, bm = nvrtc.loaded(PROGRAM, c, index), list(tensors_in(work)), c.block[0]
        for at in np.ndindex(*b.shape[:-2]):
            of_b = by_rows(b[at], (64, c.slice), 4) if c.b_row else by_rows(b[at].mT, (c.slice, COLS // 2))
            of_c = by_rows(out[at].mT, (bm, 64)) if c.c_col else by_rows(out[at], (64, bm))
            launch_cuda(function, CLUSTER * work.clusters, THREADS, c.smem, index, (of_b, of_c, params), held)


KERNEL: SpmmKernel = HopperPaired()
