"""The sweep of `sparsek tune` on a CPU: what is measured, that a wrong result gets no time, and what is printed."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import sparsek as sk
from sparsek.core.clock import Times
from sparsek.core.device import H200
from sparsek.core.errors import InvalidInput, SparseKWarning, Unsupported
from sparsek.products.ops.linear import linear
from sparsek.products.ops.weight_formats import FORMATS, WeightFormat, plan_of
from sparsek.testing.compare import Expected
from sparsek.tools.cli import tune as tuning
from sparsek.tools.cli.__main__ import app
from sparsek.tools.cli.tune import SPARSE, Job, Trial, shortlist, sweep
from tests.problems import spmm_problem

CPU = torch.device("cpu")
JOB = Job(24, 64, 128, WeightFormat("bsr", 32, 0.5), "fp32")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Seconds of the runs of each config by its place, 1 for others; every call is made once."""
    seconds: dict[str, list[float]] = {}

    def rounds(calls: Mapping[str, Callable[[], object]], **options: Any) -> dict[str, Times]:
        for call in calls.values():
            call()
        return {name: Times.of([each * 1e3 for each in seconds.get(name, [1.0])]) for name in calls}

    monkeypatch.setattr(tuning, "time_rounds", rounds)
    monkeypatch.setenv("COLUMNS", "200")
    return seconds


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def swept(job: Job = JOB, **options: Any) -> list[Trial]:
    return sweep(job, device=CPU, **options)


def test_every_config_is_listed_the_best_first_with_the_planners_marked(
    clock: dict[str, list[float]],
) -> None:
    clock.update({"0": [2.0, 4.0], "2": [0.5, 0.5]})
    trials = swept()
    planned = plan_of(*JOB.make(CPU))
    own = planned.implementation
    assert {each.kernel for each in trials} == {"cpu.spmm"}
    assert {each.config for each in trials} == {own.default(planned.problem), *own.configs(planned.problem)}
    assert [each.mean for each in trials] == [0.5, *[1.0] * (len(trials) - 2), 3.0]
    assert trials[-1].deviation == pytest.approx(2**0.5)
    assert trials[1].deviation is None
    assert [each.choice for each in trials] == [*[""] * (len(trials) - 1), "planner"]
    assert trials[-1].config == planned.config


@pytest.mark.parametrize("form", SPARSE)
def test_every_format_can_be_swept(form: str) -> None:
    block = 0 if form.startswith("semi24") else 64
    trials = swept(Job(16, 64, 128, WeightFormat(form, block, 0.5), "fp32"))
    assert all(each.runs == (1.0,) for each in trials), trials
    assert [each.choice for each in trials].count("planner") == 1


def test_kernels_are_named_and_so_many_configs_taken_and_steps_told() -> None:
    steps: list[str] = []
    trials = swept(kernels=["cpu.spmm", "reference.spmm"], most=2, step=steps.append)
    assert sorted(each.kernel for each in trials) == ["cpu.spmm", "cpu.spmm", "reference.spmm"]
    assert sorted(each.choice for each in trials) == ["", "kernel", "planner"]
    assert steps == [
        "cpu.spmm: config 1 of 2",
        "cpu.spmm: config 2 of 2",
        "reference.spmm: config 1 of 1",
        "5 rounds of 3 configs",
    ]
    with pytest.raises(Unsupported, match=r"hopper\.spmm: needs a Hopper card"):
        swept(kernels=["hopper.spmm"])


@dataclass(frozen=True)
class Wide:
    side: int


class Stub:
    """Its own choice is not the one that it predicts to be fastest."""

    def default(self, p: Any) -> Wide:
        return Wide(64)

    def configs(self, p: Any) -> list[Wide]:
        return [Wide(256), Wide(64), Wide(16), Wide(128), Wide(32)]

    def seconds(self, p: Any, c: Wide) -> float:
        return c.side * 1e-6


