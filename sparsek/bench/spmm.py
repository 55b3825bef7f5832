"""C = A @ B as a benchmark: its cases, their operands, its suites."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsek.bench.case import Entry, Operands, block_name, random_dense, set_count
from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import block_sides
from sparsek.formats.random import PATTERNS, random_bsr
from sparsek.ops.spmm import plan_spmm, spmm
from sparsek.plan.spmm import SpmmPlan
from sparsek.testing.budget import Gate, check_spmm
from sparsek.testing.poison import poisoned


@dataclass(frozen=True)
class SpmmOperands(Operands):
    """One of the rotating sets: its own values of A, B and output, and the shared pattern."""

    a: BSR
    b: Tensor
    out: Tensor

    @property
    def useful_flops(self) -> float:
        return 2.0 * self.a.nnzb * self.a.block[0] * self.a.block[1] * self.b.shape[-1]

    def plan(self, kernel: str | None) -> SpmmPlan:
        return plan_spmm(self.a, self.b, kernel=kernel)

    def planned(self, plan: SpmmPlan) -> Callable[[], object]:
        return lambda: plan(self.a, self.b, out=self.out)

    def eager(self, kernel: str | None) -> Callable[[], object]:
        return lambda: spmm(self.a, self.b, kernel=kernel)

    def gate(self, plan: SpmmPlan) -> Gate:
        self.out.fill_(torch.nan)
        plan(self.a, self.b, out=self.out)
        return check_spmm(self.a, self.b, self.out, tf32=plan.problem.tf32)


@dataclass(frozen=True)
class SpmmCase:
    """C [m, n] = A [m, k] @ B [k, n], with `density` of A's blocks stored in a seeded random pattern."""

    op: ClassVar[str] = "spmm"

    m: int
    k: int
    n: int
    block: tuple[int, int]
    density: float
    pattern: str = "uniform"
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for side in ("m", "k", "n"):
            if getattr(self, side) < 1:
                raise InvalidInput(f"a benchmark case needs {side} >= 1, got {getattr(self, side)}")
        block_sides(self.block)
        if not 0.0 < self.density <= 1.0:
            raise InvalidInput(f"density is a fraction in (0, 1], got {self.density}")
        if self.pattern not in PATTERNS:
            raise InvalidInput(f"pattern {self.pattern!r} is not one of {', '.join(PATTERNS)}")
        dtypes.parse(self.dtype)

    @property
    def block_name(self) -> str:
        """ "128" for square blocks, "512x112" for others."""
        return block_name(self.block)

    @property
    def shape_name(self) -> str:
        """ "8192³" for a cube, "16384²×16" for a square A, "m×k×n" otherwise."""
        if self.m == self.k == self.n:
            return f"{self.m}³"
        return f"{self.m}²×{self.n}" if self.m == self.k else f"{self.m}×{self.k}×{self.n}"

    @property
    def name(self) -> str:
        """One short line: "8192³ block 128 12.5 % bf16"."""
        shown = "" if self.pattern == "uniform" else f" {self.pattern}"
        return f"{self.shape_name} block {self.block_name} {self.density * 100:.4g} %{shown} {self.dtype}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts cases by size, then block, then falling density."""
        return self.m * self.k * self.n, self.block, -self.density, self.pattern, self.dtype

    @property
    def dense_flops(self) -> float:
        return 2.0 * self.m * self.k * self.n

    def make(self, device: torch.device, seed: int = 0) -> tuple[BSR, torch.Tensor]:
        """A [m, k] and B [k, n], N(0, 1) values (A scaled so that C has unit scale), one seed one pair."""
        dtype = dtypes.parse(self.dtype)
        a = random_bsr(
            self.m,
            self.k,
            self.block,
            self.density,
            pattern=self.pattern,
            dtype=dtype,
            device=device,
            seed=seed,
        )
        return a, random_dense(self.k, self.n, dtype=dtype, device=device, seed=seed + 1)

    def operands(self, device: torch.device, seed: int = 0) -> list[SpmmOperands]:
        """Sets that share one pattern and no memory: 2 to 64, together several times the cache."""
        a, b = self.make(device, seed)
        sets = []
        for index in range(set_count(card_of(device), self._footprint(a))):
            if index:
                generator = torch.Generator(device=device).manual_seed(seed + 100 + index)
                # Blocks change places; in ragged matrices they stay, since those at the edge hold padding.
                shuffle = torch.randperm(a.pattern.nnzb, generator=generator, device=device)
                full = self.m % self.block[0] == 0 and self.k % self.block[1] == 0
                one = BSR.unchecked(a.pattern, a.values[shuffle] if full else a.values.clone())
                other = random_dense(self.k, self.n, dtype=b.dtype, device=device, seed=seed + 200 + index)
            else:
                one, other = a, b
            sets.append(SpmmOperands(one, other, poisoned((self.m, self.n), b.dtype, device)))
        return sets

    def _footprint(self, a: BSR) -> int:
        """Bytes of A's values, B and C."""
        return (a.values.numel() + (self.k + self.m) * self.n) * a.values.element_size()

    def as_record(self) -> dict[str, Any]:
        """The `case` object of a record."""
        return {
            "m": self.m,
            "k": self.k,
            "n": self.n,
            "block": list(self.block),
            "density": self.density,
            "pattern": self.pattern,
            "dtype": self.dtype,
        }

    @staticmethod
    def from_record(fields: Mapping[str, Any]) -> "SpmmCase":
        """The inverse of `as_record`."""
        block = (int(fields["block"][0]), int(fields["block"][1]))
        sides = (int(fields["m"]), int(fields["k"]), int(fields["n"]))
        return SpmmCase(*sides, block, float(fields["density"]), str(fields["pattern"]), str(fields["dtype"]))


