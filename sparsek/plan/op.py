"""One operation of the planner: how a call of it becomes a plan, and where the plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from sparsek.core import device as devices
from sparsek.core.device import Card
from sparsek.core.home import Home
from sparsek.core.streams import Ready, captured
from sparsek.plan.cache import PlanCache
from sparsek.plan.plan import Plan
from sparsek.plan.problem import Problem
from sparsek.plan.select import Choice


class Call(Protocol):
    """One call of an operation, a NamedTuple of operands that fit each other, in the form that kernels take."""

    @property
    def like(self) -> Tensor:
        """A tensor of the call, on its device."""
        ...

    def problem(self, card: Card) -> Problem:
        """The call without its tensors."""
        ...

    def key(self) -> Hashable:
        """Everything but the home's own contents that the problem and the plan depend on."""
        ...

    def home(self) -> Home:
        """Where the plans of such calls are kept."""
        ...

    def prepare(self, p: Any, choice: Choice) -> Any:
        """The work of the chosen kernel for such calls."""
        ...

    def about(self) -> dict[str, Any]:
        """What else a plan of such calls has: fields of its class, by name."""
        ...


C = TypeVar("C", bound=Call)
P = TypeVar("P", bound=Plan)
Chooser = Callable[[Any, "str | None", Any], Choice]


class Operation(Generic[C, P]):
    """Makes plans of one operation, objects of the class `plans`, and keeps them where the call says.

    `choose(problem, kernel, config)` picks the kernel: planning knows no kernels by itself.
    """

    def __init__(self, plans: type[P], choose: Chooser) -> None:
        self.plans, self.choose = plans, choose

    def plan(self, call: C, kernel: str | None = None, config: Any = None, device: str | None = None) -> P:
        """A new plan. `device`: a card's name; such a plan predicts only."""
        like, ready = call.like, device is None
        p = call.problem(devices.card_of(like.device) if device is None else devices.card_named(device))
        choice = self.choose(p, kernel, config)
        work = made = None
        if ready:
            with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(like):
                work = call.prepare(p, choice)
            made = None if captured(like) else Ready.here(like.device)
        return self.plans(p, choice, work, ready, made, **call.about())

    def cached(self, call: C, kernel: str | None, capturing: bool) -> P:
        """The plan that is kept for calls like this, made if there is none. `capturing`: a CUDA graph is."""
        plans: PlanCache[P] = call.home().derived(self.plans, PlanCache)
        return plans.get((kernel, call.key()), lambda: self.plan(call, kernel), capturing)

    def run(self, call: C, kernel: str | None) -> Any:
        """Plans the call unless it was planned before, and runs it, without its checks."""
        capturing = captured(call.like)
        return self.cached(call, kernel, capturing).run(call, capturing)
