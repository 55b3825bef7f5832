"""Recorded calls of products of a sparse matrix and a dense one.

A pattern keeps the calls with it. One that passes soon (`BlockPattern.unchecked`) shares them: `PASSING` keeps a call
for all such patterns of the same sizes, whose operands include the work of its plan, the schedule. That is made by
launches, which are a recorded call too; so a new pattern needs no plan. `SHARED` has what the first one's plan chose.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import repeat as always
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sparsek.core.arguments import TENSORS
from sparsek.core.plan_owner import PlanOwner, drop_oldest
from sparsek.core.streams import captured, tensors_in
from sparsek.engine.call import recorded_calls
from sparsek.engine.call.recorded_calls import UNBOUND, Calls, Slot, repeat
from sparsek.engine.launch.recorder import recorder
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import Plan
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.plan.operands import SPARSE, work_key

# A pattern whose calls were not found so often keeps calls of its own: there are too many of other sizes.
FEW = 32
PASSING = Calls()


class Planned(NamedTuple):
    """What a plan chose for calls of some sizes. `work`: that of the plan, with `Tensor` for every tensor."""

    kernel: Any
    problem: Any
    config: Any
    work: Any


SHARED: dict[
    Hashable, Planned | None
] = {}  # None: the work of this kernel is not all that it reads of a pattern


def product(
    a: Any,
    b: Any,
    settings: Hashable,
    also: Sequence[Tensor] = (),
    plan: Any = None,
) -> Any:
    """`repeat` for a product of a sparse matrix and a dense one, in either order; UNBOUND for other operands.

    `also`: the other tensors of the call. `plan`: the call uses this plan, and is dropped with it. Without it, `run`
    runs the product for the Slot.
    """
    on_left = a.__class__ in SPARSE
    if not on_left and b.__class__ not in SPARSE:
        return UNBOUND
    matrix, dense = (a, b) if on_left else (b, a)
    owner, form, own = matrix.signature()
    settings = settings, on_left, form
    if dense.__class__ in TENSORS:
        operands = (*own, dense, *also)
    elif dense.__class__ is QuantizedTensor:
        settings, operands = (*settings, dense.turned), (*own, dense.values, dense.scale, *also)
    else:
        return UNBOUND
    if "passing" in owner._memo and plan is None and matrix.__class__ is BSR and shares(owner):
        stands = matrix if on_left else matrix.T
        found = _shared(owner, stands, settings, own, operands[1:], matrix) if stands.is_unread else None
        if found is not None:
            return found
    calls = owner._memo.get("calls") if plan is None else _of_plan(owner, plan)
    calls = calls or owner.derived("calls", Calls)
    return repeat(calls, settings, operands, matrix)


def sample(x: Tensor, y: Tensor, pattern: BlockPattern, kernel: str | None) -> Any:
    """`repeat` for X @ Y at a pattern."""
    settings = "sddmm", kernel
    if "passing" in pattern._memo and shares(pattern) and not pattern.is_ragged:
        found = _shared(pattern, pattern, settings, (), (x, y))
        if found is not None:
            return found
    return repeat(pattern.derived("calls", Calls), settings, (x, y))


def run(operation: Operation[Any, Any], call: Any, kernel: str | None, slot: Slot) -> Any:
    """`operation.run(call, kernel)`; calls with other patterns learn from it."""
    if slot.calls is not PASSING:
        return operation.run(call, kernel)
    capturing = captured(call.like)
    plan = operation.cached(call, kernel, capturing)
    _learn(slot, plan)
    return plan.run(call, capturing)


def shares(owner: PlanOwner) -> bool:
    """Whether products with a pattern share calls with others."""
    return owner._memo.get("passing", FEW) < FEW and isinstance(owner, BlockPattern) and owner.passing


def _shared(
    owner: BlockPattern, of: Any, settings: Hashable, own: Any, rest: Sequence[Tensor], matrix: Any = None
) -> Any:
    """`repeat` for a call that patterns share; None for a call of this pattern alone.

    `of`: the left operand of the product, or the pattern of a sample.
    """
    sizes = [(x.shape, x.stride(), x.dtype) for x in rest if x.__class__ in TENSORS]
    key = settings, owner.shape, owner.block, owner.nnzb, *sizes
    if key not in SHARED:
        return Slot(PASSING, key, (), None, False)
    planned = SHARED[key]
    work = planned and _work(owner, of, key, planned)
    if not work:
        return None
    found = repeat(PASSING, key, (*own, *work, *rest), matrix)
    if found.__class__ is Slot:
        owner._memo["passing"] += 1
    return found


def _work(owner: BlockPattern, of: Any, key: Hashable, planned: Planned) -> Sequence[Tensor]:
    """The lists of a pattern, and the tensors of the work for it; () if it cannot be made now."""
    device = owner.indptr.get_device()
    at = key, recorded_calls._stream(device)
    known = owner._memo.get(at)
    if known is not None:
        return known
    kernel, problem, config, work = planned
    pattern = of.pattern if of.__class__ is BSR else of
    lists = [pattern.indptr, pattern.indices]
    if of.__class__ is BSR and of.order is not None:
        lists.append(of.order)
    place = work_key(kernel, config, problem, pattern.indptr)
    if pattern.known(place) is None:
        with torch.inference_mode(False):
            made = repeat(PASSING, place[:-1], lists)
            if made is UNBOUND:
                return ()
            if made.__class__ is Slot:
                made = made.run(lambda: (*tensors_in(kernel.prepare(problem, config, of)),))
        pattern._memo.setdefault(place, _with(work, iter(made)))
    found = {id(x): x for x in (*lists, *tensors_in(pattern.known(place)))}
    return owner._memo.setdefault(at, (*found.values(),))


def _learn(slot: Slot, plan: Plan) -> None:
    """Note what a plan chose for calls like that of the slot, which is not recorded if its work is no operand."""
    kernel, config, _ = plan.choice
    while len(SHARED) >= recorded_calls.LIMIT:
        drop_oldest(SHARED)
    if getattr(kernel, "shares", False):
        SHARED.setdefault(
            slot.settings, Planned(kernel, plan.problem, config, _with(plan.work, always(Tensor)))
        )
    else:
        SHARED[slot.settings] = None
    made, given = recorder(), {id(x) for x in slot.operands}
    if made is not None and not all(id(x) in given for x in tensors_in(plan.work)):
        made.reason = made.reason or "its work is none of its operands"


def _with(work: Any, tensors: Iterator[Any]) -> Any:
    """The same work with other tensors."""
    if work is Tensor or isinstance(work, Tensor):
        return next(tensors)
    if isinstance(work, tuple):
        return type(work)(*[_with(each, tensors) for each in work])
    return work


def _of_plan(owner: PlanOwner, plan: Any) -> Calls:
    plans: WeakKeyDictionary[Any, Calls] = owner.derived("calls of plans", WeakKeyDictionary)
    calls = plans.get(plan)
    if calls is None:
        calls = plans[plan] = Calls()
    return calls
