"""attention/schedule_fwd.py, compiled for a card that is not there."""

from typing import Any

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import schedule_fwd as scheduling
from sparsek.attn.plan.attention_schedule import FIELDS, MERGE_FIELDS
from tests.engine.launch.portable_code import compiled

TENSORS = ("p_starts", "p_counts", "f_starts", "f_counts", "table", "before", "tiles", "count", "merges")
TYPES: dict[str, str] = dict.fromkeys(TENSORS, "*i32")


@pytest.mark.parametrize("cut", [False, True])
def test_the_table_and_the_ranks_of_rows_fit_in_registers(cut: bool) -> None:
    constants = {
        "CUT": cut, "LENGTHS": scheduling.LENGTHS, "RANKED": scheduling.RANKED, "ROWS": scheduling.ROWS,
    }  # fmt: skip
    code = compiled(scheduling._count, TYPES, constants, H200, scheduling.WARPS, 1)
    assert code.stack == 0
    assert code.registers <= 128


@pytest.mark.parametrize("groups", [1, scheduling.GROUPS])
@pytest.mark.parametrize(("cut", "sections"), [(False, False), (False, True), (True, False)])
def test_a_program_that_places_tiles_fits_in_registers(cut: bool, sections: bool, groups: int) -> None:
    """And a record leaves in two stores of 16 bytes."""
    constants: dict[str, Any] = {
        "CUT": cut, "SECTIONS": sections, "TILES": scheduling.CUT_TILES if cut else scheduling.TILES,
        "PARTS": scheduling.PARTS if cut else 1, "UNUSED": scheduling.UNUSED, "GROUPS": groups,
        "FIELDS": FIELDS, "MERGE_FIELDS": MERGE_FIELDS,
    }  # fmt: skip
    code = compiled(scheduling._place, TYPES, constants, H200, scheduling.PLACE_WARPS, 1)
    assert code.stack == 0
    assert "v4.b32" in code.stores
    assert code.registers <= 128
