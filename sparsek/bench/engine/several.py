"""What stands in the place of a plan: several plans that are measured as one, or a module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsek.plan.plan import Plan
from sparsek.plan.sources import JOINED


class Moved(NamedTuple):
    """What the parts of a call have to read and write, each by itself."""

    compulsory_bytes: float


@dataclass(frozen=True)
class Named:
    """A module of sparsek that is timed, in the place of a plan."""

    kernel: str
    config: None = None


@dataclass(frozen=True)
class Several:
    """The plans of the parts of one call, by name, in the place of one plan. `call` is what is measured."""

    plans: Mapping[str, Plan]
    call: Callable[[], Any]

    @property
    def kernel(self) -> str:
        """The names of the kernels, joined."""
        return JOINED.join(sorted({plan.kernel for plan in self.plans.values()}))

    @property
    def config(self) -> dict[str, Any]:
        return {name: plan.config for name, plan in self.plans.items()}

    @property
    def problem(self) -> Moved:
        return Moved(sum(plan.problem.compulsory_bytes for plan in self.plans.values()))

    @property
    def bound_seconds(self) -> float:
        """The sum of the parts' rooflines."""
        return sum(plan.bound_seconds for plan in self.plans.values())
