"""attention/lengths.py and transposed.py on a GPU: what torch's sorts make."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from sparsek.attn.kernels.backward import transposed
from sparsek.attn.kernels.forward.lengths import Lengths, launched_order, launched_walk
from sparsek.attn.kernels.forward.parts import walk
from sparsek.attn.mask.lists import BlockLists
from tests.attn.kernels.forward.test_schedule_fwd import CASES


def drawn(groups: int, tiles: int, members: int) -> Lengths:
    noise = torch.Generator().manual_seed(tiles)
    p, f = torch.randint(0, 90, (2, groups * members * tiles), generator=noise, dtype=torch.int32).cuda()
    return Lengths(p, f, groups, tiles, 180 * members, members)


@pytest.mark.gpu
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("tiles", [1, 64, 1000, 4096])
def test_tiles_are_ordered_as_by_a_stable_sort(
    tiles: int, members: int, no_sync: Callable[[], AbstractContextManager[None]]
) -> None:
    lengths = drawn(8, tiles, members)
    launched_order(lengths)
    torch.cuda.synchronize()
    with no_sync():
        order = launched_order(lengths)
        made = launched_walk(lengths, 2 * 8 * tiles * lengths.most, 17, 4, 16)
    assert torch.equal(order, torch.argsort(lengths.costs, dim=1, descending=True, stable=True).int())
    wanted = walk(lengths.costs, lengths.most, 2 * 8 * tiles * lengths.most, 17, 4, 16)
    there = wanted.order[..., 0] >= 0
    assert torch.equal(made.order[there], wanted.order[there])
    assert bool((made.order[~there][:, 0] == -1).all())
    assert made.merges is not None
    assert wanted.merges is not None
    cut = wanted.merges[:, 3] > 1
    assert torch.equal(made.merges[cut], wanted.merges[cut])
    assert not made.merges[~cut].any()


def flat(lists: BlockLists, entries: Tensor) -> list[Tensor]:
    """Counts, and query tiles and entries of all lists, one after another."""
    starts, counts, tiles = (x.cpu().long() for x in lists)
    first = counts.cumsum(0) - counts
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    at = starts[row] + torch.arange(len(row)) - first[row]
    return [counts, tiles[at], entries.cpu().long()[at]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_lists_of_key_blocks(name: str, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
    mask = CASES[name][0]()
    full, partial, full_entries, partial_entries = mask.transposed
    transposed.launched(mask)
    torch.cuda.synchronize()
    with no_sync():
        found = transposed.launched(mask)
    for made, wanted in (
        (flat(found.full, found.full_entries), flat(full, full_entries)),
        (flat(found.partial, found.partial_entries), flat(partial, partial_entries)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
