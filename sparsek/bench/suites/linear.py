"""y = act(x @ W.T + bias) + residual as a benchmark: its cases, their operands, its suites."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.bench.engine.bench import Bench, Column, Record, Table
from sparsek.bench.engine.case import Case, Schema, SuiteRow, check_case
from sparsek.bench.engine.data import random_dense, revalued, sets_of
from sparsek.bench.engine.names import block_name, stored_name
from sparsek.bench.engine.options import BLOCK, DENSITY, DTYPE, Option
from sparsek.bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL
from sparsek.bench.suites.product import LINEAR, ProductOperands
from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix.random import random_bsr
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.spmm import SpmmPlan
from sparsek.reference.epilogue import ACTIVATION_NAMES, ACTIVATIONS, Activation, Epilogue
from sparsek.testing.budget import Gate
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear

# What a case's `epilogue` may name, joined by "+": "bias+gelu", "bias+residual".
PARTS = ("bias", *filter(None, ACTIVATIONS), "residual")


@dataclass(frozen=True)
class LinearOperands(ProductOperands):
    """One of the rotating sets: its own x [tokens, k], W [n, k] and output, and bias [n] and residual [tokens, n]."""

    bias: Tensor | None = None
    activation: Activation | None = None
    residual: Tensor | None = None

    @property
    def after(self) -> tuple[Any, Any, Any]:
        """Bias, activation and residual."""
        return self.bias, self.activation, self.residual

    @property
    def options(self) -> dict[str, Any]:
        epilogue = Epilogue(bias=self.bias, activation=self.activation or "", other=self.residual)
        return {"out": self.out, "epilogue": epilogue}

    def plan(self, kernel: str | None) -> SpmmPlan:
        return plan_spmm(*self.given, **self.options, kernel=kernel)

    def judge(self, out: Tensor, *, tf32: bool = False) -> Gate:
        """Whether `out` is the result of this set."""
        return check_linear(self.b, self.a, out, *self.after, tf32=tf32)

    def layer(self, x: Tensor, w: Tensor) -> Tensor:
        y = ACTIVATIONS[self.activation or ""](functional.linear(x, w, self.bias))
        return y if self.residual is None else y + self.residual


@dataclass(frozen=True)
class LinearCase(Case):
    """y [tokens, n] = act(x [tokens, k] @ W.T + bias) + residual, with `density` of the blocks of W [n, k] stored.

    `epilogue` names what follows the product, joined by "+", in the order bias, activation, residual; "" is nothing.
    """

    op: ClassVar[str] = "linear"

    tokens: int
    k: int
    n: int
    block: tuple[int, int]
    density: float
    epilogue: str = ""
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_case(self, "tokens", "k", "n")
        parts = self.parts
        right = [part for part in PARTS if part in parts]
        if parts != right or len(self.activations) > 1:
            raise InvalidInput(
                f"an epilogue is bias, one of {', '.join(filter(None, ACTIVATIONS))}, and residual, in this order, "
                f"each if wanted, joined by +; got {self.epilogue!r}"
            )

    @property
    def parts(self) -> list[str]:
        """What follows the product."""
        return self.epilogue.split("+") if self.epilogue else []

    @property
    def activations(self) -> list[Activation]:
        return [part for part in ACTIVATION_NAMES if part in self.parts]

    @property
    def name(self) -> str:
        """One short line: "8192 tokens, 4096 to 16384, block 128 12.5 % bf16, bias + gelu"."""
        stored = stored_name(block_name(self.block), self.density, self.dtype)
        after = " + ".join(self.parts) or "plain"
        return f"{self.tokens} tokens, {self.k} to {self.n}, {stored}, {after}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by size, then block, then falling density."""
        size = self.tokens * self.k * self.n
        return size, self.block, -self.density, self.epilogue, self.dtype

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.tokens * self.k * self.n

    def operands(self, device: torch.device, seed: int = 0) -> list[LinearOperands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache. N(0, 1) values."""
        dtype = dtypes.parse(self.dtype)
        w = random_bsr(self.n, self.k, self.block, self.density, dtype=dtype, device=device, seed=seed)
        outputs = self.n * (2 if "residual" in self.parts else 1)
        footprint = (w.values.numel() + self.tokens * (self.k + outputs)) * dtype.itemsize

        def draw(index: int, place: int, *shape: int) -> Tensor:
            return random_dense(*shape, dtype=dtype, device=device, seed=seed + 10 * index + place)

        def one(index: int) -> LinearOperands:
            return LinearOperands(
                revalued(w, seed + 10 * index) if index else w,
                draw(index, 1, self.tokens, self.k),
                poisoned((self.tokens, self.n), dtype, device),
                LINEAR,
                draw(index, 2, self.n) if "bias" in self.parts else None,
                next(iter(self.activations), None),
                draw(index, 3, self.tokens, self.n) if "residual" in self.parts else None,
            )

        return sets_of(device, footprint, one)


# What each way to go on after the product costs beside the product alone.
PUBLISHED: tuple[SuiteRow, ...] = (
    *(
        SuiteRow(LinearCase(8192, 8192, 8192, (128, 128), 0.125, epilogue), ("hopper.spmm",))
        for epilogue in ("bias+gelu", "bias+gelu_tanh", "bias+silu", "bias+residual")
    ),
    SuiteRow(LinearCase(8192, 4096, 16384, (128, 128), 0.125, "bias+gelu"), ("hopper.spmm",)),
)
OPTIONS: tuple[Option, ...] = (
    Option("tokens", "8192", "Rows of x; comma lists give every combination.", int),
    Option("k", "8192", "Features that come in.", int),
    Option("n", "8192", "Features that go out.", int),
    BLOCK,
    DENSITY,
    Option("epilogue", "bias+gelu", f"What follows the product, joined by +: {', '.join(PARTS)}."),
    DTYPE,
)


def _beside_plain(record: Record) -> str:
    """How much longer than the plain product of the same rounds."""
    if "plain" not in record["peers"]:
        return ""
    return f"{(record['ms']['median'] / record['peers']['plain']['ms']['median'] - 1) * 100:+.1f} %"


BESIDE_PLAIN = Column("time over the plain product", _beside_plain)
TABLE = Table(
    op="linear",
    title="linear",
    columns=(CASE, MS, SPEEDUP, USEFUL, ROOF, BESIDE_PLAIN),
    note=(
        "Useful TFLOPS count stored blocks only. Dense is torch's linear layer with cuBLAS, then torch's activation "
        "and addition. The plain product is SparseK's x @ W.T without bias, activation and residual."
    ),
    usual=("bf16",),
    shown=(BESIDE_PLAIN,),
)
BENCH = Bench(
    "linear",
    suites={"published": PUBLISHED},
    schemas={"linear": Schema(LinearCase)},
    tables=(TABLE,),
    options=OPTIONS,
    make=LinearCase,
    small="--tokens 64 --k 512 --n 512",
)
