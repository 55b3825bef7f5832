"""Charts from records: rates over density, time and memory over length, ratios to peers. Needs the plot extra."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparsek.bench.engine.bench import TABLES, Record, Table
from sparsek.bench.engine.records import case_of
from sparsek.bench.engine.report import measured_peers, ordered
from sparsek.bench.engine.tables import case_name
from sparsek.bench.suites.attention import AttentionCase, length_name
from sparsek.bench.suites.spmm import A_AT_B, SpmmCase
from sparsek.core.errors import SparseKError

# Okabe and Ito's colours, told apart by readers who do not see red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DENSE_COLOUR = "#444444"
LONGEST_BAR = 4.0
TALLEST = 20.0


class MissingMatplotlibError(SparseKError):
    """Charts need the plot extra."""


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingMatplotlibError("charts need matplotlib: pip install 'sparsek[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(found: Sequence[Record], folder: Path) -> list[Path]:
    """Writes the charts that the records can fill into `folder` and returns their paths."""
    rows = {
        op: [record for record in ordered(found, table) if record["op"] == op] for op, table in TABLES.items()
    }
    if not any(rows.values()):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    plt = pyplot()
    drawn = []
    plain = [record for record in rows["spmm"] if case_of(record).form == A_AT_B]
    if plain:
        drawn.append(_rates(plt, plain, folder / "spmm-rate.png"))
    sweep = _sweep_of(rows["attention"])
    if len(sweep) > 1:
        drawn.append(_lengths(plt, sweep, folder / "attention-length.png"))
    for op, table in TABLES.items():
        if measured_peers(rows[op], table):
            drawn.append(_ratios(plt, rows[op], table, folder / f"{op}-ratios.png"))
    return drawn


def _rates(plt: Any, rows: Sequence[Record], path: Path) -> Path:
    """Useful TFLOPS over density, a line per kernel and block, on the most measured shape; the dense rate."""
    shapes = [_shape(record) for record in rows]
    shape = statistics.mode(shapes)
    chosen = [record for record in rows if _shape(record) == shape]
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in chosen:
        case: SpmmCase = case_of(record)
        if case.pattern == "uniform":
            point = (case.density * 100, record["tflops"]["useful"])
            lines.setdefault((record["kernel"], case.block_name), []).append(point)
    kernels = sorted({kernel for kernel, _ in lines})
    blocks = sorted({block for _, block in lines}, key=lambda text: (len(text), text), reverse=True)
    for (kernel, block), points in lines.items():
        points.sort()
        axes.plot(
            *zip(*points, strict=True),
            marker="os^D"[kernels.index(kernel) % 4],
            color=COLOURS[blocks.index(block) % len(COLOURS)],
            linestyle=("-", "--", ":", "-.")[kernels.index(kernel) % 4],
            label=f"{kernel}, block {block}",
        )
    for name in TABLES["spmm"].dense:
        rates = [record["peers"][name]["tflops"] for record in chosen if name in record["peers"]]
        if rates:
            axes.axhline(statistics.median(rates), color=DENSE_COLOUR, linewidth=1)
            title = f"{TABLES['spmm'].peers[name]} dense, all FLOPs"
            axes.annotate(
                title,
                (0.01, statistics.median(rates)),
                xycoords=("axes fraction", "data"),
                ha="left",
                va="bottom",
            )
    axes.set_xscale("log", base=2)
    ticks = _readable(point[0] for points in lines.values() for point in points)
    axes.set_xticks(ticks, [f"{tick:.3g} %" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * axes.dataLim.ymax)
    axes.set_xlabel("stored blocks")
    axes.set_ylabel("useful TFLOPS")
    axes.set_title(f"{TABLES['spmm'].title}, {shape[0]}, {chosen[0]['env']['gpu']}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
    return _saved(plt, figure, path)


def _saved(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _readable(places: Iterable[float]) -> list[float]:
    """Tick places on a logarithmic axis: those with most points first, and none within a fifth of another."""
    kept: list[float] = []
    for place, _ in Counter(places).most_common():
        if all(max(place, other) >= 1.2 * min(place, other) for other in kept):
            kept.append(place)
    return sorted(kept)


def _shape(record: Record) -> tuple[str, str]:
    case: SpmmCase = case_of(record)
    return f"{case.shape_name} {case.dtype}", record["env"]["gpu"]


def _sweep_of(rows: Sequence[Record]) -> list[Record]:
    """The records that differ in length alone and are most, by length."""
    groups: dict[Any, list[Record]] = {}
    for record in rows:
        case = AttentionCase.from_record(record["case"])
        if case.q_len == case.kv_len:
            alike = replace(case, q_len=1, kv_len=1)
            groups.setdefault((alike, record["kernel"], record["env"]["gpu"]), []).append(record)
    longest = max(groups.values(), key=len, default=[])
    return sorted(longest, key=lambda record: record["case"]["q_len"])


def _lengths(plt: Any, rows: Sequence[Record], path: Path) -> Path:
    """Over the length: time, and memory beyond q, k, v and the output, of the kernel and of the dense peer.

    Two computed lines for scale: the bytes of q, k, v and the output, and those of a bool mask of all pairs.
    """
    cases = [AttentionCase.from_record(record["case"]) for record in rows]
    lengths = [case.q_len for case in cases]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    measured = {rows[0]["kernel"]: list(zip(cases, rows, strict=True))}
    for name in TABLES["attention"].dense:
        found = [
            (case, row["peers"][name]) for case, row in measured[rows[0]["kernel"]] if name in row["peers"]
        ]
        if found:
            measured[TABLES["attention"].peers[name]] = found
    for (title, found), colour in zip(
        measured.items(), (COLOURS[0], DENSE_COLOUR, DENSE_COLOUR), strict=False
    ):
        style = {"color": colour, "marker": "o", "label": title}
        left.plot([case.q_len for case, _ in found], [one["ms"]["median"] for _, one in found], **style)
        beyond = [
            (case.q_len, one["memory"] * case.operand_bytes / 1e6) for case, one in found if one["memory"]
        ]
        if beyond:
            right.plot(*zip(*beyond, strict=True), **style)
    right.plot(
        lengths, [case.operand_bytes / 1e6 for case in cases], ":", color=COLOURS[2], label="q, k, v, output"
    )
    right.plot(
        lengths, [length**2 / 1e6 for length in lengths], "--", color=COLOURS[1], label="bool mask, computed"
    )
    for axes, what in ((left, "ms"), (right, "MB beyond q, k, v and the output")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [length_name(length) for length in lengths], fontsize=8)
        axes.minorticks_off()
        axes.set_xlabel("queries and keys")
        axes.set_ylabel(what)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    about = f"{cases[0].mask_text.words}, {cases[0].heads} heads, D {cases[0].dim}, {cases[0].dtype}"
    figure.suptitle(f"attention, {about}, {rows[0]['env']['gpu']}", fontsize=10)
    return _saved(plt, figure, path)


def _ratios(plt: Any, rows: Sequence[Record], table: Table, path: Path) -> Path:
    """One group of bars per record: the useful rate over each peer's, and the line of equal speed."""
    rows = [record for record in rows if record["ratio"]]
    peers = measured_peers(rows, table)
    figure, axes = plt.subplots(
        figsize=(8, 1.2 + min(0.28 * len(rows) * len(peers), TALLEST)), layout="constrained"
    )
    height = 0.8 / len(peers)
    for index, name in enumerate(peers):
        places = [place + index * height for place, record in enumerate(rows) if name in record["ratio"]]
        values = [record["ratio"][name] for record in rows if name in record["ratio"]]
        shown = [min(value, LONGEST_BAR) for value in values]
        labels = [f"{value:.2f}" + (" →" if value > LONGEST_BAR else "") for value in values]
        bars = axes.barh(
            places, shown, height=height * 0.9, color=COLOURS[index], label=f"over {table.peers[name]}"
        )
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    names = [f"{case_name(record)}\n{record['kernel']}" for record in rows]
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], names, fontsize=7)
    axes.set_ylim(len(rows), -0.3)
    axes.axvline(1, color=DENSE_COLOUR, linewidth=1)
    axes.set_xlabel("useful rate over the peer's rate in the same rounds")
    axes.set_title(f"{table.title}, {rows[0]['env']['gpu']}")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(plt, figure, path)
