"""What a benchmark measures: a case, its operands, the entries of a suite. Each operation has a class of cases."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch

from sparsek.core import dtypes
from sparsek.core.device import Card, card_of
from sparsek.core.errors import InvalidInput
from sparsek.matrix.bsr import BSR
from sparsek.testing.budget import Gate

if TYPE_CHECKING:
    from typing_extensions import Self

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

    def gate(self, plan: Any) -> Gate:
        """Runs the plan into poisoned memory and judges the result."""
        ...

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the result of this set."""
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

    in_graph: ClassVar[bool] = False
    """Whether the calls of all sets, peers' too, are captured in one CUDA graph, whose replays are timed."""

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
        """The `case` object of a record: the fields, tuples as lists."""
        fields = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> Self:
        """The inverse of `as_record`."""
        return cls(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        )


@dataclass(frozen=True)
class Schema:
    """What the records of one `op` hold: their class of case, and which fields beside the common ones.

    `rated`: they have rates. `extra` and `peer_extra`: fields of the record and of each peer, numbers or null.
    `later`: fields of the case that came later, with what older records mean. `sources`: what is timed beside the
    kernel, as names of modules ("plan.matches"). `rooms`: folders of sparsek of which every file counts as timed.
    `run`: what measures a row instead of `run_case`. `below`: what such a record says under the table, as a line.
    """

    case: type[Case]
    rated: bool = True
    extra: tuple[str, ...] = ()
    peer_extra: tuple[str, ...] = ()
    later: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    rooms: tuple[str, ...] = ()
    run: Callable[..., Any] | None = None
    below: Callable[[dict[str, Any]], str] | None = None


@dataclass(frozen=True)
class SuiteRow:
    """One line of a suite: a case, the kernels measured on it, and what is measured.

    "auto" is the planner's choice. `op` is the `op` of the records; "" stands for the device time of the case.
    """

    case: Any
    kernels: tuple[str, ...] = ("auto",)
    op: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", self.op or self.case.op)


@dataclass(frozen=True)
class Bar:
    """What the ratio to a peer must reach, and what it aims at. An aim below that makes it a limit from above."""

    peer: str
    must: float
    aim: float

    def verdict(self, ratio: float) -> str:
        """ "missed", "met" or "aim met"."""
        sign = 1 if self.aim >= self.must else -1
        if sign * ratio < sign * self.must:
            return "missed"
        return "aim met" if sign * ratio >= sign * self.aim else "met"


@dataclass(frozen=True)
class Option:
    """An option of a benchmark's command: a comma list whose values fill fields of cases, or a switch.

    `fields`: those of the case that a value fills, one or several; the option's own name unless given. `off`: of a
    switch, how its opposite is written.
    """

    name: str
    default: str | bool
    help: str
    parse: Callable[[str], Any] = str
    fields: tuple[str, ...] = ()
    off: str = ""

    def filled(self, value: Any) -> dict[str, Any]:
        """The fields of a case that a value of this option fills."""
        return (
            dict(zip(self.fields, value, strict=True))
            if len(self.fields) > 1
            else {(self.fields or (self.name,))[0]: value}
        )

    def values(self, given: str | bool) -> list[Any]:
        """What was given, parsed. Raises InvalidInput that names the option."""
        return [given] if isinstance(given, bool) else listed(self.name, given, self.parse)


def combined(
    make: Callable[..., Made], options: Sequence[Option], given: Mapping[str, str | bool]
) -> tuple[Made, ...]:
    """A case for every combination of the options' values, the last option varying fastest; equal ones once.

    `given` may leave out options, which then have their defaults.
    """
    lists = [option.values(given.get(option.name, option.default)) for option in options]
    found: list[Made] = []
    for values in itertools.product(*lists):
        fields: dict[str, Any] = {}
        for option, value in zip(options, values, strict=True):
            fields |= option.filled(value)
        found.append(make(**fields))
    return tuple(dict.fromkeys(found))


def listed(name: str, text: str, parse: Callable[[str], Made]) -> list[Made]:
    """The values of a comma list. Raises InvalidInput that names the option."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"--{name} {text!r}: {error}") from None


def set_count(card: Card, footprint: int) -> int:
    """How many operand sets of `footprint` bytes exceed the cache of the card several times, 2 to 64."""
    return max(2, min(MAX_SETS, math.ceil(CACHE_MULTIPLE * card.l2_bytes / max(1, footprint))))


def sets_of(device: torch.device, footprint: int, one: Callable[[int], Made]) -> list[Made]:
    """Operand sets `one(index)` of so many bytes each: 2 to 64, together several times the cache of the card."""
    return [one(index) for index in range(set_count(card_of(device), footprint))]


def suite_named(suites: Mapping[str, Made], name: str, what: str = "suite") -> Made:
    """The suite, or another thing, of that name. Raises InvalidInput that lists the known names."""
    if name not in suites:
        raise InvalidInput(f"no {what} is called {name!r}; known: {', '.join(suites)}")
    return suites[name]


def check_case(case: Any, *sides: str, dtype: bool = True) -> None:
    """Raises InvalidInput unless the named sides are positive, and the density and, if wanted, the dtype can be."""
    for side in sides:
        if getattr(case, side) < 1:
            raise InvalidInput(f"a benchmark case needs {side} >= 1, got {getattr(case, side)}")
    density = getattr(case, "density", 1.0)
    if not 0.0 < density <= 1.0:
        raise InvalidInput(f"density is a fraction in (0, 1], got {density}")
    if dtype:
        dtypes.parse(case.dtype)


def parse_block(text: str) -> tuple[int, int]:
    """ "128" -> (128, 128); "512x112" -> (512, 112)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise InvalidInput(f"a block is written as 128 or as 512x112, got {text!r}")
    sides = [int(part) for part in parts]
    return sides[0], sides[-1]


BLOCK = Option("block", "128", "Blocks: 128,64,512x112.", parse_block)
DENSITY = Option("density", "0.125", "Fraction of blocks that are stored.", float)
DTYPE = Option("dtype", "bf16", "bf16, fp16, fp32, fp64.")


def block_name(block: tuple[int, int]) -> str:
    """ "128" for square blocks, "512x112" for others."""
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def random_dense(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """N(0, 1) values, drawn there. Never zeros: on an H200 their product runs 13 % faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, dtype=dtype, device=device, generator=generator)


def shape_name(m: int, k: int, n: int) -> str:
    """ "8192³" for a cube, "16384²×16" for a square first matrix, "m×k×n" otherwise."""
    if m == k == n:
        return f"{m}³"
    return f"{m}²×{n}" if m == k else f"{m}×{k}×{n}"


def stored_name(block: str, density: float, *words: str) -> str:
    """ "block 128 12.5 % powerlaw bf16"; empty words are left out."""
    return " ".join(filter(None, (f"block {block}", f"{density * 100:.4g} %", *words)))


def revalued(a: BSR, seed: int) -> BSR:
    """A matrix of the same pattern with memory of its own: its blocks have changed places.

    In ragged matrices they stay where they are, since those at the edge hold padding.
    """
    if a.pattern.is_ragged:
        return BSR.unchecked(a.pattern, a.values.clone())
    generator = torch.Generator(device=a.device).manual_seed(seed)
    return BSR.unchecked(a.pattern, a.values[torch.randperm(a.nnzb, generator=generator, device=a.device)])
