"""A benchmark as data: what is measured, next to whom, what its records hold and how tables show them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, Generic, TypeVar

from sparsek.bench.engine.case import Schema, SuiteRow
from sparsek.bench.engine.options import Option, combined
from sparsek.bench.engine.peer import Peer

Record = dict[str, Any]
Value = TypeVar("Value")
# Where benchmarks are listed; loaded when somebody asks for all of them.
LIST = "sparsek.bench.benches"
KERNELS = "Kernels by name; auto is the planner's choice."


@dataclass(frozen=True)
class Column:
    """A heading, and what stands below it for one record; `text` is aligned on the left."""

    heading: str
    cell: Callable[[Record], str]
    text: bool = False


@dataclass(frozen=True)
class Table:
    """The table of one operation: a row for each of its device times, in the order of `suite`, then of cases.

    `columns` and a ratio for each peer of `beside`, by their names in records, stand on the page. `note`: what the
    numbers mean. `usual`: words of cases that rows leave out; they name a kernel unless it is one of `kernels`, and
    none if that is None. `headings`: of peers, their titles
    unless given; `dense` names the dense ones. `shown`: columns of its own that a screen shows beside the usual ones
    and, with `ratios`, those of every peer.
    """

    op: str
    title: str
    columns: tuple[Column, ...]
    note: str
    beside: tuple[str, ...] = ()
    usual: tuple[str, ...] = ()
    kernels: tuple[str, ...] | None = None
    headings: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[str, ...] = ("cublas", "torch_dense")
    shown: tuple[Column, ...] = ()
    ratios: bool = True

    @property
    def peers(self) -> Mapping[str, str]:
        """Names in records and their headings, in the order of columns."""
        return self.headings or {peer.name: peer.title for peer in BY_OP[self.op].peers}

    @property
    def suite(self) -> tuple[SuiteRow, ...]:
        """The rows of the benchmark's suites that belong here."""
        return tuple(row for row in BY_OP[self.op].rows if row.case.op == self.op)

    @property
    def command(self) -> str:
        """What makes its records: "spmm --suite blocks", with the first suite that has such rows."""
        bench = BY_OP[self.op]
        named = (name for name, rows in bench.suites.items() if any(row.case.op == self.op for row in rows))
        return f"{bench.name} --suite {next(named)}"


@dataclass(frozen=True)
class Bench:
    """One benchmark, and all that its command, its records and its tables need to know.

    `name`: of its command, "attention-backward". `suites`: named rows. `schemas`: what its records hold, by their `op`.
    `make`: the case with the fields that `options` give. `small`: options of sizes for a CPU, which suites and sizes by
    default would keep busy for hours; "" where these are small. `kernels`: what --kernel names; "" where nothing can be
    named. `whole`: the suite that is measured where nothing is given; "" for the case of the options' defaults.
    `slowest`: seconds that a row took at most on an H200 with empty caches. `files`: what is made of
    records beside tables, by path.
    """

    name: str
    suites: Mapping[str, tuple[SuiteRow, ...]]
    schemas: Mapping[str, Schema]
    tables: tuple[Table, ...]
    options: tuple[Option, ...]
    make: Callable[..., Any]
    small: str = "--m 512 --k 512 --n 64"
    kernels: str = KERNELS
    whole: str = ""
    rounds: int = 7
    slowest: float = 20.0
    files: Mapping[str, Callable[[Sequence[Record]], str]] = field(default_factory=dict)
    peers: tuple[Peer, ...] = ()

    @property
    def file(self) -> str:
        """The name of its file of records."""
        return f"{self.name.replace('-', '_')}.jsonl"

    @property
    def rows(self) -> tuple[SuiteRow, ...]:
        """The rows of all suites: each case once, with all the kernels that any suite measures on it."""
        kernels: dict[tuple[str, Any], dict[str, None]] = {}
        for row in (each for rows in self.suites.values() for each in rows):
            kernels.setdefault((row.op, row.case), {}).update(dict.fromkeys(row.kernels))
        return tuple(SuiteRow(case, tuple(names), op) for (op, case), names in kernels.items())

    def cases(self, given: Mapping[str, str | bool]) -> tuple[Any, ...]:
        """The cases of every combination of what was given for the options."""
        return combined(self.make, self.options, given)


class Listed(Mapping[str, Value], Generic[Value]):
    """What all benchmarks hold of one kind, by name: they are loaded at the first look."""

    def __init__(self, held: Callable[[Bench], Mapping[str, Value]]) -> None:
        self._held = held

    @cached_property
    def _all(self) -> dict[str, Value]:
        benches = import_module(LIST).BENCHES
        return {name: value for each in benches.values() for name, value in self._held(each).items()}

    def __getitem__(self, name: str) -> Value:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


OPS: Mapping[str, Schema] = Listed(lambda bench: bench.schemas)
BY_OP: Mapping[str, Bench] = Listed(lambda bench: dict.fromkeys(bench.schemas, bench))
TABLES: Mapping[str, Table] = Listed(lambda bench: {table.op: table for table in bench.tables})
FILES: Mapping[str, Callable[[Sequence[Record]], str]] = Listed(lambda bench: bench.files)


def table_of(record: Record) -> Table:
    """The table that a record belongs to."""
    return TABLES[OPS[record["op"]].case.op]
