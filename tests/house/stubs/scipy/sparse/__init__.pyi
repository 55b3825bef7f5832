"""For pyright, like the package above."""

from typing import Any

def __getattr__(name: str) -> Any: ...
