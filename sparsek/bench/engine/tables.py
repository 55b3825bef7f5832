"""What tables show of a record: the columns that several operations have."""

from collections.abc import Callable, Mapping, Sequence

from sparsek.bench.engine import records
from sparsek.bench.engine.bench import Column, Record, table_of
from sparsek.bench.engine.case import Bar, Case

EARLIER = "earlier version"
USEFUL_NOTE = (
    "Useful TFLOPS count stored blocks only. A ratio is this library's useful rate over the peer's rate in "
    "the same rounds: useful FLOPs for sparse peers, dense FLOPs on dense random data for dense ones."
)


def mark(record: Record) -> str:
    """Says so if the kernel has changed since."""
    return "" if records.is_fresh(record) else f" ({EARLIER})"


def case_name(record: Record) -> str:
    """The name of the record's case."""
    return records.case_of(record).name


def _time(record: Record) -> str:
    ms = record["ms"]
    return f"{ms['median']:.3f} ({ms['min']:.3f} to {ms['max']:.3f})"


def useful(record: Record) -> str:
    rate = record["tflops"]["useful"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def number(field: str, show: Callable[[float], str]) -> Callable[[Record], str]:
    """A number of the record as `show` writes it; nothing for null."""
    return lambda record: "" if record[field] is None else show(record[field])


def _speedup(record: Record) -> str:
    """Time of the dense peer over the kernel's, from the same rounds."""
    for name in table_of(record).dense:
        if name in record["peers"]:
            return f"{record['peers'][name]['ms']['median'] / record['ms']['median']:.2f}x"
    return ""


def must_reach(bars: Mapping[Case, Sequence[Bar]], kernels: str = "hopper.") -> Column:
    """What `kernels`, the start of their names, must reach beside peers: "cuBLAS 1.45 (aim 1.7): met"."""

    def cell(record: Record) -> str:
        if not record["kernel"].startswith(kernels):
            return ""
        names = table_of(record).peers
        parts = [
            f"{names[bar.peer]} {bar.must:g} (aim {bar.aim:g}): {bar.verdict(record['ratio'][bar.peer])}"
            for bar in bars.get(records.case_of(record), ())
            if bar.peer in record["ratio"]
        ]
        return "; ".join(parts)

    return Column("must reach", cell)


CASE = Column("case", case_name)
KERNEL = Column("kernel", lambda record: f"{record['kernel']}{mark(record)}")
MS = Column("ms (min to max)", _time)
SPEEDUP = Column("speedup over dense", _speedup)
USEFUL = Column("useful TFLOPS", useful)
GBPS = Column("GB/s", lambda record: f"{record['gbps']:.0f}")
ROOF = Column("of the roofline", lambda record: f"{record['roofline']['fraction'] * 100:.0f} %")
