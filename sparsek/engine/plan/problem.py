"""Problems: calls without tensors, which can be planned on any machine and are compared by value."""

from __future__ import annotations

from typing import ClassVar, Protocol

from sparsek.core.device import Card


class Problem(Protocol):
    """The fields that the planner reads of any operation's problem. Problems are frozen and hashable.

    `op`: the operation's name in the kernels' table. `dtype`: the short name of what is multiplied. `rate_name`: the
    card's name for the rate of this arithmetic. `useful_flops`: of the stored elements; `dense_flops`: if everything
    were stored. `compulsory_bytes`: what any kernel has to read and write. `storage`, optional: the kind of storage by
    which kernels of the table are chosen. `leading`, optional: the problem that they are chosen for.
    """

    op: ClassVar[str]

    @property
    def card(self) -> Card: ...
    @property
    def dtype(self) -> str: ...
    @property
    def rate_name(self) -> str: ...
    @property
    def useful_flops(self) -> float: ...
    @property
    def dense_flops(self) -> float: ...
    @property
    def compulsory_bytes(self) -> float: ...
