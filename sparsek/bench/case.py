"""What a benchmark measures: a case, its operands, the entries of a suite. Each operation has a class of cases."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from sparsek.core.device import Card
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import Gate

# The sets together exceed the last-level cache this many times, so that nothing sits in it by accident.
CACHE_MULTIPLE = 4
MAX_SETS = 64

Made = TypeVar("Made")


class Operands(Protocol):
    """One of the rotating operand sets of a case: its own tensors, and what is done with them."""

    @property
    def useful_flops(self) -> float:
        """FLOPs of the stored elements alone."""
        ...

    def plan(self, kernel: str | None) -> Any:
        """The plan of a kernel, None for the planner's choice. Raises Unsupported with its reasons."""
        ...

    def planned(self, plan: Any) -> Callable[[], object]:
        """A call of the plan and nothing else."""
        ...

    def eager(self, kernel: str | None) -> Callable[[], object]:
        """A call of the verb, as users write it; its plan is kept after the first."""
        ...

    def gate(self, plan: Any) -> Gate:
        """Runs the plan into poisoned memory and judges the result."""
        ...

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        """Fields of a kernel's record that only this operation has."""
        return {}

    def peer_extra(self, call: Callable[[], object]) -> dict[str, Any]:
        """Fields of a peer's entry that only this operation has."""
        return {}


class Case(Protocol):
    """One frozen, comparable line of a suite."""

    op: ClassVar[str]
    """The operation, which is also the `op` of its records: "spmm"."""

    @property
    def name(self) -> str:
        """One short line that no other case has."""
        ...

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts the cases of one operation, small ones first."""
        ...

    @property
    def dense_flops(self) -> float:
        """FLOPs of the same call with everything stored."""
        ...

    def operands(self, device: torch.device, seed: int = 0) -> Sequence[Operands]:
        """Sets that share their structure and no memory: 2 to 64, together several times the cache."""
        ...

    def as_record(self) -> dict[str, Any]:
        """The `case` object of a record."""
        ...


@dataclass(frozen=True)
class Entry:
    """One line of a suite: a case, the kernels measured on it, and what is measured.

    "auto" is the planner's choice. `op` is the `op` of the records; "" stands for the device time of the case.
    """

    case: Any
    kernels: tuple[str, ...] = ("auto",)
    op: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", self.op or self.case.op)


def set_count(card: Card, footprint: int) -> int:
    """How many operand sets of `footprint` bytes exceed the cache of the card several times, 2 to 64."""
    return max(2, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * card.l2_bytes / max(1, footprint))))


def suite_named(suites: Mapping[str, Made], name: str) -> Made:
    """The suite of that name. Raises InvalidInput that lists the known names."""
    if name not in suites:
        raise InvalidInput(f"no suite is called {name!r}; known: {', '.join(suites)}")
    return suites[name]


def parse_block(text: str) -> tuple[int, int]:
    """ "128" -> (128, 128); "512x112" -> (512, 112)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise InvalidInput(f"a block is written as 128 or as 512x112, got {text!r}")
    sides = [int(part) for part in parts]
    return sides[0], sides[-1]


def block_name(block: tuple[int, int]) -> str:
    """ "128" for square blocks, "512x112" for others."""
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def random_dense(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """N(0, 1) values, drawn there. Never zeros: on an H200 their product runs 13 % faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)
