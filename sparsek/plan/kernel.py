"""What the planner knows of a kernel: a name and six answers. Kernels implement it; ops join the two."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sparsek.formats.bsr import BSR
from sparsek.plan.problem import SpmmProblem


class SpmmKernel(Protocol):
    """One implementation of C = A @ B for a BSR A.

    A kernel with an attribute `only_by_name`, a reason, is never chosen unless `kernel=` names it.
    """

    name: str

    def why_not(self, p: SpmmProblem) -> list[str]:
        """Every reason why this kernel cannot run `p`, readable; [] means it can."""
        ...

    def default(self, p: SpmmProblem) -> Any:
        """The config this kernel would use: deterministic, no timing. A frozen dataclass."""
        ...

    def configs(self, p: SpmmProblem) -> Iterable[Any]:
        """Every legal config, for the tuner."""
        ...

    def seconds(self, p: SpmmProblem, c: Any) -> float:
        """Predicted time of one call on `p.card`."""
        ...

    def prepare(self, p: SpmmProblem, c: Any, a: BSR) -> Any:
        """Work that is done once per plan: schedules, a dense copy. Kept by the plan, handed back to `launch`."""
        ...

    def launch(self, c: Any, work: Any, a: BSR, b: Tensor, out: Tensor) -> None:
        """Runs. `out` [..., M, N] is preallocated and fully overwritten."""
        ...


@dataclass(frozen=True)
class MissingKernel:
    """Stands in for a kernel whose module does not import, as on machines that Triton does not come to."""

    name: str
    error: str

    def why_not(self, p: SpmmProblem) -> list[str]:
        return [f"does not import here: {self.error}"]
