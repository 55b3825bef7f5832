"""The parts of masks and tensors that ranks have, without processes.

On a GPU out and lse have the bits of one process. Gradients do not: the backward plans of one process and of a rank add
in other orders (docs/notes/attention-order.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsek as sk
from sparsek.attn.ops.attention_plans import differentiated
from sparsek.attn.plan.attention import Attended
from sparsek.attn.plan.attention_grad import Differentiated
from sparsek.core.errors import Unsupported
from sparsek.distributed.exchange import rows_of
from sparsek.distributed.pieces import Piece, key_pieces, query_piece
from sparsek.distributed.plan import MeshPlan
from sparsek.distributed.submask import heads_part, submask
from sparsek.testing.attention_budget import check_attention_backward
from tests.distributed.mesh_cases import masks

CPU = torch.device("cpu")
WHOLE = (
    "documents",
    "cu_seqlens",
    "window",
    "map of heads of k",
    "map of heads of q",
    "bits",
    "few",
    "other lengths",
)


def _of(parts: Sequence[np.ndarray], side: int, length: int, wide: int) -> np.ndarray:
    """Tokens of each group's blocks [groups, wide], filled up with -1."""
    made = np.full((len(parts), wide), -1)
    for row, blocks in zip(made, parts, strict=True):
        tokens = (blocks[:, None] * side + np.arange(side)).ravel()
        row[: tokens.size] = np.where(tokens < length, tokens, -1)
    return made


@pytest.mark.parametrize("name", WHOLE)
def test_a_part_of_a_mask_has_its_elements(name: str) -> None:
    mask, draw = masks()[name], np.random.default_rng(0)
    groups, (tiles, columns), (bq, bk) = mask.batch * mask.heads, mask.grid, mask.block
    kept = [np.flatnonzero(draw.random(columns) < 0.7) for _ in range(groups)]
    rows = [np.flatnonzero(draw.random(tiles) < 0.7) for _ in range(groups)]
    lengths = max(map(len, rows)) * bq, max(map(len, kept)) * bk
    found = submask(mask, rows, kept, *lengths, CPU).to_dense().view(groups, *lengths)
    whole = mask.to_dense().expand(mask.batch, mask.heads, -1, -1).reshape(groups, mask.q_len, mask.kv_len)
    q, k = _of(rows, bq, mask.q_len, lengths[0]), _of(kept, bk, mask.kv_len, lengths[1])
    for group in range(groups):
        right = whole[group][q[group]][:, k[group]]
        there = torch.from_numpy((q[group] >= 0)[:, None] & (k[group] >= 0))
        assert torch.equal(found[group] & there, right & there)


def test_heads_of_a_mask_have_its_elements() -> None:
    mask = masks()["map of heads of q"]
    found = heads_part(mask, np.array([1, 1, 3]), CPU)
    assert torch.equal(found.to_dense(), mask.to_dense()[:, [1, 1, 3]])


