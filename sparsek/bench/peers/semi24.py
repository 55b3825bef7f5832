"""What a user would pick instead of 2:4 products of this library. One line per peer in PEERS, at the end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.engine.data import random_dense
from sparsek.bench.engine.peer import Peer, Ready, UnavailableError, accepted, setting_up
from sparsek.bench.peers.cusparselt import Task, Tried, laid, multiply, probe, usable
from sparsek.bench.peers.product import CUBLAS, TORCH_DENSE, Own, fastest
from sparsek.bench.suites.product import ProductOperands
from sparsek.bench.suites.semi24 import Semi24Case
from sparsek.core.dtypes import LOW, parse
from sparsek.matrix.bsr import BSR
from sparsek.testing.budget import Gate

# Of the ways that a child process found right, so many are timed once more, in turns and on a warm card.
BEST = 12
_FOUND: dict[tuple[Task, torch.device], list[Tried]] = {}


@dataclass(frozen=True)
class CuSparseLt(Peer):
    """NVIDIA's library for 2:4 through torch, by the fastest of all its algorithms and layouts of B and C.

    `alike`: B and C lie as this library has them, x and y of a layer row-major.
    """

    alike: bool = False
    # What the sides of A must be multiples of, and N.
    STEPS: ClassVar[tuple[int, int]] = (16, 8)

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        reasons, (side, n) = missing(device), self.STEPS
        if not case.whole:
            reasons.append("has 2:4 matrices without blocks only")
        if not self.takes(case.dtype):
            reasons.append(f"not set up here for {case.dtype}")
        if case.m % side or case.k % side or case.n % n:
            reasons.append(f"needs sides of A that are multiples of {side} and N of {n}")
        return reasons

    def takes(self, dtype: str) -> bool:
        return parse(dtype) in LOW

    def task(self, case: Any) -> Task:
        return Task(case.m, case.k, case.n, case.dtype)

    def factors(self, one: Any) -> tuple[Tensor, Tensor]:
        """A [m, k] of a set, dense, and B [k, n]."""
        return one.a.to_dense(), one.b_as_factor

    def judge(self, one: Any, a: Tensor, b: Tensor) -> Callable[[Tensor], Gate]:
        """Whether C [m, n] is the product of a set, whose factors are A and B."""
        return lambda c: one.judge(c.mT if one.is_linear else c)

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> Ready:
        right = ways_that_run(self.task(case), sets[0].a.device, tried)
        if self.alike:
            lie = "col" if sets[0].is_linear else "row"
            right = [one for one in right if (one.way.b_layout, one.way.out_layout) == (lie, lie)]
        if not right:
            raise UnavailableError("no algorithm takes B and C as they lie here")
        factors = [self.factors(one) for one in sets]
        with setting_up("cuSPARSELt"):
            candidates = right_calls(right[:BEST], factors, self.judge(sets[0], *factors[0]), tried)
            best = fastest("cuSPARSELt", candidates, sets[0].a.device, tried)
        return Ready(candidates[best], best)


def missing(device: torch.device) -> list[str]:
    """What this machine lacks for cuSPARSELt."""
    if device.type != "cuda":
        return ["cuSPARSELt needs an NVIDIA GPU"]
    if not torch.backends.cusparselt.is_available():
        return [f"torch {torch.__version__} was built without cuSPARSELt"]
    return []


def ways_that_run(task: Task, device: torch.device, tried: Callable[[str], None]) -> list[Tried]:
    """The ways to compute `task` that came back right in a child process, fastest first. UnavailableError for none.

    A task is tried once in the life of this process.
    """
    key = task, device
    if key not in _FOUND:
        tried("cuSPARSELt: every algorithm in a process of its own")
        _FOUND[key] = probe([task], device, tried)
    found = _FOUND[key]
    right = usable(found)
    if not right:
        why = sorted({one.why for one in found if one.why})
        raise UnavailableError(f"none of {len(found)} ways of cuSPARSELt ran and was right: {'; '.join(why)}")
    for one in right[:BEST]:
        tried(f"cuSPARSELt {one.way}: {one.ms:.3f} ms")
    return right


def right_calls(
    ways: Sequence[Tried],
    factors: Sequence[tuple[Tensor, Tensor]],
    judge: Callable[[Tensor], Gate],
    tried: Callable[[str], None],
) -> dict[str, tuple[Callable[[], Tensor], ...]]:
    """By what they are, the calls of each way, one for each pair of A [m, k] and B [k, n]. UnavailableError for none.

    A is compressed and B laid out here, before any time. `judge` judges C [m, n] of the first pair.
    """
    packed = [torch._cslt_compress(a) for a, _ in factors]
    layouts = {layout: [laid(b, layout) for _, b in factors] for layout in {one.way.b_layout for one in ways}}
    candidates: dict[str, tuple[Callable[[], Tensor], ...]] = {}
    for one in ways:
        pairs = zip(packed, layouts[one.way.b_layout], strict=True)
        calls = tuple(lambda a=a, b=b, way=one.way: multiply(a, b, way) for a, b in pairs)
        try:
            accepted(judge(calls[0]()), "cuSPARSELt")
        except UnavailableError as error:
            tried(f"{one.way}: {error}")
        else:
            candidates[str(one.way)] = calls
    if not candidates:
        raise UnavailableError("no way of cuSPARSELt is right on these operands")
    return candidates


def own_blocks(case: Semi24Case, one: ProductOperands, index: int) -> ProductOperands:
    """This library's BSR of the same pattern, all values of its blocks random."""
    pattern, b = one.pattern, one.b
    assert pattern is not None
    values = random_dense(pattern.nnzb, *pattern.block, dtype=b.dtype, device=b.device, seed=3000 + index)
    a = BSR.unchecked(pattern, values.mul_(pattern.shape[1] ** -0.5)).zero_padding_()
    shape = (b.shape[0], pattern.shape[0]) if one.is_linear else (pattern.shape[0], b.shape[1])
    return replace(one, a=a, out=b.new_empty(shape))


PEERS: tuple[Peer, ...] = (
    CUBLAS,
    CuSparseLt("cusparselt", "cuSPARSELt"),
    CuSparseLt("cusparselt_alike", "cuSPARSELt, same layouts", alike=True),
    Own(
        "bsr",
        "this library's BSR",
        other=own_blocks,
        unless=lambda case: [] if case.in_blocks else ["is of blocks, of which the case has none"],
    ),
    TORCH_DENSE,
)
