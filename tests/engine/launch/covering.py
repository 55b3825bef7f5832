"""Few cases out of many, for tests that take seconds each."""

from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heapreplace
from itertools import combinations
from random import Random
from typing import Any, TypeVar

from tests.sampling import EVERY, SEED

Case = TypeVar("Case", bound=Hashable)


def covering(
    cases: Iterable[Case],
    choices: Callable[[Case], Iterable[Hashable]],
    together: int = 2,
    held: Iterable[Case] = (),
) -> list[Case]:
    """Cases that hold every two choices, or as many as `together`, that some case holds together and none of `held`.

    Always the next with the most new ones.
    """
    known: dict[object, int] = {}

    def bits(case: Case) -> int:
        found = 0
        for some in combinations(choices(case), together):
            found |= 1 << known.setdefault(some, len(known))
        return found

    every = list(dict.fromkeys(cases))
    holding = [bits(case) for case in every]
    left, found = (1 << len(known)) - 1, []
    for case in held:
        left &= ~bits(case)
    # Counts only fall: a case whose count is still what it was when it was last counted has the most.
    heap = [(-some.bit_count(), at) for at, some in enumerate(holding)]
    heapify(heap)
    while left:
        count, at = heap[0]
        now = -(holding[at] & left).bit_count()
        if now == count:
            found.append(every[at])
            left &= ~holding[at]
        heapreplace(heap, (now, at))
    return found


def once(
    cases: Iterable[Case],
    choices: Callable[[Any], Iterable[Hashable]] = enumerate,
    together: int = 1,
    most: int | None = None,
) -> list[Case]:
    """Cases that hold every choice that some case holds, or every two `together`, drawn anew in every run.

    Compilers take a second or more for a case: a run meets most choices, and many runs every two together. With `most`
    only so many, those that hold most choices first. SPARSEK_TEST_ALL=1 takes all cases.
    """
    known = list(dict.fromkeys(cases))
    if EVERY:
        return known
    Random(SEED).shuffle(known)
    return covering(known, choices, together)[:most]
