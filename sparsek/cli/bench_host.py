"""`sparsek bench host`: what calls cost the host, beside torch's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer

from sparsek.bench.suites import host as host_cases
from sparsek.bench.suites.case import Case, parse_block
from sparsek.bench.suites.host_calls import CALLS, STORAGES
from sparsek.cli.bench_run import (
    BESIDE_A_SUITE,
    Asked,
    Blocks,
    Device,
    Dtypes,
    Only,
    Out,
    Rounds,
    bench,
    given_of,
    listed,
    suite_option,
)

ON_A_CPU = "--call linear --sides 16x64x64 --block 32 --dtype fp32"
FORMS = sorted({*host_cases.SIDES.values(), host_cases.LAYER_SIDES})


def host(
    context: typer.Context,
    call: Annotated[str, typer.Option(help=f"Calls: {', '.join(CALLS)}.")] = "A @ B",
    sides: Annotated[
        str, typer.Option(help=f"By call: {'; '.join(FORMS)}, as 64x1024x1024.")
    ] = "1024x1024x1024",
    storage: Annotated[str, typer.Option(help=f"Of a layer's weight: {', '.join(STORAGES)}.")] = "bsr",
    block: Blocks = "128",
    density: Annotated[str, typer.Option(help="Fraction of blocks that are stored.")] = "0.25",
    dtype: Dtypes = "bf16",
    caches: Annotated[
        str, typer.Option(help=f"The first call of a new process, caches {' or '.join(host_cases.CACHES)}.")
    ] = "",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(host_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
) -> None:
    """The host's time of calls as users write them, each over its torch peer: the suite, or the calls given by hand."""

    def cases() -> Sequence[Case]:
        # A call's name may hold a comma: "plan(A, B)".
        calls = [call] if call in CALLS else listed("call", call, str)
        return host_cases.product(
            calls,
            listed("sides", sides, host_cases.parse_sides),
            listed("storage", storage, str),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("dtype", dtype, str),
            listed("caches", caches, str),
        )

    asked = Asked(context, "none", rounds, named, only, device, out, None)
    if not set(given_of(context)) - set(BESIDE_A_SUITE):
        asked = replace(asked, named=named or "host")
    bench(asked, host_cases.SUITES, (), cases, by_hand=ON_A_CPU)
