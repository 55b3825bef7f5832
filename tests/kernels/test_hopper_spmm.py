"""hopper.spmm without a GPU: every config compiled for sm_90a, its schedule walked in numpy, its limits and reasons.

The pinned Triton compiles every config in this process: CASES. Only equal configs count as one; nothing is left out
because it is like another. The newest release takes twice as long. It compiles NEXT_CASES in its own environment: every
two values of fields that some config has together are in one of them.
"""

import json
import re
import subprocess
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import CPU, H200
from sparsek.formats.random import random_bsr
from sparsek.kernels import load
from sparsek.ops.spmm import plan_spmm
from sparsek.plan import schedule
from sparsek.plan.problem import SpmmProblem

pytest.importorskip("triton")

from sparsek.kernels.hopper.spmm import Config
from tests.house.tools import ROOT, next_python
from tests.kernels.covering import covering
from tests.kernels.hopper_code import Code, code_from, compiled, fields_of

KERNEL = load("hopper.spmm")
BLOCKS = (
    (128, 128),
    (64, 64),
    (32, 32),
    (16, 16),
    (256, 128),
    (512, 112),
    (48, 96),
    (80, 80),
    (192, 64),
    (16, 64),
    (128, 16),
)
SIDES = (16, 64, 200, 8192)
SMEM_PER_BLOCK = 227 << 10  # what one CTA may have on sm_90
SMEM_PER_SM = 228 << 10  # what all CTAs of an SM share, 1 KB of each for the system
REGISTERS = 65536


def problem(block: tuple[int, int], n: int, layout: str = "row", **more: object) -> SpmmProblem:
    """8192 x 8192, one block of eight stored, and every factor for merging that ops would offer."""
    stored = 8192 * 8192 // 8 // block[0] // block[1]
    factors = [r for r in (2, 4, 8) if block[0] in (16, 32, 64) and r * block[0] <= 128]
    fields = {
        "m": 8192,
        "k": 8192,
        "n": n,
        "block": block,
        "nnzb": stored,
        "dtype": "bf16",
        "card": H200,
        "row_max": 8192 // 8 // block[1],
        "b_layout": layout,
        "merged": tuple((r, int(stored * 0.94)) for r in factors),
    }
    return SpmmProblem(**fields | more)  # pyright: ignore[reportArgumentType]


PROBLEMS = [problem(block, n, layout) for block, n, layout in product(BLOCKS, SIDES, ("row", "col"))]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in [KERNEL.default(p), *KERNEL.configs(p)]))
DEFAULTS = list(dict.fromkeys(KERNEL.default(p) for p in PROBLEMS if p.n >= 64))
CASES = [*product(CONFIGS, ["bf16"]), *product(DEFAULTS[::4], ["fp16"])]
NEXT_CASES = covering(CASES, lambda case: (*fields_of(case[0]).items(), case[1]))
PARTS = 8  # of NEXT_CASES: one process compiles one part, and pytest-xdist deals them to its workers


def check_code(c: Config, dtype: str, code: Code) -> None:
    """What every compiled kernel must show."""
    where = f"{c} in {dtype} under Triton {code.triton}:\n{code}"
    groups = c.wg_m * c.wg_n
    kind = {"bf16": "bf16", "fp16": "f16"}[dtype]
    assert code.wgmma == [f"wgmma.mma_async.sync.aligned.m64n{c.cols}k16.f32.{kind}.{kind}"], where
    one_stage = c.pieces * c.width // 16
    assert code.wgmma_count % one_stage == 0, where
    assert code.wgmma_count >= groups * one_stage, where
    assert any(".shared::c" in copy and "complete_tx" in copy for copy in code.copies), (
        f"no TMA load: {where}"
    )
    assert any(".global.shared::cta" in copy for copy in code.copies), f"no TMA store: {where}"
    assert c.pieces in code.waits, f"no stage of wgmma stays in flight: {where}"
    assert "serialized" not in code.log, where
    assert "warning" not in code.log, where
    assert (code.stack, code.spills) == (0, 0), where
    assert code.shared <= SMEM_PER_BLOCK, where
    assert c.ctas_per_sm * (code.shared + 1024) <= SMEM_PER_SM, where
    assert code.shared <= c.smem_bytes <= code.shared + 2048, f"smem_bytes says {c.smem_bytes}: {where}"
    assert c.ctas_per_sm * code.registers * 32 * code.warps <= REGISTERS, where


