"""Options that several commands have."""

from typing import Annotated, Any

import typer

from sparsek.core import dtypes
from sparsek.core.device import GPUS


def _fraction(given: Any) -> float:
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter(f"{given} is no number; write a fraction such as 0.25") from None


Keep = Annotated[
    float, typer.Option(parser=_fraction, metavar="<float>", help="Fraction of blocks that stay.")
]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(dtypes.NAMES.values())}.")]
ToPredict = Annotated[
    str | None,
    typer.Option(
        help=f"cuda, cpu, or a card to predict for ({', '.join(GPUS)}). Default: the GPU, else h200."
    ),
]
