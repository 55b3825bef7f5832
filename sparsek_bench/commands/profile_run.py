"""`sparsek profile`, once a kernel or an operation is named."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group

from sparsek.core import arguments
from sparsek.core.clock import Times, time_rounds
from sparsek.core.device import CARDS, card_named
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import unknown
from sparsek.core.terminal import AsJson, console, duration, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek.engine.plan.plan import Plan, arithmetic_seconds, memory_seconds, time_text
from sparsek.engine.planning import choose
from sparsek_bench.benches import BENCHES
from sparsek_bench.commands.bench_run import with_case_options
from sparsek_bench.commands.kernel_names import OF_BENCH, kernel_named, kernels_of
from sparsek_bench.engine.bench import Bench
from sparsek_bench.engine.peer import rotating
from sparsek_bench.engine.records import config_of
from sparsek_bench.engine.run import passed
from sparsek_bench.profile import ncu
from sparsek_bench.profile.breakdown import Breakdown, broken_down

FOLDER = Path("sparsek-profile")
WARMUP = (
    3  # calls of each operand set: the first plans and compiles, the second is recorded, others repeat it
)
TIMELINE_CALLS = 20
TOOL_SECONDS = 900
SCHEMA = """
Without a GPU it predicts for a card (--device h200). With one it checks the result, times calls, and writes a chrome
trace; with ncu on PATH it reads the counters of one call, with nsys it writes a timeline.

