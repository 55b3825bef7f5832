"""`sparsek bench NAME`: the options of its cases and those that all benchmarks have; measures, prints, writes records,
charts and a page.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table as Screen

from sparsek.core import arguments, files
from sparsek.core.errors import InvalidInput
from sparsek.core.memory import out_of_memory
from sparsek.core.parsing import listed, named, unknown
from sparsek.core.terminal import AsJson, complain, console, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek_bench import charts
from sparsek_bench.benches import HELP
from sparsek_bench.commands.kernel_names import kernel_named, kernels_of
from sparsek_bench.engine import html, records
from sparsek_bench.engine.bench import Bench, Column, Table, table_of
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.options import CommandOption
from sparsek_bench.engine.peer import Peer, first_line, peers_named
from sparsek_bench.engine.report import measured_peers
from sparsek_bench.engine.run import GateError, Outcome, measure
from sparsek_bench.engine.tables import CASE, MS, OVER_NOTE, case_name, over

Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; records want five or more.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")]
Html = Annotated[
    Path | None, typer.Option(help="Write the results as one HTML file: pictures, tables, environment.")
]
# Parameters that go with a suite too; the others describe cases.
BESIDE_A_SUITE = ("peers", "rounds", "suite", "device", "out", "html", "json")
SCHEMA = """
--json: {benchmark, records: [{op, case, kernel, config, ms: {median, min, max, rounds}, tflops, gbps, roofline, gate,
peers, ratio, env, source_hash, date}], failed: [{case, why}], not_measured: [{name, why, cases}], notes: [{name, note,
cases}]}. Exit code 1 if a case failed or nothing was measured.
"""


def command(one: Bench) -> Callable[..., None]:
    """The function of a benchmark's command."""
    peers = f"all, none, or some of {', '.join(peer.name for peer in one.peers)}."
    suites = f"A named suite instead of sizes: {', '.join(one.suites)}."
    more: dict[str, tuple[Any, Any]] = {
        name: (each.annotation, each.default)
        for name, each in inspect.signature(bench).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    more |= {
        "kernel": (Annotated[str, typer.Option(help=one.kernels)], "auto"),
        "peers": (Annotated[str, typer.Option(help=peers)], "all"),
        "rounds": (Rounds, one.rounds),
        "suite": (Annotated[str | None, typer.Option(help=suites)], None),
    }
    without = {"kernel": not one.kernels, "peers": not one.peers}
    more = {name: each for name, each in more.items() if not without.get(name)}
    run = partial(bench, one)
    run.__doc__ = f"{HELP[one.name]}\n{SCHEMA}"
    return with_case_options(one.options, run, more)


def with_case_options(
    options: Sequence[CommandOption], run: Callable[..., None], more: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """A function of these options of cases, and of `more`: types and defaults by name, as typer reads them. It calls
    `run(context, cases, **more)` with the values of the options by name.
    """
    named = {option.name.replace("-", "_"): option for option in options}
    parameters = {"context": _parameter("context", typer.Context, inspect.Parameter.empty)}
    for name, option in named.items():
        written = f"--{option.name}" + (f"/--{option.off}" if option.off else "")
        kind = Annotated[type(option.default), typer.Option(written, help=option.help)]
        parameters[name] = _parameter(name, kind, option.default)
    parameters |= {name: _parameter(name, *each) for name, each in more.items()}

    def called(**given: Any) -> None:
        context = given.pop("context")
        run(context, {option.name: given.pop(name) for name, option in named.items()}, **given)

    called.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    called.__doc__ = run.__doc__
    vars(called)["__signature__"] = inspect.Signature(list(parameters.values()))
    return called


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def bench(
    one: Bench,
    context: typer.Context,
    cases: Mapping[str, str | bool],
    *,
    kernel: str = "auto",
    peers: str = "none",
    rounds: int,
    suite: str | None,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")] = None,
    html: Html = None,
    json: AsJson = False,
) -> None:
    """Measures a suite, or the cases that the options give, prints the results, and writes the wanted files.

    Exits 1 if a case failed or none was measured. A CPU is refused where it would take hours.
    """
    given = given_of(context)
    of_cases = [name for name in given if name not in BESIDE_A_SUITE]
    if "suite" in given and of_cases:
        extra = ", ".join(f"--{name.replace('_', '-')}" for name in of_cases)
        raise InvalidInput(
            f"--suite brings its own cases and kernels; leave out {extra}, or leave out --suite"
        )
    suite = suite or ("" if of_cases else one.whole)
    where = device_of(device)
    kernels = tuple(listed("kernel", kernel, str))
    rows = named(one.suites, suite) if suite else [SuiteRow(case, kernels) for case in one.cases(cases)]
    for name in kernels:
        if name != "auto" and kernel_named(name, (*kernels_of(one.name),)) is None:
            raise unknown("kernel", name, kernels_of(one.name))
    names = {"all": None, "none": []}.get(peers.strip(), listed("peers", peers, str))
    chosen = peers_named(one.peers, names, where)
    # The dtype of the small sizes makes nothing small.
    sizes = {part[2:].replace("-", "_") for part in one.small.split() if part.startswith("--")} - {"dtype"}
    if where.type == "cpu" and one.small and not sizes.intersection(given):
        why = f"suite {suite} needs a GPU" if suite else "sizes by default are a GPU's"
        raise InvalidInput(f"{why}; a CPU would take hours. Give sizes by hand: {one.small}")
    outcomes: list[Outcome] = []
    with progress(len(rows), "start", watch=False) as (say, advance):
        for row in rows:
            outcomes.append(measured(row, chosen, where, rounds, say))
            if out is not None:
                records.append(out, outcomes[-1].records)
            advance()
    found = [record for outcome in outcomes for record in outcome.records]
    failed = [{"case": each.case.name, "why": each.failed} for each in outcomes if each.failed]
    notes, missing = notes_of(outcomes)
    screen = console(stderr=json)
    if json:
        document = {"benchmark": one.name, "records": found, "failed": failed}
        print_json({**document, "not_measured": missing, "notes": notes})
    else:
        tables = {table_of(record).op: table_of(record) for record in found}
        for table in tables.values():
            screen.print(_table(table, [record for record in found if table_of(record) is table]))
        if any(measured_peers(found, table) for table in tables.values()):
            screen.print(OVER_NOTE, style="dim")
        for note in (*notes, *missing):
            everywhere = len(note["cases"]) == len(outcomes) - len(failed)
            named_cases = "every case" if everywhere else ", ".join(note["cases"])
            text = f": {note['note']}" if "note" in note else f" not measured: {note['why']}"
            screen.print(f"{note['name']}{text} ({named_cases})", style="dim")
    if out is not None:
        screen.print(f"{len(found)} records appended to {out}", soft_wrap=True)
    write_html(html, found, f"sparsek bench {one.name}")
    if failed or not found:
        raise typer.Exit(1)


def write_html(path: Path | None, found: Sequence[records.Record], title: str) -> None:
    """The records as one HTML file, if a path is given."""
    if path is None:
        return
    with files.replacing(path) as file:
        file.write(html.page(found, charts.pictures(found), title).encode())
    console(stderr=True).print(f"wrote {path}", soft_wrap=True)


def device_of(named: str | None) -> torch.device:
    """The device of that name; the GPU, if there is one, for None."""
    return arguments.device("device", named or ("cuda" if torch.cuda.is_available() else "cpu"))


def given_of(context: typer.Context) -> list[str]:
    """The parameters that were written on the command line."""
    sources = ((each.name, context.get_parameter_source(each.name or "")) for each in context.command.params)
    return [name for name, source in sources if name and source and source.name == "COMMANDLINE"]


def measured(
    row: SuiteRow,
    peers: Sequence[Peer],
    device: torch.device,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
    *,
    any_error: bool = False,
) -> Outcome:
    """The outcome of a row. It has failed, which is printed too, where the result is wrong, memory cannot hold it, or,
    with `any_error`, for whatever it raised.
    """
    name = row.case.name
    try:
        return measure(
            row, peers=peers, rounds=rounds, device=device, report=lambda text: say(f"{name}: {text}")
        )
    except Exception as error:
        why = str(error) if isinstance(error, GateError) else out_of_memory(error)
        if why is None and not any_error:
            raise
        why = why or f"{type(error).__name__}: {first_line(error)}"
        complain(f"{name}: {why}")
        return Outcome(row.case, (), {}, {}, why)


def _table(of: Table, found: Sequence[records.Record]) -> Screen:
    table = new_table(f"{of.title} on {found[0]['env']['gpu']}")
    for at, column in enumerate(columns := list(_columns(of, found))):
        table.add_column(column.heading, justify="left" if column.text else "right", no_wrap=at < 3)
    for record in found:
        table.add_row(*(column.cell(record) for column in columns))
    return table


def _columns(of: Table, found: Sequence[records.Record]) -> Iterator[Column]:
    """Those of a screen: the page's, with the kernel, and with every peer that was measured."""

    def name(record: records.Record) -> str:
        return case_name(record) + ("" if record["op"] == of.op else f" ({record['op']})")

    yield Column("case", name, text=True)
    yield Column("kernel", lambda record: record["kernel"], text=True)
    for column in of.columns:
        if column is MS:
            yield MS
        elif column is not CASE:  # the others are of the table's own records
            cell = lambda record, column=column: column.cell(record) if record["op"] == of.op else ""  # noqa: E731
            yield Column(column.heading, cell, column.text)
    for peer in measured_peers(found, of):
        column = over(peer, of)
        yield Column(column.heading.replace(".", " "), column.cell)


Note = dict[str, Any]


def notes_of(outcomes: Sequence[Outcome]) -> tuple[list[Note], list[Note]]:
    """Settings of peers, and who was left out and why: each thing once, with the cases that it holds for."""
    notes = ((each, name, note) for each in outcomes for name, note in each.notes.items())
    missing = ((each, name, "; ".join(why)) for each in outcomes for name, why in each.unavailable.items())
    return _by_text("note", notes), _by_text("why", missing)


def _by_text(field: str, found: Iterable[tuple[Outcome, str, str]]) -> list[Note]:
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for outcome, *key in found:
        cases[key[0], key[1]].append(outcome.case.name)
    return [{"name": name, field: text, "cases": names} for (name, text), names in cases.items()]
