"""What the pictures of benchmarks show, made from records and from nothing else: one question each, no drawing."""

import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparsek.bench.engine import records
from sparsek.bench.engine.bench import TABLES, Record
from sparsek.bench.engine.report import dates, ordered
from sparsek.bench.suites.attention import EIGHTH, AttentionCase, length_name
from sparsek.bench.suites.host import TORCH, HostCase
from sparsek.bench.suites.spmm import A_AT_B, SpmmCase

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


def rows_of(found: Iterable[Record], op: str) -> list[Record]:
    """The newest record of each case of an operation, of its fastest kernel, on the card that has most."""
    rows = [record for record in ordered(found, TABLES[op]) if record["op"] == op]
    if not rows:
        return []
    card = statistics.mode(record["env"]["gpu"] for record in rows)
    best: dict[Any, Record] = {}
    for record in sorted(rows, key=lambda record: record["ms"]["median"]):
        if record["env"]["gpu"] == card:
            best.setdefault(records.case_of(record), record)
    return [record for record in rows if best.get(records.case_of(record)) is record]


def _note(rows: Sequence[Record], *words: str) -> str:
    return ", ".join([rows[0]["env"]["gpu"], *words, dates(rows)])


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


def speedups(found: Iterable[Record]) -> tuple[list[Panel], list[Record]]:
    """A panel for each block with at least two densities, largest first, of the shape that has most records; and what
    they show.
    """
    rows = [record for record in rows_of(found, "spmm") if _plain(records.case_of(record))]
    shapes = [_shape(record) for record in rows]
    rows = [record for record, shape in zip(rows, shapes, strict=True) if shape == statistics.mode(shapes)]
    by_block: dict[int, list[tuple[SpmmCase, Record]]] = defaultdict(list)
    for record in rows:
        case: SpmmCase = records.case_of(record)
        if _peer_ms(record, *TABLES["spmm"].dense) is not None:
            by_block[case.block[0]].append((case, record))
    several = {block: each for block, each in sorted(by_block.items(), reverse=True) if len(each) > 1}
    if not several:
        return [], []
    x = _shares(case.density for each in several.values() for case, _ in each)
    kept = {tick for tick, _ in x.ticks}
    shown = {block: [pair for pair in each if pair[0].density in kept] for block, each in several.items()}
    panels = [_speedup(block, each, x) for block, each in shown.items()]
    return panels, [record for each in shown.values() for _, record in each]


def _plain(case: SpmmCase) -> bool:
    """A @ B with square blocks at random places."""
    return case.form == A_AT_B and case.pattern == "uniform" and case.block[0] == case.block[1]


def _shape(record: Record) -> tuple[str, str]:
    case: SpmmCase = records.case_of(record)
    return case.shape_name, case.dtype


