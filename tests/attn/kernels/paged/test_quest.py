"""Quest's kernels: code for cards that are not there; on a GPU against loops and the reference, in CUDA graphs."""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sparsek as sk
from sparsek.attn.kernels.paged import quest
from sparsek.attn.reference import quest as reference
from tests.attn.kernels.paged import quest_cases as cases
from tests.attn.kernels.paged.quest_batches import batch
from tests.engine.launch.covering import once
from tests.engine.launch.portable_code import compiled
from tests.problems import CARDS
from tests.sampling import sampled

TABLES = ("block_table", "seq_lens", "cu_seqlens_q", "indices", "starts", "whole", "cut_starts", "cut")


@pytest.mark.parametrize(("card", "kind"), [("sm_90", "bf16"), ("sm_90", "fp8e4nv"), ("sm_80", "bf16")])
def test_summaries_are_read_by_16_bytes_and_multiplied_by_tensor_cores(card: str, kind: str) -> None:
    types = dict.fromkeys(TABLES, "*i32") | {"q": "*bf16", "summaries": f"*{kind}", "out": "*fp32"}
    constants: dict[str, Any] = {
        "PAGE": 128, "D": 128, "WIDE": 128, "GROUP": 4, "ROWS": 16, "PAGES": quest.PAGES,
    }  # fmt: skip
    code = compiled(quest._bounds, types, constants, CARDS[card], 4, 3)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx
    assert "mma.sync" in code.ptx or "wgmma" in code.ptx
    assert code.shared <= CARDS[card].smem_bytes // 3


KINDS = (("sm_90", "bf16"), ("sm_90", "fp8e4nv"), ("sm_80", "fp32"))


@pytest.mark.parametrize(("of", "scan"), once(product(KINDS, (quest.FEW, quest.MANY))), ids=str)
def test_an_update_keeps_all_in_registers_and_needs_no_atomics(of: tuple[str, str], scan: int) -> None:
    card, kind = of
    types = {"keys": f"*{kind}", "slots": "*i64", "summaries": f"*{kind}"}
    constants: dict[str, Any] = {"PAGE": 128, "D": 128, "WIDE": 128, "SCAN": scan}
    code = compiled(quest._update, types, constants, CARDS[card], 4, 3)
    assert code.stack == 0
    assert "ld.global.v4.b32" in code.ptx or kind == "fp8e4nv"
    assert "atom" not in code.ptx


@pytest.mark.parametrize("columns", sampled([16, 1024, quest.MOST_PAGES], 1))
def test_a_row_of_pages_fits(columns: int) -> None:
    types = dict.fromkeys(TABLES, "*i32") | {"bounds": "*fp32"}
    warps = min(max(columns // 512, 1), 32)
    code = compiled(quest._pick, types, {"PAGE": 128, "COLS": columns}, CARDS["sm_90"], warps, 3)
    assert code.stack == 0
    assert code.shared <= CARDS["sm_90"].smem_bytes


E4M3 = torch.float8_e4m3fn


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@cases.choices
def test_pages_are_those_of_the_highest_bounds(case: Any, dtype: torch.dtype) -> None:
    cases.check_choice(case, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3])
@cases.updates
def test_summaries_follow_the_cache(page: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
    for seed in range(5):
        cases.check_update(page, dim, tokens, dtype, "cuda", seed)


@pytest.mark.gpu
def test_many_slots() -> None:
    cases.check_update(16, 64, 5000, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_a_request_grows() -> None:
    cases.check_steps("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_nan() -> None:
    cases.check_nan("cuda")


@pytest.mark.gpu
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


@pytest.mark.gpu
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
