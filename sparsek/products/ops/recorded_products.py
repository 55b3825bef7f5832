"""Recorded calls of products of a sparse matrix and a dense one.

A pattern keeps the calls with it. One that passes soon (`BlockPattern.unchecked`) is an operand: its schedule is made
anew by launches of the call, which `PASSING` keeps for all such patterns of the same sizes. After FEW products it has
plans of its own like any other, whose schedule is the same and is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sparsek.core.arguments import TENSORS
from sparsek.core.plan_owner import PlanOwner
from sparsek.engine.call.recorded_calls import UNBOUND, Calls, repeat
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.plan.operands import SPARSE

FEW = 4
PASSING = Calls()


def product(
    a: Any,
    b: Any,
    settings: Hashable,
    also: Sequence[Tensor] = (),
    plan: Any = None,
    once: bool = False,
) -> Any:
    """`repeat` for a product of a sparse matrix and a dense one, in either order; UNBOUND for other operands.

    `also`: the other tensors of the call. `plan`: the call uses this plan, and is dropped with it. `once`: the caller
    looks whether the calls of the Slot are PASSING; then its plan is for this call alone.
    """
    on_left = a.__class__ in SPARSE
    matrix, dense = (a, b) if on_left else (b, a)
    if matrix.__class__ not in SPARSE:
        return UNBOUND
    owner, form, own = matrix.signature()
    passing = once and owner._memo.get("passing", FEW) < FEW and _lists(matrix, on_left)
    if passing:
        form = form, matrix.shape, matrix.block
        own = *own, *passing
    if dense.__class__ in TENSORS:
        given, turned = (*own, dense, *also), None
    elif dense.__class__ is QuantizedTensor:
        given, turned = (*own, dense.values, dense.scale, *also), dense.turned
    else:
        return UNBOUND
    if passing:
        calls = PASSING
    else:
        known = None if plan is None else _of_plan(owner, plan)
        calls = known or owner._memo.get("calls") or owner.derived("calls", Calls)
    return repeat(calls, (settings, on_left, turned, form), given, matrix)


def _lists(matrix: Any, stands: bool) -> tuple[Tensor, ...]:
    """The indices of the left operand of a product with a passing pattern; () where it is planned on the host.

    `stands`: the matrix is that operand, and not its transpose.
    """
    if matrix.__class__ is not BSR or not matrix.pattern.passing:
        return ()
    left = matrix if stands else matrix.T
    if not left.is_unread:
        return ()
    matrix.pattern._memo["passing"] += 1
    lists = left.pattern.indptr, left.pattern.indices
    return lists if left.order is None else (*lists, left.order)


def _of_plan(owner: PlanOwner, plan: Any) -> Calls:
    plans: WeakKeyDictionary[Any, Calls] = owner.derived("calls of plans", WeakKeyDictionary)
    calls = plans.get(plan)
    if calls is None:
        calls = plans[plan] = Calls()
    return calls
