"""`python -m benchmarks.torch_bsr`: documented failures of torch.sparse's BSR, next to SparseK's answers."""

import json
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.text import Text

from benchmarks.torch_bsr.attempts import (
    FAILURES,
    Answer,
    Finding,
    Status,
    cases_named,
    counted,
    describe_operands,
    find,
)
from benchmarks.torch_bsr.cases import TORCH_BSR
from sparsek import __version__
from sparsek.core import arguments
from sparsek.core.device import card_of
from sparsek.core.terminal import Commands, console, progress
from sparsek.core.terminal import table as new_table

STYLES: dict[Status, str] = {
    "works": "green",
    "wrong": "bold red",
    "error": "red",
    "crash": "bold red",
    "costly": "red",
    "warns": "red",
    "refuses": "yellow",
    "skipped": "dim",
}
app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def torch_bsr(
    only: Annotated[str | None, typer.Option(help="Only the entries with these names: op-add,right.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the code of every attempt.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = None,
) -> None:
    """Runs the documented failures of torch.sparse's BSR, reports which still fail, and shows SparseK's answers."""
    cases = cases_named(TORCH_BSR, None if only is None else [name.strip() for name in only.split(",")])
    where = arguments.device("device", device or ("cuda" if torch.cuda.is_available() else "cpu"))
    found = []
    with progress(len(cases), "torch-bsr") as (say, advance):
        for case in cases:
            say(case.name)
            found.append(find(case, where))
            advance()
    if as_json:
        typer.echo(json.dumps(_summary(found, where), indent=2))
        return
    _show(found, where, verbose)


def _summary(found: Sequence[Finding], device: torch.device) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "sparsek": __version__,
        "device": card_of(device).name,
        **counted(found, device),
        "entries": [each.as_dict() for each in found],
    }


def _show(found: Sequence[Finding], device: torch.device, verbose: bool) -> None:
    screen = console()
    if verbose:
        for each in found:
            _show_code(each, device)
    table = new_table(f"torch.sparse BSR with torch {torch.__version__}, on {card_of(device).name}")
    table.add_column("tried", ratio=30)
    table.add_column("torch", ratio=38)
    table.add_column("SparseK", ratio=32)
    table.expand = True
    groups = counted(found, device)
    notes = {
        "fixed": f"; no longer fails in {torch.__version__}",
        "elsewhere": "; documented on another device",
    }
    note_of = {name: notes.get(group, "") for group, names in groups.items() for name in names}
    for each in found:
        case = each.case
        tried = Text.assemble((case.name, "bold"), (f" {case.where}", "dim"), f"\n{case.tried}")
        theirs = _cell(each.torch, note_of[case.name])
        ours = Text("") if each.ours.status == "skipped" else _cell(each.ours)
        table.add_row(tried, theirs, ours)
    screen.print(table)
    count = len(found) - len(groups["skipped"])
    for line in (
        f"{len(groups['fails'])} of {count} still fail with torch {torch.__version__} on {card_of(device).name}.",
        _list("No longer fail", groups["fixed"]),
        _list("Do not fail on this device, documented on another", groups["elsewhere"]),
        _list("Not tried, for want of a GPU", groups["skipped"]),
    ):
        if line:
            screen.print(line)
    wrong = [each.case.name for each in found if each.ours.status in FAILURES]
    if wrong:
        screen.print(_list("SparseK itself fails", wrong), style="bold red")
    screen.print(
        "Errors are relative to float64. Issue numbers are pytorch's. --verbose shows the code, --only picks entries.",
        style="dim",
    )


def _list(what: str, names: Sequence[str]) -> str:
    return f"{what}: {', '.join(names)}." if names else ""


def _cell(answer: Answer, note: str = "") -> Text:
    return Text.assemble((answer.status, STYLES[answer.status]), f": {answer.text}{note}")


def _show_code(each: Finding, device: torch.device) -> None:
    screen = console()
    screen.print(f"{each.case.name}: {each.case.tried} ({each.case.where})", style="bold", soft_wrap=True)
    screen.print(f"  {describe_operands(each.case, device)}", style="dim", soft_wrap=True)
    code = each.case.code
    shown = {"torch": code["torch"], "SparseK": code["sparsek"]}
    if code["torch"] == code["sparsek"]:
        shown = {"torch and SparseK": code["torch"]}
    for name, text in shown.items():
        screen.print(f"  {name}", style="dim")
        for line in text.splitlines():
            screen.print(f"    {line}", soft_wrap=True)
    screen.print("")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.torch_bsr")
