"""attn/kernels/backward/transposed.py in Triton's interpreter: the lists of `mask.transposed`."""

import pytest

from sparsek.attn.kernels.backward.transposed import launched
from sparsek.attn.mask.mask import BlockMask
from tests.attn.kernels.backward.schedule_bwd_interpreted import MASKS

pytestmark = pytest.mark.usefixtures("one_thread")


def rows(mask: BlockMask, lists: list) -> list[list[tuple[int, int]]]:
    starts, counts, tiles, entries = (x.tolist() for x in lists)
    assert len(starts) == len(counts) == mask.batch * mask.heads * mask.grid[1]
    spans = [range(first, first + count) for first, count in zip(starts, counts, strict=True)]
    return [[(tiles[at], entries[at]) for at in span] for span in spans]


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask = MASKS[name][0]
    full, partial, full_entries, partial_entries = mask.transposed
    found = launched(mask)
    assert rows(mask, [*found.full, found.full_entries]) == rows(mask, [*full, full_entries])
    assert rows(mask, [*found.partial, found.partial_entries]) == rows(mask, [*partial, partial_entries])
