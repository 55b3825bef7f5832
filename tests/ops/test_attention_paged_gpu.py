"""sk.attention_paged on a GPU: recorded calls, CUDA graphs that stay right while lengths grow, and no wait."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import sparsek as sk
from sparsek.engine.launch.recorder import MISS, Recorded
from sparsek.testing.paged_budget import PagedInputs, check_attention_paged
from sparsek.testing.poison import poisoned
from tests.attn.paged_cases import ListForm, PagedCase
from tests.ops.paged import CASES, arguments_of, attend

pytestmark = pytest.mark.gpu

NOTES = [
    "decode", "mixed", "mixed by rows", "window and sinks", "sink logits", "softcap", "lists for each query",
    "lists with full blocks", "fp8 per head", "fp8",
]  # fmt: skip
GROWING = PagedCase("growing", ((1, 300), (1, 31), (1, 1), (1, 600)), page=16, loose=True)


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each recorded call that ran."""
    found: list[int] = []
    repeat = Recorded.__call__

    def call(self: Recorded, *operands: Any) -> Any:
        made = repeat(self, *operands)
        if made is not MISS:
            found.append(1)
        return made

    monkeypatch.setattr(Recorded, "__call__", call)
    return found


@pytest.mark.parametrize("note", NOTES)
@pytest.mark.parametrize("given", [False, True])
def test_recorded_calls_have_the_bits_of_the_first_and_read_other_tensors(
    note: str, given: bool, repeated: list[int]
) -> None:
    inputs = [CASES[note].make("cuda", seed=seed) for seed in range(4)]
    outs = [poisoned(x.q.shape[:2] + x.v.shape[3:], x.q.dtype, "cuda") if given else None for x in inputs]
    found = [attend(x, return_lse=True, out=out) for x, out in zip(inputs, outs, strict=True)]
    assert len(repeated) >= 2, "the third call on is recorded"
    for x, (out, lse), kept in zip(inputs, found, outs, strict=True):
        assert kept is None or kept is out
        assert check_attention_paged(x, out, lse).passed


@pytest.mark.parametrize("note", [note for note in NOTES if "lists" in note])
def test_rows_after_the_last_request_need_no_tiles(note: str) -> None:
    x = CASES[note].make("cuda")
    padded = torch.cat((x.q[: x.end], torch.full_like(x.q, torch.nan)))
    out = attend(x, q=padded, check=True)
    assert torch.equal(out[: x.end], attend(x)[: x.end])
    assert torch.equal(out, attend(x, q=padded))
    assert not out[x.end :].any()


@pytest.mark.parametrize("note", NOTES)
def test_a_graph_follows_lengths_tables_and_lists(note: str) -> None:
    case = replace(CASES[note], loose=True)
    first = case.make("cuda")
    graph, held = _captured(first)
    for seed in (1, 2):
        _copy_into(first, case.make("cuda", seed=seed))
        for x in held:
            x.fill_(torch.nan)
        graph.replay()
        out, lse = attend(first, return_lse=True)
        assert torch.equal(held[0][: first.end], out[: first.end])
        assert torch.equal(held[1][:, : first.end], lse[:, : first.end])


def test_one_graph_serves_all_steps_while_lengths_grow_over_pages() -> None:
    x = GROWING.make("cuda")
    pages = x.block_table.shape[1]
    cache = torch.randn_like(x.cache[0] if isinstance(x.cache, tuple) else x.cache)
    table = torch.randint(0, cache.shape[0], (4, pages), dtype=torch.int32, device="cuda")
    x = x._replace(cache=cache, k=cache[..., :64], v=cache[..., 64:], block_table=table, max_k=pages * 16)
    graph, (out, lse) = _captured(x)
    for _ in range(40):
        x.seq_lens.add_(1).clamp_(max=pages * 16)
        graph.replay()
        assert check_attention_paged(x, out, lse).passed


def test_nothing_waits_for_the_device(no_sync: Any) -> None:
    made = [CASES[note].make("cuda") for note in NOTES]
    for x in made:
        attend(x)
    torch.cuda.synchronize()
    with no_sync():
        for x in made * 3:
            attend(x)


def test_the_bits_of_a_request_do_not_depend_on_others() -> None:
    x = replace(CASES["mixed"], lengths=((1, 3000), (1, 17), (64, 500), (1, 2999))).make("cuda")
    whole = attend(x)
    edges = x.cu_seqlens_q.tolist()
    for r in range(len(edges) - 1):
        alone = attend(
            x, q=x.q[edges[r] : edges[r + 1]], block_table=x.block_table[r : r + 1], seq_lens=x.seq_lens[r : r + 1],
            cu_seqlens_q=x.cu_seqlens_q[r : r + 2] - x.cu_seqlens_q[r],
        )  # fmt: skip
        assert torch.equal(alone, whole[edges[r] : edges[r + 1]]), r


