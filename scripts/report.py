"""What the pages show of the records: `scripts/report.py write` puts it there, `check` prints what differs. A record
whose code has changed since is on no page.

The table of an operation stands once, between `<!-- records:spmm -->` and `<!-- /records -->` in docs/benchmarks, a
table of a few rows of all in README.md, pictures in docs/pictures. Nothing of these is typed by hand.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sparsek.core import env
from sparsek.core.errors import SparseKError
from sparsek_bench import charts
from sparsek_bench.benches import BENCHES
from sparsek_bench.engine import records, report
from sparsek_bench.engine.bench import TABLES, Record, table_of
from sparsek_bench.engine.case import Case
from sparsek_bench.engine.tables import MS, ROOF, SPEEDUP, USEFUL, mark, peer_ms, short_name
from sparsek_bench.figures import rows_of
from sparsek_bench.suites.attention import AttentionCase
from sparsek_bench.suites.attention_grad import AttentionGradCase
from sparsek_bench.suites.semi24 import Semi24Case
from sparsek_bench.suites.spmm import SpmmCase

BEGIN, END = "<!-- records:{name} -->", "<!-- /records -->"
README, PICTURES = "README.md", "docs/pictures"
PAGE, ATTENTION_PAGE = "docs/benchmarks/index.md", "docs/benchmarks/attention.md"


class Front(NamedTuple):
    """A row of README: what comes before the name of the case, and the peers whose fastest it shows."""

    words: str
    case: Case
    peers: tuple[str, ...]


ATTENTION = (1, 16, 16, 32768, 32768, 128, 128)
SPARSE = ("torch_sparse", "cusparse")
ATTENTIVE = ("fa4", "flex", "cudnn", "cudnn_bsa", "cudnn_flex", "fa3", "fa3_vllm", "flashinfer")
FRONT = (
    *(
        Front("A @ B,", SpmmCase(8192, 8192, 8192, (block, block), share), SPARSE)
        for block, share in ((128, 0.25), (128, 0.125), (64, 0.125), (32, 0.125))
    ),
    Front("", Semi24Case(8192, 8192, 8192), ("cusparselt",)),
    Front("attention,", AttentionCase(*ATTENTION, "causal"), ATTENTIVE),
    Front("attention,", AttentionCase(*ATTENTION, "blocks:0.125"), ATTENTIVE),
    Front("its gradients,", AttentionGradCase(*ATTENTION, "blocks:0.125"), ATTENTIVE),
)
FRONT_NOTE = (
    "Useful TFLOPS count stored blocks and visible pairs; of 2:4 they are dense-equivalent. Dense is cuBLAS or cuDNN. "
    "Over the fastest peer in its record: 1.50 means 1.5 times as fast. The roofline is the least time that bandwidth "
    "and arithmetic allow, at the rates that a copy and cuBLAS sustain on this card."
)
HEADINGS = ("case", MS.heading, SPEEDUP.heading, USEFUL.heading, ROOF.heading, "over the fastest peer")


def published(found: Sequence[Record]) -> list[Record]:
    """The records that pages show: what has changed since it was measured is left out until it is measured again."""
    return [record for record in found if records.is_fresh(record)]


def front(found: Sequence[Record]) -> str:
    """The table of README, with what it was measured on below; rows without records are left out."""
    measured = {
        each.case: each.record for op in {row.case.op for row in FRONT} for each in rows_of(found, op)
    }
    shown = [(row, measured[row.case]) for row in FRONT if row.case in measured]
    if not shown:
        return "No record of today's code: run `sparsek bench all` on an H200."
    lines = [report.line(HEADINGS), report.line(["---", *["---:"] * 4, "---"])]
    for row, record in shown:
        name = f"{row.words} {short_name(record)}{mark(record)}".strip()
        cells = (column.cell(record) for column in (MS, SPEEDUP, USEFUL, ROOF))
        lines.append(report.line([name, *cells, _fastest(record, row.peers)]))
    about = f"{FRONT_NOTE} Attention: {', '.join(TABLES['attention'].usual)}."
    return "\n".join([*lines, "", f"{about} {report.measured_on([record for _, record in shown], MS)}"])


def _fastest(record: Record, peers: Sequence[str]) -> str:
    """The time of the fastest peer over the kernel's, and its name: "1.48, torch.sparse"."""
    times = [(ms, name) for name in peers if (ms := peer_ms(record, name)) is not None]
    ms, best = min(times, default=(0.0, ""))
    return f"{ms / record['ms']['median']:.2f}, {table_of(record).peers[best]}" if best else ""


