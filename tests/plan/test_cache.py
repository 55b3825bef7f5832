"""How long plans are kept."""

from typing import Any

import pytest

from sparsek.engine.plan.cache import LIMIT, PlanCache


def filled(cache: Any, count: int) -> None:
    for key in range(count):
        cache.get(key, object, captured=False)


def test_the_least_recently_used_plan_is_dropped_first():
    cache: Any = PlanCache()
    old = cache.get("old", object, captured=False)
    filled(cache, LIMIT - 1)
    assert cache.get("old", pytest.fail, captured=False) is old
    cache.get("one more", object, captured=False)
    assert len(cache) == LIMIT
    assert cache.get("old", pytest.fail, captured=False) is old
    made = object()
    assert cache.get(0, lambda: made, captured=False) is made


def test_a_plan_that_was_used_just_now_is_kept_by_the_graph_that_uses_it_next():
    cache: Any = PlanCache()
    kept = cache.get("graph", object, captured=False)
    assert cache.get("graph", pytest.fail, captured=False) is kept
    assert cache.get("graph", pytest.fail, captured=True) is kept
    filled(cache, 2 * LIMIT)
    assert cache.get("graph", pytest.fail, captured=False) is kept


def test_a_plan_that_is_made_while_a_graph_is_captured_is_not_kept():
    cache: Any = PlanCache()
    inside, outside = object(), object()
    assert cache.get("graph", lambda: inside, captured=True) is inside
    assert cache.get("graph", lambda: outside, captured=False) is outside
    assert len(cache) == 1


class Crowded(dict[Any, Any]):
    """A dict of which another thread takes or adds entries just when somebody looks for the first."""

    raised: list[type[Exception]]

    def __iter__(self) -> Any:
        if self.raised:
            raise self.raised.pop()
        return super().__iter__()


@pytest.mark.parametrize("error", [RuntimeError, StopIteration])
def test_another_thread_may_change_what_is_kept_meanwhile(error: type[Exception]):
    cache: Any = PlanCache()
    filled(cache, LIMIT)
    cache._plans = Crowded(cache._plans)
    cache._plans.raised = [error]
    made = object()
    assert cache.get("one more", lambda: made, captured=False) is made
    assert len(cache) == LIMIT
