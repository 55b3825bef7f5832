"""The Kernel protocol: the interface between the planner and kernels. Kernels implement it; ops join the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sparsek.core import dtypes
from sparsek.engine.plan.problem import Problem
from sparsek.engine.plan.ring import norm

P = TypeVar("P", contravariant=True)


def beside(busy: float, moved: float) -> float:
    """Seconds of a kernel that computes for `busy` seconds and moves memory for `moved` seconds.

    Neither hides the other wholly: 50 layers on an H200 (2026-11-22, op planner of benchmarks/results/h200) follow
    the root of the sum of squares.
    """
    return norm(2, busy, moved)


# Each rule of the hardware is a function `unless_...`: the reasons why it forbids something, [] if it does not.


def unless_hopper(p: Any, multiplied: tuple[str, ...] = ("bf16", "fp16")) -> list[str]:
    """Wgmma and TMA exist on sm_90 only, and a kernel multiplies these dtypes."""
    reasons = []
    if p.card.capability != (9, 0):
        reasons.append(f"needs a Hopper card (sm_90) for wgmma and TMA, this is {p.card.name}")
    if p.dtype not in multiplied:
        reasons.append(f"multiplies {' and '.join(multiplied)}, not {p.dtype}")
    return reasons


def unless_aligned(p: Any, strides: str) -> list[str]:
    """TMA addresses memory in units of 16 bytes. `strides` names what must be so beside pointers: "rows of X"."""
    last = "contiguous last dims, and " if hasattr(p, "unit_stride") else ""
    return [] if p.aligned else [f"TMA needs {last}pointers and {strides} that are multiples of 16 bytes"]


def unless_whole(name: str, size: int, dtype: str) -> list[str]:
    """16 bytes are written at once: what of a row of `size` numbers is no whole unit would overwrite its neighbour."""
    unit = 16 // dtypes.itemsize(dtype)
    if size % unit == 0:
        return []
    return [f"16 bytes are written at once, so a row of {name} must hold a multiple of {unit}, not {size}"]


def unless_gapless(name: str, layout: str) -> list[str]:
    """TMA reads elements of a row that are adjacent."""
    if layout != "strided":
        return []
    return [f"TMA reads a row-major {name} or its transpose view; this {name} has gaps between its elements"]


def unless_near(what: str, *sizes: int, bits: int = 31) -> list[str]:
    """Coordinates are int32, those of TMA too, and a tile reaches beyond the end."""
    if max(sizes) <= 2**bits - 1024:
        return []
    return [f"coordinates are 32 bits: {what} must stay 1024 below 2^{bits}"]


class Kernel(Protocol[P]):
    """One implementation of one operation, as far as the choice of a kernel needs it.

    Optional attributes. `only_by_name`, a reason or a function of the problem that returns one or "": the kernel is
    chosen only if `kernel=` names it. `notes(p, c) -> list[str]`: further lines of `explain()` for that choice.
    `successor`: the kernel of a retargeted plan, for a kernel whose lists are made on the host.
    `shares`: true if launches read of a pattern only what its work, a named tuple, holds; products with new patterns
    then share calls.
    """

    name: str

    def why_not(self, p: P) -> list[str]:
        """Every reason why this kernel cannot run `p`, as text; [] means that it can."""
        ...

    def default(self, p: P) -> Any:
        """The config this kernel would use: deterministic, no timing. A frozen dataclass."""
        return min(self.configs(p), key=lambda c: self.rank(p, c))

    def configs(self, p: P) -> Iterable[Any]:
        """Every legal config, for `sparsek tune` and `config=`."""
        ...

    def seconds(self, p: P, c: Any) -> float:
        """Predicted time of one call on `p.card`."""
        ...

    def rank(self, p: P, c: Any) -> float:
        """What `default` compares configs by: seconds, of another model where one ranks them better."""
        return self.seconds(p, c)


@dataclass(frozen=True)
class MissingKernel:
    """Stands for a kernel whose module does not import, for example on machines without Triton."""

    name: str
    error: str

    def why_not(self, p: Problem) -> list[str]:
        return [f"does not import here: {self.error}"]
