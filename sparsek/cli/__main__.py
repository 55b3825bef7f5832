"""`sparsek`: doctor, demo, advise, bench, report, tune. A command's module is loaded when the command runs."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from sparsek.cli.output import Commands, without_boxes

# Each is a function of its name in sparsek.cli, or a group called `app`; with the first line of its help.
COMMANDS = {
    "doctor": "Shows versions, the GPU and the kernels, says why any does not run here, and checks products and "
    "attention.",
    "demo": "Runs attention under a mask beside torch's, then advise on the weights of MiniLM, and draws one matrix.",
    "advise": "Prunes weights to blocks and to 2:4, multiplies, checks, and says which format pays.",
    "report": "Prints the tables of the newest records, and writes or checks the pages that show them.",
    "tune": "Measures configs of each kernel, each checked first, and keeps the winners in a table that plans consult.",
    "bench": "Measure, with a correctness gate before any time.",
}


class Deferred(TyperCommand):
    """A command that is known by its name and its help, until it runs or its own help is printed."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        return self.load().make_context(*args, **kwargs)

    def load(self) -> Any:
        """The command itself."""
        name = str(self.name)
        module = import_module(f"sparsek.cli.{name}")
        holder = typer.Typer(callback=lambda: None, add_completion=False)
        if hasattr(module, "app"):
            holder.add_typer(module.app, name=name)
        else:
            holder.command(name)(getattr(module, name))
        command = get_command(holder).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
        if self.rich_markup_mode is None:
            without_boxes(command)
        return command


class Program(Commands):
    """All commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, text in COMMANDS.items():
            self.add_command(Deferred(name, help=text, rich_markup_mode=self.rich_markup_mode))


app = typer.Typer(
    name="sparsek",
    cls=Program,
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
