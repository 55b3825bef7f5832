"""`sparsek tune`: a sweep over the configs of each kernel on a layer, checked, then timed in the same rounds."""

import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from sparsek.core import arguments, dtypes
from sparsek.core.clock import rotating, time_rounds
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput, SparseKError, SparseKWarning, Unsupported, first_line
from sparsek.core.memory import out_of_memory
from sparsek.core.parsing import is_count, listed, parse_block, unknown
from sparsek.core.terminal import AsJson, complain, console, duration, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek.engine.plan.select import config_fields
from sparsek.engine.table import names_for
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.random import random_dense
from sparsek.products.ops.choose import copies
from sparsek.products.ops.weight_formats import FORMATS, WeightFormat, combinations, plan_of, run_plan
from sparsek.testing.compare import Expected
from sparsek.testing.poison import poisoned
from sparsek.tools.advise.sources import opened
from sparsek.tools.cli.options import Dtype

# Layers of W [N, K] that are measured where none are named: those of models with 4096 and 8192 features.
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
INNER_MS = 5.0
SETTLE_MS = 100.0
SPARSE = tuple(name for name in FORMATS if not name.startswith("dense"))


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
        dtype = dtypes.parse(self.dtype)
        w = random_dense(self.n, self.k, dtype=dtype, device=device, seed=1).mul_(self.k**-0.5)
        why = self.form.why_not(w)
        if why:
            raise Unsupported(self.name, {self.form.name: why})
        x = random_dense(self.tokens, self.k, dtype=dtype, device=device, seed=2)
        return x, self.form.convert(w)


@dataclass(frozen=True)
class Trial:
    """A config, the seconds of a call in each run, or why it has none. `choice`: "planner" for what a plan of the
    layer takes, "kernel" for what one with this kernel named takes.
    """

    kernel: str
    config: Any
    choice: str = ""
    runs: tuple[float, ...] = ()
    why_not: str = ""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.runs)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the runs; None for a single one."""
        return statistics.stdev(self.runs) if len(self.runs) > 1 else None

    def as_json(self) -> dict[str, Any]:
        named = {"kernel": self.kernel, "config": config_fields(self.config), "text": str(self.config)}
        if self.why_not:
            return named | {"why": self.why_not}
        times = {"mean_seconds": self.mean, "deviation_seconds": self.deviation, "runs": len(self.runs)}
        return named | times | {"choice": self.choice}


def tune(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[SHAPES | FILE]",
            help="Shapes of W, 4096x14336,8192x8192, or a file of weights. Default: four of large models.",
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Rows of x; comma lists give every combination.")] = "4096",
    formats: Annotated[
        str, typer.Option("--format", help=f"Some of {', '.join(SPARSE)}.")
    ] = "semi24,bsr,bsr24",
    block: Annotated[str, typer.Option(help="Blocks: 128,64.")] = "128",
    keep: Annotated[str, typer.Option(help="Fractions of blocks that stay.")] = "0.125",
    dtype: Dtype = "bf16",
    kernel: Annotated[
        str, typer.Option(help="Kernels by name; all: every one that can, references only if planned.")
    ] = "all",
    configs: Annotated[
        int | None, typer.Option(min=1, help="Configs of a kernel to measure, by prediction; default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds, a run of each config in each.")] = 5,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU, which it needs.")] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
    json: AsJson = False,
) -> None:
    """Measures every config of each kernel, each checked first, and prints mean and deviation, the best first.

    A run is the mean of calls in a row. plan_spmm(kernel=, config=) takes a config by its printed text, or by its
    fields as in the JSON. Exit code 1 if nothing was measured.

    --json: {card, layers: [{layer, n, k, tokens, format, dtype, configs: [{kernel, config, text, mean_seconds,
    deviation_seconds, runs, choice}], left_out: [{kernel, config, text, why}]}], failed: [{layer, why}]}. choice:
    "planner", "kernel" (what it takes if it is named), or "".
    """
    if out is not None:
        warnings.warn(
            f"--out {out} has no effect: plans read no tables of tuned configs any more. Take the best config of the "
            "table or of --json, and give it to plan_spmm: kernel=..., config=...",
            SparseKWarning,
        )
    jobs = _jobs(what, tokens, formats, block, keep, dtype)
    names = None if kernel == "all" else listed("kernel", kernel, str)
    for name in names or ():
        if name not in names_for("spmm"):
            raise unknown("kernel of these formats", name, names_for("spmm"))
    if device is None and not torch.cuda.is_available():
        raise InvalidInput("there is no GPU to tune for; --device cpu measures the CPU's kernels")
    where = arguments.device("device", device or "cuda")
    found: dict[Job, list[Trial]] = {}
    failed: list[dict[str, str]] = []
    with progress(len(jobs), "tune", watch=False) as (say, advance):
        for job in jobs:
            try:
                found[job] = sweep(
                    job,
                    device=where,
                    kernels=names,
                    most=configs,
                    rounds=rounds,
                    step=lambda text, name=job.name: say(f"{name}, {text}"),
                )
            except (Unsupported, MemoryError, RuntimeError) as error:
                why = str(error) if isinstance(error, Unsupported) else out_of_memory(error)
                if why is None:
                    raise
                failed.append({"layer": job.name, "why": why})
                complain(f"{job.name}: {why}")
            advance()
    if json:
        layers = [_as_json(job, trials) for job, trials in found.items()]
        print_json({"card": card_of(where).name, "layers": layers, "failed": failed})
    else:
        for job, trials in found.items():
            _show(f"{job.name} on {card_of(where).name}", trials)
    if not any(each.runs for trials in found.values() for each in trials):
        raise typer.Exit(1)


def sweep(
    job: Job,
    *,
    device: torch.device,
    kernels: Sequence[str] | None = None,
    most: int | None = None,
    rounds: int = 5,
    step: Callable[[str], None] = lambda text: None,
) -> list[Trial]:
    """The configs of every kernel that can run the job, the best first, then those without a time.

    `kernels`: only these; Unsupported if one cannot run it. Without them a reference takes part only if it is the
    planner's choice. `most`: so many configs of a kernel, its own choice and then by prediction. `step(text)` is called
    before every config. A config whose result is outside the error budget, or that does not run, gets no time.
    """
    x, weight = job.make(device)
    with torch.no_grad():
        expected, planned = Expected.of(x, weight), plan_of(x, weight)
        sets = copies(weight, x, card_of(x.device))
        able = [each.name for each in planned.candidates if not each.why_not]
        able = [name for name in able if name == planned.kernel or not name.startswith("reference.")]
        trials: list[Trial] = []
        calls: dict[str, Callable[[], object]] = {}
        heat = None
        for name in kernels or able:
            own = plan_of(x, weight, kernel=name)
            configs = shortlist(own.implementation, own.problem, most)
            for at, config in enumerate(configs):
                step(f"{name}: config {at + 1} of {len(configs)}")
                choice = "" if at else "planner" if name == planned.kernel else "kernel"
                plan, why = _checked(name, config, x, weight, expected)
                if not why:
                    calls[str(len(trials))] = rotating(
                        [lambda p=plan, w=w, x=x: run_plan(p, x, w) for w, x in sets]
                    )
                    heat = str(len(trials)) if choice == "planner" or heat is None else heat
                trials.append(Trial(name, config, choice, why_not=why))
        step(f"{rounds} rounds of {len(calls)} configs")
        times = time_rounds(
            calls, device=device, rounds=rounds, inner_ms=INNER_MS, settle_ms=SETTLE_MS, heat=heat
        )
    for at, each in times.items():
        trials[int(at)] = replace(trials[int(at)], runs=tuple(ms / 1e3 for ms in each.samples))
    return sorted(trials, key=lambda each: each.mean if each.runs else math.inf)


def shortlist(kernel: Any, p: Any, most: int | None) -> list[Any]:
    """The kernel's own choice, then others by rising prediction: at most `most` configs."""
    default = kernel.default(p)
    others = [each for each in kernel.configs(p) if each != default]
    return [default, *sorted(others, key=lambda each: kernel.seconds(p, each))][:most]


