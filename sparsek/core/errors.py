"""All errors, in five classes, and the warning. Every message states what was wrong, where, and what would be right."""

from collections.abc import Mapping, Sequence
from typing import Any


class SparseKError(Exception):
    """Base of every error that SparseK raises on purpose."""


class SparseKWarning(FutureWarning):
    """Something that was given has no effect or another name now; the message names what to use."""


class InvalidInput(SparseKError, ValueError):
    """An argument does not match the docstring."""


class InvalidFile(SparseKError, ValueError):
    """A file is corrupt, hostile, or not of the kind that its name implies."""


class MeshError(SparseKError, RuntimeError):
    """A collective failed; the message names the rank and what was exchanged."""


class Unsupported(SparseKError, NotImplementedError):
    """No kernel runs this problem. `what` describes it; `reasons` maps each kernel's name to all its reasons."""

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]]):
        self.what = what
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [what]
        for name, why in self.reasons.items():
            lines.append(f"  {name}: {'; '.join(why)}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """By its fields. By default an exception is pickled as its message alone, from which a process pool cannot
        rebuild it; the pool would wait forever.
        """
        return type(self), (self.what, self.reasons), self.__dict__


def first_line(error: BaseException) -> str:
    """The first 160 characters of an error's text, or its class."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:160]
