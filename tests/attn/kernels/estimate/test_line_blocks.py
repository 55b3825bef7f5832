"""FlexPrefill and VerticalSlash: code for cards that are not there; on a GPU against torch, no sync, graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import cut, line_blocks, probe
from sparsek.attn.reference import line_blocks as reference
from sparsek.attn.reference import lines
from sparsek.attn.reference.line_blocks import BLOCKS, LINES, NEAR, Grid, Head
from tests.attn.kernels.estimate.line_cases import CORNERS, check_corner
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS

FLOATS = ("tops", "totals", "raw", "vertical", "askew", "scratch", "part")


def code_of_probe(card: str, second: bool, rows: int, tokens: bool) -> Code:
    types = {"q": "*bf16", "k": "*bf16", "scale": "fp32"} | dict.fromkeys(FLOATS, "*fp32")
    absent = ("part",) if tokens else ("vertical", "askew", "scratch")
    constants: dict[str, Any] = {name: None for name in absent if second} | {"sq_d": 1, "sk_d": 1}
    constants |= {"LAST": rows, "D": 128, "TN": probe.TILE, "STAGES": probe.STAGES[rows]}
    if second:
        constants |= {"SPLITS": probe.SPLITS, "BLOCK": 128, "ROW_BLOCKS": probe.ROW_BLOCKS}
    elif tokens:
        constants |= {"raw": None}
    kernel = probe._sums if second else probe._rows
    return compiled(kernel, types, constants, CARDS[card], probe.WARPS[rows], probe.STAGES[rows])


@pytest.mark.parametrize(
    ("second", "card", "rows", "tokens"),
    [
        (second, card, *rows)
        for second, card, rows in once(
            product((False, True), ("sm_90", "sm_80"), ((64, True), (128, False))),
            lambda case: (case[:2], ("rows", case[0], case[2])),
            most=2,
        )
    ],
)
def test_probes_use_tensor_cores_and_copy_asynchronously(
    card: str, second: bool, rows: int, tokens: bool
) -> None:
    code = code_of_probe(card, second, rows, tokens)
    assert code.stack == 0 or card == "sm_80"  # whose tensor cores read both operands from registers
    assert code.copies or (
        second and tokens
    )  # a tile that is read back askew has barriers, and is not pipelined
    assert ("wgmma.mma_async" in code.ptx) == (card == "sm_90")
    assert code.shared <= CARDS[card].smem_bytes


@pytest.mark.parametrize("by_share", [False, True])
def test_a_cut_keeps_its_counters_in_registers(by_share: bool) -> None:
    types = {"mass": "*fp32", "budgets": "*i32", "counts": "*i32", "cuts": "*i32", "share": "fp32"}
    constants = {"live": None, "CHUNK": cut.CHUNK if by_share else cut.COUNTED, "BY_SHARE": by_share}
    code = compiled(cut._cut, types, constants, CARDS["sm_90"], cut.WARPS, 3)
    assert code.stack == 0
    assert code.registers <= 128  # of 512 threads


@pytest.mark.parametrize("blocks", [1024])
def test_a_head_is_decided_in_registers(blocks: int) -> None:
    types = dict.fromkeys(("part", "raw"), "*fp32") | dict.fromkeys(("vertical", "slash"), "*i8")
    types |= {"aware": "*i32", "gamma": "fp32", "tau": "fp32"}
    constants = {"BK": 128, "PER": 1, "ROW_BLOCKS": probe.ROW_BLOCKS, "N": 2 * blocks}
    code = compiled(line_blocks._decide, types, constants, CARDS["sm_90"], line_blocks.DECIDE_WARPS, 3)
    assert code.stack == 0


GRIDS = [
    Grid(4096, 4096, (128, 128), 0),
    Grid(1000, 5000, (128, 64), 4000),
    Grid(300, 290, (64, 128), -30),
    Grid(3000, 3000, (128, 256), 0),
]

HEADS = (Head(LINES, 200, 500), Head(NEAR, 100, 700), Head(BLOCKS, 5, 0), Head(LINES, 30, 50))


def operands(batch: int, grid: Grid, dim: int = 128, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(grid.q_len)
    return [
        (2 * torch.randn(batch, length, n, dim, device="cuda")).bfloat16().transpose(1, 2)
        for n, length in ((heads, grid.q_len), (kv_heads, grid.kv_len))
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dim", [64, 128])
def test_lines_have_the_mass_of_the_specification(grid: Grid, dim: int):
    q, k = operands(2, grid, dim)
    (vertical, slash), right = (
        probe.token_lines(q, k, 64, grid.q_offset),
        lines.token_lines(q, k, 64, grid.q_offset),
    )
    torch.testing.assert_close(vertical, right.vertical, rtol=2e-3, atol=2e-4)
    n = right.slash.shape[-1]
    torch.testing.assert_close(slash[..., :n], right.slash, rtol=2e-3, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("grid", GRIDS)
def test_nearly_all_blocks_are_those_of_the_specification(grid: Grid):
    """Masses that differ in rounding may fall on the other side of a cut."""
    q, k = operands(2, grid)
    ours, right = (each.vertical_slash_blocks(q, k, grid, HEADS, 64) for each in (line_blocks, reference))
    assert (ours != right).sum() <= 0.005 * right.sum() + 2
    assert torch.equal(ours[:, 1], right[:, 1])
    for tau in (0.0, 1.0):
        options: dict[str, Any] = {"last": 128, "gamma": 0.7, "tau": tau, "least": 2}
        (ours, flags), (right, aware) = (
            each.flex_blocks(q, k, grid, **options) for each in (line_blocks, reference)
        )
        assert torch.equal(flags.bool(), aware)
        assert (ours != right).sum() <= 0.005 * right.sum() + right.shape[2] * (tau == 0.0) * 4


@pytest.mark.gpu
@pytest.mark.parametrize("distance", CORNERS)
def test_a_distance_that_meets_a_block_in_its_corner_keeps_it(distance: int):
    check_corner(distance, 64, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["vertical_slash", "flex"])
def test_a_graph_repeats_it_with_other_values(
    policy: str, no_sync: Callable[[], AbstractContextManager[None]]
):
    grid = GRIDS[0]
    q, k = operands(1, grid)

    def run() -> torch.Tensor:
        if policy == "flex":
            return line_blocks.flex_blocks(q, k, grid, last=128, gamma=0.7, tau=0.25, least=2)[0]
        return line_blocks.vertical_slash_blocks(q, k, grid, HEADS, 64)

    run()
    torch.cuda.synchronize()
    with no_sync():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    for _ in range(10):
        q.copy_(2 * torch.randn_like(q))
        kept.fill_(True)
        graph.replay()
        assert torch.equal(kept, run())
