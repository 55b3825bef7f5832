"""What every `sparsek bench` command does once its cases are known: measure, print, write records and charts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table as Screen

from sparsek.bench import charts
from sparsek.bench.engine import records
from sparsek.bench.engine.bench import Bench, Table, table_of
from sparsek.bench.engine.case import SuiteRow, suite_named
from sparsek.bench.engine.memory import out_of_memory
from sparsek.bench.engine.options import listed
from sparsek.bench.engine.peer import Peer, peers_named
from sparsek.bench.engine.report import measured_peers
from sparsek.bench.engine.run import GateError, Outcome, measure
from sparsek.bench.engine.tables import case_name
from sparsek.cli.output import complain, console, progress
from sparsek.cli.output import table as new_table
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput

Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; records want five or more.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")]


@dataclass(frozen=True)
class Request:
    """What a command was given beside its cases, as it was written."""

    context: typer.Context
    rounds: int
    suite: str | None
    only: str | None
    device: str | None
    out: Path | None
    plot: Path | None
    kernel: str = "auto"
    peers: str = "none"


# Parameters that go with a suite too; the others describe cases.
BESIDE_A_SUITE = ("peers", "rounds", "suite", "only", "device", "out", "plot")


def bench(one: Bench, cases: Mapping[str, str | bool], request: Request) -> None:
    """Measures a suite, or the cases that the options give, prints what was found, and writes what was asked for.

    Exits 1 if a case failed or none was measured. A CPU is refused where it would take hours.
    """
    given = given_of(request.context)
    suite = request.suite or (one.whole if not set(given) - set(BESIDE_A_SUITE) else "")
    _refuse_contradictions(given, suite)
    device = arguments.device("device", request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if suite:
        entries = _numbered(suite_named(one.suites, suite), request.only)
    else:
        kernels = tuple(listed("kernel", request.kernel, str))
        entries = tuple(SuiteRow(case, kernels) for case in one.cases(cases))
    names = {"all": None, "none": []}.get(request.peers.strip(), listed("peers", request.peers, str))
    chosen = peers_named(one.peers, names, device)
    if device.type == "cpu" and one.small and not _sizes_in(one.small) & set(given):
        why = f"suite {suite} needs a GPU" if suite else "sizes by default are a GPU's"
        raise InvalidInput(f"{why}; a CPU would take hours. Give sizes by hand: {one.small}")
    outcomes, failed = _run(entries, chosen, device, request)
    found = [record for outcome in outcomes for record in outcome.records]
    screen = console()
    by_table: dict[str, list[records.Record]] = {}
    for record in found:
        by_table.setdefault(table_of(record).op, []).append(record)
    for rows in by_table.values():
        screen.print(_table(table_of(rows[0]), rows))
    _print_notes(outcomes)
    if request.out is not None:
        screen.print(f"{len(found)} records appended to {request.out}", soft_wrap=True)
    if request.plot is not None:
        for path in charts.draw(found, request.plot):
            screen.print(f"drew {path}", soft_wrap=True)
    if failed or not found:
        raise typer.Exit(1)


def given_of(context: typer.Context) -> list[str]:
    """The parameters that were written on the command line."""
    names = [parameter.name or "" for parameter in context.command.params]
    sources = ((name, context.get_parameter_source(name)) for name in names)
    return [name for name, source in sources if source is not None and source.name == "COMMANDLINE"]


def _sizes_in(by_hand: str) -> set[str]:
    """The names of the options, except of the dtype, which makes nothing small."""
    return {part[2:] for part in by_hand.split() if part.startswith("--")} - {"dtype"}


def _refuse_contradictions(given: Sequence[str], suite: str) -> None:
    """InvalidInput for options that would be ignored next to the others."""
    extra = ", ".join(f"--{name.replace('_', '-')}" for name in given if name not in BESIDE_A_SUITE)
    if "suite" in given and extra:
        raise InvalidInput(
            f"--suite brings its own cases and kernels; leave out {extra}, or leave out --suite"
        )
    if "only" in given and not suite:
        raise InvalidInput("--only picks entries of a suite; name one with --suite")


def _numbered(entries: Sequence[SuiteRow], only: str | None) -> tuple[SuiteRow, ...]:
    if only is None:
        return tuple(entries)
    numbers = listed("only", only, int)
    for number in numbers:
        if not 1 <= number <= len(entries):
            raise InvalidInput(f"--only {number}: the suite has entries 1 to {len(entries)}")
    return tuple(entries[number - 1] for number in numbers)


def _run(
    entries: Sequence[SuiteRow], peers: Sequence[Peer], device: torch.device, request: Request
) -> tuple[list[Outcome], bool]:
    """Every entry in turn; records are on disk as soon as a case is done. The flag: one failed."""
    outcomes: list[Outcome] = []
    with progress(len(entries), "start") as (say, advance):
        for entry in entries:
            outcome = measured_entry(entry, peers, device, request.rounds, say)
            if outcome is not None:
                outcomes.append(outcome)
                if request.out is not None:
                    records.append(request.out, outcome.records)
            advance()
    return outcomes, len(outcomes) < len(entries)


def measured_entry(
    entry: SuiteRow,
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
        return [*first, record["op"].rsplit("_", 1)[-1], "", "", *blank]
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
