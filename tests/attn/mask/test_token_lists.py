"""sk.TokenLists: what the lists mean, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsek as sk
from tests.refusals import refused

FAR = 2**31 - 1


def seen_by_definition(lists: sk.TokenLists, kv_len: int) -> Tensor:
    """Which keys every query sees, in a loop over the entries."""
    batch, heads, queries, n = lists.indices.shape
    seen = torch.zeros(batch, heads, queries, kv_len, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in (batch, heads, queries))).tolist():
        row, end = seen[b, h, i], max(kv_len - queries + i + 1, 0)
        some = n if lists.counts is None else min(max(int(lists.counts[b, h, i]), 0), n)
        for j in lists.indices[b, h, i, :some].tolist():
            if 0 <= j * lists.block < kv_len:
                row[j * lists.block : (j + 1) * lists.block] = True
        row[: lists.sinks] = True
        if lists.causal:
            row[max(end - lists.window, 0) : end] |= torch.tensor(lists.window > 0)
            row[end:] = False
    return seen


def drawn_lists(shape: tuple[int, ...], block: int, kv_len: int, seed: int, **options: Any) -> sk.TokenLists:
    """Lists with repeats, absent entries, entries out of range, and empty tokens."""
    draw = torch.Generator().manual_seed(seed)
    blocks = -(-kv_len // block)
    indices = torch.randint(-1, blocks + 1, shape, generator=draw, dtype=torch.int32)
    odd = torch.tensor([FAR, -FAR - 1, blocks, -2], dtype=torch.int32)
    some = torch.rand(shape, generator=draw) < 0.1
    indices[some] = odd[torch.randint(0, 4, shape, generator=draw)][some]
    indices[:, :, 3::11] = -1
    return sk.TokenLists(indices, block, **options)


@pytest.mark.parametrize(
    ("shape", "block", "kv_len", "options"),
    [
        ((1, 1, 40, 2), 4, 40, {}),
        ((2, 1, 33, 3), 8, 70, {"window": 5, "sinks": 3}),
        ((1, 2, 50, 2), 16, 31, {"window": 1}),
        ((1, 2, 20, 2), 32, 100, {"causal": False, "sinks": 7}),
        ((1, 1, 9, 0), 128, 20, {"window": 4}),
    ],
)
def test_lists_mean_the_blocks_the_window_and_the_sinks(
    shape: tuple[int, ...], block: int, kv_len: int, options: Any
) -> None:
    lists = drawn_lists(shape, block, kv_len, 0, **options)
    assert torch.equal(lists.to_dense(kv_len), seen_by_definition(lists, kv_len))
    counts = torch.randint(-2, shape[3] + 3, shape[:3])
    some = sk.TokenLists(lists.indices.long(), block, counts, **options)
    assert torch.equal(some.to_dense(kv_len), seen_by_definition(some, kv_len))


def test_attention_sees_what_is_written_to_the_lists() -> None:
    q, k, v = torch.randn(1, 4, 90, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8)
    lists = drawn_lists((1, 2, 90, 2), 16, 90, 1, window=1)

    def dense() -> Tensor:
        seen = lists.to_dense().repeat_interleave(2, 1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

    torch.testing.assert_close(sk.attention(q, k, v, lists), dense())
    lists.indices.zero_()
    torch.testing.assert_close(sk.attention(q, k, v, lists), dense())


def test_lists_are_records() -> None:
    lists = drawn_lists((1, 2, 10, 2), 64, 10, 2, window=3)
    again = copy.deepcopy(lists)
    assert torch.equal(again.indices, lists.indices)
    assert again.indices is not lists.indices
    assert repr(lists) == "TokenLists(2 blocks of 64 per token, window=3, batch 1, heads 2, 10 queries, cpu)"
    assert lists.to("cpu") is lists


INDICES = torch.zeros(1, 2, 10, 3, dtype=torch.int32)
Q, K = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 12, 8)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("indices .* 4-D", {"indices": INDICES[0]}),
        ("float32", {"indices": INDICES.float()}),
        ("needs a batch item and a head", {"indices": INDICES[:0]}),
        ("power of two", {"block": 48}),
        ("from 4 to 128", {"block": 256}),
        ("counts is .* need one for each list", {"counts": INDICES[..., :2, 0]}),
        ("window is -1", {"window": -1}),
        ("sinks is None", {"sinks": None}),
        ("causal is 1", {"causal": 1}),
        ("needs causal=True", {"window": 4, "causal": False}),
    ],
)
def test_other_lists_are_refused(words: str, options: dict[str, Any]) -> None:
    refused(words, sk.TokenLists, **{"indices": INDICES, "block": 64, **options})


@pytest.mark.parametrize("shape", [(2, 2, 10, 3), (1, 3, 10, 3), (1, 4, 10, 3), (1, 2, 12, 3)])
def test_lists_that_do_not_fit_q_and_k_are_refused(shape: tuple[int, ...]) -> None:
    lists = sk.TokenLists(torch.zeros(shape, dtype=torch.int32), 64)
    refused("need lists of 1 or 1 batch items, 1 or 2 heads, and 10 queries", sk.attention, Q, K, K, lists)
