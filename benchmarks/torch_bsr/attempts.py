"""Runs documented failures of another library, and the same computation with SparseK.

A case defines one computation three times: as a user of the other library writes it, as a user of SparseK does, and
dense. The dense one in float64 is the reference for both. Every result is measured now: a case that no longer fails
is reported as working.
"""

import inspect
import logging
import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import sparsek as sk
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput, SparseKError, first_line
from sparsek.core.memory import out_of_memory, peak_bytes
from sparsek.testing.budget import FACTOR, FLOOR, error

Status = Literal["works", "wrong", "error", "crash", "costly", "warns", "refuses", "skipped"]
FAILURES: tuple[Status, ...] = ("wrong", "error", "crash", "costly", "warns")
COSTLY = 2.0
# The other library counts as wrong only if no order of summation explains its error; SparseK must meet its own
# budget.
LENIENCE = 8.0
QUIET = {"KINETO_LOG_LEVEL": "6"}  # the profiler writes a line to stderr for every start and stop below this
PROCESS_SECONDS = 120


@dataclass(frozen=True)
class Answer:
    """The outcome of one attempt. `text` describes it; `error` and `budget` are relative to float64.

    `memory` is the peak of the call beyond its operands over the bytes of its result, if that was measured.
    """

    status: Status
    text: str
    error: float | None = None
    budget: float | None = None
    memory: float | None = None


class Measured(NamedTuple):
    """A result before it is judged, with observations.

    `fault`: why the attempt fails even if the result is right.
    """

    result: Any
    note: str
    fault: Status | None = None
    memory: float | None = None


class Operands(NamedTuple):
    """The operands of a case. The first three are SparseK's BSR, torch.sparse_bsr or dense, as the attempt requires.

    a, a2 [M, K] store the same blocks; c is [K, M]. x [K, N], dy [M, N], left [N, M] and batch [3, K, N] are dense.
    stored is bool [M, K]: which elements of a are stored.
    """

    a: Any
    a2: Any
    c: Any
    x: Tensor
    dy: Tensor
    left: Tensor
    batch: Tensor
    stored: Tensor


class Case:
    """One documented failure. The first line of a subclass's docstring describes the computation.

    where: the issue, pull request or source that documents it. needs_gpu: why it cannot run on a CPU. seen_on: the
    kind of device on which it is documented; "" for any.
    """

    name: str
    where: str
    needs_gpu: str = ""
    seen_on: str = ""
    roundings: int = 1  # of the result's dtype, which are never called wrong: more for a single number
    sizes: tuple[int, int, int] = (256, 384, 96)
    block: tuple[int, int] = (32, 32)
    dtype: torch.dtype | None = None

    @property
    def tried(self) -> str:
        """The computation, in one line."""
        return (inspect.getdoc(type(self)) or "").splitlines()[0]

    def attempt(self, o: Operands) -> Any:
        """The shared attempt for torch.sparse, SparseK and dense operands; the next three are for attempts that
        differ.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither an attempt nor theirs, ours and dense")

    def theirs(self, o: Operands) -> Any:
        """The attempt with torch.sparse's BSR: its result, a Measured, or an Answer."""
        return self.attempt(o)

    def ours(self, o: Operands) -> Any:
        """The same with SparseK."""
        return self.attempt(o)

    def dense(self, o: Operands) -> Tensor:
        """The result from dense operands, in their dtype."""
        return self.attempt(o)

    @property
    def code(self) -> dict[str, str]:
        """The source of both attempts."""
        kind = type(self)
        theirs = kind.attempt if kind.theirs is Case.theirs else kind.theirs
        ours = kind.attempt if kind.ours is Case.ours else kind.ours
        return {"torch": _body(theirs), "sparsek": _body(ours)}


@dataclass(frozen=True)
class Finding:
    """The answers of both libraries to one case."""

    case: Case
    torch: Answer
    ours: Answer

    @property
    def fails(self) -> bool:
        """Whether torch still fails."""
        return self.torch.status in FAILURES

    def as_dict(self) -> dict[str, Any]:
        """For JSON: numbers that JSON lacks become None."""
        return {
            "id": self.case.name,
            "tried": self.case.tried,
            "where": self.case.where,
            "fails": self.fails if self.torch.status != "skipped" else None,
            "torch": _plain(self.torch),
            "sparsek": _plain(self.ours),
            "code": self.case.code,
        }


