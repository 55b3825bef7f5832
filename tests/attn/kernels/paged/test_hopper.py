"""hopper.attention_paged without a GPU: configs compiled for sm_90a; texts, limits, reasons and predictions."""

import re
from collections.abc import Hashable
from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.device import CPU, H200
from sparsek.engine.table import load

pytest.importorskip("triton")

from sparsek.attn.kernels.forward.pipeline import fitted
from sparsek.attn.kernels.paged.hopper import Config
from tests.engine.launch.covering import covering
from tests.engine.launch.hopper_code import Code, compiled
from tests.problems import A100
from tests.sampling import sampled

KERNEL = load("hopper.attention_paged")
SMEM_PER_BLOCK = 227 << 10  # what one CTA may have on sm_90
SMEM_PER_SM = 228 << 10  # what all CTAs of an SM share, 1 KB of each for the system
REGISTERS = 65536
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
    where = f"{c} in {dtype}:\n{code}"
    kind = {"bf16": "bf16", "fp16": "f16"}[dtype]
    kinds = {f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}" for n in (c.keys, c.v_dim)}
    assert code.wgmma == sorted(kinds), where
    # S before the steps and in both kinds of steps, P V in these and after them.
    assert code.wgmma_count == c.groups * 3 * (c.dim + c.keys) // 16, where
    copies = [re.sub(r"\.shared::c\w+", ".shared", copy) for copy in code.copies]
    for start in ("4d.shared.global.mbarrier", "4d.global.shared.bulk_group"):
        assert any(copy.startswith(f"cp.async.bulk.tensor.{start}") for copy in copies), f"{start}: {where}"
    assert code.waits == [0, 1], where
    assert "serialized" not in code.log, where
    assert "Potential Performance Loss" not in code.log, where
    assert [] == code.unwritten == code.mixed == code.fixed_bounds, where
    # The one warp that clears rows of V arrives after bar.warp.sync, which ptxas drops where the warp is together.
    assert len(code.early) == 1, where
    plain = [loop for loop in code.loops if not loop.loads]
    assert len(code.loops) == 2 * c.groups, where
    assert len(plain) == (0 if c.lists else 2 * c.groups), where
    assert code.stack <= STACK, where
    assert code.spills <= SPILLS, where
    assert all(loop.local == 0 for loop in code.loops), f"a step spills: {where}"
    for loop in code.loops:
        assert loop.exponentials == c.keys // 2 * (2 if c.softcap else 1) + 2, where
        assert loop.beside >= 0.9 * loop.exponentials, f"P V is waited for before the softmax: {where}"
    assert code.shared <= SMEM_PER_BLOCK, where
    assert c.ctas_per_sm * (code.shared + 1024) <= SMEM_PER_SM, where
    assert c.smem_bytes <= code.shared <= c.smem_bytes + 1024, f"smem_bytes says {c.smem_bytes}: {where}"
    assert c.ctas_per_sm * code.registers * 32 * code.warps <= REGISTERS, where


@pytest.mark.parametrize(("c", "dtype"), [(FULLEST, "bf16"), *sampled(CASES, 3)], ids=str)
def test_configs_compile_to_wgmma_and_tma_and_hide_the_softmax(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype))


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "dim": st.sampled_from((64, 128, 256)),
    "v_dim": st.sampled_from((64, 128, 256)),
    "page": st.sampled_from((16, 64, 128)),
    "groups": st.sampled_from((1, 2)),
    "keys": st.sampled_from((64, 128)),
    "stages": st.integers(2, 12),
    "q_slots": st.sampled_from((1, 2)),
    "pack": st.sampled_from((1, 2, 4, 8, 16, 32, 64)),
    "list_block": st.sampled_from(((0, 0), (64, 64), (64, 128), (128, 64))),
    **dict.fromkeys(("causal", "window", "sinks", "softcap", "sink_logits", "lse"), st.booleans()),
}
ANY_CONFIG = st.builds(Config, **OPTIONS)


@given(ANY_CONFIG, st.sampled_from(sorted(OPTIONS)), st.data())
def test_two_configs_never_share_a_text(c: Config, name: str, data: st.DataObject) -> None:
    """Triton keeps compiled kernels by the text of their constants: two configs with one text ran one kernel."""
    other = replace(c, **{name: data.draw(OPTIONS[name])})
    assert (str(c) == str(other)) == (c == other)
    assert repr(c) == str(c)


def test_all_the_planners_configs_have_texts_of_their_own_and_fit() -> None:
    assert {field.name for field in fields(Config)} == set(OPTIONS)
    assert len({str(c) for c in CONFIGS}) == len(CONFIGS)
    for c in CONFIGS:
        assert c.ctas_per_sm * (c.smem_bytes + 320 + 1024) <= SMEM_PER_SM, "320: what Triton adds at most"
        assert c.stages >= 2
        assert not c.lists or (c.list_block[0] % c.positions == 0 == c.list_block[1] % c.keys)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"card": A100}, "needs a Hopper card .* NVIDIA A100"),
        ({"card": CPU}, "needs a Hopper card .* cpu"),
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "multiplies bf16 and fp16, not fp32"),
        ({"kv_dtype": "e4m3"}, "pages of q's dtype, bf16, not e4m3"),
        ({"dim": 264}, "multiples of 8 up to 256, not 264 and 128"),
        ({"v_dim": 100}, "multiples of 8 up to 256, not 128 and 100"),
        ({"page": 8}, "powers of two from 16 on, not 8"),
        ({"page": 48}, "powers of two from 16 on, not 48"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"max_k": 2**30}, "32 bits"),
        ({"list_heads": 8, "list_block": (128, 32), "listed": 9}, r"not \(128, 32\)"),
        ({"list_heads": 8, "list_block": (1, 128), "listed": 9}, r"not \(1, 128\)"),
    ],
)
def test_a_reason_names_what_is_in_the_way(change: dict[str, Any], reason: str) -> None:
    assert KERNEL.why_not(problem()) == []
    (found,) = KERNEL.why_not(replace(problem(), **change))
    assert re.search(reason, found), found


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
