"""How near predictions are to records: `scripts/predictions.py` prints, by operation and kernel, the share of the
newest records of a card that today's models predict within 10 %, and every record that they do not.

A record is predicted with its own config, if the kernel still has it. The options of the planner's layers are not
planned again: their records hold predictions beside times.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from sparsek.core.device import CARDS
from sparsek.core.errors import SparseKError
from sparsek.engine.plan.op import Operation
from sparsek.engine.plan.plan import Plan
from sparsek_bench.engine import data, records
from sparsek_bench.engine.bench import Record
from sparsek_bench.suites import attention_grad

FOLDER = Path(__file__).parents[1] / "benchmarks" / "results" / "h200"
OPS = (
    *("spmm", "linear", "fp8", "semi24", "story", "sddmm", "spgemm"),
    *("attention", "attention_fp8", "attention_backward", "serving"),
)
NEAR = 0.1
# Fields of a config that follow from others or from the problem, and say nothing of a kernel's tile.
FOLLOWING = ("box", "every", "group")


class Row(NamedTuple):
    """One recorded time: of a kernel, or of an option of a layer of op planner."""

    op: str
    kernel: str
    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def near(self) -> bool:
        return abs(self.ratio - 1) <= NEAR


def rows(found: Iterable[Record]) -> Iterator[Row]:
    """The rows of records. Those of a kernel that no longer runs the case are left out."""
    for record in found:
        case, took = records.case_of(record), record["ms"]["median"]
        card = records.short_name(record["env"]["gpu"])
        if card not in CARDS:
            continue
        if record["op"] == "planner":
            for layer in record["config"]["layers"]:
                for name, (predicted, measured) in layer["us"].items():
                    yield Row(
                        f"planner, {case.layers}", name, layer["layer"], predicted * 1e-3, measured * 1e-3
                    )
        elif record["op"] in OPS:
            try:
                plan = planned(case, record["kernel"], card)
            except SparseKError:
                continue
            config = config_like(record["config"], plan)
            seconds = plan.implementation.seconds(plan.problem, config)
            yield Row(record["op"], record["kernel"], case.name, seconds * 1e3, took)


def planned(case: Any, kernel: str, card: str) -> Plan:
    """The plan of a case on a card for zeros on the CPU: it predicts, so nothing is prepared or run."""
    plan, draw = Operation.plan, data.Draw(torch.device("cpu"), case.drawn, 0)

    def on_card(
        self: Any, call: Any, kernel: str | None = None, config: Any = None, device: str | None = None
    ) -> Any:
        return plan(self, call, kernel, config, card)

    def zeros(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def forward(q: Any, k: Any, v: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(q.shape[:-1], dtype=torch.float32)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Operation, "plan", on_card))
        stack.enter_context(mock.patch.object(data, "random_dense", zeros))
        stack.enter_context(mock.patch.object(attention_grad, "attention", forward))
        return case.sets(draw)(draw).plan(kernel)


def config_like(recorded: dict[str, Any], plan: Plan) -> Any:
    """The config of the plan's kernel that is the recorded one, or else the plan's. Fields that the record lacks, being
    older, have their defaults.
    """
    renamed = {"merge": "joined_rows", "scaled": "has_alpha"}
    known = {renamed.get(name, name): value for name, value in recorded.items()}
    usual = {each.name: each.default for each in fields(plan.config) if each.default is not MISSING}

    def off(config: Any) -> tuple[int, int]:
        """How many fields differ, and of those that follow from others."""
        own = records.config_of(config)
        wrong = [name for name in own if own[name] != known.get(name, usual.get(name))]
        return len([name for name in wrong if name not in FOLLOWING]), len(wrong)

    nearest = min((plan.config, *plan.implementation.configs(plan.problem)), key=off)
    return nearest if off(nearest)[0] == 0 else plan.config


def table(found: Iterable[Row]) -> Iterator[str]:
    """The shares by operation and kernel with the rows that are off, and the share of all."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in found:
        groups[row.op, "" if row.op.startswith("planner") else row.kernel].append(row)
    for (op, kernel), group in groups.items():
        yield f"{op} {kernel}".rstrip() + f": {_share(group)}"
        for row in sorted(group, key=lambda row: row.ratio):
            if not row.near:
                yield f"    {row.ratio:.2f} of {row.measured:.4g} ms: {row.name}{'' if kernel else ', ' + row.kernel}"
    yield f"all: {_share([row for group in groups.values() for row in group])}"


def _share(group: list[Row]) -> str:
    near = sum(row.near for row in group)
    return f"{near} of {len(group)} within {NEAR * 100:.0f} %, {near / max(1, len(group)) * 100:.1f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of records")
    for line in table(rows(records.newest(records.read(parser.parse_args().folder)))):
        print(line)
