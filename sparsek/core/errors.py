"""What can go wrong, in four classes. Every message says what was wrong, where, and what would be right."""

from collections.abc import Mapping, Sequence


class SparseKError(Exception):
    """Base of every error that SparseK raises on purpose."""


class InvalidInput(SparseKError, ValueError):
    """An argument is not what the docstring asks for."""


class InvalidFile(SparseKError, ValueError):
    """A file is corrupt, hostile, or not of the kind its name says."""


class Unsupported(SparseKError, NotImplementedError):
    """No kernel runs this problem. `reasons` maps each kernel's name to every reason it gave."""

    def __init__(self, what: str, reasons: Mapping[str, Sequence[str]]):
        self.reasons = {name: list(why) for name, why in reasons.items()}
        lines = [what]
        for name, why in self.reasons.items():
            lines.append(f"  {name}: {'; '.join(why)}")
        super().__init__("\n".join(lines))
