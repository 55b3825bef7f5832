"""Recorded calls of products of a sparse matrix and a dense one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sparsek.core.arguments import TENSORS
from sparsek.core.plan_owner import PlanOwner
from sparsek.engine.call.recorded_calls import UNBOUND, Calls, repeat
from sparsek.products.formats.quantized_tensor import QuantizedTensor
from sparsek.products.plan.operands import SPARSE


def product(a: Any, b: Any, settings: Hashable, also: Sequence[Tensor] = (), plan: Any = None) -> Any:
    """`repeat` for a product of a sparse matrix and a dense one, in either order; UNBOUND for other operands.

    `also`: the other tensors of the call. `plan`: the call uses this plan, and is dropped with it.
    """
    on_left = a.__class__ in SPARSE
    matrix, dense = (a, b) if on_left else (b, a)
    if matrix.__class__ not in SPARSE:
        return UNBOUND
    owner, form, own = matrix.signature()
    if dense.__class__ in TENSORS:
        given, turned = (*own, dense, *also), None
    elif dense.__class__ is QuantizedTensor:
        given, turned = (*own, dense.values, dense.scale, *also), dense.turned
    else:
        return UNBOUND
    known = None if plan is None else _of_plan(owner, plan)
    calls = known or owner._memo.get("calls") or owner.derived("calls", Calls)
    return repeat(calls, (settings, on_left, turned, form), given, matrix)


def _of_plan(owner: PlanOwner, plan: Any) -> Calls:
    plans: WeakKeyDictionary[Any, Calls] = owner.derived("calls of plans", WeakKeyDictionary)
    calls = plans.get(plan)
    if calls is None:
        calls = plans[plan] = Calls()
    return calls
