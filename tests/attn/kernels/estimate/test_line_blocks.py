"""Kernels of FlexPrefill and VerticalSlash, compiled for cards that are not there."""

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import cut, line_blocks, probe
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


@pytest.mark.parametrize("blocks", [256, 1024])
def test_a_head_is_decided_in_registers(blocks: int) -> None:
    types = dict.fromkeys(("part", "raw"), "*fp32") | dict.fromkeys(("vertical", "slash"), "*i8")
    types |= {"aware": "*i32", "gamma": "fp32", "tau": "fp32"}
    constants = {"BK": 128, "PER": 1, "ROW_BLOCKS": probe.ROW_BLOCKS, "N": 2 * blocks}
    code = compiled(line_blocks._decide, types, constants, CARDS["sm_90"], line_blocks.DECIDE_WARPS, 3)
    assert code.stack == 0
