"""`sparsek`: doctor, demo, advise, bench, tune. A command's module is loaded when the command runs."""

from importlib import import_module
from typing import Any

import typer

from sparsek.cli.deferred import group

# Each is a function of its name in sparsek.cli, or a group called `app`; with the first line of its help.
COMMANDS = {
    "doctor": "Shows versions, the GPU and the kernels, says why any does not run here, and checks products and "
    "attention.",
    "demo": "Runs attention under a mask beside torch's, then advise on the weights of MiniLM, and draws one matrix.",
    "advise": "Prunes weights to blocks and to 2:4, multiplies, checks, and says which format pays.",
    "tune": "Measures configs of each kernel, each checked first, and keeps the winners in a table that plans consult.",
    "bench": "Measure, with a correctness gate before any time.",
}


def loaded(name: str) -> Any:
    """The function of a command, or its group."""
    module = import_module(f"sparsek.cli.{name}")
    return getattr(module, "app", None) or getattr(module, name)


app = typer.Typer(
    name="sparsek",
    cls=group(COMMANDS, loaded),
    callback=lambda: None,
    help="Block-sparse matrix products and attention for NVIDIA Hopper: look, plan, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `sparsek` program."""
    app()


if __name__ == "__main__":
    main()
