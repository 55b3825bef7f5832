"""`sparsek bench semi24`, `fp8` and `pack`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sparsek.bench.peers import fp8 as fp8_peers
from sparsek.bench.peers import semi24 as semi24_peers
from sparsek.bench.suites import fp8 as fp8_cases
from sparsek.bench.suites import pack as pack_cases
from sparsek.bench.suites import semi24 as semi24_cases
from sparsek.bench.suites import story
from sparsek.bench.suites.case import Case, parse_block
from sparsek.cli.bench_run import (
    SMALL_PRODUCT,
    Asked,
    Blocks,
    Densities,
    Device,
    Dtypes,
    Kernels,
    Only,
    Out,
    Plot,
    Rounds,
    bench,
    listed,
    peers_option,
    suite_option,
)

# A second or two of a CPU.
SUITES_24 = {**semi24_cases.SUITES, **story.SUITES}


def semi24(
    context: typer.Context,
    m: Annotated[
        str, typer.Option(help="Rows of the 2:4 matrix; comma lists give every combination.")
    ] = "8192",
    k: Annotated[str, typer.Option(help="Its columns.")] = "8192",
    n: Annotated[str, typer.Option(help="Rows of x, or columns of B.")] = "8192",
    form: Annotated[
        str, typer.Option(help=f"Products: {', '.join(semi24_cases.FORMS)}.")
    ] = semi24_cases.LINEAR,
    block: Annotated[str, typer.Option(help="Stored blocks, or none: none,128.")] = "none",
    density: Densities = "1",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(semi24_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(SUITES_24)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """2:4 matrices, whole or in stored blocks, against cuSPARSELt, cuBLAS and this library's BSR."""

    def cases() -> Sequence[Case]:
        return semi24_cases.product(
            listed("m", m, int),
            listed("k", k, int),
            listed("n", n, int),
            listed("form", form, str),
            listed("block", block, semi24_cases.parse_blocks),
            listed("density", density, float),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, SUITES_24, semi24_peers.PEERS, cases, kernel, by_hand=SMALL_PRODUCT)


def fp8(
    context: typer.Context,
    m: Annotated[
        str, typer.Option(help="Rows of the FP8 matrix; comma lists give every combination.")
    ] = "8192",
    k: Annotated[str, typer.Option(help="Its columns.")] = "8192",
    n: Annotated[str, typer.Option(help="Rows of x, or columns of B.")] = "8192",
    stored: Annotated[str, typer.Option(help=f"Formats: {', '.join(fp8_cases.STORED)}.")] = "bsr",
    block: Blocks = "128",
    density: Densities = "0.125",
    form: Annotated[str, typer.Option(help=f"Products: {', '.join(fp8_cases.FORMS)}.")] = fp8_cases.LINEAR,
    scale: Annotated[str, typer.Option(help=f"What shares a scale: {', '.join(fp8_cases.SCALES)}.")] = "row",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(fp8_cases.DTYPES)}.")] = "e4m3",
    fast_accum: Annotated[
        bool, typer.Option("--fast-accum", help="Sums may stay in the tensor cores.")
    ] = False,
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(fp8_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(fp8_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """FP8 matrices in blocks or in 2:4 against cuBLAS, cuSPARSELt and the same in bf16."""

    def cases() -> Sequence[Case]:
        return fp8_cases.product(
            (listed("m", m, int), listed("k", k, int), listed("n", n, int)),
            listed("stored", stored, str),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("form", form, str),
            listed("scale", scale, str),
            listed("dtype", dtype, str),
            fast_accum,
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, fp8_cases.SUITES, fp8_peers.PEERS, cases, kernel, by_hand=SMALL_PRODUCT)


def pack(
    context: typer.Context,
    m: Annotated[
        str, typer.Option(help="Rows of the dense matrix; comma lists give every combination.")
    ] = "8192",
    k: Annotated[str, typer.Option(help="Its columns.")] = "8192",
    to: Annotated[
        str, typer.Option(help=f"What it becomes: {', '.join(pack_cases.TARGETS)}.")
    ] = "semi24,bsr",
    block: Blocks = "128",
    keep: Annotated[str, typer.Option(help="Fraction of blocks that a BSR keeps.")] = "0.125",
    dtype: Dtypes = "bf16",
    peers: Annotated[str, peers_option(pack_cases.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(pack_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Dense matrices packed into Semi24 or BSR, against a copy of the same matrix."""

    def cases() -> Sequence[Case]:
        return pack_cases.product(
            listed("m", m, int),
            listed("k", k, int),
            listed("to", to, str),
            listed("block", block, parse_block),
            listed("keep", keep, float),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, pack_cases.SUITES, pack_cases.PEERS, cases)
