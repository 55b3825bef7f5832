"""C = act(alpha * (A @ B) + bias[:, None]) for a Semi24 A and up to 32 columns of B: reads A once.

The epilogue may also add or multiply another matrix. The kernel, hopper_skinny_24.cu, is CUDA C++, because Triton has
no mma.sp. NVRTC compiles it on first use (launch/nvrtc.py), and the driver launches it (launch/launch.py). It reads
values and metadata as stored, so a plan prepares nothing.

    M / tm tiles of rows  x  `parts` of K = CTAs     each part is cut once more, a piece per warp

The bottleneck is memory: an SM needs more than 32 KB in flight to draw its share of 4.28 TB/s. So each warp copies
its own piece of A, metadata and B, in whole lines of 128 bytes of 16*ms rows. There is no barrier before the end,
where the sums of all warps are added. hopper.semi24 has no parts: it runs 64 CTAs of 128 rows for 8192 x 8192, at
half of the bandwidth.

mma.sp multiplies stored values only: a NaN in a row of B reaches only the rows of C whose groups select that row.
Sums are float32, in the order of k inside a piece, then in the order of the pieces: the same bits in every run of a
config.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.engine.launch import driver, nvrtc
from sparsek.engine.launch.kinds import KernelConfig
from sparsek.engine.launch.launch import launch_cuda
from sparsek.engine.launch.nvrtc import Program
from sparsek.engine.plan.kernel import unless_near
from sparsek.engine.plan.ring import DRIVER_LAUNCHES
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.kernels.spmm.hopper_24 import ACTS, JOINS, unable
from sparsek.products.plan.kernels import SpmmKernel
from sparsek.products.plan.problems import SpmmProblem
from sparsek.products.reference.epilogue import PLAIN, Epilogue

PROGRAM = Program(Path(__file__).with_name("hopper_skinny_24.cu"), "semi24_skinny_kernel")
WIDEST = 32
STEP = 128  # columns of A in a step of a warp
RESERVED = 1024  # bytes of shared memory that CUDA reserves per CTA


@dataclass(frozen=True)
class Config(KernelConfig):
    """A compiled kernel: tiles of 16*ms rows; K cut into `parts`, 1, 2 or 4, and each part into one piece per warp.

    A warp keeps `depth` steps of 128 columns in flight. `resident` CTAs share an SM. `tiles` of 8 columns of B.
    `half`: fp16.
    """

    warps: int
    ms: int
    parts: int
    depth: int
    resident: int
    tiles: int
    half: bool = False

    @property
    def tm(self) -> int:
        return 16 * self.ms

    @property
    def step_bytes(self) -> int:
        """Bytes of values, metadata and B of a step."""
        return self.tm * (128 + 16) + 8 * self.tiles * 256

    @property
    def smem(self) -> int:
        return self.warps * self.depth * self.step_bytes

    @property
    def defines(self) -> list[str]:
        """The constants of hopper_skinny_24.cu."""
        names = {
            "WARPS": self.warps, "MS": self.ms, "PARTS": self.parts, "DEPTH": self.depth,
            "RESIDENT": self.resident, "NT": self.tiles, "HALF": int(self.half), "SMEM_BYTES": self.smem,
        }  # fmt: skip
        return [f"-D{name}={value}" for name, value in names.items()]


class SkinnyParams(ctypes.Structure):
    """The struct Params of hopper_skinny_24.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "meta", "b", "c", "bias", "other")),
        *((name, ctypes.c_int64) for name in ("sb_k", "sb_n", "sc_m", "sc_n", "so_m", "so_n")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "wide", "by_columns", "activation", "combine")),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
    ]


def launch_params(a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue) -> SkinnyParams:
    """The kernel's parameters. `b` is [K, N], `out` [M, N], as is the epilogue's matrix, which may be `out`."""
    (m, k), n, other = a.shape, b.shape[1], epilogue.other
    p = SkinnyParams(
        values=a.values.data_ptr(), meta=a.meta.data_ptr(), b=b.data_ptr(), c=out.data_ptr(), m=m, n=n, k=k
    )
    p.bias = None if epilogue.bias is None else epilogue.bias.data_ptr()
    (p.sb_k, p.sb_n), (p.sc_m, p.sc_n) = b.stride(), out.stride()
    p.wide = p.sb_k == 1 and p.b % 16 == 0 and (n == 1 or p.sb_n % 8 == 0)
    p.by_columns = p.sc_m == 1
    p.alpha, p.beta = float(epilogue.alpha), float(epilogue.beta)
    p.activation = ACTS.index(epilogue.activation)
    if other is not None:
        p.combine = JOINS.index(epilogue.combine)
        p.so_m, p.so_n = other.stride()
        if other.data_ptr() != p.c or other.stride() != out.stride():
            p.other = other.data_ptr()
    return p


