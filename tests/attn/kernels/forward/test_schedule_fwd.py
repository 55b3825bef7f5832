"""attention/schedule_fwd.py on a GPU: the plan's schedule, no sync, graphs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.core.device import H200

pytest.importorskip("triton")

from sparsek.attn.kernels.forward import hopper_fwd
from sparsek.attn.kernels.forward.schedule_fwd import launched
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan import attention_schedule as plan
from sparsek.attn.plan.attention_schedule import TileShape
from sparsek.attn.plan.kernels import AttentionCall
from sparsek.attn.plan.problems import AttentionProblem
from sparsek.testing.attention_budget import check_attention
from tests.attn.kernels.planned import attend
from tests.attn.kernels.planned import attention_problem as problem_of
from tests.plan.test_attention_schedule import bounded, problem, same


def scores(batch: int, heads: int, rows: int, columns: int) -> Tensor:
    return torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(rows)).cuda()


def uneven(rows: int, columns: int, batch: int, heads: int) -> BlockMask:
    """Rows of every length."""
    generator = torch.Generator().manual_seed(columns)
    counts = torch.randint(0, columns + 1, (batch * heads * rows,), generator=generator)
    counts[::7] = 0
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    indices = torch.cat([torch.arange(n) for n in counts.tolist()]).int()
    return BlockMask.from_blocks(
        indptr.cuda(), indices.cuda(), rows * 128 - 5, columns * 128, 128, batch=batch, heads=heads
    )


# A mask on a GPU, and batch, heads of q and heads of k of a problem.
CASES: dict[str, tuple[Callable[[], BlockMask], tuple[int, int, int]]] = {
    "top-k 8K": (lambda: BlockMask.topk(scores(1, 16, 64, 64), 8, seq_len=8192), (1, 16, 16)),
    "top-k causal, batch": (
        lambda: BlockMask.topk(scores(2, 4, 40, 40), 9, causal=True, seq_len=40 * 64, block=64),
        (2, 8, 4),
    ),
    "causal 32K": (lambda: BlockMask.causal(32768, device="cuda"), (2, 32, 8)),
    "causal 128K": (lambda: BlockMask.causal(131072, device="cuda"), (1, 32, 8)),
    "window 512K": (lambda: BlockMask.sliding_window(524288, 4096, device="cuda"), (1, 16, 16)),
    "sinks": (lambda: BlockMask.sliding_window(20000, 1000, sinks=128, device="cuda"), (3, 4, 2)),
    "global rows": (lambda: BlockMask.bigbird(40000, 256, 128, 2, block=64, device="cuda"), (1, 8, 8)),
    "few queries": (lambda: BlockMask.causal(q_len=3, kv_len=70000, device="cuda"), (2, 32, 8)),
    "many lists": (lambda: uneven(33, 70, 3, 20), (3, 20, 20)),
    "lists of items": (lambda: uneven(17, 40, 4, 1), (4, 6, 2)),
    "documents": (
        lambda: BlockMask.block_diagonal([5000, 100, 64, 9000, 3], device="cuda"),
        (1, 4, 4),
    ),
    "bounds": (lambda: bounded(BlockMask.sliding_window(9000, 2000, device="cuda"), 3), (2, 8, 2)),
    "no blocks": (lambda: BlockMask.causal(q_len=1100, kv_len=600, q_offset=-9000, device="cuda"), (1, 2, 2)),
}

SMALL = replace(H200, l2_bytes=1 << 20)


def posed(name: str) -> tuple[BlockMask, AttentionProblem]:
    make, (batch, q_heads, kv_heads) = CASES[name]
    mask = make()
    return mask, problem(mask, batch, (q_heads, kv_heads))


def shapes(p: AttentionProblem) -> list[TileShape]:
    found = [TileShape(64, 1, 132), TileShape(64, 1, 264)]
    if p.block[0] == 128:
        found.append(TileShape(128, 1, 132))
    if p.mask_heads <= p.kv_heads and p.group % 2 == 0:
        found.append(TileShape(32, 2, 132))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_plans_schedule_without_a_sync(
    name: str, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    mask, posed_p = posed(name)
    for p in (posed_p, replace(posed_p, card=SMALL)):
        for shape in shapes(p):
            wanted = plan.schedule(p, mask, shape)
            same(launched(p, mask, shape), wanted)
            torch.cuda.synchronize()
            with no_sync():
                found = launched(p, mask, shape)
            same(found, wanted)


@pytest.mark.gpu
def test_in_a_cuda_graph_the_schedule_follows_the_lists() -> None:
    mask = uneven(33, 70, 3, 20)
    p, shape = problem(mask, 3, (20, 20)), TileShape(128, 1, 132)
    launched(p, mask, shape)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = launched(p, mask, shape)
    parts = (*mask.full[:2], *mask.partial[:2])
    before = [part.clone() for part in parts]
    for seed in range(20):
        order = torch.randperm(mask.rows, generator=torch.Generator().manual_seed(seed)).cuda()
        for part, rows in zip(parts, before, strict=True):
            part.copy_(rows[order])
        graph.replay()
        same(found, plan.schedule(p, mask, shape))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["top-k causal, batch", "sinks", "global rows", "few queries", "lists of items"]
)
def test_attention_with_these_schedules(name: str) -> None:
    mask, p = posed(name)
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(heads: int, length: int) -> Tensor:
        return torch.randn(
            p.batch, heads, length, 64, generator=generator, dtype=torch.bfloat16, device="cuda"
        )

    q, k, v = normal(p.q_heads, p.q_len), normal(p.kv_heads, p.kv_len), normal(p.kv_heads, p.kv_len)
    kernel: Any = hopper_fwd.KERNEL
    posed_p = problem_of(q, k, v, mask)
    if reasons := kernel.why_not(posed_p):
        pytest.skip(reasons[0])
    found, sums = attend(kernel, q, k, v, mask, None, None)
    tiles = mask.grid[
        0
    ]  # of 625 each takes float64 a twentieth of a second: the first, which are cut, and every fifth
    rows = None if tiles < 500 else [*range(10), *range(10, tiles - 1, 5), tiles - 1]
    gate = check_attention(q, k, v, mask, found, sums, rows=rows)
    assert gate.passed, gate
    assert found.isfinite().all()
    out = torch.empty_like(q)
    c = kernel.default(posed_p)
    work = hopper_fwd.Work(
        plan.schedule(posed_p, mask, kernel._shape(posed_p, c)), mask.full.counts.new_zeros(4)
    )
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if c.lse else None
    kernel.launch(c, work, AttentionCall(q, k, v, mask, 0.125, out, lse))
    again = torch.empty_like(q)
    kernel.launch(c, kernel.prepare(posed_p, c, mask), AttentionCall(q, k, v, mask, 0.125, again, lse))
    assert torch.equal(out, again)
