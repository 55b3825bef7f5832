"""`sparsek bench`: a command for each benchmark of `bench/benches.py`, and one for all."""

from functools import partial
from importlib import import_module
from typing import Any

import typer

from sparsek.bench.benches import BENCHES, HELP
from sparsek.cli.deferred import Deferred
from sparsek.cli.output import Commands

ALL = "Measures every published row whose record is not of this source, card and versions; run again, it goes on."


def loaded(name: str) -> Any:
    """The function of a command, which brings torch with it."""
    if name == "all":
        return import_module("sparsek.cli.bench_all").everything
    return import_module("sparsek.cli.bench_one").command(BENCHES[name])


class Benchmarks(Commands):
    """A command for each benchmark, and one for all."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, text in {**HELP, "all": ALL}.items():
            self.add_command(Deferred(name, text, self.rich_markup_mode, partial(loaded, name)))


app = typer.Typer(
    cls=Benchmarks,
    callback=lambda: None,
    help="Measure, with a correctness gate before any time.",
    no_args_is_help=True,
)