@pytest.mark.parametrize(("c", "dtype"), CASES, ids=str)
def test_every_config_compiles_to_wgmma_and_tma_without_spills(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype))


@pytest.mark.parametrize("part", range(PARTS))
def test_the_newest_triton_compiles_configs_to_the_same(part: int) -> None:
    python, chosen = next_python(), NEXT_CASES[part::PARTS]
    wanted = json.dumps([[dtype, fields_of(c)] for c, dtype in chosen])
    script = str(Path(__file__).with_name("hopper_code.py"))
    done = subprocess.run(
        [python, "-W", "ignore", script],
        input=wanted,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    codes = [code_from(fields) for fields in json.loads(done.stdout)]
    pinned = (ROOT / "constraints-triton-next.txt").read_text().split("triton==")[1].split()[0]
    assert {code.triton for code in codes} == {pinned}
    for (c, dtype), code in zip(chosen, codes, strict=True):
        check_code(c, dtype, code)


FIELDS = {
    "block": st.sampled_from(BLOCKS),
    "wg_m": st.sampled_from((1, 2)),
    "wg_n": st.sampled_from((1, 2)),
    "cols": st.sampled_from((16, 32, 64, 128, 256)),
    "width": st.sampled_from((16, 32, 64)),
    "pieces": st.sampled_from((1, 2, 4)),
    "stages": st.integers(2, 12),
    "merge": st.sampled_from((1, 2, 4, 8)),
    "b_col": st.booleans(),
}
ANY_CONFIG = st.builds(Config, **FIELDS)


@given(ANY_CONFIG, st.sampled_from(sorted(FIELDS)), st.data())
def test_two_configs_never_share_a_text(c: Config, name: str, data: st.DataObject) -> None:
    """Triton keeps compiled kernels by the text of their constants: two configs with one text ran one kernel."""
    other = replace(c, **{name: data.draw(FIELDS[name])})
    assert (str(c) == str(other)) == (c == other)
    assert repr(c) == str(c)


def test_all_the_planners_configs_have_texts_of_their_own() -> None:
    assert len({str(c) for c in CONFIGS}) == len(CONFIGS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"card": replace(H200, name="NVIDIA A100", capability=(8, 0))},
            "needs a Hopper card .* NVIDIA A100",
        ),
        (
            {"card": replace(H200, name="NVIDIA B200", capability=(10, 0))},
            "needs a Hopper card .* NVIDIA B200",
        ),
        ({"card": CPU}, "needs a Hopper card .* cpu"),
        ({"dtype": "fp32"}, "multiplies bf16 and fp16, not fp32"),
        ({"dtype": "fp64"}, "multiplies bf16 and fp16, not fp64"),
        ({"transposed": True}, "transposed view"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"b_layout": "strided"}, "gaps between its elements"),
        ({"nnzb": 2**31 // 64}, "32 bits"),
        ({"m": 2**31 - 1}, "32 bits"),
        ({"k": 2**31 - 1}, "32 bits"),
        ({"n": 2**31 - 8}, "32 bits"),
        ({"n": 7}, "multiple of 8"),
    ],
)
def test_a_reason_names_what_is_in_the_way(change: dict[str, object], reason: str) -> None:
    assert KERNEL.why_not(problem((64, 64), 64)) == []
    (found,) = KERNEL.why_not(replace(problem((64, 64), 64), **change))
    assert re.search(reason, found), found


def test_every_reason_is_given_at_once() -> None:
    p = problem((64, 64), 64, card=CPU, dtype="fp32", transposed=True, aligned=False, m=2**31 - 1)
    assert len(KERNEL.why_not(p)) == 5


