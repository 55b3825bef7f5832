"""Selects the kernel of a problem: the fastest by prediction of all kernels that can run it. Nothing is timed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.plan import table
from sparsek.plan.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """The answer of one kernel: a config with its predicted seconds, or the reasons why it cannot run.

    `only_by_name`: why an automatic choice skips it, if it does. `origin`: the table of the config, "" for the
    kernel's own choice. For a config from a table, `seconds` is the prediction for the kernel's own choice times the
    measured gain. `slow`: of a reference that was chosen on a GPU, why, and what would run a kernel made for GPUs.
    """

    name: str
    config: Any = None
    seconds: float = float("inf")
    why_not: tuple[str, ...] = ()
    only_by_name: str = ""
    origin: str = ""
    slow: str = ""


class Choice(NamedTuple):
    """The kernel to use, its config, and the answer of every kernel."""

    kernel: Any
    config: Any
    candidates: tuple[Candidate, ...]

    @property
    def seconds(self) -> float:
        """The prediction for the chosen kernel."""
        return next(c.seconds for c in self.candidates if c.name == self.kernel.name)


def select(p: Problem, kernels: Iterable[Any], *, only: str | None = None, config: Any = None) -> Choice:
    """The choice among `kernels`, all of p's operation.

    Without `only`, the smallest prediction wins among kernels that do not run only by name; ties go to the first in
    the table. With `only`, that kernel runs, or Unsupported gives its reasons. A tuned config from `plan/table.py` is
    used, unless `config` is given. Raises Unsupported with every reason of every kernel if none can run.
    """
    by_name = {kernel.name: kernel for kernel in kernels}
    candidates = []
    for name, kernel in by_name.items():
        why_not = tuple(kernel.why_not(p))
        if getattr(p, "slope", False) and not getattr(kernel, "writes_slope", False):
            why_not += ("writes one matrix, and the slope of the activation is a second one",)
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
    if only is None and best.name.startswith("reference.") and not p.card.is_cpu:
        candidates[candidates.index(best)] = replace(best, slow=_slow(p, best.name, by_name.values()))
    return Choice(by_name[best.name], best.config, tuple(candidates))


def _slow(p: Any, name: str, kernels: Iterable[Any]) -> str:
    """Why a reference runs on a GPU, and in which dtypes another kernel would."""
    found: dict[str, list[str]] = {}
    for dtype in ("bf16", "fp16", "fp32"):
        other = p.plain(dtype) if hasattr(p, "plain") else replace(p, dtype=dtype)
        able = [k for k in kernels if not getattr(k, "only_by_name", "") and not k.why_not(other)]
        able = [k for k in able if not k.name.startswith("reference.")]
        if able and dtype != p.dtype:
            best = min(able, key=lambda k: k.seconds(other, k.default(other)))
            found.setdefault(best.name, []).append(dtype)
    why = f"slow: {name}, plain torch, runs, because no kernel for GPUs takes"
    if not found:
        return f"{why} this call; the lines of the others say what each lacks"
    casts = [
        f"to {' or '.join((', '.join(low[:-1]), low[-1])[len(low) < 2 :])} for {k}"
        for k, low in found.items()
    ]
    return f"{why} {p.dtype}: cast {', '.join(casts)}"
