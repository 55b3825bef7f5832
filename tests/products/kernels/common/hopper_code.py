"""What the tests of Hopper's matrix products share: what compiled code must show, and memory behind TMA in numpy."""

import re
from collections.abc import Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sparsek.core.device import H200
from sparsek.products.formats.bsr import BSR
from sparsek.products.kernels.sddmm import hopper as sddmm
from sparsek.products.kernels.spmm import hopper as spmm
from sparsek.products.kernels.spmm import hopper_fp8 as spmm_fp8
from sparsek.products.kernels.spmm.multiply import owned_boxes, owned_rows
from tests.engine.launch import newest
from tests.engine.launch.hopper_code import Code, compiled
from tests.problems import changed

# Sides of a large product, and where it runs.
LARGE: dict[str, Any] = {"m": 8192, "k": 8192, "n": 8192, "dtype": "bf16", "card": H200}
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


def check_limits(c: Any, columns: int) -> None:
    """What the card allows a config; `columns` are the most of B in a box."""
    assert c.ctas_per_sm * (c.smem_bytes + 1024) <= SMEM_PER_SM, c
    assert 2 <= c.stages <= 12, c
    assert max(c.rows, c.c_box, columns) <= 256, "a TMA box has at most 256 rows"
    assert c.height % c.c_box == 0, c
    assert all(c.height > 64 * w for w in range(c.wg_m)), "every warpgroup owns rows"
    assert c.stage_bytes < 2**20, "a barrier counts less than 1 MB"


