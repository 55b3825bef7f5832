"""`sparsek bench`: a command for each benchmark of `sparsek_bench/benches.py`, and one for all."""

from importlib import import_module
from typing import Any

import typer

from sparsek.core.terminal import group
from sparsek_bench.benches import BENCHES, HELP

ALL = "Measures every published row whose record is not of this source, card and versions; run again, it goes on."


def loaded(name: str) -> Any:
    """The function of a command, which brings torch with it."""
    if name == "all":
        return import_module("sparsek_bench.commands.bench_all").everything
    return import_module("sparsek_bench.commands.bench_run").command(BENCHES[name])


app = typer.Typer(
    cls=group({**HELP, "all": ALL}, loaded),
    callback=lambda: None,
    help="Measures kernels beside their peers, with a correctness check before any time.",
    no_args_is_help=True,
)
