"""Gradients of attention on a GPU: streams, CUDA graphs of a training step, no waiting, memory, torch.compile."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.testing.attention_budget import check_attention_backward
from tests.ops.tensors import Qkv, qkv

pytestmark = pytest.mark.gpu
NoSync = Callable[[], AbstractContextManager[None]]


def inputs(length: int = 512) -> Qkv:
    q, k, v = qkv(length, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, device="cuda")
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def mask_of(scores: Tensor) -> sk.BlockMask:
    """Two of four key blocks for each of 4 x 4 query tiles."""
    return sk.BlockMask.topk(scores, 2, causal=True, seq_len=512, block=128)


def scores() -> Tensor:
    return torch.rand(1, 4, 4, 4, device="cuda")


def grad() -> Tensor:
    return torch.randn(2, 4, 512, 64, device="cuda").bfloat16()


def check(tensors: Qkv, mask: sk.BlockMask, cotangent: Tensor, found: tuple[Tensor, ...]) -> None:
    q, k, v = (x.detach() for x in tensors)
    gate = check_attention_backward(q, k, v, mask, cotangent, found)
    assert gate.passed, gate


def step(
    tensors: Qkv, mask: "sk.BlockMask | None", cotangent: Tensor, deterministic: bool = True
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sk.attention(*tensors, mask, deterministic=deterministic), tensors, cotangent)


def test_neither_a_new_mask_nor_a_known_one_waits_for_the_device(no_sync: NoSync):
    tensors, cotangent = inputs(), grad()
    step(tensors, mask_of(scores()), cotangent)
    torch.cuda.synchronize()
    given = scores()
    with no_sync():
        mask = mask_of(given)
        results = [step(tensors, mask, cotangent) for _ in range(2)]
    for found in results:
        check(tensors, mask, cotangent, found)


def test_another_stream_waits_for_the_transposed_lists_and_the_plan():
    tensors, mask, cotangent = inputs(), mask_of(scores()), grad()
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
    check(tensors, mask, cotangent, same)
    check(halves, mask, cotangent.half(), another_plan)  # type: ignore[arg-type]


def test_a_training_step_in_a_graph_replays_with_new_values_in_place():
    tensors, mask, cotangent = inputs(), mask_of(scores()), grad()
    step(tensors, mask, cotangent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(tensors, mask, cotangent)
    for _ in range(3):
        with torch.no_grad():
            for x in (*tensors, cotangent):
                x.copy_(torch.randn_like(x))
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        check(tensors, mask, cotangent, found)


def test_a_graph_may_hold_the_mask_its_transposed_lists_and_the_plans_too():
    tensors, given, cotangent = inputs(), scores(), grad()
    step(tensors, mask_of(given), cotangent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(tensors, mask_of(given), cotangent)
    for _ in range(3):
        given.copy_(scores())
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        check(tensors, mask_of(given), cotangent, found)


def test_what_is_built_during_a_capture_is_not_used_outside_of_it():
    tensors, mask, cotangent = inputs(), mask_of(scores()), grad()
    step(tensors, mask_of(scores()), cotangent)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = step(tensors, mask, cotangent)
    check(tensors, mask, cotangent, step(tensors, mask, cotangent))
    graph.replay()
    check(tensors, mask, cotangent, inside)


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
    tensors, cotangent = inputs(length), torch.randn(2, 4, length, 64, device="cuda").bfloat16()
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
    tensors, cotangent = inputs(), grad()
    mask = sk.BlockMask.sliding_window(512, 200, sinks=70, block=128, device="cuda")
    first = torch.autograd.grad(sk.attention(*tensors, mask, kernel=kernel), tensors, cotangent)
    for _ in range(50):
        again = torch.autograd.grad(sk.attention(*tensors, mask, kernel=kernel), tensors, cotangent)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_sums_in_any_order_are_within_budget():
    tensors, cotangent, mask = inputs(), grad(), mask_of(scores())
    check(tensors, mask, cotangent, step(tensors, mask, cotangent, deterministic=False))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_inductor_new_masks_are_followed(mode: str):
    torch._dynamo.reset()
    tensors, cotangent = inputs(), grad()
    compiled = torch.compile(
        lambda q, k, v, mask: sk.attention(q + 0, k, v, mask) + 0,
        fullgraph=True,
        mode=None if mode == "default" else mode,
    )
    for _ in range(5):
        mask = mask_of(scores())
        found = torch.autograd.grad(compiled(*tensors, mask), tensors, cotangent)
        check(tensors, mask, cotangent, tuple(x.clone() for x in found))
