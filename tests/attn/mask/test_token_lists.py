"""sk.TokenLists: what the lists mean, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparsek as sk
from sparsek.attn.mask.build.unions import specified
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from tests.attn.mask.drawn_lists import CASES, drawn, drawn_lists
from tests.refusals import refused


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


def test_dense_rows_of_many_lists_or_counts_are_mapped() -> None:
    many, counts = torch.randint(-1, 4, (3, 1, 2, 20, 2)), torch.randint(0, 3, (3, 1, 2, 20))
    for rows, given in (
        (lambda each: sk.TokenLists(each, 8, window=1).to_dense(), many),
        (lambda each: sk.TokenLists(many[0], 8, each, sinks=2).to_dense(), counts),
    ):
        assert torch.equal(torch.func.vmap(rows)(given), torch.stack([rows(each) for each in given]))


@pytest.mark.parametrize("case", range(len(CASES)))
def test_unions_are_valid_masks(case: int) -> None:
    mask = specified(BlockMask, drawn(case))
    BlockMask(*(getattr(mask, each) for each in BlockMask._fields))


@pytest.mark.parametrize(
    ("group", "shape", "block", "kv_len", "options"),
    [
        (16, (1, 2, 70, 3), 64, 333, {"window": 130, "sinks": 70}),
        (1, (2, 1, 200, 2), 128, 200, {"causal": False, "sinks": 130}),
        (6, (1, 1, 130, 3), 4, 150, {"window": 9}),
        (4, (1, 2, 65, 2), 32, 65, {"sinks": 100}),
        (64, (1, 1, 9, 0), 64, 70, {}),
        (8, (1, 1, 40, 1), 64, 200, {"window": 1 << 40, "sinks": 1 << 31}),
        (2, (1, 1, 0, 2), 64, 64, {}),
        (2, (1, 1, 3, 2), 16, 0, {}),
    ],
)
def test_the_mask_has_the_elements_of_the_lists(
    group: int, shape: tuple[int, ...], block: int, kv_len: int, options: Any
) -> None:
    lists = drawn_lists(shape, block, kv_len, 0, **options)
    q, k = torch.empty(2, shape[1] * group, shape[2], 8), torch.empty(2, shape[1], kv_len, 8)
    mask = lists.mask_for(q, k)
    assert torch.equal(mask.to_dense(), lists.to_dense(kv_len))
    assert mask.block == ((64, 64) if block < 64 else (128 // (group & -group), block))
    assert mask.sizes.exact


def test_blocks_that_all_tokens_of_a_tile_list_are_full() -> None:
    lists = sk.TokenLists(torch.tensor([0, 2, 3]).expand(1, 1, 256, 3), 64)
    mask = lists.mask_for(torch.empty(1, 1, 256, 8), torch.empty(1, 1, 256, 8))
    assert mask.host.full.counts.tolist() == [0, 1]  # tile 0 sees block 0 in part
    assert mask.host.partial.counts.tolist() == [1, 2]
    wide = lists.mask_for(torch.empty(1, 16, 256, 8), torch.empty(1, 1, 256, 8))
    assert wide.host.full.counts.tolist() == [0] * 8 + [1] * 16 + [2] * 8


def test_half_a_million_tokens_fit() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = (torch.empty(1, heads, 1 << 19, 128, dtype=torch.bfloat16) for heads in (64, 4))
        lists = sk.TokenLists(torch.empty(1, 4, 1 << 19, 16, dtype=torch.int32), 64)
        base = lists.mask_for(q, k)._base
    assert base is not None
    assert base.nbytes < 1 << 29  # 8 bytes for each listed block; as a table of all blocks it had 2^34 bits


def test_the_memory_of_the_specification_does_not_grow_with_queries_times_blocks() -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **kwargs or {})
            for each in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(each, Tensor) and not func.is_view:
                    self.most = max(self.most, each.numel())
            return made

    most = []
    for queries in (1 << 12, 1 << 13):
        place = Place(queries, queries, (2, 64), torch.device("cpu"), 0)
        indices = torch.zeros(1, 1, queries, 2, dtype=torch.int32)
        with Largest() as largest:
            specified(BlockMask, drawn(0)._replace(indices=indices, counts=None, place=place))
        most.append(largest.most)
    assert most[1] <= 2 * most[0]


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
        ("needs a head", {"indices": INDICES[:, :0]}),
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


@pytest.mark.parametrize("shape", [(2, 2, 10, 3), (1, 3, 10, 3), (1, 2, 12, 3)])
def test_lists_that_do_not_fit_q_and_k_are_refused(shape: tuple[int, ...]) -> None:
    lists = sk.TokenLists(torch.zeros(shape, dtype=torch.int32), 64)
    refused("need lists of 1 or 1 batch items, 1, 2 or 4 heads, and 10 queries", sk.attention, Q, K, K, lists)


@pytest.mark.parametrize("sizes", [(0, 33, 33), (1, 0, 33), (1, 33, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("window", [0, 8])
def test_there_may_be_no_batch_items_queries_or_keys(sizes: tuple[int, int, int], window: int) -> None:
    batch, queries, keys = sizes
    q, k, v = (
        torch.randn(batch, *each, 64, requires_grad=True) for each in ((8, queries), (2, keys), (2, keys))
    )
    indices = torch.zeros(batch, 2, queries, 2, dtype=torch.int32)
    lists = sk.TokenLists(indices, 64, indices[..., 0], window=window)
    assert lists.to_dense(keys).shape == (batch, 2, queries, keys)
    out = sk.attention(q, k, v, lists)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(out, sk.attention(q, k, v, sk.TokenLists(indices.new_zeros(1, 2, queries, 2), 64)))
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_no_heads_are_refused() -> None:
    lists, none = sk.TokenLists(INDICES, 64), torch.empty(1, 0, 10, 8)
    refused("q has 0 heads and k 0", sk.attention, none, none, none, lists)
