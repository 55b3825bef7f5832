"""What a benchmark measures: a case, its operands, the entries of a suite. Each operation has a class of cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.matrix.pattern import block_sides
from sparsek.testing.budget import Gate
from sparsek.testing.poison import poisoned

if TYPE_CHECKING:
    from typing_extensions import Self

Made = TypeVar("Made")
MOST_LISTED = 16  # names


class Operands(Protocol):
    """One of the rotating operand sets of a case: its own tensors, and what is done with them."""

    @property
    def useful_flops(self) -> float:
        """FLOPs of the stored elements alone."""
        ...

    @property
    def given(self) -> tuple[Any, ...]:
        """What a plan is called with."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """What it is called with by keyword."""
        return {}

    def plan(self, kernel: str | None) -> Any:
        """The plan of a kernel, None for the planner's choice. Raises Unsupported with its reasons."""
        ...

    def planned(self, plan: Any) -> Callable[[], Any]:
        """A call of the plan and nothing else."""
        return partial(plan, *self.given, **self.options)

    def shapes(self, plan: Any) -> Iterable[Sequence[int]]:
        """Those of the tensors that a plan makes in the dtype of its first operand."""
        return ()

    def gate(self, plan: Any) -> Gate:
        """Runs the plan into poisoned memory and judges the result."""
        # A caching allocator hands the memory of a dropped tensor to the next of its size: results begin as NaN.
        for shape in self.shapes(plan):
            poisoned(shape, self.given[0].dtype, self.given[0].device)
        allowed = {"tf32": True} if getattr(plan.problem, "tf32", False) else {}
        return self.judge(self.planned(plan)(), **allowed)

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the result of this set."""
        ...

    def dense(self, seed: int) -> Callable[[], object]:
        """The same call on dense random data of the same shapes: zeros of a pruned matrix would make it faster."""
        raise InvalidInput("these operands have no dense twin")

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
        """Sets that share their structure and no memory: 2 to 64, together several times the cache.

        Raises InvalidInput where the records are measured in their own way, as `Schema.run` has it.
        """
        raise InvalidInput(f"{self.op} is measured in its own way, on operands of its own")

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
        """ "met" or "missed"."""
        sign = 1 if self.aim >= self.must else -1
        return "met" if sign * ratio >= sign * self.must else "missed"


def unknown(what: str, name: str, known: Iterable[str]) -> InvalidInput:
    """The error for a name that is not known, with near ones, and all of them unless they are many."""
    known = tuple(known)
    near = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if not near or len(known) <= MOST_LISTED:
        hint += f"{' Known' if near else '; known'}: {', '.join(known)}"
    return InvalidInput(f"no {what} is called {name!r}{hint}")


def suite_named(suites: Mapping[str, Made], name: str, what: str = "suite") -> Made:
    """The suite, or another thing, of that name. Raises InvalidInput that lists the known names."""
    if name not in suites:
        raise unknown(what, name, suites)
    return suites[name]


def check_choice(what: str, value: str, allowed: Iterable[str]) -> None:
    """Raises InvalidInput unless the value is one of those allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise InvalidInput(f"{what} is one of {', '.join(allowed)}, got {value!r}")


def check_case(case: Any, *sides: str, dtype: bool = True) -> None:
    """Raises InvalidInput unless the named sides are positive, and density, block and, if wanted, dtype can be."""
    for side in sides:
        if getattr(case, side) < 1:
            raise InvalidInput(f"a benchmark case needs {side} >= 1, got {getattr(case, side)}")
    density = getattr(case, "density", 1.0)
    if not 0.0 < density <= 1.0:
        raise InvalidInput(f"density is a fraction in (0, 1], got {density}")
    if getattr(case, "block", None) is not None:
        block_sides(case.block)
    if dtype:
        dtypes.parse(case.dtype)