def test_the_shortlist_begins_with_the_kernels_own_choice_and_goes_on_by_prediction() -> None:
    problem = spmm_problem(4096, 4096, 4096, (128, 128), 128, "bf16", H200)
    assert shortlist(Stub(), problem, 4) == [Wide(64), Wide(16), Wide(32), Wide(128)]
    assert shortlist(Stub(), problem, None) == [Wide(64), Wide(16), Wide(32), Wide(128), Wide(256)]


@dataclass(frozen=True)
class Kind:
    kind: str


class Faulty:
    """A kernel whose configs are right, wrong, or broken, by their name."""

    def default(self, p: Any) -> Kind:
        return Kind("right")

    def configs(self, p: Any) -> list[Kind]:
        return [Kind(name) for name in ("right", "nearly", "silent", "broken")]

    def seconds(self, p: Any, c: Kind) -> float:
        return 1.0


def test_a_config_with_a_wrong_result_gets_no_time_however_fast(
    monkeypatch: pytest.MonkeyPatch, clock: dict[str, list[float]]
) -> None:
    clock.update({"0": [2.0], "1": [0.1], "2": [0.1], "3": [0.1]})

    def plan_of(x: Any, weight: Any, kernel: str | None = None, config: Any = None) -> Any:
        if config is None:
            candidates = [SimpleNamespace(name="cpu.spmm", why_not=())]
            return SimpleNamespace(
                kernel="cpu.spmm", implementation=Faulty(), problem=None, candidates=candidates
            )

        def plan(x: torch.Tensor, w: Any, out: torch.Tensor | None = None) -> torch.Tensor:
            y = linear(x, weight)
            if config.kind == "broken":
                raise RuntimeError("no such instruction")
            if config.kind == "nearly":
                y[-1, -1] += 1.0
            if out is not None and config.kind != "silent":
                out.copy_(y)
            return y if out is None else out

        return plan

    monkeypatch.setattr(tuning, "plan_of", plan_of)
    trials = swept()
    assert [each.config.kind for each in trials] == ["right", "nearly", "silent", "broken"]
    assert trials[0].runs == (2.0,)
    assert trials[1].why_not.startswith("error ")
    assert trials[2].why_not.startswith("error inf exceeds the budget")
    assert trials[3].why_not == "does not run: no such instruction"
    done = run("64x128", *SMALL, "--format", "bsr")
    assert done.exit_code == 0, done.output
    assert "not timed: cpu.spmm: Kind(kind='broken'): does not run: no such instruction" in done.output
    document = json.loads(run("64x128", *SMALL, "--format", "bsr", "--json").stdout)
    assert [each["config"] for each in document["layers"][0]["left_out"]] == [
        {"kind": kind} for kind in ("nearly", "silent", "broken")
    ]


@pytest.mark.parametrize("name", FORMATS)
def test_the_expected_product_is_passed_by_the_library_and_not_by_others(name: str) -> None:
    w, x = torch.randn(64, 128), torch.randn(24, 128)
    form = WeightFormat(name, 0 if name in ("dense", "semi24", "dense_fp8", "semi24_fp8") else 64, 0.5)
    weight = form.convert(w)
    expected, y = Expected.of(x, weight), linear(x, weight, kernel=form.kernel)
    assert expected.judge(y).passed
    assert not expected.judge(y + 1e-2 * y.std()).passed
    assert not expected.judge(torch.full_like(y, torch.nan)).passed


def test_shapes_are_written_or_those_of_a_file(tmp_path: Path) -> None:
    assert tuning.shapes_in("64x128, 128x64,64x128") == [(64, 128), (128, 64)]
    np.savez(tmp_path / "w.npz", a=np.zeros((32, 16)), b=np.zeros((32, 16)), c=np.zeros(3))
    assert tuning.shapes_in(str(tmp_path / "w.npz")) == [(32, 16)]
    with pytest.raises(InvalidInput, match="'64' is neither a file nor a shape of W like 4096x14336"):
        tuning.shapes_in("64")
    with pytest.raises(InvalidInput, match="tokens must be at least 1"):
        Job(0, 64, 64, WeightFormat("semi24"))


def test_a_weight_that_cannot_be_stored_so_is_refused() -> None:
    with pytest.raises(Unsupported, match="K must be a multiple of 8"):
        swept(Job(8, 64, 12, WeightFormat("semi24"), "fp32"))


