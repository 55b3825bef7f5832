"""y = act(x @ W.T + bias) + residual as a benchmark: its cases, their operands, its suites."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.bench.engine.bench import Bench, Column, Record, Table
from sparsek.bench.engine.case import Case, Operands, Schema, SuiteRow, check_case
from sparsek.bench.engine.data import random_dense, revalued, set_count
from sparsek.bench.engine.names import block_name, stored_name
from sparsek.bench.engine.options import BLOCK, DENSITY, DTYPE, Option
from sparsek.bench.engine.tables import CASE, KERNEL, MS, ROOF, SPEEDUP, USEFUL, USEFUL_NOTE
from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.pattern import block_sides
from sparsek.matrix.random import random_bsr
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.spmm import SpmmPlan
from sparsek.reference.epilogue import ACTIVATIONS, Epilogue
from sparsek.testing.budget import Gate
from sparsek.testing.poison import poisoned
from sparsek.testing.product_budget import check_linear

# What a case's `epilogue` may name, joined by "+": "bias+gelu", "bias+residual".
PARTS = ("bias", *filter(None, ACTIVATIONS), "residual")


@dataclass(frozen=True)
class LinearOperands(Operands):
    """One of the rotating sets: its own x [tokens, k], W [n, k], output, bias [n] and residual [tokens, n]."""

    x: Tensor
    w: BSR
    out: Tensor
    bias: Tensor | None = None
    activation: str | None = None
    residual: Tensor | None = None

    @property
    def useful_flops(self) -> float:
        return 2.0 * self.w.nnzb * self.w.block[0] * self.w.block[1] * self.x.shape[0]

    @property
    def after(self) -> tuple[Any, Any, Any]:
        """Bias, activation and residual."""
        return self.bias, self.activation, self.residual

    @property
    def epilogue(self) -> Epilogue:
        """The same as a plan takes it."""
        return Epilogue(bias=self.bias, activation=self.activation or "", other=self.residual)

    def plan(self, kernel: str | None) -> SpmmPlan:
        return plan_spmm(self.x, self.w.T, out=self.out, epilogue=self.epilogue, kernel=kernel)

    def planned(self, plan: SpmmPlan) -> Callable[[], Tensor]:
        w, epilogue = self.w.T, self.epilogue
        return lambda: plan(self.x, w, out=self.out, epilogue=epilogue)

    def gate(self, plan: SpmmPlan) -> Gate:
        self.out.fill_(torch.nan)
        self.planned(plan)()
        return self.judge(self.out, tf32=plan.problem.tf32)

    def judge(self, out: Tensor, *, tf32: bool = False) -> Gate:
        """Whether `out` is the result of this set."""
        return check_linear(self.x, self.w, out, *self.after, tf32=tf32)

    def dense(self, seed: int) -> Callable[[], Tensor]:
        n, k = self.w.shape
        w = random_dense(n, k, dtype=self.x.dtype, device=self.x.device, seed=seed).mul_(k**-0.5)
        return lambda: self._by_torch(w)

    def _by_torch(self, w: Tensor) -> Tensor:
        y = ACTIVATIONS[self.activation or ""](functional.linear(self.x, w, self.bias))
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
        block_sides(self.block)
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
    def activations(self) -> list[str]:
        return [part for part in self.parts if part in ACTIVATIONS]

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

        return [
            LinearOperands(
                draw(index, 1, self.tokens, self.k),
                revalued(w, seed + 10 * index) if index else w,
                poisoned((self.tokens, self.n), dtype, device),
                draw(index, 2, self.n) if "bias" in self.parts else None,
                next(iter(self.activations), None),
                draw(index, 3, self.tokens, self.n) if "residual" in self.parts else None,
            )
            for index in range(set_count(card_of(device), footprint))
        ]


SCHEMAS: Mapping[str, Schema] = {"linear": Schema(LinearCase)}
# What each way to go on after the product costs beside the product alone.
PUBLISHED: tuple[SuiteRow, ...] = (
    *(
        SuiteRow(LinearCase(8192, 8192, 8192, (128, 128), 0.125, epilogue), ("hopper.spmm",))
        for epilogue in ("bias+gelu", "bias+gelu_tanh", "bias+silu", "bias+residual")
    ),
    SuiteRow(LinearCase(8192, 4096, 16384, (128, 128), 0.125, "bias+gelu"), ("hopper.spmm",)),
)
SUITES: Mapping[str, tuple[SuiteRow, ...]] = {"published": PUBLISHED}


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


BESIDE_PLAIN = Column("time beside plain", _beside_plain)
TABLE = Table(
    op="linear",
    title="linear",
    columns=(CASE, KERNEL, MS, BESIDE_PLAIN, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} The dense peer is torch's linear layer, followed by torch's activation and addition. The plain "
        "product is this library's x @ W.T, into the same output."
    ),
    pages=("README.md", "docs/linear.md"),
    shown=(BESIDE_PLAIN,),
)
BENCH = Bench(
    "linear",
    SUITES,
    SCHEMAS,
    (TABLE,),
    OPTIONS,
    LinearCase,
    "--tokens 64 --k 512 --n 512",
)
