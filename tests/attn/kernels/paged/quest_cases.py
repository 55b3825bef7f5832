"""What both the reference and the kernels of Quest must give."""

import random
from typing import Any

import pytest
import torch

import sparsek as sk
from tests.attn.kernels.paged.quest_batches import batch, listed, slow_pages, slow_update

# lengths, queries, page, topk, options
CHOICES: list[tuple[list[int], list[int], int, int, dict[str, Any]]] = [
    ([200, 1, 97], [1, 1, 1], 16, 4, {}),
    ([130, 128, 0, 300], [3, 1, 0, 16], 32, 3, {"heads": (6, 2), "dim": 40}),
    ([15], [15], 16, 2, {"heads": (3, 3)}),
    ([700, 40], [2, 5], 16, 100, {"heads": (20, 1), "dim": 8}),
    ([2, 64], [4, 1], 64, 2, {"dim": 64}),  # more queries than keys: the first see none
    ([1100], [2], 16, 9, {"spare": 0}),
]


def check_choice(case: Any, device: str, dtype: torch.dtype, seeds: int = 3) -> None:
    lengths, queries, page, topk, options = case
    for seed in range(seeds):
        b = batch(lengths, queries, page=page, dtype=dtype, seed=seed, device=device, **options)
        lists = sk.policies.Quest(topk, page).lists(
            b.q, b.summaries, b.block_table, b.seq_lens, b.cu_seqlens_q
        )
        found, right = listed(lists), slow_pages(b, page, topk)
        assert found == right | {key: ([], []) for key in found.keys() - right.keys()}
        k = min(topk, b.block_table.shape[1])
        assert lists.longest == k
        assert (lists.tiles, lists.block) == (len(b.q), (1, page))
        for (h, t), (whole, cut) in found.items():
            row = lists.full.indices[(h * lists.tiles + t) * k :][:k].tolist()
            assert row == whole + cut + [-1] * (k - len(whole) - len(cut))


def check_update(page: int, dim: int, tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> None:
    """Slots in any order, some twice, several of a page, some skipped; keys and values in one cache."""
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    pages, heads = 7, 2
    cache = torch.randn(pages, heads, page, 2 * dim, generator=made).to(dtype).to(device)
    quest = sk.policies.Quest(page=page)
    keys = cache[..., :dim]
    summaries = torch.randn(pages, heads, 2, dim, generator=made).to(dtype).to(device)
    slots = [chance.randrange(pages * page) for _ in range(tokens)]
    slots += [-1, pages * page, -page - 3]
    begin = chance.randrange(pages) * page
    slots += range(begin, begin + chance.randrange(1, page))
    chance.shuffle(slots)
    right = slow_update(keys.cpu(), slots, summaries.cpu())
    quest.update(keys, torch.tensor(slots, dtype=torch.int64, device=device), summaries)
    assert torch.equal(summaries.cpu().float(), right.float())


def check_steps(device: str, dtype: torch.dtype) -> None:
    """A prompt, then one and several tokens at a time, in a page that held another request before."""
    quest, page, dim = sk.policies.Quest(page=16), 16, 24
    made = torch.Generator().manual_seed(3)
    keys = torch.randn(6, 1, page, dim, generator=made).to(dtype).to(device)
    summaries = quest.summaries(keys)
    assert not summaries.any()
    summaries.fill_(torch.nan)
    table, length = [4, 0, 3], 0
    for many in (21, 1, 1, 9, 4, 6):
        slots = [table[j // page] * page + j % page for j in range(length, length + many)]
        length += many
        quest.update(keys, torch.tensor(slots, dtype=torch.int64, device=device), summaries)
        for j in range(-(-length // page)):
            x = keys[table[j], :, : min(length - j * page, page)]
            assert torch.equal(summaries[table[j]], torch.stack((x.amin(1), x.amax(1)), 1))
    assert summaries[[1, 2, 5]].isnan().all()


def check_nan(device: str) -> None:
    """A NaN counts as the lowest bound; the first and the last page are kept."""
    b = batch([96], [1], heads=(2, 2), device=device)
    b.q[0, 1, 3] = torch.nan
    b.summaries[int(b.block_table[0, 2]), 0, 1, 0] = torch.nan
    lists = sk.policies.Quest(4, 16).lists(b.q, b.summaries, b.block_table, b.seq_lens, b.cu_seqlens_q)
    assert listed(lists)[1, 0] == ([0, 1, 2, 5], [])
    assert 2 not in listed(lists)[0, 0][0]


choices = pytest.mark.parametrize("case", CHOICES)
updates = pytest.mark.parametrize(
    ("page", "dim", "tokens"), [(16, 16, 5), (32, 40, 60), (64, 8, 1), (128, 128, 70)]
)
