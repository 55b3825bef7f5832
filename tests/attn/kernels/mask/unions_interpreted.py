"""attn/kernels/mask/unions.py and pages.py in Triton's interpreter: the tensors of the specification, bit for bit."""

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.mask import unions
from sparsek.attn.kernels.mask.pages import page_lists
from sparsek.attn.kernels.mask.unions import token_unions
from sparsek.attn.mask.build.unions import UnionInputs, specified, written
from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.mask.pages import PageLists
from sparsek.attn.plan.attention_paged import _ascending
from tests.attn.mask.drawn_choices import same
from tests.attn.mask.drawn_lists import CASES, drawn, drawn_indices
from tests.sampling import sampled

POISON = 0x5EADBEEF


def made(c: UnionInputs) -> BlockMask:
    """The kernel's mask, in memory that was poisoned, between canaries that stay."""
    kept: list[Tensor] = []

    def poisoned(size: int, **options: Any) -> Tensor:
        kept.append(torch.full((size + 64,), POISON, **options))
        return kept[-1][32:-32]

    with mock.patch.object(torch, "empty", new=poisoned):
        mask = written(BlockMask, c, token_unions)
    assert mask is not None
    assert (kept[0][:32] == POISON).all()
    assert (kept[0][-32:] == POISON).all()
    return mask


@pytest.mark.parametrize(("case", "count"), sampled(product(range(len(CASES)), (False, True)), 10))
def test_both_kernels_make_the_tensors_of_the_specification(
    case: int, count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unions, "counts_columns", lambda *sizes: count)
    c = drawn(case)
    same(made(c), specified(BlockMask, c))


@pytest.mark.parametrize("n", [1, 5, 16])
@pytest.mark.parametrize("counted", [False, True])
def test_lists_over_pages_name_a_block_once(n: int, counted: bool) -> None:
    at = drawn_indices((1, 2, 9, n), 16, 100, n)[0].transpose(0, 1).contiguous().transpose(0, 1)
    counts = torch.randint(-1, n + 2, (2, 9)) if counted else None
    wanted = PageLists.from_indices(_ascending(at, counts, 16), (1, 16))
    found = page_lists(at.long() if counted else at, counts, 16)
    assert found is not None
    for mine, theirs in zip(found, wanted.tensors, strict=True):
        assert torch.equal(mine, theirs)
