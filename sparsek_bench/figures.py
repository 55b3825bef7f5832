"""What the pictures of benchmarks show, made from records and from nothing else: one question each, no drawing."""

import hashlib
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from sparsek_bench.engine.bench import TABLES, Record
from sparsek_bench.engine.records import case_of
from sparsek_bench.engine.report import dates, of_one_card, ordered
from sparsek_bench.engine.tables import peer_ms
from sparsek_bench.suites.attention import EIGHTH, AttentionCase, length_name
from sparsek_bench.suites.host import TORCH
from sparsek_bench.suites.spmm import A_AT_B, SpmmCase

OURS = "SparseK"
FLASH4, FLEX, CUDNN = "FlashAttention-4", "FlexAttention", "cuDNN"
# Peers of attention that compute the mask, as pictures name them. Dense cuDNN does so where the mask is causal.
SPARSE_PEERS = {"fa4": FLASH4, "cudnn_bsa": CUDNN, "flex": FLEX}
CAUSAL_PEERS = {"fa4": FLASH4, "cudnn": CUDNN, "flex": FLEX}
# Masks, titles and peers of the pictures over the length.
CAUSAL = ("causal", "Causal mask", CAUSAL_PEERS)
RANDOM = (EIGHTH, "12.5 % of the blocks", SPARSE_PEERS)
MEGABYTE = 1e6
# Shares of blocks on one axis differ by this factor at least.
APART = 1.5
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points (x, y) from left to right. `label` also decides the colour; `end` is the value at the last point."""

    label: str
    points: tuple[Point, ...]
    end: str = ""


@dataclass(frozen=True)
class Axis:
    """`ticks`: places and their texts. `log`: whether it is logarithmic. `falling`: whether large values come first."""

    title: str
    ticks: tuple[tuple[float, str], ...]
    limits: Point
    log: bool = True
    falling: bool = False


@dataclass(frozen=True)
class Panel:
    """One question. The title of `y` stands below `title`. `labelled`: the names of the lines stand behind them.

    `pairs`: points with the same y belong together, and are no curve.
    """

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    labelled: bool = True
    pairs: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side, which answer a question. `size`: width and height in pixels. `note`: where the numbers are
    from.
    """

    question: str
    size: tuple[int, int]
    panels: tuple[Panel, ...]
    note: str

    def digest(self, code: str) -> str:
        """16 hex digits that change with anything the picture shows, or with the code that draws it."""
        text = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(f"{code}\0{text}".encode()).hexdigest()[:16]


class Row(NamedTuple):
    """A record and its case."""

    case: Any
    record: Record


BY_DENSITY, BY_LENGTH = attrgetter("case.density"), attrgetter("case.q_len")
Number = Callable[[Row], float | None]


def rows_of(found: Iterable[Record], op: str) -> list[Row]:
    """The newest record of each case of an operation, of its fastest kernel, on the card that was measured last."""
    of_op = [record for record in ordered(found, TABLES[op]) if record["op"] == op]
    rows = [Row(case_of(record), record) for record in of_one_card(of_op)]
    best = {row.case: row for row in sorted(rows, key=_ms, reverse=True)}
    return [row for row in rows if best[row.case] is row]


def _ms(row: Row) -> float:
    return row.record["ms"]["median"]


def _most(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Row]:
    """The rows of the commonest key."""
    keyed = [(key(row), row) for row in rows]
    commonest = statistics.mode(each for each, _ in keyed) if keyed else None
    return [row for each, row in keyed if each == commonest]


def _line(label: str, rows: Iterable[Row], x: Callable[[Row], float], y: Number) -> Line:
    """A point for each row that has a y."""
    points = ((x(row), y(row)) for row in rows)
    return Line(label, tuple((x, y) for x, y in points if y is not None))


def _filled(*lines: Line) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _note(rows: Sequence[Row], *words: str) -> str:
    return ", ".join([rows[0].record["env"]["gpu"], *words, dates([row.record for row in rows])])


def _shares(values: Iterable[float]) -> Axis:
    """The shares that lie apart from one another, largest first."""
    ticks: list[float] = []
    for value in sorted(set(values), reverse=True):
        if not ticks or value <= ticks[-1] / APART:
            ticks.append(value)
    limits = (min(ticks) / 1.2, max(ticks) * 1.2)
    texts = tuple((tick, f"{tick * 100:.{3 if tick > 0.05 else 2}g}") for tick in ticks)
    return Axis("% of the blocks stored", texts, limits, falling=True)


# Speed over density


