"""Quest's kernels compiled for cards that are not there."""

from itertools import product
from typing import Any

import pytest

pytest.importorskip("triton")

from sparsek.attn.kernels.paged import quest
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import compiled
from tests.problems import CARDS

TABLES = ("block_table", "seq_lens", "cu_seqlens_q", "indices", "starts", "whole", "cut_starts", "cut")


@pytest.mark.parametrize(("card", "kind"), [("sm_90", "bf16"), ("sm_90", "fp8e4nv"), ("sm_80", "bf16")])
def test_summaries_are_read_by_16_bytes_and_multiplied_by_tensor_cores(card: str, kind: str) -> None:
    types = dict.fromkeys(TABLES, "*i32") | {"q": "*bf16", "summaries": f"*{kind}", "out": "*fp32"}
    constants: dict[str, Any] = {
        "PAGE": 128, "D": 128, "WIDE": 128, "GROUP": 4, "ROWS": 16, "PAGES": quest.PAGES,
    }  # fmt: skip
    code = compiled(quest._bounds, types, constants, CARDS[card], 4, 3)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx
    assert "mma.sync" in code.ptx or "wgmma" in code.ptx
    assert code.shared <= CARDS[card].smem_bytes // 3


KINDS = (("sm_90", "bf16"), ("sm_90", "fp8e4nv"), ("sm_80", "fp32"))


@pytest.mark.parametrize(("of", "scan"), once(product(KINDS, (quest.FEW, quest.MANY))), ids=str)
def test_an_update_keeps_all_in_registers_and_needs_no_atomics(of: tuple[str, str], scan: int) -> None:
    card, kind = of
    types = {"keys": f"*{kind}", "slots": "*i64", "summaries": f"*{kind}"}
    constants: dict[str, Any] = {"PAGE": 128, "D": 128, "WIDE": 128, "SCAN": scan}
    code = compiled(quest._update, types, constants, CARDS[card], 4, 3)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx or kind == "fp8e4nv"
    assert "atom" not in code.ptx


@pytest.mark.parametrize("columns", [16, 1024, quest.MOST_PAGES])
def test_a_row_of_pages_fits(columns: int) -> None:
    types = dict.fromkeys(TABLES, "*i32") | {"bounds": "*fp32"}
    warps = min(max(columns // 512, 1), 32)
    code = compiled(quest._pick, types, {"PAGE": 128, "COLS": columns}, CARDS["sm_90"], warps, 3)
    assert code.stack == 0
    assert code.shared <= CARDS["sm_90"].smem_bytes
