"""Which algorithms of cuSPARSELt run, are right and are fast: each tried in a process of its own.

On an H200 the library's own search (0.8, by torch 2.11) ends in an illegal instruction for some fp16 products, which no
CUDA context survives. So nothing here calls it: a child process tries algorithm by algorithm, in every layout of B and
C that the library takes. Where the child dies, the way it was at counts as fatal, and another one goes on behind it.

The child is this module: `python -m sparsek.bench.peers.cusparselt '[[8192, 8192, 8192, "bf16"]]' cuda 0` writes a
line of JSON before and after each way.
"""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.bench.engine.peer import first_line
from sparsek.core.clock import host_seconds

# Ids from here on were refused by every version that was seen; get_max_alg_id knows up to 0.6.2, whose last is 37.
IDS = 64
LAYOUTS = (("row", "row"), ("row", "col"), ("col", "row"), ("col", "col"))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
# Rounding to bf16 gives 2e-3; a wrong product is off by more than its own size.
WRONG = 1e-2
NOTHING = 1e9  # the error of NaN and Inf
WARM, CALLS = 2, 5
DEATHS = 8  # children
SECONDS = 120.0
# The six ways to store two of four.
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))

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


@dataclass(frozen=True)
class Tried:
    """What a way gave: milliseconds and relative error, or why not. `fatal`: the process did not survive it."""

    task: Task
    way: Way
    ms: float | None = None
    error: float | None = None
    why: str = ""
    fatal: bool = False

    @property
    def right(self) -> bool:
        """It came back, and its result is right."""
        return self.ms is not None and self.error is not None and self.error < WRONG


def usable(found: Iterable[Tried]) -> list[Tried]:
    """Those that came back and were right, fastest first, without algorithms that were fatal in any layout."""
    tried = list(found)
    fatal = {(one.task, one.way.alg_id) for one in tried if one.fatal}
    right = (one for one in tried if one.right and (one.task, one.way.alg_id) not in fatal)
    return sorted(right, key=lambda one: one.ms or math.inf)


def probe(
    tasks: Sequence[Task],
    device: torch.device,
    report: Callable[[str], None] = lambda text: None,
    seconds: float = SECONDS,
) -> list[Tried]:
    """Every way of every task, tried in child processes on a GPU. What was not reached in time is left out."""
    found: list[Tried] = []
    place = 0
    for _ in range(DEATHS):
        child = [sys.executable, "-m", __name__, json.dumps(tasks), str(device), str(place)]
        said, why = listen(child, seconds)
        for at, answer in said:
            task, way = tasks[at // len(WAYS)], WAYS[at % len(WAYS)]
            if answer is None:
                report(f"cuSPARSELt: {way} is fatal")
            found.append(Tried(task, way, **(answer or {"why": why, "fatal": True})))
            # No other layout of an algorithm that is fatal in one.
            place = at + 1 if answer is not None else (at // len(LAYOUTS) + 1) * len(LAYOUTS)
        if place >= len(tasks) * len(WAYS) or not said:
            break
    return found


def listen(command: Sequence[str], seconds: float) -> tuple[list[tuple[int, Answer]], str]:
    """What a child said of each place that it began, None where it died there; and its last words."""
    said: dict[int, Answer] = {}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(child.stderr,))
    late = threading.Timer(seconds, child.kill)
    for helper in (reader, late):
        helper.start()
    try:
        for line in child.stdout:
            if line.startswith("["):
                at, answer = json.loads(line)
                said[at] = answer
        child.wait()
    finally:
        late.cancel()
        child.kill()
        child.wait()
        reader.join()
        child.stdout.close()
        child.stderr.close()
    words = [line.strip() for line in errors if line.strip()]
    return list(said.items()), words[-1][:160] if words else f"exit status {child.returncode}"


def random_24(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense [m, k] of N(0, 1) values of which random two of every four neighbours are there."""
    table = torch.zeros(len(PAIRS), 4, dtype=torch.bool, device=device)
    for row, pair in enumerate(PAIRS):
        table[row, list(pair)] = True
    kept = table[torch.randint(len(PAIRS), (m, k // 4), device=device)].view(m, k)
    return (torch.randn(m, k, dtype=torch.float32, device=device) * kept).to(dtype)


def multiply(packed: Tensor, b: Tensor, way: Way) -> Tensor:
    """C [m, n] of a compressed A and b [k, n], which lies as the way says. FP8 gives bf16."""
    out_dtype = torch.bfloat16 if b.dtype == torch.float8_e4m3fn else None
    by_columns = way.out_layout == "col"
    c = torch._cslt_sparse_mm(packed, b, out_dtype=out_dtype, transpose_result=by_columns, alg_id=way.alg_id)
    return c.mT if by_columns else c


def laid(b: Tensor, layout: str) -> Tensor:
    """b [k, n] in that layout; itself where it lies so."""
    return b.contiguous() if layout == "row" else b.mT.contiguous().mT


def attempts(tasks: Sequence[Task], device: torch.device, start: int) -> Iterator[tuple[int, Answer]]:
    """(place, None) before each way, (place, answer) after it, from place `start` on. Raises where CUDA is lost."""
    for index, (m, k, n, dtype) in enumerate(tasks):
        if (index + 1) * len(WAYS) <= start:
            continue
        places = range(max(start, index * len(WAYS)), (index + 1) * len(WAYS))
        torch.manual_seed(index)
        a = random_24(m, k, DTYPES[dtype], device)
        b = torch.randn(k, n, dtype=torch.float32, device=device).to(DTYPES[dtype])
        right = a.float() @ b.float()
        layouts = {layout: laid(b, layout) for layout in ("row", "col")}
        try:
            packed = torch._cslt_compress(a)
        except RuntimeError as error:
            _still_there(device)
            yield from ((place, {"why": first_line(error)}) for place in places)
            continue
        for place in places:
            way = WAYS[place % len(WAYS)]
            yield place, None
            try:
                yield place, measured(packed, layouts[way.b_layout], way, right)
            except RuntimeError as error:
                _still_there(device)
                yield place, {"why": first_line(error)}


def _still_there(device: torch.device) -> None:
    """Raises where the CUDA context is lost."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured(packed: Tensor, b: Tensor, way: Way, right: Tensor) -> dict[str, Any]:
    """The milliseconds and the relative error of one way, whose B lies as it says."""
    wrong = float((multiply(packed, b, way).float() - right).norm() / right.norm())
    for _ in range(WARM):
        multiply(packed, b, way)
    return {
        "ms": _milliseconds(lambda: multiply(packed, b, way), b.device),
        "error": wrong if math.isfinite(wrong) else NOTHING,
    }


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """The mean of a few calls: enough to tell which are worth a better measurement."""
    if device.type != "cuda":
        return 1e3 * host_seconds(call, device, calls=CALLS)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / CALLS


def main(tasks: str, device: str, start: str) -> None:
    """Tries, and writes a line of JSON before and after each way."""
    try:
        for line in attempts([Task(*one) for one in json.loads(tasks)], torch.device(device), int(start)):
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    except RuntimeError as error:
        sys.stderr.write(first_line(error) + "\n")
        sys.stderr.flush()
        os._exit(3)  # what is left of CUDA would only raise again


if __name__ == "__main__":
    main(*sys.argv[1:])
