"""What the tests of the verbs share."""

from typing import Any

import pytest

from sparsek.ops import spmm as ops


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for which spmm has made a plan, one for each plan."""
    made: list[str] = []
    real = ops._make_plan

    def counted(*args: Any, **more: Any) -> Any:
        plan = real(*args, **more)
        made.append(plan.kernel)
        return plan

    monkeypatch.setattr(ops, "_make_plan", counted)
    return made
