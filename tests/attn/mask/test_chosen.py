"""Masks of scores, maps and lists of blocks, against loops over their definition."""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention_varlen import attention_varlen
from sparsek.core.errors import InvalidInput
from tests.attn.mask.masks import check_mask
from tests.refusals import refused

FRAMES: tuple[dict[str, Any], ...] = (
    {"q_len": 256, "kv_len": 320, "block": 64},
    {"q_len": 300, "kv_len": 300, "block": (128, 64)},
    {"q_len": 200, "kv_len": 500, "block": (64, 128), "q_offset": 250},
    {"q_len": 290, "kv_len": 200, "block": 64, "q_offset": -70},
    {"q_len": 130, "kv_len": 130, "block": 128, "q_offset": 40},
    {"q_len": 300, "kv_len": 600, "block": 256},
    {"q_len": 150, "kv_len": 400, "block": (64, 256), "q_offset": 200},
)


class Setting:
    """A drawn mask: lengths, whether causal, keys of each block, and a generator."""

    def __init__(self, frame: int, causal: bool, short: int, seed: int) -> None:
        self.frame, self.causal = FRAMES[frame], causal
        self.draw = torch.Generator().manual_seed(seed)
        block = self.frame["block"]
        self.block = block if isinstance(block, tuple) else (block, block)
        self.q_len, self.kv_len = self.frame["q_len"], self.frame["kv_len"]
        self.offset = self.frame.get("q_offset", self.kv_len - self.q_len)
        self.tiles, self.columns = (
            -(-n // b) for n, b in zip((self.q_len, self.kv_len), self.block, strict=True)
        )
        self.kv_lengths = None
        if short:
            shape = (self.columns,) if short == 1 else (2, self.columns)
            lengths = torch.randint(-30, self.block[1] + 40, shape, generator=self.draw)
            self.kv_lengths = lengths.clamp(0, self.block[1])

    def elements(self, kept: Tensor) -> Tensor:
        """What each query sees, of the blocks kept [batch, heads, Mb, Nb]."""
        query, key = torch.arange(self.q_len), torch.arange(self.kv_len)
        seen = torch.ones(2, self.q_len, self.kv_len, dtype=torch.bool)
        if self.kv_lengths is not None:
            lengths = self.kv_lengths.expand(2, -1)[:, key // self.block[1]]
            seen &= (key % self.block[1] < lengths)[:, None]
        if self.causal:
            seen &= key <= query[:, None] + self.offset
        return kept[:, :, query // self.block[0]][..., key // self.block[1]] & seen[:, None]

    def there(self) -> Tensor:
        """The blocks of which any query sees any key, bool [2, 1, Mb, Nb]."""
        seen = self.elements(torch.ones(1, 1, self.tiles, self.columns, dtype=torch.bool))
        found = torch.zeros(2, 1, self.tiles, self.columns, dtype=torch.bool)
        (bq, bk) = self.block
        for i in range(self.tiles):
            for j in range(self.columns):
                piece = seen[:, :, i * bq : (i + 1) * bq, j * bk : (j + 1) * bk]
                found[:, :, i, j] = piece.any(-1).any(-1)
        return found

    @property
    def options(self) -> dict[str, Any]:
        return {**self.frame, "causal": self.causal, "kv_lengths": self.kv_lengths}

    def agrees(self, mask: BlockMask, kept: Tensor) -> None:
        """The mask keeps these blocks, its parts keep all promises, and the order inside rows is right."""
        want = self.elements(kept)
        if self.kv_lengths is None:
            seen = check_mask(mask)
        else:  # a block may be partial by bits although its other keys are beyond what queries see
            BlockMask(*(getattr(mask, name) for name in BlockMask._fields))
            seen = mask.to_dense()
        assert torch.equal(seen.expand(want.shape), want)
        (bq, bk), stored = mask.block, 0
        assert max(mask.block) <= 128
        for i, j in itertools.product(range(mask.grid[0]), range(mask.grid[1])):
            piece = want[:, :, i * bq : (i + 1) * bq, j * bk : (j + 1) * bk]
            stored += int(piece.any(-1).any(-1).sum())
        assert mask.stored_blocks * 2 // mask.batch == stored


settings_of = st.builds(
    Setting, st.integers(0, len(FRAMES) - 1), st.booleans(), st.integers(0, 2), st.integers(0, 999)
)


@settings(max_examples=20, deadline=None)
@given(settings_of)
def test_a_map_keeps_the_blocks_that_are_true(at: Setting):
    kept = torch.rand(2, 3, at.tiles, at.columns, generator=at.draw) < 0.5
    at.agrees(BlockMask.from_block_map(kept, **at.options), kept)
    at.agrees(BlockMask.from_block_map(kept[0, 0], **at.options), kept[:1, :1])


@settings(max_examples=20, deadline=None)
@given(settings_of, st.booleans())
def test_indices_in_any_order_are_the_same_map(at: Setting, counted: bool):
    kept = torch.rand(2, 3, at.tiles, at.columns, generator=at.draw) < 0.5
    most = int(kept.sum(-1).max())
    indices = torch.randint(-9, 99, (2, 3, at.tiles, most), generator=at.draw) if counted else None
    if indices is None:
        indices = torch.full((2, 3, at.tiles, most), -1)
    counts = kept.sum(-1)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(at.tiles)).tolist():
        columns = kept[b, h, i].nonzero()[:, 0]
        columns = columns[torch.randperm(len(columns), generator=at.draw)]
        places = torch.arange(len(columns))
        if not counted:
            places = torch.randperm(most, generator=at.draw)[: len(columns)]
        indices[b, h, i, places] = columns
    mask = BlockMask.from_indices(indices, counts if counted else None, **at.options)
    at.agrees(mask, kept)
    of_map = BlockMask.from_block_map(kept, **at.options)
    assert torch.equal(mask.full.counts, of_map.full.counts)


def best(scores: list[float], there: list[bool], first: list[bool], k: int) -> set[int]:
    """The k blocks that rank highest."""
    columns = [j for j in range(len(scores)) if there[j] and (scores[j] > -torch.inf or first[j])]
    return set(sorted(columns, key=lambda j: (not first[j], -scores[j], j))[:k])


@settings(max_examples=25, deadline=None)
@given(
    settings_of,
    st.sampled_from((None, "blocks", "places")),
    st.sampled_from(("int", "heads", "items")),
    st.booleans(),
)
def test_topk_keeps_the_highest_and_of_equal_ones_the_first(
    at: Setting, ahead: str | None, kind: str, bounded: bool
):
    scores = torch.randint(-3, 4, (2, 3, at.tiles, at.columns), generator=at.draw).float()
    scores[torch.rand(scores.shape, generator=at.draw) < 0.1] = -torch.inf
    scores[torch.rand(scores.shape, generator=at.draw) < 0.1] = torch.inf
    k: Any = (
        2 if kind == "int" else torch.randint(2, 6, (3,) if kind == "heads" else (2, 3), generator=at.draw)
    )
    always: Any = None
    column, most = torch.arange(at.columns), 4 if bounded else None
    if ahead == "blocks":
        always = (column == torch.randint(at.columns, (at.tiles, 1), generator=at.draw)) | (column == 1)
    elif ahead == "places":  # the first block, those that a tile stands in, and one beside them
        k, most = 8, None
        start = torch.arange(at.tiles)[:, None] * at.block[0]
        end = (start + at.block[0]).clamp(max=at.q_len) - 1
        near = [(edge + at.offset).div(at.block[1], rounding_mode="floor") for edge in (start, end)]
        always = (column == 0) | (column > near[0] - 2) & (column < near[1] + (1 if at.causal else 2))
    given_always = (1, 2) if ahead == "places" else always
    mask = BlockMask.topk(scores, k, always=given_always, most=most, **at.options)
    budgets = torch.as_tensor(k).expand(2, 3).clamp(max=most or 99)
    there, kept = at.there(), torch.zeros_like(scores, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(at.tiles)).tolist():
        first = [False] * at.columns if always is None else always[i].tolist()
        chosen = best(scores[b, h, i].tolist(), there[b, 0, i].tolist(), first, int(budgets[b, h]))
        kept[b, h, i, list(chosen)] = True
    at.agrees(mask, kept)
    capacity = mask.full.starts.diff()
    assert (capacity == capacity[0]).all() if len(capacity) else True


@settings(max_examples=25, deadline=None)
@given(settings_of, st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from((None, 3, 4)))
def test_cumulative_keeps_the_fewest_that_hold_the_share(
    at: Setting, ahead: bool, per_head: bool, least: int, most: int | None
):
    scores = torch.randint(0, 6, (2, 3, at.tiles, at.columns), generator=at.draw).float() / 8
    share: Any = 0.75
    if per_head:
        share = torch.tensor([0.25, 0.5, 1.0])
    always = torch.arange(at.columns).expand(at.tiles, -1) == 1 if ahead else None
    mask = BlockMask.cumulative(scores, share, always=always, least=least, most=most, **at.options)
    there, kept = at.there(), torch.zeros_like(scores, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(at.tiles)).tolist():
        row = [Fraction(x) for x in scores[b, h, i].tolist()]
        visible = there[b, 0, i].tolist()
        first = [ahead and j == 1 for j in range(at.columns)]
        columns = [j for j in range(at.columns) if visible[j]]
        goal = Fraction(float(torch.as_tensor(share).expand(3)[h])) * sum(row[j] for j in columns)
        held, chosen = Fraction(0), []
        for j in sorted(columns, key=lambda j: (not first[j], -row[j], j)):
            if len(chosen) == (most or 99) or (held >= goal and len(chosen) >= least and not first[j]):
                break
            chosen.append(j)
            held += row[j]
        kept[b, h, i, chosen] = True
    at.agrees(mask, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_masses_of_a_softmax_reach_the_share_within_rounding(dtype: torch.dtype):
    scores = (torch.randn(1, 2, 4, 64, dtype=torch.float64) * 4).softmax(-1).to(dtype)
    mask = BlockMask.cumulative(scores, 0.9, q_len=256, kv_len=4096, block=64)
    kept = mask.to_dense()[:, :, ::64, ::64]
    mass = scores.double() * kept
    assert (mass.sum(-1) >= 0.9 * scores.double().sum(-1) - 1e-7).all()
    spare = mass.masked_fill(~kept, torch.inf).amin(-1)
    assert (mass.sum(-1) - spare < 0.9 * scores.double().sum(-1) + 1e-7).all()


ZERO, EYE = torch.zeros(2, 2), torch.eye(2, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "map dtype": (lambda: BlockMask.from_block_map(ZERO, 256), "the dtype of block_map is torch.float32"),
    "map shape": (
        lambda: BlockMask.from_block_map(ZERO.bool(), 300),
        r"block_map is \[2, 2\]; these lengths need \[3, 3\] or \[batch, heads, 3, 3\]",
    ),
    "indices shape": (
        lambda: BlockMask.from_indices(EYE, seq_len=300),
        r"indices is \[2, 2\]; these lengths need \[3, K\] or \[batch, heads, 3, K\]",
    ),
    "repeated": (
        lambda: BlockMask.from_indices(torch.tensor([[0, 1], [1, 1]]), seq_len=256),
        r"indices of tile \[0, 0, 1\] hold key block 1 more than once",
    ),
    "outside": (
        lambda: BlockMask.from_indices(torch.tensor([[0, 1], [1, 2]]), seq_len=256),
        r"indices\[1, 1\] is out of range; key blocks are 0 to 1",
    ),
    "negative": (
        lambda: BlockMask.from_indices(torch.tensor([[0, 1], [-2, 1]]), seq_len=256),
        r"indices\[1, 0\] is out of range",
    ),
    "counted -1": (
        lambda: BlockMask.from_indices(torch.tensor([[0, -1], [0, 1]]), torch.tensor([2, 2]), 256),
        r"indices\[0, 1\] is out of range",
    ),
    "counts": (
        lambda: BlockMask.from_indices(EYE, torch.tensor([2, 3]), 256),
        r"counts\[1\] is out of range; indices has room for 0 to 2 blocks",
    ),
    "counts below": (
        lambda: BlockMask.from_indices(EYE, torch.tensor([-1, 0]), 256),
        r"counts\[0\] is out of",
    ),
    "counts shape": (
        lambda: BlockMask.from_indices(EYE, torch.tensor([1]), 256),
        r"counts is \[1\]; indices of \[1, 1, 2, 2\] need \[2\]",
    ),
    "kv_lengths": (
        lambda: BlockMask.from_block_map(ZERO.bool(), 256, kv_lengths=torch.tensor([3, 129])),
        r"kv_lengths\[1\] is out of range; a block has 0 to 128 keys",
    ),
    "kv_lengths below": (
        lambda: BlockMask.topk(ZERO, 1, seq_len=256, kv_lengths=torch.tensor([[3, -1]])),
        r"kv_lengths\[0, 1\] is out of range",
    ),
    "kv_lengths shape": (
        lambda: BlockMask.topk(ZERO, 1, seq_len=256, kv_lengths=torch.tensor([3])),
        r"kv_lengths is \[1\]; 256 keys in blocks of 128 need \[2\] or \[batch, 2\]",
    ),
    "kv_lengths batch": (
        lambda: BlockMask.topk(
            ZERO.expand(3, 1, 2, 2), 1, seq_len=256, kv_lengths=torch.ones(2, 2, dtype=torch.int32)
        ),
        "kv_lengths has 2 batch items and the blocks have 3",
    ),
    "budget": (
        lambda: BlockMask.topk(ZERO.expand(1, 3, 2, 2), torch.tensor([1, 2, 0]), seq_len=256),
        r"k\[2\] is below 1",
    ),
    "budget shape": (
        lambda: BlockMask.topk(ZERO.expand(1, 3, 2, 2), torch.tensor([1, 2]), seq_len=256),
        r"k is \[2\]; scores of 1 batch items and 3 heads need \[3\] or \[1, 3\]",
    ),
    "always over a budget": (
        lambda: BlockMask.topk(ZERO, torch.tensor([1]), always=torch.ones(2, 2).bool(), seq_len=256),
        r"always\[0, 0, 0\] keeps more than k blocks",
    ),
    "negative mass": (
        lambda: BlockMask.cumulative(torch.tensor([[1.0, 0.0], [0.0, -1.0]]), 0.5, seq_len=256),
        r"scores\[0, 0, 1, 1\] is negative, infinite or NaN",
    ),
    "infinite mass": (
        lambda: BlockMask.cumulative(ZERO + torch.inf, 0.5, seq_len=256),
        r"scores\[0, 0, 0, 0\]",
    ),
    "threshold": (lambda: BlockMask.cumulative(ZERO, 0.0, seq_len=256), "threshold is 0; it must be over 0"),
    "threshold over": (lambda: BlockMask.cumulative(ZERO, 1.5, seq_len=256), "threshold is 1.5"),
    "thresholds": (
        lambda: BlockMask.cumulative(ZERO, torch.tensor([torch.nan]), seq_len=256),
        r"threshold\[0\] is out of range",
    ),
    "least": (
        lambda: BlockMask.cumulative(ZERO, 0.5, seq_len=256, least=3, most=2),
        "least is 3 and most is 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_what_would_be_right(name: str):
    call, message = REFUSED[name]
    refused(message, call)


def test_numbers_in_another_form_than_a_tensor_per_head_name_the_cure():
    with pytest.raises(InvalidInput, match=r"k is \[\], one number: pass it as k.item\(\)"):
        BlockMask.topk(torch.zeros(1, 2, 1, 1), torch.tensor(2), seq_len=64)
    q, ends = torch.randn(4, 1, 8), [0, 4]
    refused(r"got list: torch.tensor\(cu_seqlens_q\)", attention_varlen, q, q, q, ends)
