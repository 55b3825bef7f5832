"""Two charts from records: the useful rate over density, and the ratios to the peers. Needs matplotlib
(extra plot).
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparsek.bench.cases import Case
from sparsek.bench.records import HOST_OPS, Record
from sparsek.bench.report import PEER_TITLES, ordered
from sparsek.core.errors import SparseKError

# Okabe and Ito's colours, told apart by readers who do not see red and green.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
DENSE_COLOUR = "#444444"
LONGEST_BAR = 4.0


class MissingMatplotlibError(SparseKError):
    """Charts need the plot extra."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingMatplotlibError("charts need matplotlib: pip install 'sparsek[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(found: Sequence[Record], folder: Path) -> list[Path]:
    """Writes the charts that the records can fill into `folder` and returns their paths."""
    rows = [record for record in ordered(found) if record["op"] not in HOST_OPS]
    if not rows:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    plt = _pyplot()
    drawn = [_rates(plt, rows, folder / "spmm-rate.png")]
    if any(record["ratio"] for record in rows):
        drawn.append(_ratios(plt, rows, folder / "spmm-ratios.png"))
    return drawn


def _rates(plt: Any, rows: Sequence[Record], path: Path) -> Path:
    """Useful TFLOPS over density, a line per kernel and block, on the most measured shape; the dense rate."""
    shapes = [_shape(record) for record in rows]
    shape = statistics.mode(shapes)
    chosen = [record for record in rows if _shape(record) == shape]
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for record in chosen:
        case = Case.from_record(record["case"])
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
    for name in ("cublas", "torch_dense"):
        rates = [record["peers"][name]["tflops"] for record in chosen if name in record["peers"]]
        if rates:
            axes.axhline(statistics.median(rates), color=DENSE_COLOUR, linewidth=1)
            title = f"{PEER_TITLES[name]} dense, all FLOPs"
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
    axes.set_title(f"BSR x dense, {shape[0]}, {chosen[0]['env']['gpu']}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)
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
    case = Case.from_record(record["case"])
    return f"{case.shape_name} {case.dtype}", record["env"]["gpu"]


def _ratios(plt: Any, rows: Sequence[Record], path: Path) -> Path:
    """One group of bars per record: the useful rate over each peer's, and the line of equal speed."""
    rows = [record for record in rows if record["ratio"]]
    peers = [name for name in PEER_TITLES if any(name in record["ratio"] for record in rows)]
    figure, axes = plt.subplots(
        figsize=(8, 1.2 + 0.28 * len(rows) * max(1, len(peers))), layout="constrained"
    )
    height = 0.8 / len(peers)
    for index, name in enumerate(peers):
        places = [place + index * height for place, record in enumerate(rows) if name in record["ratio"]]
        values = [record["ratio"][name] for record in rows if name in record["ratio"]]
        shown = [min(value, LONGEST_BAR) for value in values]
        labels = [f"{value:.2f}" + (" →" if value > LONGEST_BAR else "") for value in values]
        bars = axes.barh(
            places, shown, height=height * 0.9, color=COLOURS[index], label=f"over {PEER_TITLES[name]}"
        )
        axes.bar_label(bars, labels, padding=2, fontsize=7)
    names = [f"{Case.from_record(record['case']).name}\n{record['kernel']}" for record in rows]
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], names, fontsize=7)
    axes.set_ylim(len(rows), -0.3)
    axes.axvline(1, color=DENSE_COLOUR, linewidth=1)
    axes.set_xlabel("useful rate over the peer's rate in the same rounds")
    axes.set_title(f"BSR x dense, {rows[0]['env']['gpu']}")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
