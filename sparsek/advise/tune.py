"""`sparsek tune`: configs of each kernel on one layer, checked, then timed in the same rounds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsek.advise.sources import opened
from sparsek.bench.engine import records
from sparsek.bench.engine.data import Draw
from sparsek.bench.engine.peer import first_line, rotating
from sparsek.core import dtypes
from sparsek.core.clock import time_rounds
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput, SparseKError, Unsupported
from sparsek.core.memory import out_of_memory
from sparsek.kernels.table import load, names_for
from sparsek.matrix.bsr import BSR
from sparsek.ops.choose import copies
from sparsek.ops.weight_formats import WeightFormat, plan_of, run_plan
from sparsek.plan.table import Entry
from sparsek.plan.tune import Trial, entry_of, shortlist, winner
from sparsek.testing.compare import Expected
from sparsek.testing.poison import poisoned

# Layers of W [N, K] that are tuned where none are named: those of models with 4096 and 8192 features.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
INNER_MS = 5.0
SETTLE_MS = 100.0


@dataclass(frozen=True)
class Job:
    """One layer, y [tokens, n] = x [tokens, k] @ W.T with W stored in one way."""

    tokens: int
    n: int
    k: int
    form: WeightFormat
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for side in ("tokens", "n", "k"):
            if getattr(self, side) < 1:
                raise InvalidInput(f"{side} must be at least 1, got {getattr(self, side)}")
        dtypes.parse(self.dtype)

    @property
    def name(self) -> str:
        """ "4096 x 8192 to 8192, BSR 128 12.5 % bf16"."""
        return f"{self.tokens} x {self.k} to {self.n}, {self.form.name} {self.dtype}"

    def make(self, device: torch.device) -> tuple[Tensor, Any]:
        """x and the weight, N(0, 1) values and what a random W keeps of them."""
        draw = Draw(device, dtypes.parse(self.dtype), 0)
        w = draw.weight(self.n, self.k)
        why = self.form.why_not(w)
        if why:
            raise Unsupported(self.name, {self.form.name: why})
        return draw.normal(self.tokens, self.k), self.form.convert(w)


class Tuning(NamedTuple):
    """What became of one kernel on one job: its trials, the kernel's own choice first, and the entry they give."""

    job: Job
    kernel: str
    trials: tuple[Trial, ...]
    entry: Entry | None

    @property
    def line(self) -> str:
        """ "hopper.spmm on ...: 0.93x the time of its own choice, 6 configs"."""
        default, best = self.trials[0], winner(self.trials)
        count = f"{len(self.trials)} configs"
        wrong = [each.why_not for each in self.trials if each.why_not]
        left_out = f", {len(wrong)} left out ({wrong[0]})" if wrong else ""
        if self.entry is None:
            return f"{self.kernel} on {self.job.name}: nothing learned of {count}{left_out}"
        gain = best.seconds / default.seconds
        gained = "its own choice stands" if best is default else f"{gain:.2f}x the time of its own choice"
        return f"{self.kernel} on {self.job.name}: {best.seconds * 1e6:.1f} us, {gained}, {count}{left_out}"


def shapes_in(text: str) -> list[tuple[int, int]]:
    """Shapes of W from "4096x14336,8192x8192", or those of the weights of a file, each once."""
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:  # a list of shapes may be longer than any name
        is_file = False
    if is_file:
        found = dict.fromkeys((shape[0], shape[1]) for _, shape, _ in opened([text])[0].names())
        if not found:
            raise InvalidInput(f"{path}: no 2-D float matrix is in it")
        return list(found)
    shapes = []
    for part in text.split(","):
        sides = part.strip().lower().split("x")
        if len(sides) != 2 or not all(side.isdigit() and int(side) for side in sides):
            raise InvalidInput(f"{part.strip()!r} is neither a file nor a shape of W like 4096x14336")
        shapes.append((int(sides[0]), int(sides[1])))
    return list(dict.fromkeys(shapes))


def tune(
    job: Job,
    *,
    device: torch.device,
    kernels: Sequence[str] | None = None,
    most: int = 6,
    rounds: int = 5,
    step: Callable[[str], None] = lambda text: None,
) -> Iterator[Tuning]:
    """Each kernel that can run the job and has a choice of configs, `most` of them measured; None: all kernels.

    `step(text)` is called before every config. A config whose result is outside the error budget, or that does not
    run, gets no time. Raises Unsupported where the weight cannot be stored so.
    """
    x, weight = job.make(device)
    with torch.no_grad():
        expected = Expected.of(x, weight)
        problem = plan_of(x, weight).problem
        able = names_for("spmm", problem.a.kind)
        for name in kernels or able:
            if name.startswith("reference."):
                continue
            try:
                kernel = load(name)
            except ImportError:
                continue
            if name not in able or kernel.why_not(problem):
                continue
            configs = shortlist(kernel, problem, most)
            if len(configs) < 2:
                continue
            yield _tuned(job, kernel, problem, configs, x, weight, expected, rounds, step)


def _tuned(job: Job, kernel: Any, problem: Any, configs: Sequence[Any], *given: Any) -> Tuning:
    x, weight, expected, rounds, step = given
    sets = copies(weight, x, card_of(x.device))
    calls: dict[str, Callable[[], object]] = {}
    trials = [Trial(config) for config in configs]
    for at, config in enumerate(configs):
        step(f"{kernel.name}: config {at + 1} of {len(configs)}")
        try:
            plan = plan_of(x, weight, kernel=kernel.name, config=config)
            gate = expected.judge(_fresh(plan, x, weight))
        except (SparseKError, RuntimeError) as error:
            trials[at] = Trial(config, why_not=f"does not run: {out_of_memory(error) or first_line(error)}")
            continue
        if not gate.passed:
            why = f"error {gate.error:.1e} exceeds the budget {gate.budget:.1e}"
            trials[at] = Trial(config, why_not=why)
            continue
        calls[str(at)] = rotating([lambda p=plan, w=w, x=x: run_plan(p, x, w) for w, x in sets])
    if "0" in calls and len(calls) > 1:
        step(f"{kernel.name}: {rounds} rounds of {len(calls)} configs")
        times = time_rounds(
            calls, device=x.device, rounds=rounds, inner_ms=INNER_MS, settle_ms=SETTLE_MS, heat="0"
        )
        for name, each in times.items():
            trials[int(name)] = Trial(configs[int(name)], each.median / 1e3)
    return Tuning(job, kernel.name, tuple(trials), entry_of(kernel, problem, trials, records.now()))


def _fresh(plan: Any, x: Tensor, weight: Any) -> Tensor:
    """The product in memory that held NaN: a plan of a BSR writes to it, others are given what was freed just now."""
    y = poisoned((x.shape[0], weight.shape[0]), x.dtype, x.device)
    if isinstance(weight, BSR):
        return plan(x, weight.T, out=y)
    del y
    return run_plan(plan, x, weight)