def cases_named(table: Iterable[Case], names: Iterable[str] | None) -> tuple[Case, ...]:
    """The named cases in the table's order, all of them for None; InvalidInput for other names."""
    known = {case.name: case for case in table}
    wanted = list(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"no entry is called {name!r}; known: {', '.join(known)}")
    return tuple(case for name, case in known.items() if name in wanted)


def find(case: Case, device: torch.device) -> Finding:
    """Runs one case on `device`; skips it, with the reason, if the device lacks something."""
    if case.needs_gpu and device.type != "cuda":
        skipped = Answer("skipped", f"needs a GPU: {case.needs_gpu}")
        return Finding(case, skipped, skipped)
    with _without_warnings():
        ours = matrices(case, device)
        dense = ours._replace(a=ours.a.to_dense(), a2=ours.a2.to_dense(), c=ours.c.to_dense())
        with_torch = ours._replace(a=_to_torch(ours.a), a2=_to_torch(ours.a2), c=_to_torch(ours.c))
        theirs = _attempt(lambda: case.theirs(with_torch), case, dense, LENIENCE * FACTOR)
        return Finding(case, theirs, _attempt(lambda: case.ours(ours), case, dense, FACTOR))


def matrices(case: Case, device: torch.device) -> Operands:
    """The operands of a case with SparseK's matrices: N(0, 1) data, a quarter of the blocks stored.

    In the case's dtype; by default bf16 on a GPU and fp32 on a CPU, which torch supports best there.
    """
    m, k, n = case.sizes
    dtype = case.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    a = sk.random_bsr(m, k, case.block, 0.25, dtype=dtype, device=device, seed=1)
    a2 = sk.BSR.unchecked(a.pattern, a.values.flip(0).contiguous())
    bm, bk = case.block
    c = sk.random_bsr(k, m, (bk, bm), 0.25, dtype=dtype, device=device, seed=2)
    draw = torch.Generator(device).manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=dtype, device=device)

    stored = sk.BSR.unchecked(a.pattern, torch.ones_like(a.values)).to_dense() != 0
    return Operands(a, a2, c, random(k, n), random(m, n), random(n, m), random(3, k, n), stored)


def memory_of(call: Callable[[], Tensor], usual: Callable[[], Tensor], unlike: str) -> Measured:
    """`call` and its memory, in multiples of its result; `usual` is the same in a shape that is known to do well, and
    `unlike` describes the difference. Costly: more than twice the memory of `usual`.
    """
    result = call()
    factor, ordinary = _memory_factor(call), _memory_factor(usual)
    note = f"{factor:.1f} times the result in memory; {ordinary:.1f} {unlike}"
    return Measured(result, note, "costly" if factor > COSTLY * ordinary else None, factor)


