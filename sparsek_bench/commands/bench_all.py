"""`sparsek bench all`: every row of README and docs, measured anew where its record is of another source or machine."""

import gc
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from sparsek.core import env
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import listed, named
from sparsek.core.terminal import AsJson, console, print_json
from sparsek_bench.benches import BENCHES
from sparsek_bench.commands.bench_run import Device, Html, Rounds, device_of, measured, notes_of, write_html
from sparsek_bench.engine import records
from sparsek_bench.engine.bench import BY_OP
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.peer import peers_named
from sparsek_bench.engine.published_rows import stale_rows, walk
from sparsek_bench.engine.run import Outcome


def everything(
    only: Annotated[str | None, typer.Option(help=f"Only these benchmarks: {', '.join(BENCHES)}.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure fresh rows too.")] = False,
    limit: Annotated[
        float | None, typer.Option(help="Seconds: stop before a row that may not end within them.", min=0)
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the rows to measure, and stop.")] = False,
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
        Path | None, typer.Option(help="Put the records of this file into the folder, and stop.", exists=True)
    ] = None,
    html: Html = None,
    json: AsJson = False,
) -> None:
    """Measures every published row whose record is not of this source, card and versions; run again, it goes on.

    --html shows the newest records of all rows on this card, measured now or before.

    --json: {card, records (their folder), to_measure (names of rows), measured (records as of `bench spmm --json`),
    failed: [{case, why}], not_measured: [{name, why, cases}], left (names of rows)}, or with --take {taken, records}.
    """
    home = folder or Path(env.bench_records_dir())
    say = partial(console(stderr=json).print, soft_wrap=True)
    if take is not None:
        taken = records.read(take)
        _sorted_in(taken, home)
        say(f"{len(taken)} records put into {home}")
        if json:
            print_json({"taken": len(taken), "records": home})
        return
    names = list(BENCHES) if only is None else listed("only", only, str)
    benches = [named(BENCHES, name, "benchmark") for name in names]
    where = device_of(device)
    if not listing:
        refuse_cpu(where)
    card = card_of(where).name
    rows = [row for bench in benches for row in bench.rows]
    places = [path for path in (home / records.short_name(card), out) if path]
    found = _read(places)
    todo = rows if again else stale_rows(rows, found, where)
    say(f"{len(todo)} of {len(rows)} rows to measure on {card}, records in {out or home}")
    document = {"card": card, "records": out or home, "to_measure": [row.name for row in todo]}
    if listing:
        for row in () if json else todo:
            say(row.name)
        if json:
            print_json(document)
        write_html(html, found, f"sparsek on {card}")
        return
    outcomes: list[Outcome] = []

    def measure(row: SuiteRow) -> None:
        # One row may fail in any way; those behind it are measured all the same.
        peers = peers_named(BY_OP[row.case.op].peers, None, where)
        outcomes.append(measured(row, peers, where, rounds, any_error=True))
        if out is not None:
            records.append(out, outcomes[-1].records)
        else:
            _sorted_in(outcomes[-1].records, home)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.synchronize(where)  # raises where the failure has left no device to go on with
            torch.cuda.empty_cache()

    count = 0
    try:
        for count, done in enumerate(walk(todo, measure, limit), start=1):
            minutes = f"{done.rows_left} left, about {done.seconds_left / 60:.1f} min"
            left = minutes if done.rows_left else "none left"
            say(f"{count}/{len(todo)} {done.row.name}: {done.seconds:.1f} s; {left}")
    finally:
        _, missing = notes_of(outcomes)
        for each in missing:
            cases = each["cases"]
            line = f"{each['name']} not measured: {each['why']} ({len(cases)} rows, {cases[0]} first)"
            say(line, style="dim")
        rest = [row.name for row in todo[count:]]
        if rest:
            say(f"stopped with {len(rest)} rows left, {rest[0]} first; run again to go on, --list names them")
    failed = [
        {"case": SuiteRow(each.case).name, "why": each.failed or "nothing was measured"}
        for each in outcomes
        if not each.records
    ]
    if json:
        new = [record for outcome in outcomes for record in outcome.records]
        print_json({**document, "measured": new, "failed": failed, "not_measured": missing, "left": rest})
    write_html(html, _read(places), f"sparsek on {card}")
    if failed:
        names = ", ".join(each["case"] for each in failed)
        say(f"{len(failed)} rows gave no record: {names}")
        raise typer.Exit(1)


def _read(places: Iterable[Path]) -> list[records.Record]:
    return [record for path in places if path.exists() for record in records.read(path)]


def _sorted_in(found: Iterable[records.Record], home: Path) -> None:
    """Appends each record to the file of its card and benchmark."""
    for record in found:
        records.append(home / records.short_name(record["env"]["gpu"]) / BY_OP[record["op"]].file, [record])


def refuse_cpu(device: torch.device) -> None:
    """Raises InvalidInput for a device on which the suites would take hours."""
    if device.type == "cpu":
        raise InvalidInput("suites need a GPU; a CPU would take hours. --list shows the rows to measure")
