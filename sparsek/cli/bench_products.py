"""`sparsek bench sddmm`, `spgemm`, `linear` and `mlp`."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sparsek.bench.peers import linear as linear_peers
from sparsek.bench.peers import mlp as mlp_peers
from sparsek.bench.peers import sddmm as sddmm_peers
from sparsek.bench.peers import spgemm as spgemm_peers
from sparsek.bench.suites import linear as linear_cases
from sparsek.bench.suites import mlp as mlp_cases
from sparsek.bench.suites import sddmm as sddmm_cases
from sparsek.bench.suites import spgemm as spgemm_cases
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
from sparsek.matrix.random import PATTERNS


def sddmm(
    context: typer.Context,
    m: Annotated[str, typer.Option(help="Rows of X; comma lists give every combination.")] = "8192",
    k: Annotated[str, typer.Option(help="Columns of X.")] = "8192",
    n: Annotated[str, typer.Option(help="Columns of Y.")] = "8192",
    block: Blocks = "128",
    density: Densities = "0.125",
    pattern: Annotated[str, typer.Option(help=f"{', '.join(PATTERNS)}.")] = "uniform",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(sddmm_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(sddmm_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """X @ Y at the stored blocks of a pattern, against its peers."""

    def cases() -> Sequence[Case]:
        return sddmm_cases.product(
            listed("m", m, int),
            listed("k", k, int),
            listed("n", n, int),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("pattern", pattern, str),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, sddmm_cases.SUITES, sddmm_peers.PEERS, cases, kernel, by_hand=SMALL_PRODUCT)


def spgemm(
    context: typer.Context,
    m: Annotated[str, typer.Option(help="Rows of A; comma lists give every combination.")] = "8192",
    k: Annotated[str, typer.Option(help="Columns of A.")] = "8192",
    n: Annotated[str, typer.Option(help="Columns of B.")] = "8192",
    block: Annotated[str, typer.Option(help="Blocks, of A and of B: 128,512x112:112x128.")] = "128",
    density: Annotated[str, typer.Option(help="Fraction of blocks that either stores.")] = "0.125",
    result: Annotated[str, typer.Option(help=f"What C is: {', '.join(spgemm_cases.OUTPUTS)}.")] = "dense",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(spgemm_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(spgemm_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """BSR x BSR against its peers, and what finding out which blocks meet takes of a first call."""

    def cases() -> Sequence[Case]:
        return spgemm_cases.product(
            listed("m", m, int),
            listed("k", k, int),
            listed("n", n, int),
            listed("block", block, spgemm_cases.parse_blocks),
            listed("density", density, float),
            listed("result", result, str),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, spgemm_cases.SUITES, spgemm_peers.PEERS, cases, kernel, by_hand=SMALL_PRODUCT)


def linear(
    context: typer.Context,
    tokens: Annotated[str, typer.Option(help="Rows of x; comma lists give every combination.")] = "8192",
    k: Annotated[str, typer.Option(help="Features that come in.")] = "8192",
    n: Annotated[str, typer.Option(help="Features that go out.")] = "8192",
    block: Blocks = "128",
    density: Densities = "0.125",
    epilogue: Annotated[
        str, typer.Option(help=f"What follows the product, joined by +: {', '.join(linear_cases.PARTS)}.")
    ] = "bias+gelu",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(linear_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(linear_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """act(x @ W.T + bias) + residual, against torch and against this library's plain product."""

    def cases() -> Sequence[Case]:
        return linear_cases.product(
            listed("tokens", tokens, int),
            listed("k", k, int),
            listed("n", n, int),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("epilogue", epilogue, str),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    small = "--tokens 64 --k 512 --n 512"
    bench(asked, linear_cases.SUITES, linear_peers.PEERS, cases, kernel, by_hand=small)


def mlp(
    context: typer.Context,
    measure: Annotated[
        str, typer.Option(help=f"{', '.join(mlp_cases.MEASURES)}; comma lists give every combination.")
    ] = "train",
    tokens: Annotated[str, typer.Option(help="Rows of x.")] = "8192",
    width: Annotated[str, typer.Option(help="Features that come in and go out.")] = "4096",
    hidden: Annotated[str, typer.Option(help="Features between the two products.")] = "16384",
    block: Blocks = "128",
    density: Densities = "0.125",
    dtype: Dtypes = "bf16",
    peers: Annotated[str, peers_option(mlp_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(mlp_cases.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """An MLP with gelu against torch's: a training step, eager or compiled, or decoding in a CUDA graph."""

    def cases() -> Sequence[Case]:
        return mlp_cases.product(
            listed("measure", measure, str),
            listed("tokens", tokens, int),
            listed("width", width, int),
            listed("hidden", hidden, int),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    small = "--tokens 64 --width 512 --hidden 512"
    bench(asked, mlp_cases.SUITES, mlp_peers.PEERS, cases, by_hand=small)
