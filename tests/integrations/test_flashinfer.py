"""FlashInfer's wrappers against their documented semantics in plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsek import InvalidInput
from sparsek.integrations import flashinfer_masks
from sparsek.integrations.flashinfer import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from tests.integrations.dense import coin, dense, expanded, operands, same, same_gradients
from tests.refusals import refused

F64: dict[str, Any] = {"q_data_type": "float64", "o_data_type": "float64"}
LOG2_E = math.log2(math.e)


def compressed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """indptr and indices of a block map [Mb, Nb]."""
    counts = blocks.sum(1).cumsum(0)
    return torch.cat((counts.new_zeros(1), counts)).int(), blocks.nonzero()[:, 1].int()


def by_tokens(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Of tensors [tokens, H, D], with lse [tokens, H] to base 2."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out, lse = dense(q, k, v, seen, scale)
    return out[0].transpose(0, 1), lse[0].T * LOG2_E


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "block"),
    [
        ((256, 256), (64, 64)), ((300, 256), (128, 64)), ((500, 512), (256, 256)), ((100, 96), (16, 24)),
        ((3, 3), (1, 1)), ((100, 390), (100, 130)),
    ],
)  # fmt: skip
def test_rows_of_blocks_of_any_size(lengths: tuple[int, int], block: tuple[int, int], causal: bool) -> None:
    M, N = lengths
    blocks = coin(-(-M // block[0]), N // block[1], share=0.6, seed=3)
    blocks[-1] = False
    leaves = operands((M, 4, 16), (N, 2, 16), (N, 2, 16))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(*compressed(blocks), M, N, *block, 4, 2, 16, causal=causal, sm_scale=0.3, **F64)
    seen = expanded(blocks, block, lengths)
    if causal:
        seen = seen & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    wanted, right = by_tokens(*leaves, seen, 0.3)
    out, lse = wrapper.run(*leaves, return_lse=True)
    same(out, wanted)
    same(lse, right)
    same_gradients(out, wanted, leaves)


def test_elements_of_blocks() -> None:
    blocks = coin(3, 4, seed=1)
    indptr, indices = compressed(blocks)
    elements = coin(indices.numel(), 32, 16, seed=2)
    seen = torch.zeros(3, 4, 32, 16, dtype=torch.bool)
    seen[blocks] = elements
    leaves = operands((96, 2, 8), (64, 1, 8), (64, 1, 8))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(indptr, indices, 96, 64, 32, 16, 2, 1, 8, mask=elements, causal=True, **F64)
    same(wrapper.run(*leaves), by_tokens(*leaves, seen.transpose(1, 2).flatten(2).flatten(0, 1))[0])


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("block", [(64, 64), (40, 32)])
def test_a_map_for_each_head_and_valid_lengths(heads: int, block: tuple[int, int]) -> None:
    M, N = 3 * block[0] - 7, 4 * block[1]
    blocks = coin(heads, 3, 4, seed=5)
    lens = torch.tensor([block[1], 1, block[1] // 2, block[1]], dtype=torch.int32)
    leaves = operands((M, 4, 8), (N, 2, 8), (N, 2, 8))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0), "cake")
    wrapper.plan(None, None, M, N, *block, 4, 2, 8, block_mask=blocks, kv_block_lens=lens, **F64)
    seen = expanded(blocks, block, (M, N)) & (torch.arange(block[1]) < lens[:, None]).flatten()
    same(wrapper.run(*leaves), by_tokens(*leaves, seen.repeat_interleave(4 // heads, 0))[0])


def test_lists_for_each_head() -> None:
    indices = torch.tensor([[[2, 0], [1, 3]], [[3, 1], [0, 1]]], dtype=torch.int32)
    counts = torch.tensor([[2, 1], [0, 2]], dtype=torch.int32)
    blocks = torch.zeros(2, 2, 4, dtype=torch.bool)
    blocks.scatter_(2, indices.long(), torch.arange(2) < counts[..., None])
    leaves = operands((128, 2, 8), (256, 2, 8), (256, 2, 8))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(None, None, 128, 256, 64, 64, 2, 2, 8, q2k_indices=indices, q2k_num=counts, **F64)
    same(wrapper.run(*leaves), by_tokens(*leaves, expanded(blocks, (64, 64), (128, 256)))[0])


def test_results_go_where_the_caller_wants_them() -> None:
    q, k, v = operands((64, 2, 8), (64, 2, 8), (64, 2, 8))
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    eye = torch.tensor([0, 1]), torch.tensor([0])
    wrapper.plan(*eye, 64, 64, 64, 64, 2, 2, 8, q_data_type=torch.float64)
    assert wrapper.run(q, k, v).dtype == torch.float16
    out, lse = torch.empty(64, 2, 8, dtype=torch.float16), torch.empty(64, 2)
    found = wrapper.run(q.detach(), k.detach(), v.detach(), out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    wanted, right = by_tokens(q, k, v, torch.ones(64, 64, dtype=torch.bool))
    torch.testing.assert_close(out, wanted.half())
    same(lse, right)
    for name, shared in (("out", out[:1].expand_as(out)), ("lse", lse[:, :1].expand_as(lse))):
        more: dict[str, Any] = {name: shared}
        with pytest.raises(InvalidInput, match=f"{name} has strides .* rows share memory"):
            wrapper.run(q.detach(), k.detach(), v.detach(), return_lse=True, **more)


def variable(blocks: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The elements [H, S, T] of blocks of several sizes."""
    return torch.stack(
        [
            each.repeat_interleave(r, 0).repeat_interleave(c, 1)
            for each, r, c in zip(blocks, rows, columns, strict=True)
        ]
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sides", [((5, 210), (3, 300)), ((1, 700), (2, 90))])
def test_blocks_of_several_sizes(sides: tuple[tuple[int, int], ...], seed: int, causal: bool) -> None:
    def sizes(count: int, length: int) -> Tensor:
        cuts = torch.randint(length + 1, (2, count - 1), generator=random).sort(1).values
        edges = torch.cat((cuts.new_zeros(2, 1), cuts, cuts.new_full((2, 1), length)), 1)
        return edges.diff(dim=1).int()

    random = torch.Generator().manual_seed(seed)
    (MB, M), (NB, N) = sides
    rows, columns, blocks = sizes(MB, M), sizes(NB, N), coin(2, MB, NB, seed=seed)
    leaves = operands((4, M, 8), (2, N, 8), (2, N, 8))
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(blocks, rows, columns, 4, 2, 8, causal=causal, q_data_type=torch.float64)
    seen = variable(blocks, rows, columns)
    if causal:
        seen = seen & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    q, k, v = (x[None] for x in leaves)
    wanted, right = dense(q, k, v, seen.repeat_interleave(2, 0))
    out, lse = wrapper.run(*leaves, return_lse=True)
    same(out, wanted[0])
    same(lse, right[0] * LOG2_E)
    same_gradients(out, wanted[0], leaves)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([1, 1, 3], r"indptr\[0\] is 1"),
        ([0, 3, 1], r"indptr\[2\] is 1, below indptr\[1\], 3"),
        ([0, -1, 3], r"indptr\[1\] is -1"),
        ([0, 1, 99], r"indptr\[2\] is 99; it must be 3"),
        ([0, 1, 2], r"indptr\[2\] is 2; it must be 3"),
    ],
)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_broken_row_starts(starts: list[int], message: str, kind: torch.dtype) -> None:
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    lists = torch.tensor(starts, dtype=kind), torch.tensor([0, 0, 1], dtype=kind)
    refused(message, wrapper.plan, *lists, 128, 128, 64, 64, 2, 2, 8)