--json: {operation, case, kernel, config, card, predicted: {seconds, roofline_seconds, bound_by, useful_flops,
compulsory_bytes}, measured: {median, min, max, rounds in milliseconds}, calls: {wall, kernels, gaps, host, launches},
counters: {seconds, tensor_pipe, l2_to_sm_bytes, l2_bytes, dram_bytes, stalls, bound_by, launches}, notes, files};
measured, calls and counters are null where nothing was measured; times in seconds unless named otherwise.
"""


def command(name: str) -> Callable[..., None]:
    """The function of an operation's or a kernel's command."""
    named = kernel_named(name)
    if named is None and name not in OF_BENCH:
        every = [kernel for bench in OF_BENCH for kernel in kernels_of(bench)]
        raise unknown("kernel", name, dict.fromkeys(every))
    one, defaults = BENCHES[named.bench if named else name], named.defaults if named else {}
    options = [replace(each, default=defaults.get(each.name, each.default)) for each in one.options]
    known = f"cuda, or a card to predict for ({', '.join(CARDS)}). Default: the GPU, else h200."
    more: dict[str, tuple[Any, Any]] = {
        "device": (Annotated[str | None, typer.Option(help=known)], None),
        "out": (
            Annotated[Path, typer.Option(help="Folder of the trace, the timeline and the counters.")],
            FOLDER,
        ),
        "json": (AsJson, False),
        "child": (Annotated[int, typer.Option("--child", hidden=True)], 0),
    }
    if named is None:
        more = {"kernel": (Annotated[str, typer.Option(help=one.kernels)], "auto"), **more}

    def run(context: typer.Context, cases: Mapping[str, str | bool], **given: Any) -> None:
        profile(one, cases, **{"kernel": name, **given})

    run.__doc__ = f"Shows what bounds {name}.\n{SCHEMA}"
    return with_case_options(options, run, more)


def profile(
    one: Bench,
    cases: Mapping[str, str | bool],
    *,
    kernel: str,
    device: str | None,
    out: Path,
    json: bool,
    child: int,
) -> None:
    """Predicts or measures one case. `child`: how many calls to run under a profiler that watches this process."""
    found = one.cases(cases)
    if len(found) != 1:
        raise InvalidInput(
            f"profile takes one case, and these options give {len(found)}; leave out the comma lists"
        )
    case, wanted = found[0], None if kernel == "auto" else kernel
    where, card = place(device)
    sets = case.operands(where)
    plans = [each.plan(None if card else wanted) for each in (sets[:1] if card else sets)]
    if not isinstance(plans[0], Plan):
        raise InvalidInput(f"{case.name}: several kernels run in turn; profile takes a case of one")
    plan = predicted(plans[0], card, wanted) if card else plans[0]
    if child:
        _under_profiler([each.planned(made) for each, made in zip(sets, plans, strict=True)], child)
        return
    document: dict[str, Any] = {**described(case, plan), "measured": None, "calls": None, "counters": None}
    notes: list[str] = []
    files: list[Path] = []
    screen = console(stderr=json)
    tell: Callable[..., None] = (lambda *_, **__: None) if json else screen.print
    tell(_explained(plan))
    tell(f"Predicted: {summary(plan)}")
    if card:
        notes.append("There is no measurement: a GPU and --device cuda give times, a trace and counters.")
    else:
        call = rotating([each.planned(made) for each, made in zip(sets, plans, strict=True)])
        passed(case, plan.kernel, sets[0].gate(plan))
        out.mkdir(parents=True, exist_ok=True)
        with progress(2, "times on the device", watch=False) as (say, advance):
            times = time_rounds({"": call}, device=where)[""]
            advance()
            say("calls in a row, and a trace")
            eager = rotating([each.eager(plan) for each, plan in zip(sets, plans, strict=True)])
            for _ in range(WARMUP * len(sets)):
                eager()
            calls = broken_down(eager, where, out / "trace.json")
        tell(_measured(plan, times))
        files.append(out / "trace.json")
        tell(calls.sentence)
        words = [sys.executable, "-m", "sparsek", "profile", one.name, *_words(one, cases)]
        words += ["--kernel", plan.kernel, "--device", str(where), "--child"]
        with progress(1, "ncu reads counters"):
            counted = _counted(words, out, notes, files)
        if counted is not None:
            tell(counted.sentence(plan.problem.card))
        tell(_launches(calls, counted))
        with progress(1, "nsys writes a timeline"):
            _timeline(words, out, notes, files)
        document |= {"measured": vars(times), "calls": calls.as_json()}
        document["counters"] = counted and counted.as_json(plan.problem.card)
    for line in notes:
        screen.print(line, style="dim")
    for path in files:
        screen.print(f"wrote {path}", soft_wrap=True)
    if json:
        print_json({**document, "notes": notes, "files": files})


def place(device: str | None) -> tuple[torch.device, str | None]:
    """Where operands are made, and the card to predict for; None where a GPU measures."""
    if device in CARDS or (device is None and not torch.cuda.is_available()):
        return torch.device("cpu"), device or "h200"
    where = arguments.device("device", device or "cuda")
    if where.type == "cpu":
        raise InvalidInput(
            f"profile measures on a GPU, or predicts for one of {', '.join(CARDS)}; got {device}"
        )
    return where, None


def predicted(plan: Plan, card: str, kernel: str | None) -> Plan:
    """The plan for the same problem on another card. Raises Unsupported if `kernel` cannot run there."""
    problem = replace(plan.problem, card=card_named(card))
    return replace(plan, problem=problem, choice=choose(problem, kernel), work=None, ready=False, made=None)


def bound_by(plan: Plan) -> str:
    """The side of the roofline that is higher."""
    return "arithmetic" if arithmetic_seconds(plan.problem) >= memory_seconds(plan.problem) else "memory"


def summary(plan: Plan) -> str:
    """The plan's prediction in a sentence."""
    p = plan.problem
    return (
        f"{plan.kernel} takes {time_text(plan.seconds)} on {p.card.name}, "
        f"{plan.bound_seconds / plan.seconds * 100:.0f} % of the roofline of {time_text(plan.bound_seconds)}, which is "
        f"bound by {bound_by(plan)} ({p.useful_flops / p.compulsory_bytes:.0f} FLOP for each compulsory byte)."
    )


def described(case: Any, plan: Plan) -> dict[str, Any]:
    """What is profiled, and what the plan predicts."""
    p = plan.problem
    return {
        "operation": p.op,
        "case": case.as_record(),
        "kernel": plan.kernel,
        "config": config_of(plan.config),
        "card": p.card.name,
        "predicted": {
            "seconds": plan.seconds,
            "roofline_seconds": plan.bound_seconds,
            "bound_by": bound_by(plan),
            "useful_flops": p.useful_flops,
            "compulsory_bytes": p.compulsory_bytes,
        },
    }


