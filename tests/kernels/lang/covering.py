"""Few cases out of many, for tests that take seconds each."""

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=Hashable)


def covering(
    cases: Iterable[Case], choices: Callable[[Case], Iterable[Hashable]], together: int = 2
) -> list[Case]:
    """Cases that hold every two choices, or as many as `together`, that some case holds together.

    Always the next with the most new ones.
    """
    known: dict[object, int] = {}
    held = {
        case: sum(1 << known.setdefault(some, len(known)) for some in combinations(choices(case), together))
        for case in cases
    }
    left, found = (1 << len(known)) - 1, []
    while left:
        best = max(held, key=lambda case: (held[case] & left).bit_count())
        found.append(best)
        left &= ~held.pop(best)
    return found
