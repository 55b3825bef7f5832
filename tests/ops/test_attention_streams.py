"""attention and its gradients on a GPU: streams, CUDA graphs, what never waits, memory, torch.compile."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.attn.mask import layout
from sparsek.attn.mask.recorded import FEW
from sparsek.attn.plan.attention import AttentionPlan
from sparsek.engine.launch.recorder import Recorded
from sparsek.engine.plan.cache import PlanCache
from sparsek.testing.attention_budget import check_attention_backward
from tests.ops.tensors import Qkv, check, qkv

pytestmark = pytest.mark.gpu
NoSync = Callable[[], AbstractContextManager[None]]


def inputs(grads: bool = False, length: int = 512) -> Qkv:
    q, k, v = qkv(length, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    return q.requires_grad_(grads), k.requires_grad_(grads), v.requires_grad_(grads)


def mask_of(scores: Tensor) -> sk.BlockMask:
    """Two of four key blocks for each of 4 x 4 query tiles."""
    return sk.BlockMask.topk(scores, 2, causal=True, seq_len=512, block=128)


def scores() -> Tensor:
    return torch.rand(1, 4, 4, 4, device="cuda")


def grad() -> Tensor:
    return torch.randn(2, 4, 512, 64, device="cuda").bfloat16()


def step(
    tensors: Qkv, mask: sk.BlockMask, cotangent: Tensor, deterministic: bool = True, lse: bool = False
) -> tuple[Tensor, ...]:
    """Gradients; of tensors that need none out, and lse if that is asked for."""
    if not tensors[0].requires_grad:
        call: Any = sk.attention
        found = call(*tensors, mask, return_lse=lse)
        return found if lse else (found,)
    return torch.autograd.grad(sk.attention(*tensors, mask, deterministic=deterministic), tensors, cotangent)


def hold(tensors: Qkv, mask: sk.BlockMask, cotangent: Tensor, found: tuple[Tensor, ...]) -> None:
    """Results of `step` are within the budget."""
    if not tensors[0].requires_grad:
        check(tensors, mask, found[0], found[1] if found[1:] else None)
        return
    q, k, v = (x.detach() for x in tensors)
    gate = check_attention_backward(q, k, v, mask, cotangent, found)
    assert gate.passed, gate


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call, and the results that its replays write."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = call()
    return graph, made


both = pytest.mark.parametrize("grads", [False, True], ids=["attention", "gradients"])


@both
def test_neither_a_new_mask_nor_a_known_one_waits_for_the_device(grads: bool, no_sync: NoSync):
    tensors, cotangent = inputs(grads), grad()
    step(tensors, mask_of(scores()), cotangent, lse=True)
    torch.cuda.synchronize()
    given = scores()
    with no_sync():
        mask = mask_of(given)
        results = [step(tensors, mask, cotangent, lse=True) for _ in range(2)]
    for found in results:
        hold(tensors, mask, cotangent, found)


@both
def test_a_captured_graph_replays_with_new_values_in_place(grads: bool):
    if not grads:
        layout.known_layout.cache_clear()  # a mask that is the first of its layout keeps its plan
    tensors, mask, cotangent = inputs(grads), mask_of(scores()), grad()
    step(tensors, mask, cotangent)
    plans: PlanCache | None = None if grads else mask.derived(AttentionPlan, PlanCache)
    graph, found = captured(lambda: step(tensors, mask, cotangent))
    assert plans is None or len(plans) == 1
    for _ in range(3):
        with torch.no_grad():
            for x in (*tensors, cotangent):
                x.copy_(torch.randn_like(x))
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        hold(tensors, mask, cotangent, found)


@both
def test_a_graph_may_hold_the_mask_its_lists_and_the_plans_too(grads: bool):
    """As a model does whose masks follow from its activations: replays see new scores."""
    tensors, given, cotangent = inputs(grads), scores(), grad()
    step(tensors, mask_of(given), cotangent)
    graph, found = captured(lambda: step(tensors, mask_of(given), cotangent))
    for _ in range(3):
        given.copy_(scores())
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        hold(tensors, mask_of(given), cotangent, found)


@both
def test_what_is_built_during_a_capture_is_not_used_outside_of_it(grads: bool):
    tensors, mask, cotangent = inputs(grads), mask_of(scores()), grad()
    step(tensors, mask_of(scores()), cotangent)
    graph, inside = captured(lambda: step(tensors, mask, cotangent))
    hold(tensors, mask, cotangent, step(tensors, mask, cotangent))
    graph.replay()
    hold(tensors, mask, cotangent, inside)


@both
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor_new_masks_are_followed(grads: bool, mode: str):
    torch._dynamo.reset()
    tensors, cotangent = inputs(grads), grad()
    compiled = torch.compile(
        lambda q, k, v, mask: sk.attention(q + 0, k, v, mask) + 0,
        fullgraph=True,
        mode=None if mode == "default" else mode,
    )
    for _ in range(5):
        mask = mask_of(scores())
        out = compiled(*tensors, mask)
        if grads:
            found = torch.autograd.grad(out, tensors, cotangent)
            hold(tensors, mask, cotangent, tuple(x.clone() for x in found))
        else:
            check(tensors, mask, out.clone())


def test_once_planned_nothing_but_the_outputs_is_allocated():
    tensors, mask = inputs(), mask_of(scores())
    # After masks that passed by with few uses the first calls of this one keep no plan of their own.
    for _ in range(2 * FEW):
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("made_by", ["scores", "policy", "documents"])
def test_compiled_by_inductor_masks_are_made_in_the_graph(mode: str, made_by: str, no_sync: NoSync):
    torch._dynamo.reset()
    q, k, v = inputs()
    length = q.shape[2]
    policy = sk.policies.XAttention(threshold=0.7) | sk.policies.MeanTopK(topk=2)

    def make(q: Tensor, given: Tensor) -> sk.BlockMask:
        if made_by == "documents":
            return sk.BlockMask.documents(given, length)
        return policy.mask(q, k) if made_by == "policy" else mask_of(given)

    def draw() -> Tensor:
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
    seen, repeat = [], Recorded.repeat

    def repeated(self: Recorded, operands: Sequence[Tensor]) -> Any:
        seen.append(self)
        return repeat(self, operands)

    monkeypatch.setattr(Recorded, "repeat", repeated)
    tensors = inputs()
    with torch.inference_mode():
        masks = [mask_of(scores()) for _ in range(5)]
    assert seen
    assert not any(mask.full.indices.is_inference() for mask in masks)
    for mask in masks:
        check(tensors, mask, sk.attention(*tensors, mask))


def test_another_stream_waits_for_the_transposed_lists_and_the_plan():
    tensors, mask, cotangent = inputs(True), mask_of(scores()), grad()
    step(tensors, mask_of(scores()), cotangent)
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    step(tensors, mask, cotangent)
    halves = tuple(x.detach().half().requires_grad_() for x in tensors)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(50_000_000)
    step(tensors, mask_of(scores()), cotangent)
    with torch.cuda.stream(other):
        same = step(tensors, mask, cotangent)
        another_plan = step(halves, mask, cotangent.half())  # type: ignore[arg-type]
    torch.cuda.synchronize()
    hold(tensors, mask, cotangent, same)
    hold(halves, mask, cotangent.half(), another_plan)  # type: ignore[arg-type]


def test_an_optimizer_step_in_a_graph_follows_the_eager_one():
    """As training loops are captured: forward, loss, backward, update."""

    def run(captured: bool) -> list[float]:
        torch.manual_seed(0)
        weight = torch.randn(64, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        x = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
        mask = sk.BlockMask.sliding_window(512, 100, block=128, device="cuda")
        losses = torch.zeros(6, device="cuda")
        at = torch.zeros((), dtype=torch.int64, device="cuda")

        def once() -> None:
            q, k, v = (x @ weight).split(64, -1)
            loss = (sk.attention(q, k, v, mask).float() - 1).square().mean()
            (of_weight,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(of_weight, alpha=0.5)
                losses.index_copy_(0, at.view(1), loss.detach().view(1))
                at.add_(1)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            once()
            once()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once()
            for _ in range(4):
                graph.replay()
        else:
            for _ in range(4):
                once()
        return losses.tolist()

    eager = run(captured=False)
    assert run(captured=True) == eager
    assert eager[-1] < eager[0]


def test_once_planned_memory_grows_with_the_operands_only():
    """No more than the gradients in float32, as parts of their sums are kept, and far less than the scores."""
    length = 8192
    tensors, cotangent = inputs(True, length), torch.randn(2, 4, length, 64, device="cuda").bfloat16()
    mask = sk.BlockMask.sliding_window(length, 512, device="cuda")
    step(tensors, mask, cotangent)
    out = sk.attention(*tensors, mask)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(out, tensors, cotangent)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 8 * sum(x.nbytes for x in found)
    assert peak < 2 * 4 * length * length / 8


@pytest.mark.parametrize("kernel", ["hopper.attention_fwd", "portable.attention_fwd"])
def test_the_same_bits_every_time(kernel: str):
    tensors, cotangent = inputs(True), grad()
    mask = sk.BlockMask.sliding_window(512, 200, sinks=70, block=128, device="cuda")
    first = torch.autograd.grad(sk.attention(*tensors, mask, kernel=kernel), tensors, cotangent)
    for _ in range(50):
        again = torch.autograd.grad(sk.attention(*tensors, mask, kernel=kernel), tensors, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_sums_in_any_order_are_within_budget():
    tensors, cotangent, mask = inputs(True), grad(), mask_of(scores())
    hold(tensors, mask, cotangent, step(tensors, mask, cotangent, deterministic=False))
