"""FlashAttention-4's call and lists against their documented semantics in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek import InvalidInput
from sparsek.integrations.flash_attention import BlockSparseTensorsTorch, flash_attn_func
from tests.integrations.dense import coin, dense, expanded, of_mask_mod, operands, same, same_gradients


def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of a block map [B, H, Mb, Nb]; entries beyond the counts point outside."""
    counts = blocks.sum(-1, dtype=torch.int32)
    order = torch.sort(blocks.int(), dim=-1, descending=True, stable=True).indices
    places = torch.arange(blocks.shape[-1])
    return counts, torch.where(places < counts[..., None], order, 999).int()


def right(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = dense(q, k, v, seen)
    return out.transpose(1, 2), lse


def before(q_len: int, k_len: int) -> Tensor:
    return torch.arange(k_len) - (torch.arange(q_len)[:, None] + k_len - q_len)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [None, (64, 64), (128, 64), (256, 128)])
@pytest.mark.parametrize("shared", [(1, 1), (2, 4)])
def test_lists(shared: tuple[int, int], block: tuple[int, int] | None, causal: bool) -> None:
    q_len, k_len = 300, 400
    leaves = operands((2, q_len, 4, 16), (2, k_len, 2, 16), (2, k_len, 2, 8))
    side = block or (128, 128)
    grid = -(-q_len // side[0]), -(-k_len // side[1])
    partial, full = coin(*shared, *grid), coin(*shared, *grid, seed=1)
    full &= ~partial
    lists = BlockSparseTensorsTorch(*listed(partial), *listed(full), block_size=block)
    out, lse = flash_attn_func(*leaves, causal=causal, block_sparse_tensors=lists, return_lse=True)
    seen = expanded(partial | full, side, (q_len, k_len))
    wanted, sums = right(*leaves, seen & (before(q_len, k_len) <= 0) if causal else seen)
    same(out, wanted)
    same(lse, sums)
    same_gradients(out, wanted, leaves)


def test_lists_without_full_ones() -> None:
    leaves = operands((1, 256, 2, 16))
    blocks = coin(1, 2, 2, 2, seed=4)
    out, lse = flash_attn_func(*leaves, block_sparse_tensors=BlockSparseTensorsTorch(*listed(blocks)))
    same(out, right(*leaves, expanded(blocks, (128, 128), (256, 256)))[0])
    assert lse is None


@pytest.mark.parametrize("with_full", [False, True])
def test_mask_mod_decides_partial_blocks_only(with_full: bool) -> None:
    shift = torch.tensor([3, 40])

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + k + shift[h]) % 7 < 3 + b

    leaves = operands((2, 200, 2, 16))
    partial, full = coin(1, 1, 2, 2, seed=2), coin(2, 2, 2, 2, seed=3)
    full &= ~partial
    lists = BlockSparseTensorsTorch(*listed(partial), *(listed(full) if with_full else (None, None)))
    for _ in range(2):
        out, _ = flash_attn_func(*leaves, mask_mod=mask_mod, causal=True, block_sparse_tensors=lists)
        seen = expanded(partial, (128, 128), (200, 200)) & of_mask_mod(mask_mod, (2, 2, 200, 200))
        seen = seen | expanded(full, (128, 128), (200, 200)) if with_full else seen
        wanted, _ = right(*leaves, seen)
        same(out, wanted)
        same_gradients(out, wanted, leaves)
        shift += 1  # a write that the kept mask must notice


def test_mask_mod_without_lists() -> None:
    leaves = operands((1, 150, 2, 16))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) | (h == 1)

    wanted, _ = right(*leaves, of_mask_mod(mask_mod, (1, 2, 150, 150)))
    same(flash_attn_func(*leaves, mask_mod=mask_mod)[0], wanted)


@pytest.mark.parametrize(
    ("window", "causal"),
    [
        ((None, None), False), ((-1, -1), True), ((40, 0), False), ((40, 9), True), ((30, 30), False),
        ((10, 70), False), ((130, 2), False), ((0, 5), False), ((None, 20), False), ((50, None), False),
        ((None, None), True), ((None, 500), False),
    ],
)  # fmt: skip
def test_windows(window: tuple[Any, Any], causal: bool) -> None:
    leaves = operands((1, 150, 2, 16), (1, 200, 2, 16), (1, 200, 2, 16))
    left, limit = (None if n == -1 else n for n in window)
    limit = 0 if causal else limit
    ahead, seen = before(150, 200), torch.ones(150, 200, dtype=torch.bool)
    seen = seen if left is None else seen & (ahead >= -left)
    seen = seen if limit is None else seen & (ahead <= limit)
    same(flash_attn_func(*leaves, window_size=window, causal=causal)[0], right(*leaves, seen)[0])


def test_windows_in_one_graph() -> None:
    leaves = operands((1, 150, 2, 16))

    def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, window_size=(10, 70))[0]

    same(torch.compile(near, backend="eager", fullgraph=True)(*leaves), near(*leaves))


def test_what_is_refused() -> None:
    q, k, v = operands((1, 256, 2, 16))
    lists = BlockSparseTensorsTorch(*listed(coin(1, 2, 2, 2)))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"softcap": -1.0}, "softcap"),
        ({"qv": q}, "qv"),
        (
            {"learnable_sink": torch.ones(3)},
            r"learnable_sink is \[3\]; it must be \[2\], a score of each head of q",
        ),
        ({"learnable_sink": torch.ones(2, dtype=torch.int32)}, "learnable_sink"),
        ({"gather_kv_indices": torch.ones(2)}, "gather_kv_indices"),
        ({"score_mod": max}, "score_mod"),
        ({"aux_tensors": [q]}, "aux_tensors"),
        ({"mask_mod": 3}, "mask_mod"),
        ({"window_size": (3, -5)}, "window_size"),
        ({"window_size": (3, 5, 7)}, "window_size"),
        ({"window_size": (3, 0), "block_sparse_tensors": lists}, "give one"),
        ({"block_sparse_tensors": lists._replace(block_size=(96, 96))}, "multiples of 64|mask_block_cnt"),
        ({"block_sparse_tensors": lists._replace(full_block_cnt=lists[0])}, "both"),
        ({"block_sparse_tensors": lists._replace(cu_total_m_blocks=lists[0])}, "packed"),
        ({"block_sparse_tensors": lists._replace(mask_block_cnt=lists[0][:, :, :1])}, "mask_block_cnt"),
    ]
    for options, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            flash_attn_func(q, k, v, **options)


def test_a_soft_cap_and_learned_sinks() -> None:
    q, k, v = operands((2, 70, 4, 16), (2, 90, 2, 16), (2, 90, 2, 8))
    sinks = torch.randn(4, dtype=torch.float32, requires_grad=True)
    out, lse = flash_attn_func(
        q, k, v, causal=True, softcap=3.0, learnable_sink=sinks, softmax_scale=0.5, return_lse=True
    )
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v))
    scores = 3.0 * torch.tanh(q.transpose(1, 2) @ keys.mT * 0.5 / 3.0)
    scores = scores.masked_fill(before(70, 90) > 0, -torch.inf)
    scores = torch.cat((scores, sinks[None, :, None, None].expand(2, 4, 70, 1).to(scores.dtype)), 3)
    want = (scores.softmax(3)[..., :-1] @ values).transpose(1, 2)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(lse, scores.logsumexp(3), atol=1e-5, rtol=1e-4)
    grad = torch.randn_like(want)
    leaves = (q, k, v, sinks)
    for found, right_one in zip(
        torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True
    ):
        torch.testing.assert_close(found, right_one, atol=1e-4, rtol=1e-3)
