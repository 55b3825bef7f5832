"""attn/kernels/mask/choose.py in Triton's interpreter: the tensors of the specification, bit for bit."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsek.attn.kernels.mask.choose import choose_blocks
from sparsek.attn.mask.build import selection_reference
from sparsek.attn.mask.build.selection import Selection, written
from sparsek.attn.mask.mask import BlockMask
from sparsek.core.errors import InvalidInput
from tests.attn.mask.drawn_choices import KINDS, PLACES, drawn, same
from tests.sampling import half

POISON = 0x5EADBEEF


def made(c: Selection) -> BlockMask:
    """The kernel's mask, in memory that was poisoned, between canaries that stay."""
    kept: list[Tensor] = []

    def poisoned(size: int, **options: Any) -> Tensor:
        kept.append(torch.full((size + 64,), POISON, **options))
        return kept[-1][32:-32]

    with mock.patch.object(torch, "empty", new=poisoned):
        mask = written(BlockMask, c, choose_blocks)
    assert mask is not None
    assert (kept[0][:32] == POISON).all()
    assert (kept[0][-32:] == POISON).all()
    return mask


def specified(c: Selection) -> tuple[BlockMask, list[str]]:
    """The specification's mask, and the faults that it finds; the kernel reports one of them."""
    found: list[Any] = []

    def noted(mask: BlockMask, faults: list[Any]) -> BlockMask:
        found.extend(faults)
        return mask

    with mock.patch.object(selection_reference, "with_readbacks", new=noted):
        mask = selection_reference.specified(BlockMask, c)
    faults = []
    for each in found:
        try:
            each.apply(mask, wait=True)
        except InvalidInput as error:
            faults.append(str(error))
    return mask, faults


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_it_makes_the_tensors_of_the_specification(kind: str, hostile: bool) -> None:
    for seed in (0, 1, 5) if kind == "mass" else half(range(len(PLACES)), of=(kind, hostile)):
        c = drawn(kind, seed % len(PLACES), seed % 3 > 0, seed, hostile)
        mask, (wanted, faults) = made(c), specified(c)
        same(mask, wanted)
        if faults and c.rows:
            with pytest.raises(InvalidInput) as caught:
                mask.verify(wait=True)
            assert str(caught.value).split("[")[0] in [each.split("[")[0] for each in faults]
        else:
            mask.verify(wait=True)


def test_masks_that_contain_a_faulty_one_report_its_fault_and_keep_their_own_sizes() -> None:
    for hostile in (False, True):
        c = drawn("mass", 0, True, 1, hostile)
        mask = made(c)
        both = BlockMask.per_batch([mask, mask])
        assert both.batch == 2 * mask.batch
        if not hostile:
            sizes = both.sizes
            both.verify(wait=True)
            assert both.sizes == sizes
            mask.verify(wait=True)
            assert mask.sizes == specified(c)[0].sizes
        else:
            with pytest.raises(InvalidInput):
                both.verify(wait=True)