def speedups(found: Iterable[Record]) -> tuple[list[Panel], list[Row]]:
    """A panel for each block with at least two densities, largest first, of the shape that has most records; and what
    they show.
    """
    plain = _most((row for row in rows_of(found, "spmm") if _plain(row.case)), _shape)
    rows = [row for row in plain if peer_ms(row.record, *TABLES["spmm"].dense) is not None]
    count = Counter(row.case.block[0] for row in rows)
    rows = sorted((row for row in rows if count[row.case.block[0]] > 1), key=BY_DENSITY, reverse=True)
    if not rows:
        return [], []
    x = _shares(map(BY_DENSITY, rows))
    shown = [row for row in rows if row.case.density in dict(x.ticks)]
    blocks = sorted({row.case.block[0] for row in shown}, reverse=True)
    panels = [_speedup(block, [row for row in shown if row.case.block[0] == block], x) for block in blocks]
    return panels, shown


def _plain(case: SpmmCase) -> bool:
    """A @ B with square blocks at random places."""
    return case.form == A_AT_B and case.pattern == "uniform" and case.block[0] == case.block[1]


def _shape(row: Row) -> tuple[str, str]:
    return row.case.shape_name, row.case.dtype


def _speedup(block: int, rows: Sequence[Row], x: Axis) -> Panel:
    def line(label: str, own: Number) -> Line:
        def speed(row: Row) -> float | None:
            dense, time = peer_ms(row.record, *TABLES["spmm"].dense), own(row)
            return dense and time and dense / time

        made = _line(label, rows, BY_DENSITY, speed)
        return replace(made, end=f"{made.points[-1][1]:.1f}×" if made.points else "")

    ends = x.ticks[0][0], x.ticks[-1][0]
    lines = (
        line(OURS, _ms),
        line("torch.sparse", lambda row: peer_ms(row.record, "torch_sparse")),
        Line("1/density", tuple((end, 1 / end) for end in ends)),
        Line("dense", tuple((end, 1.0) for end in ends)),
    )
    ticks = tuple((2.0**power, f"{2.0**power:g}×") for power in range(-6, 9))
    y = Axis("speedup over dense", ticks, (0.5, 40.0))
    return Panel(f"Block {block}", x, y, _filled(*lines), labelled=False)


def _alike(panels: Sequence[Panel]) -> list[Panel]:
    """The panels over the same range of speeds, the last one with the names of its lines."""
    speeds = [point[1] for panel in panels for line in panel.lines for point in line.points]
    limits = (2.0 ** math.floor(math.log2(min(speeds))), 1.25 * max(speeds))
    shown = [replace(panel, y=replace(panel.y, limits=limits)) for panel in panels]
    return [*shown[:-1], replace(shown[-1], labelled=True)]


def density(found: Sequence[Record]) -> Picture | None:
    """Speedup over density, a panel for each block."""
    panels, rows = speedups(found)
    if not panels:
        return None
    question = "How much faster than dense is A @ B?"
    return Picture(question, (1080, 380), tuple(_alike(panels)), _note(rows, *_shape(rows[0])))


# Attention


def _lengths(values: Iterable[int]) -> Axis:
    ticks = sorted(set(values))
    texts = tuple((tick, length_name(tick)) for tick in ticks)
    return Axis("tokens", texts, (ticks[0] / 1.3, ticks[-1] * 1.3))


def _curve(rows: Iterable[Row], member: Callable[[AttentionCase], bool], **varied: Any) -> list[Row]:
    """The largest group of rows of `member` cases that differ in what is `varied` alone, short and full ones first."""
    fit = (row for row in rows if row.case.q_len == row.case.kv_len and member(row.case))
    found = _most(fit, lambda row: replace(row.case, **varied))
    return sorted(found, key=lambda row: (row.case.q_len, -_stored(row)))


def _stored(row: Row) -> float:
    """The share of blocks that a random mask keeps; 0 for other masks."""
    return row.case.mask_text.numbers[0] if row.case.mask.startswith("blocks:") else 0.0


def _rates(
    title: str,
    rows: Sequence[Row],
    at: Callable[[Row], Any],
    axis: Callable[[Iterable[Any]], Axis],
    peers: Mapping[str, str],
) -> Panel | None:
    """Useful TFLOPS of the kernel and of peers that compute the same mask; None without a second row."""
    if len(rows) < 2:
        return None
    rates = {
        label: _line(label, rows, at, lambda row, name=name: row.record["peers"].get(name, {}).get("tflops"))
        for name, label in peers.items()
    }
    ours = _line(OURS, rows, at, lambda row: row.record["tflops"]["useful"])
    ticks = tuple((tick, str(tick)) for tick in range(0, 801, 200))
    y = Axis("useful TFLOPS", ticks, (0.0, 800.0), log=False)
    return Panel(title, axis(map(at, rows)), y, _filled(ours, *rates.values()), labelled=False)


def _length_panel(rows: Sequence[Row], mask: str, title: str, peers: Mapping[str, str]) -> Panel | None:
    found = _curve(rows, lambda case: (case.mask, case.block) == (mask, (128, 128)), q_len=1, kv_len=1)
    return _rates(title, found, BY_LENGTH, _lengths, peers)


