"""The plans of one pattern, made once for every shape of B and kept within bounds."""

from collections.abc import Callable, Hashable

from sparsek.plan.select import Plan

# A plan of 2048 tiles holds 32 KB of schedule on the device, and a serving engine sees many lengths of B.
LIMIT = 256


class PlanCache:
    """At most LIMIT plans, the least recently used dropped first.

    A plan that was used while a CUDA graph was captured stays: the graph goes on reading its schedule.
    """

    def __init__(self) -> None:
        self._plans: dict[Hashable, Plan] = {}
        self._pinned: dict[Hashable, Plan] = {}

    def get(self, key: Hashable, make: Callable[[], Plan], pin: bool) -> Plan:
        """The plan under `key`, made by `make()` if there is none; with `pin`, it stays for good."""
        plan = self._plans.pop(key, None) or self._pinned.get(key) or make()
        self._plans[key] = plan
        if pin:
            self._pinned[key] = plan
        while len(self._plans) > LIMIT:
            self._plans.pop(next(iter(self._plans)), None)
        return plan

    def __len__(self) -> int:
        return len({**self._plans, **self._pinned})
