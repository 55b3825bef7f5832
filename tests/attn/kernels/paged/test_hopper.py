"""hopper.attention_paged: configs for sm_90a, limits, predictions; on a GPU drawn batches, NaN, equal bits."""

import random
import re
from collections.abc import Hashable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.device import H200
from sparsek.engine.table import load
from sparsek.testing.paged_budget import expected_attention_paged
from tests.attn.kernels.paged.calls import (
    PagedRun,
    attend_paged,
    check_alone,
    check_beyond_windows,
    hostile,
    paged_problem,
)
from tests.attn.paged_cases import ALIGNED, LISTS, ListForm, PagedCase, drawn_case, drawn_lengths
from tests.engine.launch.covering import covering, once
from tests.engine.launch.drawn import fresh
from tests.sampling import EVERY, SEED, sampled

pytest.importorskip("triton")

from sparsek.attn.kernels.forward.pipeline import fitted
from sparsek.attn.kernels.paged.hopper import Config
from tests.attn.kernels.forward.problems import SMEM_PER_SM, hold_forward
from tests.engine.launch.hopper_code import Code, compiled

KERNEL: Any = load("hopper.attention_paged")

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
    "lists of queries": {"list_heads": 8, "list_block": (1, 128), "listed": 16},
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
    passes_over_wide = c.members > 0 and c.v_dim > 128
    assert code.spills <= SPILLS * (1 + passes_over_wide), where
    assert all(loop.local <= 8 * passes_over_wide for loop in code.loops), f"a step spills: {where}"


@pytest.mark.parametrize(("c", "dtype"), sampled([(FULLEST, "bf16"), *sampled(CASES, 3)], 1), ids=str)
def test_configs_compile_to_wgmma_and_tma_and_hide_the_softmax(c: Config, dtype: str) -> None:
    check_code(c, dtype, compiled(c, dtype))


def test_all_the_planners_configs_fit() -> None:
    for c in CONFIGS:
        assert c.ctas_per_sm * (c.smem_bytes + 320 + 1024) <= SMEM_PER_SM, "320: what Triton adds at most"
        assert c.stages >= 2
        if c.lists:
            assert c.members or c.list_block[0] % c.positions == 0
            assert c.list_block[1] % c.keys == 0


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


OUTS = ("contiguous", "wide", "odd")


def batch(*lengths: tuple[int, int], **more: Any) -> PagedCase:
    """4 heads of 128 to 2 of keys, in pages of 128."""
    facts: dict[str, Any] = {"heads": (4, 2), "dims": (128, 128), "page": 128, "form": "pair", "loose": True}
    return PagedCase("hopper", lengths, **{**facts, **more})


LONG = ((700, 2000), (1, 3000))

SEVERAL = ((300, 300), (77, 1000))

LISTED = ((300, 900), (100, 2000))


def of_queries(
    heads: tuple[int, int], page: int, bk: int, *lengths: tuple[int, int], **more: Any
) -> PagedCase:
    """Every query has its own list, of blocks of `bk` keys."""
    form = ListForm((1, bk), "all" if more.pop("shared_lists", False) else "kv", 16, more.pop("full", False))
    return batch(*lengths, heads=heads, page=page, lists=form, **more)


# Few configs: 16, 8, 4, 1 and 2 heads are packed, each under other rules. The reference takes time for every list.
FEW = ((150, 900), (70, 2000))

OF_QUERIES = {
    "one request": of_queries((64, 4), 128, 128, (1, 4000), loose=False),
    "128 requests": of_queries((64, 4), 128, 128, *[(1, 1 + 37 * i % 1200) for i in range(128)]),
    "prefill": of_queries((64, 4), 128, 128, (300, 300), loose=False),
    "5 requests": of_queries((16, 2), 16, 64, (1, 3000), (1, 70), (1, 0), (1, 2000), (1, 64)),
    "prefill behind keys": of_queries((8, 1), 16, 64, (200, 1900), (64, 900), tail=9, full=True),
    "groups of 4": of_queries((8, 2), 64, 128, *FEW, softcap=5.0, sink_logits=True),
    "one list for all heads": of_queries(
        (8, 2), 64, 128, *FEW, softcap=5.0, sink_logits=True, shared_lists=True
    ),
    "groups of 1": of_queries((2, 2), 16, 128, *FEW),
    "not causal, steps of a quarter of a block": of_queries(
        (12, 2), 64, 256, *FEW, dims=(256, 256), causal=False, full=True
    ),
}

