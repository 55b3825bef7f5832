"""attn/kernels/mask/unions.py and pages.py: code for an H200 that is not there; on a GPU the same as on a CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.mask.build.unions import UnionInputs, specified, written
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.device import H200
from sparsek.engine.launch.recorder import record
from tests.attn.mask.drawn_choices import same
from tests.attn.mask.drawn_lists import CASES, drawn, drawn_lists

pytest.importorskip("triton")

from sparsek.attn.kernels.mask import pages, unions
from tests.engine.launch.portable_code import Code, compiled

POINTERS: tuple[str, ...] = (
    "indices", "counts", "bounds", "cut_starts", "cut_counts", "starts", "full_counts", "entries", "lo_of", "hi_of",
    "rules",
)  # fmt: skip


def code(kernel: Any, warps: int, **constants: int) -> Code:
    types: dict[str, str] = dict.fromkeys(POINTERS, "*i32")
    absent = {"counts": None, "bounds": None, "CAUSAL": True, "BK": 128}
    return compiled(kernel, types, absent | constants, H200, warps, 3)


def test_a_tile_of_8_tokens_and_16_blocks_is_one_warp_without_shared_memory() -> None:
    made = code(unions._sorted, 1, TOKENS=8, EACH=16)
    assert (made.shared, made.stack) == (0, 0)
    assert made.registers <= 64, "32 rows share an SM"
    assert made.ptx.count("\n") < 2600


def test_64_blocks_of_32_tokens_are_counted() -> None:
    assert unions.counts_columns(32, 64, 64, 512)
    assert not unions.counts_columns(8, 16, 32, 128)
    made = code(unions._counted, 1, TOKENS=32, EACH=64, COLS=512)
    assert made.stack == 0
    assert made.registers <= 168


def test_a_list_over_pages_is_one_warp() -> None:
    names = (*pages._POINTERS, *pages._SIZES)
    types = {name: "*i32" if name in pages._POINTERS else "i32" for name in names}
    made = compiled(pages._lists, types, {"COUNTED": True, "EACH": 16}, H200, 1, 1, aligned=())
    assert (made.shared, made.stack) == (0, 0)


@pytest.mark.gpu
def test_pages_are_named_once_without_a_wait(no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    cache = torch.randn(9, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.tensor([[3, 0, 7, 1, 8], [2, 5, 4, 0, 0]], dtype=torch.int32, device="cuda")
    lengths, edges = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([70, 33], [0, 5, 7]))
    q = torch.randn(7, 4, 64, dtype=torch.bfloat16, device="cuda")
    lists = drawn_lists((1, 2, 7, 4), 16, 80, 8)
    found = sk.attention_paged(q, cache, table, lengths, edges, lists.to("cuda"))
    torch.cuda.synchronize()
    there = lists.to("cuda")
    with no_sync():
        again = sk.attention_paged(q, cache, table, lengths, edges, there)
    assert torch.equal(again, found)
    wanted = sk.attention_paged(q.cpu(), cache.cpu(), table.cpu(), lengths.cpu(), edges.cpu(), lists)
    torch.testing.assert_close(found.cpu(), wanted, atol=2e-2, rtol=2e-2)


def same_on_gpu(c: UnionInputs) -> None:
    made = written(BlockMask, c, unions.token_unions)
    assert made is not None
    same(made, specified(BlockMask, c))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_both_kernels_make_the_tensors_of_the_specification(
    case: int, count: bool, monkeypatch: pytest.MonkeyPatch, poisoned_memory: None
) -> None:
    monkeypatch.setattr(unions, "counts_columns", lambda *sizes: count)
    same_on_gpu(drawn(case, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "n", "kv_len"), [(16, 16, 8192), (4, 64, 4096), (1, 32, 2048), (8, 24, 200000)]
)
def test_long_lists(group: int, n: int, kv_len: int) -> None:
    lists = drawn_lists((1, 2, 1000, n), 64, kv_len, 0, window=100, sinks=10)
    q, k = torch.empty(1, 2 * group, 1000, 8), torch.empty(1, 2, kv_len, 8)
    mask = lists.to("cuda").mask_for(q.cuda(), k.cuda())
    wanted = lists.mask_for(q, k)
    mask.verify(wait=True)
    assert mask.sizes == wanted.sizes
    for first in (0, 900):
        rows = mask.dense_rows(first, first + 100)
        assert torch.equal(rows.cpu(), wanted.dense_rows(first, first + 100))


@pytest.mark.gpu
def test_it_can_be_recorded() -> None:
    c = drawn(0, "cuda")
    written(BlockMask, c, unions.token_unions)
    made: Any = lambda: written(BlockMask, c, unions.token_unions)  # noqa: E731
    _, again = record(lambda: made()._base, [c.indices])
    assert again is not None
    same(BlockMask.of_layout(c.layout(), again.repeat([c.indices])), specified(BlockMask, c))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
def test_attention_waits_for_nothing_and_graphs_follow_the_lists(
    block: int, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    q, k, v = (torch.randn(1, heads, 1000, 64, dtype=torch.bfloat16, device="cuda") for heads in (16, 2, 2))
    lists = drawn_lists((1, 2, 1000, 4), block, 1000, 0, window=1).to("cuda")
    wanted = [sk.attention(q, k, v, lists) for _ in range(4)]
    torch.cuda.synchronize()
    with no_sync():
        again = sk.attention(q, k, v, lists)
    assert torch.equal(again, wanted[-1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(q, k, v, lists)
    for seed in range(1, 20):
        lists.indices.copy_(drawn_lists((1, 2, 1000, 4), block, 1000, seed).indices)
        graph.replay()
        assert torch.equal(out, sk.attention(q, k, v, lists))
