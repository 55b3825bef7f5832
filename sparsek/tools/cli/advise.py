"""`sparsek advise MODEL`: does block sparsity pay for these weights?"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from sparsek.core.device import card_named, card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import parse_block
from sparsek.core.terminal import EXIT_ERROR, AsJson, complain, console, duration, plain, print_json, progress
from sparsek.core.terminal import table as new_table
from sparsek.files.weights import WeightFile, open_weights
from sparsek.pictures import svg
from sparsek.pictures.blocks import spy_svg
from sparsek.tools.advise import weights as advising
from sparsek.tools.advise.sources import Skipped, few, opened
from sparsek.tools.advise.weights import Advice, AdviceSettings, NoAdvice
from sparsek.tools.cli.advise_formats import print_break_even, print_formats
from sparsek.tools.cli.options import Dtype, Keep, ToPredict

VERDICT, LEFT = 7, ("matrix", "shape", "verdict")
OPTION = ("name", "kernel", "seconds", "stored", "kept_norm", "error")  # what --json has of a format


def advise(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Weights: .safetensors, .npy, .npz, SciPy .npz or .mtx, a model.safetensors.index.json, a folder of "
            "these, or the id of a model in the local Hugging Face cache.",
        ),
    ],
    tensor: Annotated[
        list[str] | None, typer.Option("--tensor", help="A matrix of the file; * and ? match. Repeatable.")
    ] = None,
    block: Annotated[str, typer.Option(help="Block: 128, or 256x128.")] = "128",
    keep: Keep = 0.125,
    tokens: Annotated[int, typer.Option(help="Rows of x in y = x @ W.T.")] = 4096,
    device: ToPredict = None,
    dtype: Dtype = "bf16",
    scope: Annotated[
        str, typer.Option(help="Where the blocks that stay are chosen: row (in each block row) or global.")
    ] = "row",
    picture: Annotated[
        Path | None, typer.Option(help="Write an SVG picture of one pruned matrix here.")
    ] = None,
    break_even: Annotated[
        Path | None,
        typer.Option(
            help="Draw here up to which share of stored values sparse wins, for the largest matrix, by prediction."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Prunes weights to blocks and to 2:4, multiplies, checks, and shows which format pays.

    Nothing is downloaded. What was passed over is listed with the reason. Exit code 2 if a product was wrong, or if
    every matrix failed.

    --json: {models, skipped: [{what, why}], question: {block, keep, tokens, device, dtype, scope, predicted_for},
    matrices: [{label, names, shape, lookup, verdict, failures: [{name, reason}], stored_blocks, blocks, kept_norm:
    (least, largest), wrong, times: [{dense, sparse, kernel, break_even, predicted, host}], formats: [{name, format,
    kernel, seconds, stored, kept_norm, error}]}]}; times in seconds, shares from 0 to 1.
    """
    question = AdviceSettings(parse_block(block), keep, tokens, device, dtype, scope)
    answer(models, tensor or [], question, picture, break_even, json)


def answer(
    models: Sequence[str],
    wanted: list[str],
    question: AdviceSettings,
    picture: Path | None,
    break_even: Path | None = None,
    json: bool = False,
) -> None:
    """Prints the advice on what is named. Matrices that fail are named on standard error.

    Exit code 2 if any product was wrong, or if every matrix failed.
    """
    for option, path in (("--picture", picture), ("--break-even", break_even)):
        if path is not None and not path.absolute().parent.is_dir():
            raise InvalidInput(f"{option} {path}: there is no folder {path.parent}")
        if path is not None and path.is_dir():
            raise InvalidInput(f"{option} {path}: is a folder; name a file in it")
        if path is not None:
            svg.as_path(option, path)
    weights, skipped = opened(models, open_weights)
    names = advising.choose(weights, wanted, question.block)
    if not wanted:
        skipped += _passed_over(weights, names, question.block)
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
    out = console(stderr=json)
    if json:
        print_json(_document(models, skipped, question, answers))
    elif advices:
        out.print(_table(weights.path.name, answers, question))
        out.print(_notes(advices, question))
        for each in skipped:
            out.print(f"Passed over {each.what}: {each.why}", style="dim")
        print_formats(advices, question)
    if advices and break_even is not None:
        largest = max((advice.group.shape for advice in advices), key=math.prod)
        print_break_even(largest, question, break_even, out)
    if advices and picture is not None:
        shown = max(advices, key=lambda advice: (not advice.group.lookup, advice.cells)).first
        spy_svg(shown.matrix, picture, title=plain(shown.name))
        out.print(f"picture of {shown.name}: {picture}", soft_wrap=True)
    for failure in failures:
        complain(str(failure))
    wrong = [line for advice in advices for line in advice.wrong]
    if wrong:
        complain("products outside the error budget: " + "; ".join(wrong))
    if wrong or not advices:
        raise typer.Exit(EXIT_ERROR)


