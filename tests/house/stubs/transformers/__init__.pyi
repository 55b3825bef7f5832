"""For pyright, which would otherwise read every model of transformers: a quarter of the time of its checks.

Modules of transformers that are imported by their full names keep their types.
"""

from typing import Any

def __getattr__(name: str) -> Any: ...
