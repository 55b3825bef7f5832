"""portable.attention_paged on a GPU: every option and config, CUDA graphs over growing lengths, hostile tables.

Inputs are fresh in every run; a failure prints the seed.
"""

from itertools import product
from typing import Any

import pytest
import torch

from sparsek.engine.table import load
from sparsek.testing.paged_budget import expected_attention_paged
from tests.attn.kernels.paged.calls import PagedRun, attend_paged, check_alone, check_paged, hostile
from tests.attn.paged_cases import ListForm, PagedCase, drawn_case
from tests.engine.launch.covering import once
from tests.sampling import EVERY, dealt, sampled

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (192, 128), (256, 256), (40, 8)], ids=str)
def test_every_head_dim(kernel: Any, dims: tuple[int, int], seed: int) -> None:
    how = ("", "pair"), ("e4m3" if dims != (40, 8) else "", "pair by rows")
    for hand, make in enumerate((decode, mixed)):
        for kv_dtype, form in dealt(how, 2, hand, of=dims):
            check_paged(kernel, make(dims=dims, kv_dtype=kv_dtype, form=form), device="cuda", seed=seed)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (64, 4), (32, 1), (64, 1)], ids=str)
def test_every_group(kernel: Any, heads: tuple[int, int], seed: int) -> None:
    for make in sampled((decode, mixed), 1, of=heads):
        check_paged(kernel, make(heads=heads, dims=(64, 64)), device="cuda", seed=seed)


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


def test_random_batches(kernel: Any, seed: int) -> None:
    for turn in range(12 if EVERY else 6):
        case = drawn_case(
            seed + turn, requests=(1, 7, 150)[turn % 3], queries=(1, 200)[turn % 2], keys=900, heads=[(8, 2)],
            dims=[(128, 128)], page=[16, 128], dtype=["bf16"], kv_dtype=["", "e4m3"], scale_per=[""], causal=[True],
            window=[0, 300], sinks=[0], softcap=[0.0], sink_logits=[False], lists=[None],
        )  # fmt: skip
        check_paged(kernel, case, device="cuda", seed=seed)


def test_each_request_alone_has_the_same_bits(kernel: Any, seed: int) -> None:
    inputs = decode(*((1, 1 + 37 * i % 5000) for i in range(140))).make("cuda", seed=seed)
    check_alone(kernel, inputs, range(0, 140, 9))


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


def test_nothing_waits_for_the_device(kernel: Any, no_sync: Any, seed: int) -> None:
    made = PagedRun(kernel, mixed().make("cuda", seed=seed))
    made.run()
    torch.cuda.synchronize()
    with no_sync():
        made.run()
    made.check(f"seed {seed}")


def test_new_lengths_and_tables_compile_nothing(kernel: Any, seed: int) -> None:
    from sparsek.attn.kernels.paged import portable

    known = portable._attention.device_caches[torch.cuda.current_device()][0]
    counts = []
    for length in (2000, 2001, 5000, 1500):
        check_paged(kernel, decode((1, length), (1, length // 3)), device="cuda", seed=seed)
        counts.append(len(known))
    assert counts == counts[:1] * 4


def test_hostile_tables_lengths_and_lists_write_nothing_beside_out(kernel: Any, seed: int) -> None:
    names = ("block_table", "seq_lens", "cu_seqlens_q", "lists")
    for lists in (None, ListForm((1, 128), full=True), ListForm((64, 64), "all", full=True)):
        for make in (decode, mixed):
            inputs = make(lists=lists, page=64).make("cuda", seed=seed)
            for count in (1, 1, 2, 3, 4, 4):
                attend_paged(kernel, hostile(inputs, seed + count, *names[:count]))


def test_a_long_request_beside_short_ones(kernel: Any, seed: int) -> None:
    check_paged(kernel, decode((1, 131072), (1, 5)), device="cuda", seed=seed)