def test_a_policy_with_lengths_on_the_host_does_not_wait_and_is_refused_in_a_capture(no_sync: Any) -> None:
    x = replace(CASES["mixed"], lengths=((1, 200), (300, 300), (130, 600)), form="pair").make("cuda")
    policy = sk.policies.MeanTopK(topk=2, block=64)
    lengths = {"seq_lens": x.seq_lens.cpu(), "cu_seqlens_q": x.cu_seqlens_q.cpu()}
    want = attend(x, mask=policy)
    for _ in range(3):
        found = attend(x, mask=policy, **lengths)
    torch.cuda.synchronize()
    with no_sync():
        found = attend(x, mask=policy, **lengths)
    assert torch.equal(found, want)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        found.zero_()  # torch warns of an empty graph
        with pytest.raises(sk.InvalidInput, match="cannot capture it"):
            attend(x, mask=policy)


def test_bad_tables_read_nothing_outside_and_check_names_them() -> None:
    x = replace(CASES["mixed"], lists=ListForm((1, 64)), page=64).make("cuda")
    bad = x._replace(block_table=x.block_table.clone().fill_(2**31 - 1), seq_lens=x.seq_lens + 10**6)
    attend(bad, max_seqlen_k=None)
    attend(x._replace(block_table=x.block_table.clone().fill_(-5)))
    torch.cuda.synchronize()
    with pytest.raises(sk.InvalidInput, match=r"seq_lens\[0\] is 1000200"):
        attend(bad, max_seqlen_k=None, check=True)


def _captured(x: PagedInputs) -> tuple[torch.cuda.CUDAGraph, tuple[Any, Any]]:
    given, graph = arguments_of(x), torch.cuda.CUDAGraph()
    sk.attention_paged(**given, return_lse=True)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held = sk.attention_paged(**given, return_lse=True)
    return graph, held


def _copy_into(held: PagedInputs, x: PagedInputs) -> None:
    """Writes the tensors of x over those that a graph holds."""
    pairs = [(held.q, x.q), (held.block_table, x.block_table), (held.seq_lens, x.seq_lens)]
    pairs += [(held.cu_seqlens_q, x.cu_seqlens_q), (held.k, x.k), (held.v, x.v)]
    for mine, theirs in (
        (held.sink_logits, x.sink_logits),
        (held.k_scale, x.k_scale),
        (held.v_scale, x.v_scale),
    ):
        if mine is not None and theirs is not None:
            pairs.append((mine, theirs))
    if held.lists is not None and x.lists is not None:
        pairs += zip(held.lists.tensors, x.lists.tensors, strict=True)
    for mine, theirs in pairs:
        mine.copy_(theirs)


@pytest.mark.parametrize("kernel", ["portable.attention_paged", "hopper.attention_paged"])
@pytest.mark.parametrize("lengths", [((1, 700), (1, 30), (1, 1)), ((60, 300), (3, 90)), ((0, 50),)], ids=str)
def test_rows_of_no_request_are_zeros_recorded_and_in_a_graph(
    kernel: str, lengths: Any, no_sync: Any
) -> None:
    """Also where out is wide, which stays as it is; a graph follows the end of the last request."""
    x = PagedCase("tail", lengths, tail=90, page=64, dims=(128, 128), loose=True).make("cuda")
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        found = [attend(x, return_lse=True, kernel=kernel)]
        with no_sync():
            found += [attend(x, return_lse=True, kernel=kernel) for _ in range(4)]
    finally:
        torch.use_deterministic_algorithms(False)
    out = poisoned(x.q.shape[:2] + x.v.shape[3:], x.q.dtype, "cuda")
    _, lse = attend(x, return_lse=True, kernel=kernel, out=out)
    assert bool(out[x.end :].isnan().all())
    for each, of_lse in [*found, (None, lse)]:
        if each is not None:
            assert not each[x.end :].any()
            assert torch.equal(each[: x.end], out[: x.end])
        assert bool((of_lse[:, x.end :] == -torch.inf).all())
        assert torch.equal(of_lse[:, : x.end], lse[:, : x.end])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = attend(x, return_lse=True, kernel=kernel)
    for last in (x.end, max(x.end - 1, 0), 0):
        x.cu_seqlens_q.clamp_(max=last)
        for each in held:
            each.fill_(torch.nan)
        graph.replay()
        assert not held[0][last:].any()
        assert bool((held[1][:, last:] == -torch.inf).all())
        assert not held[0][:last].isnan().any()


def test_sizes_without_room_are_refused_without_a_wait(no_sync: Any) -> None:
    x = CASES["decode"].make("cuda")
    none = sk.PageLists.from_indices(torch.zeros(1, 0, 1, dtype=torch.int32, device="cuda"), (1, 16))
    for name, wrong in (
        ("max_seqlen_q", 0), ("cache", (x.k[:0], x.v[:0])), ("block_table", x.block_table[:, :0]), ("mask", none),
    ):  # fmt: skip
        with no_sync(), pytest.raises(sk.InvalidInput, match=name):
            attend(x, **{name: wrong})
