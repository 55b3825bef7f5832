"""`sparsek`: doctor, demo, advise, tune, bench, profile. A command's module loads when the command runs."""

from importlib import import_module, util
from typing import Annotated, Any

import typer

from sparsek import __version__
from sparsek.core import doors
from sparsek.core.terminal import console, group

# Each is a function of its name in a module of this name, or a group called `app`; with the first line of its help.
COMMANDS = {
    "doctor": "Shows versions, GPUs and the kernel of each operation, and checks every kernel that runs here.",
    "demo": "Runs attention under a mask beside torch's, then advise on the weights of MiniLM, and draws one matrix.",
    "advise": "Prunes weights to blocks and to 2:4, multiplies, checks, and shows which format pays.",
    "prune": "Prunes the linear layers of a model by calibration, and writes a checkpoint that from_pretrained loads.",
    "tune": "Measures every config of each kernel, each checked first, and prints mean and deviation, the best first.",
    "bench": "Measures kernels beside their peers, with a correctness check before any time.",
    "profile": "Shows what bounds a kernel: the plan's prediction; on a GPU also times, a trace, and ncu's counters.",
}


def loaded(name: str) -> Any:
    """The function of a command, or its group."""
    places = (f"{room.__name__}.{name}" for room in doors.enter("commands"))
    module = import_module(next(filter(util.find_spec, places)))
    return getattr(module, "app", None) or getattr(module, name)


def _version(wanted: bool) -> None:
    if wanted:
        console().print(f"sparsek {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options of `sparsek` itself."""


app = typer.Typer(
    name="sparsek",
    cls=group(COMMANDS, loaded),
    callback=_options,
    help="Block-sparse matrix products and attention for NVIDIA Hopper.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `sparsek` program."""
    app()


if __name__ == "__main__":
    main()
