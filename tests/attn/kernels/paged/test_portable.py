"""portable.attention_paged: code for real cards, choices, refusals; on a GPU options, configs, graphs, bad tables."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from sparsek.attn.plan.problems import PagedProblem
from sparsek.core.device import CPU, H200
from sparsek.engine.table import load
from sparsek.testing.paged_budget import expected_attention_paged
from tests.attn.kernels.paged.calls import PagedRun, attend_paged, check_alone, check_paged, hostile
from tests.attn.paged_cases import ListForm, PagedCase, drawn_case
from tests.engine.launch.covering import once
from tests.sampling import EVERY, dealt, sampled

pytest.importorskip("triton")

from sparsek.attn.kernels.paged import portable, portable_parts
from tests.attn.kernels.paged.portable_code import added, compiled
from tests.engine.launch import newest
from tests.engine.launch.portable_code import Code
from tests.problems import CARDS, T4

KERNEL: Any = portable.KERNEL

# Vectors of requests and bounds, which programs of one warp keep between work items.
STACK = 64


def problem(card: str = "sm_90", dim: int = 128, max_q: int = 1, **more: Any) -> PagedProblem:
    """32 requests of up to 8192 keys in pages of 128, four heads of q to each of 8 of k."""
    facts: dict[str, Any] = {
        "tokens": 32 * max_q, "requests": 32, "q_heads": 32, "kv_heads": 8, "dim": dim, "v_dim": dim, "page": 128,
        "max_q": max_q, "max_k": 8192, "dtype": "bf16", "kv_dtype": "bf16", "card": CARDS[card], "lse": True,
    } | more  # fmt: skip
    return PagedProblem(**facts)


def check_code(p: PagedProblem, c: portable.Config, code: Code, slack: int = 0) -> None:
    facts = code._replace(ptx="", ttgir="")
    what = f"{p.card.name} {p.dim} {p.kv_dtype} {c}: {facts}"
    assert code.stack <= STACK + slack, f"spills: {what}"
    assert code.shared <= portable._shared(p, c) <= p.card.smem_bytes, what
    assert code.copies, f"16-byte asynchronous copies are missing: {what}"
    assert code.wgmma == (p.card.capability == (9, 0) and c.tile_m >= 64), what


@pytest.mark.parametrize(
    ("card", "dim", "max_q"), once(product(("sm_90", "sm_80"), (64, 128, 256), (1, 2048)), most=1)
)
def test_defaults_of_decoding_and_prefill_compile_without_spills(card: str, dim: int, max_q: int) -> None:
    p = problem(card, dim, max_q)
    c = KERNEL.default(p)
    check_code(p, c, compiled(card, p, c))


def test_every_config_of_decoding_compiles_without_spills_on_hopper() -> None:
    p = problem()
    configs = list(KERNEL.configs(p))
    assert len(configs) >= 5
    for c in sampled(configs, 1):
        check_code(p, c, compiled("sm_90", p, c))


@pytest.mark.parametrize("card", sampled(["sm_90", "sm_80"], 1))
def test_pages_in_fp8_compile_without_spills(card: str) -> None:
    p = problem(card, kv_dtype="e4m3", scale_per="head")
    c = KERNEL.default(p)
    code = compiled(card, p, c)
    check_code(p, c, code)
    assert ("cvt.rn.f16x2.e4m3x2" in code.ptx) == (card == "sm_90")


@pytest.mark.parametrize(
    "more",
    sampled(
        [
            {"window": 1000, "sinks": 4, "softcap": True, "sink_logits": True, "page": 16},
            {"list_heads": 8, "list_block": (1, 128), "listed": 16},
            {"max_q": 2048, "list_heads": 32, "list_block": (64, 64), "listed": 16},
        ],
        1,
    ),
    ids=str,
)
def test_options_compile_without_spills(more: dict[str, Any]) -> None:
    p = problem(**more)
    c = KERNEL.default(p)
    check_code(p, c, compiled("sm_90", p, c))


def test_the_newest_triton_compiles_the_defaults() -> None:
    problems = [("sm_90", problem()), ("sm_90", problem(kv_dtype="e4m3")), ("sm_80", problem("sm_80"))]
    for card, p in sampled(problems, 1, of="the newest Triton"):
        check_code(p, KERNEL.default(p), newest.call(compiled, card, p, KERNEL.default(p)), slack=32)


@pytest.mark.parametrize(("card", "parts"), once(product(("sm_90", "sm_80"), (2, 16, 64)), most=1))
def test_the_sum_of_parts_compiles_without_spills(card: str, parts: int) -> None:
    assert added(card, 192, parts).stack == 0


def test_reasons_name_what_is_wrong() -> None:
    p = problem()
    assert KERNEL.why_not(p) == []
    assert KERNEL.why_not(replace(p, aligned=False, unit_stride=False)) == []
    for change, reason in (
        ({"card": T4}, "8.0 or newer; NVIDIA T4 has 7.5"),
        ({"card": replace(H200, smem_bytes=8192)}, "8192 bytes of shared memory"),
        ({"card": CPU, "dtype": "fp16", "kv_dtype": "fp16"}, "TRITON_INTERPRET=1"),
        ({"dtype": "fp32", "kv_dtype": "fp32"}, "bf16 or fp16, not fp32"),
        ({"kv_dtype": "fp16"}, "pages must be bf16, as q, or e4m3, not fp16"),
        ({"kv_dtype": "e4m3", "aligned": False}, "multiples of 16 bytes"),
        ({"dim": 100}, "multiples of 8 up to 256; got 100 and 128"),
        ({"v_dim": 512}, "got 128 and 512"),
        ({"page": 8}, "16, 32, 64, 128 or 256 rows, not 8"),
        ({"list_heads": 3, "list_block": (1, 64), "listed": 1}, "1, 8 or 32 heads, not 3"),
        ({"list_heads": 1, "list_block": (1, 48), "listed": 1}, "power of two of keys, from 16 up, not 48"),
        ({"max_k": 2**30 + 1}, "1073741825 keys"),
        ({"max_q": 2**29, "tokens": 2**29}, "2147483647 parts"),
    ):
        (found,) = KERNEL.why_not(replace(p, **change))
        assert reason in found, found


def test_every_problem_has_configs_that_hold_a_group_and_divide_its_blocks() -> None:
    for card in CARDS:
        for heads in ((32, 8), (32, 32), (64, 4), (64, 1), (6, 2), (128, 1)):
            for max_q in (1, 3, 16, 64, 4096):
                for lists in ((0, 0, 0), (1, 1, 16), (heads[1], 64, 64), (heads[0], 128, 128)):
                    p = problem(
                        card, max_q=max_q, q_heads=heads[0], kv_heads=heads[1], list_heads=lists[0],
                        list_block=lists[1:], listed=8 if lists[0] else 0,
                    )  # fmt: skip
                    assert KERNEL.why_not(p) == []
                    assert KERNEL.default(p) in list(KERNEL.configs(p))
                    for c in KERNEL.configs(p):
                        assert portable.pack(p) <= c.tile_m
                        assert not lists[0] or lists[2] % c.tile_n == 0
                        assert portable.PART % c.tile_n == 0
                        assert portable.parts(p, c) <= portable_parts.MOST


def test_cuts_do_not_depend_on_other_requests() -> None:
    for max_q in (1, 8, 300):
        p = problem(max_q=max_q, max_k=131072)
        c = KERNEL.default(p)
        found = {
            (KERNEL.default(q), portable.most_parts(q, c)) for q in (p, replace(p, requests=1, tokens=max_q))
        }
        assert len(found) == 1


def test_one_long_request_occupies_every_sm() -> None:
    for max_q in (1, 4, 16, 64, 256):
        p = problem(max_q=max_q, max_k=131072, requests=1, tokens=max_q)
        c = KERNEL.default(p)
        assert portable._tiles(p, c, 1, max_q) * portable.parts(p, c) >= H200.sm_count, max_q


def test_predictions_grow_with_work_and_never_beat_the_bandwidth() -> None:
    for kind in ("bf16", "e4m3"):
        p = problem(kv_dtype=kind)
        c = KERNEL.default(p)
        assert KERNEL.seconds(p, c) > p.compulsory_bytes / H200.bandwidth
        assert KERNEL.seconds(replace(p, max_k=4 * p.max_k), c) > 3 * KERNEL.seconds(p, c)
    p = problem(max_q=4096, tokens=4096, requests=1, max_k=4096)
    rate = 0.5 * p.useful_flops / KERNEL.seconds(p, KERNEL.default(p))
    assert 50e12 < rate < 500e12


def test_config_sides_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="tile_n of portable"):
        portable.Config(64, 48, 4, 3)


@pytest.fixture(scope="module")
def kernel() -> Any:
    return load("portable.attention_paged")


DECODE = ((1, 3000), (1, 0), (1, 129), (1, 700))

MIXED = ((300, 700), (1, 900), (0, 40), (5, 5), (70, 33))


def decode(*lengths: tuple[int, int], **more: Any) -> PagedCase:
    """8 heads of 128 to 2 of keys, in bf16 and pages of 128."""
    facts: dict[str, Any] = {"dims": (128, 128), "page": 128, "form": "pair", **more}
    return PagedCase("portable", lengths or DECODE, **facts)


def mixed(**more: Any) -> PagedCase:
    return decode(*MIXED, **{"tail": 3, "loose": True, **more})


MAKE = {"decode": decode, "mixed": mixed}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page", "dtype", "kv_dtype", "make"),
    once(product((16, 32, 64, 128, 256), ("bf16", "fp16"), ("", "e4m3"), MAKE), together=2),
)
def test_every_page_and_dtype(
    kernel: Any, page: int, dtype: str, kv_dtype: str, make: str, seed: int
) -> None:
    per = "head" if kv_dtype else ""
    case = MAKE[make](page=page, dtype=dtype, kv_dtype=kv_dtype, scale_per=per, form="one")
    check_paged(kernel, case, device="cuda", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256), (40, 8)], ids=str)
def test_every_head_dim(kernel: Any, dims: tuple[int, int], seed: int) -> None:
    how = ("", "pair"), ("e4m3" if dims != (40, 8) else "", "pair by rows")
    for hand, make in enumerate((decode, mixed)):
        for kv_dtype, form in dealt(how, 2, hand, of=dims):
            check_paged(kernel, make(dims=dims, kv_dtype=kv_dtype, form=form), device="cuda", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (64, 4), (32, 1), (64, 1)], ids=str)
def test_every_group(kernel: Any, heads: tuple[int, int], seed: int) -> None:
    for make in sampled((decode, mixed), 1, of=heads):
        check_paged(kernel, make(heads=heads, dims=(64, 64)), device="cuda", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        {"window": 150, "sinks": 20},
        {"window": 150, "causal": False},
        {"causal": False, "sink_logits": True},
        {"softcap": 10.0, "sink_logits": True},
        {"softcap": 10.0, "kv_dtype": "e4m3", "scale_per": "tensor"},
        {"window": 600, "sinks": 3, "kv_dtype": "e4m3", "sink_logits": True},
    ],
    ids=str,
)
def test_every_option(kernel: Any, more: dict[str, Any], seed: int) -> None:
    ways = [(make, form) for make in (decode, mixed) for form in ("pair", "pair by rows")]
    for make, form in sampled(ways, 1, of=str(more)):
        check_paged(kernel, make(**more, form=form, page=64), device="cuda", seed=seed)


LISTS = (
    ((1, 128), "all"),
    ((1, 64), "kv"),
    ((1, 16), "q"),
    ((64, 64), "kv"),
    ((128, 128), "all"),
    ((64, 32), "q"),
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("listed", "causal", "kv_dtype", "make"),
    once(product(LISTS, (True, False), ("", "e4m3"), MAKE), together=2),
    ids=str,
)
def test_lists(
    kernel: Any, listed: tuple[tuple[int, int], str], causal: bool, kv_dtype: str, make: str, seed: int
) -> None:
    block, heads = listed
    lists = ListForm(block, heads, 15, full=True)
    case = MAKE[make](lists=lists, causal=causal, page=min(128, block[1]), kv_dtype=kv_dtype)
    check_paged(kernel, case, device="cuda", seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_config_and_again_the_same_bits(kernel: Any, dim: int, seed: int) -> None:
    for hand, make in enumerate((decode, mixed)):
        inputs = make(dims=(dim, dim)).make("cuda", seed=seed)
        expected = expected_attention_paged(inputs)
        for c in dealt(kernel.configs(PagedRun(kernel, inputs).problem), 2, hand, of=dim):
            made = PagedRun(kernel, inputs, c)
            first = [x.clone() for x in made.run()]
            made.check(f"seed {seed}", expected)
            for _ in range(10):
                for a, b in zip(made.run(), first, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{c}, seed {seed}"


@pytest.mark.gpu
def test_random_batches(kernel: Any, seed: int) -> None:
    for turn in range(12 if EVERY else 6):
        case = drawn_case(
            seed + turn, requests=(1, 7, 150)[turn % 3], queries=(1, 200)[turn % 2], keys=900, heads=[(8, 2)],
            dims=[(128, 128)], page=[16, 128], dtype=["bf16"], kv_dtype=["", "e4m3"], scale_per=[""], causal=[True],
            window=[0, 300], sinks=[0], softcap=[0.0], sink_logits=[False], lists=[None],
        )  # fmt: skip
        check_paged(kernel, case, device="cuda", seed=seed)


@pytest.mark.gpu
def test_each_request_alone_has_the_same_bits(kernel: Any, seed: int) -> None:
    inputs = decode(*((1, 1 + 37 * i % 5000) for i in range(140))).make("cuda", seed=seed)
    check_alone(kernel, inputs, range(0, 140, 9))


@pytest.mark.gpu
def test_a_graph_stays_right_while_lengths_grow_over_edges_of_pages_and_parts(kernel: Any, seed: int) -> None:
    inputs = decode((1, 2100), (1, 600), (1, 300)).make("cuda", seed=seed)
    made, final = PagedRun(kernel, inputs), inputs.seq_lens.clone()
    inputs.seq_lens.fill_(1)
    made.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.launch()
    for turn in range(40):
        shorter = torch.randint(0, 600, (3,), device="cuda", dtype=torch.int32)
        inputs.seq_lens.copy_((final - (shorter if turn % 2 else shorter % 140)).clamp(min=0))
        inputs.q.normal_()
        made.poison()
        graph.replay()
        made.check(f"turn {turn}, seed {seed}")


@pytest.mark.gpu
def test_nothing_waits_for_the_device(kernel: Any, no_sync: Any, seed: int) -> None:
    made = PagedRun(kernel, mixed().make("cuda", seed=seed))
    made.run()
    torch.cuda.synchronize()
    with no_sync():
        made.run()
    made.check(f"seed {seed}")


@pytest.mark.gpu
def test_new_lengths_and_tables_compile_nothing(kernel: Any, seed: int) -> None:
    from sparsek.attn.kernels.paged import portable

    known = portable._attention.device_caches[torch.cuda.current_device()][0]
    counts = []
    for length in (2000, 2001, 5000, 1500):
        check_paged(kernel, decode((1, length), (1, length // 3)), device="cuda", seed=seed)
        counts.append(len(known))
    assert counts == counts[:1] * 4


@pytest.mark.gpu
def test_hostile_tables_lengths_and_lists_write_nothing_beside_out(kernel: Any, seed: int) -> None:
    names = ("block_table", "seq_lens", "cu_seqlens_q", "lists")
    for lists in (None, ListForm((1, 128), full=True), ListForm((64, 64), "all", full=True)):
        for make in (decode, mixed):
            inputs = make(lists=lists, page=64).make("cuda", seed=seed)
            for count in (1, 1, 2, 3, 4, 4):
                attend_paged(kernel, hostile(inputs, seed + count, *names[:count]))


@pytest.mark.gpu
def test_a_long_request_beside_short_ones(kernel: Any, seed: int) -> None:
    check_paged(kernel, decode((1, 131072), (1, 5)), device="cuda", seed=seed)
