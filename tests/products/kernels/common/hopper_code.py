"""What the tests of Hopper's matrix products share: what compiled code must show, and memory behind TMA in numpy."""

import re
from collections.abc import Sequence

import numpy as np

from sparsek.products.kernels.sddmm import hopper as sddmm
from sparsek.products.kernels.spmm import hopper as spmm
from sparsek.products.kernels.spmm import hopper_fp8 as spmm_fp8
from sparsek.products.kernels.spmm.multiply import owned_boxes, owned_rows
from tests.engine.launch import newest
from tests.engine.launch.hopper_code import Code, compiled

Config = spmm.Config | spmm_fp8.Config | sddmm.Config
SMEM_PER_BLOCK = 227 << 10  # what one CTA may have on sm_90
SMEM_PER_SM = 228 << 10  # what all CTAs of an SM share, 1 KB of each for the system
REGISTERS = 65536
# ptxas keeps uniform registers in others around the loads of hopper.sddmm's 16 boxes, among them halves of addresses
# that are still undefined: they come back and are overwritten before TMA reads them (seen in SASS, 2026-11-21).
SAVED = re.compile(r": MOV R\d+, UR\d+ reads UR\d+$")


def check_code(c: Config, dtype: str, code: Code, stack: int = 0, spills: int = 0) -> None:
    """What every compiled kernel must show. `stack` and `spills` are bounds, in bytes."""
    where = f"{c} in {dtype}:\n{code}"
    groups = c.wg_m * c.wg_n
    if isinstance(c, spmm_fp8.Config):
        a, b, _ = dtype.split()
        name, one_stage = f"m64n{c.chunk}k32.f32.{a}.{b}", c.pieces * c.chunks * c.width // 32
        waits = [0, *[c.promote] * (c.chunks > 1)] if c.promote else [c.pieces]
    else:
        kind = {"bf16": "bf16", "fp16": "f16"}[dtype]
        name, one_stage, waits = f"m64n{c.cols}k16.f32.{kind}.{kind}", c.pieces * c.width // 16, [c.pieces]
    assert code.wgmma == [f"wgmma.mma_async.sync.aligned.{name}"], where
    assert code.wgmma_count % one_stage == 0, where
    assert code.wgmma_count >= groups * one_stage, where
    assert any(".shared::c" in copy and "complete_tx" in copy for copy in code.copies), (
        f"no TMA load: {where}"
    )
    stores = any(".global.shared::cta" in copy for copy in code.copies)
    assert stores != c.direct, f"boxes leave by TMA unless they leave directly: {where}"
    assert set(waits) <= set(code.waits), f"what should stay in flight does not: {where}"
    assert "serialized" not in code.log, where
    assert "warning" not in code.log, where
    assert "Potential Performance Loss" not in code.log, where
    assert code.stack <= stack, where
    assert code.spills <= spills, where
    assert [] == code.mixed == code.fixed_bounds, where
    assert code.early == [], where
    assert [found for found in code.unwritten if not SAVED.search(found)] == [], where
    assert code.shared <= SMEM_PER_BLOCK, where
    assert c.ctas_per_sm * (code.shared + 1024) <= SMEM_PER_SM, where
    assert code.shared <= c.smem_bytes <= code.shared + 2048, f"smem_bytes says {c.smem_bytes}: {where}"
    assert c.ctas_per_sm * code.registers * 32 * code.warps <= REGISTERS, where


def check_code_of_next(cases: Sequence[tuple[Config, str]]) -> None:
    """The same of code that the newest Triton makes of `cases`. Its machine code is not read."""
    codes = newest.calls(compiled, [(c, dtype, False) for c, dtype in cases])
    for (c, dtype), code in zip(cases, codes, strict=True):
        # ptxas of CUDA 13.4 spills 52 bytes where fp16 has every part of an epilogue and rows are split (2026-11-21).
        fullest = dtype == "fp16" and c.bias and c.has_alpha and c.split and c.activation and c.combine
        held = isinstance(c, spmm.Config) and c.held > 0  # 8 bytes spilled (2026-11-26)
        # 8 bytes spilled, 20 read again (2026-11-26).
        summed = isinstance(c, spmm_fp8.Config) and c.chunks > 1
        allowed = (16, 64) if fullest else (8, 8) if held else (8, 24) if summed else (0, 0)
        check_code(c, dtype, code, *allowed)


def boxes_of(c: Config, wg: int) -> list[tuple[int, int]]:
    """Row and column, in the part of warpgroup `wg`, of each box of C that it owns, in the order they leave in."""
    count, rows = (int(found(c, wg)) for found in (owned_boxes, owned_rows))
    return [(box % rows * c.c_box, box // rows * c.panel) for box in range(count)]


class Memory:
    """An array behind TMA: reads give zeros outside it, writes there are dropped."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def read(self, at: Sequence[int], box: Sequence[int]) -> np.ndarray:
        """What a box that begins at `at` brings."""
        found = np.zeros(box)
        part = self.array[
            tuple(slice(max(first, 0), first + side) for first, side in zip(at, box, strict=True))
        ]
        found[tuple(slice(0, side) for side in part.shape)] = part
        return found

    def write(self, at: Sequence[int], box: np.ndarray) -> None:
        """Writes what of `box` lies inside."""
        part = self.array[
            tuple(slice(first, first + side) for first, side in zip(at, box.shape, strict=True))
        ]
        part[...] = box[tuple(slice(0, side) for side in part.shape)]
