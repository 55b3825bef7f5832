"""kernels/estimate, compiled for cards that are not there."""

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from sparsek.attn.kernels.estimate import coarse, maps, mass, means, scores
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code, compiled
from tests.problems import CARDS


def code_of_means(card: str, dtype: str, dim: int, side: int, parts: int) -> Code:
    types = {"x": f"*{dtype}", "y": f"*{dtype}", "x_means": "*bf16", "y_means": "*bf16"}
    constants: dict[str, Any] = {
        "X_SIDE": side, "X_PARTS": parts, "Y_SIDE": side, "Y_PARTS": parts, "D": dim, "WIDE": means.WIDE,
        "sx_d": 1, "sy_d": 1, "x_lengths": None, "y_lengths": None, "X_ORDER": parts // 4, "Y_ORDER": parts // 2,
    }  # fmt: skip
    return compiled(means._means, types, constants, CARDS[card], side // means.ROWS, 3)


def code_of_scores(c: scores.Config, card: str, dim: int, block: int, parts: int, causal: bool) -> Code:
    boxes = ((c.tile_m, "q"), (c.tile_n, "k"))
    kinds = {name: f"tensordesc<bf16[{many}, {c.depth}]>" if c.tma else "*bf16" for many, name in boxes}
    types = kinds | {"scores": "*fp32", "scale": "fp32"}
    constants: dict[str, Any] = {
        "kv_lengths": None, "BM": block, "BK": block, "DOWN": parts, "ACROSS": parts, "CAUSAL": causal, "D": dim,
        "TM": c.tile_m, "TN": c.tile_n, "DEPTH": c.depth, "VISITS": scores.VISITS, "STAGES": c.num_stages,
        "TMA": c.tma, "QUADS": c.quads,
    }  # fmt: skip
    aligned = () if c.tma else None
    return compiled(scores._scores, types, constants, CARDS[card], c.num_warps, c.num_stages, aligned=aligned)


OF_MEANS = (("bf16", 128, 128, 1), ("bf16", 128, 64, 4), ("fp32", 64, 64, 4), ("fp16", 128, 256, 1))
OF_SCORES = ((128, 64, 4, False), (128, 128, 1, True), (64, 64, 4, True))
CARD_NAMES = ("sm_90", "sm_80")


@pytest.mark.parametrize(("card", "what"), once(product(CARD_NAMES, OF_MEANS)), ids=str)
def test_means_read_16_bytes_at_once_and_keep_all_in_registers(
    card: str, what: tuple[str, int, int, int]
) -> None:
    dtype, dim, side, parts = what
    code = code_of_means(card, dtype, dim, side, parts)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx
    assert code.registers <= 168


@pytest.mark.parametrize(("card", "what"), once(product(CARD_NAMES, OF_SCORES)), ids=str)
def test_scores_use_tensor_cores_and_pipelined_loads(card: str, what: tuple[int, int, int, bool]) -> None:
    dim, block, parts, causal = what
    code = code_of_scores(scores.SMALL, card, dim, block, parts, causal)
    assert code.stack == 0 or card == "sm_80"  # whose tensor cores read both operands from registers
    assert code.copies
    assert ("wgmma.mma_async" in code.ptx) == (card == "sm_90")
    assert code.shared <= CARDS[card].smem_bytes // 2  # two programs on an SM


@pytest.mark.parametrize("dim", [64, 128])
def test_parts_of_a_block_are_added_within_a_thread(dim: int) -> None:
    code = code_of_scores(scores.HOPPER, "sm_90", dim, 64, 4, False)
    assert code.stack == 0
    assert "wgmma.mma_async" in code.ptx
    assert "cp.async.bulk.tensor" in code.ptx
    assert code.ptx.count("shfl.sync") < 20  # of whole tiles; none for each block
    assert code.shared <= CARDS["sm_90"].smem_bytes // 2


UNUSED: dict[bool, dict[str, Any]] = {True: {"within": None}, False: {}}


@pytest.mark.parametrize(("within", "causal"), once(product((False, True), (False, True))))
def test_maps_and_masses_compile(within: bool, causal: bool) -> None:
    names = ("full", "part")
    types = {f"{name}_{part}": "*i32" for name in names for part in ("starts", "counts", "indices")} | {
        "made": "*i8"
    }
    constants: dict[str, Any] = {"CHUNK": maps.CHUNK}
    code = compiled(
        maps._map, types | {"within": "*i8"}, constants | UNUSED[not within], CARDS["sm_90"], 1, 3
    )
    assert code.stack == 0
    constants = {"BM": 64, "BK": 64, "CAUSAL": causal, "CHUNK": mass.CHUNK}
    assert compiled(mass._mass, {"scores": "*fp32"}, constants, CARDS["sm_90"], mass.WARPS, 3).stack == 0


def test_vsa_moves_16_bytes_at_once() -> None:
    types = {"out": "*bf16", "gate": "*bf16", "means": "*fp32"}
    constants: dict[str, Any] = {"so_d": 1, "sg_d": 1, "SIDE": 64, "DV": 128, "ROWS": coarse.ROWS}
    code = compiled(coarse._add, types, constants, CARDS["sm_90"], coarse.WARPS, 3)
    assert code.stack == 0
    assert "v4.b32" in code.stores
