"""attn/kernels/paged/schedule.py and padding.py, compiled for a card that is not there."""

from typing import Any

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.paged import padding
from sparsek.attn.kernels.paged import schedule as scheduling
from tests.engine.launch.portable_code import compiled
from tests.sampling import sampled

TYPES: dict[str, str] = dict.fromkeys(("cu_seqlens", "seq_lens", "tiles", "count"), "*i32")


@pytest.mark.parametrize(("causal", "window", "lists"), [(True, True, 0), (True, False, 64)])
def test_a_program_that_places_tiles_fits_in_registers(causal: bool, window: bool, lists: int) -> None:
    constants: dict[str, Any] = {
        "POSITIONS": 32, "KEYS": 128, "CAUSAL": causal, "WINDOW": window, "LIST": lists,
        "QUANTUM": scheduling.QUANTUM, "TILES": scheduling.TILES, "REQUESTS": scheduling.REQUESTS,
        "FIELDS": scheduling.FIELDS,
    }  # fmt: skip
    code = compiled(scheduling._place, TYPES, constants, H200, scheduling.WARPS, 1)
    assert code.stack == 0
    assert code.registers <= 128


@pytest.mark.parametrize(("low", "lse"), sampled([("*bf16", True), ("*fp16", False)], 1))
def test_a_program_that_clears_rows_fits_in_registers(low: str, lse: bool) -> None:
    types = {"out": low, "lse": "*fp32" if lse else low, "cu_seqlens_q": "*i32"}
    code = compiled(padding._clear, types, {"LSE": lse}, H200, padding.WARPS, 1)
    assert code.stack == 0
    assert code.registers <= 64
