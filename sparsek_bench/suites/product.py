"""Products of a sparse matrix with a dense one: cases and operands of several benchmarks, whatever the storage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.core.errors import InvalidInput
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.random import PATTERNS, Spread
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.linear import linear, plan_layer
from sparsek.products.ops.spmm import plan_spmm, spmm
from sparsek.products.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate, check_spmm
from sparsek_bench.engine import options
from sparsek_bench.engine.case import Case, Operands, block_name, shape_name, stored_name
from sparsek_bench.engine.data import Draw

if TYPE_CHECKING:
    from typing_extensions import Self

A_AT_B, LINEAR = "A@B", "x@W.T"
# What products of FP8 give, and what they are compared with.
WIDE = torch.bfloat16


class SidesCase(Case):
    """A case with the sides of a product [m, k] @ [k, n]."""

    m: int
    k: int
    n: int

    @property
    def shape_name(self) -> str:
        """ "8192³" for a cube, "16384²×16" for a square first matrix, "m×k×n" otherwise."""
        return shape_name(self.m, self.k, self.n)

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class BlocksCase(SidesCase):
    """One whose sparse matrix stores the share `density` of its blocks, in a seeded random pattern."""

    m: int = options.size("Rows of A")
    k: int = options.size("Columns of A")
    n: int = options.size("The side of B that A does not meet")
    block: tuple[int, int] = options.block()
    density: float = options.share()
    pattern: Spread = options.choice("Patterns", PATTERNS, usual="uniform")
    dtype: str = options.dtype()

    @property
    def name(self) -> str:
        """One short line: "8192³ block 128 12.5 % bf16"."""
        shown = "" if self.pattern == "uniform" else self.pattern
        return f"{self.shape_name} {stored_name(block_name(self.block), self.density, shown, self.dtype)}"


def check_24_sides(block: tuple[int, int]) -> None:
    """Raises InvalidInput unless every block can be 2:4."""
    if any(side % 64 or side < 1 for side in block):
        raise InvalidInput(f"sides of 2:4 blocks are multiples of 64, got {block_name(block)}")


def form_name(form: str) -> str:
    """ "A.T@B" -> "A.T @ B"."""
    return form.replace("@", " @ ")


# By form of a product, the sides of B and of the result. A is [m, k]; a layer "x@W.T" has W = A and x = B.
SIDES = {
    A_AT_B: ("kn", "mn"),
    "A.T@B": ("mn", "kn"),
    "B@A": ("nm", "nk"),
    "B@A.T": ("nk", "nm"),
    LINEAR: ("nk", "nm"),
}


class ProductCase(SidesCase):
    """A product of a sparse A [m, k] and a dense B in a `form`, one of SIDES. `stored` is the storage of A: "bsr",
    "semi24" or "bsr24". `n` is the side of B that A does not meet.
    """

    form: str
    stored: str = "bsr"
    block: Any
    density: float
    pattern: Spread = "uniform"

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The case that options give; a Semi24 has neither blocks nor a density of them."""
        whole = fields["block"] is None or fields.get("stored") == "semi24"
        return cls(**fields | ({"block": None, "density": 1.0} if whole else {}))

    @property
    def name(self) -> str:
        """One short line: "x @ W.T 8192³ 2:4 bf16", "A @ B 8192³ 2:4 in block 128 12.5 % bf16"."""
        blocks = "" if self.block is None else stored_name(block_name(self.block), self.density)
        stored = {"bsr": blocks, "semi24": "2:4", "bsr24": f"2:4 in {blocks}"}[self.stored]
        return f"{form_name(self.form)} {self.shape_name} {stored} {self.dtype}"

    @property
    def whole(self) -> bool:
        """A Semi24."""
        return self.stored == "semi24"

    @property
    def b_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, side) for side in SIDES[self.form][0])

    @property
    def out_shape(self) -> tuple[int, ...]:
        return tuple(getattr(self, side) for side in SIDES[self.form][1])

    def matrix(self, draw: Draw) -> Any:
        """A, scaled so that its product with N(0, 1) values has unit scale; of 2:4 the larger two of every four."""
        if self.block is None:
            return Semi24.from_dense(draw.weight(self.m, self.k))
        a = draw.blocks(self.m, self.k, self.block, self.density, self.pattern)
        return BSR24.from_bsr(a) if self.stored == "bsr24" else a

    def sets(self, draw: Draw) -> Callable[[Draw], Any]:
        """Matrices of a pattern share it."""
        a = self.matrix(draw)

        def one(draw: Draw) -> Any:
            mine = self.matrix(draw) if isinstance(a, Semi24) else draw.revalued(a)
            return self.one_set(draw, mine, draw.normal(*self.b_shape))

        return one

    def one_set(self, draw: Draw, a: Any, b: Any) -> Any:
        """The operands of these matrices; a layer makes its own C."""
        out = None if self.form == LINEAR else draw.poison(*self.out_shape)
        return ProductOperands(a, b, out, self.form)