def fields_of(**more: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Values of the fields that configs of hopper.spmm and hopper.spmm_fp8 share, and `more`."""
    flags = ("a_col", "b_col", "c_col", "bias", "has_alpha", "slope", "preload", "split", "direct")
    return {
        "wg_m": st.sampled_from((1, 2)),
        "wg_n": st.sampled_from((1, 2)),
        "cols": st.sampled_from((16, 32, 64, 128, 256)),
        "width": st.sampled_from((16, 32, 64)),
        "pieces": st.sampled_from((1, 2, 4)),
        "stages": st.integers(2, 12),
        "joined_rows": st.sampled_from((1, 2, 4, 8)),
        **dict.fromkeys(flags, st.booleans()),
        "activation": st.sampled_from(("", "relu", "gelu", "gelu_tanh", "silu")),
        "combine": st.sampled_from(("", "add", "mul")),
        "every": st.integers(0, 9),
        "box": st.sampled_from((16, 32, 64)),
        "held": st.sampled_from((0, 32, 64)),
        **more,
    }


def check_texts(config: Any, fields: dict[str, st.SearchStrategy[Any]], data: st.DataObject) -> None:
    """Triton keeps compiled kernels by the text of their constants: two configs with one text ran one kernel."""
    assert set(fields) == {field.name for field in dataclass_fields(config)}
    c, name = data.draw(st.builds(config, **fields)), data.draw(st.sampled_from(sorted(fields)))
    other = replace(c, **{name: data.draw(fields[name])})
    assert (str(c) == str(other)) == (c == other)
    assert repr(c) == str(c)


def check_batches(kernel: Any, one: Any) -> None:
    """Eight items are predicted as eight launches, which do not share one round of tiles."""
    c = kernel.default(one)
    assert 7.5 < kernel.seconds(changed(one, batch=8), c) / kernel.seconds(one, c) < 8.1
    assert kernel.seconds(changed(one, batch=0), c) > 0


def boxes_of(c: Config, wg: int) -> list[tuple[int, int]]:
    """Row and column, in the part of warpgroup `wg`, of each box of C that it owns, in the order they leave in."""
    count, rows = (int(found(c, wg)) for found in (owned_boxes, owned_rows))
    return [(box % rows * c.c_box, box // rows * c.panel) for box in range(count)]


def leave(c: Any, tile: np.ndarray, row: int, col: int, memory: "Memory") -> None:
    """Writes what the warpgroups own of a tile of C, whose memory may lie by columns."""
    for wg in range(c.wg_m * c.wg_n):
        row0, col0 = 64 * (wg % c.wg_m), c.cols * (wg // c.wg_m)
        for r, along in boxes_of(c, wg):
            at = row0 + r, col0 + along
            part = tile[at[0] : at[0] + c.c_box, at[1] : at[1] + c.panel]
            where = row + at[0], col + at[1]
            memory.write(where[::-1] if c.c_col else where, part.T if c.c_col else part)


def merged(c: Any, parts: Any, sums: np.ndarray, out: np.ndarray) -> np.ndarray:
    """C, as `out` lies, once the parts of split rows are added up."""
    product = out.T if c.c_col else out
    if parts is not None:
        for first, slots, row, col in parts.table.tolist():
            own = sums[[first + s * parts.columns for s in range(slots)]]
            Memory(product).write((row, col), own.sum(0)[: c.height])
        assert not np.isnan(sums[:, : c.height]).any(), "a slot has no part"
    return product


def walked(
    c: Any, a: BSR, b: np.ndarray, m: int, n: int, work: Any, stretch: np.ndarray | None = None
) -> np.ndarray:
    """A kernel's index arithmetic, tile by tile, in numpy, and after it that of `merge_parts`. Returns C.

    `stretch`, of FP8, has a scale for each stored block.
    """
    tiles, starts, cols = (x.numpy() for x in (work.tiles, work.starts, work.cols))
    blocks = np.arange(len(cols)) if stretch is not None else work.blocks.numpy().ravel()
    nnzb, (bm, bk) = a.nnzb, c.block
    values = Memory(a.values.numpy().reshape(-1, a.values.shape[2]))
    dense, out = Memory(b.T if c.b_col else b), np.full((n, m) if c.c_col else (m, n), np.nan)
    c_mem, at_once = Memory(out), c.pieces if stretch is None else c.promote or c.pieces
    sums = np.full((work.parts.slots if work.parts else 0, c.rows, c.block_cols), np.nan)
    assert len(tiles) == starts[-1] + 2, "two records to spare for the read ahead"
    for t in range(starts[-1]):
        begin, end, row, col, b_col, slot, a_row, back = (int(x) for x in tiles[t])
        total = np.zeros((c.rows, c.block_cols))
        count = (end - begin) * c.per_block
        for first in range(0, -(-count // c.pieces) * c.pieces, at_once):
            acc = np.zeros_like(total)
            for q in range(first, first + at_once):
                inside = q < count
                step, k = begin + q // c.per_block, q % c.per_block * c.width
                step = begin + end - 1 - step if back and stretch is None else step
                j = int(cols[step]) if inside else a.grid[1]
                a_part = np.full((c.rows, c.width), np.nan)
                if c.a_col:
                    for w in range(c.wg_m):
                        s = int(blocks[step]) if inside else nnzb
                        box = values.read((s * bk + k, a_row + w * 64), (c.width, 64))
                        a_part[64 * w : 64 * w + 64] = box.T
                else:
                    for r in range(c.joined_rows):
                        s = int(blocks[step * c.joined_rows + r]) if inside else nnzb
                        box = values.read((s * bm + a_row, k), (c.a_box, c.width))
                        a_part[r * c.a_box : (r + 1) * c.a_box] = box
                at, sides = (j * bk + k, b_col), (c.width, c.block_cols)
                acc += a_part @ (dense.read(at[::-1], sides[::-1]).T if c.b_col else dense.read(at, sides))
            step = begin + first // c.per_block
            if stretch is not None and c.a_scale == "block":
                acc *= stretch[step] if step < end else 0.0
            total += acc
        if slot >= 0:
            assert np.isnan(sums[slot]).all(), "a slot has two parts"
            sums[slot] = total
            continue
        leave(c, total, row, col, c_mem)
    return merged(c, work.parts, sums, out)


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
