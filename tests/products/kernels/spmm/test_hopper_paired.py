"""hopper.spmm_paired without a GPU: its lists read as the kernel reads them, machine code, predictions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import sparsek as sk
from sparsek.core.device import H200
from sparsek.products.formats.bsr import BSR
from sparsek_bench.engine.sources import counted
from tests.problems import changed, spmm_problem

pytest.importorskip("triton")  # its nvdisasm reads the code

from sparsek.engine.launch import nvrtc
from sparsek.engine.launch.nvrtc import OPTIONS
from sparsek.products.kernels.spmm import hopper_paired as paired
from sparsek.products.kernels.spmm.hopper_paired import COLS, KERNEL, PROGRAM, Config, Work
from sparsek.products.kernels.spmm.pairs import WINDOW, matched, pairs_of
from tests.attn.kernels.planned import problem
from tests.engine.launch import sass
from tests.products.kernels.spmm import hopper_24_code as code

needs_nvrtc = pytest.mark.skipif(nvrtc.library() is None, reason="NVRTC is not here (nvidia-cuda-nvrtc)")
SHAPES = (
    (1000, 1016, (16, 16), 0.2, "powerlaw"),
    (640, 512, (32, 16), 0.1, "uniform"),
    (1000, 512, (64, 64), 0.4, "uniform"),
    (64, 512, (64, 32), 0.5, "uniform"),
    (16, 48, (16, 16), 0.5, "uniform"),
    (16 * (WINDOW + 3), 256, (16, 64), 0.1, "powerlaw"),
    (8144, 8144, (16, 16), 0.02, "banded"),
)


def matrix(m: int, k: int, block: tuple[int, int], density: float, spread: Any = "powerlaw") -> BSR:
    return sk.random_bsr(m, k, block, density, pattern=spread, dtype=torch.bfloat16, seed=m + k)


def prepared(a: BSR, joined: int, n: int = 1024) -> tuple[Config, Work]:
    p = changed(problem(a, torch.empty(a.shape[1], n, dtype=torch.bfloat16)), card=H200)
    c = next(c for c in KERNEL.configs(p) if c.joined == joined)
    return c, KERNEL.prepare(p, c, a)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("joined", [1, 2, 4])
def test_the_lists_multiply_every_block_once_and_share_equal_steps_only(shape: Any, joined: int) -> None:
    a = matrix(*shape)
    (bm, bk), (rows, columns) = a.block, a.grid
    if joined * bm > 64:
        pytest.skip("a tile has 64 rows")
    _, work = prepared(a, joined)
    steps, tiles, starts = work.steps.numpy(), work.tiles.tolist(), work.starts.tolist()
    found: dict[int, list[tuple[int, int]]] = {row: [] for row in range(rows)}
    units = {(pair, col) for _, _, pair, col in tiles[:-1]}
    pairs = len(work.rows)
    assert units == {(pair, col) for pair in range(pairs) for col in range(0, 1024, COLS)}
    assert len(units) == len(tiles) - 1, "a tile comes twice"
    assert starts[-1] == len(tiles) - 1
    for first, end, pair, col in tiles[:-1]:
        assert 0 <= first <= end <= steps.shape[1] - paired.SPARE, "a warp reads 32 steps at once"
        if col:
            continue
        for rank, at in np.ndindex(2, end - first):
            entry = steps[rank, first + at]
            if entry[0] < 0:
                assert entry[0] == steps[1 - rank, first + at, 0], (
                    "both CTAs load their half of the same rows of B"
                )
            column = int(~entry[0] if entry[0] < 0 else entry[0])
            for j in range(joined):
                if entry[1 + j] < a.nnzb:
                    found[int(work.rows[pair, rank, j]) // bm].append((column, int(entry[1 + j])))
                    assert column < columns
                else:
                    assert entry[1 + j] == a.nnzb, "outside of A, where TMA reads zeros"
            if (entry[1 : 1 + joined] == a.nnzb).all():
                assert column * bk >= a.shape[1], "nothing is multiplied by rows of B that no block needs"
    indptr, indices = a.pattern.host
    for row in range(rows):
        own = range(*indptr[row : row + 2].tolist())
        assert sorted(found[row]) == [(int(indices[q]), q) for q in own]
    stored = work.rows[work.rows < rows * bm].tolist()
    assert sorted(stored) == list(range(0, rows * bm, bm)), "every block row of C is stored once"


def test_rows_that_share_columns_are_found() -> None:
    kinds = np.random.default_rng(0).random((8, 100)) < 0.3
    has = np.repeat(kinds, 4, 0)[np.random.default_rng(1).permutation(32)]
    for first, second in matched(has):
        assert (has[first] == has[second]).all()
    assert matched(has[:5])[-1, 1] == -1, "an odd row stays alone"


def test_equal_rows_pair_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, whole = [], np.ix_
    monkeypatch.setattr(np, "ix_", lambda *at: rounds.append(len(at[0])) or whole(*at))
    assert matched(np.ones((512, 64), np.bool_)).tolist() == [[i, i + 1] for i in range(0, 512, 2)]
    assert rounds == [512]


@pytest.mark.parametrize(("size", "density"), [(8192, 0.02), (8144, 0.02), (4096, 0.05), (2048, 0.1)])
@pytest.mark.parametrize("joined", [1, 2, 4])
def test_the_ends_of_a_band_are_not_paired(joined: int, size: int, density: float) -> None:
    a = matrix(size, size, (16, 16), density, "banded")
    pairs = pairs_of(a.pattern, joined)
    steps = pairs.end - pairs.begin
    assert steps.max() <= 1.3 * steps.mean()
    loads = (pairs.cols >= 0).sum() - pairs.shared.sum()
    assert loads <= a.nnzb, "neighbours share nearly all columns"


@pytest.mark.parametrize(("side", "joined", "most"), [(64, 1, 0.87), (32, 2, 0.76), (16, 4, 0.62)])
def test_an_eighth_of_blocks_at_random_needs_less_of_b(side: int, joined: int, most: float) -> None:
    a = matrix(8192, 8192, (side, side), 0.125, "uniform")
    pairs = pairs_of(a.pattern, joined)
    loads = int((pairs.cols >= 0).sum() - pairs.shared.sum())
    assert loads <= most * a.nnzb
    p = changed(problem(a, torch.empty(8192, 512, dtype=torch.bfloat16)), card=H200)
    assert paired.columns_needed(p, 2 * joined) == pytest.approx(loads, rel=0.05)


CONFIGS = [
    Config((64, 64), 1), Config((32, 32), 2), Config((16, 16), 4),
    Config((64, 32), 1, b_row=False, c_col=True, half=True, has_alpha=True, bias=True, activation="gelu"),
    Config((32, 16), 2, b_row=False, c_col=True, bias=True, activation="silu"),
    Config((16, 64), 4, b_row=False, c_col=True, bias=True, activation="relu"),
]  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("c", CONFIGS, ids=lambda c: f"{c.block[0]}x{c.block[1]}{c.activation}")
def test_machine_code(c: Config) -> None:
    c = c.deepened(H200.smem_bytes)
    text, log = code.disassembled(PROGRAM.source, PROGRAM.path.name, [*OPTIONS, *c.defines])
    program = sass.parsed(text)
    opcodes = [each.opcode for each in program.code]
    products = [each for each in opcodes if each.startswith("HGMMA")]
    kind = "F32" if c.half else "F32.BF16"
    assert set(products) == {f"HGMMA.64x256x16.{kind}"}
    assert len(products) == c.slice // 16, "each once, in one loop"
    assert sum("MULTICAST" in each for each in opcodes) > 0
    assert code.SPILLS.search(log)[0].startswith("0 bytes stack frame, 0 bytes spill stores, 0"), log  # type: ignore[index]
    assert not [each for each in opcodes if each.startswith(("LDL", "STL"))]
    assert "serialized" not in log, log
    assert sass.unwritten(program) == []
    assert c.smem <= H200.smem_bytes


def test_a_launch_holds_its_lists_and_not_the_values_of_a(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded call keeps what a launch holds. A's values are an operand, whose address follows each call."""
    given: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU
    monkeypatch.setattr(paired.driver, "enter", lambda index: None)
    monkeypatch.setattr(paired.nvrtc, "loaded", lambda program, c, index: None)
    monkeypatch.setattr(paired, "launch_cuda", lambda *args: given.append(args))
    a = matrix(128, 128, (32, 32), 0.5)
    c, work = prepared(a, 1)
    b = torch.empty(2, 128, 1024, dtype=torch.bfloat16)
    KERNEL.launch(c, work, a, b, torch.empty_like(b))
    assert len(given) == 2, "one for each item of the batch"
    for *_, (of_b, of_c, params), held in given:
        assert params.values == a.values.data_ptr()
        assert of_b.pointer != of_c.pointer
        assert {id(each) for each in held} == {id(each) for each in work if isinstance(each, torch.Tensor)}


