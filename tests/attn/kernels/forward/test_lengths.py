"""attention/lengths.py, compiled for a card that is not there."""

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import lengths
from sparsek.attn.kernels.forward.parts import FIELDS
from tests.engine.launch.portable_code import compiled

TYPES: dict[str, str] = dict.fromkeys(("p_counts", "f_counts", "order", "merges"), "*i32")


@pytest.mark.parametrize(("cut", "fields"), [(False, 1), (False, FIELDS), (True, FIELDS)])
def test_a_program_fits_in_registers(cut: bool, fields: int) -> None:
    constants = {
        "CUT": cut, "TILES": lengths.CUT_TILES if cut else lengths.TILES, "PARTS": lengths.PARTS if cut else 1,
        "STREAM": lengths.STREAM, "FIELDS": fields,
    }  # fmt: skip
    code = compiled(lengths._line_up, TYPES, constants, H200, lengths.WARPS, 1)
    assert code.stack == 0
    assert code.registers <= 168