def test_a_b_with_gaps_is_left_to_other_kernels() -> None:
    a = random_bsr(128, 128, (32, 32), 0.5, dtype=torch.bfloat16, device="cpu", seed=0)
    strided = torch.ones(128, 512, dtype=torch.bfloat16)[:, ::8]
    why = next(c.why_not for c in plan_spmm(a, strided, device="h200").losers if c.name == "hopper.spmm")
    assert any("gaps" in reason for reason in why)


SIZES = st.integers(1, 512 // 16).map(lambda i: 16 * i)


@settings(max_examples=300)
@given(
    block=st.tuples(SIZES, SIZES),
    n=st.one_of(st.integers(0, 300), st.integers(0, 2**20)),
    layout=st.sampled_from(("row", "col")),
    merge=st.booleans(),
)
def test_every_config_fits_the_card(block: tuple[int, int], n: int, layout: str, merge: bool) -> None:
    p = problem(block, n, layout, nnzb=500)
    p = p if merge else replace(p, merged=())
    configs = list(KERNEL.configs(p))
    assert configs
    assert KERNEL.default(p) in configs
    for c in configs:
        assert c.ctas_per_sm * (c.smem_bytes + 1024) <= SMEM_PER_SM, c
        assert 2 <= c.stages <= 12, c
        assert c.block == block, c
        assert c.width * c.per_block == block[1], "a block is whole pieces"
        assert c.b_col == (layout == "col"), c
        assert max(c.a_box, c.c_box, c.cols) <= 256, "a TMA box has at most 256 rows"
        assert c.rows % c.a_box == 0, c
        assert c.merge == 1 or c.a_box * c.merge <= c.rows, c
        assert c.height % c.c_box == 0, c
        assert all(c.height > 64 * w for w in range(c.wg_m)), "every warpgroup owns rows"
        assert c.stage_bytes < 2**20, "a barrier counts less than 1 MB"


def test_the_default_is_the_config_with_the_smallest_prediction() -> None:
    for p in PROBLEMS:
        best = min(KERNEL.seconds(p, c) for c in KERNEL.configs(p))
        assert KERNEL.seconds(p, KERNEL.default(p)) == best
        assert best > p.compulsory_bytes / H200.bandwidth


class Memory:
    """A matrix behind TMA: reads give zeros outside it, writes there are dropped; unwritten shared memory is NaN."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def read(self, row: int, col: int, rows: int, cols: int) -> np.ndarray:
        box = np.zeros((rows, cols))
        part = self.array[max(row, 0) : row + rows, max(col, 0) : col + cols]
        box[: part.shape[0], : part.shape[1]] = part
        return box

    def write(self, row: int, col: int, box: np.ndarray) -> None:
        part = self.array[row : row + box.shape[0], col : col + box.shape[1]]
        part[:] = box[: part.shape[0], : part.shape[1]]


def simulated(
    c: Config, a_values: np.ndarray, b: np.ndarray, out: np.ndarray, work: tuple, grid_k: int
) -> None:
    """The kernel's index arithmetic, tile by tile, in numpy."""
    tiles, starts, cols, blocks = work
    nnzb, (bm, bk) = len(a_values), c.block
    a_mem, b_mem, c_mem = Memory(a_values.reshape(-1, bk)), Memory(b), Memory(out)
    assert len(tiles) == starts[-1] + 1, "one record to spare for the read ahead"
    for t in (t for first, last in pairwise(starts) for t in range(first, last)):
        begin, end, row, col = (int(x) for x in tiles[t])
        acc = np.zeros((c.rows, c.block_cols))
        count = (end - begin) * c.per_block
        for q in range(-(-count // c.pieces) * c.pieces):
            inside = q < count
            step, k = begin + q // c.per_block, q % c.per_block * c.width
            j = int(cols[step]) if inside else grid_k
            a_part = np.full((c.rows, c.width), np.nan)
            for r in range(c.merge):
                s = int(blocks[step, r]) if inside else nnzb
                box = a_mem.read(s * bm + (row % bm if bm > c.rows else 0), k, c.a_box, c.width)
                a_part[r * c.a_box : (r + 1) * c.a_box] = box
            acc += a_part @ b_mem.read(j * bk + k, col, c.width, c.block_cols)
        for w in range(c.wg_m * c.wg_n):
            row0, col0 = 64 * (w % c.wg_m), c.cols * (w // c.wg_m)
            high = min(64, c.height - row0) // c.c_box
            for box in range(high * (c.cols // c.panel)):
                panel, r = box // high, box % high
                at = (row0 + r * c.c_box, col0 + panel * c.panel)
                values = acc[at[0] : at[0] + c.c_box, at[1] : at[1] + c.panel]
                c_mem.write(row + at[0], col + at[1], values)


@settings(max_examples=150)
@given(
    block=st.sampled_from([*BLOCKS, (16, 48), (144, 32), (112, 16), (208, 16), (96, 64)]),
    rows=st.integers(1, 5),
    columns=st.integers(1, 5),
    cut=st.tuples(st.integers(0, 15), st.integers(0, 15)),
    n=st.sampled_from((1, 8, 16, 61, 130, 300)),
    density=st.sampled_from((0.1, 0.4, 1.0)),
    workers=st.sampled_from((1, 3, 8, 132)),
    data=st.data(),
)
def test_walking_the_schedule_as_the_kernel_does_gives_the_product(
    block: tuple[int, int],
    rows: int,
    columns: int,
    cut: tuple[int, int],
    n: int,
    density: float,
    workers: int,
    data: st.DataObject,
) -> None:
    m, k = rows * block[0] - cut[0], columns * block[1] - cut[1]
    a = random_bsr(m, k, block, density, pattern="powerlaw", dtype=torch.float64, device="cpu", seed=n)
    factors = [r for r in (2, 4, 8) if block[0] in (16, 32, 64) and r * block[0] <= 128]
    merged = tuple((r, schedule.merged_steps(a.pattern, r)) for r in factors)
    p = problem(block, n, m=m, k=k, nnzb=a.nnzb, merged=merged)
    c = data.draw(st.sampled_from(list(KERNEL.configs(p))))
    if a.nnzb == 0:
        return
    units = schedule.walk(a.pattern, c.rows, c.merge)
    deal = schedule.balance(units, n, c.block_cols, workers)
    b = torch.randn(k, n, dtype=torch.float64).numpy()
    out = np.full((m, n), np.nan)
    blocks = units.blocks.reshape(-1, c.merge)
    simulated(c, a.values.numpy(), b, out, (deal.tiles, deal.starts, units.cols, blocks), a.grid[1])
    np.testing.assert_allclose(out, a.to_dense().numpy() @ b, rtol=1e-9, atol=1e-9)
    assert deal.ctas == len(deal.starts) - 1 <= workers


def boxes_sent(c: Config, stages: tuple[int, ...], group: int) -> list[list[int]]:
    """Boxes that warpgroup `group` sends in each tile, for tiles of so many stages: the control flow of `multiply`."""
    boxes = min(64, c.height - 64 * (group % c.wg_m)) // c.c_box * (c.cols // c.panel)
    every, unsent, sent = c.store_every, 0, []
    for count in stages:
        now = []
        for stage in range(count):
            if unsent > 0 and stage % every == every // 2 * group:
                now.append(boxes - unsent)
                unsent -= 1
        while unsent > 0:
            now.append(boxes - unsent)
            unsent -= 1
        sent.append(now)
        unsent = boxes
    return [*sent, [boxes - left for left in range(unsent, 0, -1)]]


@pytest.mark.parametrize("c", CONFIGS[::7], ids=str)
def test_every_box_of_a_tile_is_sent_once_and_in_order_while_the_next_is_multiplied(c: Config) -> None:
    assert 1 <= c.store_every <= 8
    for group in range(c.wg_m * c.wg_n):
        assert c.store_every // 2 * group < c.store_every, "this warpgroup would never send on the way"
        first, *others = boxes_sent(c, (3, 0, 1, 40, 2, 0), group)
        assert first == []
        assert all(sent == list(range(len(others[0]))) for sent in others)
        assert len(others[0]) * c.c_box * c.panel == min(64, c.height - 64 * (group % c.wg_m)) * c.cols
