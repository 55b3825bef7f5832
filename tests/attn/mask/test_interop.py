"""Block masks to and from other libraries: the same pairs are seen on both sides, whatever the mask."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from sparsek.attn.mask.convert import flex as converted
from sparsek.attn.mask.convert import interop
from sparsek.attn.mask.convert.interop import FlashLists
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr
from tests.attn.attention_cases import ATTENTION_CASES, random_bits
from tests.refusals import refused

SAME_MASKS = ("causal bf16", "causal bshd", "dim 32", "dim 96", "dim 192 128", "dim 256")
MASKS = {case.note: case.mask for case in ATTENTION_CASES if case.note not in SAME_MASKS}
every_mask = pytest.mark.parametrize("make", MASKS.values(), ids=[name.replace(" ", "_") for name in MASKS])
Make = Callable[[str], BlockMask]


def seen_blocks(dense: Tensor, block: tuple[int, int]) -> Tensor:
    """Which blocks have anything in them, bool [batch, heads, Mb, Nb]."""
    below, beside = (-side % step for side, step in zip(dense.shape[2:], block, strict=True))
    padded = torch.nn.functional.pad(dense, (0, beside, 0, below))
    return padded.unflatten(3, (-1, block[1])).unflatten(2, (-1, block[0])).any(5).any(3)


def stored_blocks(mask: BlockMask) -> Tensor:
    """Which blocks a mask stores, bool [batch, heads, Mb, Nb], by its patterns."""
    stored = torch.zeros(mask.batch, mask.heads, *mask.grid, dtype=torch.bool)
    for b in range(mask.batch):
        for h in range(mask.heads):
            pattern = interop.to_pattern(mask, h, b)
            stored[b, h, pattern.block_rows, pattern.indices] = True
    return stored


def explained_by_intervals(dense: Tensor, block: tuple[int, int]) -> bool:
    """Whether one interval per query says what it sees of all blocks with anything in them."""
    (q_len, kv_len), stored = dense.shape[2:], seen_blocks(dense, block)
    reached = stored.repeat_interleave(block[0], 2)[:, :, :q_len].repeat_interleave(block[1], 3)[..., :kv_len]
    keys = torch.arange(kv_len)
    first = torch.where(dense, keys, kv_len).amin(3, keepdim=True)
    last = torch.where(dense, keys, -1).amax(3, keepdim=True)
    return torch.equal((first <= keys) & (keys <= last) & reached, dense)


# Dense masks


@every_mask
def test_a_mask_comes_back_from_dense(make: Make):
    mask = make("cpu")
    dense = mask.to_dense()
    back = BlockMask.from_dense(dense, mask.block)
    assert torch.equal(back.to_dense(), dense)
    assert torch.equal(stored_blocks(back), seen_blocks(dense, mask.block))
    assert back.pure or not mask.pure


@st.composite
def dense_masks(draw: st.DrawFn) -> tuple[Tensor, tuple[int, int]]:
    """Intervals, rectangles and noise in any mixture, of any lengths, and a block."""
    q_len, kv_len = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    keys = torch.arange(kv_len)
    lo, hi = torch.randint(0, kv_len + 1, (2, batch, heads, q_len, 1), generator=random)
    dense = (lo <= keys) & (keys < hi)
    if draw(st.booleans()):
        dense = torch.zeros_like(dense)
    for _ in range(draw(st.integers(0, 4))):
        top, left = draw(st.integers(0, q_len - 1)), draw(st.integers(0, kv_len - 1))
        height, width = draw(st.integers(1, 200)), draw(st.integers(1, 200))
        dense[draw(st.integers(0, batch - 1)), :, top : top + height, left : left + width] = draw(
            st.booleans()
        )
    noise = draw(st.sampled_from([0.0, 0.0, 1e-4, 0.3]))
    dense ^= torch.rand(dense.shape, generator=random) < noise
    return dense, (draw(st.sampled_from([64, 128])), draw(st.sampled_from([64, 128])))


@given(drawn=dense_masks())
def test_any_dense_mask_comes_back_and_stores_only_what_it_needs(drawn: tuple[Tensor, tuple[int, int]]):
    dense, block = drawn
    mask = BlockMask.from_dense(dense, block)
    assert torch.equal(mask.to_dense(), dense)
    assert mask.stored_blocks == seen_blocks(dense, block).sum()
    assert mask.pure == explained_by_intervals(dense, block)
    assert mask.elements == dense.sum()


def test_full_blocks_are_full_and_those_over_the_edge_are_partial():
    mask = BlockMask.from_dense(torch.ones(200, 300, dtype=torch.bool), 128)
    assert mask.sizes == (2 * 3, 2, 3, True)
    assert BlockMask.from_dense(torch.ones(200, 256, dtype=torch.bool), 128).partial_blocks == 0


def test_equal_bits_are_stored_once():
    checkers = (torch.arange(512)[:, None] + torch.arange(512)) % 2 == 0
    mask = BlockMask.from_dense(checkers, 64)
    assert mask.bits is not None
    assert (mask.partial_blocks, mask.bits.shape[0]) == (64, 1)


def test_blocks_that_the_interval_explains_have_no_bits():
    dense = torch.ones(256, 256, dtype=torch.bool).tril()
    dense[200, 5] = False
    mask = BlockMask.from_dense(dense, 64)
    assert not mask.pure
    assert mask.rules is not None
    assert (mask.rules < 0).sum() == 4
    assert (mask.rules >= 0).sum() == 1


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 3, 4), (0, 2, 3, 4)], ids=str)
def test_lengths_may_be_zero_and_heads_not(shape: tuple[int, ...]):
    dense = torch.ones(shape, dtype=torch.bool)
    if 0 in shape[:-2]:
        refused("must be an int of at least 1", BlockMask.from_dense, dense)
    else:
        mask = BlockMask.from_dense(dense)
        assert mask.to_dense().shape == (1, 1, *shape)
        assert interop.to_fa4(mask).mask_block_idx.shape == (1, 1, mask.grid[0], 1)
        refused("no length of 0", interop.to_flex, mask)


@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_leading_sizes_may_be_left_out_and_strides_are_any(ndim: int):
    whole = torch.rand(2, 3, 100, 90) < 0.5
    dense = whole[(0,) * (4 - ndim)].mT
    mask = BlockMask.from_dense(dense, 64)
    assert torch.equal(mask.to_dense(), dense.reshape(mask.batch, mask.heads, 90, 100))


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (torch.ones(64, 64), "must be a bool tensor"),
        (torch.ones(64, dtype=torch.bool), r"got a torch.Tensor, torch.bool \[64\]"),
        (torch.ones(1, 1, 1, 8, 8, dtype=torch.bool), "must be a bool tensor"),
        ([[True]], "dense must be a dense torch.Tensor, got list"),
    ],
)
def test_what_is_no_dense_mask_is_refused(dense: Any, message: str):
    refused(message, BlockMask.from_dense, dense)


@pytest.mark.parametrize("block", [32, 256, (64, 100), "64", (64,), True])
def test_other_blocks_are_refused(block: Any):
    refused("64 or 128", BlockMask.from_dense, torch.ones(64, 64, dtype=torch.bool), block)


# transformers


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_transformers_mask_becomes_a_block_mask(dtype: torch.dtype):
    seen = torch.ones(200, 260, dtype=torch.bool).tril(60).expand(2, 1, -1, -1).clone()
    seen[1, :, :, :70] = False  # padding on the left: the first queries of item 1 see nothing
    given_mask = seen
    if dtype.is_floating_point:
        given_mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    mask = BlockMask.from_transformers(given_mask, (64, 128))
    assert (mask.batch, mask.heads, mask.pure) == (2, 1, True)
    assert torch.equal(mask.to_dense(), seen)


@pytest.mark.parametrize("closed", [float("-inf"), -1e9, -1e4])
def test_old_numbers_for_closed_pairs_are_known(closed: float):
    mask = BlockMask.from_transformers(torch.tensor([[0.0, closed], [0.0, 0.0]])[None, None])
    assert mask.to_dense().tolist() == [[[[True, False], [True, True]]]]


@pytest.mark.parametrize("bias", [-0.5, -9999.0, 1.0, float("nan"), float("inf")])
def test_a_bias_is_refused_with_its_place(bias: float):
    mask = torch.zeros(2, 3, 100, 70)
    mask[1, 2, 90, 7] = bias
    refused(rf"attention_mask\[1, 2, 90, 7\] is {bias:g}: .* no biases", BlockMask.from_transformers, mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "use BlockMask.causal or no mask"),
        (torch.ones(2, 10, dtype=torch.int64), r"not a tokenizer's \[B, T\]"),
        (torch.ones(2, 10, dtype=torch.bool), r"got a torch.Tensor, torch.bool \[2, 10\]"),
        (torch.ones(2, 1, 10, 10, dtype=torch.int64), "bool or additive float"),
    ],
)
def test_what_is_no_transformers_mask_is_refused(mask: Any, message: str):
    refused(message, BlockMask.from_transformers, mask)


# FlexAttention


@every_mask
def test_flex_attention_sees_the_same(make: Make):
    mask = make("cpu")
    dense, bm = mask.to_dense(), interop.to_flex(mask)
    assert torch.equal(
        flex.create_mask(bm.mask_mod, mask.batch, mask.heads, mask.q_len, mask.kv_len, device="cpu"), dense
    )
    assert torch.equal(bm.to_dense().bool(), stored_blocks(mask))
    assert bm.shape == dense.shape
    assert torch.equal(BlockMask.from_flex(bm).to_dense(), dense)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """flex_attention without torch.compile, which it would start by itself."""
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return partial(flex.flex_attention)


@pytest.mark.parametrize(
    "name", ["causal", "window and sinks", "bits ragged", "top k per item and head", "bigbird"]
)
def test_eager_flex_attention_gives_the_same_result(eager_flex: Callable[..., Tensor], name: str):
    mask = MASKS[name]("cpu")
    q, k, v = (
        torch.randn(mask.batch, 2 * mask.heads, length, 16, dtype=torch.float64)
        for length in (mask.q_len, mask.kv_len, mask.kv_len)
    )
    seen = mask.to_dense().repeat_interleave(2, 1)
    out = eager_flex(q, k, v, block_mask=interop.to_flex(mask, q_heads=2 * mask.heads))
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v, attn_mask=seen).nan_to_num())


def test_the_mask_mod_is_traced_once_for_masks_of_the_same_sizes():
    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def attend(q: Tensor, bm: flex.BlockMask) -> Tensor:
        return flex.flex_attention(q, q, q, block_mask=bm)

    q = torch.randn(1, 2, 192, 16)
    for seed in (1, 2, 3):
        mask = random_bits("cpu", (192, 192), (64, 64), heads=2, density=2.0, seed=seed)
        expected = scaled_dot_product_attention(q, q, q, attn_mask=mask.to_dense()).nan_to_num()
        torch.testing.assert_close(attend(q, interop.to_flex(mask)), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_heads_of_k_and_v_are_spread_over_those_of_q(shared: bool):
    mask = random_bits("cpu", (130, 200), (64, 64), heads=1 if shared else 2, batch=2)
    bm = interop.to_flex(mask, q_heads=6)
    assert bm.kv_num_blocks.shape[1] == (1 if shared else 6)
    seen = flex.create_mask(bm.mask_mod, 2, 6, 130, 200, device="cpu")
    assert torch.equal(seen, mask.to_dense().repeat_interleave(6 // mask.heads, 1))
    for q_heads in (0, 3, 2.0):
        if not shared:
            with pytest.raises(InvalidInput, match=r"q_heads is .*(2 heads, which must divide it|from 1)"):
                interop.to_flex(mask, q_heads=q_heads)  # pyright: ignore[reportArgumentType]


DOCUMENT = torch.arange(300) // 70
LIMIT = torch.tensor([[40, 300], [90, 10]])

MODS: dict[str, Any] = {
    "causal": lambda b, h, q, k: q >= k,
    "everything": flex.noop_mask,
    "nothing": lambda b, h, q, k: q < 0,
    "documents": lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k),
    "by item and head": lambda b, h, q, k: (q - k).abs() < LIMIT[b, h],
    "one head only": lambda b, h, q, k: (h == 1) | (q == k),
    "or": flex.or_masks(lambda b, h, q, k: k < 5, lambda b, h, q, k: (q - k).abs() < 20),
    "partial": partial(lambda step, b, h, q, k: (q + b) // step == k // step, 50),
}

# torch 2.11 always separates full blocks.
SEPARATES = "separate_full_blocks" in inspect.signature(flex.create_block_mask).parameters


@pytest.mark.parametrize(("block", "separate"), [(64, True), ((64, 128), False), ((128, 64), True)], ids=str)
@pytest.mark.parametrize("mod", MODS.values(), ids=list(MODS))
def test_a_flex_mask_becomes_a_block_mask(mod: Any, block: Any, separate: bool):
    how: dict[str, Any] = {"separate_full_blocks": separate} if SEPARATES else {}
    bm = flex.create_block_mask(mod, 2, 2, 260, 300, "cpu", block, **how)
    mask = BlockMask.from_flex(bm)
    seen = flex.create_mask(mod, 2, 2, 260, 300, device="cpu").bool()
    assert torch.equal(mask.to_dense(), seen)
    assert torch.equal(stored_blocks(mask), seen_blocks(seen, mask.block))


def test_a_shared_flex_mask_stays_shared():
    bm = flex.create_block_mask(MODS["causal"], None, None, 300, 300, "cpu", 64)
    mask = BlockMask.from_flex(bm)
    assert (mask.batch, mask.heads, mask.pure) == (1, 1, True)


def test_a_mask_mod_is_asked_about_partial_blocks_only(monkeypatch: pytest.MonkeyPatch):
    asked, real = [], converted._values_at

    def counting(mod: Any, batch_items: Tensor, *rest: Any) -> Tensor:
        asked.append(len(batch_items))
        return real(mod, batch_items, *rest)

    bm = flex.create_block_mask(MODS["causal"], 1, 1, 1024, 1024, "cpu", 64)
    monkeypatch.setattr(converted, "_values_at", counting)
    monkeypatch.setattr(converted, "CHUNK", 5 * 64 * 64)
    assert BlockMask.from_flex(bm).elements == 1024 * 1025 // 2
    assert asked == [5, 5, 5, 1]


def lists(*rows: list[int], width: int = 4) -> tuple[Tensor, Tensor]:
    """Counts [1, 1, Mb] and indices [1, 1, Mb, width], with -7 where nothing counts."""
    counts = torch.tensor([[[len(row) for row in rows]]], dtype=torch.int32)
    indices = [row + [-7] * (width - len(row)) for row in rows]
    return counts, torch.tensor([[indices]], dtype=torch.int32)


def test_compact_lists_in_any_order_are_taken():
    partial, full, turned = lists([], [3, 0], width=2), lists([4, 1], [2], width=2), [None] * 4
    bm: Any = flex.BlockMask((128, 300), *partial, *full, *turned, (64, 64), MODS["causal"])  # type: ignore[call-arg]
    mask = BlockMask.from_flex(bm)
    seen = torch.zeros(128, 300, dtype=torch.bool)
    seen[:64, 64:128] = seen[:64, 256:] = seen[64:, 128:192] = seen[64:, :64] = True
    assert torch.equal(mask.to_dense()[0, 0], seen)
    assert mask.sizes == (4, 1, 2, True)  # the block over the edge became partial, the empty one went


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv": lists([0], [5])},
            "kv_indices lists block 5 for row 1 of 2; 300 keys in blocks of 64 are blocks 0 to 4",
        ),
        ({"kv": lists([-1], [0])}, "kv_indices lists block -1 for row 0"),
        ({"full": lists([1], [2, 2])}, "row 1 of 2 lists block 2 twice"),
        ({"kv": lists([0], [1]), "full": lists([2], [1])}, "row 1 of 2 lists block 1 twice"),
        (
            {"kv": (lists([0], [1])[0] + 9, lists([0], [1])[1])},
            "kv_num_blocks counts 10 blocks in a row; kv_indices holds 4",
        ),
        ({"kv": lists([0], [1], [2])}, r"128 queries in tiles of 64 need \[1, 1, 2\]"),
        ({"kv": tuple(part[0] for part in lists([0], [1]))}, "index a BlockMask with slices"),
        ({"block": (256, 256)}, r"BLOCK_SIZE is \(256, 256\); blocks have sides of 64 or 128"),
        ({"block": (1 << 30, 1 << 30)}, "no mask at all"),
        ({"mod": flex._sliced_mask_mod_error}, "has lost its mask_mod"),
    ],
    ids=range(10),
)
def test_a_flex_mask_that_cannot_be_right_is_refused(changes: dict[str, Any], message: str):
    kv, full = changes.get("kv", lists([0], [0])), changes.get("full", lists([], []))
    no_transposed: list[Any] = [None] * 4
    block, mod = changes.get("block", (64, 64)), changes.get("mod", MODS["causal"])
    bm = flex.BlockMask((128, 300), *kv, *full, *no_transposed, block, mod)  # pyright: ignore[reportCallIssue]
    refused(message, BlockMask.from_flex, bm)


def test_lists_without_values_are_refused():
    with FakeTensorMode():
        lists = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        bm = flex.BlockMask.from_kv_blocks(
            *lists, BLOCK_SIZE=128, seq_lengths=(128, 128), compute_q_blocks=False
        )
    refused("a block mask follows values, and a FakeTensor does not show them", BlockMask.from_flex, bm)


def test_only_flex_masks_are_taken():
    with pytest.raises(InvalidInput, match=r"got a torch.Tensor"):
        BlockMask.from_flex(torch.ones(3, 3))  # pyright: ignore[reportArgumentType]


# FlashAttention-4


def read(lists: FlashLists, q_len: int, kv_len: int) -> Tensor:
    """What FlashAttention-4 sees with these lists, block by block."""
    batch, heads, tiles = lists.mask_block_cnt.shape
    bq, bk = lists.block_size
    columns = -(-kv_len // bk)
    seen = torch.zeros(batch, heads, tiles, bq, columns, bk, dtype=torch.bool)
    lo, hi = (
        bound.expand(batch, heads, -1).view(batch, heads, tiles, bq, 1) for bound in (lists.lo, lists.hi)
    )
    for b in range(batch):
        for h in range(heads):
            for i in range(tiles):
                for j in lists.full_block_idx[b, h, i, : lists.full_block_cnt[b, h, i]]:
                    seen[b, h, i, :, j] = True
                for j in lists.mask_block_idx[b, h, i, : lists.mask_block_cnt[b, h, i]].tolist():
                    keys = torch.arange(j * bk, (j + 1) * bk)
                    rule = -1 if lists.table is None else int(lists.table[b, h, i, j])
                    if rule < 0:
                        seen[b, h, i, :, j] = (lo[b, h, i] <= keys) & (keys < hi[b, h, i])
                    else:
                        assert lists.bits is not None
                        column = torch.arange(bk)
                        seen[b, h, i, :, j] = lists.bits[rule][:, column // 32] >> column % 32 & 1 == 1
    return seen.flatten(4, 5).flatten(2, 3)[:, :, :q_len, :kv_len]


@every_mask
def test_flash_attention_4_sees_the_same(make: Make):
    mask = make("cpu")
    found = interop.to_fa4(mask)
    assert torch.equal(read(found, mask.q_len, mask.kv_len), mask.to_dense())
    assert all(
        part.dtype is torch.int32 and part.is_contiguous() for part in found if isinstance(part, Tensor)
    )
    if found.table is not None:
        assert torch.equal(found.table != interop.NOT_STORED, stored_blocks(mask))


def test_flash_attention_4_gets_compact_lists_and_whole_tiles():
    found = interop.to_fa4(BlockMask.sliding_window(10_000, 500))
    assert found.mask_block_idx.shape == (1, 1, 79, 3)
    assert found.full_block_idx.shape == (1, 1, 79, 3)
    assert found.lo.shape == found.hi.shape == (1, 1, 79 * 128)
    assert (found.table, found.bits, found.block_size) == (None, None, (128, 128))


def test_flash_attention_4_gets_the_heads_of_q():
    mask = random_bits("cpu", (130, 200), (64, 64), heads=2)
    seen = read(interop.to_fa4(mask, q_heads=4), 130, 200)
    assert torch.equal(seen, mask.to_dense().repeat_interleave(2, 1))


# Patterns


@pytest.mark.parametrize("shape", [(512, 512), (300, 500), (64, 1)], ids=str)
def test_a_pattern_becomes_a_mask_and_comes_back(shape: tuple[int, int]):
    pattern = random_bsr(*shape, (64, 128), 0.4, seed=1).pattern
    mask = BlockMask.from_pattern(pattern)
    stored = torch.zeros(pattern.grid, dtype=torch.bool)
    stored[pattern.block_rows, pattern.indices] = True
    dense = stored.repeat_interleave(64, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(mask.to_dense()[0, 0], dense)
    assert interop.to_pattern(mask).same_as(pattern)


@every_mask
def test_each_head_has_a_pattern_of_what_is_stored(make: Make):
    mask = make("cpu")
    head, item = mask.heads - 1, mask.batch - 1
    found = interop.to_pattern(mask, head, item)
    checked = BlockPattern(found.shape, found.block, found.indptr, found.indices)
    expected = [[] for _ in range(mask.grid[0])]
    for lists in (mask.host.full, mask.host.partial):
        for i, row in enumerate(expected):
            r = (item * mask.heads + head) * mask.grid[0] + i
            row += lists.indices[lists.starts[r] : lists.starts[r] + lists.counts[r]].tolist()
    assert [sorted(row) for row in expected] == [
        checked.indices[checked.indptr[i] : checked.indptr[i + 1]].tolist() for i in range(mask.grid[0])
    ]


def test_patterns_of_heads_that_are_not_there_are_refused():
    mask = random_bits("cpu", (64, 64), (64, 64), heads=3)
    refused("head is 3; it must be an int from 0 to 2", interop.to_pattern, mask, 3)
    refused("batch is 1; it must be an int from 0 to 0", interop.to_pattern, mask, 0, 1)


def test_patterns_with_other_blocks_are_refused():
    refused("64 or 128", BlockMask.from_pattern, random_bsr(64, 64, 32, 0.5).pattern)
    with pytest.raises(InvalidInput, match="got BSR"):
        BlockMask.from_pattern(random_bsr(64, 64, 64, 0.5))  # pyright: ignore[reportArgumentType]


# GPU


@pytest.mark.gpu
@every_mask
def test_on_a_gpu_every_converter_sees_the_same(make: Make):
    mask = make("cuda")
    dense = mask.to_dense()
    assert torch.equal(BlockMask.from_dense(dense, mask.block).to_dense(), dense)
    assert torch.equal(BlockMask.from_flex(interop.to_flex(mask)).to_dense(), dense)
    found = tree_map_only(Tensor, Tensor.cpu, interop.to_fa4(mask))
    assert torch.equal(read(found, mask.q_len, mask.kv_len), dense.cpu())


# What FlexAttention itself compiles on an H200: its tiles of 128 need blocks of 128.
FLEX: dict[str, Make] = {
    "causal": lambda device: BlockMask.causal(1024, device=device),
    "window": lambda device: BlockMask.sliding_window(1024, 300, device=device),
    "top k": lambda device: BlockMask.topk(
        torch.rand(1, 2, 8, 8, device=device), 3, causal=True, seq_len=1024
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", FLEX)
def test_compiled_flex_attention_gives_the_same_result(name: str):
    mask = FLEX[name]("cuda")
    draw = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    q, k, v = (draw(1, 2, 1024, 128) for _ in range(3))
    out = torch.compile(flex.flex_attention)(q, k, v, block_mask=interop.to_flex(mask, q_heads=2))
    expected = scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask.to_dense())
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
