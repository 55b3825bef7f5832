"""Quest on a GPU: against loops, against the reference, and in CUDA graphs that follow tables and lengths."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sparsek as sk
from sparsek.attn.reference import quest as reference
from tests.attn.kernels.paged import quest_cases as cases
from tests.attn.kernels.paged.quest_batches import batch

pytestmark = pytest.mark.gpu
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@cases.choices
def test_pages_are_those_of_the_highest_bounds(case: Any, dtype: torch.dtype) -> None:
    cases.check_choice(case, "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
@cases.updates
def test_summaries_follow_the_cache(page: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
    for seed in range(5):
        cases.check_update(page, dim, tokens, dtype, "cuda", seed)


def test_many_slots() -> None:
    cases.check_update(16, 64, 5000, torch.bfloat16, "cuda")


def test_a_request_grows() -> None:
    cases.check_steps("cuda", torch.bfloat16)


def test_nan() -> None:
    cases.check_nan("cuda")


@pytest.mark.parametrize("summaries", [torch.bfloat16, E4M3])
def test_long_rows_are_those_of_the_reference(summaries: torch.dtype) -> None:
    b = batch(
        [131072, 70000, 5, 128],
        [1, 16, 5, 2],
        heads=(32, 8),
        page=128,
        dim=128,
        dtype=torch.bfloat16,
        device="cuda",
    )
    b = b._replace(summaries=b.summaries.to(summaries))
    made = sk.policies.Quest(64).lists(b.q, b.summaries, b.block_table, b.seq_lens, b.cu_seqlens_q)
    right = reference.choose(*(b.q, b.summaries, b.block_table, b.seq_lens, b.cu_seqlens_q), 128, 64)
    assert torch.equal(made.full.indices.view_as(right.indices), right.indices)
    for found, expected in zip((*made.full[:2], *made.partial[:2]), right[1:], strict=True):
        assert torch.equal(found, expected)


def test_a_graph_follows_lengths_tables_and_slots_in_place(no_sync) -> None:
    """Nothing in it waits. Replays have the bits of eager calls."""
    page, quest = 16, sk.policies.Quest(6, 16)
    batches = [
        batch(
            *drawn, page=page, dim=64, heads=(8, 2), dtype=torch.bfloat16, seed=seed, device="cuda", spare=0
        )
        for seed, drawn in enumerate([([640, 33], [2, 1]), ([33, 640], [1, 2]), ([640, 20], [0, 3])])
    ]
    most = min(len(b.keys) for b in batches)
    assert all(b.block_table.shape == batches[0].block_table.shape for b in batches)
    held = [x.clone() for x in batches[0]]
    held[1], held[2] = held[1][:most].clone(), held[2][:most].clone()
    slots = torch.tensor([5, 6, 40], device="cuda")
    q, keys, summaries, *rest = held

    def step() -> list[torch.Tensor]:
        quest.update(keys, slots, summaries)
        made = quest.lists(q, summaries, *rest)
        return [*made.full, *made.partial[:2]]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        written = step()
    for turn, b in enumerate(batches * 3):
        for x, new in zip(held, (b.q, b.keys[:most], b.summaries[:most], *b[3:]), strict=True):
            x.copy_(new)
        slots.copy_(torch.randint(0, most * page, (3,), device="cuda"))
        for x in written:
            x.fill_(-7)
        graph.replay()
        found = [x.clone() for x in (*written, summaries)]
        summaries.copy_(b.summaries[:most])
        with no_sync():
            eager = step()
        for x, y in zip(found, (*eager, summaries), strict=True):
            assert torch.equal(x, y), turn