EDGES = {
    "one tile": batch((128, 128), heads=(1, 1), loose=False),
    "keys end in a box": batch((5, 70), (1, 129), heads=(1, 1)),
    "nothing to see": batch((3, 0), (0, 7), (50, 20), tail=9),
    "not causal": batch((3, 0), (0, 7), (50, 300), causal=False),
    "window": batch(*LONG, window=300),
    "window and sinks": batch(*LONG, window=300, sinks=200),
    "window to both sides": batch(*LONG, window=300, sinks=4, causal=False),
    "softcap and sinks": batch((200, 500), (1, 300), (3, 0), softcap=5.0, sink_logits=True, spread=4.0),
    "narrow values": batch((200, 500), (33, 300), dims=(96, 64)),
    "pages shared": batch((200, 900), (33, 500), (1, 800), shared=True, page=64),
    "one head of keys": batch((40, 500), (1, 300), (1, 9), heads=(64, 1)),
    "more tiles than CTAs": batch((1500, 1500), (900, 1500), heads=(16, 4)),
    **{f"pages of {n}": batch(*SEVERAL, page=n) for n in (16, 32, 64, 256)},
    **{f"heads of {n}": batch(*SEVERAL, dims=(n, n)) for n in (64, 96, 256)},
    **{f"lists, {of}": batch(*LISTED, lists=ListForm((128, 128), of, 10, True)) for of in ("all", "kv", "q")},
    "small blocks": batch(*LISTED, lists=ListForm((64, 64), "kv", 20, True), page=16, causal=False),
    **{f"lists of queries, {name}": case for name, case in OF_QUERIES.items()},
}


def without_tensors(case: PagedCase) -> PagedProblem:
    """What the configs of a case depend on, on an H200."""
    (q_heads, kv_heads), (dim, v_dim), some = case.heads, case.dims, case.lists
    listed: dict[str, Any] = {}
    if some is not None:
        heads = {"all": 1, "kv": kv_heads, "q": q_heads}[some.heads]
        listed = {"list_heads": heads, "list_block": some.block, "listed": some.most}
    return PagedProblem(
        tokens=512, requests=4, q_heads=q_heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, page=case.page, max_q=512,
        max_k=4096, dtype=case.dtype, kv_dtype=case.dtype, card=H200, causal=case.causal, window=case.window,
        sinks=case.sinks, softcap=case.softcap > 0, sink_logits=case.sink_logits, lse=True, **listed,
    )  # fmt: skip


def drawn_kinds() -> list[tuple[PagedCase, Any]]:
    """Drawn cases with a config each: every tile, dim, page, rule and dtype of 200 cases, other ones in every run."""

    def choices(kind: tuple[PagedCase, Any]) -> Iterable[Hashable]:
        case, c = kind
        rules = ("rules", c.causal, c.window, c.sinks, c.lists)
        yield from (
            ("tile", c.groups, c.keys, c.pack),
            ("dims", case.dims),
            ("page", case.page),
            case.dtype,
            rules,
        )
        yield from (
            ("block", c.list_block),
            ("softcap", c.softcap),
            ("sink", c.sink_logits),
            ("heads", case.heads),
        )

    cases = [drawn_case(SEED + i, lists=[None, None, None, *LISTS]) for i in range(200)]
    kinds = [(case, c) for case in cases for c in KERNEL.configs(without_tensors(case))]
    return covering(kinds, choices, 1)


