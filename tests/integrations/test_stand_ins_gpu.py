"""The calls that stand in for others' on a GPU: as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek import InvalidInput
from sparsek.integrations import block_sparse_attention, fastvideo, flash_attention, flashinfer, selected
from tests.integrations.dense import coin, randn
from tests.refusals import refused

pytestmark = pytest.mark.gpu


def ints(values: Any, device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = ints([0, q.shape[0]], q.device.type)
    types, info = ints([1, 0, -1, 1], q.device.type), ints([0, 0, 0, 0, 1, 2, 0, 0], q.device.type)
    blocks, length = coin(1, 2, 4, 4).to(q.device), q.shape[0]
    return block_sparse_attention.block_sparse_attn_func(
        q, k, v, ends, ends, types, info, blocks, length, length, 0.0, is_causal=True
    )


def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    sizes = ints([64, 5, 64, 64, 0, 64, 64, 64], q.device.type)
    return fastvideo.block_sparse_attn(q, k, v, coin(1, 4, 8, 8).to(q.device), sizes)[0]


def listed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    order = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(at)) for at in range(4)])
    lists = flash_attention.BlockSparseTensorsTorch(
        ints([[[1, 4, 2, 3]]], q.device.type), ints(order[None, None].tolist(), q.device.type)
    )
    q, k, v = (x[None] for x in (q, k, v))
    return flash_attention.flash_attn_func(q, k, v, block_sparse_tensors=lists)[0]


def several(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0, device=q.device))
    rows, columns = ints([[100, 300, 112]] * 4, q.device.type), ints([[12, 500]] * 4, q.device.type)
    kind = str(q.dtype).removeprefix("torch.")
    wrapper.plan(coin(4, 3, 2).to(q.device), rows, columns, 4, 4, 64, q_data_type=kind)
    return wrapper.run(q, k, v)


def chosen(device: str, blocks: int) -> Tensor:
    """Blocks of 512 queries for 4 heads, among them some that documents of 200 and 312 keys lack."""
    return (
        torch.rand((4, 512, blocks), generator=torch.Generator().manual_seed(0))
        .argsort(-1)[..., :2]
        .int()
        .to(device)
    )


def nsa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gates = randn(3, 1, 512, 4, seed=5).to(q).sigmoid()
    blocks = chosen(q.device.type, 8).transpose(0, 1)[None]
    q, k, v = (x[None] for x in (q, k, v))
    options: dict[str, Any] = {"window_size": 50, "cu_seqlens": ints([0, 200, 512], q.device.type)}
    return selected.parallel_nsa(q, k, v, gates[0], gates[1], gates[2], blocks, **options)[0]


def msa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By lists that are kept, and by a CSR that is inverted."""
    ends = ints([0, 200, 512], q.device.type)
    made = selected.build_k2q_csr(chosen(q.device.type, 4), ends, ends, 128)
    options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
    out = selected.sparse_atten_func(q, k, v, made[0], made[1], 2, **options)
    other = selected.sparse_atten_func(q, k, v, made[0].clone(), made[1].clone(), 2, **options)
    assert torch.equal(out, other)
    return out


def infllm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends, blocks = ints([0, 200, 512], q.device.type), chosen(q.device.type, 8)
    return selected.infllmv2_attn_varlen_func(q, k, v, ends, ends, causal=True, topk_idx=blocks)


def moba(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends = ints([0, 200, 512], q.device.type)
    return selected.flash_moba_varlen_func(q, k, v, ends, ends, 312, 312, 64, 2)


CALLED = [packed, mapped, listed, several, nsa, msa, infllm, moba]


@pytest.mark.parametrize("call", CALLED, ids=lambda call: call.__name__)
def test_as_on_the_cpu(call: Callable[..., Tensor]) -> None:
    exact = [randn(512, 4, 64, seed=at).bfloat16() for at in range(3)]
    wanted = call(*(x.double() for x in exact))
    torch.testing.assert_close(call(*(x.cuda() for x in exact)).cpu().double(), wanted, rtol=0.02, atol=0.02)


def test_a_map_of_blocks_waits_for_nothing(no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    q, k, v = (randn(1, 4, 512, 64, seed=at).bfloat16().cuda() for at in range(3))
    sizes, blocks = torch.full((8,), 64, dtype=torch.int32, device="cuda"), coin(1, 4, 8, 8).cuda()
    for _ in range(2):  # compiles
        wanted = fastvideo.block_sparse_attn(q, k, v, blocks, sizes)[0]
    with no_sync():
        found = fastvideo.block_sparse_attn(q, k, v, blocks, sizes)[0]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (64, 256)])
