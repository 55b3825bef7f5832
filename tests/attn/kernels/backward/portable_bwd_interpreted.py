"""portable.attention_bwd in Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.backward import bwd_walks
from sparsek.attn.kernels.backward import portable_bwd as portable
from sparsek.attn.kernels.backward.portable_bwd import Config, Tile
from sparsek.attn.kernels.backward.sinks import launched
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention_plans import differentiated
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.attn.plan.kernels import AttentionGradCall
from sparsek.attn.reference.scores import sink_gradients
from sparsek.distributed import plan as mesh_plan
from sparsek.distributed.pieces import Piece, key_pieces, query_piece
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import random_bits
from tests.attn.kernels.backward.grad_cases import (
    differentiate,
    inputs,
    judged,
    problem,
)
from tests.attn.kernels.portable_interpreted import APART, FEW, normal, operands
from tests.distributed.test_pieces import moved
from tests.sampling import sampled

HALF = torch.float16
KERNEL: Any = portable.KERNEL
SMALL, LARGE = (64, 64), (128, 128)


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, config: Config | None = None, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, after the gate."""
    given = inputs(q, k, v, mask, **more)
    found = differentiate(KERNEL, given, config)
    gate = judged(given, found)
    assert gate.passed, f"{mask} {config}: {gate}"
    return found


@pytest.mark.parametrize("part", sampled([2, 3], 1))
def test_tiles_in_parts_are_within_budget_and_give_the_same_bits(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of partial and full blocks; key tiles that no query visits; rules of bits; blocks that differ in size."""
    monkeypatch.setattr(bwd_walks, "longest_part", lambda *given: part)
    sinks = BlockMask.sliding_window(200, 70, sinks=3, block=SMALL, device="cpu")
    bits = random_bits("cpu", (200, 140), (64, 128), heads=2, density=0.8)
    absent = BlockMask.from_blocks([0, 2, 4, 6], [0, 3, 0, 3, 0, 4], 150, 300, SMALL, device="cpu")
    for mask, config in (
        (sinks, FEW),
        (bits, Config(Tile(128, 32, 4, 1), Tile(64, 64, 4, 1))),
        (absent, APART),
    ):
        q, k, v = operands(mask, (2, 1))
        work: Any = KERNEL.prepare(problem(q, k, v, mask), config, mask)
        assert work.keys.slots > 0
        assert work.queries.slots > 0 or mask is not sinks
        found = check(q, k, v, mask, config, with_lse=True)
        again = differentiate(KERNEL, inputs(q, k, v, mask, with_lse=True), config)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_saw_nothing_give_nothing_whatever_their_gradients() -> None:
    mask = BlockMask.causal(q_len=150, kv_len=90, block=SMALL, device="cpu")
    given = inputs(*operands(mask), mask, with_lse=True)
    assert given.grad_lse is not None
    assert (given.lse == -torch.inf).sum() == 60
    expected = differentiate(KERNEL, given)
    assert judged(given, expected).passed
    assert (expected[0][:, :, :60] == 0).all()
    given.grad_lse[:, :, :60] = torch.nan
    found = differentiate(KERNEL, given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("lead", "section"), sampled([(0, 1), (1, 3), (2, 8), (3, 2)], 1))
def test_every_order_of_heads_gives_the_same_bits(lead: int, section: int) -> None:
    mask = BlockMask.causal(150, block=SMALL, device="cpu")
    q, k, v = normal(2, 2, 150, 32), normal(2, 1, 150, 32, seed=1), normal(2, 1, 150, 32, seed=2)
    given = inputs(q, k, v, mask)
    expected = differentiate(KERNEL, given, FEW)
    work: Any = KERNEL.prepare(problem(q, k, v, mask), FEW, mask)
    other = replace(
        work, **{x: replace(getattr(work, x), lead=lead, section=section) for x in ("keys", "queries")}
    )
    found = [poisoned(x.shape, HALF) for x in (q, k, v)]
    KERNEL.launch(FEW, other, AttentionGradCall(*given[:9], found[0], found[1], found[2]))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ranks_of_a_mesh_have_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """dQ on the ranks of queries, dK and dV on those of keys; tiles are cut by the size of the whole problem."""
    monkeypatch.setattr(bwd_walks, "longest_part", lambda visited, *_: max(2, visited // 6))
    mask = BlockMask.sliding_window(200, 110, sinks=3, block=SMALL, device="cpu")
    q, k, v = normal(1, 2, 200, 32), normal(1, 1, 200, 32, seed=1), normal(1, 1, 200, 32, seed=2)
    whole = inputs(q, k, v, mask, with_lse=True)
    given = q, k, v, whole.out, whole.lse, whole.grad, whole.grad_lse

    def gradients(mask: BlockMask, *of: Tensor | None) -> tuple[Tensor, ...]:
        call = Attended(of[0], of[1], of[2], mask)  # pyright: ignore[reportArgumentType]
        return differentiated(Differentiated(call, *of[3:]), KERNEL.name)  # pyright: ignore[reportArgumentType]

    right, plan = gradients(mask, *given), mesh_plan(mask, 2)
    plans = [replace(plan, rank=rank, _kept={}) for rank in range(2)]
    at = [torch.from_numpy(plan._parts.queries.positions(rank)) for rank in range(2)]
    keys = [key_pieces(each, 1, 1, q.device, 1, exact=True)[0] for each in plans]
    queries = [query_piece(each, 1, 2, q.device) for each in plans]

    def seen(pieces: list[Piece], x: Tensor) -> list[Tensor]:
        shards = [x.index_select(2, own) for own in at]
        return (
            moved(pieces, shards)
            if x.dim() == 4
            else [each.squeeze(-1) for each in moved(pieces, [own.unsqueeze(-1) for own in shards])]
        )

    all_k, all_v = seen(keys, k), seen(keys, v)
    of_queries = [seen(queries, x) for x in (q, *given[3:]) if x is not None]
    for rank, own in enumerate(at):
        mine = [x.index_select(2, own) for x in given if x is not None]
        dq = gradients(keys[rank].mask, mine[0], all_k[rank], all_v[rank], *mine[3:])[0]
        assert torch.equal(dq, right[0].index_select(2, own))
        their_q, *theirs = (x[rank] for x in of_queries)
        of_keys = gradients(queries[rank].mask, their_q, mine[1], mine[2], *theirs)[1:]
        for found, wanted in zip(of_keys, right[1:], strict=True):
            assert torch.equal(found, wanted.index_select(2, own))


def test_the_gradient_of_sinks_is_that_of_the_reference() -> None:
    draw = torch.Generator().manual_seed(0)
    out, grad = (torch.randn(2, 3, 2500, 40, generator=draw).to(HALF) for _ in range(2))
    lse, grad_lse = torch.randn(2, 3, 2500, generator=draw), torch.randn(2, 3, 2500, generator=draw)
    lse[:, 1, 7] = -torch.inf
    sinks = torch.tensor([0.3, -torch.inf, 2.0]).to(HALF)
    right = sink_gradients(out.double(), lse.double(), grad.double(), grad_lse.double(), sinks)
    torch.testing.assert_close(
        launched(out, lse, grad, grad_lse, sinks).double(), right, rtol=1e-4, atol=1e-3
    )