def test_a_block_mask_comes_before_lists() -> None:
    leaves, blocks = operands((128, 2, 8), (128, 2, 8), (128, 2, 8)), coin(2, 2, 2, seed=1)
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    ignored = torch.tensor([0, 9]), torch.tensor([7])
    wrapper.plan(*ignored, 128, 128, 64, 64, 2, 2, 8, block_mask=blocks, **F64)
    same(wrapper.run(*leaves), by_tokens(*leaves, expanded(blocks, (64, 64), (128, 128)))[0])


def test_the_deprecated_calls() -> None:
    q, k, v = leaves = operands((64, 2, 8), (64, 2, 8), (64, 2, 8))
    everything = torch.ones(64, 64, dtype=torch.bool)
    right = {scale: by_tokens(*leaves, everything, scale)[0] for scale in (0.7, None)}
    wrapper = BlockSparseAttentionWrapper(torch.empty(0))
    wrapper.begin_forward(
        torch.tensor([0, 1]), torch.tensor([0]), 64, 64, 64, 64, 2, 2, 8, sm_scale=0.1, **F64
    )
    same(wrapper.forward(q, k, v, sm_scale=0.7), right[0.7])
    same(wrapper.run(q, k, v), right[0.7])
    same(wrapper.forward(q, k, v), right[None])
    wrapper.end_forward()
    several = VariableBlockSparseAttentionWrapper(torch.empty(0))
    sizes = torch.full((2, 1), 64)
    several.plan(torch.ones(2, 1, 1, dtype=torch.bool), sizes, sizes, 2, 2, 8, q_data_type="float64")
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    same(several.forward(q, k, v, sm_scale=0.7).transpose(0, 1), right[0.7])
    same(several.forward(q, k, v).transpose(0, 1), right[None])


