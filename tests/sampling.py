"""Fresh samples of cases that are too many for every run.

Every run draws others, by a seed that pytest's header names: SPARSEK_TEST_SEED=1234 draws the same again.
SPARSEK_TEST_ALL=1 runs every case.
"""

import os
import random
from collections.abc import Iterable
from math import ceil
from typing import TypeVar

Case = TypeVar("Case")

EVERY = os.environ.get("SPARSEK_TEST_ALL", "") not in ("", "0")
# In the environment, so that the workers of a run draw alike.
SEED = int(os.environ.setdefault("SPARSEK_TEST_SEED", str(int.from_bytes(os.urandom(4), "little"))))


def sampled(cases: Iterable[Case], count: int, *, of: object = "") -> list[Case]:
    """`count` of the cases in their order, other ones in every run and for every `of`."""
    every = list(cases)
    if EVERY or len(every) <= count:
        return every
    chosen = random.Random(f"{SEED} {of}").sample(range(len(every)), count)
    return [every[at] for at in sorted(chosen)]


def dealt(cases: Iterable[Case], hands: int, hand: int, *, of: object = "") -> list[Case]:
    """The cases of one of several hands: dealt like cards, otherwise in every run, so that each is in some hand.

    For a test of many kernels under many conditions: each condition is a hand. None is empty: hands get a case again.
    """
    every = list(dict.fromkeys(cases))
    if EVERY or not every:
        return every
    random.Random(f"{SEED} {of}").shuffle(every)
    return every[hand % hands % len(every) :: hands]


def half(cases: Iterable[Case], *, of: object = "") -> list[Case]:
    """Half of the cases, other ones in every run and for every `of`."""
    every = list(cases)
    return sampled(every, ceil(len(every) / 2), of=of)
