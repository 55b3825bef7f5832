"""What every `sparsek bench` command does once its cases are known: measure, print, write records and charts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.table import Table as Screen

from sparsek.bench.engine import charts, records
from sparsek.bench.engine.measure import measure
from sparsek.bench.engine.memory import out_of_memory
from sparsek.bench.engine.report import measured_peers
from sparsek.bench.engine.run import GateError, Outcome
from sparsek.bench.engine.tables import Table, case_name, table_of
from sparsek.bench.peers.peer import Peer, peers_named
from sparsek.bench.suites.case import Case, Entry, suite_named
from sparsek.cli.output import complain, console, progress
from sparsek.cli.output import table as new_table
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

Value = TypeVar("Value")

Kernels = Annotated[str, typer.Option("--kernel", help="Kernels by name; auto is the planner's choice.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32, fp64.")]
Blocks = Annotated[str, typer.Option("--block", help="Blocks: 128,64,512x112.")]
Densities = Annotated[str, typer.Option("--density", help="Fraction of blocks that are stored.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; records want five or more.")]
Only = Annotated[str | None, typer.Option(help="Of a suite, the entries with these numbers (from 1): 1,3,5.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")]
Out = Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw charts of what was measured into this folder.")]


def suite_option(suites: Mapping[str, object]) -> Any:
    return typer.Option("--suite", help=f"A named suite instead of sizes: {', '.join(suites)}.")


def peers_option(table: Sequence[Peer]) -> Any:
    return typer.Option(help=f"all, none, or some of {', '.join(peer.name for peer in table)}.")


@dataclass(frozen=True)
class Asked:
    """What every command is told beside its cases, as it was written."""

    context: typer.Context
    peers: str
    rounds: int
    named: str | None
    only: str | None
    device: str | None
    out: Path | None
    plot: Path | None


# Parameters that go with a suite too; the others describe cases.
BESIDE_A_SUITE = ("peers", "rounds", "named", "only", "device", "out", "plot")
# A product that takes a CPU a second or two.
SMALL_PRODUCT = "--m 512 --k 512 --n 64"


def bench(
    asked: Asked,
    suites: Mapping[str, tuple[Entry, ...]],
    table: Sequence[Peer],
    cases: Callable[[], Sequence[Case]],
    kernel: str = "auto",
    op: str = "",
    by_hand: str = "",
) -> None:
    """Measures a suite or the cases, prints what was found, and writes what was asked for.

    `op` of the records, where it is not that of the cases. `by_hand`: where suites and sizes by default would keep a
    CPU busy for hours, options of sizes that do not; without any of these a CPU is refused. Exits 1 if a case failed
    or none was measured.
    """
    given = given_of(asked.context)
    _refuse_contradictions(given, suite_chosen=asked.named is not None)
    device = arguments.device("device", asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if asked.named is not None:
        entries = _numbered(suite_named(suites, asked.named), asked.only)
    else:
        entries = tuple(Entry(case, tuple(listed("kernel", kernel, str)), op) for case in cases())
    names = {"all": None, "none": []}.get(asked.peers.strip(), listed("peers", asked.peers, str))
    chosen = peers_named(table, names, device)
    if device.type == "cpu" and by_hand and not _sizes_in(by_hand) & set(given):
        why = "sizes by default are a GPU's" if asked.named is None else f"suite {asked.named} needs a GPU"
        raise InvalidInput(f"{why}; a CPU would take hours. Give sizes by hand: {by_hand}")
    outcomes, failed = _run(entries, chosen, device, asked)
    found = [record for outcome in outcomes for record in outcome.records]
    screen = console()
    by_table: dict[str, list[records.Record]] = {}
    for record in found:
        by_table.setdefault(table_of(record).op, []).append(record)
    for rows in by_table.values():
        screen.print(_table(table_of(rows[0]), rows))
    _print_notes(outcomes)
    if asked.out is not None:
        screen.print(f"{len(found)} records appended to {asked.out}", soft_wrap=True)
    if asked.plot is not None:
        for path in charts.draw(found, asked.plot):
            screen.print(f"drew {path}", soft_wrap=True)
    if failed or not found:
        raise typer.Exit(1)


def listed(name: str, text: str, parse: Callable[[str], Value]) -> list[Value]:
    """The values of a comma list. Raises InvalidInput that names the option."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"--{name} {text!r}: {error}") from None


