"""attention/schedule_bwd.py and transposed.py, compiled for a card that is not there."""

from typing import Any

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import schedule_bwd as made
from sparsek.attn.kernels.backward import transposed as lists
from sparsek.attn.plan import attention_grad_schedule as plan
from tests.engine.launch.portable_code import compiled

TYPES: dict[str, str] = dict.fromkeys(
    (*lists.MASK, *lists._SCRATCH, *made._SCRATCH, "lo", "hi", "out"), "*i32"
)
OF_MASK = {"ROWS": lists.ROWS, "ENTRIES": lists.ENTRIES}
LINE = {"SINGLE": True, "TILE_TICKS": plan.TILE_TICKS, "HEADS": made.HEADS}
VISIT: dict[str, Any] = {
    "BLOCK_K": 128, "TURNED": True, "TILES": made.TILES, "GOLDEN": plan.GOLDEN, "BITS": plan.GOLDEN_BITS,
    "TILE_FIELDS": plan.TILE_FIELDS, "VISIT_FIELDS": plan.VISIT_FIELDS, "FULL": plan.FULL,
    "NO_TICKET": plan.NO_TICKET,
}  # fmt: skip
KERNELS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "tally": (lists.tally, OF_MASK, made.WARPS),
    "measure": (made._measure, {"TILES": lists.LISTS, "LISTS": lists.LISTS}, made.WARPS),
    "line up": (
        made._line_up,
        OF_MASK | LINE | {"ALIKE": False, "TILES": made.TILES, "STREAM": made.STREAM},
        made.WARPS,
    ),
    "line up, alike": (
        made._line_up,
        OF_MASK | LINE | {"ALIKE": True, "TILES": made.ALIKE_TILES, "STREAM": made.ALIKE_STREAM},
        made.WARPS,
    ),
    "deal": (made._deal, {"LANES": 256, "LISTED": lists.LISTED}, made.DEAL_WARPS),
    "open": (lists._open, {"LISTS": lists.LISTS}, made.WARPS),
    "fill": (lists._fill, OF_MASK, made.WARPS),
    "order": (lists._order, {"LISTED": lists.LISTED}, made.WARPS),
    "pad": (made._pad, {"BOUNDS": made.BOUNDS}, made.WARPS),
    "visit": (
        made._visit,
        VISIT | {"BLOCK_Q": 64, "ORDERED": True, "SHARED": False, "LONG": False, "VISITS": made.VISITS},
        made.WARPS,
    ),
    "visit, long": (
        made._visit,
        VISIT | {"BLOCK_Q": 128, "ORDERED": True, "SHARED": True, "LONG": True, "VISITS": made.VISITS},
        made.WARPS,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_it_fits_in_registers(name: str) -> None:
    kernel, constants, warps = KERNELS[name]
    code = compiled(kernel, TYPES, constants, H200, warps, 1)
    assert code.stack == 0
    assert code.registers <= 168
