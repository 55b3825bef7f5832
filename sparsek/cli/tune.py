"""`sparsek tune`: measures configs and keeps the winners, which plans then take."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from sparsek.advise import tune as tuning
from sparsek.advise.tune import SHAPES, Job, Tuning
from sparsek.cli.options import Dtype
from sparsek.cli.output import AsJson, complain, console, duration, print_json, progress
from sparsek.cli.output import table as new_table
from sparsek.core import arguments, env
from sparsek.core.errors import InvalidFile, InvalidInput, Unsupported
from sparsek.core.memory import out_of_memory
from sparsek.core.parsing import listed, parse_block, unknown
from sparsek.kernels.table import names_for
from sparsek.ops.weight_formats import FORMATS, combinations
from sparsek.plan import table
from sparsek.plan.tune import winner

SPARSE = tuple(name for name in FORMATS if not name.startswith("dense"))
TUNABLE = [name for name in names_for("spmm") if not name.startswith("reference.")]


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
    kernel: Annotated[str, typer.Option(help="Kernels by name; all: every one that can.")] = "all",
    configs: Annotated[int, typer.Option(min=2, help="Configs of a kernel to measure, by prediction.")] = 6,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU, which it needs.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The table to add to; default: SPARSEK_TUNING, which plans consult.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Show the tables that plans consult; measure nothing.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Remove your table; measure nothing.")] = False,
    json: AsJson = False,
) -> None:
    """Measures configs of each kernel, each checked first, and keeps the winners in a table that plans consult.

    Exit code 1 if nothing was learned.

    --json: {table, tuned: [{kernel, layer, configs, best_seconds, default_seconds, entered}], failed: [{layer, why}]};
    with --show {tables: [{path, exists, entries: [{kernel, problem, card, config, seconds, default_seconds, predicted,
    date, source, fresh}]}]}; with --clear {table, removed}.
    """
    if show and clear:
        raise InvalidInput("--show looks at tables and --clear removes one; choose one of them")
    if show or clear:
        (_show if show else _clear)(out, json)
        return
    path = out or _own()
    if path.is_dir():
        raise InvalidInput(f"{path}: is a folder; name a file in it, by --out or SPARSEK_TUNING")
    table.extensible(path)
    jobs = _jobs(what, tokens, formats, block, keep, dtype)
    names = None if kernel == "all" else listed("kernel", kernel, str)
    for name in names or ():
        if name not in TUNABLE:
            raise unknown("kernel of these formats", name, TUNABLE)
    if device is None and not torch.cuda.is_available():
        raise InvalidInput("there is no GPU to tune for; --device cpu tunes the CPU's kernels")
    where = arguments.device("device", device or "cuda")
    found, failed = _run(jobs, where, names, configs, rounds, path)
    entries = sum(each.entry is not None for each in found)
    if json:
        print_json({"table": path, "tuned": [_as_json(each) for each in found], "failed": failed})
    else:
        screen = console()
        for each in found:
            screen.print(each.line)
        screen.print(f"{entries} entries in {path}", soft_wrap=True)
    if not entries:
        raise typer.Exit(1)


def _as_json(one: Tuning) -> dict[str, Any]:
    return {
        "kernel": one.kernel,
        "layer": one.job.name,
        "configs": len(one.trials),
        "best_seconds": winner(one.trials).seconds,
        "default_seconds": one.trials[0].seconds,
        "entered": one.entry is not None,
    }


def _jobs(what: str | None, tokens: str, formats: str, block: str, keep: str, dtype: str) -> list[Job]:
    wanted = listed("format", formats, str)
    for name in wanted:
        if name in FORMATS and name not in SPARSE:
            raise InvalidInput(
                f"--format {name}: the vendor's library multiplies it, and has no configs here"
            )
        if name not in SPARSE:
            raise unknown("format", name, SPARSE)
    shapes = SHAPES if what is None else tuning.shapes_in(what)
    blocks, keeps = listed("block", block, parse_block), listed("keep", keep, float)
    for each in keeps:
        if not 0 < each <= 1:
            raise InvalidInput(f"--keep {each}: a fraction of blocks in (0, 1]")
    stored = list(combinations(wanted, blocks, keeps))
    return [
        Job(rows, n, k, form, dtype)
        for rows in listed("tokens", tokens, int)
        for n, k in shapes
        for form in stored
    ]


def _run(
    jobs: list[Job], device: torch.device, names: list[str] | None, most: int, rounds: int, path: Path
) -> tuple[list[Tuning], list[dict[str, str]]]:
    """Every job in turn, and those that failed; the entries of a job are in the table before the next begins."""
    found: list[Tuning] = []
    failed: list[dict[str, str]] = []
    with progress(len(jobs), "tune", watch=False) as (say, advance):
        for job in jobs:

            def step(text: str, job: Job = job) -> None:
                say(f"{job.name}, {text}")

            try:
                done = list(
                    tuning.tune(job, device=device, kernels=names, most=most, rounds=rounds, step=step)
                )
            except (Unsupported, MemoryError, RuntimeError) as error:
                why = str(error) if isinstance(error, Unsupported) else out_of_memory(error)
                if why is None:
                    raise
                failed.append({"layer": job.name, "why": why})
                complain(f"{job.name}: {why}")
            else:
                found += done
                table.add(path, [each.entry for each in done if each.entry is not None])
            advance()
    return found, failed


def _own() -> Path:
    path = env.tuning_file()
    if not path:
        raise InvalidInput("SPARSEK_TUNING is off: no table is consulted; name one with --out, or unset it")
    return Path(path)


def _show(out: Path | None, json: bool) -> None:
    tables = {path: _entries(path) for path in ([out] if out is not None else [_own(), table.SHIPPED])}
    if json:
        rows = [
            {
                "path": path,
                "exists": path.exists(),
                "entries": [{**asdict(each), "fresh": table.is_fresh(each)} for each in entries],
            }
            for path, entries in tables.items()
        ]
        print_json({"tables": rows})
        return
    screen = console()
    for path, entries in tables.items():
        screen.print(f"{path}: {f'{len(entries)} entries' if path.exists() else 'not there'}", soft_wrap=True)
        if not entries:
            continue
        shown = new_table("")
        for title in ("kernel", "problem", "tuned", "own choice", "date", "source"):
            shown.add_column(title, justify="right" if title in ("tuned", "own choice") else "left")
        for entry in entries:
            fresh = table.is_fresh(entry)
            shown.add_row(
                entry.kernel,
                f"{entry.problem} on {entry.card}",
                duration(entry.seconds),
                duration(entry.default_seconds),
                entry.date[:10],
                Text("as measured" if fresh else "changed, ignored", "" if fresh else "yellow"),
            )
        screen.print(shown)


def _entries(path: Path) -> list[table.Entry]:
    try:
        return list(table.read(path).values()) if path.exists() else []
    except InvalidFile as error:
        raise InvalidFile(f"{error}; plans ignore it, and `sparsek tune` adds nothing to it") from None


def _clear(out: Path | None, json: bool) -> None:
    path = out or _own()
    there = path.exists()
    if there and not table.is_table(path):
        raise InvalidFile(f"{path}: is no table of tuned configs; it is not removed")
    path.unlink(missing_ok=True)
    table.forget()
    if json:
        print_json({"table": path, "removed": there})
    else:
        console().print(f"{path}: {'removed' if there else 'was not there'}", soft_wrap=True)