def _speedup(block: int, rows: Sequence[tuple[SpmmCase, Record]], x: Axis) -> Panel:
    def line(label: str, time: Callable[[Record], float | None]) -> Line:
        points = []
        for case, record in rows:
            dense, own = _peer_ms(record, *TABLES["spmm"].dense), time(record)
            if dense is not None and own is not None:
                points.append((case.density, dense / own))
        points.sort(reverse=True)
        return Line(label, tuple(points), f"{points[-1][1]:.1f}×" if points else "")

    ends = x.ticks[0][0], x.ticks[-1][0]
    lines = (
        line(OURS, lambda record: record["ms"]["median"]),
        line("torch.sparse", lambda record: _peer_ms(record, "torch_sparse")),
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


def _peer_ms(record: Record, *names: str) -> float | None:
    """Milliseconds of the first of these peers that was measured."""
    return next((record["peers"][name]["ms"]["median"] for name in names if name in record["peers"]), None)


def _filled(*lines: Line) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def density(found: Sequence[Record]) -> Picture | None:
    """Speedup over density, a panel for each block."""
    panels, rows = speedups(found)
    if not panels:
        return None
    question = "How much faster than dense is A @ B?"
    return Picture(question, (1080, 380), tuple(_alike(panels)), _note(rows, *_shape(rows[0])))


# Attention


def _lengths(cases: Iterable[AttentionCase]) -> Axis:
    ticks = sorted({case.q_len for case in cases})
    texts = tuple((tick, length_name(tick)) for tick in ticks)
    return Axis("tokens", texts, (ticks[0] / 1.3, ticks[-1] * 1.3))


def _curve(
    rows: Iterable[Record], member: Callable[[AttentionCase], bool], line: Callable[[AttentionCase], Any]
) -> list[tuple[AttentionCase, Record]]:
    """The largest group of records of `member` cases that are equal in `line`."""
    groups: dict[Any, list[tuple[AttentionCase, Record]]] = defaultdict(list)
    for record in rows:
        case: AttentionCase = records.case_of(record)
        if case.q_len == case.kv_len and member(case):
            groups[line(case)].append((case, record))
    return max(groups.values(), key=len, default=[])


def _over_length(
    rows: Iterable[Record], member: Callable[[AttentionCase], bool]
) -> list[tuple[AttentionCase, Record]]:
    found = _curve(rows, member, lambda case: replace(case, q_len=1, kv_len=1))
    return sorted(found, key=lambda pair: pair[0].q_len)


def _stored(case: AttentionCase) -> float:
    """The share of blocks that a random mask keeps; 0 for other masks."""
    return case.mask_text.numbers[0] if case.mask.startswith("blocks:") else 0.0


def _rates(
    title: str,
    x: Axis,
    found: Sequence[tuple[AttentionCase, Record]],
    at: Callable[[AttentionCase], float],
    peers: Mapping[str, str],
) -> Panel:
    """Useful TFLOPS of the kernel and of peers that compute the same mask."""

    def line(label: str, rate: Callable[[Record], float | None]) -> Line:
        points = ((at(case), rate(record)) for case, record in found)
        return Line(label, tuple((x, y) for x, y in points if y is not None))

    ours = line(OURS, lambda record: record["tflops"]["useful"])
    others = (
        line(label, lambda record, name=name: record["peers"].get(name, {}).get("tflops"))
        for name, label in peers.items()
    )
    ticks = tuple((tick, str(tick)) for tick in range(0, 801, 200))
    y = Axis("useful TFLOPS", ticks, (0.0, 800.0), log=False)
    return Panel(title, x, y, _filled(ours, *others), labelled=False)


def _about(case: AttentionCase) -> str:
    return f"{case.heads} heads, D {case.dim}, {case.dtype}"


def _length_panel(rows: Sequence[Record], mask: str, title: str, peers: Mapping[str, str]) -> Panel | None:
    found = _over_length(rows, lambda case: case.mask == mask and case.block == (128, 128))
    if len(found) < 2:
        return None
    return _rates(title, _lengths(case for case, _ in found), found, lambda case: case.q_len, peers)


def _share_panel(rows: Sequence[Record]) -> Panel | None:
    found = _curve(rows, lambda case: _stored(case) > 0, lambda case: replace(case, mask=EIGHTH))
    found.sort(key=lambda pair: -_stored(pair[0]))
    if len(found) < 2:
        return None
    title = f"{length_name(found[0][0].q_len)} tokens, random blocks"
    return _rates(title, _shares(_stored(case) for case, _ in found), found, _stored, SPARSE_PEERS)


def attention(found: Sequence[Record]) -> Picture | None:
    """Rates over the length and over the share of blocks, beside peers."""
    rows = rows_of(found, "attention")
    over_length = [_length_panel(rows, *each) for each in (CAUSAL, RANDOM)]
    panels = [each for each in (*over_length, _share_panel(rows)) if each is not None]
    if not panels:
        return None
    panels[-1] = replace(panels[-1], labelled=True)
    question = "How fast is attention over the length and over the share of blocks?"
    return Picture(question, (1080, 380), tuple(panels), _note(rows, _about(records.case_of(rows[0]))))


def memory(found: Sequence[Record]) -> Picture | None:
    """Memory of a call under a window over the length."""
    pairs = _over_length(rows_of(found, "attention"), lambda case: case.mask.startswith("window:"))
    if len(pairs) < 2:
        return None

    def extra(label: str, of: Callable[[Record], float | None]) -> Line:
        sizes = [(case.q_len, (of(record) or 0) * case.operand_bytes / MEGABYTE) for case, record in pairs]
        return Line(label, tuple(point for point in sizes if point[1] > 0))

    lines = (
        extra(OURS, lambda record: record["memory"]),
        extra(FLEX, lambda record: record["peers"].get("flex", {}).get("memory")),
        Line("q, k, v, output", tuple((c.q_len, c.operand_bytes / MEGABYTE) for c, _ in pairs)),
        Line("bool mask", tuple((c.q_len, c.q_len * c.kv_len / MEGABYTE) for c, _ in pairs)),
    )
    low = min(point[1] for line in lines for point in line.points)
    ticks = [(10.0**power, _megabytes(10.0**power)) for power in range(-2, 7)]
    high = 2 * max(point[1] for line in lines for point in line.points)
    y = Axis("of one call, beyond q, k, v and the output", tuple(ticks), (low / 2, high))
    panel = Panel("Memory of attention", _lengths(case for case, _ in pairs), y, _filled(*lines))
    about = (pairs[0][0].mask_text.words, _about(pairs[0][0]), "dashed lines are computed")
    question = "How much memory does attention need over the length?"
    return Picture(question, (760, 400), (panel,), _note([record for _, record in pairs], *about))


def _megabytes(size: float) -> str:
    return f"{size / 1e3:g} GB" if size >= 1e3 else f"{size:g} MB"


# Host time


def host(found: Sequence[Record]) -> Picture | None:
    """Host times of cached calls beside torch's."""
    rows = [record for record in rows_of(found, "host") if TORCH in record["peers"]]
    if not rows:
        return None
    places = [(float(len(rows) - index), record) for index, record in enumerate(rows)]

    def line(label: str, ms: Callable[[Record], float]) -> Line:
        return Line(label, tuple((ms(record) * 1e3, place) for place, record in places))

    lines = (
        line(OURS, lambda record: record["ms"]["median"]),
        line("torch", lambda record: record["peers"][TORCH]["ms"]["median"]),
    )
    highest = max(point[0] for line in lines for point in line.points)
    ticks = tuple((float(tick), f"{tick} us") for tick in (10, 20, 50, 100, 200, 500, 1000))
    x = Axis("time of one call", ticks, (8.0, max(300.0, 1.3 * highest)))
    names = tuple((place, _call_name(records.case_of(record))) for place, record in places)
    y = Axis("of a cached eager call, outside a CUDA graph", names, (0.3, len(rows) + 1.2), log=False)
    panel = Panel("Host time", x, y, lines, pairs=True)
    size = (860, 150 + 26 * len(rows))
    return Picture("How long does a call take on the host, beside torch?", size, (panel,), _note(rows))


def _call_name(case: HostCase) -> str:
    """The name without what rows share: "layer, 16 tokens, 4096 to 14336, block 128 25 %"."""
    return case.name.replace(f" {case.dtype}", "")


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