def test_what_is_refused() -> None:
    indptr, indices = torch.tensor([0, 1]), torch.tensor([0])
    wrapper, good = BlockSparseAttentionWrapper(torch.empty(0)), (indptr, indices, 64, 64, 64, 64, 2, 2, 8)
    q = operands((64, 2, 8))[0]
    refused("before plan", wrapper.run, q, q, q)
    wrapper.plan(*good)
    refused(r"q is torch\.float64; .*: pass q_data_type", wrapper.run, q, q, q)
    narrow = operands((64, 2, 4))[0].half()
    refused(r"q is \[64, 2, 4\]; plan was for 2 heads of dim 8$", wrapper.run, narrow, narrow, narrow)
    refused(r"forward has no pos_encoding_mode", wrapper.forward, q, q, q, pos_encoding_mode="ALIBI")
    refused(r"k has 64 keys and v 63 values", wrapper.run, q.half(), q.half(), q[:63].half())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"logits_soft_cap": -3.0}, "logits_soft_cap is -3"),
        ({"logits_soft_cap": 1e9}, "logits_soft_cap is 1000000000"),
        ({"page_size": 16}, "plan has no argument page_size; it has indptr, indices, M"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode"),
        ({"packed_mask": torch.zeros(4, dtype=torch.uint8)}, "packed_mask"),
        ({"q_scale": torch.ones(2)}, "q_scale"),
        ({"q_data_type": "int33"}, "q_data_type"),
        ({"q2k_indices": torch.zeros(2, 1, 1, dtype=torch.int32)}, "one of indptr"),
        ({"mask": coin(2, 64, 64)}, "mask is"),
        ({"mask": coin(1, 64, 64), "block_mask": coin(2, 1, 1)}, "no block_mask"),
        ({"kv_block_lens": torch.tensor([1, 2])}, "kv_block_lens is"),
        ({"kv_block_lens": torch.tensor([65])}, r"kv_block_lens\[0\] is 65; the keys of a block are 0 to 64"),
    ]
    for change, message in wrong:
        refused(message, wrapper.plan, *good, **change)
    lists = torch.zeros(2, 1, 1, dtype=torch.int32)
    counts = torch.tensor([[1], [2]], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=r"q2k_num\[1, 0\] is 2; the entries of a row are 0 to 1"):
        wrapper.plan(None, None, *good[2:], q2k_indices=lists, q2k_num=counts)
    refused("outside of the 1 x 1 blocks", wrapper.plan, indptr, torch.tensor([1]), *good[2:])
    refused("multiple of C", wrapper.plan, indptr, indices, 64, 65, *good[4:])


SEVERAL = (
    coin(2, 2, 2, share=2.0),
    torch.tensor([[20, 30], [25, 25]]),
    torch.tensor([[24, 30], [0, 54]]),
    2,
    2,
    16,
)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((49, 54, 54), r"block_row_sz has sums \[50, 50\]; each head must sum to 49 tokens"),
        ((51, 54, 54), "block_row_sz has sums"),
        ((5, 5, 5), r"block_row_sz\[0, 0\] is 20; sizes of blocks of 5 tokens are 0 to 5"),
        ((50, 53, 53), r"block_col_sz\[1, 1\] is 54"),
        ((50, 60, 60), "block_col_sz has sums"),
        ((50, 54, 53), "k has 54 keys and v 53 values"),
        ((50, 54, 55), "k has 54 keys and v 55 values"),
    ],
)
def test_lengths_that_were_not_planned(lengths: tuple[int, ...], message: str, causal: bool) -> None:
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
    wrapper.plan(*SEVERAL, q_data_type="float32", causal=causal)
    q, k, v = (torch.randn(2, length, 16) for length in lengths)
    refused(message, wrapper.run, q, k, v)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at", range(3))
def test_a_plan_is_of_its_own_lists(at: int, causal: bool) -> None:
    """As in FlashInfer, whose plan reads them: the caller may use its tensors for the next map."""
    q, k, v = torch.randn(2, 50, 16), torch.randn(2, 54, 16), torch.randn(2, 54, 16)
    lists = torch.eye(2, dtype=torch.bool).repeat(2, 1, 1), *SEVERAL[1:3]
    given: list[Any] = [*lists]
    found: list[Any] = []
    for written in (False, True):
        given[at] = lists[at].clone()
        wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
        plan: Any = wrapper.plan
        plan(*given, *SEVERAL[3:], q_data_type="float32", causal=causal)
        if written:
            given[at].copy_(given[at].flip(-1))
        found.append(wrapper.run(q, k, v))
    assert not torch.equal(given[at], lists[at])
    assert torch.equal(*found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 9), (9, 0), (0, 0)])
