"""Where what follows from an object is kept: schedules, plans, recorded calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from sparsek.core.tracing import untransformed

Made = TypeVar("Made")
Value = TypeVar("Value")


def drop_oldest(kept: dict[Any, Value]) -> Value | None:
    """Takes out the entry that was put in first; None, and nothing, where another thread changes the dict meanwhile."""
    try:
        return kept.pop(next(iter(kept)), None)
    except (RuntimeError, StopIteration):
        return None


class Home:
    """Keeps what follows from a pattern, a mask or a tensor as long as that lives."""

    _memo: dict[Hashable, Any]

    def __init__(self) -> None:
        self._memo = {}

    def derived(self, key: Hashable, build: Callable[[], Made]) -> Made:
        """What `build()` returned the first time it was asked for under `key`.

        `build` runs outside inference mode and torch.func: tensors made inside it could never be saved for a backward
        pass, and those of torch.func end with it. Inside torch.compile nothing is kept: what is made there belongs to
        its graph.
        """
        if key in self._memo:
            return self._memo[key]
        if torch.compiler.is_compiling():
            return build()
        with torch.inference_mode(False):
            return self._memo.setdefault(key, untransformed(build))

    def known(self, key: Hashable) -> Any:
        """What `derived` keeps under `key`, or None if it was never asked for."""
        return self._memo.get(key)
