"""What the tests of the verbs share."""

from typing import Any

import pytest

from sparsek.ops import attention_plans as attention_ops
from sparsek.ops import spgemm as spgemm_ops
from sparsek.plan.op import Operation


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for which a verb has made a plan, one for each plan."""
    made: list[str] = []
    monkeypatch.setattr(Operation, "plan", _counted(Operation.plan, made))
    monkeypatch.setattr(spgemm_ops, "_make_plan", _counted(spgemm_ops._make_plan, made))
    for name in ("make_plan", "make_grad_plan"):
        monkeypatch.setattr(attention_ops, name, _counted(getattr(attention_ops, name), made))
    return made


def _counted(real: Any, made: list[str]) -> Any:
    def counted(*args: Any, **more: Any) -> Any:
        plan = real(*args, **more)
        made.append(plan.kernel)
        return plan

    return counted
