"""`sparsek bench all`: every row of README and docs, measured anew where its record is of another source or machine."""

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from sparsek.bench.benches import BENCHES
from sparsek.bench.engine import records
from sparsek.bench.engine.case import suite_named
from sparsek.bench.engine.everything import Row, rows_of, stale_rows, walk
from sparsek.bench.engine.options import listed
from sparsek.bench.engine.peer import first_line, peers_named
from sparsek.cli.bench_run import Device, Rounds, measured_entry
from sparsek.cli.output import complain, console
from sparsek.core import arguments, env
from sparsek.core.device import CARDS, card_of
from sparsek.core.errors import InvalidInput


def everything(
    only: Annotated[str | None, typer.Option(help=f"Only these benchmarks: {', '.join(BENCHES)}.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Fresh rows too.")] = False,
    limit: Annotated[
        float | None, typer.Option(help="Seconds: stop before a row that may not end within them.", min=0)
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="Say which rows are to be measured, and stop.")
    ] = False,
    rounds: Rounds = 5,
    device: Device = None,
    folder: Annotated[
        Path | None, typer.Option("--records", help="Folder of the records; default SPARSEK_RECORDS.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append new records to this .jsonl file instead; what it holds counts as measured."
        ),
    ] = None,
    take: Annotated[
        Path | None,
        typer.Option(help="Put the records of such a file into the folder, and stop.", exists=True),
    ] = None,
) -> None:
    """Measures every published row whose record is not of this source, card and versions; run again, it goes on."""
    home = folder or Path(env.bench_records_dir())
    if take is not None:
        console().print(f"{_sorted_in(records.read(take), home)} records put into {home}", soft_wrap=True)
        return
    names = list(BENCHES) if only is None else listed("only", only, str)
    benches = [suite_named(BENCHES, name, "benchmark") for name in names]
    where = arguments.device("device", device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not listing:
        refuse_cpu(where)
    screen, card = console(), card_of(where).name
    rows = rows_of(benches)
    found = [
        record
        for path in (home / short_name(card), out)
        if path and path.exists()
        for record in records.read(path)
    ]
    todo = rows if again else stale_rows(rows, found, where)
    screen.print(
        f"{len(todo)} of {len(rows)} rows to measure on {card}, records in {out or home}", soft_wrap=True
    )
    if listing:
        for row in todo:
            screen.print(row.name, soft_wrap=True)
        return
    failed: list[str] = []
    missing: dict[str, list[str]] = {}

    def measure(row: Row) -> None:
        peers = peers_named(row.bench.peers, None, where)
        try:
            outcome = measured_entry(row.entry, peers, where, rounds)
        except (
            Exception
        ) as error:  # one row may be wrong in any way; those behind it are measured all the same
            complain(f"{row.name}: {type(error).__name__}: {first_line(error)}")
            outcome = None
        if outcome is None or not outcome.records:
            failed.append(row.name)
        elif out is not None:
            records.append(out, outcome.records)
        else:
            _sorted_in(outcome.records, home)
        for name, reasons in outcome.unavailable.items() if outcome else ():
            missing.setdefault(f"{name} not measured: {'; '.join(reasons)}", []).append(row.name)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # raises where the failure has left no device to go on with
            torch.cuda.empty_cache()

    count = 0
    try:
        for done in walk(todo, measure, limit):
            count += 1
            left = (
                f"{done.rows_left} left, about {done.seconds_left / 60:.1f} min"
                if done.rows_left
                else "none left"
            )
            screen.print(f"{count}/{len(todo)} {done.row.name}: {done.seconds:.1f} s; {left}", soft_wrap=True)
    finally:
        for line, cases in missing.items():
            screen.print(f"{line} ({len(cases)} rows, {cases[0]} first)", style="dim", soft_wrap=True)
        if count < len(todo):
            rest = todo[count:]
            screen.print(f"stopped with {len(rest)} rows left, run again to go on:", soft_wrap=True)
            for row in rest:
                screen.print(f"  {row.name}", soft_wrap=True)
    if failed:
        screen.print(f"{len(failed)} rows gave no record: {', '.join(failed)}", soft_wrap=True)
        raise typer.Exit(1)


def short_name(card: str) -> str:
    """The folder of a card's records: "h200" of "NVIDIA H200"."""
    short = next((name for name, known in CARDS.items() if known.name == card), card)
    return short.lower().replace(" ", "_")


def _sorted_in(found: Iterable[records.Record], home: Path) -> int:
    """Appends each record to the file of its card and benchmark; how many there were."""
    files = {op: bench.file for bench in BENCHES.values() for op in bench.schemas}
    count = 0
    for record in found:
        records.append(home / short_name(record["env"]["gpu"]) / files[record["op"]], [record])
        count += 1
    return count


def refuse_cpu(device: torch.device) -> None:
    """Raises InvalidInput for a device on which the suites would take hours."""
    if device.type == "cpu":
        raise InvalidInput("suites need a GPU; a CPU would take hours. --list says what is to be measured")
