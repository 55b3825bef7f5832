"""`sparsek advise FILE`: does block sparsity pay for these weights?"""

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sparsek.advise import weights as advising
from sparsek.advise.break_even import check_picture
from sparsek.advise.weights import Advice, Failure, NoAdvice, Question
from sparsek.bench.engine.options import parse_block
from sparsek.cli.advise_formats import print_break_even, print_formats
from sparsek.cli.output import EXIT_ERROR, complain, console, duration, middle_out, plain, progress
from sparsek.cli.output import table as new_table
from sparsek.core.device import card_named, card_of
from sparsek.core.errors import InvalidInput
from sparsek.files.weights import open_weights
from sparsek.pictures.blocks import spy_png

Cell = tuple[str, ...]  # text in pieces: of one line, or a line each
SPEEDUP, VERDICT = 6, 7
# Columns are broken into lines, in this order, until names find room in two lines: verdict, sparse, speedup, break
# even, kept norm, stored blocks, shape.
BREAK_ORDER = (VERDICT, 4, SPEEDUP, 5, 8, 2, 1)
NARROWEST_NAME = 8


def advise(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, help="Weights: .safetensors, .npy, .npz, SciPy .npz or .mtx."
        ),
    ],
    tensor: Annotated[
        list[str] | None, typer.Option("--tensor", help="A matrix of the file; * and ? match. Repeatable.")
    ] = None,
    block: Annotated[str, typer.Option(help="Block: 128, or 256x128.")] = "128",
    keep: Annotated[float, typer.Option(help="Fraction of blocks that stay.")] = 0.125,
    tokens: Annotated[int, typer.Option(help="Rows of x in y = x @ W.T.")] = 4096,
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cpu, or a card to predict for (h200, h100). Default: the GPU, else h200."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    scope: Annotated[
        str, typer.Option(help="Where the blocks that stay are chosen: global (the whole matrix) or row.")
    ] = "global",
    picture: Annotated[Path | None, typer.Option(help="Write a picture of one pruned matrix here.")] = None,
    break_even: Annotated[
        Path | None,
        typer.Option(
            help="Draw here up to which share of stored values sparse wins, for the largest matrix, by prediction."
        ),
    ] = None,
) -> None:
    """Prunes weights to blocks and to 2:4, multiplies, checks, and says which format pays."""
    question = Question(parse_block(block), keep, tokens, device, dtype, scope)
    answer(file, tensor or [], question, picture, break_even)


