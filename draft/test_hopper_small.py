"""hopper.spmm_small without a GPU: its lists read as the kernel reads them, machine code, limits and reasons."""

from typing import Any

import numpy as np
import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.matrix.bsr import BSR
from tests.problems import changed

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.kernels.lang import nvrtc
from sparsek.kernels.spmm import hopper_small as small
from sparsek.kernels.spmm.hopper_small import KERNEL, PARTS, ROWS, SKIPPED, SOURCE, WARPS, Config
from tests.kernels.lang import sass
from tests.kernels.planned import problem
from tests.kernels.spmm import hopper_24_code as code

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
CONFIGS = [
    Config((bm, bk), b_row, c_col, half)
    for bm, bk, b_row, c_col, half in (
        (16, 16, True, False, False), (16, 16, False, True, True), (32, 32, True, False, True),
        (32, 32, False, True, False), (16, 32, True, True, False), (32, 16, False, False, False),
    )
]  # fmt: skip


def matrix(m: int, k: int, block: tuple[int, int], density: float, spread: Any = "powerlaw") -> BSR:
    return sk.random_bsr(m, k, block, density, pattern=spread, dtype=torch.bfloat16, seed=m + k)


def blocks_read(a: BSR, work: small.Work, c: Config) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For the first row of C of every warp of every tile, with the tile's column: the block column and the part of A of
    every product, as the kernel reads the lists. Checks what it relies on."""
    tiles, cols, places = work.tiles.tolist(), work.cols.numpy(), work.places.numpy()
    part_starts, parts = work.part_starts.tolist(), work.parts.numpy()
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for first, end, row, col in tiles[:-2]:
        for warp in range(WARPS):
            assert (row + 16 * warp, col) not in found, "a tile comes twice"
            found[row + 16 * warp, col] = []
        for stage in range(first, end):
            count = part_starts[stage + 1] - part_starts[stage]
            assert 1 <= count <= PARTS
            for piece in range(c.pieces):
                at = places[stage, :, piece]
                for slab in at.reshape(-1, 4):
                    assert (slab == SKIPPED).all() or (slab >= 0).any(), "a slab multiplies nothing but zeros"
                    assert (slab != SKIPPED).all() or (slab == SKIPPED).all(), "all four warps or none"
                for warp in np.flatnonzero(at >= 0):
                    slot, rest = divmod(int(at[warp]), c.part_bytes)
                    assert rest == 0
                    assert slot < count
                    assert cols[stage, piece] >= 0
                    part = int(parts[part_starts[stage] + slot])
                    found[row + 16 * int(warp), col].append((int(cols[stage, piece]), part))
            assert sorted(at for at in places[stage].ravel() if at >= 0) == [
                slot * c.part_bytes for slot in range(count)
            ], "every part has a slot of its own"
    assert tiles[-2:] == [[0, 0, 0, 0]] * 2, "the kernel reads two tiles ahead"
    return found


@pytest.mark.parametrize("block", [(16, 16), (32, 32), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize(
    ("m", "k", "density", "spread"),
    [(1000, 1016, 0.2, "powerlaw"), (2048, 512, 0.01, "powerlaw"), (512, 512, 0.9, "uniform"), (16, 48, 0.5, "uniform")],
)  # fmt: skip
def test_every_warp_multiplies_the_blocks_of_its_rows_in_order(
    block: tuple[int, int], m: int, k: int, density: float, spread: Any
) -> None:
    a = matrix(m, k, block, density, spread)
    p = problem(a, torch.empty(k, 264, dtype=torch.bfloat16))
    c = KERNEL.default(changed(p, card=H200))
    work = KERNEL.prepare(changed(p, card=H200), c, a)
    found = blocks_read(a, work, c)
    indptr, indices = a.pattern.host
    split = block[0] // 16
    rows = range(0, -(-m // ROWS) * ROWS, 16)
    assert sorted(found) == [(row, col) for row in rows for col in range(0, 264, 128)]
    for (row, _), got in found.items():
        at, part = divmod(row // 16, split)
        own = range(*indptr[at : at + 2].tolist()) if at < a.grid[0] else range(0)
        assert got == [(int(indices[q]), q * split + part) for q in own]


def test_stages_end_where_there_is_no_room_for_the_parts_of_a_piece() -> None:
    a = matrix(256, 512, (16, 16), 1.0, "uniform")
    p = changed(problem(a, torch.empty(512, 128, dtype=torch.bfloat16)), card=H200)
    work = KERNEL.prepare(p, KERNEL.default(p), a)
    assert work.tiles[0].tolist() == [0, 32, 0, 0], "16 parts are those of one piece"
    assert (work.cols[:32, 1:] == -1).all()


@needs_nvrtc
@pytest.mark.parametrize(
    "c", CONFIGS, ids=lambda c: f"{c.block[0]}x{c.block[1]}{'-row' * c.b_row}{'-col' * c.c_col}"
)
def test_machine_code(c: Config) -> None:
    text, log = code.disassembled(
        SOURCE.read_text(encoding="utf-8"), SOURCE.name, [*small.OPTIONS, *c.defines]
    )
    program = sass.parsed(text)
    opcodes = [each.opcode for each in program.code]
    kind = "F32" if c.half else "F32.BF16"
    products = [each for each in opcodes if each.startswith("HGMMA.64x128")]
    assert set(products) == {f"HGMMA.64x128x16.{kind}"}
    assert len(products) == c.pieces * (c.block[1] // 16), "each once, in one loop"
    assert code.SPILLS.search(log)[0].startswith("0 bytes stack frame, 0 bytes spill stores, 0"), log
    assert not [each for each in opcodes if each.startswith(("LDL", "STL"))]
    assert "serialized" not in log, log
    assert sass.unwritten(program) == []
