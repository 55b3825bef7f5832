"""For pyright: SciPy has no types, and it takes 12 CPU seconds to infer what `sparse.eye_array` returns."""

from typing import Any

def __getattr__(name: str) -> Any: ...
