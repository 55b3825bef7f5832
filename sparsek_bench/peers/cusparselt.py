"""cuSPARSELt as a peer: the fastest of its algorithms that run and are right, each tried in a child process first.

On an H200 the library's own search (0.8, by torch 2.11) ends in an illegal instruction for some fp16 products, which no
CUDA context survives. So nothing here calls it: a child process tries algorithm by algorithm, in every layout of B and
C that the library takes. Where the child dies, its algorithm counts as fatal, and another child continues behind it.

The child is this module: `python -m sparsek_bench.peers.cusparselt '[8192, 8192, 8192, "bf16"]' cuda 0` writes a
line of JSON before and after each way.
"""

import faulthandler
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core.clock import time_rounds
from sparsek.core.dtypes import FP8
from sparsek.testing.budget import Gate, judge
from sparsek_bench.engine.peer import (
    Peer,
    ReadyPeer,
    UnavailableError,
    accepted,
    fastest,
    first_line,
    holding,
    setting_up,
)

# Ids from here on were refused by every version that was seen; get_max_alg_id knows up to 0.6.2, whose last is 37.
IDS = 64
LAYOUTS = (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
# Rounding to bf16 gives 2e-3; a wrong product is off by more than its own size.
WRONG = 1e-2
# The library sums FP8 in fewer bits; results with a larger error get no time.
LOOSE = 1e-2
DEATHS = 8  # children
SECONDS = 120.0  # of a child
LIMIT = 960.0  # of all children of a task
# After so many without an answer a child ends itself: an algorithm may not return.
SILENT = 20.0
# Of the ways that a child process found right, so many are timed once more, interleaved and on a warm card.
BEST = 12

Answer = dict[str, Any] | None


class Way(NamedTuple):
    """How a product of A [m, k], 2:4, and B [k, n] is computed. "col": as the transpose view of a row-major matrix."""

    alg_id: int
    b_layout: str
    out_layout: str

    def __str__(self) -> str:
        return f"algorithm {self.alg_id}, B by {self.b_layout}s, C by {self.out_layout}s"


WAYS = tuple(Way(alg_id, *layouts) for alg_id in range(IDS) for layouts in LAYOUTS)


class Task(NamedTuple):
    """A product to try: A [m, k] and B [k, n], in "bf16", "fp16" or "fp8", whose C is then in bf16."""

    m: int
    k: int
    n: int
    dtype: str


_FOUND: dict[tuple[Task, torch.device], dict[Way, dict[str, Any]]] = {}


def usable(found: Mapping[Way, Mapping[str, Any]]) -> dict[Way, float]:
    """Milliseconds of the right ones, fastest first, without algorithms that were fatal in any layout."""
    fatal = {way.alg_id for way, one in found.items() if one.get("fatal")}
    right = {way: one["ms"] for way, one in found.items() if one.get("error", math.inf) < WRONG}
    return {way: right[way] for way in sorted(right, key=lambda way: right[way]) if way.alg_id not in fatal}


def probe(task: Task, device: torch.device, report: Callable[[str], None]) -> dict[Way, dict[str, Any]]:
    """Every way of a task, tried in child processes on a GPU, without those that were not reached in time: `ms` and the
    relative `error`, or `why` not. `fatal`: the process did not survive it.
    """
    found: dict[Way, dict[str, Any]] = {}
    place, ends = 0, monotonic() + LIMIT
    for _ in range(DEATHS):
        child = [sys.executable, "-m", __name__, json.dumps(task), str(device), str(place)]
        answers, why = listen(child, min(SECONDS, ends - monotonic()))
        for at, answer in answers.items():
            if answer is None:
                report(f"cuSPARSELt: {WAYS[at]} is fatal")
            found[WAYS[at]] = answer or {"why": why, "fatal": True}
            # No other layout of an algorithm that is fatal in one.
            place = at + 1 if answer is not None else (at // len(LAYOUTS) + 1) * len(LAYOUTS)
        if not answers:
            found[WAYS[place]] = {"why": why}
        if place >= len(WAYS) or not answers or monotonic() >= ends:
            break
    return found


def listen(command: Sequence[str], seconds: float) -> tuple[dict[int, Answer], str]:
    """A child's answer at each place that it began, None where it died there; and the last line of its errors."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
        printed, errors = done.stdout, done.stderr
        last = f"no answer in {SILENT:g} s" if done.returncode == 1 else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, errors, last = late.stdout or b"", late.stderr or b"", f"ended after {seconds:g} s"
    # The last line may be cut where the child died.
    lines = (line for line in printed.decode(errors="replace").splitlines() if line.endswith("]"))
    answers: dict[int, Answer] = dict(json.loads(line) for line in lines if line.startswith("["))
    words = [line.strip() for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return answers, words[-1][:160] if words else last


def random_24(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense [m, k] of N(0, 1) values, zero but for a random two of every four neighbours."""
    pairs = torch.combinations(torch.arange(4, device=device))
    table = functional.one_hot(pairs, 4).sum(1).bool()  # [6, 4]
    kept = table[torch.randint(len(pairs), (m, k // 4), device=device)].view(m, k)
    return (torch.randn(m, k, dtype=torch.float32, device=device) * kept).to(dtype)


def multiply(packed: Tensor, b: Tensor, way: Way) -> Tensor:
    """C [m, n] of a compressed A and b [k, n], which has the layout of the way. FP8 gives bf16."""
    out_dtype = torch.bfloat16 if b.dtype == torch.float8_e4m3fn else None
    by_columns = way.out_layout == "col"
    c = torch._cslt_sparse_mm(packed, b, out_dtype=out_dtype, transpose_result=by_columns, alg_id=way.alg_id)
    return c.mT if by_columns else c


def laid(b: Tensor, layout: str) -> Tensor:
    """b [k, n] in that layout; itself where it has it already."""
    return b.contiguous() if layout == "row" else b.mT.contiguous().mT


def attempts(task: Task, device: torch.device, start: int) -> Iterator[tuple[int, Answer]]:
    """(place, None) before each way, (place, answer) after it, from place `start` on. Raises where CUDA is lost."""
    torch.manual_seed(0)
    a = random_24(task.m, task.k, DTYPES[task.dtype], device)
    b = torch.randn(task.k, task.n, dtype=torch.float32, device=device).to(DTYPES[task.dtype])
    right = a.float() @ b.float()
    layouts = {layout: laid(b, layout) for layout in ("row", "col")}
    packed = torch._cslt_compress(a)
    for place in range(start, len(WAYS)):
        way = WAYS[place]
        yield place, None
        try:
            yield place, measured(packed, layouts[way.b_layout], way, right)
        except RuntimeError as error:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises where the CUDA context is lost
            yield place, {"why": first_line(error)}


def measured(packed: Tensor, b: Tensor, way: Way, right: Tensor) -> dict[str, Any]:
    """Milliseconds of a way, enough to tell which are worth a better measurement, and its relative error."""
    wrong = float((multiply(packed, b, way).float() - right).norm() / right.norm())
    call = partial(multiply, packed, b, way)
    times = time_rounds({"": call}, device=b.device, rounds=1, inner_ms=1.0, settle_ms=0.0)
    return {"ms": times[""].median, "error": wrong}


def main(task: str, device: str, start: str) -> None:
    """Tries, and writes a line of JSON before and after each way."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    try:
        for line in attempts(Task(*json.loads(task)), torch.device(device), int(start)):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            faulthandler.dump_traceback_later(SILENT, exit=True, file=quiet)
    except RuntimeError as error:
        sys.stderr.write(first_line(error) + "\n")
        sys.stderr.flush()
        os._exit(3)  # what is left of CUDA would only raise again


@dataclass(frozen=True)
class CuSparseLt(Peer):
    """NVIDIA's library for 2:4 through torch, by the fastest of all its algorithms and layouts of B and C.

    In FP8: values without scales, C in bf16. Sets have `dense_factors`: A [m, k], dense, and B [k, n].
    """

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        # What the sides of A must be multiples of, and N.
        side, n = (32, 16) if case.dtype in FP8.values() else (16, 8)
        missing = device.type == "cuda" and not torch.backends.cusparselt.is_available()
        ragged = case.m % side or case.k % side or case.n % n
        reasons = {
            f"torch {torch.__version__} was built without cuSPARSELt": missing,
            "has 2:4 matrices without blocks only": not case.whole,
            f"not set up here for {case.dtype}": _task(case).dtype not in DTYPES,
            f"needs sides of A that are multiples of {side} and N of {n}": ragged,
        }
        return super().why_not(case, device) + holding(reasons)

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        right = ways_that_run(_task(case), sets[0].a.device, tried)
        factors = [one.dense_factors for one in sets]
        a, b = factors[0]
        with setting_up("cuSPARSELt"):
            # A is compressed, and B has its layout, before any time.
            packed = [torch._cslt_compress(dense) for dense, _ in factors]
            layouts = {layout: [laid(dense, layout) for _, dense in factors] for layout in ("row", "col")}

        def calls(way: Way) -> list[Callable[[], Tensor]]:
            pairs = zip(packed, layouts[way.b_layout], strict=True)
            made = [partial(multiply, *pair, way) for pair in pairs]
            accepted(_judged(sets[0], a, b, made[0]()), f"{way}: cuSPARSELt")
            return made

        ways = {str(way): partial(calls, way) for way in right}
        return fastest("cuSPARSELt", ways, sets[0].a.device, tried)


def _task(case: Any) -> Task:
    return Task(case.m, case.k, case.n, "fp8" if case.dtype == "e4m3" else case.dtype)


def _judged(one: Any, a: Tensor, b: Tensor, c: Tensor) -> Gate:
    """Whether C [m, n] is the product of a set, whose dense factors are A and B; of FP8 that of the values."""
    if b.dtype == DTYPES["fp8"]:
        return judge(c, a.double() @ b.double(), LOOSE)
    return one.judge(c.mT if one.is_linear else c)


def ways_that_run(task: Task, device: torch.device, tried: Callable[[str], None]) -> list[Way]:
    """The ways to compute `task` that came back right in a child process fastest. UnavailableError for none.

    A task is tried once in the life of this process.
    """
    key = task, device
    if key not in _FOUND:
        tried("cuSPARSELt: every algorithm in a process of its own")
        _FOUND[key] = probe(task, device, tried)
    found = _FOUND[key]
    right = list(usable(found).items())[:BEST]
    if not right:
        why = sorted({one["why"] for one in found.values() if "why" in one})
        raise UnavailableError(f"none of {len(found)} ways of cuSPARSELt ran and was right: {'; '.join(why)}")
    for way, ms in right:
        tried(f"cuSPARSELt {way}: {ms:.3f} ms")
    return [way for way, _ in right]


if __name__ == "__main__":
    main(*sys.argv[1:])
