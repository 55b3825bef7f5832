"""best_blocks against its definition, one tile at a time."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.build.scored import best_blocks, best_near
from sparsek.attn.mask.build.selection import LocalBlocks
from sparsek.attn.mask.lists import Place
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from tests.attn.mask.masks import ABSENT, check_mask, kinds
from tests.refusals import refused

FRAME: dict[str, Any] = {"q_len": 300, "kv_len": 420, "block": 64}
WITHINS = {
    "full": BlockMask.full(**FRAME),
    "causal": BlockMask.causal(**FRAME),
    "sinks": BlockMask.sliding_window(**FRAME, window=200, sinks=10),
    "per batch": BlockMask.per_batch([BlockMask.causal(**FRAME), BlockMask.full(**FRAME)]),
    "bits": BlockMask.from_dense(
        torch.rand(2, 1, 300, 420, generator=torch.Generator().manual_seed(1)) < 0.001, 64
    ),
}


def expected(within: BlockMask, scores: Tensor, k: int, always: BlockMask | None) -> Tensor:
    batch, heads, tiles, columns = scores.shape
    there = (kinds(within) != ABSENT).view(within.batch, 1, tiles, columns).expand(batch, heads, -1, -1)
    first = torch.zeros_like(there)
    if always is not None:
        first = (kinds(always) != ABSENT).view(always.batch, 1, tiles, columns).expand_as(there) & there
    kept = torch.zeros_like(there)
    rank = scores.masked_fill(~there, -torch.inf).masked_fill(first, torch.inf)
    order = rank.argsort(-1, descending=True)
    kept.scatter_(-1, order[..., :k], True)
    kept = kept & (rank > -torch.inf) | first
    whole = kept.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :300, :420]
    return whole & within.to_dense()


@settings(max_examples=25)
@given(
    st.sampled_from(list(WITHINS)),
    st.integers(1, 8),
    st.sampled_from((None, (64, 0), (130, 70))),
    st.integers(0, 99),
)
def test_each_tile_keeps_the_best_blocks_with_their_rules(
    name: str, k: int, near: tuple[int, int] | None, seed: int
):
    within = WITHINS[name]
    scores = torch.rand(2, 3, *within.grid, generator=torch.Generator().manual_seed(seed))
    scores[scores < 0.1] = -torch.inf
    always = None if near is None else BlockMask.sliding_window(**FRAME, window=near[0], sinks=near[1])
    mask = best_blocks(within, scores, k, always)
    want = expected(within, scores, k, always)
    if name == "bits":
        assert torch.equal(mask.to_dense(), want)
    else:
        assert torch.equal(check_mask(mask), want)


@settings(max_examples=25)
@given(
    st.booleans(),
    st.integers(1, 8),
    st.integers(1, 200),
    st.integers(0, 100),
    st.sampled_from(((300, 420), (300, 300), (500, 200))),
    st.integers(0, 99),
)
def test_near_blocks_are_those_of_a_window(
    causal: bool, k: int, window: int, sinks: int, lengths: tuple[int, int], seed: int
):
    frame: Any = {"q_len": lengths[0], "kv_len": lengths[1], "block": (128, 64)}
    place = Place.of(**frame)
    within = BlockMask.causal(**frame) if causal else BlockMask.full(**frame)
    always = BlockMask.sliding_window(**frame, window=window, sinks=sinks, causal=causal)
    scores = torch.randn(2, 3, *place.grid, generator=torch.Generator().manual_seed(seed))
    scores[scores > 1] = torch.nan
    near = LocalBlocks(-(-sinks // 64), window - 1, 0 if causal else window - 1)
    mask = best_near(BlockMask, scores, place, causal, k, near, "all")
    assert torch.equal(check_mask(mask), best_blocks(within, scores, k, always).to_dense())


def test_scores_that_do_not_fit_are_refused():
    within = WITHINS["causal"]
    refused(r"scores are torch.float32 \[2, 5, 7\]", best_blocks, within, torch.rand(2, 5, 7), 2)
    with pytest.raises(InvalidInput, match="within has 1 heads and 2 batch items"):
        best_blocks(WITHINS["per batch"], torch.rand(3, 1, *within.grid), 2)
    with pytest.raises(InvalidInput, match="always must have the blocks"):
        best_blocks(within, torch.rand(1, 1, *within.grid), 2, BlockMask.causal(300, block=64))


@pytest.mark.gpu
def test_on_a_gpu_the_same_blocks_are_kept_without_a_wait(no_sync):
    within = WITHINS["sinks"].to("cuda")
    scores = torch.rand(2, 3, *within.grid, generator=torch.Generator().manual_seed(0))
    here = scores.cuda()
    best_blocks(within, here, 3)
    with no_sync():
        mask = best_blocks(within, here, 3)
    assert torch.equal(mask.to_dense().cpu(), best_blocks(WITHINS["sinks"], scores, 3).to_dense())
