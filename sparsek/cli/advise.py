"""`sparsek advise FILE`: does block sparsity pay for these weights?"""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from sparsek.bench import advise as advising
from sparsek.bench.advise import Advice, Failure, NoAdvice, Question
from sparsek.bench.cases import parse_block
from sparsek.cli.output import EXIT_ERROR, complain, console, duration, plain, progress
from sparsek.cli.output import table as new_table
from sparsek.core.device import card_named, card_of
from sparsek.formats.spy import spy_png
from sparsek.formats.weights import open_weights


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
        typer.Option(help="cuda, cpu, or a card to predict for (h200). Default: the GPU, else h200."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    scope: Annotated[
        str, typer.Option(help="Where the blocks that stay are chosen: global (the whole matrix) or row.")
    ] = "global",
    picture: Annotated[Path | None, typer.Option(help="Write a picture of one pruned matrix here.")] = None,
) -> None:
    """Prunes weights to blocks, multiplies, checks, and says whether sparsity pays."""
    question = Question(parse_block(block), keep, tokens, device, dtype, scope)
    answer(file, tensor or [], question, picture)


def answer(file: Path, wanted: list[str], question: Question, picture: Path | None) -> None:
    """Runs the question on a file and prints the table. Matrices that fail are named on standard error.

    Exit code 2 if any product was wrong, or if every matrix failed.
    """
    weights = open_weights(file)
    names = advising.choose(weights, wanted, question.block)
    shapes = {name: (shape[0], shape[1]) for name, shape, _ in weights.names()}
    groups = advising.grouped((name, shapes[name]) for name in names)
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
    out.print(_table(file, answers, question))
    out.print(_notes(advices, question), soft_wrap=True)
    if picture is not None:
        shown = max(advices, key=lambda advice: advice.cells).first
        title = f"{shown.name}, {shown.matrix.nnzb} blocks of {shown.matrix.block[0]}x{shown.matrix.block[1]}"
        spy_png(shown.matrix, picture, title=plain(title).replace("$", r"\$"))  # $ begins a formula
        out.print(f"picture of {shown.name}: {picture}", soft_wrap=True)
    _complain_of(failures)
    wrong = [line for advice in advices for line in advice.wrong]
    if wrong:
        complain("products outside the error budget: " + "; ".join(wrong))
        raise typer.Exit(EXIT_ERROR)


def _complain_of(failures: list[Failure]) -> None:
    for failure in failures:
        complain(str(failure))


def _table(file: Path, answers: list[Advice | NoAdvice], question: Question) -> Table:
    star = "" if question.predicted_for is None else "*"
    table = new_table(f"{file.name}, {question.tokens} tokens, {question.dtype}")
    table.add_column("matrix", overflow="fold", min_width=16)
    table.add_column("shape", no_wrap=True)
    for title in (
        "stored blocks",
        "kept norm",
        f"dense{star}",
        f"sparse{star}",
        f"speedup{star}",
        "break even",
    ):
        table.add_column(title, justify="right", max_width={"stored blocks": 11, "break even": 6}.get(title))
    table.add_column("verdict", no_wrap=True)
    colours = {"sparse pays": "green", "wrong result": "bold red", "failed": "red"}
    for advice in answers:
        verdict = Text(advice.verdict, colours.get(advice.verdict, "yellow"))
        shape = f"{advice.group.shape[0]}x{advice.group.shape[1]}"
        if isinstance(advice, NoAdvice):
            table.add_row(advice.group.label, shape, *[""] * 6, verdict)
            continue
        low, high = advice.kept_norm
        kept = f"{low * 100:.1f} %" if high - low < 5e-4 else f"{low * 100:.0f} to {high * 100:.0f} %"
        table.add_row(
            advice.group.label,
            shape,
            f"{advice.first.matrix.nnzb} of {advice.cells}",
            kept,
            duration(advice.times.dense),
            duration(advice.times.sparse),
            f"{advice.times.speedup:.2f}x",
            advising.percent(advice.times.break_even),
            verdict,
        )
    return table


def _notes(advices: list[Advice], question: Question) -> str:
    """What the numbers are: measured or predicted, by which kernels, and how the products were checked."""
    kernels = ", ".join(sorted({advice.times.kernel for advice in advices}))
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
    where = "CPU" if question.run_on.type == "cpu" else "GPU"
    lines = [
        source,
        (
            f"Checked on the {where} against float64 with {tokens} tokens: {right} of {checked} products within "
            f"the error budget (largest error: {worst:.2f} of it)."
        ),
        "Break even: the share of stored blocks at which sparse and dense take equal time.",
    ]
    if any(len(advice.group.names) > 1 for advice in advices):
        lines.append(
            "(n): n matrices of like name and shape; the first is timed, all are pruned and checked."
        )
    return "\n".join(lines)
