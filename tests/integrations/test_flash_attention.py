"""FlashAttention-4's call and lists against their documented semantics in plain torch."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek import InvalidInput
from sparsek.integrations import flash_attention
from sparsek.integrations.flash_attention import (
    BlockSparseTensorsTorch,
    flash_attn_func,
    flash_attn_varlen_func,
)
from tests.engine.launch.covering import once
from tests.integrations.dense import coin, dense, expanded, of_mask_mod, operands, same, same_gradients
from tests.refusals import refused


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


BLOCKS = (None, (64, 64), (128, 64), (256, 128), (64, 256))


@pytest.mark.parametrize(
    ("shared", "block", "causal"), once(product(((1, 1), (2, 4)), BLOCKS, (False, True)), together=2)
)
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


@pytest.mark.parametrize("block", [(128, 128), (256, 128), (64, 256)])
@pytest.mark.parametrize("with_full", [False, True])
def test_lists_with_fewer_entries_than_key_blocks(block: tuple[int, int], with_full: bool) -> None:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + 2 * k + h) % 5 < 3

    q_len, k_len = 390, 600
    leaves = operands((1, q_len, 2, 16), (1, k_len, 1, 16))
    rows, columns = -(-q_len // block[0]), -(-k_len // block[1])
    places = torch.arange(rows)
    partial, full = (torch.zeros(1, 1, rows, columns, dtype=torch.bool) for _ in range(2))
    partial[0, 0, places, (2 * places) % columns] = True
    full[0, 0, places, (2 * places + 1) % columns] = True
    lists: list[Any] = [None] * 4
    for at, blocks in enumerate((partial, full)[: 1 + with_full]):
        counts, indices = listed(blocks)
        lists[2 * at : 2 * at + 2] = counts, indices[..., :1].contiguous()
    given = BlockSparseTensorsTorch(*lists, block_size=block)
    out, _ = flash_attn_func(*leaves, mask_mod=mask_mod, block_sparse_tensors=given)
    seen = expanded(partial, block, (q_len, k_len)) & of_mask_mod(mask_mod, (1, 2, q_len, k_len))
    seen = seen | expanded(full, block, (q_len, k_len)) if with_full else seen
    wanted, _ = right(*leaves, seen)
    same(out, wanted)
    same_gradients(out, wanted, leaves)


def test_the_lists_of_a_mask_of_sparsek() -> None:
    leaves, mask = operands((1, 512, 2, 16)), sk.BlockMask.sliding_window(512, window=100)
    lists = mask.to_fa4()

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k >= lists.lo[0, 0, q]) & (k < lists.hi[0, 0, q])

    given = BlockSparseTensorsTorch(*lists[:4], block_size=lists.block_size)
    out, _ = flash_attn_func(*leaves, mask_mod=mask_mod, block_sparse_tensors=given)
    same(out, right(*leaves, mask.to_dense())[0])


def test_the_same_lists_in_other_blocks() -> None:
    leaves = operands((1, 128, 1, 16), (1, 256, 1, 16))
    lists = BlockSparseTensorsTorch(*listed(torch.tensor([[[[False, True]]]])), block_size=(128, 128))

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return k != 70

    for keys in (128, 64):
        given = lists._replace(block_size=(128, keys))
        out, _ = flash_attn_func(*leaves, mask_mod=mask_mod, block_sparse_tensors=given)
        at = torch.arange(256)
        same(out, right(*leaves, ((at >= keys) & (at < 2 * keys) & (at != 70)).expand(128, -1))[0])


@pytest.mark.parametrize("with_mask_mod", [False, True])
@pytest.mark.parametrize("kind", ["mask", "full"])
def test_wrong_lists(kind: str, with_mask_mod: bool) -> None:
    leaves = operands((1, 256, 1, 16))
    counts, indices = listed(torch.eye(2, dtype=torch.bool)[None, None])
    lists = BlockSparseTensorsTorch(torch.zeros_like(counts), indices, counts, indices)
    lists = lists if kind == "full" else BlockSparseTensorsTorch(counts, indices)
    options: dict[str, Any] = {"mask_mod": lambda b, h, q, k: q >= k} if with_mask_mod else {}
    for block in ((128, 128), (128, 256)):
        tall = lists._replace(block_size=block)
        for name, at, value in (
            ("cnt", (0, 0, 1), 3),
            ("cnt", (0, 0, 1), -1),
            ("idx", (0, 0, 1, 0), 2),
            ("idx", (0, 0, 1, 0), -1),
        ):
            field = f"{kind}_block_{name}"
            wrong = getattr(tall, field).clone()
            wrong[at] = value
            with pytest.raises(InvalidInput, match=rf"^{field}\[{', '.join(map(str, at))}\] is {value};"):
                flash_attn_func(*leaves, block_sparse_tensors=tall._replace(**{field: wrong}), **options)


def test_lists_inside_torch_func() -> None:
    leaves = operands((1, 256, 1, 16))
    lists = BlockSparseTensorsTorch(*listed(torch.ones(1, 1, 2, 2).tril().bool()))

    def loss(q: Tensor, k: Tensor, v: Tensor, lists: Any) -> Tensor:
        out, _ = flash_attn_func(q, k, v, mask_mod=lambda b, h, q, k: q >= k, block_sparse_tensors=lists)
        return out.square().sum()

    q, k, v = (x.detach() for x in leaves)
    wanted = torch.autograd.grad(loss(*leaves, lists), leaves)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v, lists)
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    wrong = lists._replace(mask_block_cnt=lists.mask_block_cnt + 9)
    refused(r"^mask_block_cnt\[0, 0, 0\] is 10", torch.func.grad(loss), q, k, v, wrong)


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
        ({"block_sparse_tensors": lists._replace(block_size=128)}, "block_size is 128"),
        ({"aux_tensors": q}, "aux_tensors"),
        ({"window_size": (q, 0)}, "window_size"),
        ({"dropout_p": 0.1}, "has no dropout_p"),
        ({"sinks": 3}, "has no argument sinks; it has q, k, v"),
        ({"block_sparse_tensors": lists._replace(full_block_cnt=lists[0])}, "both"),
        ({"block_sparse_tensors": lists._replace(cu_total_m_blocks=lists[0])}, "packed"),
        ({"block_sparse_tensors": lists._replace(mask_block_cnt=lists[0][:, :, :1])}, "mask_block_cnt"),
    ]
    for options, message in wrong:
        refused(message, flash_attn_func, q, k, v, **options)


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


@pytest.mark.parametrize(
    ("window", "causal"),
    [
        ((None, None), False), ((-1, -1), True), ((40, 0), False), ((30, 30), False), ((10, 70), False),
        ((None, 9), False),
    ],
)  # fmt: skip
def test_packed_sequences(window: tuple[Any, Any], causal: bool) -> None:
    q_ends, k_ends = [0, 100, 100, 260], [0, 150, 170, 330]
    leaves = operands((260, 4, 16), (330, 2, 16), (330, 2, 8))
    sinks = torch.randn(4, dtype=torch.float32, requires_grad=True)
    ends = [torch.tensor(each, dtype=torch.int32) for each in (q_ends, k_ends)]
    call: Any = flash_attn_varlen_func
    out, lse = call(*leaves, *ends, 160, 160, window_size=window, causal=causal, return_lse=True)
    left, limit = (None if n == -1 else n for n in window)
    limit = 0 if causal else limit
    seen = torch.zeros(260, 330, dtype=torch.bool)
    for i in range(3):
        rows, columns = slice(*q_ends[i : i + 2]), slice(*k_ends[i : i + 2])
        ahead = before(q_ends[i + 1] - q_ends[i], k_ends[i + 1] - k_ends[i])
        near = torch.ones_like(ahead, dtype=torch.bool)
        near = near if left is None else near & (ahead >= -left)
        seen[rows, columns] = near if limit is None else near & (ahead <= limit)
    q, k, v = (x[None] for x in leaves)
    wanted, sums = right(q, k, v, seen)
    same(out, wanted[0])
    same(lse, sums[0])
    same_gradients(out, wanted[0], leaves)
    by_name = call(
        *leaves, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], window_size=window, causal=causal, softcap=2.0,
        learnable_sink=sinks, dropout_p=0.0, page_table=None,
    )  # fmt: skip
    assert by_name[1] is None
    assert not torch.allclose(by_name[0], out)


def test_packed_sequences_that_are_refused() -> None:
    q, k, v = operands((200, 2, 16))
    ends = torch.tensor([0, 200], dtype=torch.int32)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cu_seqlens_k": None}, "cu_seqlens_k is None; give both"),
        ({"cu_seqlens_k": torch.tensor([0, 100, 200])}, "for 1 documents and cu_seqlens_k for 2"),
        ({"cu_seqlens_q": torch.tensor([0, 199])}, "ends at 199"),
        ({"block_table": ends}, "has no block_table, .*attention_paged"),
        ({"seqused_k": ends}, "has no seqused_k, .*attention_paged"),
        ({"page_table": ends}, "has no page_table, .*attention_paged"),
        ({"mask_mod": max}, "has no mask_mod, .*each sequence"),
        ({"learnable_sink": torch.ones(3)}, "learnable_sink is"),
        ({"window": 3}, "has no argument window; it has q, k, v, cu_seqlens_q"),
    ]
    for change, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            flash_attn_varlen_func(q, k, v, **{"cu_seqlens_q": ends, "cu_seqlens_k": ends, **change})
    refused(r"must have as many|every key needs one value", flash_attn_varlen_func, q, k, v[:150], ends, ends)


@pytest.mark.parametrize("name", ["_flash_attn_fwd", "flash_attn_combine", "flash_attn_with_kvcache"])
def test_names_that_are_absent(name: str) -> None:
    with pytest.raises(ImportError, match=rf"cannot import name '{name}' .*: call "):
        exec(f"from sparsek.integrations.flash_attention import {name}")
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': call "):
        getattr(flash_attention, name)
    assert not hasattr(flash_attention, name)
