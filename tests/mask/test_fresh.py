"""Kinds of masks, their bases, and faults that kernels write to words of host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import words
from sparsek.core.errors import InvalidInput
from sparsek.mask import layout as fresh
from sparsek.mask.lists import BlockLists
from sparsek.ops import mask_calls
from sparsek.policies import policy


def in_one_buffer(mask: sk.BlockMask, gap: int = 4) -> tuple[sk.BlockMask, Tensor]:
    """The same mask with all tensors in one buffer, `gap` words apart."""
    leaves = {
        id(x): x
        for x in [*mask.full, *mask.partial, mask.lo, mask.hi, mask.rules, mask.bits]
        if x is not None
    }
    base = torch.randint(-9, 9, (sum(x.numel() + gap for x in leaves.values()) + 3,), dtype=torch.int32)
    moved, at = {}, 0
    for key, x in leaves.items():
        moved[key] = base[at : at + x.numel()].view(x.shape).copy_(x)
        at += x.numel() + gap
    parts = mask._parts()
    for name in ("full", "partial"):
        parts[name] = BlockLists(*(moved[id(x)] for x in parts[name]))
    for name in ("lo", "hi", "rules", "bits"):
        parts[name] = None if parts[name] is None else moved[id(parts[name])]
    return sk.BlockMask.unchecked(**parts), base


MASKS = {
    "causal": lambda: sk.BlockMask.causal(300),
    "full": lambda: sk.BlockMask.full(256),
    "topk": lambda: sk.BlockMask.topk(torch.rand(2, 3, 4, 4), 2, seq_len=500),
    "bits": lambda: sk.BlockMask.from_dense(torch.rand(2, 1, 200, 200) < 0.5),
    "none": lambda: sk.BlockMask.from_blocks([0, 0], [], q_len=64, kv_len=64),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_kind_makes_the_mask_of_another_base(name: str) -> None:
    mask, base = in_one_buffer(MASKS[name]())
    kind = fresh.kind_of(mask, base)
    assert kind is not None
    other = base.clone()
    again = kind.mask(sk.BlockMask, other)
    assert torch.equal(again.to_dense(), mask.to_dense())
    assert repr(again) == repr(mask)
    assert again.sizes == mask.sizes
    held = [
        *again.full,
        *again.partial,
        *(x for x in (again.lo, again.hi, again.rules, again.bits) if x is not None),
    ]
    assert all(x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for x in held)
    assert fresh.kind_of(again, other) is kind


def test_masks_of_other_places_or_lengths_are_of_other_kinds() -> None:
    kinds = [
        fresh.kind_of(*in_one_buffer(make(), gap))
        for make in (MASKS["causal"], lambda: sk.BlockMask.causal(301))
        for gap in (0, 4)
    ]
    assert None not in kinds
    assert len(set(map(id, kinds))) == 4


def test_a_mask_with_a_tensor_elsewhere_has_no_kind() -> None:
    mask, base = in_one_buffer(MASKS["causal"]())
    object.__setattr__(mask, "lo", torch.zeros(1, 300, dtype=torch.int32))
    assert fresh.kind_of(mask, base) is None


def test_masks_are_new_if_the_last_of_their_kind_had_few_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_KINDS", {})

    def made() -> sk.BlockMask:
        return fresh.freshened(*in_one_buffer(MASKS["causal"]()), None)

    def uses(mask: sk.BlockMask, times: int) -> list[bool]:
        return [fresh.fresh_of(mask, counting=True) is not None for _ in range(times)]

    assert uses(made(), 2) == [False] * 2  # the first of its kind
    assert uses(made(), 6) == [True] * 4 + [False] * 2
    assert uses(made(), 1) == [False]
    assert uses(made(), 3) == [True] * 3
    mask = made()
    object.__setattr__(mask, "sizes", mask.sizes._replace(exact=False))
    assert uses(mask, 1) == [False]


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> words.Ring:
    made = words.Ring(pinned=False)
    monkeypatch.setattr(words, "_rings", [made])
    return made


def faulty(ring: words.Ring) -> tuple[sk.BlockMask, fresh.WrittenFault]:
    mask, base = in_one_buffer(MASKS["causal"]())
    fault = fresh.WrittenFault(ring.take(), lambda at: f"score {at} is NaN", base.device)
    return fresh.freshened(mask, base, fault), fault


def test_a_fault_is_raised_by_its_mask_every_time(ring: words.Ring) -> None:
    mask, fault = faulty(ring)
    mask.verify(wait=True)
    fault.word.fill_(8)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="score 7 is NaN"):
            mask.verify()


def test_a_fault_that_nobody_saw_is_raised_once_by_a_later_mask_of_its_kind(ring: words.Ring) -> None:
    (mask, fault), (other, _) = faulty(ring), faulty(ring)
    kind = mask._memo["fresh"].kind
    assert other._memo["fresh"].kind is kind
    fresh.raise_earlier(kind)
    fault.word.fill_(1)
    another = fresh.kind_of(*in_one_buffer(MASKS["full"]()))
    assert another is not None
    fresh.raise_earlier(another)
    with pytest.raises(InvalidInput, match="an earlier mask, causal, has a fault: score 0 is NaN"):
        fresh.raise_earlier(kind)
    fresh.raise_earlier(kind)
    other.verify(wait=True)


def test_telling_a_fault_again_leaves_the_word_to_its_next_owner(ring: words.Ring) -> None:
    mask, fault = faulty(ring)
    fault.word.fill_(2)
    with pytest.raises(InvalidInput, match="score 1 is NaN"):
        mask.verify()
    for _ in range(len(ring.owners) - 1):
        ring.take()
    _, other = faulty(ring)
    assert other.place == fault.place
    other.word.fill_(4)
    with pytest.raises(InvalidInput, match="score 1 is NaN"):
        mask.verify()
    assert other.look() == 4


def test_a_mask_of_two_has_the_faults_of_both(ring: words.Ring) -> None:
    (first, a), (second, b) = faulty(ring), faulty(ring)
    first._memo["readbacks"], second._memo["readbacks"] = (a,), (b,)
    q = torch.zeros(1, 1, 200, 8)
    place = policy.given(128, q, q)
    made = place.from_map(torch.ones(1, 1, 2, 2, dtype=torch.bool), False, of=(first, second))
    assert made._memo["readbacks"][:2] == (a, b)
    kind = first._memo["fresh"].kind
    repeated = kind.mask(sk.BlockMask, first._memo["fresh"].base, (a, b))
    assert mask_calls._results(repeated)[1:] == (a.word, b.word)
    b.word.fill_(3)
    for each in (made, repeated):
        with pytest.raises(InvalidInput, match="score 2 is NaN"):
            each.verify()


def test_a_word_that_was_given_out_again_is_not_the_old_masks_fault(ring: words.Ring) -> None:
    mask, fault = faulty(ring)
    for _ in range(words.COUNT - 1):
        ring.take()
    later, again = faulty(ring)
    assert again.word is fault.word
    again.word.fill_(5)
    mask.verify(wait=True)
    with pytest.raises(InvalidInput, match="score 4"):
        later.verify()
