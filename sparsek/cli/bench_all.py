"""`sparsek bench all`: every row of README and docs, measured anew where its record is of another source or machine."""

import gc
from pathlib import Path
from typing import Annotated

import torch
import typer

from sparsek.bench.engine import records
from sparsek.bench.engine.benches import BENCHES
from sparsek.bench.engine.everything import Row, rows_of, stale_rows, walk
from sparsek.bench.peers.peer import peers_named
from sparsek.bench.suites.case import listed, suite_named
from sparsek.cli.bench_run import Device, Rounds, measured_entry
from sparsek.cli.output import console
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
    rounds: Rounds = 7,
    device: Device = None,
    folder: Annotated[
        Path | None, typer.Option("--records", help="Folder of the records; default SPARSEK_RECORDS.")
    ] = None,
) -> None:
    """Measures every published row whose record is not of this source, card and versions; run again, it goes on."""
    names = list(BENCHES) if only is None else listed("only", only, str)
    benches = [suite_named(BENCHES, name, "benchmark") for name in names]
    where = arguments.device("device", device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if not listing:
        refuse_cpu(where)
    card = card_of(where)
    short = next((name for name, known in CARDS.items() if known.name == card.name), card.name)
    home = (folder or Path(env.bench_records_dir())) / short.lower().replace(" ", "_")
    rows = rows_of(benches)
    found = records.read(home) if home.is_dir() else []
    todo = rows if again else stale_rows(rows, found, where)
    screen = console()
    screen.print(
        f"{len(todo)} of {len(rows)} rows to measure on {card.name}, records in {home}", soft_wrap=True
    )
    if listing:
        for row in todo:
            screen.print(row.name, soft_wrap=True)
        return
    failed: list[Row] = []

    def measure(row: Row) -> None:
        peers = peers_named(row.bench.peers, None, where)
        outcome = measured_entry(row.entry, peers, where, rounds)
        if outcome is None or not outcome.records:
            failed.append(row)
        else:
            records.append(home / row.bench.file, outcome.records)
        for name, reasons in outcome.unavailable.items() if outcome else ():
            screen.print(f"  {name} not measured: {'; '.join(reasons)}", style="dim", soft_wrap=True)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()

    count = 0
    for done in walk(todo, measure, limit):
        count += 1
        left = (
            f"{done.rows_left} left, about {done.seconds_left / 60:.1f} min"
            if done.rows_left
            else "none left"
        )
        screen.print(f"{count}/{len(todo)} {done.row.name}: {done.seconds:.1f} s; {left}", soft_wrap=True)
    if count < len(todo):
        rest = todo[count:]
        screen.print(f"stopped before the limit of {limit:g} s; {len(rest)} rows left, run again to go on:")
        for row in rest:
            screen.print(f"  {row.name}", soft_wrap=True)
    if failed:
        screen.print(
            f"{len(failed)} rows gave no record: {', '.join(row.name for row in failed)}", soft_wrap=True
        )
        raise typer.Exit(1)


def refuse_cpu(device: torch.device) -> None:
    """Raises InvalidInput for a device on which the suites would take hours."""
    if device.type == "cpu":
        raise InvalidInput("suites need a GPU; a CPU would take hours. --list says what is to be measured")
