"""attention/delta.py without a GPU: arithmetic in Triton's interpreter, code by compiling for real cards."""

from itertools import product

import pytest

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import delta as portable
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import compiled
from tests.problems import CARDS

FLOATS = dict.fromkeys(("lse", "grad_lse", "made", "acc"), "*fp32") | {"scale": "fp32", "unit": "fp32"}
HALVES = dict.fromkeys(("out", "grad", "dq"), "*bf16")


@pytest.mark.parametrize(
    ("card", "dim"), [("sm_90", 64), *once(product(("sm_90", "sm_80"), (96, 128, 256)), most=1)]
)
def test_both_move_16_bytes_at_a_time_without_spills(card: str, dim: int) -> None:
    rows = portable.ELEMENTS // (1 << (dim - 1).bit_length())
    ones = dict.fromkeys(("so_d", "sg_d", "sl_m", "sn_m"), 1)
    code = compiled(
        portable._prepare_rows,
        FLOATS | HALVES,
        {"DV": dim, "ROWS": rows} | ones,
        CARDS[card],
        portable.WARPS,
        3,
    )
    assert code.stack == 0
    assert code.registers <= 128
    assert code.ptx.count("ld.global.v4") >= 2 * portable.ELEMENTS // (128 * 8)
    widths = {"D": dim, "WIDTH": portable.ELEMENTS // rows, "ROWS": rows, "sq_d": 1}
    of_turns = ({}, 1), ({"turns": "*i32"}, 1), ({"turns": "*i32"}, 2)
    for turns, sums in of_turns if card == "sm_90" else ():  # only hopper.attention_bwd casts
        code = compiled(
            portable._cast_quantized,
            FLOATS | HALVES | turns,
            widths | {"SUMS": sums} | ({} if turns else {"turns": None}),
            CARDS[card],
            portable.WARPS,
            3,
        )
        assert code.stack == 0
        assert code.registers <= 128
        assert code.stores == {"v4.b32"}
