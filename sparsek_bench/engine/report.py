"""Tables as Markdown, made from records and from nothing else. A row whose kernel has changed since is marked."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sparsek_bench.engine import records
from sparsek_bench.engine.bench import OPS, TABLES, Column, Record, Table, table_of
from sparsek_bench.engine.sensors import FIELDS
from sparsek_bench.engine.tables import over


def ordered(found: Iterable[Record], table: Table) -> list[Record]:
    """Newest record per (case, kernel) of one operation: its suite's cases in their order, then the others by size."""
    place = {row.case: index for index, row in enumerate(table.suite)}

    def key(record: Record) -> tuple[Any, ...]:
        case, card = records.case_of(record), record["env"]["gpu"]
        return record["op"], place.get(case, len(place)), case.order, card, record["kernel"]

    return sorted(records.newest(record for record in found if table_of(record) is table), key=key)


def of_one_card(rows: Iterable[Record]) -> list[Record]:
    """The rows of the card that was measured last, by the median of its days. A card with less than half as many rows
    as another was not measured whole, and does not count.
    """
    by_card: dict[str, list[Record]] = defaultdict(list)
    for record in rows:
        by_card[record["env"]["gpu"]].append(record)
    most = max(map(len, by_card.values()), default=0)
    whole = (each for each in by_card.values() if 2 * len(each) >= most)
    return max(whole, key=lambda each: sorted(record["date"] for record in each)[len(each) // 2], default=[])


def measured(found: Iterable[Record]) -> list[str]:
    """The operations that have records, in the order of the tables."""
    there = {table_of(record).op for record in found}
    return [op for op in TABLES if op in there]


def measured_peers(rows: Sequence[Record], table: Table) -> list[str]:
    """The peers that a screen shows: those that any of the rows has, in the table's order."""
    shown = table.peers if table.ratios else {}
    return [name for name in shown if any(name in record["ratio"] for record in rows)]


def markdown(found: Sequence[Record], op: str) -> str:
    """The table of an operation as Markdown, with its caption below. Without records, the command that makes them."""
    table = TABLES[op]
    rows = of_one_card(ordered(found, table))
    device_rows = [record for record in rows if record["op"] == op]
    if not device_rows:
        return f"No record of today's code: run `sparsek bench {table.command}` on an H200."
    beside = [name for name in table.beside if any(name in record["ratio"] for record in device_rows)]
    columns = [*table.columns, *(over(name, table) for name in beside)]
    lines = [
        line(column.heading for column in columns),
        line("---" if column.text else "---:" for column in columns),
    ]
    lines += [line(column.cell(record) for column in columns) for record in device_rows]
    for text in filter(None, (OPS[record["op"]].below(record) for record in rows)):
        lines += ["", text]
    lines += ["", caption(device_rows, table)]
    return "\n".join(lines)


def line(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def caption(rows: Sequence[Record], table: Table) -> str:
    """What the numbers of a table mean, and what they were measured on."""
    usual = f" Unless a row differs: {', '.join(table.usual)}." if table.usual else ""
    return f"{table.note}{usual} {measured_on(rows, *table.columns)}"


def measured_on(rows: Sequence[Record], *columns: Column) -> str:
    """Card, versions, days, rounds, power and clock of records, and what ± means where one of the columns shows it."""
    settings = "; ".join(sorted({_setting(record) for record in rows}))
    rounds = " or ".join(map(str, sorted({record["ms"]["rounds"] for record in rows})))
    spread = " ± half of their range" if any("±" in column.cell(rows[0]) for column in columns) else ""
    return f"{settings}; {dates(rows)}; median of {rounds} interleaved rounds{spread}.{_sensed(rows)}"


def dates(rows: Sequence[Record]) -> str:
    """The first and the last day of the records."""
    found = sorted(record["date"][:10] for record in rows)
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _sensed(rows: Sequence[Record]) -> str:
    """Power and clock of the rows that have them."""
    parts = []
    for field, what, unit in zip(FIELDS, ("Mean power", "SM clock"), ("W", "MHz"), strict=True):
        found = [record["env"][field] for record in rows if record["env"].get(field) is not None]
        if found:
            least, most = round(min(found)), round(max(found))
            parts.append(f"{what} {least}{f' to {most}' if most > least else ''} {unit}")
    return f" {', '.join(parts)}." if parts else ""


def _setting(record: Record) -> str:
    env = record["env"]
    watts = [f"{env['power_limit_w']:.0f} W"] if env["power_limit_w"] else []
    versions = (f"{name} {env[name]}" for name in ("driver", "torch", "triton") if env[name])
    return ", ".join([env["gpu"], *watts, *versions])