def _checked(kernel: str, config: Any, x: Tensor, weight: Any, expected: Expected) -> tuple[Any, str]:
    """The plan with a config, and why it is not timed, "" if it is. Its result is in memory that held NaN: a plan of a
    BSR writes to it, others are given what was freed just now.
    """
    try:
        plan = plan_of(x, weight, kernel=kernel, config=config)
        y = poisoned((x.shape[0], weight.shape[0]), x.dtype, x.device)
        if isinstance(weight, BSR):
            y = plan(x, weight.T, out=y)
        else:
            del y
            y = run_plan(plan, x, weight)
        gate = expected.judge(y)
    except (SparseKError, RuntimeError) as error:
        return None, f"does not run: {out_of_memory(error) or first_line(error)}"
    return plan, "" if gate.passed else f"error {gate.error:.1e} exceeds the budget {gate.budget:.1e}"


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
        if len(sides) != 2 or not all(is_count(side) and int(side) for side in sides):
            raise InvalidInput(f"{part.strip()!r} is neither a file nor a shape of W like 4096x14336")
        shapes.append((int(sides[0]), int(sides[1])))
    return list(dict.fromkeys(shapes))


def _jobs(what: str | None, tokens: str, formats: str, block: str, keep: str, dtype: str) -> list[Job]:
    wanted = listed("format", formats, str)
    for name in wanted:
        if name in FORMATS and name not in SPARSE:
            raise InvalidInput(
                f"--format {name}: the vendor's library multiplies it, and has no configs here"
            )
        if name not in SPARSE:
            raise unknown("format", name, SPARSE)
    shapes = SHAPES if what is None else shapes_in(what)
    blocks, keeps = listed("block", block, parse_block), listed("keep", keep, float)
    for each in keeps:
        if not 0 < each <= 1:
            raise InvalidInput(f"--keep {each}: a fraction of blocks in (0, 1]")
    stored = [replace(form, scope="row") for form in combinations(wanted, blocks, keeps)]
    return [
        Job(rows, n, k, form, dtype)
        for rows in listed("tokens", tokens, int)
        for n, k in shapes
        for form in stored
    ]


def _as_json(job: Job, trials: Sequence[Trial]) -> dict[str, Any]:
    layer = {"layer": job.name, "n": job.n, "k": job.k, "tokens": job.tokens, "format": job.form.format}
    timed, left_out = ([each.as_json() for each in trials if bool(each.runs) is way] for way in (True, False))
    return {**layer, "dtype": job.dtype, "configs": timed, "left_out": left_out}


def _show(title: str, trials: Sequence[Trial]) -> None:
    screen, shown = console(), new_table(title)
    shown.add_column("kernel: config")
    for heading in ("mean", "deviation", "runs"):
        shown.add_column(heading, justify="right")
    shown.add_column("choice of")
    for each in trials:
        name = f"{each.kernel}: {each.config}"
        if each.runs:
            spread = "" if each.deviation is None else duration(each.deviation)
            shown.add_row(name, duration(each.mean), spread, str(len(each.runs)), each.choice)
        else:
            screen.print(f"not timed: {name}: {each.why_not}", style="dim")
    screen.print(shown)
