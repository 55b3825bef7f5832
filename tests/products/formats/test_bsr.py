"""BSR: what it accepts, what it refuses, its transposed view and its copies."""

import pytest
import torch

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.random import random_bsr


def make(m: int = 100, k: int = 70, **more) -> BSR:
    return random_bsr(m, k, (32, 16), 0.4, seed=3, **more)


def test_values_in_the_padding_are_refused_and_counted():
    a = make()
    values = a.values.clone()
    last = int(a.pattern.host.indptr[-2])
    values[last, -1, 0] = torch.nan
    values[last, -2, 0] = 1
    with pytest.raises(InvalidInput, match="2 values in the padding of a 100x70 matrix"):
        BSR(a.pattern, values)
    with pytest.raises(InvalidInput, match="2 values in the padding"):
        BSR(a.pattern.T, values, a.pattern.transposed[1])
    BSR(a.pattern, a.values)


def test_an_order_made_by_hand_is_held_to_the_pattern():
    a = make()
    view = BSR(a.pattern.T, a.values, a.pattern.transposed[1].clone())
    assert torch.equal(view.to_dense(), a.to_dense().T)
    wrong = a.pattern.transposed[1].flip(0)
    for order in (wrong, wrong.long(), wrong + 100, wrong[1:], "order"):
        with pytest.raises(InvalidInput, match=r"transposed views come from \.T"):
            BSR(a.pattern.T, a.values, order)  # type: ignore[arg-type]


def test_of_fields_makes_what_unchecked_makes() -> None:
    a = random_bsr(64, 96, 16, 0.4, seed=0)
    p = a.pattern
    fields = {"shape": p.shape, "block": p.block, "indptr": p.indptr, "indices": p.indices}
    pattern, other = BlockPattern.of_fields({**fields}), BlockPattern.unchecked(**fields, passing=False)
    assert vars(pattern) == vars(other)
    assert pattern._memo is not other._memo
    made = BSR.of_fields({"pattern": pattern, "values": a.values, "order": None})
    assert vars(made) == vars(BSR.unchecked(pattern, a.values))
    assert torch.equal(made.to_dense(), a.to_dense())
