"""What the tests of the verbs share."""

from typing import Any

import pytest

from sparsek.plan.op import Operation


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for which a verb has made a plan, one for each plan."""
    made: list[str] = []
    monkeypatch.setattr(Operation, "plan", _counted(Operation.plan, made))
    return made


def _counted(real: Any, made: list[str]) -> Any:
    def counted(*args: Any, **more: Any) -> Any:
        plan = real(*args, **more)
        made.append(plan.kernel)
        return plan

    return counted
