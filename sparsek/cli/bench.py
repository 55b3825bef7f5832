"""`sparsek bench spmm`, `sparsek bench attention`: gate, interleaved rounds, records."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
import typer
from rich.table import Table as Screen

from sparsek.bench import attention as attention_cases
from sparsek.bench import attention_peers, charts, records, spmm_peers
from sparsek.bench import spmm as spmm_cases
from sparsek.bench.attention import parse_lengths, parse_pair
from sparsek.bench.attention_masks import KINDS
from sparsek.bench.case import Case, Entry, parse_block, suite_named
from sparsek.bench.measure import measure
from sparsek.bench.memory import out_of_memory
from sparsek.bench.peer import Peer, peers_named
from sparsek.bench.report import measured_peers
from sparsek.bench.run import GateError, Outcome
from sparsek.bench.tables import TABLES, case_name
from sparsek.cli.output import Commands, complain, console, progress
from sparsek.cli.output import table as new_table
from sparsek.core.errors import InvalidInput
from sparsek.formats.pattern import as_device
from sparsek.formats.random import PATTERNS

Value = TypeVar("Value")
app = typer.Typer(
    cls=Commands, help="Measure, with a correctness gate before any time.", no_args_is_help=True
)

Kernels = Annotated[str, typer.Option("--kernel", help="Kernels by name; auto is the planner's choice.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="bf16, fp16, fp32, fp64.")]
Host = Annotated[bool, typer.Option("--host", help="Time the host side of an eager call instead.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; records want five or more.")]
Only = Annotated[str | None, typer.Option(help="Of a suite, the entries with these numbers (from 1): 1,3,5.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")]
Out = Annotated[Path | None, typer.Option(help="Append the records to this .jsonl file.")]
Plot = Annotated[Path | None, typer.Option(help="Draw charts of what was measured into this folder.")]


def _suite_option(suites: Mapping[str, object]) -> Any:
    return typer.Option("--suite", help=f"A named suite instead of sizes: {', '.join(suites)}.")


def _peers_option(table: Sequence[Peer]) -> Any:
    return typer.Option(help=f"all, none, or some of {', '.join(peer.name for peer in table)}.")


class Asked(NamedTuple):
    """What every kind of benchmark is told beside its cases."""

    peers: tuple[Peer, ...]
    rounds: int
    device: torch.device
    out: Path | None
    plot: Path | None


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
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, _peers_option(spmm_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, _suite_option(spmm_cases.SUITES)] = None,
    only: Only = None,
    host: Host = False,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """BSR x dense against its peers: N(0, 1) data, rotating buffers, interleaved rounds, median, spread."""

    def cases() -> Sequence[Case]:
        return spmm_cases.product(
            _listed("m", m, int),
            _listed("k", k, int),
            _listed("n", n, int),
            _listed("block", block, parse_block),
            _listed("density", density, float),
            _listed("pattern", pattern, str),
            _listed("dtype", dtype, str),
        )

    of_one_case = ("m", "k", "n", "block", "density", "pattern", "dtype", "kernel", "host")
    _refuse_contradictions(_given(context), of_one_case)
    where = _device(device)
    entries = _entries(spmm_cases.SUITES, named, only, cases, kernel, "spmm_host" if host else "spmm")
    _bench("spmm", entries, Asked(_peers(spmm_peers.PEERS, peers, where), rounds, where, out, plot))


@app.command("attention")
def attention(
    context: typer.Context,
    seq: Annotated[
        str, typer.Option(help="Queries and keys: 8K,32768, or 1Kx8K; comma lists give every combination.")
    ] = "8K",
    mask: Annotated[
        str,
        typer.Option(help=f"Masks, with numbers for the letters: {', '.join(kind.form for kind in KINDS)}."),
    ] = "blocks:0.125",
    block: Annotated[str, typer.Option(help="Blocks of the masks: 128,64,64x128.")] = "128",
    heads: Annotated[str, typer.Option(help="Heads of queries, or of queries and keys: 16,32:4.")] = "16",
    dim: Annotated[str, typer.Option(help="Head sizes, or those of keys and values: 64,192:128.")] = "128",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, _peers_option(attention_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, _suite_option(attention_cases.SUITES)] = None,
    only: Only = None,
    host: Host = False,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Attention over the blocks of a mask against its peers: N(0, 1) data, rotating buffers, interleaved rounds."""

    def cases() -> Sequence[Case]:
        return attention_cases.product(
            _listed("batch", batch, int),
            _listed("heads", heads, parse_pair),
            _listed("seq", seq, parse_lengths),
            _listed("dim", dim, parse_pair),
            _listed("mask", mask, str),
            _listed("block", block, parse_block),
            _listed("dtype", dtype, str),
        )

    of_one_case = ("seq", "mask", "block", "heads", "dim", "batch", "dtype", "kernel", "host")
    _refuse_contradictions(_given(context), of_one_case)
    where = _device(device)
    op = "attention_host" if host else "attention"
    entries = _entries(attention_cases.SUITES, named, only, cases, kernel, op)
    _bench("attention", entries, Asked(_peers(attention_peers.PEERS, peers, where), rounds, where, out, plot))


