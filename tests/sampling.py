"""Fresh samples of cases that are too many for every run.

Every run draws others, by a seed that pytest's header names: SPARSEK_TEST_SEED=1234 draws the same again.
SPARSEK_TEST_ALL=1 runs every case.
"""

import os
import random
from collections.abc import Iterable, Sequence
from math import ceil
from typing import TypeVar

Case = TypeVar("Case")

EVERY = os.environ.get("SPARSEK_TEST_ALL", "") not in ("", "0")
# In the environment, so that the workers of a run draw alike.
SEED = int(os.environ.setdefault("SPARSEK_TEST_SEED", str(int.from_bytes(os.urandom(4), "little"))))


def sampled(cases: Sequence[Case], count: int, *, of: object = "") -> list[Case]:
    """`count` of the cases in their order, other ones in every run and for every `of`."""
    if EVERY or len(cases) <= count:
        return list(cases)
    chosen = random.Random(f"{SEED} {of}").sample(range(len(cases)), count)
    return [cases[at] for at in sorted(chosen)]


def half(cases: Iterable[Case], *, of: object = "") -> list[Case]:
    """Half of the cases, other ones in every run and for every `of`."""
    every = list(cases)
    return sampled(every, ceil(len(every) / 2), of=of)