def _share_panel(rows: Sequence[Row]) -> Panel | None:
    found = _curve(rows, lambda case: case.mask.startswith("blocks:"), mask=EIGHTH)
    title = f"{length_name(found[0].case.q_len)} tokens, random blocks" if found else ""
    return _rates(title, found, _stored, _shares, SPARSE_PEERS)


def _about(case: AttentionCase) -> str:
    return f"{case.heads} heads, D {case.dim}, {case.dtype}"


def attention(found: Sequence[Record]) -> Picture | None:
    """Rates over the length and over the share of blocks, beside peers."""
    rows = rows_of(found, "attention")
    over_length = [_length_panel(rows, *each) for each in (CAUSAL, RANDOM)]
    panels = [each for each in (*over_length, _share_panel(rows)) if each is not None]
    if not panels:
        return None
    panels[-1] = replace(panels[-1], labelled=True)
    question = "How fast is attention over the length and over the share of blocks?"
    return Picture(question, (1080, 380), tuple(panels), _note(rows, _about(rows[0].case)))


def memory(found: Sequence[Record]) -> Picture | None:
    """Memory of a call under a window over the length."""
    windows = rows_of(found, "attention")
    rows = _curve(windows, lambda case: case.mask.startswith("window:"), q_len=1, kv_len=1)
    if len(rows) < 2:
        return None

    def extra(label: str, of: Callable[[Record], float | None]) -> Line:
        size = lambda row: (of(row.record) or 0) * row.case.operand_bytes / MEGABYTE or None  # noqa: E731
        return _line(label, rows, BY_LENGTH, size)

    lines = _filled(
        extra(OURS, lambda record: record["memory"]),
        extra(FLEX, lambda record: record["peers"].get("flex", {}).get("memory")),
        _line("q, k, v, output", rows, BY_LENGTH, lambda row: row.case.operand_bytes / MEGABYTE),
        _line("bool mask", rows, BY_LENGTH, lambda row: row.case.q_len * row.case.kv_len / MEGABYTE),
    )
    sizes = [point[1] for line in lines for point in line.points]
    texts = {10.0**power: f"{10.0**power:g} MB" for power in range(-2, 3)}
    texts |= {10.0**power: f"{10.0 ** (power - 3):g} GB" for power in range(3, 7)}
    y = Axis(
        "of one call, beyond q, k, v and the output", tuple(texts.items()), (min(sizes) / 2, 2 * max(sizes))
    )
    panel = Panel("Memory of attention", _lengths(map(BY_LENGTH, rows)), y, lines)
    first = rows[0].case
    about = (first.mask_text.words, _about(first), "dashed lines are computed")
    question = "How much memory does attention need over the length?"
    return Picture(question, (760, 400), (panel,), _note(rows, *about))


# Host time


def host(found: Sequence[Record]) -> Picture | None:
    """Host times of cached calls beside torch's."""
    rows = [row for row in rows_of(found, "host") if TORCH in row.record["peers"]]
    if not rows:
        return None
    places = {row.case: float(len(rows) - index) for index, row in enumerate(rows)}

    def line(label: str, ms: Callable[[Row], float]) -> Line:
        return _line(label, rows, lambda row: ms(row) * 1e3, lambda row: places[row.case])

    lines = line(OURS, _ms), line("torch", lambda row: row.record["peers"][TORCH]["ms"]["median"])
    highest = max(point[0] for line in lines for point in line.points)
    ticks = tuple((float(tick), f"{tick} us") for tick in (10, 20, 50, 100, 200, 500, 1000))
    x = Axis("time of one call", ticks, (8.0, max(300.0, 1.3 * highest)))
    # Without what rows share: "layer, 16 tokens, 4096 to 14336, block 128 25 %".
    names = tuple((place, case.name.replace(f" {case.dtype}", "")) for case, place in places.items())
    y = Axis("of a cached eager call, outside a CUDA graph", names, (0.3, len(rows) + 1.2), log=False)
    panel = Panel("Host time", x, y, lines, pairs=True)
    size = (860, 150 + 26 * len(rows))
    return Picture("How long does a call take on the host, beside torch?", size, (panel,), _note(rows))


# The front page


def front(found: Sequence[Record]) -> Picture | None:
    """Products over density for a large and a small block, and attention over the length."""
    panels, rows = speedups(found)
    chosen = [each for each in panels if each.title in ("Block 128", "Block 32")]
    attended = rows_of(found, "attention")
    panel = _length_panel(attended, *RANDOM)
    if not chosen or panel is None:
        return None
    chosen = _alike([replace(each, title=f"A @ B, block {each.title.split()[-1]}") for each in chosen])
    panel = replace(panel, title=f"Attention, {panel.title}", labelled=True)
    question = "How fast are products and attention, beside dense and peers?"
    return Picture(question, (1040, 380), (*chosen, panel), _note([*rows, *attended], "bf16"))


PICTURES: Mapping[str, Callable[[Sequence[Record]], Picture | None]] = {
    "front": front,
    "spmm-density": density,
    "attention-rate": attention,
    "attention-memory": memory,
    "host-time": host,
}
