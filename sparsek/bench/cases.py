"""What is measured: one frozen case per line, and named suites of them."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import block_sides
from sparsek.formats.random import PATTERNS, random_bsr


@dataclass(frozen=True)
class Case:
    """C [m, n] = A [m, k] @ B [k, n], with `density` of A's blocks stored in a seeded random pattern."""

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
        return str(self.block[0]) if self.block[0] == self.block[1] else f"{self.block[0]}x{self.block[1]}"

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
        return a, random_dense(self.k, self.n, dtype, device, seed + 1)

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
    def from_record(fields: Mapping[str, Any]) -> "Case":
        """The inverse of `as_record`."""
        block = (int(fields["block"][0]), int(fields["block"][1]))
        sides = (int(fields["m"]), int(fields["k"]), int(fields["n"]))
        return Case(*sides, block, float(fields["density"]), str(fields["pattern"]), str(fields["dtype"]))


def random_dense(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """N(0, 1) values [rows, cols], drawn there. Never zeros: on an H200 their product runs 13 % faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(rows, cols, dtype=dtype, device=device, generator=generator)


@dataclass(frozen=True)
class Entry:
    """One line of a suite: a case and the kernels measured on it; "auto" is the planner's choice.

    `host` asks for the host's time of an eager call instead of the device's.
    """

    case: Case
    kernels: tuple[str, ...] = ("auto",)
    host: bool = False


def _square(block: int, density: float, **more: Any) -> Case:
    return Case(8192, 8192, 8192, (block, block), density, **more)


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
    Entry(Case(8192, 8192, 8192, (512, 112), 16 / 74), ("hopper.spmm",)),
    Entry(_square(128, 14 / 64), ("hopper.spmm",)),
    Entry(_square(128, 0.125, pattern="powerlaw"), ("hopper.spmm",)),
    Entry(Case(16384, 16384, 16, (64, 64), 0.25), ("hopper.spmm",)),
    Entry(Case(16384, 16384, 16, (128, 128), 0.25), ("hopper.spmm",)),
    Entry(Case(2048, 2048, 2048, (128, 128), 0.125), ("hopper.spmm",), host=True),
)
# Sides that no tile divides, and uneven rows: the schedule must hold up here too.
RAGGED: tuple[Entry, ...] = (
    Entry(Case(8200, 8136, 8104, (128, 128), 0.125), ("hopper.spmm",)),
    Entry(Case(5000, 7000, 3000, (64, 64), 0.125, "powerlaw"), ("hopper.spmm",)),
    Entry(Case(4096, 11008, 4096, (128, 128), 0.125), ("hopper.spmm",)),
)
SUITES: Mapping[str, tuple[Entry, ...]] = {"issue2": ISSUE2, "ragged": RAGGED}


def suite(name: str) -> tuple[Entry, ...]:
    """The entries of a named suite. Raises InvalidInput that lists the known names."""
    if name not in SUITES:
        raise InvalidInput(f"no suite is called {name!r}; known: {', '.join(SUITES)}")
    return SUITES[name]


def parse_block(text: str) -> tuple[int, int]:
    """ "128" -> (128, 128); "512x112" -> (512, 112)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise InvalidInput(f"a block is written as 128 or as 512x112, got {text!r}")
    sides = [int(part) for part in parts]
    return sides[0], sides[-1]


def product(
    m: Iterable[int],
    k: Iterable[int],
    n: Iterable[int],
    block: Iterable[tuple[int, int]],
    density: Iterable[float],
    pattern: Iterable[str],
    dtype: Iterable[str],
) -> tuple[Case, ...]:
    """Every combination of the given values, the last varying fastest."""
    return tuple(Case(*values) for values in itertools.product(m, k, n, block, density, pattern, dtype))