def test_sizes_of_no_tokens(q_len: int, kv_len: int, causal: bool) -> None:
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
    rows, columns = (torch.tensor([[length, 0]]) for length in (q_len, kv_len))
    wrapper.plan(coin(1, 2, 2, share=2.0), rows, columns, 2, 1, 16, q_data_type="float64", causal=causal)
    leaves = operands((2, q_len, 16), (1, kv_len, 16), (1, kv_len, 16))
    out, lse = wrapper.run(*leaves, return_lse=True)
    same(out, torch.zeros(2, q_len, 16))
    same(lse, torch.full((2, q_len), -torch.inf))
    for x, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves, allow_unused=True), strict=True):
        assert grad is None or (grad.shape == x.shape and not grad.any())


@pytest.mark.parametrize("rows", [[[-10, 60]] * 2, [[20, 31], [25, 25]], [[20, 20], [25, 25]]])
def test_wrong_sizes(rows: list[list[int]]) -> None:
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
    q, k = torch.randn(2, 50, 16), torch.randn(2, 54, 16)
    for at, causal in ((1, False), (1, True), (2, False), (2, True)):
        given: list[Any] = list(SEVERAL)
        given[at] = torch.tensor(rows)
        wrapper.plan(*given, q_data_type="float32", causal=causal)
        refused(f"^{('', 'block_row_sz', 'block_col_sz')[at]}", wrapper.run, q, k, k)
    with pytest.raises(InvalidInput, match=r"block_mask_map is \[2, 0, 2\]"):
        wrapper.plan(SEVERAL[0][:, :0], SEVERAL[1][:, :0], *SEVERAL[2:])


def test_wrong_sizes_on_a_device_read_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes on a GPU are not looked at; whatever they are, no index is out of bounds."""
    monkeypatch.setattr(flashinfer_masks, "readable", lambda x: False)
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 50, 16), torch.randn(2, 54, 16)
    for causal in (False, True):
        for _ in range(20):
            rows, columns = (torch.randint(-90, 200, (2, 2), generator=random) for _ in range(2))
            wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
            wrapper.plan(SEVERAL[0], rows, columns, 2, 2, 16, q_data_type="float32", causal=causal)
            assert wrapper.run(q, k, k).shape == (2, 50, 16)


@pytest.mark.parametrize("fp16_sums", [True, False, None])
@pytest.mark.parametrize("cap", [None, 0.0, 2.5])
def test_capped_scores(cap: float | None, fp16_sums: Any) -> None:
    leaves = operands((64, 2, 8), (128, 1, 8), (128, 1, 8))
    options: dict[str, Any] = {"use_fp16_qk_reduction": fp16_sums, "logits_soft_cap": cap, "sm_scale": 0.8}
    make: Any = BlockSparseAttentionWrapper
    wrapper = make(torch.empty(0), kv_layout="NHD")
    wrapper.plan(torch.tensor([0, 1]), torch.tensor([1]), 64, 128, 64, 64, 2, 1, 8, **options, **F64)
    several = VariableBlockSparseAttentionWrapper(torch.empty(0))
    blocks, rows, columns = torch.tensor([[[False, True]]]), torch.tensor([[64]]), torch.tensor([[64, 64]])
    several.plan(blocks, rows, columns, 2, 1, 8, q_data_type="float64", **options)
    q, k, v = (x.transpose(0, 1) for x in leaves)
    for out in (wrapper.run(*leaves), several.run(q, k, v).transpose(0, 1)):
        scores = q @ k[:, 64:].mT * 0.8
        scores = scores if not cap else cap * torch.tanh(scores / cap)
        wanted = (scores.softmax(-1) @ v[:, 64:]).transpose(0, 1)
        same(out, wanted)
        same_gradients(out, wanted, leaves)
        q, k, v = (x.transpose(0, 1) for x in leaves)
    wrapper.plan(torch.tensor([0, 1]), torch.tensor([1]), 64, 128, 64, 64, 2, 1, 8, **F64)
    same(wrapper.forward(*leaves, logits_soft_cap=cap, sm_scale=0.8), wanted)


def test_names_of_other_versions() -> None:
    none: Any = torch.empty(0)
    one, several = BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
    refused(r"^BlockSparse\w+ has no kv_layout, got 'HND'; .* are \[N", one, none, kv_layout="HND")
    refused(r"^VariableBlockSparse\w+ has no kv_layout, got 'NHD'", several, none, kv_layout="NHD")
    words = "has no argument use_cuda_graph; it has float_workspace_buffer, backend"
    refused(words, one, none, use_cuda_graph=True)
    with pytest.raises(
        ImportError, match=r"BatchPrefillWithPagedKVCacheWrapper.*: call sparsek\.attention_paged"
    ):
        exec("from sparsek.integrations.flashinfer import BatchPrefillWithPagedKVCacheWrapper")
