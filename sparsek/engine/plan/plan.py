"""The Plan base class: kernel, config and prepared work for one problem, ready to run. A plan explains itself."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.streams import Ready, tensors_in, wait_for
from sparsek.engine.plan.problem import Problem
from sparsek.engine.plan.select import Candidate, Choice


@dataclass(frozen=True, eq=False, repr=False)
class Plan(ABC):
    """A kernel and a config for one problem, with everything that is prepared once.

    The plans of all operations are callable. A plan that is not `ready` was made for a named card that need not exist
    here: it predicts and explains. `made` is the stream and event after which its work is ready. A copy of a plan is
    the plan itself, as for patterns and masks. Plans are not picklable.
    """

    problem: Any
    choice: Choice
    work: Any = None
    ready: bool = True
    made: Ready | None = None

    def __repr__(self) -> str:
        about = re.sub(r"\s{2,}", ": ", self.headline()[0])
        return f"{type(self).__name__}({self.kernel}, {about}{'' if self.ready else ', predicts only'})"

    def __copy__(self) -> "Plan":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Plan":
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidInput(
            f"a {type(self).__name__} is not pickled (torch.save pickles too): it holds a kernel and tensors of this "
            "process; plan anew where it is needed"
        )

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.choice.kernel.name

    @property
    def config(self) -> Any:
        """The config of the kernel: tile, stages and so on."""
        return self.choice.config

    @property
    def implementation(self) -> Any:
        """The kernel itself."""
        return self.choice.kernel

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every kernel that was considered, with its predicted time or its reasons not to run."""
        return self.choice.candidates

    @property
    def seconds(self) -> float:
        """The predicted time of a call on `problem.card`."""
        return self.choice.seconds

    @property
    def bound_seconds(self) -> float:
        """The roofline: a lower bound for every kernel."""
        return bound_seconds(self.problem)

    @property
    def losers(self) -> tuple[Candidate, ...]:
        """Every kernel that was not chosen."""
        return tuple(c for c in self.candidates if c.name != self.kernel)

    def explain(self) -> str:
        """The choice as text: problem, kernel, config, prediction against the roofline, and why other kernels lost.

        If a reference runs on a GPU for want of a kernel, the first line is about that, with the dtypes that have one.
        """
        p = self.problem
        flops, moved = arithmetic_seconds(p), memory_seconds(p)
        limit = "arithmetic" if flops >= moved else "memory"
        lines = [
            *(each.slow for each in self.candidates if each.slow),
            *self.headline(),
            f"  kernel     {self.kernel}: {self.config}",
            (
                f"  predicted  {time_text(self.seconds)}, {_tflops(p.useful_flops, self.seconds)} useful, "
                f"{_tflops(p.dense_flops, self.seconds)} dense-equivalent"
            ),
            (
                f"  roofline   {time_text(self.bound_seconds)}, bound by {limit}: {p.useful_flops / 1e9:.4g} GFLOP in "
                f"{time_text(flops)}, {p.compulsory_bytes / 1e6:.4g} MB in {time_text(moved)}"
            ),
        ]
        if caveat := p.card.caveat(p.rate_name):
            lines.append(f"  rates      {caveat}")
        imbalance = getattr(self.work, "imbalance", None)
        if imbalance is not None:
            ratio = imbalance() if callable(imbalance) else imbalance
            lines.append(f"  schedule   fullest CTA has {ratio:.2f} times the mean work")
        lines.extend(self.details())
        lines.extend(f"  not        {c.name}: {self._why(c)}" for c in self.losers)
        return "\n".join(lines)

    @abstractmethod
    def headline(self) -> list[str]:
        """The problem as text: the first lines of `explain()`."""

    def details(self) -> list[str]:
        """Lines of `explain()` between the schedule and the kernels that lost."""
        notes = getattr(self.implementation, "notes", None)
        return [f"  note       {line}" for line in notes(self.problem, self.config)] if notes else []

    def run(self, call: Any, capturing: bool) -> Any:
        """The result of a call of the operation, without checks. `capturing`: a CUDA graph is being captured."""
        if self.made is not None and not capturing:
            wait_for(self.made, tensors_in(self.work))
        with dtypes.as_given(call.like.device):
            result, given = self._allocated(call)
            if given is not None:
                kernel, config, _ = self.choice
                kernel.launch(config, self.work, *given)
            return result

    @abstractmethod
    def _allocated(self, call: Any) -> tuple[Any, tuple[Any, ...] | None]:
        """The result of the call, and what the kernel is launched with to write it; None if nothing is left to do."""

    def refuse_unless_ready(self) -> None:
        """InvalidInput for a plan that only predicts, and inside torch.func, which plans do not go through."""
        if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
            raise InvalidInput("plans do not go through torch.func; call the operation without one there")
        if not self.ready:
            raise InvalidInput(
                f"this plan is a prediction for {self.problem.card.name}; plan with operands on that card to run it"
            )

    def _why(self, c: Candidate) -> str:
        if c.why_not:
            return "; ".join(c.why_not)
        aside = f"; only by name: {c.only_by_name}" if c.only_by_name else ""
        times = f", {c.seconds / self.seconds:.2f}x the time" if self.seconds else ""
        return f"{time_text(c.seconds)}{times}{aside}"


def check_plan(plan: Any, kind: type[Plan], origin: str, kernel: Any) -> None:
    """InvalidInput unless `plan` is of that kind, which `origin` makes, and uses `kernel`, if that is named."""
    if not isinstance(plan, kind):
        raise InvalidInput(f"plan must come from {origin}, got {type(plan).__name__}")
    if kernel is not None and arguments.text("kernel", kernel) != plan.kernel:
        raise InvalidInput(f"kernel={arguments.shown(kernel)} contradicts plan, which uses {plan.kernel}")


def bound_seconds(p: Problem) -> float:
    """The roofline on `p.card`: the larger of arithmetic and memory time, each at the card's rate."""
    return max(arithmetic_seconds(p), memory_seconds(p))


def arithmetic_seconds(p: Problem) -> float:
    """Useful FLOPs over the card's dense rate."""
    return p.useful_flops / (p.card.tflops[p.rate_name] * 1e12)


def memory_seconds(p: Problem) -> float:
    """Compulsory bytes over the card's copy bandwidth."""
    return p.compulsory_bytes / p.card.bandwidth


def time_text(seconds: float) -> str:
    """ "41.2 us" or "1.52 ms"."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _tflops(flops: float, seconds: float) -> str:
    rate = flops / seconds / 1e12 if seconds else 0.0
    return f"{rate:.0f} TFLOPS" if rate >= 1000 else f"{rate:.3g} TFLOPS"
