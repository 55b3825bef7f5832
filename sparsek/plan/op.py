"""One operation of the planner: how a call of it becomes a plan, and where the plan is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import Tensor

from sparsek.core import device as devices
from sparsek.core.device import Card
from sparsek.core.streams import Ready, captured
from sparsek.matrix.storage import Home
from sparsek.plan.cache import PlanCache
from sparsek.plan.plan import Plan
from sparsek.plan.problem import Problem
from sparsek.plan.select import Choice

Call = TypeVar("Call")
P = TypeVar("P", bound=Plan)
Chooser = Callable[[Any, "str | None", Any], Choice]


class Operation(ABC, Generic[Call, P]):
    """Makes plans of one operation, and keeps them where the call says.

    `choose(problem, kernel, config)` picks the kernel: planning knows no kernels by itself.
    """

    def __init__(self, choose: Chooser) -> None:
        self.choose = choose

    @abstractmethod
    def problem(self, call: Call, card: Card) -> Problem:
        """The call without its tensors."""

    @abstractmethod
    def key(self, call: Call) -> Hashable:
        """Everything but the home's own contents that the problem and the plan depend on."""

    @abstractmethod
    def home(self, call: Call) -> Home:
        """Where the plans of such calls are kept."""

    @abstractmethod
    def like(self, call: Call) -> Tensor:
        """A tensor of the call, on its device."""

    @abstractmethod
    def prepare(self, call: Call, p: Any, choice: Choice) -> Any:
        """The work of the chosen kernel for the call."""

    @abstractmethod
    def planned(self, call: Call, p: Any, choice: Choice, work: Any, made: Ready | None, ready: bool) -> P:
        """The plan of these parts."""

    def plan(self, call: Call, kernel: str | None = None, config: Any = None, device: str | None = None) -> P:
        """A new plan. `device`: a card's name; such a plan predicts only."""
        where, ready = self.like(call).device, device is None
        p = self.problem(call, devices.card_of(where) if device is None else devices.card_named(device))
        choice = self.choose(p, kernel, config)
        work = self.prepare(call, p, choice) if ready else None
        return self.planned(call, p, choice, work, Ready.here(where) if ready else None, ready)

    def cached(self, call: Call, kernel: str | None, capturing: bool) -> P:
        """The plan that is kept for calls like this, made if there is none. `capturing`: a CUDA graph is."""
        plans: PlanCache[P] = self.home(call).derived(type(self), PlanCache)
        return plans.get((kernel, self.key(call)), lambda: self.plan(call, kernel), capturing)

    def run(self, call: Call, kernel: str | None) -> Any:
        """Plans the call unless it was planned before, and runs it, without its checks."""
        capturing = captured(self.like(call))
        plan: Any = self.cached(call, kernel, capturing)
        return plan.run(*self.arguments(call), capturing)

    @abstractmethod
    def arguments(self, call: Call) -> tuple[Any, ...]:
        """What the plan's `run` takes of the call."""