def in_a_process(code: str) -> Answer:
    """Runs Python text in a process of its own, for code that may crash the interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PROCESS_SECONDS)
    if ran.returncode < 0:
        return Answer("crash", f"the process dies of {signal.Signals(-ran.returncode).name}")
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        return Answer("works", f"raises instead of crashing: {last[0][:160]}")
    return Answer("works", f"returns {ran.stdout.strip()[:80] or 'without a message'}")


def peak(call: Callable[[], object], device: torch.device) -> int:
    """The most bytes that torch held at once during one call beyond those before it.

    On a CPU from the profiler's record of allocations, without MKL's own. acc_events as in
    sparsek_bench/suites/spgemm.py.
    """
    on_gpu = peak_bytes(call, device)
    if on_gpu is not None:
        return on_gpu
    with _environment(QUIET):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            kept = call()
        del kept
    held = most = 0
    results: Any = profile.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def _body(function: Callable[..., Any]) -> str:
    """The body of a function without its docstring."""
    lines = inspect.getsource(function).splitlines()
    start = next(at for at, line in enumerate(lines) if line.rstrip().endswith(":")) + 1
    return textwrap.dedent("\n".join(lines[start:]))


def _memory_factor(call: Callable[[], Tensor]) -> float:
    result = call()  # the first call plans, compiles and fills caches
    size, device = result.numel() * result.element_size(), result.device
    del result
    return peak(call, device) / max(1, size)


def _attempt(call: Callable[[], Any], case: Case, dense: Operands, factor: float) -> Answer:
    try:
        got = call()
    except SparseKError as refusal:
        return Answer("refuses", _short(str(refusal)))
    except Exception as failure:
        return Answer("error", _said(failure))
    if isinstance(got, Answer):
        return got
    return _judged(got if isinstance(got, Measured) else Measured(got, ""), case, dense, factor)


def _judged(got: Measured, case: Case, dense: Operands, factor: float) -> Answer:
    """Right if within `factor` times the error of the dense computation in the same dtype, or its roundings."""
    wide = Operands._make(each if each.dtype == torch.bool else each.double() for each in dense)
    exact = case.dense(wide)
    low = case.dense(dense)
    allowed = max(FLOOR, factor * error(low, exact), case.roundings * torch.finfo(low.dtype).eps)
    out = _as_dense(got.result)
    if out is None or out.shape != exact.shape:
        found = "nothing" if out is None else f"shape {list(out.shape)}"
        return Answer("wrong", f"gives {found} where the result is {list(exact.shape)}", math.inf, allowed)
    wrong_by = error(out, exact)
    if not wrong_by <= allowed:
        text = f"wrong: error {wrong_by:.1e}, {allowed:.1e} allowed"
        return Answer("wrong", text, wrong_by, allowed, got.memory)
    text = ", ".join(part for part in (got.note, f"error {wrong_by:.1e}") if part)
    return Answer(got.fault or "works", text, wrong_by, allowed, got.memory)


def _as_dense(result: Any) -> Tensor | None:
    if result is None:
        return None
    if isinstance(result, sk.BSR) or result.layout != torch.strided:
        result = result.to_dense()
    return result.detach()


def _to_torch(a: sk.BSR) -> Tensor:
    """torch.sparse_bsr, or dense if a side is ragged: torch has no BSR for that."""
    ragged = any(side % step for side, step in zip(a.shape, a.block, strict=True))
    return a.to_dense() if ragged else a.to_torch()


def _said(failure: Exception) -> str:
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    # torch.compile names the source in the first line and the failure in the second.
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(failure)
    return f"{type(failure).__name__}: {_short(out_of_memory(failure) or text)}"


def _short(text: str) -> str:
    """The first sentence, at most 160 characters."""
    return text.strip().splitlines()[0].split(". ")[0][:160]


def _plain(answer: Answer) -> dict[str, Any]:
    kept = asdict(answer)
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in kept.items()
    }


def describe_operands(case: Case, device: torch.device) -> str:
    """The operands in the code of a case, in one line."""
    (m, k, n), (bm, bk) = case.sizes, case.block
    dtype = case.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    return (
        f"o.a, o.a2 [{m}, {k}] and o.c [{k}, {m}] in blocks of {bm}x{bk} and {bk}x{bm}, a quarter stored; "
        f"o.x [{k}, {n}], o.dy [{m}, {n}], o.left [{n}, {m}], o.batch [3, {k}, {n}]; {dtypes.name(dtype)}"
    )


def counted(found: Sequence[Finding], device: torch.device) -> dict[str, list[str]]:
    """Names of the cases in which torch still fails, no longer fails, fails on other devices by the documents, and
    those that were not run.
    """
    groups: dict[str, list[str]] = {"fails": [], "fixed": [], "elsewhere": [], "skipped": []}
    for each in found:
        if each.torch.status == "skipped":
            key = "skipped"
        elif each.fails:
            key = "fails"
        else:
            key = "elsewhere" if each.case.seen_on not in ("", device.type) else "fixed"
        groups[key].append(each.case.name)
    return groups


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppresses torch's warnings, for example that its sparse tensors are beta, and its compiler's logs.

    A case about warnings catches its own.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