def given_of(context: typer.Context) -> list[str]:
    """The parameters that were written on the command line."""
    names = [parameter.name or "" for parameter in context.command.params]
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def _sizes_in(by_hand: str) -> set[str]:
    """The names of the options, except of the dtype, which makes nothing small."""
    return {part[2:] for part in by_hand.split() if part.startswith("--")} - {"dtype"}


def _refuse_contradictions(given: Sequence[str], *, suite_chosen: bool) -> None:
    """InvalidInput for options that would be ignored next to the others."""
    extra = ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in BESIDE_A_SUITE)
    if "named" in given and extra:
        raise InvalidInput(
            f"--suite brings its own cases and kernels; leave out {extra}, or leave out --suite"
        )
    if "only" in given and not suite_chosen:
        raise InvalidInput("--only picks entries of a suite; name one with --suite")


def _numbered(entries: Sequence[Entry], only: str | None) -> tuple[Entry, ...]:
    if only is None:
        return tuple(entries)
    numbers = listed("only", only, int)
    for number in numbers:
        if not 1 <= number <= len(entries):
            raise InvalidInput(f"--only {number}: the suite has entries 1 to {len(entries)}")
    return tuple(entries[number - 1] for number in numbers)


def _run(
    entries: Sequence[Entry], peers: Sequence[Peer], device: torch.device, asked: Asked
) -> tuple[list[Outcome], bool]:
    """Every entry in turn; records are on disk as soon as a case is done. The flag: one failed."""
    outcomes: list[Outcome] = []
    with progress(len(entries), "start") as (say, advance):
        for entry in entries:
            outcome = measured_entry(entry, peers, device, asked.rounds, say)
            if outcome is not None:
                outcomes.append(outcome)
                if asked.out is not None:
                    records.append(asked.out, outcome.records)
            advance()
    return outcomes, len(outcomes) < len(entries)


def measured_entry(
    entry: Entry,
    peers: Sequence[Peer],
    device: torch.device,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome | None:
    """What an entry gave; None, and a line on standard error, if its result is wrong or memory cannot hold it."""
    name = entry.case.name
    try:
        return measure(
            entry, peers=peers, rounds=rounds, device=device, report=lambda text: say(f"{name}: {text}")
        )
    except (GateError, MemoryError, RuntimeError) as error:
        why = str(error) if isinstance(error, GateError) else out_of_memory(error)
        if why is None:
            raise
        complain(f"{name}: {why}")
        return None


def _table(of: Table, found: Sequence[records.Record]) -> Screen:
    names = measured_peers(found, of)
    table = new_table(f"{of.title} on {found[0]['env']['gpu']}")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    peers = (f"over {of.peers[name]}".replace(".", " ") for name in names)
    own = (column.heading for column in of.shown)
    for title in ("ms", "min", "max", "useful TFLOPS", "GB/s", "of roof", *own, *peers):
        table.add_column(title, justify="right")
    for record in found:
        table.add_row(*_row(record, of, names))
    return table


def _row(record: records.Record, of: Table, names: Sequence[str]) -> list[str]:
    ms: dict[str, Any] = record["ms"]
    first = [case_name(record), record["kernel"], f"{ms['median']:.4g}"]
    first += [f"{ms['min']:.4g}", f"{ms['max']:.4g}"]
    if record["gbps"] is None:
        if record["op"] == of.op:
            own = [column.cell(record) for column in of.shown]
            return [*first, "", "", "", *own, *(f"{record['ratio'][name]:.2f}x" for name in names)]
        blank = [""] * (len(of.shown) + len(names))
        return [*first, "build" if record["op"] == "mask_build" else "host", "", "", *blank]
    rates = [
        "" if record["tflops"] is None else f"{record['tflops']['useful']:.3g}",
        f"{record['gbps']:.4g}",
        f"{record['roofline']['fraction']:.0%}",
        *(column.cell(record) for column in of.shown),
    ]
    return [*first, *rates, *(f"{record['ratio'][n]:.2f}x" if n in record["ratio"] else "" for n in names)]


def _print_notes(outcomes: Sequence[Outcome]) -> None:
    """Peers' settings, and who was left out and why: each thing once, with the cases it holds for."""
    lines: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, note in outcome.notes.items():
            lines.setdefault(f"{name}: {note}", []).append(outcome.case.name)
        for name, reasons in outcome.unavailable.items():
            lines.setdefault(f"{name} not measured: {'; '.join(reasons)}", []).append(outcome.case.name)
    for line, cases in lines.items():
        where = "every case" if len(cases) == len(outcomes) else ", ".join(cases)
        console().print(f"{line} ({where})", style="dim")