def blocks(found: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Page, name of the marker and text of every generated block."""
    return [
        (README, "front", front(found)),
        *((page_of(op), op, report.markdown(found, op)) for op in TABLES),
    ]


def page_of(op: str) -> str:
    """The page of an operation's table."""
    of_attention = op.startswith(("attention", "policy")) or op in ("serving", "fresh")
    return ATTENTION_PAGE if of_attention else PAGE


def section(page: str, name: str, path: str = "page") -> tuple[int, int]:
    """Start and end of the text between the markers. Raises SystemExit unless they are there once."""
    begin = BEGIN.format(name=name)
    if page.count(begin) != 1:
        raise SystemExit(f"{path}: expected the marker {begin} once, found it {page.count(begin)} times")
    start = page.index(begin) + len(begin)
    stop = page.find(END, start)
    if stop < 0:
        raise SystemExit(f"{path}: the marker {begin} has no {END} after it")
    return start, stop


def differing(root: Path, found: Sequence[Record]) -> dict[Path, str]:
    """The pages and files that hold something else than the records say, with the whole text that they must have."""
    files = (each for bench in BENCHES.values() for each in bench.files.items())
    made = {root / name: text for name, make in files if (text := make(found))}
    for page, name, text in blocks(published(found)):
        path = root / page
        old = made.get(path) or _text(path)
        start, stop = section(old, name, page)
        made[path] = f"{old[:start]}\n{text}\n{old[stop:]}"
    return {path: text for path, text in made.items() if not path.exists() or _text(path) != text}


def differing_pictures(root: Path, found: Sequence[Record]) -> list[Path]:
    """The pictures that are missing, or show something else, or that nothing draws any more."""
    wanted = {root / PICTURES / name: stamp for name, stamp in charts.stamps(published(found)).items()}
    there = {path: charts.stamp_in(_text(path)) for path in (root / PICTURES).glob("*.svg")}
    drawn = {path: stamp for path, stamp in there.items() if stamp or path in wanted}
    return sorted(path for path in wanted | drawn if wanted.get(path) != drawn.get(path))


def write(root: Path, found: Sequence[Record]) -> list[Path]:
    """Brings pages, files and pictures up to the records; returns what changed."""
    changed, pictures = differing(root, found), differing_pictures(root, found)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
    drawn = charts.draw(published(found), root / PICTURES) if pictures else []
    for path in set(pictures) - set(drawn):
        path.unlink()
    return [*changed, *pictures]


def stale(root: Path, found: Sequence[Record]) -> list[str]:
    """What differs from the records, one line each; [] means that everything agrees."""
    wrong = []
    for path, text in differing(root, found).items():
        old = _text(path).splitlines() if path.exists() else []
        line = next((line for line in text.splitlines() if line not in old), f"{len(old)} lines")
        wrong.append(f"{path}: first difference: {line}")
    return [*wrong, *(f"{path}: differs" for path in differing_pictures(root, found))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read: {error.strerror}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tables and pictures of the records in README.md and docs/.")
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("--records", type=Path, default=Path(env.bench_records_dir()), help="file or folder")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout that holds the pages")
    given = parser.parse_args(arguments)
    try:
        found = records.read(given.records)
        if given.what == "write":
            changed = write(given.root, found)
            print(f"wrote {', '.join(map(str, changed))}" if changed else "pages agree with the records")
            return 0
        wrong = stale(given.root, found)
    except SparseKError as error:
        raise SystemExit(str(error)) from None
    for line in wrong:
        print(line, file=sys.stderr)
    print("run `make readme`" if wrong else "pages agree with the records")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
