"""What stands in the place of a plan: a call of several plans, or of none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparsek.engine.plan.plan import Plan
from sparsek_bench.engine.sources import JOINED


@dataclass(frozen=True)
class Timed:
    """A call that is timed as it is, and what its record needs of a plan.

    `kernel`: a module of sparsek, or names of kernels, joined. `plans`: those of the parts of the call, by name.
    """

    kernel: str
    call: Callable[[], Any] = lambda: None
    compulsory_bytes: float = 0.0
    bound_seconds: float = 0.0
    plans: Mapping[str, Plan] | None = None

    @property
    def problem(self) -> "Timed":
        """What has to be read and written."""
        return self

    @property
    def config(self) -> dict[str, Any] | None:
        return {name: plan.config for name, plan in self.plans.items()} if self.plans else None


def several(plans: Mapping[str, Plan], call: Callable[[], Any]) -> Timed:
    """A call of these plans, each of which reads and writes by itself; its roofline is the sum of theirs."""
    kernel = JOINED.join(sorted({plan.kernel for plan in plans.values()}))
    moved = sum(plan.problem.compulsory_bytes for plan in plans.values())
    return Timed(kernel, call, moved, sum(plan.bound_seconds for plan in plans.values()), plans)
