"""y = act(x @ W.T + bias) + residual as a benchmark: its cases, operands, peers and suites."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional

from sparsek.core.errors import InvalidInput
from sparsek.products.ops.linear import linear
from sparsek.products.ops.spmm import plan_spmm
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.products.reference.epilogue import ACTIVATION_NAMES, ACTIVATIONS, Activation, Epilogue
from sparsek.testing.budget import Gate
from sparsek.testing.product_budget import check_linear
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Bench, Column, Record, Table
from sparsek_bench.engine.case import Case, block_name, rows, stored_name
from sparsek_bench.engine.data import Draw
from sparsek_bench.engine.peer import CUBLAS, TORCH_DENSE, Own
from sparsek_bench.engine.tables import CASE, MS, ROOF, SPEEDUP, USEFUL
from sparsek_bench.suites.product import LINEAR, ProductOperands

# Names of a case's `epilogue`, joined by "+": "bias+gelu", "bias+residual".
PARTS = ("bias", *filter(None, ACTIVATIONS), "residual")


@dataclass(frozen=True)
class LinearOperands(ProductOperands):
    """One of the rotating sets: its own x [tokens, k], W [n, k] and output, and bias [n] and residual [tokens, n]."""

    bias: Tensor | None = None
    activation: Activation | None = None
    residual: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        epilogue = Epilogue(bias=self.bias, activation=self.activation or "", other=self.residual)
        return {"out": self.out, "epilogue": epilogue}

    def plan(self, kernel: str | None) -> SpmmPlan:
        return plan_spmm(*self.given, **self.options, kernel=kernel)

    def eager(self, plan: SpmmPlan) -> Callable[[], Tensor]:
        return partial(linear, self.b, self.a, self.bias, self.activation, self.residual, kernel=plan.kernel)

    def judge(self, out: Tensor, *, tf32: bool = False) -> Gate:
        """Whether `out` is the result of this set."""
        return check_linear(self.b, self.a, out, self.bias, self.activation, self.residual, tf32=tf32)

    def layer(self, x: Tensor, w: Tensor) -> Tensor:
        y = ACTIVATIONS[self.activation or ""](functional.linear(x, w, self.bias))
        return y if self.residual is None else y + self.residual


@dataclass(frozen=True)
class LinearCase(Case):
    """y [tokens, n] = act(x [tokens, k] @ W.T + bias) + residual, with `density` of the blocks of W [n, k] stored.

    `epilogue` names what follows the product, joined by "+", in the order bias, activation, residual; "" is nothing.
    """

    op: ClassVar[str] = "linear"

    tokens: int = options.size("Rows of x")
    k: int = options.size("Features in")
    n: int = options.size("Features out")
    block: tuple[int, int] = options.block()
    density: float = options.share()
    epilogue: str = options.field("bias+gelu", f"The epilogue, joined by +: {', '.join(PARTS)}.", usual="")
    dtype: str = options.dtype()

    def check(self) -> None:
        right = [part for part in PARTS if part in self.parts]
        if self.parts != right or len(self.activations) > 1:
            raise InvalidInput(
                f"an epilogue is bias, one of {', '.join(filter(None, ACTIVATIONS))}, and residual, in this order, "
                f"each optional, joined by +; got {self.epilogue!r}"
            )

    @property
    def parts(self) -> list[str]:
        """The names in the epilogue."""
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
    def dense_flops(self) -> float:
        return 2.0 * self.tokens * self.k * self.n

    def sets(self, draw: Draw) -> Callable[[Draw], LinearOperands]:
        w = draw.blocks(self.n, self.k, self.block, self.density)

        def one(draw: Draw) -> LinearOperands:
            return LinearOperands(
                draw.revalued(w),
                draw.normal(self.tokens, self.k),
                draw.poison(self.tokens, self.n),
                LINEAR,
                draw.normal(self.n) if "bias" in self.parts else None,
                next(iter(self.activations), None),
                draw.normal(self.tokens, self.n) if "residual" in self.parts else None,
            )

        return one


def _beside_plain(record: Record) -> str:
    """How much longer than the plain product of the same rounds."""
    if "plain" not in record["peers"]:
        return ""
    return f"{(record['ms']['median'] / record['peers']['plain']['ms']['median'] - 1) * 100:+.1f} %"


# The cost of each epilogue beside the product alone.
PUBLISHED = rows(
    "hopper.spmm",
    *(
        LinearCase(8192, 8192, 8192, (128, 128), 0.125, epilogue)
        for epilogue in ("bias+gelu", "bias+gelu_tanh", "bias+silu", "bias+residual")
    ),
    LinearCase(8192, 4096, 16384, (128, 128), 0.125, "bias+gelu"),
)
BENCH = Bench(
    "linear",
    suites={"published": PUBLISHED},
    kinds=(LinearCase,),
    peers=(
        replace(CUBLAS, title="cuBLAS and torch"),
        TORCH_DENSE,
        Own(
            "plain",
            "the plain product",
            other=lambda case, one, index: replace(one, bias=None, activation=None, residual=None),
            unless=lambda case: [] if case.epilogue else ["the case is the plain product itself"],
        ),
    ),
    tables=(
        Table(
            op="linear",
            title="linear",
            columns=(CASE, MS, SPEEDUP, USEFUL, ROOF, Column("time over the plain product", _beside_plain)),
            note=(
                "Useful TFLOPS count stored blocks only. Dense is torch's linear layer with cuBLAS, then torch's "
                "activation and addition. The plain product is SparseK's x @ W.T without bias, activation and residual."
            ),
        ),
    ),
    small="--tokens 64 --k 512 --n 512",
)
