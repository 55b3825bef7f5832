"""`sparsek bench spmm`: gate, interleaved rounds, records."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.table import Table

from sparsek.bench import charts, records
from sparsek.bench.cases import Case, Entry, parse_block, product, suite
from sparsek.bench.memory import out_of_memory
from sparsek.bench.peer import Peer
from sparsek.bench.peers import PEERS, peers_named
from sparsek.bench.report import PEER_TITLES
from sparsek.bench.run import GateError, Outcome, run_case, run_host
from sparsek.cli.output import Commands, complain, console, progress
from sparsek.cli.output import table as new_table
from sparsek.core.errors import InvalidInput
from sparsek.formats.pattern import as_device
from sparsek.formats.random import PATTERNS

Value = TypeVar("Value")
OF_ONE_CASE = ("m", "k", "n", "block", "density", "pattern", "dtype", "kernel", "host")
app = typer.Typer(
    cls=Commands, help="Measure, with a correctness gate before any time.", no_args_is_help=True
)


@app.callback()
def bench() -> None:
    """Measure, with a correctness gate before any time."""


@app.command("spmm")
def spmm(
    context: typer.Context,
    m: Annotated[str, typer.Option(help="Rows of A; comma lists give every combination.")] = "8192",
    k: Annotated[str, typer.Option(help="Columns of A.")] = "8192",
    n: Annotated[str, typer.Option(help="Columns of B.")] = "8192",
    block: Annotated[str, typer.Option(help="Blocks: 128,64,512x112.")] = "128",
    density: Annotated[str, typer.Option(help="Fraction of blocks that are stored.")] = "0.125",
    pattern: Annotated[str, typer.Option(help=f"{', '.join(PATTERNS)}.")] = "uniform",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64.")] = "bf16",
    kernel: Annotated[str, typer.Option(help="Kernels by name; auto is the planner's choice.")] = "auto",
    peers: Annotated[
        str, typer.Option(help=f"all, none, or some of {', '.join(peer.name for peer in PEERS)}.")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; records want five or more.")] = 7,
    named: Annotated[
        str | None, typer.Option("--suite", help="A named suite instead of sizes: issue2, ragged.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Of a suite, the entries with these numbers (from 1): 1,3,5.")
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Time the host side of an eager call instead.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw charts of what was measured into this folder.")
    ] = None,
) -> None:
    """BSR x dense against its peers: N(0, 1) data, rotating buffers, interleaved rounds, median, spread."""
    where = as_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _refuse_contradictions(_given(context))
    if named is not None:
        entries = _numbered(suite(named), only)
    else:
        cases = product(
            _listed("m", m, int),
            _listed("k", k, int),
            _listed("n", n, int),
            _listed("block", block, parse_block),
            _listed("density", density, float),
            _listed("pattern", pattern, str),
            _listed("dtype", dtype, str),
        )
        entries = tuple(Entry(case, tuple(_listed("kernel", kernel, str)), host) for case in cases)
    names = {"all": None, "none": []}.get(peers.strip(), _listed("peers", peers, str))
    chosen = peers_named(names, where)
    outcomes, failed = _run(entries, chosen, rounds, where, out)
    found = [record for outcome in outcomes for record in outcome.records]
    screen = console()
    if found:
        screen.print(_table(found))
    _print_notes(outcomes)
    if out is not None:
        screen.print(f"{len(found)} records appended to {out}", soft_wrap=True)
    if plot is not None:
        for path in charts.draw(found, plot):
            screen.print(f"drew {path}", soft_wrap=True)
    if failed or not found:
        raise typer.Exit(1)


def _given(context: typer.Context) -> set[str]:
    """The parameters that were written on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _refuse_contradictions(given: set[str]) -> None:
    """InvalidInput for options that would be ignored next to the others."""
    extra = ", ".join(f"--{name}" for name in OF_ONE_CASE if name in given)
    if "named" in given and extra:
        raise InvalidInput(
            f"--suite brings its own cases and kernels; leave out {extra}, or leave out --suite"
        )
    if "only" in given and "named" not in given:
        raise InvalidInput("--only picks entries of a suite; name one with --suite")


def _listed(name: str, text: str, parse: Callable[[str], Value]) -> list[Value]:
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"--{name} {text!r}: {error}") from None


def _numbered(entries: Sequence[Entry], only: str | None) -> tuple[Entry, ...]:
    if only is None:
        return tuple(entries)
    numbers = _listed("only", only, int)
    for number in numbers:
        if not 1 <= number <= len(entries):
            raise InvalidInput(f"--only {number}: the suite has entries 1 to {len(entries)}")
    return tuple(entries[number - 1] for number in numbers)


def _run(
    entries: Sequence[Entry], peers: Sequence[Peer], rounds: int, device: torch.device, out: Path | None
) -> tuple[list[Outcome], bool]:
    """Every entry in turn; records are on disk as soon as a case is done. The flag: one failed."""
    outcomes: list[Outcome] = []
    failed = False
    with progress(len(entries), "start") as (say, advance):
        for entry in entries:
            name = entry.case.name
            try:
                if entry.host:
                    say(f"{name}: host time")
                    outcome = run_host(entry.case, kernels=entry.kernels, device=device, rounds=rounds)
                else:
                    outcome = run_case(
                        entry.case,
                        kernels=entry.kernels,
                        peers=peers,
                        rounds=rounds,
                        device=device,
                        report=lambda text, name=name: say(f"{name}: {text}"),
                    )
            except (GateError, MemoryError, RuntimeError) as error:
                why = str(error) if isinstance(error, GateError) else out_of_memory(error)
                if why is None:
                    raise
                complain(f"{name}: {why}")
                failed = True
            else:
                outcomes.append(outcome)
                if out is not None:
                    records.append(out, outcome.records)
            advance()
    return outcomes, failed


def _table(found: Sequence[records.Record]) -> Table:
    names = [name for name in PEER_TITLES if any(name in record["ratio"] for record in found)]
    table = new_table(f"BSR x dense on {found[0]['env']['gpu']}")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    peers = (f"over {PEER_TITLES[name]}".replace(".", " ") for name in names)
    for title in ("ms", "min", "max", "useful TFLOPS", "GB/s", "of roof", *peers):
        table.add_column(title, justify="right")
    for record in found:
        table.add_row(*_row(record, names))
    return table


def _row(record: records.Record, names: Sequence[str]) -> list[str]:
    ms: dict[str, Any] = record["ms"]
    first = [Case.from_record(record["case"]).name, record["kernel"], f"{ms['median']:.4g}"]
    first += [f"{ms['min']:.4g}", f"{ms['max']:.4g}"]
    if record["op"] in records.HOST_OPS:
        return [*first, "host", "", "", *("" for _ in names)]
    rates = [
        f"{record['tflops']['useful']:.3g}",
        f"{record['gbps']:.4g}",
        f"{record['roofline']['fraction']:.0%}",
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
        console().print(f"{line} ({where})", soft_wrap=True, style="dim")