def _explained(plan: Plan) -> Any:
    """`explain()`, its notes below each other where they are wrapped."""
    lines = plan.explain().splitlines()
    heads = [line for line in lines if not line.startswith("  ")]
    notes = new_table("")
    notes.show_header, notes.title = False, None
    for line in lines[len(heads) :]:
        key, _, text = line.strip().partition(" ")
        notes.add_row(key, text.strip())
    return Group(*heads, notes)


def _measured(plan: Plan, times: Times) -> str:
    seconds = times.median / 1e3
    return (
        f"Measured: {time_text(seconds)} on the device ({times.min:.4g} to {times.max:.4g} ms in {times.rounds} "
        f"rounds), {seconds / plan.seconds:.2f}x the prediction, {plan.bound_seconds / seconds * 100:.0f} % of the "
        "roofline."
    )


def _launches(calls: Breakdown, counted: ncu.CallCounters | None) -> Any:
    """The kernels of a call: by the counters where there are some, by the trace elsewhere."""
    shown = new_table("Kernels of a call")
    for title in ("kernel", "time", *(("tensor pipe", "L2 to SM", "L2", "DRAM") if counted else ())):
        shown.add_column(title, justify="left" if title == "kernel" else "right")
    if counted is None:
        for name, seconds in calls.launches.items():
            shown.add_row(name, duration(seconds))
        return shown
    for each in counted.launches:
        moved = (each.counters.get(name) for name in (ncu.L2_TO_SM, ncu.L2, ncu.DRAM))
        active = "" if each.tensor is None else f"{each.tensor * 100:.0f} %"
        megabytes = ("" if value is None else f"{value / 1e6:.4g} MB" for value in moved)
        shown.add_row(each.kernel, duration(each.seconds), active, *megabytes)
    return shown


def _words(one: Bench, cases: Mapping[str, str | bool]) -> list[str]:
    """The case's options as they are written."""
    words: list[str] = []
    for option in one.options:
        value = cases[option.name]
        if isinstance(value, str):
            words += [f"--{option.name}", value]
        elif value != option.default:
            words.append(f"--{option.name if value else option.off}")
    return words


def _under_profiler(calls: Sequence[Callable[[], object]], count: int) -> None:
    call = rotating(calls)
    for _ in range(WARMUP * len(calls)):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _counted(child: Sequence[str], out: Path, notes: list[str], files: list[Path]) -> ncu.CallCounters | None:
    """The counters of one call; without them a note has the reason."""
    program, log = shutil.which("ncu"), out / "ncu.csv"
    if program is None:
        notes.append("ncu is not on PATH: no counters.")
        return None
    # A metric that this card lacks may make ncu refuse all of them.
    text = ""
    log.unlink(missing_ok=True)
    for without in ((), ncu.TENSOR[1:], ncu.TENSOR[:1]):
        printed = _ran(ncu.command(program, log, [*child, "1"], without))
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        launches = ncu.parse(text)
        if launches:
            files.append(log)
            return ncu.CallCounters.of(launches)
        text += printed
        if "metric" not in ncu.refusal(text).lower():
            break
    notes.append(f"ncu gave no counters: {ncu.refusal(text) or text.strip()[-300:] or 'it printed nothing'}")
    return None


def _timeline(child: Sequence[str], out: Path, notes: list[str], files: list[Path]) -> None:
    """A timeline for Nsight Systems."""
    program, path = shutil.which("nsys"), out / "timeline.nsys-rep"
    path.unlink(missing_ok=True)
    if program is None:
        notes.append("nsys is not on PATH: no timeline.")
        return
    options = [
        "--output",
        str(path.with_suffix("")),
        "--force-overwrite",
        "true",
        "--trace",
        "cuda,nvtx,osrt",
    ]
    options += ["--sample", "none", "--cpuctxsw", "none"]
    options += ["--capture-range", "cudaProfilerApi", "--capture-range-end", "stop"]
    printed = _ran([program, "profile", *options, *child, str(TIMELINE_CALLS)])
    if path.exists():
        files.append(path)
    else:
        notes.append(f"nsys wrote no timeline: {printed.strip()[-300:]}")


def _ran(words: Sequence[str]) -> str:
    """Both outputs of a program, or why it did not end."""
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TOOL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout
