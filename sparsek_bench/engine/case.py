"""What a benchmark measures: a case, its operands, the rows of a suite. Each operation has a class of cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sparsek.core import dtypes
from sparsek.core.device import card_of
from sparsek.core.errors import InvalidInput
from sparsek.testing.budget import Gate
from sparsek_bench.engine.data import Draw, set_count, spoil, tensors
from sparsek_bench.engine.timed_call import Timed

if TYPE_CHECKING:
    from typing_extensions import Self

SEEDS = 100  # of a set


class Operands:
    """One of the rotating operand sets of a case: its own tensors, and what is done with them.

    `useful_flops`: FLOPs of the stored elements alone. `given`: the arguments of a plan's call.
    """

    useful_flops: float
    given: tuple[Any, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a plan's call."""
        return {}

    def plan(self, kernel: str | None) -> Any:
        """The plan of a kernel, None for the planner's choice. Raises Unsupported with its reasons."""
        raise NotImplementedError

    def planned(self, plan: Any) -> Callable[[], Any]:
        """A call of the plan and nothing else."""
        if isinstance(plan, Timed):
            return plan.call
        return partial(plan, *self.given, **self.options)

    def eager(self, plan: Any) -> Callable[[], Any]:
        """The call as users write it, by the plan's kernel: the same in every later call is recorded."""
        return self.planned(plan)

    def gate(self, plan: Any) -> Gate:
        """Runs the plan into memory full of NaN and judges the result."""
        call = self.planned(plan)
        # A caching allocator hands the memory of a dropped tensor to the next of its size.
        spoil(call())
        allowed = {"tf32": True} if getattr(plan.problem, "tf32", False) else {}
        return self.judge(call(), **allowed)

    def judge(self, out: Any) -> Gate:
        """Whether `out` is the result of this set."""
        raise NotImplementedError

    def dense(self, seed: int) -> Callable[[], object]:
        """The same call on dense random data of the same shapes: zeros of a pruned matrix would make it faster."""
        raise InvalidInput("these operands have no dense counterpart")

    def kernel_extra(self, kernel: str) -> dict[str, Any]:
        """Fields of a kernel's record that only this operation has. Called only where the case has `extra`."""
        return {}

    def peer_extra(self, call: Callable[[], object]) -> dict[str, Any]:
        """Fields of a peer's entry that only this operation has. Called only where the case has `peer_extra`."""
        return {}


@dataclass(frozen=True)
class OperandSet(Operands):
    """A set as data: `planner(*given, kernel=...)` plans it, `check(out)` judges a result.

    `twin(seed)`: the same call on dense random data. `verb(*given, kernel=...)`: the function that users call.
    """

    given: tuple[Any, ...]
    planner: Callable[..., Any]
    check: Callable[..., Gate]
    useful_flops: float
    twin: Callable[[int], Callable[[], object]] | None = None
    verb: Callable[..., Any] | None = None

    def plan(self, kernel: str | None) -> Any:
        return self.planner(*self.given, kernel=kernel)

    def eager(self, plan: Any) -> Callable[[], Any]:
        return partial(self.verb, *self.given, kernel=plan.kernel) if self.verb else super().eager(plan)

    def judge(self, out: Any, **allowed: bool) -> Gate:
        return self.check(out, **allowed)

    def dense(self, seed: int) -> Callable[[], object]:
        return self.twin(seed) if self.twin else super().dense(seed)


class Case:
    """One frozen, comparable line of a suite: a frozen dataclass, whose fields are options of the command.

    `op`: what is measured, which is also the `op` of its records. `table`: where these stand, if not in that of `op`.
    `in_graph`: whether the calls of all sets, peers' too, are captured in one CUDA graph, whose replays are timed.
    `wall`: calls of a sample by the host's clock, back to back until the device is idle; 0: device times. `least_sets`:
    of operands.
    `rated`: records have rates. `extra` and `peer_extra`: their own fields and those of each peer, numbers or null.
    `later`: fields of the case that older records lack; they mean the default. `sources`: what is timed beside the
    kernel, as names of modules ("plan.matches"). `hosted`: host time is timed, so a record has the functions that one
    call executes as its source.
    `name`: one short line that no other case has. `dense_flops`: FLOPs of the same call with everything stored.
    """

    op: ClassVar[str]
    table: ClassVar[str] = ""
    in_graph: ClassVar[bool] = False
    wall: ClassVar[int] = 0
    least_sets: ClassVar[int] = 2
    rated: ClassVar[bool] = True
    extra: ClassVar[tuple[str, ...]] = ()
    peer_extra: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[tuple[str, ...]] = ()
    sources: ClassVar[tuple[str, ...]] = ()
    hosted: ClassVar[bool] = False
    name: str
    dense_flops: float
    dtype: str

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            if each.metadata.get("check"):
                each.metadata["check"](each.name, getattr(self, each.name))
        self.check()

    def check(self) -> None:
        """Raises InvalidInput for fields that do not go together."""

    @classmethod
    def of(cls, **fields: Any) -> Self:
        """The case that options give."""
        return cls(**fields)

    @property
    def order(self) -> tuple[Any, ...]:
        """Sorts the cases of one operation that no suite has, small ones first."""
        return self.dense_flops, self.name

    @property
    def drawn(self) -> torch.dtype:
        """The dtype of its random data."""
        return dtypes.parse(self.dtype)

    def sets(self, draw: Draw) -> Callable[[Draw], Operands]:
        """Draws what all sets share, and returns how one set is drawn. Random values are N(0, 1).

        Raises InvalidInput where the records are measured in their own way.
        """
        raise InvalidInput(f"{self.op} is measured in its own way, on operands of its own")

    def operands(self, device: torch.device, seed: int = 0) -> list[Any]:
        """Sets that share their structure and no memory, at most 64: together several times the cache."""
        seed *= 10**6
        one = self.sets(Draw(device, self.drawn, seed))

        def at(index: int) -> Operands:
            return one(Draw(device, self.drawn, seed + SEEDS * (index + 1)))

        first = at(0)
        footprint = sum(each.nbytes for each in tensors(list(vars(first).values())))
        count = max(self.least_sets, set_count(card_of(device), footprint))
        return [first, *(at(index) for index in range(1, count))]

    def run(self, **given: Any) -> Any:
        """The outcome of a case that is measured in its own way; None: as `run_case` does it."""
        return None

    @classmethod
    def below(cls, record: dict[str, Any]) -> str:
        """The line that stands for a record under the table, if there is one."""
        return ""

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
class SuiteRow:
    """One line of a suite: a case, and the kernels measured on it; "auto" is the planner's choice."""

    case: Any
    kernels: tuple[str, ...] = ("auto",)

    @property
    def name(self) -> str:
        """What no other row has: "spmm: 8192³ block 128 12.5 % bf16"."""
        return f"{self.case.op}: {self.case.name}"


def rows(kernels: str | Sequence[str], *cases: Any) -> tuple[SuiteRow, ...]:
    """A line for each case, with the same kernels."""
    names = (kernels,) if isinstance(kernels, str) else tuple(kernels)
    return tuple(SuiteRow(case, names) for case in cases)


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


def block_name(block: tuple[int, int]) -> str:
    """ "128" for square blocks, "512x112" for others."""
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"


def shape_name(m: int, k: int, n: int) -> str:
    """ "8192³" for a cube, "16384²×16" for a square first matrix, "m×k×n" otherwise."""
    if m == k == n:
        return f"{m}³"
    return f"{m}²×{n}" if m == k else f"{m}×{k}×{n}"


def stored_name(block: str, density: float, *words: str) -> str:
    """ "block 128 12.5 % powerlaw bf16"; empty words are left out."""
    return " ".join(filter(None, (f"block {block}", f"{density * 100:.4g} %", *words)))


def length_name(length: int) -> str:
    """32768 -> "32K"; 1000 -> "1000"."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)
