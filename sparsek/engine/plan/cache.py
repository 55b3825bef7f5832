"""A bounded cache of the plans of one pattern or mask, one per shape of the operands."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from sparsek.core.plan_owner import drop_oldest
from sparsek.engine.plan.plan import Plan

# A plan of 2048 tiles holds 32 KB of schedule on the device, and a serving engine uses many lengths of B.
LIMIT = 256

P = TypeVar("P", bound=Plan)


class PlanCache(Generic[P]):
    """At most LIMIT plans, the least recently used dropped first.

    A plan that a captured CUDA graph uses stays, because the graph reads its schedule. A plan made during capture is
    not kept: its schedule exists only once the graph is replayed, and belongs to the graph.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, P] = {}
        self._pinned: dict[Hashable, P] = {}
        self._last: tuple[Hashable, P] | None = None  # comparing a key is faster than hashing it

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