def hold(case: PagedCase, seed: int, configs: Iterable[Any], form: str = "wide") -> None:
    """Within the budget, and the same bits again."""
    inputs = case.make("cuda", seed=seed)
    expected = expected_attention_paged(inputs)
    for c in configs:
        made = PagedRun(KERNEL, inputs, c, form)
        first = [x.clone() for x in made.run()]
        made.check(f"{case}, seed {seed}", expected)
        for a, b in zip(made.run(), first, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{c}, seed {seed}: other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    """With the default config, and every fourth time another one; and with scores of 0, lse counts the keys.

    Cases of one default draw alike, so that they compile the same.
    """
    seed, case = fresh(), EDGES[name]
    p = paged_problem(case.make("cuda", seed=seed))
    default = KERNEL.default(p)
    draw = random.Random(f"{SEED} {default}")
    case, form = replace(case, dtype=draw.choice(("bf16", "fp16"))), random.Random(seed).choice(OUTS)
    others = [c for c in KERNEL.configs(p) if c != default]
    others = others if EVERY else draw.sample(others, min(draw.randrange(4) // 3, len(others)))
    hold(case, seed, [default, *others], form)
    hold(replace(case, spread=0.0), seed, [default], form)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page", "sinks", "causal"), once(product((16, 128), (0, 20), (True, False)), together=2)
)
def test_pages_that_no_window_reaches_may_hold_nan(page: int, sinks: int, causal: bool) -> None:
    lengths = (3, 1500), (1, 900), (260, 1700), (1, 31)
    inputs = batch(*lengths, window=90, sinks=sinks, page=page, causal=causal).make("cuda", seed=fresh())
    for c in sampled(KERNEL.configs(paged_problem(inputs)), 2, of=(page, sinks, causal)):
        check_beyond_windows(KERNEL, inputs, c)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "c"), drawn_kinds(), ids=str)
def test_drawn_batches(case: PagedCase, c: Any) -> None:
    """Three batches of other lengths and caches for each config."""
    for turn in range(3):
        seed = fresh()
        draw = random.Random(seed)
        other = replace(
            case, lengths=drawn_lengths(draw, 6, 700, 2000), form=draw.choice(ALIGNED), shared=draw.random() < 0.3,
            tail=draw.choice((0, 1, 70)), loose=draw.random() < 0.5, spread=draw.choice((1.0, 4.0)),
        )  # fmt: skip
        hold(other, seed, [c], OUTS[turn])


@pytest.mark.gpu
def test_a_request_has_the_same_bits_in_any_batch() -> None:
    check_alone(KERNEL, batch((200, 700), (90, 90), (333, 2000)).make("cuda", seed=fresh()), range(3))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("cu_seqlens_q", [5, -7, 2**30]),
        ("cu_seqlens_q", [500, 0, 500]),
        ("seq_lens", [2**31 - 1, -4]),
        ("block_table", None),
    ],
)
def test_bad_lengths_and_tables_read_and_write_within_their_tensors(
    name: str, values: "list[int] | None"
) -> None:
    inputs = batch((300, 900), (200, 500)).make("cuda", seed=fresh())
    tensor = getattr(inputs, name)
    if values is None:
        tensor.random_(-(2**31), 2**31 - 1)
    else:
        tensor.copy_(torch.tensor(values, dtype=torch.int32))
    made = PagedRun(KERNEL, inputs, form="wide")
    made.run()
    torch.cuda.synchronize()
    made.check_canaries(name)


@pytest.mark.gpu
def test_lists_of_any_numbers_write_nothing_beside_out() -> None:
    inputs = batch(*LISTED, lists=ListForm((128, 128), "kv", 10, True)).make("cuda", seed=fresh())
    for turn in range(6):
        attend_paged(KERNEL, hostile(inputs, turn, "lists"))


@pytest.mark.gpu
def test_a_graph_stays_right_while_lengths_tables_and_lists_change() -> None:
    seed = fresh()
    case = batch((300, 900), (200, 500), (1, 700))
    inputs = case.make("cuda", seed=seed)
    inputs = inputs._replace(max_q=501, max_k=case.page * inputs.block_table.shape[1])
    made = PagedRun(KERNEL, inputs)
    made.launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.launch()
    for lengths in (((1, 64), (400, 900), (100, 100)), ((0, 0), (0, 128), (401, 900)), case.lengths):
        queries = sum(n for n, _ in lengths)
        other = replace(case, lengths=lengths, tail=501 - queries).make("cuda", seed=seed + 1)
        for name in ("q", "seq_lens", "cu_seqlens_q"):
            getattr(inputs, name).copy_(getattr(other, name))
        width, pages = other.block_table.shape[1], other.k.shape[0]
        inputs.block_table.fill_(-1)
        inputs.block_table[:, :width] = other.block_table
        for name in ("k", "v"):
            getattr(inputs, name).fill_(torch.nan)
            getattr(inputs, name)[:pages] = getattr(other, name)
        made.poison()
        graph.replay()
        made.inputs = inputs._replace(end=queries)
        made.check(f"{lengths}, seed {seed}")