def moved(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What an exchange brings to every rank, from the tensors [B, H, own, E] of all."""
    sent = [
        rows_of(x).index_select(0, piece.exchange.send).split(piece.exchange.send_counts)
        for piece, x in zip(pieces, tensors, strict=True)
    ]
    found = []
    for rank, piece in enumerate(pieces):
        each, x = piece.exchange, tensors[rank]
        made = x.new_zeros((each.rows, x.shape[3]))
        made.index_copy_(0, each.place, torch.cat([of[rank] for of in sent]))
        found.append(made.view(*x.shape[:2], piece.length, x.shape[3]))
    return found


def gradients(
    given: Sequence[Tensor], mask: Any, kernel: str | None, results: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    (q, k, v), (out, lse, grad, grad_lse) = given, results
    return differentiated(Differentiated(Attended(q, k, v, mask), out, lse, grad, grad_lse), kernel)


def _bits(a: Tensor, b: Tensor, device: str) -> None:
    """Equal on a GPU; on a CPU, where bits follow shapes, within rounding."""
    if device == "cuda":
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


MANY: dict[str, Any] = {
    "causal": sk.BlockMask.causal,
    "window": lambda n, **at: sk.BlockMask.sliding_window(n, n // 5, sinks=3, **at),
    "documents": lambda n, **at: sk.BlockMask.block_diagonal([n // 3, 31, n - n // 3 - 31], **at),
    "heads": lambda n, **at: sk.BlockMask.from_block_map(
        torch.rand(1, 2, -(-n // 128), -(-n // 128), generator=torch.Generator().manual_seed(0)) < 0.4, n
    ).to(at["device"]),
}


@pytest.mark.parametrize("kernel", ["hopper", "portable"])
@pytest.mark.parametrize("name", MANY)
def test_exact_pieces_give_what_one_process_gives(name: str, kernel: str, device: str) -> None:
    """Out and lse to the bit on a GPU; gradients within the budget, the same bits when computed again."""
    if device == "cpu" and kernel == "portable":
        pytest.skip("kernels of a GPU")
    n, dim, dtype = (2000, 128, torch.bfloat16) if device == "cuda" else (400, 8, torch.float64)
    batch, q_heads, kv_heads = (
        (4, 8, 2) if device == "cuda" else (1, 4, 2)
    )  # so many tiles that forward plans cut none
    forward, backward = (
        (f"{kernel}.attention_fwd", f"{kernel}.attention_bwd") if device == "cuda" else (None, None)
    )
    mask = MANY[name](n, device=device)
    draw = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, heads, n, dim, generator=draw, device=device).to(dtype)
        for heads in (q_heads, kv_heads, kv_heads, q_heads)
    )
    try:
        out, lse = sk.attention(q, k, v, mask, return_lse=True, kernel=forward)
    except Unsupported:
        pytest.skip(f"{forward} does not run here")
    grad_lse = torch.randn(lse.shape, generator=draw, device=device).to(lse.dtype)
    plan = sk.distributed.plan(mask, 3)
    plans: list[MeshPlan] = [replace(plan, rank=rank, _kept={}) for rank in range(3)]
    at = [torch.from_numpy(plan._parts.queries.positions(rank)).to(device) for rank in range(3)]
    where = torch.device(device, 0) if device == "cuda" else CPU
    keys = [key_pieces(each, batch, kv_heads, where, 1)[0] for each in plans]
    queries = [query_piece(each, batch, q_heads, where) for each in plans]

    def shards(x: Tensor) -> list[Tensor]:
        return [x.index_select(2, each) for each in at]

    all_k, all_v = moved(keys, shards(k)), moved(keys, shards(v))
    seen = [moved(queries, shards(x)) for x in (q, out, grad)]
    sums = [moved(queries, shards(x.unsqueeze(-1))) for x in (lse, grad_lse)]
    found = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    for rank, (mine, own_k, own_v, own_grad) in enumerate(
        zip(shards(q), shards(k), shards(v), shards(grad), strict=True)
    ):
        given = mine, all_k[rank], all_v[rank]
        outs = sk.attention(*given, keys[rank].mask, return_lse=True, kernel=forward)
        _bits(outs[0], shards(out)[rank], device)
        _bits(outs[1], shards(lse)[rank], device)
        results = *outs, own_grad, shards(grad_lse)[rank]
        all_lse, all_grad_lse = (x[rank].squeeze(-1) for x in sums)
        theirs = seen[1][rank], all_lse, seen[2][rank], all_grad_lse
        for again in (False, True):
            dq = gradients(given, keys[rank].mask, backward, results)[0]
            _, dk, dv = gradients((seen[0][rank], own_k, own_v), queries[rank].mask, backward, theirs)
            for whole, part in zip(found, (dq, dk, dv), strict=True):
                if again:
                    assert torch.equal(whole.index_select(2, at[rank]), part)
                whole.index_copy_(2, at[rank], part)
    if device == "cuda":
        gate = check_attention_backward(q, k, v, mask, grad, found, grad_lse)
        assert gate.passed, gate
    else:
        right = gradients((q, k, v), mask, backward, (out, lse, grad, grad_lse))
        torch.testing.assert_close(found, right, rtol=1e-11, atol=1e-12)


@pytest.mark.gpu
def test_one_gpu_over_nccl_is_attention() -> None:
    mask = sk.BlockMask.sliding_window(1000, 300, sinks=4, device="cuda")
    q, k, v = (torch.randn(1, heads, 1000, 128, device="cuda").bfloat16() for heads in (4, 2, 2))
    lists = sk.TokenLists(torch.randint(0, 8, (1, 2, 1000, 4), device="cuda"), 128)
    here = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=here)
    try:
        for how in ("gather", "heads"):
            plan = sk.distributed.plan(mask, dist.group.WORLD, how)
            for seen, over in ((mask, plan), (lists, None)):
                learned = [x.clone().requires_grad_() for x in (q, k, v)]
                right = sk.attention(learned[0], learned[1], learned[2], seen)
                attend: Any = sk.distributed.attention
                found = attend(*learned, over or lists, plan=None if over else plan)
                # The mask of lists is made anew in a call of one process, whose plan knows bounds of its sizes.
                if seen is mask:
                    assert torch.equal(found, right)
                torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
                grads = (torch.autograd.grad(x.float().sum(), learned) for x in (found, right))
                for a, b in zip(*grads, strict=True):
                    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
            x = sk.distributed.unshard_sequence(q, plan)
            assert torch.equal(x, q)
    finally:
        dist.destroy_process_group()
