"""Selects the kernel of a problem: the fastest by prediction of all kernels that can run it. Nothing is timed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.engine.plan.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """The answer of one kernel: a config with its predicted seconds, or the reasons why it cannot run.

    `only_by_name`: why an automatic choice skips it, if it does. `slow`: of a reference that was chosen on a GPU, why,
    and what would run a kernel made for GPUs.
    """

    name: str
    config: Any = None
    seconds: float = float("inf")
    why_not: tuple[str, ...] = ()
    only_by_name: str = ""
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
    the table. With `only`, that kernel runs, with a config of `given_config` if one is given, or Unsupported gives its
    reasons. Raises Unsupported with every reason of every kernel if none can run.
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
        named = config is not None and name == only
        chosen = given_config(kernel, p, config) if named else kernel.default(p)
        aside: Any = getattr(kernel, "only_by_name", "")
        aside = aside(p) if callable(aside) else aside
        candidates.append(Candidate(name, chosen, kernel.seconds(p, chosen), only_by_name=aside))
    able = [
        c for c in candidates if not c.why_not and (c.name == only or (only is None and not c.only_by_name))
    ]
    if not able:
        others = ", ".join(c.name for c in candidates if not c.why_not)
        what = (
            f"no kernel can run this {p.op} on {p.card.name}" if only is None else f"{only} cannot run this"
        )
        refusals = {c.name: c.why_not for c in candidates if c.why_not and only in (None, c.name)}
        raise Unsupported(f"{what}; {others} can" if others else what, refusals)
    best = min(able, key=lambda c: c.seconds)
    if only is None and best.name.startswith("reference.") and not p.card.is_cpu:
        candidates[candidates.index(best)] = replace(best, slow=_slow(p, best.name, by_name.values()))
    return Choice(by_name[best.name], best.config, tuple(candidates))


def given_config(kernel: Any, p: Any, given: Any) -> Any:
    """The config of a kernel for `p` that is given: itself, its text, or its fields as `config_fields` has them.

    Fields may be left out: then the kernel's own choice is taken if it agrees, else the config of the least predicted
    time. Raises InvalidInput with the fields, or the values, that there are.
    """
    default = kernel.default(p)
    if isinstance(given, Mapping):
        return _agreeing(kernel, p, given, default)
    for each in (default, *kernel.configs(p)):
        if given == str(each) if isinstance(given, str) else isinstance(given, type(each)) and given == each:
            return each
    names = ", ".join(config_fields(default))
    raise InvalidInput(
        f"{shown(given)} is no config of {kernel.name} for this problem; its default is {default!r}; give a text that "
        f"`sparsek tune` prints, or some of its fields by name: {names}"
    )


def _agreeing(kernel: Any, p: Any, given: Mapping[Any, Any], default: Any) -> Any:
    left = [(each, config_fields(each)) for each in (default, *kernel.configs(p))]
    names = list(left[0][1])
    taken: list[str] = []
    for name, value in given.items():
        if name not in names:
            raise InvalidInput(
                f"{kernel.name} has no field {shown(name)}; its configs have {', '.join(names)}"
            )
        agree = [(each, stated) for each, stated in left if stated[name] == _stated(value)]
        if not agree:
            values = " or ".join(dict.fromkeys(shown(stated[name]) for _, stated in left))
            beside = f" with {', '.join(taken)}" if taken else ""
            raise InvalidInput(
                f"{name} is {shown(value)}; in configs of {kernel.name} for this problem{beside} it is {values}"
            )
        left = agree
        taken.append(f"{name} {shown(value)}")
    configs = [each for each, _ in left]
    return default if default in configs else min(configs, key=lambda each: kernel.seconds(p, each))


def config_fields(config: Any) -> dict[str, Any]:
    """The fields of a config as JSON has them; what JSON lacks becomes text."""
    return {each.name: _stated(getattr(config, each.name)) for each in fields(config)}


def _stated(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return config_fields(value)
    if isinstance(value, Mapping):
        return {str(name): _stated(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_stated(each) for each in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _slow(p: Any, name: str, kernels: Iterable[Any]) -> str:
    """Why a reference runs on a GPU, and in which dtypes another kernel would."""
    found: dict[str, list[str]] = {}
    slower = ""  # the best of the kernels for GPUs that take the call as it is
    for dtype in ("bf16", "fp16", "fp32"):
        other = p.plain(dtype) if hasattr(p, "plain") else replace(p, dtype=dtype)
        able = [k for k in kernels if not getattr(k, "only_by_name", "") and not k.why_not(other)]
        able = [k for k in able if not k.name.startswith("reference.")]
        if able:
            best = min(able, key=lambda k: k.seconds(other, k.default(other)))
            if dtype == p.dtype:
                slower = best.name
            else:
                found.setdefault(best.name, []).append(dtype)
    why = f"slow: {name}, plain torch, runs, because "
    if not found:
        others = "the lines of the others say what each lacks"
        return why + (
            f"{slower} is predicted to take longer"
            if slower
            else f"no kernel for GPUs takes this call; {others}"
        )
    casts = [
        f"to {' or '.join((', '.join(low[:-1]), low[-1])[len(low) < 2 :])} for {k}"
        for k, low in found.items()
    ]
    cause = f"{slower} is predicted to take longer in" if slower else "no kernel for GPUs takes"
    return f"{why}{cause} {p.dtype}: cast {', '.join(casts)}"
