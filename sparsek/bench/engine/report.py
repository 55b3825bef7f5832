"""Tables and charts, made from records and from nothing else.

The table of an operation stands between `<!-- records:spmm -->` and `<!-- /records -->` in its pages, as README.md and
docs/spmm.md; `sparsek report --write` puts it there, and a test compares it with the records. A row whose kernel has
changed since is marked.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsek.bench.engine import records
from sparsek.bench.engine.bench import FILES, OPS, TABLES, Column, Record, Table, table_of
from sparsek.bench.engine.case import Case
from sparsek.bench.engine.sensors import FIELDS
from sparsek.core.errors import InvalidFile

BEGIN = "<!-- records:{op} -->"
END = "<!-- /records -->"


def pages() -> list[tuple[str, str]]:
    """Which operation's table stands on which page."""
    return [(page, op) for op, table in TABLES.items() for page in table.pages]


def ordered(found: Iterable[Record], table: Table) -> list[Record]:
    """Newest record per (case, kernel) of one operation: its suite's cases in their order, then the others by size."""
    place: dict[Case, int] = {}
    for index, entry in enumerate(table.suite):
        place.setdefault(entry.case, index)

    def key(record: Record) -> tuple[Any, ...]:
        case = records.case_of(record)
        where = place.get(case, len(place))
        return record["op"], where, case.order, record["env"]["gpu"], record["kernel"]

    return sorted(records.newest(record for record in found if table_of(record) is table), key=key)


def measured(found: Iterable[Record]) -> list[str]:
    """The operations that have records, all of them if none has."""
    there = {table_of(record).op for record in found}
    return [op for op in TABLES if op in there or not there]


def measured_peers(rows: Sequence[Record], table: Table) -> list[str]:
    """The peers whose ratios a table shows and that any of the rows has, in the table's order."""
    shown = table.peers if table.ratios else {}
    return [name for name in shown if any(name in record["ratio"] for record in rows)]


def markdown(found: Sequence[Record], op: str) -> str:
    """The table of an operation as Markdown, without the markers. Says so when there are no records."""
    table = TABLES[op]
    rows = ordered(found, table)
    device_rows = [record for record in rows if record["op"] == op]
    if not device_rows:
        return f"No records yet: run `sparsek bench {table.command}` on an H200."
    columns = [*table.columns, *(_ratio(name, table) for name in measured_peers(device_rows, table))]
    lines = [
        _line(column.heading for column in columns),
        _line(["---", "---", *["---:"] * (len(columns) - 2)]),
    ]
    lines += [_line(column.cell(record) for column in columns) for record in device_rows]
    for record in rows:
        if record["op"] != op:
            lines += ["", _below(record)]
    lines += ["", caption(device_rows, table)]
    return "\n".join(lines)


def _below(record: Record) -> str:
    """What a record without a row says under the table."""
    say = OPS[record["op"]].below
    assert say is not None
    return say(record)


def _ratio(name: str, table: Table) -> Column:
    def cell(record: Record) -> str:
        return f"{record['ratio'][name]:.2f}" if name in record["ratio"] else ""

    return Column(f"over {table.peers[name]}", cell)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def caption(rows: Sequence[Record], table: Table) -> str:
    """What the numbers were taken on, and what a ratio means."""
    settings = sorted({_setting(record) for record in rows})
    dates = sorted(record["date"][:10] for record in rows)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    rounds = sorted({record["ms"]["rounds"] for record in rows})
    return (
        f"{'; '.join(settings)}; {span}; median of {' or '.join(map(str, rounds))} interleaved rounds. "
        f"{_sensed(rows)}{table.note}"
    )


def _sensed(rows: Sequence[Record]) -> str:
    """What power and clock the rows were measured at, of those that say it."""
    parts = []
    for field, what, unit in zip(FIELDS, ("Mean power", "SM clock"), ("W", "MHz"), strict=True):
        found = [record["env"][field] for record in rows if record["env"].get(field) is not None]
        if found:
            least, most = round(min(found)), round(max(found))
            parts.append(f"{what} {least}{f' to {most}' if most > least else ''} {unit}")
    return f"{', '.join(parts)}. " if parts else ""


def _setting(record: Record) -> str:
    env = record["env"]
    parts = [env["gpu"]]
    if env["power_limit_w"]:
        parts.append(f"{env['power_limit_w']:.0f} W")
    if env["driver"]:
        parts.append(f"driver {env['driver']}")
    parts += [f"{name} {env[name]}" for name in ("torch", "triton") if env[name]]
    return ", ".join(parts)


def section(page: str, op: str, path: str = "page") -> tuple[int, int]:
    """Start and end of the text between the markers. Raises InvalidFile unless they are there once."""
    begin = BEGIN.format(op=op)
    if page.count(begin) != 1:
        raise InvalidFile(f"{path}: expected the marker {begin} once, found it {page.count(begin)} times")
    start = page.index(begin) + len(begin)
    stop = page.find(END, start)
    if stop < 0:
        raise InvalidFile(f"{path}: the marker {begin} has no {END} after it")
    return start, stop


def replaced(page: str, table: str, op: str, path: str = "page") -> str:
    """`page` with `table` between the markers of the operation."""
    start, stop = section(page, op, path)
    return f"{page[:start]}\n{table}\n{page[stop:]}"


def write(root: Path, found: Sequence[Record], on: Iterable[tuple[str, str]] | None = None) -> list[Path]:
    """Puts each operation's table into its pages under `root`, all unless given `on` which, and writes the files that
    are made of records; returns what changed.
    """
    on = pages() if on is None else list(on)
    before = {name: _text(root / name) for name, _ in on}
    after = dict(before)
    for name, op in on:
        after[name] = replaced(after[name], markdown(found, op), op, str(root / name))
    for name, made in _files(found):
        before[name], after[name] = _text(root / name), made
    changed = [name for name in after if after[name] != before[name]]
    for name in changed:
        (root / name).write_text(after[name], encoding="utf-8")
    return [root / name for name in changed]


def _files(found: Sequence[Record]) -> list[tuple[str, str]]:
    """Path and text of the files that are made of records, of those that have any."""
    made = ((name, make(found)) for name, make in FILES.items())
    return [(name, text) for name, text in made if text]


def stale(root: Path, found: Sequence[Record], on: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """What differs between the pages and the records, one line each; [] means they agree."""
    wrong = [
        f"{name} differs from the records, run `make readme`"
        for name, made in _files(found)
        if _text(root / name) != made
    ]
    for name, op in pages() if on is None else on:
        page, table = _text(root / name), markdown(found, op)
        start, stop = section(page, op, name)
        shown = page[start:stop].strip()
        if shown != table:
            old, new = shown.splitlines(), table.splitlines()
            differing = next(
                (line for line in new if line not in old), f"{len(old)} lines instead of {len(new)}"
            )
            wrong.append(
                f"{name}: table of {op} differs from the records, run `make readme`; first difference: {differing}"
            )
    return wrong


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidFile(f"{path}: cannot be read: {error.strerror}") from None