def answer(
    file: Path,
    wanted: list[str],
    question: Question,
    picture: Path | None,
    break_even: Path | None = None,
) -> None:
    """Runs the question on a file and prints the tables. Matrices that fail are named on standard error.

    Exit code 2 if any product was wrong, or if every matrix failed.
    """
    for option, path in (("--picture", picture), ("--break-even", break_even)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInput(f"{option} {path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise InvalidInput(f"{option} {path}: is a folder; name a file in it")
    if break_even is not None:
        check_picture(break_even)
    weights = open_weights(file)
    names = advising.choose(weights, wanted, question.block)
    shapes = {name: (shape[0], shape[1]) for name, shape, _ in weights.names()}
    groups = advising.grouped(((name, shapes[name]) for name in names), wanted=bool(wanted))
    answers: list[Advice | NoAdvice] = []
    with progress(len(names), "prune, multiply, check") as (say, advance):

        def step(name: str) -> None:
            say(name)
            advance()

        for group in groups:
            answers.append(advising.advise(group, weights.read, question, step))
    advices = [answer for answer in answers if isinstance(answer, Advice)]
    failures = [failure for answer in answers for failure in answer.failures]
    if not advices:
        _complain_of(failures)
        raise typer.Exit(EXIT_ERROR)
    out = console()
    out.print(_table(file, answers, question, out.width))
    out.print(_notes(advices, question))
    print_formats(advices, question)
    if break_even is not None:
        print_break_even(max((advice.group.shape for advice in advices), key=math.prod), question, break_even)
    if picture is not None:
        shown = max(advices, key=lambda advice: (not advice.group.lookup, advice.cells)).first
        spy_png(shown.matrix, picture, title=plain(shown.name))
        out.print(f"picture of {shown.name}: {picture}", soft_wrap=True)
    _complain_of(failures)
    wrong = [line for advice in advices for line in advice.wrong]
    if wrong:
        complain("products outside the error budget: " + "; ".join(wrong))
        raise typer.Exit(EXIT_ERROR)


def _complain_of(failures: list[Failure]) -> None:
    for failure in failures:
        complain(str(failure))


def _table(file: Path, answers: list[Advice | NoAdvice], question: Question, width: int) -> Table:
    """One row per group. Where `width` is too little, columns are broken into lines and names lose their middle;
    speedup and verdict are never cut.
    """
    star = "" if question.predicted_for is None else "*"
    titles: list[Cell] = [
        ("matrix",),
        ("shape",),
        ("stored ", "blocks"),
        (f"dense{star}",),
        (f"sparse{star}",),
        ("break ", "even"),
        (f"speedup{star}",),
        ("verdict",),
        ("kept ", "norm"),
    ]
    rows = [_cells(answer) for answer in answers]
    longest = max(len(row[0][0]) for row in rows)
    broken, room, taken = set[int](), NARROWEST_NAME, 0
    for column in (*BREAK_ORDER, None):
        taken = sum(
            1
            + max(len(line) for row in (titles, *rows) for line in _joined(row[at], at in broken).split("\n"))
            for at in range(1, len(titles))
        )
        room = max(NARROWEST_NAME, width - taken - 1)
        if (2 * room if broken else room) >= longest or column is None:
            break
        broken.add(column)
    table = new_table(f"{file.name}, {question.tokens} tokens, {question.dtype}")
    whole = (SPEEDUP, VERDICT)
    for at, title in enumerate(titles):
        is_text = at in (0, 1, VERDICT)
        table.add_column(
            _joined(title, at in broken), justify="left" if is_text else "right", no_wrap=at in whole
        )
    colours = {"faster": "green", "wrong result": "bold red", "failed": "red"}
    for row, answer in zip(rows, answers, strict=True):
        cells = [_joined(cell, at in broken) for at, cell in enumerate(row)]
        if width - taken - 1 >= NARROWEST_NAME:  # else the table is a list, which has room for names
            cells[0] = _two_lines(middle_out(plain(cells[0]), 2 * room), room)
        colour = colours.get(answer.verdict.removesuffix(" in a CUDA graph"), "yellow")
        table.add_row(*(Text(cell, colour if at == VERDICT else "") for at, cell in enumerate(cells)))
    return table


def _two_lines(name: str, room: int) -> str:
    """A name of at most twice the room, broken behind a dot if that leaves room for the rest."""
    if len(name) <= room:
        return name
    dot = name.rfind(".", 0, room) + 1
    at = dot if len(name) - dot <= room else room
    return f"{name[:at]}\n{name[at:]}"


def _joined(cell: Cell, is_broken: bool) -> str:
    return "\n".join(piece.rstrip() for piece in cell) if is_broken else "".join(cell).rstrip()


def _cells(answer: Advice | NoAdvice) -> list[Cell]:
    """The row of one answer: each cell in the pieces that it may be broken into."""
    name, (height, width) = (answer.group.label,), answer.group.shape
    shape = (f"{height}x", f"{width}")
    glued = answer.verdict.replace(" %", "\N{NO-BREAK SPACE}%")  # at which textwrap does not break
    lines = textwrap.wrap(glued, 12, break_long_words=False, break_on_hyphens=False)
    verdict = tuple(f"{line} ".replace("\N{NO-BREAK SPACE}", " ") for line in lines)
    if isinstance(answer, NoAdvice):
        return [name, shape, *[("",)] * 5, verdict, ("",)]
    times = answer.times
    return [
        name,
        shape,
        (f"{answer.first.matrix.nnzb} of ", f"{answer.cells}"),
        _range([each.dense for each in times], duration),
        _range([each.sparse for each in times], duration),
        _range([each.break_even for each in times], _even),
        _range([each.speedup for each in times], lambda value: f"{value:.2f}x"),
        verdict,
        _range(answer.kept_norm, lambda value: f"{value * 100:.0f} %"),
    ]


def _even(share: float) -> str:
    return advising.percent(share) if share else "none"


def _range(values: Sequence[float], show: Callable[[float], str]) -> Cell:
    """One value, or "low to high", with the unit once."""
    low, high = show(min(values)), show(max(values))
    unit = high[high.find(" ") :] if " " in high else ""
    return (low,) if low == high else (f"{low.removesuffix(unit)} to ", high)


def _notes(advices: list[Advice], question: Question) -> str:
    """What the numbers are: measured or predicted, by which kernels, and how the products were checked."""
    kernels = ", ".join(sorted({times.kernel for advice in advices for times in advice.times}))
    checked = sum(advice.checked for advice in advices)
    rows = sorted({advice.first.checked_tokens for advice in advices})
    tokens = f"{rows[0]}" if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"
    worst = max(advice.worst_error for advice in advices)
    right = checked - sum(len(advice.wrong) for advice in advices)
    card = question.predicted_for
    if card is None:
        source = f"Times measured on {card_of(question.run_on).name} ({kernels})."
    else:
        source = f"* Predictions of the planner for {card_named(card).name} ({kernels}); nothing was timed."
        if card_named(card).source:
            source += f" Rates are {card_named(card).caveat(question.dtype)}."
    where = "CPU" if question.run_on.type == "cpu" else "GPU"
    lines = [
        source,
        (
            f"Checked on the {where} against float64 with {tokens} tokens: {right} of {checked} products within "
            f"the error budget (largest error: {worst:.2f} of it)."
        ),
        "Break even: the largest share of blocks, chosen by the same rule, at which sparse is as fast as dense.",
    ]
    verdicts = {advice.verdict for advice in advices}
    if any("faster" in verdict for verdict in verdicts):
        lines.append(
            "Faster: of time alone. It helps if the model survives on the kept norm, which is not tested here."
        )
    eager = max((times.host for advice in advices for times in advice.times), default=0.0)
    if any(advice.needs_graph for advice in advices):
        lines.append(
            f"In a CUDA graph: an eager call costs the host about {eager * 1e6:.0f} us; "
            "outside a graph these gain nothing."
        )
    if any(advice.group.lookup for advice in advices):
        lines.append("Look-up: an embedding, by its name; if it is multiplied with, choose it by --tensor.")
    if any(len(advice.group.names) > 1 for advice in advices):
        timed = "the first is timed" if card is None else "times are predicted for all"
        lines.append(f"(n): n matrices of like name and shape; {timed}, all are pruned and checked.")
    return "\n".join(lines)
