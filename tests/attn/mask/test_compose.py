"""Masks joined: `&`, `|`, per head and per batch item, against what they are in dense form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from tests.attn.mask.masks import check_mask
from tests.refusals import refused

SIDES = st.sampled_from((64, 128))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[BlockMask, BlockMask]:
    """Two masks of one shape and block, of any kind."""
    kv_len = draw(st.integers(1, 300))
    frame: dict[str, Any] = {
        "q_len": draw(st.one_of(st.just(kv_len), st.integers(1, 300))),
        "kv_len": kv_len,
        "block": (draw(SIDES), draw(SIDES)),
    }
    tiles, columns = (
        -(-frame[name] // side) for name, side in zip(("q_len", "kv_len"), frame["block"], strict=True)
    )
    causal, window = draw(st.booleans()), draw(st.integers(1, 250))

    def scored(batch: int, heads: int) -> BlockMask:
        scores = torch.rand(batch, heads, tiles, columns, generator=torch.Generator().manual_seed(window))
        return BlockMask.topk(scores, 2, causal, **frame)

    kinds = (
        lambda: BlockMask.full(**frame),
        lambda: BlockMask.causal(**frame),
        lambda: BlockMask.sliding_window(window=window, sinks=window // 3, causal=causal, **frame),
        lambda: BlockMask.bigbird(window=window, globals=20, random=1, heads=2, causal=causal, **frame),
        lambda: scored(1, 4),
        lambda: scored(3, 1),
    )
    first, second = (draw(st.sampled_from(kinds)) for _ in range(2))
    return first(), second()


def as_many(seen: Tensor, batch: int, heads: int) -> Tensor:
    """Batch item 0 for all if there is one; as many heads, side by side, use one as there are more."""
    return seen.expand(batch, -1, -1, -1).repeat_interleave(heads // seen.shape[1], 1)


@given(pairs())
def test_both_and_either_are_what_they_are_of_elements(pair: tuple[BlockMask, BlockMask]):
    a, b = pair
    batch, heads = max(a.batch, b.batch), max(a.heads, b.heads)
    seen = [as_many(mask.to_dense(), batch, heads) for mask in pair]
    assert torch.equal(check_mask(a & b), seen[0] & seen[1])
    assert torch.equal(check_mask(a | b), seen[0] | seen[1])


@given(pairs(), st.booleans())
def test_one_after_the_other(pair: tuple[BlockMask, BlockMask], twice: bool):
    masks = [*pair, pair[0]] if twice else list(pair)
    batch, heads = max(mask.batch for mask in pair), max(mask.heads for mask in pair)
    of_heads = torch.cat([mask.to_dense().expand(batch, -1, -1, -1) for mask in masks], 1)
    assert torch.equal(check_mask(BlockMask.per_head(masks)), of_heads)
    if all(mask.heads in (1, heads) for mask in pair):
        of_items = torch.cat([mask.to_dense().expand(-1, heads, -1, -1) for mask in masks], 0)
        assert torch.equal(check_mask(BlockMask.per_batch(masks)), of_items)


@pytest.mark.parametrize("shape", [(500, 500), (130, 470), (470, 130)])
def test_intervals_stay_intervals_under_and(shape: tuple[int, int]):
    frame: dict[str, Any] = {"q_len": shape[0], "kv_len": shape[1], "block": 64}
    ahead = BlockMask.sliding_window(window=200, causal=False, **frame)
    mask = BlockMask.causal(**frame) & ahead & BlockMask.full(**frame)
    assert mask.pure
    assert mask.bits is None
    assert torch.equal(check_mask(mask), BlockMask.sliding_window(window=200, **frame).to_dense())


def test_documents_and_a_window_stay_intervals():
    mask = BlockMask.block_diagonal([100, 250, 150], block=64) & BlockMask.sliding_window(500, 80, block=64)
    assert mask.pure
    assert mask.label == "block_diagonal(3 documents) & sliding_window(80)"


def test_what_no_interval_describes_has_bits_once_for_equal_blocks():
    ends = [BlockMask.sliding_window(4096, 64, block=64, q_offset=offset) for offset in (0, -1024)]
    mask = ends[0] | ends[1]
    assert not mask.pure
    assert torch.equal(check_mask(mask), ends[0].to_dense() | ends[1].to_dense())
    documents = [BlockMask.block_diagonal([16] * 256, causal=causal, block=64) for causal in (True, False)]
    sparse = documents[1] & (BlockMask.sliding_window(4096, 3, block=64) | documents[0])
    assert torch.equal(check_mask(sparse), documents[0].to_dense())


def test_masks_of_fewer_heads_apply_to_groups_of_heads():
    few = BlockMask.per_head([BlockMask.causal(128, block=64), BlockMask.full(128, block=64)])
    many = BlockMask.topk(torch.randn(1, 4, 2, 2), 1, seq_len=128, block=64)
    both = check_mask(few & many)
    assert torch.equal(both, few.to_dense().repeat_interleave(2, 1) & many.to_dense())


def test_masks_that_come_again_are_kept_once():
    window = BlockMask.sliding_window(2048, 200, sinks=10, block=64)
    mask = BlockMask.per_head([window] * 8)
    assert mask.partial.indices.numel() == window.partial.indices.numel()
    assert mask.lo is window.lo
    assert (mask.heads, mask.sizes.stored) == (8, 8 * window.sizes.stored)


def test_heads_of_their_own_in_each_batch_item():
    rows = [[BlockMask.sliding_window(256, 10 * b + h + 1, block=64) for h in range(3)] for b in range(2)]
    mask = BlockMask.per_batch([BlockMask.per_head(row) for row in rows])
    assert (mask.batch, mask.heads) == (2, 3)
    seen = check_mask(mask)
    for b, h in ((0, 0), (1, 2)):
        assert torch.equal(seen[b, h], rows[b][h].to_dense()[0, 0])


NO_MASK: Any = 5
NO_LIST: Any = BlockMask.full(64)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "lengths": (lambda: BlockMask.full(64) & BlockMask.full(65), "&: q_len of mask 1 is 65 and of mask 0 64"),
    "blocks": (
        lambda: BlockMask.full(64) | BlockMask.full(64, block=64),
        r"\|: block of mask 1 is \(64, 64\)",
    ),
    "batch": (
        lambda: scored(2, 1) & scored(3, 1),
        "masks of 2 & 3 batch items; they must be as many, or 1 for all",
    ),
    "heads": (
        lambda: scored(1, 2) | scored(1, 3),
        r"masks of 2 \| 3 heads; one number must divide the other",
    ),
    "none": (lambda: BlockMask.per_head([]), "per_head of no masks"),
    "no mask": (
        lambda: BlockMask.per_batch([BlockMask.full(64), NO_MASK]),
        "mask 1 is 5; it must be a BlockMask",
    ),
    "one mask": (
        lambda: BlockMask.per_head(NO_LIST),
        "per_head takes a list of masks, got a BlockMask",
    ),
    "other batch": (
        lambda: BlockMask.per_head([scored(2, 1), scored(3, 1)]),
        "per_head: mask 0 has batch 2 and others 3; batch must be the same in all masks, or 1",
    ),
    "a tensor, &": (
        lambda: BlockMask.full(64) & torch.ones(64, 64).bool(),  # type: ignore[operator]
        r"a BlockMask does not combine with a tensor; write mask & BlockMask.from_dense\(tensor\)",
    ),
    "a tensor, |": (
        lambda: BlockMask.full(64) | torch.ones(64, 64).bool(),  # type: ignore[operator]
        r"write mask \| BlockMask.from_dense\(tensor\)",
    ),
    "~": (lambda: ~BlockMask.full(64), r"has no ~; build .* by BlockMask.from_dense\(~mask.to_dense\(\)\)"),
    "other heads": (
        lambda: BlockMask.per_batch([scored(1, 2), scored(1, 3)]),
        "heads must be the same in all masks",
    ),
}


def scored(batch: int, heads: int) -> BlockMask:
    return BlockMask.topk(torch.zeros(batch, heads, 1, 1), 1, seq_len=64)


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_do_not_fit_are_refused(name: str):
    call, message = REFUSED[name]
    refused(message, call)


@pytest.mark.parametrize("join", [lambda a, b: a & b, lambda a, b: a | b])
def test_other_objects_do_not_join(join):
    with pytest.raises(TypeError, match="unsupported operand"):
        join(BlockMask.full(64), 5)


@pytest.mark.gpu
def test_a_gpu_joins_to_the_same_masks():
    def joined(device: str) -> list[BlockMask]:
        window, causal = (
            BlockMask.sliding_window(500, 90, sinks=7, device=device),
            BlockMask.causal(500, device=device),
        )
        random = BlockMask.bigbird(500, 64, 10, 1, heads=2, device=device)
        return [
            window & random,
            window | random,
            causal & random,
            BlockMask.per_head([window, random, causal]),
        ]

    for there, here in zip(joined("cuda"), joined("cpu"), strict=True):
        assert torch.equal(check_mask(there.to("cpu")), here.to_dense())
        assert there.sizes == here.sizes or (
            not there.sizes.exact
            and all(a >= b for a, b in zip(there.sizes[:3], here.sizes[:3], strict=True))
        )
