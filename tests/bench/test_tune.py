"""Tuning a layer on a CPU: what is measured, that a wrong result never wins, and what the command says and keeps."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from sparsek.advise import tune as tuning
from sparsek.advise.tune import Job, Tuning
from sparsek.cli.__main__ import app
from sparsek.cli.tune import SPARSE
from sparsek.core.clock import Times
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.ops.linear import linear
from sparsek.ops.weight_formats import FORMATS, WeightFormat
from sparsek.plan import table
from sparsek.testing.compare import Expected

CPU = torch.device("cpu")
JOB = Job(24, 64, 128, WeightFormat("bsr", 32, 0.5), "fp32")


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("SPARSEK_TUNING", str(path))
    monkeypatch.setenv("COLUMNS", "200")
    table.forget()
    yield path
    table.forget()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Seconds of each config by its place, 1 for others; every call is made once."""
    seconds: dict[str, float] = {}

    def rounds(calls: Mapping[str, Callable[[], object]], **options: Any) -> dict[str, Times]:
        for call in calls.values():
            call()
        return {name: Times.of([seconds.get(name, 1.0) * 1e3]) for name in calls}

    monkeypatch.setattr(tuning, "time_rounds", rounds)
    return seconds


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def tuned(job: Job = JOB, **options: Any) -> list[Tuning]:
    return list(tuning.tune(job, device=CPU, **options))


def test_every_kernel_that_can_and_has_a_choice_is_tuned(clock: dict[str, float]) -> None:
    clock.update({"0": 2.0, "1": 1.5})
    (found,) = tuned(most=2)
    assert found.kernel == "cpu.spmm"
    assert [each.seconds for each in found.trials] == [2.0, 1.5]
    assert found.entry is not None
    assert found.entry.config == table.as_json(found.trials[1].config)
    assert (
        found.line
        == "cpu.spmm on 24 x 128 to 64, BSR 32 50 % fp32: 1500000.0 us, 0.75x the time of its own choice, 2 configs"
    )


@pytest.mark.parametrize("form", SPARSE)
def test_every_format_can_be_tuned(form: str) -> None:
    block = 0 if form.startswith("semi24") else 64
    every = tuned(Job(16, 64, 128, WeightFormat(form, block, 0.5), "fp32"), most=2)
    assert every or form.endswith("fp8")  # whose kernels for a CPU have one config each
    for found in every:
        assert all(each.seconds == 1.0 for each in found.trials), found.line


def test_steps_are_told_and_other_kernels_left_alone() -> None:
    steps: list[str] = []
    assert tuned(kernels=["hopper.spmm", "vendor.dense"], step=steps.append) == []
    assert steps == []
    assert len(tuned(kernels=["cpu.spmm"], most=2, step=steps.append)) == 1
    assert steps == ["cpu.spmm: config 1 of 2", "cpu.spmm: config 2 of 2", "cpu.spmm: 5 rounds of 2 configs"]


@dataclass(frozen=True)
class Kind:
    kind: str


class Faulty:
    """A kernel whose configs are right, wrong, or broken, by their name."""

    name = "cpu.spmm"
    problem = SimpleNamespace(op="spmm")

    def __init__(self, first: str) -> None:
        self.first = first

    def why_not(self, p: Any) -> list[str]:
        return []

    def default(self, p: Any) -> Kind:
        return Kind(self.first)

    def configs(self, p: Any) -> list[Kind]:
        return [Kind(name) for name in ("right", "nearly", "silent", "broken")]

    def seconds(self, p: Any, c: Kind) -> float:
        return 1.0


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Tuning]]:
    """Tunes a layer with a faulty kernel whose own choice has that name."""
    real = tuning.plan_of

    def plan_of(x: Any, weight: Any, kernel: str | None = None, config: Any = None) -> Any:
        if config is None:
            return real(x, weight)

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

    def tune(first: str) -> list[Tuning]:
        monkeypatch.setattr(tuning, "plan_of", plan_of)
        monkeypatch.setattr(tuning, "load", lambda name: Faulty(first))
        return tuned(kernels=["cpu.spmm"])

    return tune


