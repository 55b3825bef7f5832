"""What tables show of a record: the columns that several operations have."""

from collections.abc import Callable, Mapping, Sequence

from sparsek_bench.engine import records
from sparsek_bench.engine.bench import Column, Record, Table, table_of
from sparsek_bench.engine.case import Bar, Case

OVER_NOTE = "Over a peer: 1.50 means 1.5 times as fast."
USEFUL_NOTE = "Useful TFLOPS count stored blocks only."


def mark(record: Record) -> str:
    """A mark if the kernel has changed since."""
    return "" if records.is_fresh(record) else " (earlier version)"


def case_name(record: Record) -> str:
    """The name of the record's case."""
    return records.case_of(record).name


def short_name(record: Record) -> str:
    """The name of the case without the words that are usual in its table."""
    name = case_name(record)
    for word in table_of(record).usual:
        name = name.replace(f", {word}", "", 1).replace(f" {word}", "", 1)
    return name


def _row_name(record: Record) -> str:
    """The short name, the kernel where the table names it, and the mark."""
    kernels = table_of(record).kernels
    kernel = "" if kernels is None or record["kernel"] in kernels else f", {record['kernel']}"
    return f"{short_name(record)}{kernel}{mark(record)}"


def _time(record: Record) -> str:
    ms = record["ms"]
    return f"{ms['median']:.3f} ± {(ms['max'] - ms['min']) / 2:.3f}"


def useful(record: Record) -> str:
    rate = record["tflops"]["useful"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def roof(record: Record) -> str:
    """The share of the roofline: "87 %"."""
    return f"{record['roofline']['fraction'] * 100:.0f} %"


def peer_ms(record: Record, *names: str) -> float | None:
    """Milliseconds of the first of these peers that was measured, from the rounds of the kernel."""
    return next((record["peers"][name]["ms"]["median"] for name in names if name in record["peers"]), None)


def faster_than(*peers: str) -> Callable[[Record], str]:
    """Time of the first of these peers that was measured over the kernel's: "7.67x"."""

    def cell(record: Record) -> str:
        ms = peer_ms(record, *peers)
        return "" if ms is None else f"{ms / record['ms']['median']:.2f}x"

    return cell


def over(peer: str, table: Table) -> Column:
    """The time of a peer over the kernel's, from the same rounds: "1.30"."""
    cell = faster_than(peer)
    return Column(f"over {table.peers[peer]}", lambda record: cell(record)[:-1])


def judged(bar: Bar, ratio: float) -> tuple[str, str]:
    """The verdict on a ratio, and the ratio with two digits, or with three where two would look like the bar."""
    verdict = bar.verdict(ratio)
    digits = 3 if verdict == "missed" and round(ratio, 2) == bar.must else 2
    return verdict, f"{ratio:.{digits}f}"


def target(bars: Mapping[Case, Sequence[Bar]], kernels: str = "hopper.") -> Column:
    """The ratios to peers that `kernels`, the start of their names, must reach: "1.45 over cuBLAS, met: 1.59"; of
    limits from above, times over the peer's: "at most 1.1 of a kept mask, met: 1.02".
    """

    def cell(record: Record) -> str:
        if not record["kernel"].startswith(kernels):
            return ""
        names, parts = table_of(record).peers, []
        for bar in bars.get(records.case_of(record), ()):
            if bar.peer in record["ratio"]:
                limit, ratio = bar.aim < bar.must, record["ratio"][bar.peer]
                verdict, shown = judged(bar, 1 / ratio if limit else ratio)
                words = f"at most {bar.must:g} of" if limit else f"{bar.must:g} over"
                parts.append(f"{words} {names[bar.peer]}, {verdict}: {shown}")
        return "; ".join(parts)

    return Column("target", cell, text=True)


CASE = Column("case", _row_name, text=True)
MS = Column("ms", _time)
SPEEDUP = Column("speedup over dense", lambda record: faster_than(*table_of(record).dense)(record))
USEFUL = Column("useful TFLOPS", useful)
GBPS = Column("GB/s", lambda record: f"{record['gbps']:.0f}")
ROOF = Column("of the roofline", roof)
# Both in one column, where several peers stand beside.
RATE = Column("useful TFLOPS (of the roofline)", lambda record: f"{useful(record)} ({roof(record)})")