def _square(block: int, density: float, **more: Any) -> SpmmCase:
    return SpmmCase(8192, 8192, 8192, (block, block), density, **more)


# Every row of the Speed table of issue 2. 512x112 with 16 blocks in each of 16 rows holds as many values as
# block 128 with 14 blocks in each of 64 rows: 14,680,064.
ISSUE2: tuple[Entry, ...] = (
    Entry(_square(128, 0.5), ("hopper.spmm",)),
    Entry(_square(128, 0.25), ("hopper.spmm",)),
    Entry(_square(128, 0.125), ("hopper.spmm", "portable.spmm")),
    Entry(_square(128, 0.0625), ("hopper.spmm",)),
    Entry(_square(64, 0.125), ("hopper.spmm", "portable.spmm")),
    Entry(_square(32, 0.125), ("hopper.spmm", "portable.spmm")),
    Entry(_square(16, 0.125), ("hopper.spmm",)),
    Entry(SpmmCase(8192, 8192, 8192, (512, 112), 16 / 74), ("hopper.spmm",)),
    Entry(_square(128, 14 / 64), ("hopper.spmm",)),
    Entry(_square(128, 0.125, pattern="powerlaw"), ("hopper.spmm",)),
    Entry(SpmmCase(16384, 16384, 16, (64, 64), 0.25), ("hopper.spmm",)),
    Entry(SpmmCase(16384, 16384, 16, (128, 128), 0.25), ("hopper.spmm",)),
    Entry(SpmmCase(2048, 2048, 2048, (128, 128), 0.125), ("hopper.spmm",), op="spmm_host"),
)
# Sides that no tile divides, and uneven rows: the schedule must hold up here too.
RAGGED: tuple[Entry, ...] = (
    Entry(SpmmCase(8200, 8136, 8104, (128, 128), 0.125), ("hopper.spmm",)),
    Entry(SpmmCase(5000, 7000, 3000, (64, 64), 0.125, "powerlaw"), ("hopper.spmm",)),
    Entry(SpmmCase(4096, 11008, 4096, (128, 128), 0.125), ("hopper.spmm",)),
)
SUITES: Mapping[str, tuple[Entry, ...]] = {"issue2": ISSUE2, "ragged": RAGGED}


def product(
    m: Iterable[int],
    k: Iterable[int],
    n: Iterable[int],
    block: Iterable[tuple[int, int]],
    density: Iterable[float],
    pattern: Iterable[str],
    dtype: Iterable[str],
) -> tuple[SpmmCase, ...]:
    """Every combination of the given values, the last varying fastest."""
    return tuple(SpmmCase(*values) for values in itertools.product(m, k, n, block, density, pattern, dtype))