def test_a_config_with_a_wrong_result_gets_no_time_however_fast(faulty, clock: dict[str, float]) -> None:
    clock.update({"0": 2.0, "1": 0.1, "2": 0.1, "3": 0.1})
    (found,) = faulty("right")
    assert [each.config.kind for each in found.trials] == ["right", "nearly", "silent", "broken"]
    assert found.trials[1].why_not.startswith("error ")
    assert found.trials[2].why_not.startswith("error inf exceeds the budget")
    assert found.trials[3].why_not == "does not run: no such instruction"
    # With three of four left out there is nothing to compare, and nothing was timed.
    assert found.entry is None
    assert "nothing learned of 4 configs, 3 left out (error " in found.line


def test_where_the_kernels_own_choice_is_wrong_nothing_is_kept(faulty) -> None:
    (found,) = faulty("silent")
    assert found.trials[0].why_not
    assert found.entry is None


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
        tuned(Job(8, 64, 12, WeightFormat("semi24"), "fp32"))


SMALL = (
    "--device",
    "cpu",
    "--tokens",
    "16",
    "--block",
    "32",
    "--keep",
    "0.5",
    "--dtype",
    "fp32",
    "--configs",
    "2",
)


def test_the_command_measures_keeps_shows_and_clears(own: Path, clock: dict[str, float]) -> None:
    clock.update({"0": 2.0})
    done = run("64x128", *SMALL, "--format", "semi24,bsr")
    assert done.exit_code == 0, done.output
    assert (
        "cpu.semi24 on 16 x 128 to 64, 2:4 fp32: 1000000.0 us, 0.50x the time of its own choice"
        in done.output
    )
    assert f"2 entries in {own}" in done.output
    assert {each.kernel for each in table.read(own).values()} == {"cpu.semi24", "cpu.spmm"}
    shown = run("--show").output
    assert f"{own}: 2 entries" in shown
    assert "1.00 s     2.00 s" in shown
    assert "as measured" in shown
    assert f"{table.SHIPPED}: " in shown
    assert "removed" in run("--clear").output
    assert not own.exists()
    assert "was not there" in run("--clear").output
    assert "not there" in run("--show").output


def test_a_changed_source_shows_as_ignored(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("64x128", *SMALL, "--format", "bsr")
    monkeypatch.setattr(table, "_hash_of", lambda kernel: "other")
    assert "changed, ignored" in run("--show").output


def test_what_cannot_be_stored_is_named_and_the_rest_goes_on(own: Path) -> None:
    done = run("64x100,64x128", *SMALL, "--format", "semi24")
    assert done.exit_code == 0, done.output
    assert "K must be a multiple of 8, not 100" in done.output
    assert f"1 entries in {own}" in done.output


def test_another_table_can_be_added_to(own: Path, tmp_path: Path) -> None:
    out = tmp_path / "h200.json"
    assert run("64x128", *SMALL, "--format", "bsr", "--out", out).exit_code == 0
    assert len(table.read(out)) == 1
    assert not own.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--show", "--clear"], "choose"),
        (
            ["--kernel", "hopper.nothing"],
            "no kernel of these formats is called 'hopper.nothing'; known: hopper.spmm,",
        ),
        (["--kernel", "hopper.spmm,hopper.sddmm"], "no kernel of these formats is called 'hopper.sddmm'"),
        (["--format", "dense"], "--format dense: the vendor's library multiplies it"),
        (["--format", "bsr,dense_fp8", "--device", "cpu"], "--format dense_fp8: the vendor's library"),
        (
            ["--format", "csr"],
            "no format is called 'csr'; did you mean 'bsr'? Known: semi24, bsr, bsr24, semi24_fp8, bsr_fp8, bsr24_fp8",
        ),
        (["--keep", "0", "--device", "cpu"], "a fraction of blocks"),
        (["none.npz", "--device", "cpu"], "neither a file nor a shape"),
    ],
)
def test_what_makes_no_sense_is_one_red_line(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output


def test_off_names_no_table_to_tune_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEK_TUNING", "off")
    assert "SPARSEK_TUNING is off" in run("64x64", *SMALL).output


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    assert "there is no GPU to tune for" in run("64x64").output


@pytest.mark.gpu
def test_on_a_gpu_the_fastest_right_config_is_kept(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("SPARSEK_TUNING", str(own))
    job = Job(512, 1024, 1024, WeightFormat("bsr", 128, 0.25))
    found = list(tuning.tune(job, device=torch.device("cuda"), kernels=["hopper.spmm"], most=3, rounds=3))
    assert [each.kernel for each in found] == ["hopper.spmm"]
    assert all(not trial.why_not for trial in found[0].trials)
    assert found[0].entry is not None
