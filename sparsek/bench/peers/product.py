"""Peers that every product has: the same computed densely, and what sparse peers share."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from sparsek.bench.engine.case import Case, Operands
from sparsek.bench.engine.names import block_name
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted, first_line, rotating
from sparsek.core.clock import time_rounds

# Parameters of a kernel, and the values that are tried for each of them.
Meta = dict[str, int]
Space = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dense(Peer):
    """The same call with everything stored, by torch: cuBLAS on a GPU."""

    def ready(self, case: Case, sets: Sequence[Operands], tried: Callable[[str], None]) -> Ready:
        return Ready(tuple(one.dense(1000 + index) for index, one in enumerate(sets)), flops=case.dense_flops)


CUBLAS = Dense("cublas", "cuBLAS", "cuda")
TORCH_DENSE = Dense("torch_dense", "torch dense", "cpu")


@dataclass(frozen=True)
class Own(Peer):
    """This library by another way: the operands that `other` makes of those of the case, by their place.

    `unless` says why a case has no such peer.
    """

    _: KW_ONLY
    other: Callable[[Any, Any, int], Operands]
    unless: Callable[[Any], list[str]] = lambda case: []

    def why_not(self, case: Case, device: torch.device) -> list[str]:
        return self.unless(case)

    def ready(self, case: Case, sets: Sequence[Operands], tried: Callable[[str], None]) -> Ready:
        others = [self.other(case, one, index) for index, one in enumerate(sets)]
        plans = [one.plan(None) for one in others]
        accepted(others[0].gate(plans[0]), self.title)
        calls = tuple(one.planned(plan) for one, plan in zip(others, plans, strict=True))
        return Ready(calls, ", ".join(sorted({plan.kernel for plan in plans})))


def fastest(
    what: str,
    candidates: Mapping[str, Sequence[Callable[[], object]]],
    device: torch.device,
    tried: Callable[[str], None],
) -> str:
    """The name of the fastest candidate in the same rounds, each the calls of all sets."""
    turns = {name: rotating(calls) for name, calls in candidates.items()}
    times = time_rounds(turns, device=device, rounds=5, inner_ms=10.0)
    for name, found in times.items():
        tried(f"{what}, {name}: {found.median:.3f} ms")
    return min(candidates, key=lambda name: times[name].median)


def tuned(
    spaces: Sequence[Space],
    calls: Callable[[Meta], Sequence[Callable[[], object]]],
    right: Callable[[Meta], bool],
    device: torch.device,
    tried: Callable[[str], None],
) -> Meta:
    """The fastest correct parameters of torch.sparse's kernel that coordinate descent finds, by timing.

    Each space is searched from the best of the one before. `calls(meta)` makes the calls of all sets, `right(meta)`
    says whether the first set's result is right. Raises UnavailableError if no parameters ran and were right.
    """
    timed: dict[tuple[tuple[str, int], ...], float] = {}

    def milliseconds(meta: Meta) -> float:
        key = tuple(meta.items())
        if key not in timed:
            try:
                call = rotating(calls(meta))
                got = time_rounds({"one": call}, device=device, rounds=3, inner_ms=3.0, settle_ms=0.0)
                timed[key] = got["one"].median
            except Exception as error:  # Triton: out of shared memory or registers, or a compiler fault
                timed[key] = math.inf
                tried(f"torch.sparse {meta}: {first_line(error)}")
            else:
                tried(f"torch.sparse {meta}: {timed[key]:.3f} ms")
        return timed[key]

    best: Meta = {}
    for space in spaces:
        best = _descend(space, milliseconds, best)
    for key, value in sorted(timed.items(), key=lambda item: item[1]):
        if math.isinf(value):
            break
        # num_stages has given silently wrong results before (pytorch #113587).
        if right(dict(key)):
            return dict(key)
    raise UnavailableError(f"none of {len(timed)} parameter sets of torch.sparse's kernel ran and was right")


def refused_blocks(rows: int, columns: int, block: tuple[int, int], *, by_kernel: bool) -> list[str]:
    """Why torch.sparse takes no BSR of this shape and block. `by_kernel`: its Triton kernel, on a GPU."""
    reasons, shown = [], block_name(block)
    if rows % block[0] or columns % block[1]:
        reasons.append(f"torch.sparse BSR needs sides that are multiples of the block {shown}")
    if by_kernel and any(side & (side - 1) for side in block):
        reasons.append(f"its kernel needs block sides that are powers of 2, not {shown}")
    return reasons


def _descend(space: Space, cost: Callable[[Meta], float], start: Meta) -> Meta:
    """Coordinate descent from `start`: each parameter in turn takes its best value, until a sweep changes nothing.

    Parameters that `start` leaves out begin with their first value. `cost` keeps what it has seen.
    """
    best = {name: start.get(name, values[0]) for name, values in space.items()}
    for _ in range(4):
        before = dict(best)
        for name, values in space.items():
            best[name] = min((*values, best[name]), key=lambda value: cost({**best, name: value}))
        if best == before:
            break
    return best


def settings(meta: dict[str, Any]) -> str:
    """ "num_stages=3, num_warps=4"."""
    return ", ".join(f"{key}={value}" for key, value in meta.items())
