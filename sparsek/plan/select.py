"""Which kernel, and why: every kernel of the table is asked, the fastest by prediction is chosen, nothing is timed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.plan import table
from sparsek.plan.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """What one kernel answered: a config with its predicted seconds, or the reasons why it cannot run.

    `only_by_name` is the reason why an automatic choice passes it over, if there is one. `origin` says which table the
    config is from, "" where the kernel chose it; `seconds` are then the prediction for the kernel's choice, times what
    the config was measured to gain.
    """

    name: str
    config: Any = None
    seconds: float = float("inf")
    why_not: tuple[str, ...] = ()
    only_by_name: str = ""
    origin: str = ""


class Choice(NamedTuple):
    """The kernel to use, its config, and what every kernel answered."""

    kernel: Any
    config: Any
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """The prediction for the kernel that was chosen."""
        return next(c.seconds for c in self.candidates if c.name == self.kernel.name)


def select(p: Problem, kernels: Iterable[Any], *, only: str | None = None, config: Any = None) -> Choice:
    """The choice among `kernels`, which are kernels of p's operation.

    Without `only`, the smallest prediction wins among kernels that may be chosen unasked, and the table's order breaks
    ties. With `only`, that kernel runs or Unsupported says why not. Where `plan/table.py` knows a tuned config, it is
    taken, unless `config` names one. Raises Unsupported with every reason of every
    kernel if none can run.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    candidates = []
    for name, kernel in by_name.items():
        why_not = tuple(kernel.why_not(p))
        if why_not:
            candidates.append(Candidate(name, why_not=why_not))
            continue
        chosen = kernel.default(p)
        if config is not None and name == only:
            known = isinstance(config, type(chosen)) and (config == chosen or config in kernel.configs(p))
            if not known:
                raise InvalidInput(
                    f"{shown(config)} is no config of {name} for this problem; its default is {chosen!r}"
                )
            chosen = config
            tuned = None
        else:
            tuned = table.tuned(p, kernel, chosen)
        aside, seconds, origin = getattr(kernel, "only_by_name", ""), kernel.seconds(p, chosen), ""
        if tuned is not None:
            chosen, seconds, origin = tuned.config, seconds * tuned.gain, tuned.origin
        candidates.append(Candidate(name, chosen, seconds, only_by_name=aside, origin=origin))
    able = [
        c for c in candidates if not c.why_not and (c.name == only or (only is None and not c.only_by_name))
    ]
    if not able:
        others = ", ".join(c.name for c in candidates if not c.why_not)
        what = (
            f"no kernel can run this {p.op} on {p.card.name}" if only is None else f"{only} cannot run this"
        )
        refusals = {c.name: c.why_not for c in candidates if c.why_not}
        if only is not None and only in refusals:
            refusals = {only: refusals.pop(only)} | refusals
        raise Unsupported(f"{what}; {others} can" if others else what, refusals)
    best = min(able, key=lambda c: c.seconds)
    return Choice(by_name[best.name], best.config, tuple(candidates))
