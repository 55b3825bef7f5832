"""attention on a GPU: streams, CUDA graphs, what never waits for the device, torch.compile by inductor."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import sparsek as sk
from sparsek.attn.mask import layout
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.engine.launch.recorder import Recorded
from sparsek.engine.plan.cache import PlanCache
from tests.ops.tensors import Qkv, check, qkv

pytestmark = pytest.mark.gpu
NoSync = Callable[[], AbstractContextManager[None]]


def inputs() -> Qkv:
    return qkv(512, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, device="cuda")


def mask_of(scores: torch.Tensor) -> sk.BlockMask:
    """Two of four key blocks for each of 4 x 4 query tiles."""
    return sk.BlockMask.topk(scores, 2, causal=True, seq_len=512, block=128)


def scores() -> torch.Tensor:
    return torch.rand(1, 4, 4, 4, device="cuda")


def test_neither_a_new_mask_nor_a_known_one_waits_for_the_device(no_sync: NoSync):
    tensors = inputs()
    sk.attention(*tensors, mask_of(scores()), return_lse=True)
    torch.cuda.synchronize()
    given = scores()
    with no_sync():
        mask = mask_of(given)
        results = [sk.attention(*tensors, mask, return_lse=True) for _ in range(2)]
    for out, lse in results:
        check(tensors, mask, out, lse)


def test_once_planned_nothing_but_the_outputs_is_allocated():
    tensors, mask = inputs(), mask_of(scores())
    sk.attention(*tensors, mask, return_lse=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = sk.attention(*tensors, mask, return_lse=True)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + lse.nbytes + 1024


def test_another_stream_waits_for_the_work_of_a_plan():
    tensors, mask = inputs(), mask_of(scores())
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    sk.attention(*tensors, mask)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        out = sk.attention(*tensors, mask)
    torch.cuda.synchronize()
    check(tensors, mask, out)


def test_a_captured_graph_replays_with_new_values_in_place():
    layout.known_layout.cache_clear()  # a mask that is the first of its layout keeps its plan
    tensors, mask = inputs(), mask_of(scores())
    sk.attention(*tensors, mask)
    plans: PlanCache = mask.derived(AttentionPlan, PlanCache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(*tensors, mask)
    assert len(plans) == 1
    for _ in range(3):
        for x in tensors:
            x.copy_(torch.randn_like(x))
        out.fill_(torch.nan)
        graph.replay()
        check(tensors, mask, out)


def test_a_graph_may_hold_the_mask_and_the_plan_too():
    """As a model does whose masks follow from its activations: replays see new scores."""
    tensors, given = inputs(), scores()
    sk.attention(*tensors, mask_of(given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(*tensors, mask_of(given))
    for _ in range(3):
        given.copy_(scores())
        out.fill_(torch.nan)
        graph.replay()
        check(tensors, mask_of(given), out)


def test_a_call_without_a_mask_may_be_captured_after_it_ran_once():
    q, k, v = inputs()
    full = sk.BlockMask.full(q_len=q.shape[2], kv_len=k.shape[2], device="cuda")
    sk.attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sk.attention(q, k, v)
    out.fill_(torch.nan)
    graph.replay()
    check((q, k, v), full, out)


def test_a_call_without_a_mask_waits_for_it_on_another_stream():
    q, k, v = inputs()
    full = sk.BlockMask.full(q_len=q.shape[2], kv_len=k.shape[2], device="cuda")
    torch.cuda._sleep(50_000_000)
    sk.attention(q, k, v)
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        out = sk.attention(q.half(), k.half(), v.half())
    other.synchronize()
    check((q.half(), k.half(), v.half()), full, out)


def test_a_plan_made_during_a_capture_is_not_used_outside_of_it():
    tensors, mask = inputs(), mask_of(scores())
    sk.attention(*tensors, mask_of(scores()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = sk.attention(*tensors, mask)
    check(tensors, mask, sk.attention(*tensors, mask))
    graph.replay()
    check(tensors, mask, inside)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor_new_masks_are_followed(mode: str):
    torch._dynamo.reset()
    q, k, v = tensors = inputs()
    compiled = torch.compile(
        lambda q, mask: sk.attention(q + 0, k, v, mask) + 0,
        fullgraph=True,
        mode=None if mode == "default" else mode,
    )
    for _ in range(5):
        mask = mask_of(scores())
        check(tensors, mask, compiled(q, mask).clone())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("made_by", ["scores", "policy", "documents"])
def test_compiled_by_inductor_masks_are_made_in_the_graph(mode: str, made_by: str, no_sync: NoSync):
    torch._dynamo.reset()
    q, k, v = inputs()
    length = q.shape[2]
    policy = sk.policies.XAttention(threshold=0.7) | sk.policies.MeanTopK(topk=2)

    def make(q: torch.Tensor, given: torch.Tensor) -> sk.BlockMask:
        if made_by == "documents":
            return sk.BlockMask.documents(given, length)
        return policy.mask(q, k) if made_by == "policy" else mask_of(given)

    def draw() -> torch.Tensor:
        if made_by != "documents":
            return scores()
        return torch.tensor(
            [0, *torch.randint(1, length, (2,)).sort().values.tolist(), length], device="cuda"
        )

    compiled = torch.compile(
        lambda q, given: sk.attention(q + 0, k, v, make(q + 0, given)) + 0,
        fullgraph=True,
        mode=None if mode == "default" else mode,
    )
    for _ in range(6):
        x, given = torch.randn_like(q), draw()
        out = compiled(x, given).clone()
        check((x, k, v), make(x, given), out)
    with no_sync():
        compiled(x, given)


def test_builders_are_repeated_in_inference_mode(monkeypatch: pytest.MonkeyPatch):
    seen, repeat = [], Recorded.__call__

    def repeated(self: Recorded, *operands: torch.Tensor) -> Any:
        seen.append(self)
        return repeat(self, *operands)

    monkeypatch.setattr(Recorded, "__call__", repeated)
    tensors = inputs()
    with torch.inference_mode():
        masks = [mask_of(scores()) for _ in range(5)]
    assert seen
    assert not any(mask.full.indices.is_inference() for mask in masks)
    for mask in masks:
        check(tensors, mask, sk.attention(*tensors, mask))