def _passed_over(weights: WeightFile, names: Sequence[str], block: tuple[int, int]) -> list[Skipped]:
    """What of the files is no matrix, or smaller than a block."""
    matrices = {entry.name for entry in weights.names()}
    no_matrix = [name for name in weights.entries if name not in matrices]
    small = [name for name in weights.entries if name in matrices.difference(names)]
    reasons = (no_matrix, "no 2-D float matrix"), (small, f"smaller than a block of {block[0]}x{block[1]}")
    return [
        Skipped(f"{len(some)} of {len(weights.entries)} arrays ({few(some)})", why)
        for some, why in reasons
        if some
    ]


def _document(
    models: Sequence[str],
    skipped: Sequence[Skipped],
    question: AdviceSettings,
    answers: Sequence[Advice | NoAdvice],
) -> dict[str, Any]:
    """What `--json` prints."""
    matrices = []
    for each in answers:
        row: dict[str, Any] = {**asdict(each.group), "verdict": each.verdict}
        row["failures"] = [asdict(failure) for failure in each.failures]
        if isinstance(each, Advice):
            row |= {"stored_blocks": each.first.matrix.nnzb, "blocks": each.cells}
            row["kept_norm"] = each.kept_norm
            row |= {"wrong": each.wrong, "times": [asdict(times) for times in each.times]}
            row["formats"] = [
                {"format": option.form.format, **{name: getattr(option, name) for name in OPTION}}
                for option in each.formats
            ]
        matrices.append(row)
    asked = {**asdict(question), "predicted_for": question.predicted_for}
    over = [asdict(each) for each in skipped]
    return {"models": list(models), "skipped": over, "question": asked, "matrices": matrices}


def _table(title: str, answers: Sequence[Advice | NoAdvice], question: AdviceSettings) -> Table:
    """One row per group."""
    star = "" if question.predicted_for is None else "*"
    table = new_table(f"{title}, {question.tokens} tokens, {question.dtype}")
    rows = [_cells(answer) for answer in answers]
    speeds = (f"dense{star}", f"sparse{star}", "break even", f"speedup{star}")
    for at, title in enumerate(("matrix", "shape", "stored blocks", *speeds, "verdict", "kept norm")):
        no_wrap = title != "verdict" and not any(" to " in row[at] or " of " in row[at] for row in rows)
        table.add_column(
            "\n".join(title.split()), justify="left" if title in LEFT else "right", no_wrap=no_wrap
        )
    colours = {"faster": "green", "wrong result": "bold red", "failed": "red"}
    for row, answer in zip(rows, answers, strict=True):
        colour = colours.get(answer.verdict.removesuffix(" in a CUDA graph"), "yellow")
        table.add_row(*row[:VERDICT], Text(row[VERDICT], colour), *row[VERDICT + 1 :])
    return table


def _cells(answer: Advice | NoAdvice) -> list[str]:
    """The row of one answer."""
    name, shape = answer.group.label, "{}x{}".format(*answer.group.shape)
    if isinstance(answer, NoAdvice):
        return [name, shape, *[""] * 5, answer.verdict, ""]
    times = answer.times
    return [
        name,
        shape,
        f"{answer.first.matrix.nnzb} of {answer.cells}",
        _range([each.dense for each in times], duration),
        _range([each.sparse for each in times], duration),
        _range([each.break_even for each in times], _even),
        _range([each.speedup for each in times], lambda value: f"{value:.2f}x"),
        answer.verdict,
        _range(answer.kept_norm, lambda value: f"{value * 100:.0f} %"),
    ]


def _even(share: float) -> str:
    return advising.percent(share) if share else "none"


def _range(values: Sequence[float], show: Callable[[float], str]) -> str:
    """One value, or "low to high", with the unit once."""
    low, high = show(min(values)), show(max(values))
    unit = high[high.find(" ") :] if " " in high else ""
    return low if low == high else f"{low.removesuffix(unit)} to {high}"


def _notes(advices: list[Advice], question: AdviceSettings) -> str:
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
        "Break even: the largest share of stored blocks, chosen by the same rule, at which sparse is as fast as dense.",
    ]
    verdicts = {advice.verdict for advice in advices}
    if any("faster" in verdict for verdict in verdicts):
        lines.append(
            "Faster: in time. What pruning does to the model's quality is not tested; the kept norm is only a hint."
        )
    eager = max((times.host for advice in advices for times in advice.times), default=0.0)
    if any(advice.needs_graph for advice in advices):
        lines.append(
            f"In a CUDA graph: an eager call costs the host about {eager * 1e6:.0f} us; "
            "outside a graph these gain nothing."
        )
    if any(advice.group.lookup for advice in advices):
        lines.append(
            "Look-up: an embedding by its name: rows are fetched, not multiplied; --tensor NAME judges it as a product."
        )
    if any(len(advice.group.names) > 1 for advice in advices):
        timed = "the first is timed" if card is None else "times are predicted for all"
        lines.append(
            f"(n): n matrices of one shape, whose names differ in numbers; {timed}, all are pruned and checked."
        )
    return "\n".join(lines)