def test_lists_of_few_entries_with_a_mask_mod(block: tuple[int, int]) -> None:
    def call(device: str) -> Tensor:
        q, k, v = (randn(1, 512, 2, 64, seed=at).bfloat16().to(device) for at in range(3))
        tiles = 512 // block[0]
        lists = flash_attention.BlockSparseTensorsTorch(
            torch.ones(1, 1, tiles, dtype=torch.int32, device=device),
            torch.ones(1, 1, tiles, 1, dtype=torch.int32, device=device),
            block_size=block,
        )
        return flash_attention.flash_attn_func(
            q, k, v, mask_mod=lambda b, h, q, k: (q + k) % 3 > 0, block_sparse_tensors=lists
        )[0]

    torch.testing.assert_close(call("cuda").cpu(), call("cpu"), rtol=0.02, atol=0.02)


def test_wrong_lists_are_refused_and_read_nothing() -> None:
    q, k, v = (randn(1, 512, 2, 64, seed=at).bfloat16().cuda() for at in range(3))
    counts, indices = ints([[[1, 9, 1, 1]]], "cuda"), ints([[[[0], [1], [2], [3]]]], "cuda")
    lists = flash_attention.BlockSparseTensorsTorch(counts, indices, counts.clamp(max=0), indices)
    for each in (lists, lists._replace(mask_block_cnt=counts.clamp(max=1), mask_block_idx=indices * 9)):
        mask = flash_attention._listed(q.transpose(1, 2), k.transpose(1, 2), each, False)
        refused("out of range", mask.verify, wait=True)
        with pytest.raises(InvalidInput, match=r"^mask_block_"):
            flash_attention.flash_attn_func(
                q, k, v, mask_mod=lambda b, h, q, k: q >= k, block_sparse_tensors=each
            )
    torch.cuda.synchronize()


@pytest.mark.parametrize("causal", [False, True])
def test_wrong_sizes_and_types_read_nothing(causal: bool) -> None:
    q, k, v = (randn(512, 4, 64, seed=at).bfloat16().cuda() for at in range(3))
    of_q, of_k, of_v = (x.transpose(0, 1) for x in (q, k, v))
    blocks = coin(4, 3, 2).cuda()
    for rows in ([100, 300, 113], [-100, 300, 312], [0, 0, 0], [2**30] * 3):
        wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(0, device="cuda"))
        row_sizes, column_sizes = ints([rows] * 4, "cuda"), ints([[700, -30]] * 4, "cuda")
        wrapper.plan(blocks, row_sizes, column_sizes, 4, 4, 64, causal=causal, q_data_type="bfloat16")
        assert wrapper.run(of_q, of_k, of_v).shape == of_q.shape
        refused("every key needs one value", wrapper.run, of_q, of_k, of_v[:, :500])
    ends, types, info = ints([0, 512], "cuda"), ints([-7, 9, -1, 1], "cuda"), ints([1] * 8, "cuda")
    out = block_sparse_attention.block_sparse_attn_func(
        q, k, v, ends, ends, types, info, coin(1, 1, 4, 4).cuda(), 512, 512, 0.0, is_causal=causal
    )
    assert not out[:, :2].any()
    torch.cuda.synchronize()


def test_gradients_in_padded_rows_go_nowhere() -> None:
    sizes = ints([64, 20, 0, 64], "cuda")
    there = (torch.arange(64, device="cuda") < sizes[:, None]).flatten()[:, None]
    leaves = [randn(1, 2, 256, 64, seed=at).bfloat16().cuda().requires_grad_() for at in range(3)]
    q, k, v = leaves
    out = fastvideo.video_sparse_attn(q, k, v, sizes, topk=2)
    assert not (out * ~there).any()
    weight = randn(*out.shape, seed=5).bfloat16().cuda()
    found = torch.autograd.grad(out, leaves, weight, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(out, leaves, weight * there), strict=True):
        torch.testing.assert_close(one, other)
        assert not (one * ~there).any()
