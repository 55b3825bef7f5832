"""`sparsek advise`, second table: one matrix dense, in 2:4, BSR and BSR24, what each takes, keeps and errs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sparsek.bench.engine.data import random_dense
from sparsek.core import dtypes
from sparsek.core.device import card_named, card_of
from sparsek.ops.choose import ERROR_TOKENS, Option, consider, measure
from sparsek.ops.weight_formats import combinations

if TYPE_CHECKING:
    from sparsek.advise.weights import Question


def compared(weight: torch.Tensor, question: Question) -> tuple[Option, ...]:
    """Every way to store W [N, K] that some kernel multiplies, with the question's blocks: measured or predicted.

    Errors are those of N(0, 1) tokens, which follow the kept norm; those of real activations may differ.
    """
    card, device = question.predicted_for, question.run_on
    dense = weight.to(device=device, dtype=dtypes.parse(question.dtype))
    drawn = question.tokens if card is None else min(question.tokens, ERROR_TOKENS)
    x = random_dense(drawn, dense.shape[1], dtype=dense.dtype, device=device, seed=0)
    listed = [
        replace(form, scope=question.scope) for form in combinations(None, [question.block], [question.keep])
    ]
    on = card_of(device) if card is None else card_named(card)
    with torch.no_grad():
        found = list(consider(dense, x, listed, on, question.tokens, keep_weights=card is None))
        times = {} if card is not None else measure(found, x, on)
    options = [
        replace(option, measured=times[at].median / 1e3) if at in times else option
        for at, (option, _) in enumerate(found)
    ]
    return tuple(option for option in options if not option.why_not)


def fastest(options: Sequence[Option]) -> Option:
    """The option of least time."""
    return min(options, key=lambda option: option.seconds)
