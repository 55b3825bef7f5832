"""`sparsek bench spmm`, `sparsek bench attention` and the others: gate, interleaved rounds, records."""

from collections.abc import Sequence
from typing import Annotated

import typer

from sparsek.bench.peers import attention as attention_peers
from sparsek.bench.peers import attention_grad as attention_grad_peers
from sparsek.bench.peers import spmm as spmm_peers
from sparsek.bench.suites import attention as attention_cases
from sparsek.bench.suites import attention_grad
from sparsek.bench.suites import spmm as spmm_cases
from sparsek.bench.suites.attention import parse_lengths, parse_pair
from sparsek.bench.suites.attention_masks import KINDS
from sparsek.bench.suites.case import Case, parse_block
from sparsek.cli import bench_all, bench_host, bench_planner, bench_products, bench_two_four
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
from sparsek.cli.output import Commands
from sparsek.matrix.random import PATTERNS

app = typer.Typer(
    cls=Commands, help="Measure, with a correctness gate before any time.", no_args_is_help=True
)
Lengths = Annotated[
    str,
    typer.Option("--seq", help="Queries and keys: 8K,32768, or 1Kx8K; comma lists give every combination."),
]
Masks = Annotated[
    str,
    typer.Option(
        "--mask", help=f"Masks, with numbers for the letters: {', '.join(kind.form for kind in KINDS)}."
    ),
]
MaskBlocks = Annotated[str, typer.Option("--block", help="Blocks of the masks: 128,64,64x128.")]
Heads = Annotated[str, typer.Option("--heads", help="Heads of queries, or of queries and keys: 16,32:4.")]
Dims = Annotated[str, typer.Option("--dim", help="Head sizes, or those of keys and values: 64,192:128.")]
Batches = Annotated[str, typer.Option("--batch", help="Batch sizes.")]
# A second or two of a CPU, whatever the mask.
ON_A_CPU = "--seq 1K --heads 2 --dim 64 --dtype fp32"
Host = Annotated[bool, typer.Option("--host", help="Time the host side of an eager call instead.")]


@app.callback()
def group() -> None:
    """Measure, with a correctness gate before any time."""


@app.command("spmm")
def spmm(
    context: typer.Context,
    m: Annotated[str, typer.Option(help="Rows of A; comma lists give every combination.")] = "8192",
    k: Annotated[str, typer.Option(help="Columns of A.")] = "8192",
    n: Annotated[str, typer.Option(help="The side of B that A does not meet.")] = "8192",
    block: Blocks = "128",
    density: Densities = "0.125",
    pattern: Annotated[str, typer.Option(help=f"{', '.join(PATTERNS)}.")] = "uniform",
    form: Annotated[str, typer.Option(help=f"Products: {', '.join(spmm_cases.FORMS)}.")] = spmm_cases.A_AT_B,
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(spmm_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(spmm_cases.SUITES)] = None,
    only: Only = None,
    host: Host = False,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """BSR and dense against its peers: N(0, 1) data, rotating buffers, interleaved rounds, median, spread."""

    def cases() -> Sequence[Case]:
        return spmm_cases.product(
            listed("m", m, int),
            listed("k", k, int),
            listed("n", n, int),
            listed("block", block, parse_block),
            listed("density", density, float),
            listed("pattern", pattern, str),
            listed("dtype", dtype, str),
            listed("form", form, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    op = "spmm_host" if host else ""
    bench(asked, spmm_cases.SUITES, spmm_peers.PEERS, cases, kernel, op, by_hand=SMALL_PRODUCT)


@app.command("attention")
def attention(
    context: typer.Context,
    seq: Lengths = "8K",
    mask: Masks = "blocks:0.125",
    block: MaskBlocks = "128",
    heads: Heads = "16",
    dim: Dims = "128",
    batch: Batches = "1",
    dtype: Dtypes = "bf16",
    kernel: Kernels = "auto",
    peers: Annotated[str, peers_option(attention_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(attention_cases.SUITES)] = None,
    only: Only = None,
    host: Host = False,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """Attention over the blocks of a mask against its peers: N(0, 1) data, rotating buffers, interleaved rounds."""

    def cases() -> Sequence[Case]:
        return attention_cases.product(
            listed("batch", batch, int),
            listed("heads", heads, parse_pair),
            listed("seq", seq, parse_lengths),
            listed("dim", dim, parse_pair),
            listed("mask", mask, str),
            listed("block", block, parse_block),
            listed("dtype", dtype, str),
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    op = "attention_host" if host else ""
    bench(asked, attention_cases.SUITES, attention_peers.PEERS, cases, kernel, op, by_hand=ON_A_CPU)


@app.command("attention-backward")
def attention_backward(
    context: typer.Context,
    measure: Annotated[
        str, typer.Option(help=f"{', '.join(attention_grad.MEASURES)}: the gradients, or a training step.")
    ] = "backward",
    seq: Lengths = "8K",
    mask: Masks = "blocks:0.125",
    block: MaskBlocks = "128",
    heads: Heads = "16",
    dim: Dims = "128",
    batch: Batches = "1",
    dtype: Dtypes = "bf16",
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic/--any-order", help="The same bits every time, or sums in any order."),
    ] = True,
    kernel: Annotated[
        str,
        typer.Option(
            help="Kernels by name, of a step the forward pass's; auto is the planner's choice.",
        ),
    ] = "auto",
    peers: Annotated[str, peers_option(attention_grad_peers.PEERS)] = "all",
    rounds: Rounds = 7,
    named: Annotated[str | None, suite_option(attention_grad.SUITES)] = None,
    only: Only = None,
    device: Device = None,
    out: Out = None,
    plot: Plot = None,
) -> None:
    """The gradients of attention against their peers, alone or with the forward pass of a training step."""

    def cases() -> Sequence[Case]:
        return attention_grad.product(
            listed("measure", measure, str),
            listed("batch", batch, int),
            listed("heads", heads, parse_pair),
            listed("seq", seq, parse_lengths),
            listed("dim", dim, parse_pair),
            listed("mask", mask, str),
            listed("block", block, parse_block),
            listed("dtype", dtype, str),
            deterministic=deterministic,
        )

    asked = Asked(context, peers, rounds, named, only, device, out, plot)
    bench(asked, attention_grad.SUITES, attention_grad_peers.PEERS, cases, kernel, by_hand=ON_A_CPU)


app.command("sddmm")(bench_products.sddmm)
app.command("spgemm")(bench_products.spgemm)
app.command("linear")(bench_products.linear)
app.command("mlp")(bench_products.mlp)
app.command("semi24")(bench_two_four.semi24)
app.command("fp8")(bench_two_four.fp8)
app.command("pack")(bench_two_four.pack)
app.command("all")(bench_all.everything)
app.command("planner")(bench_planner.planner)
app.command("host")(bench_host.host)
