"""`sparsek doctor`: what is installed, what it can run, and whether the arithmetic is right."""

import platform

import torch
import typer
from rich.table import Table
from rich.text import Text

import sparsek as sk
from sparsek.bench.records import smi_facts, version_of
from sparsek.bench.spmm import SpmmCase
from sparsek.cli.output import console, progress
from sparsek.cli.output import table as new_table
from sparsek.core.device import card_of
from sparsek.core.errors import Unsupported
from sparsek.kernels import names_for
from sparsek.ops.spmm import plan_spmm
from sparsek.testing.budget import check_spmm

CHECKED = SpmmCase(512, 512, 192, (64, 64), 0.5)


def doctor() -> None:
    """Shows versions, the GPU and the kernels, says why any does not run here, and checks a product."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = console()
    out.print(_versions(device))
    table, wrong = _kernels(device)
    out.print(table)
    if wrong:
        out.print(f"wrong results from {', '.join(wrong)}", style="bold red")
        raise typer.Exit(1)
    out.print(
        f"self check: {CHECKED.name} on {device.type}, every kernel that runs here is within its error budget"
    )


def _versions(device: torch.device) -> Table:
    table = new_table("SparseK")
    table.show_header = False
    table.add_row("sparsek", getattr(sk, "__version__", None) or version_of("sparsek") or "from source")
    table.add_row("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", torch.__version__)
    table.add_row("triton", version_of("triton") or "not installed")
    table.add_row("numpy", version_of("numpy") or "not installed")
    if device.type == "cuda":
        card = card_of(device)
        driver, power = smi_facts(device.index or 0)
        facts = f"{card.name}, sm_{card.capability[0]}{card.capability[1]}, {card.sm_count} SMs"
        table.add_row("GPU", f"{facts}, {power:.0f} W" if power else facts)
        table.add_row("driver", driver or "unknown (nvidia-smi does not answer)")
        table.add_row("CUDA of torch", torch.version.cuda or "none")
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        table.add_row("GPU", f"none that torch can use (torch is {built}); products run on the CPU")
    return table


def _kernels(device: torch.device) -> tuple[Table, list[str]]:
    """The table of kernels, and the names of those whose result is wrong."""
    table = new_table("Kernels")
    table.add_column("kernel", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why")
    wrong: list[str] = []
    a, b = CHECKED.make(device)
    names = names_for("spmm")
    with progress(len(names), "kernels") as (say, advance):
        for name in names:
            say(name)
            try:
                plan = plan_spmm(a, b, kernel=name)
                got = check_spmm(a, b, plan(a, b))
            except Unsupported as error:
                table.add_row(name, "no", "; ".join(error.reasons.get(name, [str(error)])))
            else:
                share = f"error {got.error:.1e} of {got.budget:.1e} allowed"
                table.add_row(name, Text("runs", "green") if got.passed else Text("wrong", "bold red"), share)
                if not got.passed:
                    wrong.append(name)
            advance()
    return table, wrong
