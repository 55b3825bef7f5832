"""Owners of plans: objects that keep what is derived from them, such as schedules, plans and recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from sparsek.core.tracing import untransformed

Made = TypeVar("Made")
Value = TypeVar("Value")


def drop_oldest(kept: dict[Any, Value]) -> Value | None:
    """Removes the entry that was inserted first. None, without a removal, if another thread is changing the dict."""
    try:
        return kept.pop(next(iter(kept)), None)
    except (RuntimeError, StopIteration):
        return None


class PlanOwner:
    """Keeps what is derived from a pattern, a mask or a tensor, as long as that lives."""

    _memo: dict[Hashable, Any]

    def __init__(self) -> None:
        self._memo = {}

    def derived(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """The result of `build()` under `key`, built on the first call.

        `build` runs outside inference mode and torch.func: inference tensors could never be saved for a backward
        pass, and tensors of torch.func end with it. Inside torch.compile nothing is kept: tensors made there belong
        to its graph.
        """
        if key in self._memo:
            return self._memo[key]
        if torch.compiler.is_compiling():
            return build()
        with torch.inference_mode(False):
            return self._memo.setdefault(key, untransformed(build))

    def known(self, key: Hashable) -> Any:
        """The value of `derived` under `key`, or None if it was never built."""
        return self._memo.get(key)
