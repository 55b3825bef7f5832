"""Layouts of masks, their bases, and faults that kernels write to words of host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import sparsek as sk
from sparsek.attn.mask import layout
from sparsek.attn.mask.data import leaves_of
from sparsek.attn.mask.lists import Place, Sizes
from sparsek.attn.mask.readback import DeferredFault, made_in, raise_earlier
from sparsek.attn.mask.recorded import fresh_layout
from sparsek.attn.ops import mask_calls
from sparsek.attn.ops.attention_args import flat_mask
from sparsek.attn.policies import policy
from sparsek.core import fault_ring
from tests.attn.mask.masks import in_one_buffer
from tests.refusals import refused

MASKS = {
    "causal": lambda: sk.BlockMask.causal(300),
    "full": lambda: sk.BlockMask.full(256),
    "topk": lambda: sk.BlockMask.topk(torch.rand(2, 3, 4, 4), 2, seq_len=500),
    "bits": lambda: sk.BlockMask.from_dense(torch.rand(2, 1, 200, 200) < 0.5),
    "none": lambda: sk.BlockMask.from_blocks([0, 0], [], q_len=64, kv_len=64),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_layout_makes_the_mask_of_another_base(name: str) -> None:
    wanted = MASKS[name]()
    mask = in_one_buffer(wanted)
    other = mask._base.clone()
    again = sk.BlockMask.of_layout(mask._layout, other)
    assert again.device == other.device
    assert "full" not in vars(again)  # until a tensor is read
    assert torch.equal(again.to_dense(), wanted.to_dense())
    assert (repr(again), again.sizes, again.heavy_blocks) == (repr(wanted), wanted.sizes, wanted.heavy_blocks)
    held = [x for x in leaves_of(again) if x is not None]
    assert all(x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for x in held)
    assert all(x.storage_offset() % 4 == 0 for x in held)
    assert again._layout is layout.MaskLayout.like(wanted, leaves_of(wanted))


@pytest.mark.parametrize("name", MASKS)
def test_a_layout_is_the_same_after_its_text_and_its_numbers(name: str) -> None:
    made = in_one_buffer(MASKS[name]())._layout
    read = layout.MaskLayout.of_text(made.text())
    numbers = flat_mask(sk.BlockMask.of_layout(made, made.base(torch.device("cpu"))))[1]
    assert layout.known_layout(torch.device("cpu"), tuple(numbers), made.fields["label"]) is made
    for name in ("fields", "heavy", "room", "shapes", "spans", "places", "length"):
        assert getattr(read, name) == getattr(made, name), name


def test_a_label_with_commas_and_lines_stays_in_the_text() -> None:
    mask = sk.BlockMask.causal(300)
    object.__setattr__(mask, "label", "a, b,\nc")
    made = in_one_buffer(mask)._layout
    assert layout.MaskLayout.of_text(made.text()).fields == made.fields


def test_full_blocks_may_share_the_entries_of_the_partial_ones() -> None:
    place = Place.of(500)
    made = layout.MaskLayout.of(place, layout.Counted(Sizes(9, 9, 4, exact=False), 9), layout.Room(7), "")
    leaves = made.leaves(made.base(torch.device("cpu")))
    assert leaves[2] is leaves[5]
    assert made.pieces(made.base(torch.device("cpu")))[2] is None


def test_masks_of_other_sizes_lengths_or_labels_have_other_layouts() -> None:
    masks = [MASKS["causal"](), sk.BlockMask.causal(301), sk.BlockMask.causal(300, block=64), MASKS["full"]()]
    named = sk.BlockMask.causal(300)
    object.__setattr__(named, "label", "other")
    layouts = [in_one_buffer(mask)._layout for mask in (*masks, named)]
    assert len(set(map(id, layouts))) == len(layouts)
    assert in_one_buffer(MASKS["causal"]())._layout is layouts[0]


def test_masks_are_new_if_the_last_of_their_layout_had_few_uses() -> None:
    layout.known_layout.cache_clear()

    def made() -> Any:
        return in_one_buffer(MASKS["causal"]())

    def uses(mask: Any, times: int) -> list[bool]:
        return [fresh_layout(mask, counting=True) is not None for _ in range(times)]

    assert uses(made(), 2) == [False] * 2  # the first of its layout
    assert uses(made(), 6) == [True] * 4 + [False] * 2
    assert uses(made(), 1) == [False]
    assert uses(made(), 3) == [True] * 3
    mask = made()
    object.__setattr__(mask, "sizes", mask.sizes._replace(exact=False))
    assert uses(mask, 1) == [False]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> fault_ring.FaultRing:
    made = fault_ring.FaultRing(pinned=False)
    monkeypatch.setattr(fault_ring, "_rings", [made])
    return made


def faulty(ring: fault_ring.FaultRing) -> tuple[Any, DeferredFault]:
    plain = in_one_buffer(MASKS["causal"]())
    mask = made_in(
        sk.BlockMask, plain._layout, plain._base, (ring.take(),), (lambda at: f"score {at} is NaN",)
    )
    return mask, mask._memo["readbacks"][0]


def test_a_fault_is_raised_by_its_mask_every_time(ring: fault_ring.FaultRing) -> None:
    mask, fault = faulty(ring)
    mask.verify(wait=True)
    fault.word.fill_(8)
    for _ in range(2):
        refused("score 7 is NaN", mask.verify)


def test_a_fault_that_nobody_saw_is_raised_once_by_a_later_mask_of_its_kind(
    ring: fault_ring.FaultRing,
) -> None:
    (mask, fault), (other, _) = faulty(ring), faulty(ring)
    known = mask._layout
    assert other._layout is known
    raise_earlier(known)
    fault.word.fill_(1)
    raise_earlier(in_one_buffer(MASKS["full"]())._layout)
    refused("an earlier mask, causal, has a fault: score 0 is NaN", raise_earlier, known)
    raise_earlier(known)
    other.verify(wait=True)


def test_telling_a_fault_again_leaves_the_word_to_its_next_owner(ring: fault_ring.FaultRing) -> None:
    mask, fault = faulty(ring)
    fault.word.fill_(2)
    refused("score 1 is NaN", mask.verify)
    for _ in range(len(ring.owners) - 1):
        ring.take()
    _, other = faulty(ring)
    assert other.place == fault.place
    other.word.fill_(4)
    refused("score 1 is NaN", mask.verify)
    assert other.look() == 4


def test_a_mask_of_two_has_the_faults_of_both(ring: fault_ring.FaultRing) -> None:
    (first, a), (second, b) = faulty(ring), faulty(ring)
    first._memo["readbacks"], second._memo["readbacks"] = (a,), (b,)
    q = torch.zeros(1, 1, 200, 8)
    place = policy.given(128, q, q)
    made = place.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool), False, of=(first, second))
    assert made._memo["readbacks"][:2] == (a, b)
    repeated = sk.BlockMask.of_layout(first._layout, first._base, (a, b))
    assert mask_calls._results(repeated)[1:] == (a.word, b.word)
    b.word.fill_(3)
    for each in (made, repeated):
        refused("score 2 is NaN", each.verify)


def test_a_word_that_was_given_out_again_is_not_the_old_masks_fault(ring: fault_ring.FaultRing) -> None:
    mask, fault = faulty(ring)
    for _ in range(fault_ring.COUNT - 1):
        ring.take()
    later, again = faulty(ring)
    assert again.word is fault.word
    again.word.fill_(5)
    mask.verify(wait=True)
    refused("score 4", later.verify)


def test_tensors_that_a_transform_reads_first_are_plain() -> None:
    q, mask = torch.randn(1, 1, 128, 16), in_one_buffer(sk.BlockMask.causal(128, block=64))
    found = torch.func.grad(lambda x: sk.attention(x, x, x, mask).sum())(q)
    assert mask.full.starts.data_ptr()
    x = q.clone().requires_grad_()
    sk.attention(x, x, x, mask).sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_tensors_that_are_read_under_a_fake_mode_first_are_real() -> None:
    mask = in_one_buffer(sk.BlockMask.causal(128, block=64))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert "causal" in repr(mask)
        assert not isinstance(mask.full.starts, FakeTensor)
    q = torch.randn(1, 1, 128, 16)
    assert sk.attention(q, q, q, mask).isfinite().all()
