"""hopper.attention_paged without a GPU: configs compiled for sm_90a; texts, limits, reasons and predictions."""

import re
from collections.abc import Hashable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.device import H200
from sparsek.engine.table import load

pytest.importorskip("triton")

from sparsek.attn.kernels.forward.pipeline import fitted
from sparsek.attn.kernels.paged.hopper import Config
from tests.attn.kernels.forward.problems import SMEM_PER_SM, hold_forward
from tests.engine.launch.covering import covering
from tests.engine.launch.hopper_code import Code, compiled
from tests.sampling import sampled

KERNEL = load("hopper.attention_paged")
STACK, SPILLS = 104, 144  # bytes that a tile needs at its ends, with every rule


def problem(dim: int = 128, v_dim: int | None = None, **more: Any) -> PagedProblem:
    parts: dict[str, Any] = {
        "tokens": 8192, "requests": 4, "q_heads": 32, "kv_heads": 8, "page": 128, "max_q": 2048, "max_k": 32768,
        "dtype": "bf16", "kv_dtype": "bf16", "card": H200,
    } | more  # fmt: skip
    return PagedProblem(dim=dim, v_dim=v_dim or dim, **parts)


RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "whole": {"causal": False},
    "window": {"window": 500},
    "sinks": {"window": 500, "sinks": 9},
    "lists": {"list_heads": 8, "list_block": (128, 128), "listed": 20},
    "small lists": {"list_heads": 32, "list_block": (64, 64), "listed": 20, "causal": False},
}
PROBLEMS = [
    problem(dim, page=page, softcap=softcap, sink_logits=sinks, lse=sinks, **rule)
    for dim, page, softcap, sinks, rule in product(
        (64, 128, 256), (16, 64, 128), (False, True), (False, True), RULES.values()
    )
]
CONFIGS = list(dict.fromkeys(c for p in PROBLEMS for c in KERNEL.configs(p)))


def choices(case: tuple[Config, str]) -> list[Hashable]:
    """What was chosen for a config. Stages and slots of Q follow from heads and tile."""
    c, dtype = case
    rules = ("rules", c.causal, c.window, c.sinks, c.list_block)
    tile = ("tile", c.groups, c.keys, c.pack)
    return [
        ("dim", c.dim),
        tile,
        ("page", c.page),
        rules,
        ("softcap", c.softcap),
        ("sink_logits", c.sink_logits),
        dtype,
    ]


FULLEST = fitted(
    Config(128, 128, 16, 2, 128, 2, 2, 4, True, True, True, softcap=True, sink_logits=True, lse=True),
    H200.smem_bytes,
)
CASES = list(covering(product(CONFIGS, ("bf16", "fp16")), choices, 1))


def check_code(c: Config, dtype: str, code: Code) -> None:
    """What every compiled kernel must show."""
    where = hold_forward(
        c,
        dtype,
        code,
        c.keys // 2 * (2 if c.softcap else 1) + 2,
        clean=("unwritten", "mixed", "fixed_bounds"),
    )
    copies = [re.sub(r"\.shared::c\w+", ".shared", copy) for copy in code.copies]
    for start in ("4d.shared.global.mbarrier", "4d.global.shared.bulk_group"):
        assert any(copy.startswith(f"cp.async.bulk.tensor.{start}") for copy in copies), f"{start}: {where}"
    # The one warp that clears rows of V arrives after bar.warp.sync, which ptxas drops where the warp is together.
    assert len(code.early) == 1, where
    plain = [loop for loop in code.loops if not loop.loads]
    assert len(plain) == (0 if c.lists else 2 * c.groups), where
    assert code.stack <= STACK, where
    assert code.spills <= SPILLS, where
    assert all(loop.local == 0 for loop in code.loops), f"a step spills: {where}"


@pytest.mark.parametrize(("c", "dtype"), [(FULLEST, "bf16"), *sampled(CASES, 3)], ids=str)
def test_configs_compile_to_wgmma_and_tma_and_hide_the_softmax(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype))


def test_all_the_planners_configs_fit() -> None:
    for c in CONFIGS:
        assert c.ctas_per_sm * (c.smem_bytes + 320 + 1024) <= SMEM_PER_SM, "320: what Triton adds at most"
        assert c.stages >= 2
        assert not c.lists or (c.list_block[0] % c.positions == 0 == c.list_block[1] % c.keys)


@pytest.mark.parametrize("rule", RULES)
def test_the_default_is_the_best_prediction_and_work_takes_time(rule: str) -> None:
    p = problem(**RULES[rule])
    best = min(KERNEL.seconds(p, c) for c in KERNEL.configs(p))
    assert KERNEL.seconds(p, KERNEL.default(p)) == best > 0
    c = KERNEL.default(p)
    assert KERNEL.seconds(replace(p, tokens=4 * p.tokens, requests=4 * p.requests), c) > 3 * KERNEL.seconds(
        p, c
    )


def test_windows_and_positions_add_up_in_int32() -> None:
    p = problem(window=2**31 - 1, sinks=2**31 - 1, causal=False)
    shape = KERNEL.prepare(p, KERNEL.default(p), torch.device("cpu")).shape
    assert p.max_k < shape.window <= 2**30
    assert p.max_k < shape.sinks <= 2**30
    assert "32 bits" in "".join(KERNEL.why_not(problem(max_k=2**30)))


def test_heads_that_share_a_head_of_keys_are_packed_unless_each_has_lists() -> None:
    few: dict[str, Any] = {"tokens": 1024, "requests": 64, "max_q": 16}
    assert KERNEL.default(problem()).pack == 1, "requests of many queries fill tiles without"
    assert KERNEL.default(problem(**few)).pack == 4
    assert KERNEL.default(problem(q_heads=48, **few)).pack == 2, "6 heads to one"
    assert {c.pack for c in KERNEL.configs(problem(**RULES["small lists"]))} == {1}
    packed, padded = KERNEL.notes(problem(96, **few), KERNEL.default(problem(96, **few)))
    assert packed == "4 query heads share a tile: its rows are 16 queries of each"
    assert padded == "heads of 96/96 are computed as 128/128"
