"""The plans of one pattern or mask, made once for every shape of the operands and kept within bounds."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sparsek.core.home import drop_oldest
from sparsek.plan.plan import Plan

# A plan of 2048 tiles holds 32 KB of schedule on the device, and a serving engine sees many lengths of B.
LIMIT = 256

P = TypeVar("P", bound=Plan)


class PlanCache(Generic[P]):
    """At most LIMIT plans, the least recently used dropped first.

    A plan that was used while a CUDA graph was captured stays: the graph goes on reading its schedule. A plan that is
    made meanwhile is not kept: its schedule holds nothing until the graph is replayed, and then belongs to the graph.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, P] = {}
        self._pinned: dict[Hashable, P] = {}
        self._last: tuple[Hashable, P] | None = None  # a key is compared faster than it is hashed

    def get(self, key: Hashable, make: Callable[[], P], captured: bool) -> P:
        """The plan under `key`, made by `make()` if there is none. `captured`: a CUDA graph is being captured."""
        last = self._last
        if last is not None and last[0] == key and not captured:
            return last[1]
        plan = self._plans.pop(key, None) or self._pinned.get(key)
        if plan is None:
            plan = make()
            if captured:
                return plan
        self._plans[key] = plan
        self._last = key, plan
        if captured:
            self._pinned[key] = plan
        while len(self._plans) > LIMIT:
            drop_oldest(self._plans)
        return plan

    def __len__(self) -> int:
        return len({**self._plans, **self._pinned})
