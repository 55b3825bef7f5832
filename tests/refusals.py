"""Calls that must be refused."""

from collections.abc import Callable
from typing import Any

import pytest

from sparsek.core.errors import InvalidInput


def refused(words: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """The call raises InvalidInput, and `words`, a regular expression, are in its text."""
    with pytest.raises(InvalidInput, match=words):
        call(*given, **named)
