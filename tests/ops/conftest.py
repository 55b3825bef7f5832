"""What the tests of the verbs share."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import AotEagerAndRecordGraphs

from sparsek.attn.mask import layout
from sparsek.engine.plan.op import Operation


@pytest.fixture
def recorder() -> Iterator[Any]:
    """A backend: aot_eager that keeps the graphs it is given."""
    torch._dynamo.reset()
    yield AotEagerAndRecordGraphs()
    torch._dynamo.reset()


@pytest.fixture
def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels for which a verb has made a plan, one for each plan that is kept."""
    layout.known_layout.cache_clear()  # a mask that is the first of its layout keeps its plan
    made: list[str] = []
    monkeypatch.setattr(Operation, "plan", _counted(Operation.plan, made))
    return made


def _counted(real: Any, made: list[str]) -> Any:
    def counted(*args: Any, **more: Any) -> Any:
        plan = real(*args, **more)
        made.append(plan.kernel)
        return plan

    return counted
