"""Does the planner choose well? Its choice among the ways to store a weight, against the best measured.

One case is a suite of layers, each with a share of blocks to keep. `bench/suites/planner_run.py` measures it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from sparsek.bench.suites.case import DTYPE, Case, Operands, Option, Schema, SuiteRow, suite_named
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.ops.weight_formats import FORMATS, ways

# What the records of the planner are hashed over: how W is stored and predicted, and the model of the dense product.
PLANNER = "ops.weight_formats"
BESIDE = ("plan.dense",)


@dataclass(frozen=True)
class Layer:
    """y [tokens, n] = x [tokens, k] @ W.T, of W a share `keep` of the blocks kept."""

    tokens: int
    n: int
    k: int
    keep: float

    @property
    def name(self) -> str:
        return f"{self.tokens} x {self.k} to {self.n}, {self.keep * 100:.4g} %"

    @property
    def flops(self) -> float:
        return 2.0 * self.tokens * self.n * self.k


# Attention and MLP layers of models with 2048 to 8192 features, from decoding to long prompts. The wider two densities
# go with every other number of tokens.
SHAPES = ((2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192))
TOKENS = (16, 256, 1024, 4096, 8192)
KEEPS = ((0.5, 0.125), (0.25, 0.0625))
LAYERS: Mapping[str, tuple[Layer, ...]] = {
    "models": tuple(
        Layer(tokens, n, k, keep)
        for n, k in SHAPES
        for at, tokens in enumerate(TOKENS)
        for keep in KEEPS[at % 2]
    ),
    # For which no model was fitted: other shapes, tokens and densities.
    "other": tuple(
        Layer(tokens, n, k, (0.375, 0.1)[(at + place) % 2])
        for at, (n, k) in enumerate(((5120, 5120), (11008, 4096), (4096, 11008), (3072, 12288)))
        for place, tokens in enumerate((32, 512, 2048, 6144))
    ),
    "few": (Layer(64, 128, 256, 0.5), Layer(48, 256, 128, 0.25)),
}


@dataclass(frozen=True)
class PlannerCase(Case):
    """All layers of a suite in one dtype. `formats`: those considered, joined by +; "all": that have kernels."""

    op: ClassVar[str] = "planner"

    layers: str = "models"
    dtype: str = "bf16"
    formats: str = "all"

    def __post_init__(self) -> None:
        suite_named(LAYERS, self.layers)
        dtypes.parse(self.dtype)
        list(ways(self.listed, (), ()))

    @property
    def listed(self) -> list[str] | None:
        """The formats, as `choose_format` takes them."""
        return None if self.formats == "all" else self.formats.split("+")

    @property
    def name(self) -> str:
        """ "50 layers x densities of models, bf16"."""
        shown = "" if self.formats == "all" else f", {self.formats}"
        return f"{len(LAYERS[self.layers])} layers × densities of {self.layers}, {self.dtype}{shown}"

    @property
    def order(self) -> tuple[Any, ...]:
        return self.layers, self.dtype, self.formats

    @property
    def dense_flops(self) -> float:
        return sum(layer.flops for layer in LAYERS[self.layers])

    def operands(self, device: torch.device, seed: int = 0) -> Sequence[Operands]:
        """None: every layer makes its own while it is measured."""
        raise InvalidInput("a case of the planner is measured by planner_run.run_planner")


SCHEMAS: Mapping[str, Schema] = {
    "planner": Schema(
        PlannerCase, rated=False, extra=("near", "near_measured", "count", "worst"), sources=BESIDE
    ),
}
MODELS: tuple[SuiteRow, ...] = (SuiteRow(PlannerCase("models")),)
SUITES: Mapping[str, tuple[SuiteRow, ...]] = {"models": MODELS, "other": (SuiteRow(PlannerCase("other")),)}
OPTIONS: tuple[Option, ...] = (
    Option("layers", "models", f"Layers with densities: {', '.join(LAYERS)}."),
    DTYPE,
    Option(
        "format",
        "all",
        f"all that have kernels, or some of {', '.join(FORMATS)}, joined by +.",
        fields=("formats",),
    ),
)