@dataclass(frozen=True)
class ProductOperands(Operands):
    """One of the rotating sets: its own A [m, k], B and C. Where `out` is None, the call makes its output.

    `form`: "A@B", "A.T@B", "B@A", "B@A.T", or "x@W.T", a layer of x = B and W = A.
    """

    a: Any
    b: Any
    out: Any = None
    form: str = A_AT_B

    @property
    def is_linear(self) -> bool:
        return self.form == LINEAR

    @property
    def on_right(self) -> bool:
        """Whether A is the second factor."""
        return self.form not in (A_AT_B, "A.T@B")

    @property
    def b_as_factor(self) -> Any:
        """The right factor of the product with A on the left: x.T of a layer."""
        return self.b.mT if self.on_right else self.b

    @property
    def dense_factors(self) -> tuple[Tensor, Tensor]:
        """A and the right factor, dense."""
        return self.a.to_dense(), self.b_as_factor

    @property
    def useful_flops(self) -> float:
        """FLOPs of every value in stored blocks; in 2:4 matrices, zeros that are not stored count too."""
        matrix = self.a.matrix if isinstance(self.a, Quantized) else self.a
        pairs = 1 if isinstance(matrix, BSR) else 2
        return 2.0 * pairs * matrix.values.numel() * self.b_as_factor.shape[-1]

    def factors(self, a: Any, b: Any) -> tuple[Any, Any]:
        """The two factors in their order, for this A and B or others, sparse or dense."""
        a = a.T if "A.T" in self.form or (self.is_linear and isinstance(a, BSR | Tensor)) else a
        return (b, a) if self.on_right else (a, b)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.factors(self.a, self.b)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.out is None else {"out": self.out}

    def plan(self, kernel: str | None) -> SpmmPlan:
        given: dict[str, Any] = {"dtype": WIDE} if isinstance(self.a, Quantized) else {}
        plan = plan_layer if self.is_linear and not isinstance(self.a, BSR) else plan_spmm
        return plan(*self.given, kernel=kernel, **given)

    def eager(self, plan: SpmmPlan) -> Callable[[], Tensor]:
        given: dict[str, Any] = {"dtype": WIDE} if isinstance(self.a, Quantized) else {}
        if self.is_linear:
            return partial(linear, self.b, self.a, kernel=plan.kernel, **given)
        return partial(spmm, *self.given, kernel=plan.kernel, **given)

    def judge(self, out: Tensor, *, tf32: bool = False) -> Gate:
        """Whether `out` is the product of this set, of FP8 with scales applied."""
        a = self.a.T if self.form in ("A.T@B", "B@A") else self.a
        out = out.mT if self.on_right else out
        return check_spmm(a, self.b_as_factor, out, tf32=tf32)

    def layer(self, x: Tensor, w: Tensor) -> Tensor:
        """A layer as torch computes it."""
        return functional.linear(x, w)

    def dense(self, seed: int) -> Callable[[], Tensor]:
        """The same call with everything stored, in bf16 for FP8."""
        b = self.b if isinstance(self.b, Tensor) else self.b.dequantize(WIDE)
        full = Draw(b.device, b.dtype, seed).weight(*self.a.shape)
        if self.is_linear:
            return lambda: self.layer(b, full)
        first, second = self.factors(full, b)
        return lambda: torch.matmul(first, second, out=self.out)
