"""hopper.spmm_mma without a GPU: its lists read as the kernel reads them, machine code, predictions."""

from typing import Any

import numpy as np
import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.products.formats.bsr import BSR
from sparsek_bench.engine.sources import counted
from tests.problems import changed

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import OPTIONS
from sparsek.products.kernels.spmm import hopper_mma as mma
from sparsek.products.kernels.spmm.hopper_mma import (
    COLS,
    DEPTH,
    KERNEL,
    PROGRAM,
    ROWS,
    SPARE,
    WARPS,
    Config,
    lists_of,
)  # fmt: skip
from sparsek.products.kernels.spmm.pairs import WINDOW
from tests.attn.kernels.planned import problem
from tests.engine.launch import sass
from tests.products.kernels.spmm import hopper_24_code as code

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
SHAPES = (
    (1000, 1016, 0.2, "powerlaw"),
    (640, 512, 0.1, "uniform"),
    (16, 48, 0.5, "uniform"),
    (16 * (WINDOW + 3), 256, 0.1, "powerlaw"),
    (8144, 8144, 0.02, "banded"),
    (4096, 4096, 0.003, "powerlaw"),
    (48, 4112, 1.0, "uniform"),
)


def matrix(m: int, k: int, density: float, spread: Any = "powerlaw") -> BSR:
    return sk.random_bsr(m, k, 16, density, pattern=spread, dtype=torch.bfloat16, seed=m + k)


def prepared(a: BSR, n: int) -> Any:
    p = changed(problem(a, torch.empty(a.shape[1], n, dtype=torch.bfloat16)), card=H200)
    return KERNEL.prepare(p, KERNEL.default(p), a)


def walked(work: Any, a: BSR, col: int) -> dict[int, list[tuple[int, int]]]:
    """(block column, stored block) of each block row, as warps meet them in the tiles at column `col` of C."""
    tiles, rows, order = work.tiles.tolist(), work.rows.tolist(), work.order.tolist()
    slots, begins = work.slots.tolist(), work.begins.tolist()
    masks = work.masks.numpy().view(np.uint32)
    found: dict[int, list[tuple[int, int]]] = {}
    for first, end, unit, at in tiles[:-1]:
        if at != col:
            continue
        for warp in range(WARPS):
            stream = iter(order[begins[unit * WARPS + warp] : begins[unit * WARPS + warp + 1]])
            for r in range(ROWS):
                if rows[unit][warp][r] < a.shape[0]:
                    assert rows[unit][warp][r] not in found, "a block row has two warps"
                    found[rows[unit][warp][r]] = []
            for slot in range(first, end):
                for bit in range(ROWS * DEPTH):
                    if int(masks[warp, slot]) >> (31 - bit) & 1:
                        column, r = slots[slot] // 16 + bit // ROWS, bit % ROWS
                        found[rows[unit][warp][r]].append((column, next(stream)))
            assert next(stream, None) is None, "the masks have as many blocks as the stream"
    return found


@pytest.mark.parametrize("turned", [False, True], ids=["A", "A.T"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_lists_multiply_every_block_once_and_read_only_needed_slots(shape: Any, turned: bool) -> None:
    a = matrix(*shape).T if turned else matrix(*shape)
    work = prepared(a, 200)
    tiles, starts = work.tiles.tolist(), work.starts.tolist()
    units = {(unit, col) for _, _, unit, col in tiles[:-1]}
    assert units == {(unit, col) for unit in range(len(work.rows)) for col in range(0, 200, COLS)}
    assert len(units) == len(tiles) - 1 == starts[-1]
    indptr, indices = a.pattern.host
    places = np.arange(a.nnzb) if a.order is None else a.order.numpy()
    for col in (0, 192):
        found = walked(work, a, col)
        assert sorted(found) == list(range(0, 16 * a.grid[0], 16))
        for row in range(a.grid[0]):
            own = slice(*indptr[row : row + 2].tolist())
            assert found[16 * row] == list(zip(indices[own].tolist(), places[own].tolist(), strict=True))
    used = work.masks.numpy().view(np.uint32)[:, :-SPARE]
    assert (used != 0).any(0).all(), "a slot that no warp needs is not read"
    assert work.masks.shape[1] == len(work.slots)
    assert max(end for _, end, _, _ in tiles) + SPARE == len(work.slots), "a warp reads 32 masks at once"


def test_units_of_a_band_are_neighbours_and_those_of_uneven_rows_are_equally_long() -> None:
    band = lists_of(matrix(8192, 8192, 0.02, "banded").pattern)
    assert (band.end - band.first).max() <= 6, "32 block rows of a band need few slots"
    uneven = lists_of(matrix(8192, 8192, 0.1).pattern)
    counts = np.diff(uneven.begins).reshape(-1, WARPS)
    assert counts.max(1).sum() <= 1.2 * counts.mean(1).sum(), "the longest has 512 blocks, the mean 51"


CONFIGS = [
    Config(),
    Config(b_row=False, c_col=True, half=True, has_alpha=True, bias=True, activation="gelu"),
    Config(a_col=True, b_row=False, c_col=True, bias=True, activation="silu"),
    Config(a_col=True, has_alpha=True, activation="relu"),
]


@needs_nvrtc
@pytest.mark.parametrize("c", CONFIGS, ids=str)
def test_machine_code(c: Config) -> None:
    text, log = code.disassembled(PROGRAM.source, PROGRAM.path.name, [*OPTIONS, *c.defines])
    program = sass.parsed(text)
    opcodes = [each.opcode for each in program.code]
    products = [each for each in opcodes if "MMA" in each]
    assert set(products) == {"HMMA.16816.F32" + ("" if c.half else ".BF16")}
    assert len(products) == 8 * ROWS, "each once, in one loop"
    assert code.SPILLS.search(log)[0].startswith("0 bytes stack frame, 0 bytes spill stores, 0"), log  # type: ignore[index]
    assert not [each for each in opcodes if each.startswith(("LDL", "STL"))]
    assert "Used 96 registers" in log, "setmaxnreg counts on what 640 threads begin with"
    assert sass.unwritten(program) == []


def test_shared_memory_is_full_of_slots() -> None:
    a = matrix(256, 256, 0.5)
    p = changed(problem(a, torch.empty(256, 256, dtype=torch.bfloat16)), card=H200)
    (c,) = KERNEL.configs(p)
    assert H200.smem_bytes - mma.SLOT_BYTES - 16 < c.smem <= H200.smem_bytes


def test_the_tile_counts_where_measurements_name_their_source() -> None:
    names = {name for name, _ in counted("hopper.spmm_mma")}
    assert {"COLS", "WARPS", "THREADS", "Config", "hopper_mma.cu"} <= names


@pytest.mark.parametrize("layer", [False, True], ids=["A @ B", "x @ W.T"])
def test_the_planner_takes_it_for_blocks_of_16_and_many_columns(layer: bool) -> None:
    a = matrix(8192, 8192, 0.125, "uniform")

    def chosen(n: int) -> str:
        b = torch.empty(n, 8192, dtype=torch.bfloat16).mT
        return sk.plan_spmm(a, b if layer else b.contiguous(), device="h200").kernel

    assert chosen(8192) == "hopper.spmm_mma"
    assert chosen(16) != "hopper.spmm_mma", "a tile has 64 columns"