# (warps, ms, resident), the faster of equal predictions first. Shared memory holds two steps of eight warps of 64 rows
# and 16 columns of B.
SHAPES = ((4, 2, 3), (4, 4, 2), (8, 4, 1), (4, 4, 1), (8, 2, 1))
DEEPEST = 4  # steps in flight
START_SECONDS = 1.6e-6  # first bytes, and the end: sums of the warps, C
PHASE_SECONDS = 1.2e-6  # another wave of CTAs
LATENCY_SECONDS = 1.3e-6  # of bytes in flight
GATHER_SECONDS = 3.4e-6  # for 8 columns of B in a step, loaded element by element


class HopperSemi24Skinny(SpmmKernel):
    name = "hopper.semi24_skinny"

    def why_not(self, p: SpmmProblem) -> list[str]:
        if foreign := p.a.unless("semi24"):
            return foreign
        reasons = unable(p, p.dtype)
        if p.n > WIDEST:
            reasons.append(f"multiplies up to {WIDEST} columns of B, not {p.n}")
        if p.k % STEP or not p.k:
            reasons.append(f"metadata comes in 16 bytes of a row: K a multiple of {STEP}, not {p.k}")
        return reasons + unless_near("M and K", p.m, p.k)

    def configs(self, p: SpmmProblem) -> Iterator[Config]:
        """Every shape that fits, at its largest depth, with the two largest numbers of parts that fill one wave of
        CTAs.
        """
        tiles = max(1, 1 << (-(-p.n // 8) - 1).bit_length())
        for warps, ms, resident in SHAPES:
            free = (p.card.smem_bytes + RESERVED) // resident - RESERVED
            one = Config(warps, ms, 1, 1, resident, tiles, p.dtype == "fp16")
            depth = min(DEEPEST, free // one.smem)
            if depth < 2:
                continue
            slots, each = resident * p.card.sm_count, -(-p.m // one.tm)
            waves = [n for n in (2, 4) if each * n <= slots and warps * n <= p.k // STEP]
            for parts in [1, *waves][-2:]:
                yield replace(one, parts=parts, depth=depth)

    def seconds(self, p: SpmmProblem, c: Config) -> float:
        """Launch, begin and end, and the longer of two: compulsory bytes at 90 % of copy bandwidth; on the fullest
        SM, its bytes at its bytes in flight per latency. Within 8 % for 16 tokens of three layers (H200, 2026-11-23).
        """
        sms, share = p.card.sm_count, p.card.bandwidth / p.card.sm_count
        each = -(-(-(-p.m // c.tm) * c.parts) // sms)  # CTAs of the fullest SM
        pieces = c.parts * c.warps
        steps = -(-p.k // (STEP * pieces)) * c.warps
        gathers = 0 if p.b.layout == "col" and p.aligned else steps // c.warps * c.tiles * GATHER_SECONDS
        under_way = min(each, c.resident) * c.warps * c.depth * c.step_bytes
        rate = min(under_way / LATENCY_SECONDS, 2 * share)
        # Every item of a batch reads all of A.
        one = p.compulsory_bytes - p.dense_bytes + p.dense_bytes / max(1, p.batch)
        moved = one / (0.9 * p.card.bandwidth)
        waves = -(-each // c.resident)
        busy = each * steps * c.step_bytes / rate + (waves - 1) * PHASE_SECONDS + waves * gathers
        return max(1, p.batch) * (DRIVER_LAUNCHES * p.card.launch_seconds + START_SECONDS + max(busy, moved))

    def prepare(self, p: SpmmProblem, c: Config, a: Semi24) -> None:
        """Loads the kernel on a GPU."""
        if a.values.is_cuda:
            with torch.cuda.device_of(a.values):
                nvrtc.loaded(PROGRAM, c, a.values.device.index)

    def launch(
        self, c: Config, work: None, a: Semi24, b: Tensor, out: Tensor, epilogue: Epilogue = PLAIN
    ) -> None:
        """Computes C into `out` [..., M, N] from `b` [..., K, N], strides as they are; no sync, no allocation."""
        if out.numel() == 0:
            return
        index = b.device.index
        if index != torch.cuda.current_device():
            with torch.cuda.device(index):
                return self.launch(c, work, a, b, out, epilogue)
        driver.enter(index)  # in a new thread torch may not have set a context yet
        function, grid = nvrtc.loaded(PROGRAM, c, index), -(-a.shape[0] // c.tm) * c.parts
        for at in np.ndindex(*b.shape[:-2]):
            other = None if epilogue.other is None else epilogue.other[at]
            one = Epilogue(
                epilogue.alpha, epilogue.bias, epilogue.activation, other, epilogue.combine, epilogue.beta
            )
            params: Any = launch_params(a, b[at], out[at], one)
            launch_cuda(function, grid, 32 * c.warps, c.smem, index, (params,), ())


KERNEL: SpmmKernel = HopperSemi24Skinny()
