"""Problems: calls without tensors, which can be planned on any machine and are compared by value."""

from __future__ import annotations

from typing import ClassVar, Protocol

from sparsek.core.device import Card


class Problem(Protocol):
    """The fields that the planner reads of any operation's problem. Problems are frozen and hashable.

    `storage`, optional: the kind of storage by which kernels of the table are chosen.
    """

    op: ClassVar[str]
    """The operation's name in the kernels' table."""

    @property
    def card(self) -> Card: ...

    @property
    def dtype(self) -> str:
        """The short name of the dtype that is multiplied."""
        ...

    @property
    def rate_name(self) -> str:
        """The card's name for the rate of this arithmetic."""
        ...

    @property
    def useful_flops(self) -> float:
        """FLOP of the stored elements."""
        ...

    @property
    def dense_flops(self) -> float:
        """FLOP if everything were stored."""
        ...

    @property
    def compulsory_bytes(self) -> float:
        """Bytes that any kernel has to read and write."""
        ...
