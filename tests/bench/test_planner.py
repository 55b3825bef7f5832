"""The benchmark of the planner's choice, with a clock that says what each option takes."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sparsek.core.clock import Times
from sparsek.core.device import CPU
from sparsek.core.errors import InvalidInput
from sparsek.products.ops import choose as choose_format
from sparsek.products.ops.weight_formats import format_of
from sparsek.tools.cli.__main__ import app
from sparsek_bench.engine import records, report
from sparsek_bench.engine.case import SuiteRow
from sparsek_bench.engine.run import GateError, Outcome, measure
from sparsek_bench.suites import planner
from sparsek_bench.suites.planner import LAYERS, PlannerCase

FEW = PlannerCase("few", "fp32")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], None]:
    """`clock({kind of weight: ms})`: what rounds find; 1 ms for others. Calls are made once."""

    def set_times(ms: Mapping[str, float]) -> None:
        def measured(found: Any, x: Any, card: Any, rounds: int, inner_ms: float) -> dict[int, Times]:
            times = {}
            for at, (option, weight) in enumerate(found):
                if weight is not None:
                    took = ms.get(option.form.format, 1.0)
                    times[at] = Times(took, took / 2, took * 2, rounds)
            return times

        monkeypatch.setattr(planner.choosing, "measure", measured)

    return set_times


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`chooses(format)`: the predictions favour it."""

    def favour(form: str) -> None:
        real = choose_format.predict

        def predict(weight: Any, *rest: Any) -> Any:
            return real(weight, *rest)._replace(seconds=1e-6 if format_of(weight).format == form else 1e-3)

        monkeypatch.setattr(choose_format, "predict", predict)

    return favour


def run() -> Outcome:
    said: list[str] = []
    outcome = measure(SuiteRow(FEW), peers=(), rounds=3, device=torch.device("cpu"), report=said.append)
    assert said[0] == "layer 1 of 2, 0 choices good so far: 64 x 256 to 128, 50 %"
    assert re.fullmatch(r"layer 2 of 2, [01] choices good so far: 48 x 128 to 256, 25 %", said[1])
    return outcome


def test_the_suite_is_fifty_layers_with_densities() -> None:
    layers = LAYERS["models"]
    assert len(set(layers)) == 50
    assert {layer.keep for layer in layers} == {0.5, 0.25, 0.125, 0.0625}
    assert {layer.tokens for layer in layers} == {16, 256, 1024, 4096, 8192}


def test_the_calls_to_compile_are_those_of_the_options() -> None:
    given = torch.device("cpu"), LAYERS["few"][0], FEW
    found = dict(planner.prepared(given))
    assert {name.split()[0] for name in found} >= {
        "reference.semi24",
        "cpu.spmm",
        "cpu.bsr24",
        "vendor.cublas_fp8",
    }
    assert all(call().shape == (64, 128) for call in found.values())


def test_a_choice_that_is_the_best_measured_counts(clock, chooses) -> None:
    chooses("semi24")
    clock({"semi24": 0.5})
    (record,) = run().records
    assert records.faults(record) == []
    assert records.case_of(record) == FEW
    assert records.is_fresh(record)
    assert (record["near"], record["count"], record["worst"]) == (2, 2, 1.0)
    assert record["ms"] == {"median": 1.0, "min": 0.5, "max": 2.0, "rounds": 3}
    assert record["ratio"] == {"best": 1.0, "measured": 1.0, "dense": 2.0, "2:4": 1.0}
    first = record["config"]["layers"][0]
    assert (first["layer"], first["choice"], first["best"]) == ("64 x 256 to 128, 50 %", "2:4", "2:4")
    assert first["us"]["2:4"] == [1.0, 500.0]
    assert {"dense", "2:4", "BSR 64 50 %", "BSR 128 50 %", "BSR24 64 50 %"} <= set(first["us"])


def test_a_choice_that_is_slow_is_told(clock, chooses) -> None:
    chooses("semi24")
    clock({"semi24": 1.3, "bsr": 1.04})
    outcome = run()
    (record,) = outcome.records
    assert (record["near"], record["near_measured"], record["worst"]) == (0, 2, 1.3)
    said = outcome.notes["planner"]
    assert said.startswith(
        "0 of 2 choices within 5 % of the best by prediction, 2 by the planner's own rounds; "
    )
    assert "; 64 x 256 to 128, 50 %: 2:4 takes 1.30x dense" in said
    assert record["ratio"]["best"] == pytest.approx(1 / 1.3, abs=1e-4)


def test_within_five_percent_is_near_enough(clock, chooses) -> None:
    chooses("semi24")
    clock({"semi24": 1.04})
    (record,) = run().records
    assert (record["near"], record["worst"]) == (2, 1.04)


def test_a_wrong_result_is_no_record(clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock({})
    real = planner.linear
    monkeypatch.setattr(planner, "linear", lambda x, w, kernel: real(x, w, kernel=kernel) * 1.01)
    with pytest.raises(
        GateError, match=r"dense by torch on 64 x 256 to 128, 50 %: error .* exceeds the budget"
    ):
        run()


def test_the_table_shows_the_share_and_the_worst(clock, chooses) -> None:
    chooses("semi24")
    clock({"semi24": 1.3})
    lines = report.markdown(run().records, "planner").splitlines()
    assert lines[0] == (
        "| case | ms | within 5 %, by prediction | worst choice | by its own rounds | over dense | over 2:4 |"
    )
    assert lines[2] == (
        "| 2 layers × densities of few, fp32 | 2.600 ± 1.950 | 0 of 2 | 1.30x the best | 2 of 2 | 0.77 | 1.00 |"
    )


def test_a_case_names_a_suite_that_is_there() -> None:
    with pytest.raises(InvalidInput, match="no suite is called 'all'; known: models, other, unseen, few"):
        PlannerCase("all")
    with pytest.raises(InvalidInput, match="no format is called 'csr'"):
        PlannerCase("few", formats="dense+csr")
    with pytest.raises(InvalidInput, match="measured in its own way"):
        FEW.operands(torch.device("cpu"))


def test_the_command_measures_and_writes(clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    clock({})
    out = tmp_path / "planner.jsonl"
    arguments = [
        "bench",
        "planner",
        "--layers",
        "few",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "2 of 2" in done.output
    assert "choices within 5 % of the best by prediction" in done.output
    (record,) = records.read(out)
    assert record["env"]["gpu"] == CPU.name
