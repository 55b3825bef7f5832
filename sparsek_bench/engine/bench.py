"""A benchmark as data: what is measured, next to whom, what its records hold and how tables show them."""

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from sparsek.core import doors
from sparsek_bench.engine.case import Case, SuiteRow
from sparsek_bench.engine.options import CommandOption, check_choice, combined, option_of
from sparsek_bench.engine.peer import Peer

Record = dict[str, Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Column:
    """A heading, and what stands below it for one record; `text` is aligned on the left."""

    heading: str
    cell: Callable[[Record], str]
    text: bool = False


@dataclass(frozen=True)
class Table:
    """The table of one operation: a row for each of its device times, in the order of `suite`, then of cases.

    `columns`, and one for each peer of `beside` with its time over SparseK's, stand on the page. `note`: the meaning of
    the numbers. `usual`: words of cases that rows leave out. `kernels`: those that rows leave out; None: rows name no
    kernel. `headings`: titles of peers that are not the benchmark's. `dense`: names of the dense peers. `ratios`:
    whether screens have a column for each peer.
    """

    op: str
    title: str
    columns: tuple[Column, ...]
    note: str
    beside: tuple[str, ...] = ()
    usual: tuple[str, ...] = ("bf16",)
    kernels: tuple[str, ...] | None = None
    headings: Mapping[str, str] = field(default_factory=dict)
    dense: tuple[str, ...] = ("cublas", "torch_dense")
    ratios: bool = True

    @property
    def peers(self) -> Mapping[str, str]:
        """Names in records and their headings, in the order of columns."""
        return self.headings or {peer.name: peer.title for peer in BY_OP[self.op].peers}

    @property
    def suite(self) -> tuple[SuiteRow, ...]:
        """The rows of the benchmark's suites that belong here."""
        return tuple(row for row in BY_OP[self.op].rows if self.op in (row.case.op, row.case.table))

    @property
    def command(self) -> str:
        """The command for its records, with the first suite that has such rows: "spmm --suite blocks"."""
        bench = BY_OP[self.op]
        named = (name for name, rows in bench.suites.items() if set(rows).intersection(self.suite))
        return f"{bench.name} --suite {next(named)}"


@dataclass(frozen=True)
class Bench:
    """One benchmark: its command, options, tables, pictures, gate and profile follow from it.

    `name`: of its command, "attention-backward". `suites`: named rows. `kinds`: its classes of cases. `measures`: those
    by the option --measure; without them, the first of `kinds` is measured. Its fields are the other options.
    `small`: options of sizes for a CPU, which suites and sizes by default would keep busy for hours; "" where these are
    small. `kernels`: the help of --kernel; "" without this option. `whole`: the suite that is measured where no options
    are given; "" for the case of the options' defaults. `slowest`: seconds that a row took at most on an H200 with
    empty caches. `files`: the text of files beside the pages that show records, by path.
    """

    name: str
    suites: Mapping[str, tuple[SuiteRow, ...]]
    kinds: tuple[type[Case], ...]
    tables: tuple[Table, ...]
    peers: tuple[Peer, ...] = ()
    measures: Mapping[str, Callable[..., Case]] = field(default_factory=dict)
    small: str = "--m 512 --k 512 --n 64"
    kernels: str = "Kernels by name; auto is the planner's choice."
    whole: str = ""
    rounds: int = 7
    slowest: float = 20.0
    files: Mapping[str, Callable[[Sequence[Record]], str]] = field(default_factory=dict)

    @property
    def file(self) -> str:
        """The name of its file of records."""
        return f"{self.name.replace('-', '_')}.jsonl"

    @property
    def rows(self) -> tuple[SuiteRow, ...]:
        """The rows of all suites: each case once, with all the kernels that any suite measures on it."""
        kernels: dict[Case, dict[str, None]] = {}
        for row in (each for rows in self.suites.values() for each in rows):
            kernels.setdefault(row.case, {}).update(dict.fromkeys(row.kernels))
        return tuple(SuiteRow(case, tuple(names)) for case, names in kernels.items())

    @property
    def options(self) -> tuple[CommandOption, ...]:
        """The options of its cases."""
        help = f"{', '.join(self.measures)}."
        measure = (CommandOption("measure", name, help, fields=("measure",)) for name in [*self.measures][:1])
        of_case = (option_of(each) for each in fields(self.kinds[0]))  # pyright: ignore[reportArgumentType]
        return (*measure, *filter(None, of_case))

    def cases(self, given: Mapping[str, str | bool]) -> tuple[Any, ...]:
        """The cases of every combination of the given values of options."""
        return combined(self._made if self.measures else self.kinds[0].of, self.options, given)

    def _made(self, *, measure: str, **fields: Any) -> Case:
        check_choice("measure", measure, self.measures)
        return self.measures[measure](**fields)


class Registry(UserDict[str, Value]):
    """The values of one kind of all benchmarks, by name; loaded at the first look-up."""

    def __init__(self, values_of: Callable[[Bench], Mapping[str, Value]]) -> None:
        self._values_of = values_of

    @cached_property
    def data(self) -> dict[str, Value]:
        (benches,) = doors.enter("benches")
        return dict(chain.from_iterable(self._values_of(bench).items() for bench in benches.BENCHES.values()))


OPS: Mapping[str, type[Case]] = Registry(lambda bench: {each.op: each for each in bench.kinds})
BY_OP: Mapping[str, Bench] = Registry(lambda bench: {each.op: bench for each in bench.kinds})
TABLES: Mapping[str, Table] = Registry(lambda bench: {table.op: table for table in bench.tables})


def table_of(record: Record) -> Table:
    """The table that a record belongs to."""
    case = OPS[record["op"]]
    return TABLES[case.table or case.op]