def _device(name: str | None) -> torch.device:
    return as_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _given(context: typer.Context) -> set[str]:
    """The parameters that were written on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _refuse_contradictions(given: set[str], of_one_case: Sequence[str]) -> None:
    """InvalidInput for options that would be ignored next to the others."""
    extra = ", ".join(f"--{name}" for name in of_one_case if name in given)
    if "named" in given and extra:
        raise InvalidInput(
            f"--suite brings its own cases and kernels; leave out {extra}, or leave out --suite"
        )
    if "only" in given and "named" not in given:
        raise InvalidInput("--only picks entries of a suite; name one with --suite")


def _entries(
    suites: Mapping[str, tuple[Entry, ...]],
    named: str | None,
    only: str | None,
    cases: Callable[[], Sequence[Case]],
    kernel: str,
    op: str,
) -> tuple[Entry, ...]:
    """The entries of a suite, or one for each case."""
    if named is not None:
        return _numbered(suite_named(suites, named), only)
    return tuple(Entry(case, tuple(_listed("kernel", kernel, str)), op) for case in cases())


def _peers(table: Sequence[Peer], peers: str, device: torch.device) -> tuple[Peer, ...]:
    names = {"all": None, "none": []}.get(peers.strip(), _listed("peers", peers, str))
    return peers_named(table, names, device)


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


def _bench(op: str, entries: Sequence[Entry], asked: Asked) -> None:
    """Measures, prints what was found, and writes what was asked for. Exits 1 if a case failed or none was measured."""
    outcomes, failed = _run(entries, asked)
    found = [record for outcome in outcomes for record in outcome.records]
    screen = console()
    if found:
        screen.print(_table(op, found))
    _print_notes(outcomes)
    if asked.out is not None:
        screen.print(f"{len(found)} records appended to {asked.out}", soft_wrap=True)
    if asked.plot is not None:
        for path in charts.draw(found, asked.plot):
            screen.print(f"drew {path}", soft_wrap=True)
    if failed or not found:
        raise typer.Exit(1)


def _run(entries: Sequence[Entry], asked: Asked) -> tuple[list[Outcome], bool]:
    """Every entry in turn; records are on disk as soon as a case is done. The flag: one failed."""
    outcomes: list[Outcome] = []
    failed = False
    with progress(len(entries), "start") as (say, advance):
        for entry in entries:
            name = entry.case.name
            try:
                outcome = measure(
                    entry,
                    peers=asked.peers,
                    rounds=asked.rounds,
                    device=asked.device,
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
                if asked.out is not None:
                    records.append(asked.out, outcome.records)
            advance()
    return outcomes, failed


def _table(op: str, found: Sequence[records.Record]) -> Screen:
    of = TABLES[op]
    names = measured_peers(found, of)
    table = new_table(f"{of.title} on {found[0]['env']['gpu']}")
    table.add_column("case", no_wrap=True)
    table.add_column("kernel", no_wrap=True)
    peers = (f"over {of.peers[name]}".replace(".", " ") for name in names)
    for title in ("ms", "min", "max", "useful TFLOPS", "GB/s", "of roof", *peers):
        table.add_column(title, justify="right")
    for record in found:
        table.add_row(*_row(record, names))
    return table


def _row(record: records.Record, names: Sequence[str]) -> list[str]:
    ms: dict[str, Any] = record["ms"]
    first = [case_name(record), record["kernel"], f"{ms['median']:.4g}"]
    first += [f"{ms['min']:.4g}", f"{ms['max']:.4g}"]
    if record["tflops"] is None:
        return [*first, "build" if record["op"] == "mask_build" else "host", "", "", *("" for _ in names)]
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
