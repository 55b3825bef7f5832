"""Calls with biases of xFormers on a GPU: as in float64, without a wait, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from random import Random

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.integrations.xformers import memory_efficient_attention
from tests.integrations.dense import dense, randn
from tests.integrations.xformers_biases import FIELDS, Drawn, draw, ints, stand_ins

pytestmark = pytest.mark.gpu
NoSync = Callable[[], AbstractContextManager[None]]


def case(name: str, seed: int) -> tuple[Drawn, list[Tensor], Tensor]:
    """A bias on the GPU, bf16 operands with NaN in the rows of no sequence, and the result in float64."""
    drawn = draw(stand_ins(), name, Random(f"{name} {seed}"), "cuda", page=64 if seed % 2 else 16)
    q = randn(1, drawn.q_len, 8, 64).bfloat16()
    k, v = (randn(1, drawn.kv_len, 2, 64, seed=at).bfloat16() for at in (1, 2))
    wanted = dense(*(x.double().transpose(1, 2) for x in (q, k, v)), seen=drawn.seen)[0].transpose(1, 2)
    gaps = ~drawn.held[:, None, None]
    return drawn, [q.cuda(), *(x.masked_fill(gaps, torch.nan).cuda() for x in (k, v))], wanted


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", FIELDS)
def test_as_in_float64(name: str, no_sync: NoSync) -> None:
    for seed in range(4):
        drawn, operands, wanted = case(name, seed)
        close(memory_efficient_attention(*operands, attn_bias=drawn.bias), wanted)
        with no_sync():
            again = memory_efficient_attention(*operands, attn_bias=drawn.bias)
        close(again, wanted)


@pytest.mark.parametrize("name", FIELDS)
def test_masks(name: str) -> None:
    for seed in range(2):
        drawn, _, _ = case(name, seed)
        mask = sk.BlockMask.from_xformers(drawn.bias, drawn.q_len, drawn.kv_len, device="cuda")
        assert torch.equal(mask.to_dense()[0, 0].cpu(), drawn.seen)


@pytest.mark.parametrize(
    "name", ["BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalGappyKeysMask"]
)
def test_gradients_of_keys_with_gaps(name: str) -> None:
    drawn, operands, _ = case(name, 5)
    leaves = [x.requires_grad_() for x in operands]
    exact = [x.detach().cpu().double().nan_to_num().requires_grad_() for x in operands]
    weight = randn(1, drawn.q_len, 8, 64, seed=9)
    out = memory_efficient_attention(*leaves, attn_bias=drawn.bias)
    wanted = dense(*(x.transpose(1, 2) for x in exact), seen=drawn.seen)[0].transpose(1, 2)
    ours = torch.autograd.grad(out, leaves, weight.bfloat16().cuda())
    for one, other in zip(ours, torch.autograd.grad(wanted, exact, weight.bfloat16().double()), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("paged", [False, True])
def test_lengths_may_change_behind_a_graph(paged: bool) -> None:
    """As with xFormers' from_seqlens_padded_inplace: the tensors of the bias are written to."""
    lib, lengths = stand_ins(), [40, 3, 128]
    at = lib._SeqLenInfo(ints([0, 1, 2, 3], "cuda"), 1, 1, [0, 1, 2, 3])
    steps, held = [0, 128, 256, 384], ints(lengths, "cuda")
    info = lib._PaddedSeqLenInfo(ints(steps, "cuda"), 128, 1, steps, held, lengths, 128)
    bias = lib.BlockDiagonalCausalWithOffsetPaddedKeysMask(at, info)
    if paged:
        table = ints([[1, 0], [5, 4], [3, 2]], "cuda")
        bias = lib.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(at, info, table, 64)
    q = randn(1, 3, 8, 64).bfloat16().cuda()
    k, v = (randn(1, 384, 2, 64, seed=n).bfloat16().cuda() for n in (1, 2))
    for _ in range(2):
        memory_efficient_attention(q, k, v, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = memory_efficient_attention(q, k, v, bias)
    for new in ([128, 128, 1], [64, 65, 127]):
        held.copy_(ints(new))
        graph.replay()
        lengths[:] = new
        mask = sk.BlockMask.from_xformers(bias, 3, 384, device="cpu").to_dense()[0, 0]
        close(
            out, dense(*(x.cpu().double().transpose(1, 2) for x in (q, k, v)), seen=mask)[0].transpose(1, 2)
        )