SMALL = ("--device", "cpu", "--tokens", "16", "--block", "32", "--keep", "0.5", "--dtype", "fp32")


def test_the_command_prints_a_table_for_each_layer(clock: dict[str, list[float]]) -> None:
    clock.update({"0": [2.0, 2.5], "1": [0.25, 0.75]})
    done = run("64x128", *SMALL, "--format", "semi24,bsr", "--configs", 2)
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == "16 x 128 to 64, 2:4 fp32 on cpu"
    assert re.fullmatch(r"kernel: config +mean +deviation +runs +choice of", lines[1])
    assert re.fullmatch(r"reference\.semi24: .* 2\.25 s +354 ms +2 +planner", lines[2])
    assert lines[3] == "16 x 128 to 64, BSR 32 50 % fp32 on cpu"
    assert re.fullmatch(r"cpu\.spmm: steps of \d+ KiB +500 ms +354 ms +2", lines[5])
    assert re.fullmatch(r"cpu\.spmm: .* 2\.25 s +354 ms +2 +planner", lines[6])
    assert len(lines) == 7


def test_json_has_the_configs_that_a_plan_takes(clock: dict[str, list[float]]) -> None:
    clock["1"] = [0.25]
    done = run("64x128", *SMALL, "--format", "bsr", "--json")
    document = json.loads(done.stdout)
    assert (document["card"], document["failed"]) == ("cpu", [])
    (layer,) = document["layers"]
    best = layer["configs"][0]
    assert {"mean_seconds": 0.25, "deviation_seconds": None, "runs": 1, "choice": ""}.items() <= best.items()
    x, weight = JOB.make(CPU)
    for config in (best["config"], best["text"]):
        plan = sk.plan_spmm(x, weight.T, kernel=best["kernel"], config=config)
        assert str(plan.config) == best["text"]
        assert plan.config != sk.plan_spmm(x, weight.T, kernel=best["kernel"]).config


def test_what_cannot_run_is_named_and_the_rest_goes_on() -> None:
    done = run("64x100,64x128", *SMALL, "--format", "semi24")
    assert done.exit_code == 0, done.output
    assert "K must be a multiple of 8, not 100" in done.stderr
    assert "16 x 128 to 64" in done.stdout
    done = run("64x128", *SMALL, "--format", "semi24", "--kernel", "hopper.semi24", "--json")
    assert done.exit_code == 1
    (failed,) = json.loads(done.stdout)["failed"]
    assert "hopper.semi24 cannot run this" in failed["why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert "there is no GPU to tune for; --device cpu" in run("64x64").output


def test_the_tables_of_before_warn_once_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "tuning.json"
    with pytest.warns(
        SparseKWarning, match="--out .*tuning.json has no effect.*kernel=..., config=..."
    ) as seen:
        done = run("64x128", *SMALL, "--format", "bsr", "--out", table)
    assert (done.exit_code, len(seen), table.exists()) == (0, 1, False)
    table.write_text("{")
    a, b = sk.random_bsr(64, 64, 32, 0.5), torch.ones(64, 7)
    before = sk.plan_spmm(a, b).config
    monkeypatch.setenv("SPARSEK_TUNING", str(table))
    with pytest.warns(
        SparseKWarning, match="SPARSEK_TUNING=.*tuning.json has no effect.*sparsek tune"
    ) as seen:
        assert sk.plan_spmm(a, b).config == before
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.plan_spmm(a, torch.ones(64, 9))
    assert table.read_text() == "{"


@pytest.mark.gpu
def test_on_a_gpu_every_config_of_the_kernels_for_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    job = Job(512, 1024, 1024, WeightFormat("bsr", 128, 0.25))
    trials = sweep(job, device=torch.device("cuda"), kernels=["hopper.spmm", "portable.spmm"], rounds=3)
    assert {each.kernel for each in trials} == {"hopper.spmm", "portable.spmm"}
    assert [each.why_not for each in trials if each.why_not] == []
    assert all(len(each.runs) == 3 for each in trials)
