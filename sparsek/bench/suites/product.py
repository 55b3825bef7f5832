"""Products of a sparse matrix with a dense one: the operands of several benchmarks, whatever the storage."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparsek.bench.engine.case import Case, Operands, check_case
from sparsek.bench.engine.data import random_weight, revalued
from sparsek.bench.engine.names import block_name, shape_name, stored_name
from sparsek.bench.engine.options import Option
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.random import PATTERNS, Spread, random_bsr
from sparsek.matrix.semi24 import Semi24
from sparsek.ops.linear import plan_layer
from sparsek.ops.spmm import plan_spmm
from sparsek.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.poison import poisoned

A_AT_B, LINEAR = "A@B", "x@W.T"
# What products of FP8 give, and what they are compared with.
WIDE = torch.bfloat16


@dataclass(frozen=True)
class SidesCase(Case):
    """A case with the sides of a product [m, k] @ [k, n]."""

    m: int
    k: int
    n: int

    @property
    def size(self) -> int:
        return self.m * self.k * self.n

    @property
    def shape_name(self) -> str:
        """ "8192³" for a cube, "16384²×16" for a square first matrix, "m×k×n" otherwise."""
        return shape_name(self.m, self.k, self.n)

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.size


@dataclass(frozen=True)
class BlocksCase(SidesCase):
    """One whose sparse matrix stores the share `density` of its blocks, in a seeded random pattern."""

    block: tuple[int, int]
    density: float
    pattern: Spread = "uniform"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        check_case(self, "m", "k", "n")
        if self.pattern not in PATTERNS:
            raise InvalidInput(f"pattern {self.pattern!r} is not one of {', '.join(PATTERNS)}")

    @property
    def block_name(self) -> str:
        """ "128" for square blocks, "512x112" for others."""
        return block_name(self.block)

    @property
    def name(self) -> str:
        """One short line: "8192³ block 128 12.5 % bf16"."""
        shown = "" if self.pattern == "uniform" else self.pattern
        return f"{self.shape_name} {stored_name(self.block_name, self.density, shown, self.dtype)}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by size, then block, then falling density."""
        return self.size, self.block, -self.density, self.pattern, self.dtype


def sides(*what: str) -> tuple[Option, ...]:
    """The options m, k and n, of which `what` says what they are."""
    more = "; comma lists give every combination"
    return tuple(
        Option(name, "8192", f"{text}{'' if at else more}.", int)
        for at, (name, text) in enumerate(zip("mkn", what, strict=True))
    )


def check_24_sides(block: tuple[int, int]) -> None:
    """Raises InvalidInput unless every block can be 2:4."""
    if any(side % 64 or side < 1 for side in block):
        raise InvalidInput(f"sides of 2:4 blocks are multiples of 64, got {block_name(block)}")


PATTERN = Option("pattern", "uniform", f"{', '.join(PATTERNS)}.")


def matrices(
    stored: str, case: Any, dtype: torch.dtype, device: torch.device, seed: int
) -> Callable[[int], Any]:
    """Matrices [m, k] of a case by their place, "bsr", "semi24" or "bsr24": N(0, 1) values times k**-0.5, of 2:4 ones
    the larger two of every four. All have one pattern, if any.
    """
    given: dict[str, Any] = {"dtype": dtype, "device": device}

    def drawn(seed: int) -> Any:
        if stored == "semi24":
            return Semi24.from_dense(random_weight(case.m, case.k, seed=seed, **given))
        made = random_bsr(case.m, case.k, case.block, case.density, seed=seed, **given)
        return BSR24.from_bsr(made) if stored == "bsr24" else made

    first = drawn(seed)

    def one(index: int) -> Any:
        if not index:
            return first
        return drawn(seed + 10 * index) if stored == "semi24" else revalued(first, seed + 10 * index)

    return one


def form_name(form: str) -> str:
    """ "A.T@B" -> "A.T @ B"."""
    return form.replace("@", " @ ")


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
    def pattern(self) -> BlockPattern | None:
        """The stored blocks; None of a matrix without blocks."""
        return getattr(self.a, "pattern", None)

    @property
    def wide(self) -> Tensor:
        """B as the dense product has it."""
        return self.b if isinstance(self.b, Tensor) else self.b.dequantize(WIDE)

    @property
    def useful_flops(self) -> float:
        """Of every value in stored blocks; of 2:4 matrices those that are not there count too."""
        matrix = self.a.matrix if isinstance(self.a, Quantized) else self.a
        pairs = 1 if isinstance(matrix, BSR) else 2
        return 2.0 * pairs * matrix.values.numel() * self.b_as_factor.shape[-1]

    def factors(self, a: Any, b: Any = None) -> tuple[Any, Any]:
        """The two factors in their order, for this A and B or others, sparse or dense."""
        b = self.b if b is None else b
        a = a.T if "A.T" in self.form or (self.is_linear and isinstance(a, BSR | Tensor)) else a
        return (b, a) if self.on_right else (a, b)

    @property
    def given(self) -> tuple[Any, ...]:
        return self.factors(self.a)

    @property
    def options(self) -> dict[str, Any]:
        return {} if self.out is None else {"out": self.out}

    def plan(self, kernel: str | None) -> SpmmPlan:
        given: dict[str, Any] = {"dtype": WIDE} if isinstance(self.a, Quantized) else {}
        plan = plan_layer if self.is_linear and not isinstance(self.a, BSR) else plan_spmm
        return plan(*self.given, kernel=kernel, **given)

    def gate(self, plan: SpmmPlan) -> Gate:
        if self.out is None:
            # As `Operands.gate` has it, in the dtype of C.
            poisoned((self.b.shape[0], self.a.shape[0]), self.wide.dtype, self.b.device)
        else:
            self.out.fill_(torch.nan)
        return super().gate(plan)

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
        (m, k), b = self.a.shape, self.wide
        full = random_weight(m, k, dtype=b.dtype, device=b.device, seed=seed)
        if self.is_linear:
            return lambda: self.layer(b, full)
        first, second = self.factors(full, b)
        return lambda: torch.matmul(first, second, out=self.out)
