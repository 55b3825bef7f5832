"""hopper.attention_fwd without a GPU: configs compiled for sm_90a, and their texts, limits, reasons and predictions.

Configs are compiled under the pinned Triton, in this process, and under the newest release, in that one's environment:
the same list of them, CASES. The planner offers thousands, and a compilation takes a second or two. CASES holds a
config for every two choices that can be made together, such as every pair of head dims with every rule.
"""

import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsek.core.device import CPU, H200
from sparsek.kernels import load
from sparsek.plan.problem import AttentionProblem

pytest.importorskip("triton")

from sparsek.kernels.hopper.attention_fwd import Config
from tests.house.tools import ROOT, next_python
from tests.kernels.hopper_code import Code, code_from, compiled, fields_of

KERNEL = load("hopper.attention_fwd")
SIDES = (32, 64, 128, 256)
BLOCKS = ((128, 128), (64, 64), (128, 64), (64, 128))
SMEM_PER_BLOCK = 227 << 10  # what one CTA may have on sm_90
SMEM_PER_SM = 228 << 10  # what all CTAs of an SM share, 1 KB of each for the system
REGISTERS = 65536


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> AttentionProblem:
    """16 heads of 8192 queries, each with its own 12.5 % of the blocks."""
    fields = {
        "batch": 1,
        "q_heads": 16,
        "kv_heads": 16,
        "q_len": 8192,
        "kv_len": 8192,
        "dtype": "bf16",
        "card": H200,
        "block": (128, 128),
        "mask_batch": 1,
        "mask_heads": 16,
        "partial": 0,
    } | more
    bq, bk = fields["block"]
    longest = fields.pop("longest", max(1, fields["kv_len"] // bk // 8))
    stored = fields.pop("stored", longest * -(-fields["q_len"] // bq) * fields["mask_heads"])
    return AttentionProblem(dim=dim, v_dim=v_dim or dim, stored=stored, longest=longest, **fields)


def few_queries(heads: tuple[int, int]) -> dict[str, Any]:
    return {"q_len": 1, "q_heads": heads[0], "kv_heads": heads[1], "mask_heads": 1}


# What decides about packing and cutting.
SHAPES: dict[str, dict[str, Any]] = {
    "even": {},
    "one long row": {"longest": 64, "stored": 16 * 64 * 3},
    "2 heads packed": few_queries((128, 64)),
    "8 heads packed": few_queries((16, 2)),
    "64 heads packed": few_queries((64, 1)),
}
PROBLEMS = [
    problem(*dims, block=block, **shape)
    for dims, block, shape in product(product(SIDES, SIDES), BLOCKS, SHAPES.values())
]
CONFIGS = [
    replace(c, interval=interval, bits=bits, lse=lse)
    for c in dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p))
    for interval, bits, lse in product((True, False), repeat=3)
]


def covering(configs: list[Config]) -> list[tuple[Config, str]]:
    """Configs and dtypes that hold every two choices that some of them hold: always the next with the most new."""
    known: dict[object, int] = {}
    cases = {}
    for c, dtype in product(configs, ("bf16", "fp16")):
        tile, rules = ("tile", c.groups, c.keys), ("rules", c.interval, c.bits)
        chosen = [(c.dim, c.v_dim), tile, c.block, c.pack, rules, ("split", c.split), ("lse", c.lse), dtype]
        cases[c, dtype] = sum(1 << known.setdefault(pair, len(known)) for pair in combinations(chosen, 2))
    left, found = (1 << len(known)) - 1, []
    while left:
        best = max(cases, key=lambda case: (cases[case] & left).bit_count())
        found.append(best)
        left &= ~cases.pop(best)
    return found


CASES = covering(CONFIGS)
PARTS = 8  # of CASES: one process compiles one part, and pytest-xdist deals them to its workers
