"""The tables of `sparsek advise` that compare formats, and the break-even shares."""

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from sparsek.bench import break_even
from sparsek.bench.advise import Advice, Question
from sparsek.bench.advise_formats import fastest
from sparsek.cli.output import console, duration, middle_out, plain
from sparsek.cli.output import table as new_table
from sparsek.core.device import CARDS, card_of

# What all columns but the matrix's and the kernel's take, and the width from which on there is room for the kernel.
TAKEN, WIDE = 72, 118
SHORTEST_NAME, LONGEST_NAME = 8, 28


def print_formats(advices: Sequence[Advice], question: Question) -> None:
    """One row per format of each group's first matrix, the fastest in green; nothing where all are look-ups."""
    shown = [advice for advice in advices if advice.formats]
    if not shown:
        return
    star = "" if question.predicted_for is None else "*"
    out = console()
    table = new_table("The same in other formats")
    named = ("matrix", "format", "kernel") if out.width >= WIDE else ("matrix", "format")
    longest = min(LONGEST_NAME, max(SHORTEST_NAME, out.width - TAKEN))
    for title in (*named, f"time{star}", f"over dense{star}", "stored", "kept norm", "error"):
        table.add_column(title, justify="left" if title in named else "right", no_wrap=True)
    for advice in shown:
        best = fastest(advice.formats)
        dense = next((each.seconds for each in advice.formats if each.way.format == "dense"), None)
        name = middle_out(plain(advice.first.name), longest)
        for option in advice.formats:
            over = "" if dense is None else f"{dense / option.seconds:.2f}x"
            cells = (
                name,
                option.name,
                *([option.kernel] if "kernel" in named else []),
                duration(option.seconds),
                over,
                _percent(option.stored),
                _percent(option.kept_norm),
                "" if option.error is None else f"{option.error:.2g}",
            )
            table.add_row(
                *(Text(cell, "green" if option is best and at else "") for at, cell in enumerate(cells))
            )
            name = ""
    out.print(table)
    out.print(
        "Stored: of the values. Error: of the product against the dense one, for N(0, 1) tokens; real activations may "
        "do better or worse. Fastest is not best: sk.plan_linear(W, x, max_error=...) chooses within a bound.",
        soft_wrap=True,
    )


def print_break_even(shape: tuple[int, int], question: Question, path: Path) -> None:
    """The table of break-even shares for W of a shape, and the picture."""
    card = question.predicted_for or next(
        (name for name, known in CARDS.items() if known == card_of(question.run_on)), "h200"
    )
    setting = break_even.Setting(shape, question.dtype, card)
    found = break_even.curves(setting)
    break_even.draw(found, setting, path)
    table = new_table(f"As fast as dense up to this share of the values, {setting.words}")
    table.add_column("format", no_wrap=True)
    for count in break_even.TOKENS:
        table.add_column(f"{count} tokens" if count == break_even.TOKENS[0] else str(count), justify="right")
    for curve in found:
        table.add_row(
            f"{break_even.FORMATS[curve.form]} {curve.block}",
            *(_percent(share) if share else "none" for share in curve.shares),
        )
    out = console()
    out.print(table)
    out.print(f"break-even picture: {path}", soft_wrap=True)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.3g} %"
