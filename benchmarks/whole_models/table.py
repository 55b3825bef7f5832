"""Tables and the picture of the page, from records alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.whole_models.cells import FFN, FORMS, KEEPS, STAGES
from sparsek.pictures.svg import text

ROOT = Path(__file__).parents[2]
PAGE, PICTURE = (
    ROOT / "docs" / "benchmarks" / "whole-models.md",
    ROOT / "docs" / "pictures" / "whole-models.svg",
)
TITLES = {"layer": "obs + layers", "block": "obs + layers + blocks"}
NAMES = {"minilm": "MiniLM", FFN: "MiniLM with dense attention", "gpt": "GPT"}
COLOURS = dict(zip(FORMS, ("#0072B2", "#C75000", "#00805D", "#A6508A", "#59636e"), strict=True))
MARK = re.compile(r"(<!-- whole-models -->\n).*?(<!-- /whole-models -->)", re.S)
Record = dict[str, Any]


def newest(records: Sequence[Record]) -> dict[tuple[Any, ...], Record]:
    """The last record of each card, model, form, share and stage; of distillations the longest."""
    names = ("gpu", "model", "form", "keep", "stage")
    return {tuple(each[name] for name in names): each for each in sorted(records, key=minutes)}


def comparable(records: Sequence[Record]) -> list[Record]:
    """The records of the texts that the newest one is of: scores on other texts do not stand beside these."""
    last = max(records, key=lambda each: each["date"], default={"texts": ""})
    return [each for each in records if each["texts"] == last["texts"]]


def minutes(record: Record) -> float:
    return record.get("minutes", 0.0)


def quality(record: Record) -> float:
    """1 for the dense model, less for a worse one: the cosine, or the dense perplexity over the model's."""
    return record["cosine"] if "cosine" in record else 1 / record["over_dense"]


def cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record["stage"] == "speed":
        found = record["graph_ms"] or record["eager_ms"]
        return f"{found['dense'] / found['pruned']:.2f}x{'' if record['graph_ms'] else ' eager'}"
    if "spearman" in record:
        more = f"{record['spearman']:.2f}"
    else:  # of a model whose training is not that of all cells
        dense = f" of {record['perplexity'] / record['over_dense']:.1f}" if minutes(record) else ""
        more = f"{record['perplexity']:.1f}{dense}"
    time = f", {minutes(record):g} min" if minutes(record) else ""
    return f"{quality(record):.2f} ({more}){time}"


def tables(records: Sequence[Record]) -> str:
    """A table for each model and card that has records."""
    records = comparable(records)
    known, parts = newest(records), []
    for card, model in dict.fromkeys((each["gpu"], each["model"]) for each in records):
        what = (
            "cosine (Spearman)" if model != "gpt" else "dense perplexity over that of the model (perplexity)"
        )
        stages = [
            stage for stage in STAGES if any(key[:2] == (card, model) and key[4] == stage for key in known)
        ]
        some = next(each for each in records if (each["gpu"], each["model"]) == (card, model))
        titles = [TITLES.get(stage, stage) for stage in stages]
        head = ["kept", "weights", *titles]
        rows = [
            [f"{keep:.0%}", form, *(cell(known.get((card, model, form, keep, stage))) for stage in stages)]
            for keep in sorted(KEEPS, reverse=True)
            for form in FORMS
            if any((card, model, form, keep, stage) in known for stage in stages)
        ]
        lines = [head, ["---", "---", *("---:" for _ in stages)], *rows]
        calibration = some["calibration"]
        parts.append(
            f"{NAMES[model]} on {card}: {what}; dense is 1.00. Calibration: {calibration['texts']} texts, "
            f"{calibration['tokens']} tokens.\n\n"
            + "\n".join("| " + " | ".join(line) + " |" for line in lines)
        )
        parts += curves([each for key, each in known.items() if key[:2] == (card, model)])
    return "\n\n".join(parts) + "\n"


def curves(records: Sequence[Record]) -> list[str]:
    """The learning curve of the longest distillation, on validation text."""
    longest = max((each for each in records if "curve" in each), key=minutes, default=None)
    if longest is None:
        return []
    points = ", ".join(f"{seconds:.0f} s {value:.3f}" for seconds, _, value, *_ in longest["curve"])
    what = "perplexity" if "perplexity" in longest else "cosine"
    return [
        f"Learning curve of {longest['form']}, {longest['keep']:.0%} kept, {what} on validation text: {points}."
    ]


def picture(records: Sequence[Record]) -> str:
    """Quality by kept share of the best stage, a panel for each model; dots are one-shot magnitude."""
    records = comparable(records)
    card = Counter(each["gpu"] for each in records).most_common(1)[0][0]
    records = [each for each in records if each["gpu"] == card]
    models = list(dict.fromkeys(each["model"] for each in records))
    width, height, left, top, size = 60 + 380 * len(models), 330, 50, 50, 220
    parts = []
    for index, model in enumerate(models):
        begin = left + 380 * index
        parts.append(
            text(begin, 24, f"{NAMES[model]}: quality by kept share", size=15, colour="#1f2328", bold=True)
        )
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            y, x = top + size * (1 - tick), begin + 240 * tick
            parts.append(f'<path stroke="#d8dee4" d="M{begin} {y:g}h240M{x:g} {top}v{size}"/>')
            parts.append(text(begin - 6, y + 4, f"{tick:g}", size=12, colour="#59636e", anchor="end"))
            parts.append(text(x, top + size + 18, f"{tick:.0%}", size=12, colour="#59636e", anchor="middle"))
        for line, form in enumerate(FORMS):
            of = [each for each in records if each["model"] == model and each["form"] == form]
            of = [each for each in of if each["stage"] != "speed"]
            best = {
                keep: max(quality(each) for each in of if each["keep"] == keep)
                for keep in {x["keep"] for x in of}
            }
            if not best:
                continue
            colour = COLOURS[form]
            points = [(begin + 240 * keep, top + size * (1 - max(0.0, best[keep]))) for keep in sorted(best)]
            shape = "L".join(f"{x:.4g} {y:.4g}" for x, y in points)
            parts.append(f'<path fill="none" stroke="{colour}" stroke-width="2.5" d="M{shape}"/>')
            parts += [f'<circle cx="{x:.4g}" cy="{y:.4g}" r="4" fill="{colour}"/>' for x, y in points]
            for each in of:
                if each["stage"] == "magnitude":
                    x, y = begin + 240 * each["keep"], top + size * (1 - max(0.0, quality(each)))
                    parts.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="3.5" fill="none" stroke="{colour}"/>')
            parts.append(text(begin + 246, top + 14 + 18 * line, form, size=13, colour=colour))
    note = "filled: after the best repair; rings: one-shot, by magnitude; dense is 1"
    parts.append(text(left, height - 16, note, size=12, colour="#59636e"))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    sheet = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-family="system-ui, sans-serif">', sheet, *parts, "</svg>", ""])


def write_page(records: Sequence[Record]) -> None:
    PICTURE.write_text(picture(records), encoding="utf-8")
    page = PAGE.read_text("utf-8")
    PAGE.write_text(MARK.sub(lambda found: found[1] + tables(records) + found[2], page), encoding="utf-8")
