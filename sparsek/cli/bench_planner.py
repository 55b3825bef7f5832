"""`sparsek bench planner`: what the planner would choose, against the best measured of its options."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sparsek.bench.suites.case import Case
from sparsek.bench.suites.planner import LAYERS, PLANNER, SUITES, PlannerCase
from sparsek.cli.bench_run import Asked, Device, Dtypes, Only, Out, Rounds, bench, listed, suite_option
from sparsek.ops.weight_formats import FORMATS


def planner(
    context: typer.Context,
    layers: Annotated[str, typer.Option(help=f"Layers with densities: {', '.join(LAYERS)}.")] = "issue6",
    dtype: Dtypes = "bf16",
    formats: Annotated[
        str,
        typer.Option(
            "--format", help=f"all that have kernels, or some of {', '.join(FORMATS)}, joined by +."
        ),
    ] = "all",
    rounds: Rounds = 5,
    named: Annotated[str | None, suite_option(SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
) -> None:
    """Every way to store a layer's weight, checked and timed; the one that predictions choose against the fastest."""

    def cases() -> Sequence[Case]:
        return [
            PlannerCase(name, kind, formats)
            for name in listed("layers", layers, str)
            for kind in listed("dtype", dtype, str)
        ]

    asked = Asked(context, "none", rounds, named, only, device, out, None)
    bench(asked, SUITES, (), cases, PLANNER, by_hand="--layers few --dtype fp32")
