"""attn/kernels/mask/choose.py compiled for an H200 that is not there."""

from itertools import product
from typing import Any

import pytest

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.mask.choose import MOST_COLUMNS, _choose
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import Code, compiled
from tests.sampling import sampled

INTS = (
    "full_counts",
    "cut_counts",
    "starts",
    "cut_starts",
    "indices",
    "lo",
    "hi",
    "rules",
    "bits",
    "lengths",
)


def code(kind: str, columns: int, given: str = "fp32", short: bool = False, **more: Any) -> Code:
    types = {"given": f"*{given}", "limit": "i64" if kind == "mass" else "i32", "fault": "*i64"}
    types |= dict.fromkeys(INTS, "*i32")
    absent = (
        ("numbers", "always", "held") if short else ("numbers", "always", "held", "lengths", "rules", "bits")
    )
    constants = dict.fromkeys(absent) | {
        "KIND": kind, "CAUSAL": True, "NEAR": "", "EVERY": False, "WIDE": given == "fp64", "BQ": 128, "BK": 128,
        "COLS": columns, "LISTED": 32 if kind == "indices" else 1, "UNIT": 1, "FQ": 1, "FK": 1,
    }  # fmt: skip
    return compiled(_choose, types, constants | more, H200, min(max(columns // 256, 1), 32), 3)


@pytest.mark.parametrize("kind", ["topk", "mass"])
def test_a_row_is_one_warp_that_adds_in_one_instruction_and_reads_16_bytes_at_once(kind: str):
    made = code(kind, 256, NEAR="window", UNIT=4)
    assert made.stack == 0
    assert made.registers <= 64, "32 rows share an SM"
    assert "redux.sync.add" in made.ptx
    assert "v4.b32" in made.ptx
    assert "atom" not in made.ptx


@pytest.mark.parametrize(("kind", "columns"), once(product(("topk", "mass", "map", "indices"), (16, 4096))))
def test_every_kind_of_choice_compiles(kind: str, columns: int):
    given = {"map": "i1", "indices": "i64"}.get(kind, "fp64")
    assert code(kind, columns, given, True).registers <= 255


def test_the_longest_rows_fit():
    for kind in sampled(["topk", "mass", "map", "indices"], 2):
        given = {"map": "i1", "indices": "i32"}.get(kind, "bf16")
        assert code(kind, MOST_COLUMNS, given).shared <= 227 << 10
