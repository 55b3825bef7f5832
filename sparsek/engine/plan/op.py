"""Generic operations: how a call becomes a plan, and where the plan is kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from sparsek.core import device as devices
from sparsek.core.device import Card
from sparsek.core.plan_owner import PlanOwner
from sparsek.core.streams import Ready, captured
from sparsek.engine.plan.cache import PlanCache
from sparsek.engine.plan.plan import Plan
from sparsek.engine.plan.problem import Problem
from sparsek.engine.plan.select import Choice


class Call(Protocol):
    """One call of an operation: a NamedTuple of operands that fit each other, in the form that kernels take.

    `like`: a tensor of the call, on its device. `problem`: the call without its tensors. `key`: everything that the
    problem and the plan depend on, except the contents of the owner, which keeps the plans. `prepare`: the prepared
    work of the chosen kernel. `about`: further plan fields, by name.
    """

    @property
    def like(self) -> Tensor: ...
    def problem(self, card: Card) -> Problem: ...
    def key(self) -> Hashable: ...
    def plan_owner(self) -> PlanOwner: ...
    def prepare(self, p: Any, choice: Choice) -> Any: ...
    def about(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Call)
P = TypeVar("P", bound=Plan)
Chooser = Callable[[Any, "str | None", Any], Choice]


class Operation(Generic[C, P]):
    """Makes plans of one operation, objects of the class `plans`, and keeps them in the call's owner.

    `choose(problem, kernel, config)` selects the kernel: planning does not import kernels.
    """

    def __init__(self, plans: type[P], choose: Chooser) -> None:
        self.plans, self.choose = plans, choose

    def plan(self, call: C, kernel: str | None = None, config: Any = None, device: str | None = None) -> P:
        """A new plan. `device`: a card's name, for a plan that only predicts."""
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
        """The cached plan for this call, made if there is none. `capturing`: a CUDA graph is being captured."""
        plans: PlanCache[P] = call.plan_owner().derived(self.plans, PlanCache)
        return plans.get((kernel, call.key()), lambda: self.plan(call, kernel), capturing)

    def run(self, call: C, kernel: str | None, *, once: bool = False) -> Any:
        """Runs the call through its cached or a new plan, without checking the operands.

        `once`: the plan is made for this call alone, and nobody keeps it, because its owner is new. If its kernel
        prepares its work by launches, the call can be recorded together with that.
        """
        if once:
            p = call.problem(devices.card_of(call.like.device))
            choice = self.choose(p, kernel, None)
            with torch.cuda.device_of(call.like):
                work = call.prepare(p, choice)
            return self.plans(p, choice, work, **call.about()).run(call, True)
        capturing = captured(call.like)
        return self.cached(call, kernel, capturing).run(call, capturing)
