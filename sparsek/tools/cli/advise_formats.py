"""The tables of `sparsek advise` that compare formats, and the break-even shares."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sparsek.core.device import CARDS, card_of
from sparsek.core.terminal import console, duration, is_whole, progress
from sparsek.core.terminal import table as new_table
from sparsek.products.ops.choose import Option
from sparsek.products.ops.weight_formats import TITLES
from sparsek.tools.advise import break_even
from sparsek.tools.advise.weights import Advice, AdviceSettings

IN_FULL = 4  # matrices; more have one row each, with kept norms where they fit


def print_formats(advices: Sequence[Advice], question: AdviceSettings) -> None:
    """Every format of each group's first matrix, the fastest in green; nothing where all are look-ups.

    A row for each format; of more than a few matrices a row for each matrix.
    """
    shown = [advice for advice in advices if advice.formats]
    if not shown:
        return
    star = "" if question.predicted_for is None else "*"
    out = console()
    short = len(shown) <= IN_FULL
    table = _in_full(shown, star) if short else _in_short(shown, star, norms=True)
    norms = not short and is_whole(table, out)
    out.print(table if short or norms else _in_short(shown, star, norms=False))
    basis = (
        "Stored: share of the values. Error: of the product against the dense one, for N(0, 1) tokens; real "
        "activations may do better or worse."
        if short
        else "Percent: kept norm."
        if norms
        else ""
    )
    out.print(
        f"{basis} Fastest is not best: sk.choose_format(x, W, max_error=...) chooses within a bound.".lstrip()
    )


def _in_full(shown: Sequence[Advice], star: str) -> Table:
    table = new_table("The same in other formats")
    named = ("matrix", "format", "kernel")
    for title in (*named, f"time{star}", f"over dense{star}", "stored", "kept norm", "error"):
        justify = "left" if title in named else "right"
        table.add_column("\n".join(title.split()), justify=justify, no_wrap=True)
    for advice in shown:
        name = advice.group.label
        for option in advice.formats:
            cells = (
                name,
                option.name,
                option.kernel,
                duration(option.seconds),
                _over_dense(advice, option),
                _percent(option.stored),
                _percent(option.kept_norm),
                "" if option.error is None else f"{option.error:.2g}",
            )
            colour = "green" if option is advice.fastest else ""
            table.add_row(*(Text(cell, colour if at else "") for at, cell in enumerate(cells)))
            name = ""
    return table


def _in_short(shown: Sequence[Advice], star: str, norms: bool) -> Table:
    """A column for each format but dense."""
    forms = dict.fromkeys(
        option.form for advice in shown for option in advice.formats if option.form.name != "dense"
    )
    table = new_table(f"The same in other formats: speed over dense{star}")
    table.add_column("matrix", no_wrap=True)
    for form in forms:
        table.add_column(f"{TITLES[form.base]} fp8" if form.is_fp8 else TITLES[form.base], justify="right")
    for advice in shown:
        by_form = {option.form: option for option in advice.formats}
        cells = [Text(advice.group.label)]
        for form in forms:
            option = by_form.get(form)
            norm = f" {(option.kept_norm or 0) * 100:3.0f} %" if option and norms else ""
            text = f"{_over_dense(advice, option)}{norm}" if option else ""
            cells.append(Text(text, "green" if option is advice.fastest else ""))
        table.add_row(*cells)
    return table


def _over_dense(advice: Advice, option: Option) -> str:
    dense = next((each.seconds for each in advice.formats if each.form.format == "dense"), None)
    return "" if dense is None else f"{dense / option.seconds:.2f}x"


def print_break_even(shape: tuple[int, int], question: AdviceSettings, path: Path, out: Console) -> None:
    """Prints the table of break-even shares for W of a shape, and draws the picture."""
    card = question.predicted_for or next(
        (name for name, known in CARDS.items() if known == card_of(question.run_on)), "h200"
    )
    setting = break_even.CurveSetting(shape, question.dtype, card)
    with progress(1, "break-even shares of every format and block"):
        found = break_even.curves(setting)
        break_even.draw(found, setting, path)
    table = new_table(f"As fast as dense up to this share of the values, {setting.words}")
    table.add_column("format", no_wrap=True)
    for count in break_even.TOKENS:
        table.add_column(f"{count} tokens" if count == break_even.TOKENS[0] else str(count), justify="right")
    for curve in found:
        table.add_row(
            f"{break_even.FORMATS[curve.form]} {curve.block or ''}".rstrip(),
            *(_percent(share) if share else "none" for share in curve.shares),
        )
    out.print(table)
    out.print(f"break-even picture: {path}", soft_wrap=True)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.3g} %"
