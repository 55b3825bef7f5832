"""What can go wrong, in four classes. Every message says what was wrong, where, and what would be right."""

from collections.abc import Mapping, Sequence
from typing import Any


class SparseKError(Exception):
    """Base of every error that SparseK raises on purpose."""


class InvalidInput(SparseKError, ValueError):
    """An argument is not what the docstring asks for."""


class InvalidFile(SparseKError, ValueError):
    """A file is corrupt, hostile, or not of the kind its name says."""


class Unsupported(SparseKError, NotImplementedError):
    """No kernel runs this problem. `what` says which; `reasons` maps each kernel's name to every reason it gave."""

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]]):
        self.what = what
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [what]
        for name, why in self.reasons.items():
            lines.append(f"  {name}: {'; '.join(why)}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """What it is made of. An exception's own answer is its message alone, from which a pool of processes could not
        make it again, and would wait for ever.
        """
        return type(self), (self.what, self.reasons), self.__dict__
