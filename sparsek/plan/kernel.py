"""The Kernel protocol: the interface between the planner and kernels. Kernels implement it; ops join the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sparsek.plan.problem import Problem
from sparsek.plan.ring import norm

P = TypeVar("P", contravariant=True)


def beside(busy: float, moved: float) -> float:
    """Seconds of a kernel that computes for `busy` seconds and moves memory for `moved` seconds.

    Neither hides the other wholly: 50 layers on an H200 (2026-11-22, op planner of benchmarks/results/h200) follow
    the root of the sum of squares.
    """
    return norm(2, busy, moved)


def unless_hopper(p: Problem, multiplied: tuple[str, ...] = ("bf16", "fp16")) -> list[str]:
    """Why wgmma over these dtypes and TMA cannot run `p`: its card, its dtype."""
    reasons = []
    if p.card.capability != (9, 0):
        reasons.append(f"needs a Hopper card (sm_90) for wgmma and TMA, this is {p.card.name}")
    if p.dtype not in multiplied:
        reasons.append(f"multiplies {' and '.join(multiplied)}, not {p.dtype}")
    return reasons


class Kernel(Protocol[P]):
    """One implementation of one operation, as far as the choice of a kernel needs it.

    Optional attributes. `only_by_name`, a reason: the kernel is chosen only if `kernel=` names it. `notes(p, c) ->
    list[str]`: further lines of `explain()` for that choice. `successor`: the kernel of a retargeted plan, for a kernel
    whose lists are made on the host.
    """

    name: str

    def why_not(self, p: P) -> list[str]:
        """Every reason why this kernel cannot run `p`, as text; [] means that it can."""
        ...

    def default(self, p: P) -> Any:
        """The config this kernel would use: deterministic, no timing. A frozen dataclass."""
        ...

    def configs(self, p: P) -> Iterable[Any]:
        """Every legal config, for `sparsek tune` and `config=`."""
        ...

    def seconds(self, p: P, c: Any) -> float:
        """Predicted time of one call on `p.card`."""
        ...


@dataclass(frozen=True)
class MissingKernel:
    """Stands for a kernel whose module does not import, for example on machines without Triton."""

    name: str
    error: str

    def why_not(self, p: Problem) -> list[str]:
        return [f"does not import here: {self.error}"]
