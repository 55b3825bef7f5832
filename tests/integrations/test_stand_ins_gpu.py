"""The calls that stand in for others' on a GPU: as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek.integrations import block_sparse_attention, fastvideo, flash_attention, flashinfer
from tests.integrations.dense import coin, randn

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


@pytest.mark.parametrize("call", [packed, mapped, listed, several], ids=lambda call: call.__name__)
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
