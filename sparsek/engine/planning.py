"""Connects planner and kernels: compares all kernels of an operation, and caches the choice for a problem."""

import warnings
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from sparsek.core import arguments, env
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidInput, SparseKWarning
from sparsek.engine import table as kernels
from sparsek.engine.plan.kernel import MissingKernel
from sparsek.engine.plan.plan import bound_seconds
from sparsek.engine.plan.problem import Problem
from sparsek.engine.plan.select import Choice, select

# A choice takes some 100 us on the host. It depends on the problem alone, so masks and patterns with equal problems
# share it.
REMEMBERED = 1024
OTHER_PASS = {"attention": "attention_backward", "attention_backward": "attention"}


def choose(p: Problem, only: str | None = None, config: Any = None) -> Choice:
    """The kernel and config for `p`. Raises InvalidInput for an unknown name or config, and Unsupported."""
    p = getattr(p, "leading", p)
    if only is not None:
        arguments.text("kernel", only)
        kernels.refuse_removed(only, kernels.names_for(p.op, getattr(p, "storage", None)))
    elif config is not None:
        raise InvalidInput("config= belongs to one kernel; name it with kernel=")
    if env.tuning():
        _warn_of_tables(env.tuning())
    return _decided(p, only) if config is None else _decide(p, only, config)


@cache
def _warn_of_tables(named: str) -> None:
    warnings.warn(
        f"SPARSEK_TUNING={named} has no effect: plans read no tables of tuned configs any more. `sparsek tune` prints "
        "the times of all configs, and plan_spmm and the other plan functions take one: kernel=..., config=...",
        SparseKWarning,
        stacklevel=3,
    )


def same_family(kernel: str | None, op: str) -> str | None:
    """The kernel for `op` of the family of `kernel`; `kernel` itself if it is one of `op`. None for None."""
    if kernel is None:
        return None
    names = kernels.names_for(op)
    if kernel in names:
        return kernel
    family = kernel.split(".", maxsplit=1)[0]
    return next((name for name in names if name.startswith(f"{family}.")), None)


def _decide(p: Problem, only: str | None, config: Any = None) -> Choice:
    names = kernels.names_for(p.op, getattr(p, "storage", None))
    if only is not None and only not in names:
        other = OTHER_PASS.get(p.op)
        if other is not None and only in kernels.names_for(other):
            raise InvalidInput(
                f"no kernel of {p.op} is called {only!r}, which is one of {other}; that of its family is "
                f"{same_family(only, p.op)!r}"
            )
        if only not in kernels.names_for(p.op):
            raise InvalidInput(f"no kernel of {p.op} is called {shown(only)}; known: {', '.join(names)}")
        names = (*names, only)  # for another storage: its why_not has the reason
    return _bounded(p, select(p, [_load(name) for name in names], only=only, config=config))


def _bounded(p: Problem, choice: Choice) -> Choice:
    """The choice, with no prediction below the roofline: some kernels predict a launch where nothing is multiplied, but
    C is written.
    """
    least = bound_seconds(p)
    found = (c if c.why_not or c.seconds >= least else replace(c, seconds=least) for c in choice.candidates)
    return choice._replace(candidates=tuple(found))


@lru_cache(REMEMBERED)
def _decided(p: Problem, only: str | None) -> Choice:
    return _decide(p, only)


def _load(name: str) -> Any:
    try:
        return kernels.load(name)
    except ImportError as error:
        return MissingKernel(name, str(error))
