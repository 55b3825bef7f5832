"""attention/schedule_bwd.py on a GPU: the plan's schedule, no sync, graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.backward.schedule_bwd import launched
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_grad_schedule as plan
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.engine.table import load
from tests.attn.kernels.backward.grad_cases import differentiate, inputs, judged
from tests.attn.kernels.forward.test_schedule_fwd import CASES as FORWARD
from tests.attn.kernels.forward.test_schedule_fwd import uneven
from tests.plan.test_attention_grad_schedule import problem, same

CASES = FORWARD | {
    "columns in turn": (lambda: BlockMask.sliding_window(4096, 500, device="cuda"), (1, 16, 16)),
    "columns in turn, blocks of 64": (
        lambda: BlockMask.sliding_window(2048, 200, block=64, device="cuda"),
        (2, 16, 16),
    ),
    "full, in waves": (lambda: BlockMask.full(2500, block=(128, 128), device="cuda"), (2, 12, 12)),
    "causal, in waves": (lambda: BlockMask.causal(4000, device="cuda"), (1, 24, 12)),
}

SMALL = replace(H200, l2_bytes=1 << 22)

# Their visits are millions, which the plan sorts with int64 keys.
LARGE = ("window 512K", "causal 128K")


def posed(name: str) -> tuple[BlockMask, AttentionProblem]:
    make, (batch, q_heads, kv_heads) = CASES[name]
    mask = make()
    return mask, problem(mask, batch, q_heads, kv_heads)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_plans_schedule_without_a_sync(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    mask, posed_p = posed(name)
    for p in (posed_p,) if name in LARGE else (posed_p, replace(posed_p, card=SMALL)):
        for ordered in (True, False):
            wanted = plan.schedule(p, mask, 132, ordered=ordered)
            same(launched(p, mask, 132, ordered=ordered), wanted)
            torch.cuda.synchronize()
            with no_sync():
                found = launched(p, mask, 132, ordered=ordered)
            same(found, wanted)


@pytest.mark.gpu
def test_the_same_schedule_every_time() -> None:
    """Slots and rooms vary from run to run, the schedule does not."""
    for name in ("top-k 8K", "many lists", "causal 32K"):
        mask, p = posed(name)
        first = launched(p, mask, 132)
        there = int(first.tiles[:, 6].sum())
        for _ in range(200):
            again = launched(p, mask, 132)
            assert torch.equal(first.tiles, again.tiles)
            assert torch.equal(first.visits[:there], again.visits[:there])


@pytest.mark.gpu
def test_in_a_cuda_graph_the_schedule_follows_the_lists() -> None:
    mask = uneven(33, 70, 3, 20)
    p = problem(mask, 3, 20, 20)
    launched(p, mask, 132)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launched(p, mask, 132)
    parts = (*mask.full[:2], *mask.partial[:2])
    before = [part.clone() for part in parts]
    for seed in range(10):
        order = torch.randperm(mask.rows, generator=torch.Generator().manual_seed(seed)).cuda()
        for part, rows in zip(parts, before, strict=True):
            part.copy_(rows[order])
        graph.replay()
        same(found, plan.schedule(p, mask, 132))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "name", ["top-k causal, batch", "sinks", "lists of items", "documents", "bounds", *list(CASES)[-4:]]
)
def test_gradients_with_these_schedules(name: str, deterministic: bool) -> None:
    """Repeated calls give the same bits; CTAs follow each other in waves only in wide heads."""
    mask, p = posed(name)
    generator = torch.Generator("cuda").manual_seed(1)
    dim = 128 if "waves" in name else 64
    q, k, v = (
        torch.randn(p.batch, heads, length, dim, generator=generator, dtype=torch.bfloat16, device="cuda")
        for heads, length in ((p.q_heads, p.q_len), (p.kv_heads, p.kv_len), (p.kv_heads, p.kv_len))
    )
    given = inputs(q, k, v, mask)
    kernel = load("hopper.attention_bwd")
    found = differentiate(kernel, given, deterministic=deterministic)
    assert judged(given, found).passed
    if deterministic:
        for _ in range(20):
            again = differentiate(kernel, given)
            assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
