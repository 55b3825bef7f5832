"""Tables and charts, made from records and from nothing else.

The table stands between `<!-- records:spmm -->` and `<!-- /records -->` in README.md and docs/spmm.md;
`sparsek report --write` puts it there, and a test compares it with the records. A row whose kernel has
changed since is marked.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsek.bench import records
from sparsek.bench.cases import ISSUE2, Case
from sparsek.bench.records import Record
from sparsek.core.errors import InvalidFile

BEGIN = "<!-- records:{op} -->"
END = "<!-- /records -->"
EARLIER = "earlier version"
PAGES = ("README.md", "docs/spmm.md")
PEER_TITLES = {
    "cublas": "cuBLAS",
    "torch_sparse": "torch.sparse",
    "torch_sparse_stages": "torch.sparse, stages",
    "cusparse": "cuSPARSE",
    "torch_dense": "torch dense",
}
HEADINGS = (
    "case",
    "kernel",
    "ms (min to max)",
    "speedup over dense",
    "useful TFLOPS",
    "GB/s",
    "of the roofline",
)


def ordered(found: Iterable[Record]) -> list[Record]:
    """Newest record per (case, kernel): the suite's cases in its order, then the others by size."""
    place = {entry.case: index for index, entry in enumerate(ISSUE2)}

    def key(record: Record) -> tuple[Any, ...]:
        case = Case.from_record(record["case"])
        rest = (case.m * case.k * case.n, case.block, -case.density, case.pattern, case.dtype)
        return record["op"], place.get(case, len(place)), rest, record["env"]["gpu"], record["kernel"]

    return sorted(records.newest(found), key=key)


def markdown(found: Sequence[Record]) -> str:
    """The table as Markdown, without the markers. Says so when there are no records."""
    rows = ordered(found)
    device_rows = [record for record in rows if record["op"] not in records.HOST_OPS]
    if not device_rows:
        return "No records yet: run `sparsek bench spmm --suite issue2` on an H200."
    peers = [name for name in PEER_TITLES if any(name in record["ratio"] for record in device_rows)]
    headings = [*HEADINGS, *(f"over {PEER_TITLES[name]}" for name in peers)]
    lines = [_line(headings), _line(["---", "---", *["---:"] * (len(headings) - 2)])]
    lines += [_line(_cells(record, peers)) for record in device_rows]
    for record in rows:
        if record["op"] == "spmm_host":
            ms = record["ms"]
            where = Case.from_record(record["case"]).name + _mark(record)
            lines += [
                "",
                f"Host time of an eager call with a cached plan: {ms['median'] * 1e3:.1f} us ({where}).",
            ]
    lines += ["", caption(device_rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mark(record: Record) -> str:
    return "" if records.is_fresh(record) else f" ({EARLIER})"


def _speedup(record: Record) -> str:
    """Time of the dense product over the kernel's, from the same rounds."""
    for name in ("cublas", "torch_dense"):
        if name in record["peers"]:
            return f"{record['peers'][name]['ms']['median'] / record['ms']['median']:.2f}x"
    return ""


def _cells(record: Record, peers: Sequence[str]) -> list[str]:
    ms = record["ms"]
    shown = [
        Case.from_record(record["case"]).name,
        f"{record['kernel']}{_mark(record)}",
        f"{ms['median']:.3f} ({ms['min']:.3f} to {ms['max']:.3f})",
        _speedup(record),
        f"{record['tflops']['useful']:.0f}"
        if record["tflops"]["useful"] >= 10
        else f"{record['tflops']['useful']:.2g}",
        f"{record['gbps']:.0f}",
        f"{record['roofline']['fraction'] * 100:.0f} %",
    ]
    return shown + [f"{record['ratio'][name]:.2f}" if name in record["ratio"] else "" for name in peers]


def caption(rows: Sequence[Record]) -> str:
    """What the numbers were taken on, and what a ratio means."""
    settings = sorted({_setting(record) for record in rows})
    dates = sorted(record["date"][:10] for record in rows)
    span = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    rounds = sorted({record["ms"]["rounds"] for record in rows})
    return (
        f"{'; '.join(settings)}; {span}; median of {' or '.join(map(str, rounds))} interleaved rounds. "
        "Useful TFLOPS count stored blocks only. A ratio is this library's useful rate over the peer's rate in "
        "the same rounds: useful FLOPs for sparse peers, dense FLOPs on dense random data for dense ones. "
        "torch.sparse runs with the best of all four parameters of its kernel, 'stages' with its own but num_stages."
    )


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


def replaced(page: str, table: str, op: str = "spmm", path: str = "page") -> str:
    """`page` with `table` between the markers."""
    start, stop = section(page, op, path)
    return f"{page[:start]}\n{table}\n{page[stop:]}"


def write(root: Path, found: Sequence[Record], pages: Iterable[str] = PAGES) -> list[Path]:
    """Puts the table into every page under `root`; returns those that changed."""
    table = markdown(found)
    changed = []
    for name in pages:
        path = root / name
        try:
            before = path.read_text(encoding="utf-8")
        except OSError as error:
            raise InvalidFile(f"{path}: cannot be read: {error.strerror}") from None
        after = replaced(before, table, path=str(path))
        if after != before:
            path.write_text(after, encoding="utf-8")
            changed.append(path)
    return changed


def stale(root: Path, found: Sequence[Record], pages: Iterable[str] = PAGES) -> list[str]:
    """What differs between the pages and the records, one line each; [] means they agree."""
    table = markdown(found)
    wrong = []
    for name in pages:
        page = (root / name).read_text(encoding="utf-8")
        start, stop = section(page, "spmm", name)
        shown = page[start:stop].strip()
        if shown != table:
            old, new = shown.splitlines(), table.splitlines()
            differing = next(
                (line for line in new if line not in old), f"{len(old)} lines instead of {len(new)}"
            )
            wrong.append(
                f"{name}: table differs from the records, run `make readme`; first difference: {differing}"
            )
    return wrong