def test_the_tile_counts_where_measurements_name_their_source() -> None:
    names = {name for name, _ in counted("hopper.spmm_paired")}
    assert {"COLS", "CLUSTER", "THREADS", "Config", "hopper_paired.cu"} <= names


@pytest.mark.parametrize(("side", "density"), [(16, 0.03), (32, 0.125), (64, 0.125)])
def test_the_planner_takes_it_for_low_blocks_and_many_columns(side: int, density: float) -> None:
    a = matrix(8192, 8192, (side, side), density, "uniform")

    def chosen(n: int) -> str:
        return sk.plan_spmm(a, torch.empty(8192, n, dtype=torch.bfloat16), device="h200").kernel

    assert chosen(8192) == "hopper.spmm_paired"
    assert chosen(64) != "hopper.spmm_paired", "a tile has 512 columns"


def test_every_item_of_a_batch_has_a_last_round_of_its_own() -> None:
    """16 pairs of tiles on 66 clusters: eight launches of them take eight times as long as one, not twice."""
    one = spmm_problem(1024, 2048, 512, (32, 32), 1024, "bf16", H200)
    c = next(c for c in KERNEL.configs(one) if c.joined == 1)
    assert KERNEL.seconds(changed(one, batch=8), c) == pytest.approx(8 * KERNEL.seconds(one, c), rel=0.01)


def test_lines_arrive_as_slowly_as_the_fabric_of_the_card() -> None:
    """Of a column-major B in blocks of 16, lines of 32 bytes are all that counts."""
    p = spmm_problem(8192, 8192, 8192, (16, 16), 32768, "bf16", H200, b_layout="col")
    p = changed(p, out_layout="col")
    c = next(c for c in KERNEL.configs(p) if c.joined == 4)
    slow = replace(H200, fabric=H200.fabric / 2)
    assert KERNEL.seconds(changed(p, card=slow), c) > 1.9 * KERNEL.seconds(p, c)
