"""`python -m benchmarks.torch_bsr`: every attempt runs, is judged against float64, and is said to be what it is."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import sparsek as sk
from benchmarks.torch_bsr import attempts as repro
from benchmarks.torch_bsr.__main__ import app
from benchmarks.torch_bsr.attempts import (
    Answer,
    Case,
    Finding,
    Measured,
    Operands,
    cases_named,
    counted,
    find,
    in_a_process,
    memory_of,
    peak,
)
from benchmarks.torch_bsr.cases import TORCH_BSR, Add, GradInput
from sparsek.core.errors import InvalidInput
from tests.sampling import sampled

CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the program at a width of 100 characters, without colours."""
    for name, value in (("COLUMNS", "100"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


# What SparseK refuses on purpose: blocks that no tensor core multiplies, and blocks without elements.
REFUSED = {"block-8", "zero-block"}
HERE = [case for case in TORCH_BSR if not case.needs_gpu]


class Doubled(Case):
    """twice a"""

    name = "doubled"
    where = "#1"
    sizes = (64, 64, 32)

    def __init__(self, theirs: Any = None) -> None:
        self.attempt = theirs or (lambda o: o.a * 2)

    def theirs(self, o: Operands) -> Any:
        return self.attempt(o)

    def ours(self, o: Operands) -> Any:
        return o.a * 2

    def dense(self, o: Operands) -> Tensor:
        return o.a * 2


def raising(error: Exception) -> Any:
    def attempt(o: Operands) -> Any:
        raise error

    return attempt


@pytest.mark.parametrize("case", sampled(HERE, 8), ids=lambda each: each.name)
def test_sparsek_does_what_torch_is_documented_not_to(case: Case) -> None:
    found = find(case, CPU)
    assert found.ours.status == ("refuses" if case.name in REFUSED else "works"), found.ours.text
    assert found.torch.status in (*repro.FAILURES, "works")
    assert found.torch.text


@pytest.mark.gpu
@pytest.mark.parametrize("case", TORCH_BSR, ids=lambda each: each.name)
def test_on_a_gpu_sparsek_works_or_refuses(case: Case) -> None:
    found = find(case, torch.device("cuda"))
    assert found.ours.status in ("works", "refuses"), found.ours.text
    assert found.torch.status != "skipped"


@pytest.mark.parametrize(
    ("attempt", "status", "said"),
    [
        (lambda o: o.a * 2, "works", "error 0.0e+00"),
        (lambda o: o.a * 2.1, "wrong", "error 5.0e-02"),
        (lambda o: o.a.to_dense()[:32] * 2, "wrong", "shape [32, 64]"),
        (lambda o: None, "wrong", "nothing"),
        (lambda o: o.a.to_dense() * float("nan"), "wrong", "error inf"),
        (raising(RuntimeError("not there. Really")), "error", "RuntimeError: not there"),
        (raising(RuntimeError("backend failed:\n\nno compiler")), "error", "backend failed: no compiler"),
        (raising(InvalidInput("sides must be even")), "refuses", "sides must be even"),
        (lambda o: Measured(o.a * 2, "slowly", "costly"), "costly", "slowly, error"),
        (lambda o: Measured(o.a * 3, "slowly", "costly"), "wrong", "wrong"),
        (lambda o: Answer("warns", "of something"), "warns", "of something"),
    ],
)
def test_an_attempt_is_judged_by_what_it_did(attempt: Any, status: str, said: str) -> None:
    found = find(Doubled(attempt), CPU)
    assert (found.torch.status, found.ours.status) == (status, "works")
    assert said in found.torch.text
    assert found.fails == (status in ("wrong", "error", "crash", "costly", "warns"))


def test_the_operands_are_the_same_matrices_in_every_form() -> None:
    seen: list[Operands] = []

    class Recorded(Doubled):
        def theirs(self, o: Operands) -> Any:
            seen.append(o)
            return o.a * 2

        def ours(self, o: Operands) -> Any:
            seen.append(o)
            return o.a * 2

    find(Recorded(), CPU)
    theirs, ours = seen
    assert theirs.a.layout == torch.sparse_bsr
    assert isinstance(ours.a, sk.BSR)
    for name in ("a", "a2", "c"):
        assert torch.equal(getattr(theirs, name).to_dense(), getattr(ours, name).to_dense())
    assert torch.equal(ours.a.to_dense() != 0, ours.stored)
    assert not torch.equal(ours.a.values, ours.a2.values)


def test_what_needs_a_gpu_is_skipped_with_the_reason() -> None:
    waiting = [case for case in TORCH_BSR if case.needs_gpu]
    assert waiting
    for case in waiting:
        found = find(case, CPU)
        assert (found.torch.status, found.ours.status) == ("skipped", "skipped")
        assert case.needs_gpu in found.torch.text


def test_what_works_is_fixed_unless_another_device_is_documented() -> None:
    class OnGpus(Doubled):
        name = "on-gpus"
        seen_on = "cuda"

    works, fails, skipped = Answer("works", ""), Answer("error", ""), Answer("skipped", "")
    found = [
        Finding(Doubled(), works, works),
        Finding(OnGpus(), works, works),
        Finding(Add(), fails, works),
        Finding(GradInput(), skipped, skipped),
    ]
    assert counted(found, CPU) == {
        "fails": ["op-add"],
        "fixed": ["doubled"],
        "elsewhere": ["on-gpus"],
        "skipped": ["grad-input"],
    }
    assert counted(found[:2], torch.device("cuda"))["fixed"] == ["doubled", "on-gpus"]


def test_a_process_that_dies_and_one_that_raises() -> None:
    died = in_a_process("import os, signal; os.kill(os.getpid(), signal.SIGFPE)")
    assert (died.status, died.text) == ("crash", "the process dies of SIGFPE")
    assert in_a_process("raise ValueError('no blocks')") == Answer(
        "works", "raises instead of crashing: ValueError: no blocks"
    )
    assert in_a_process("print(3)").text == "returns 3"


def test_memory_is_what_a_call_holds_at_once() -> None:
    before = os.environ.get("KINETO_LOG_LEVEL")
    x = torch.ones(256, 1024)
    assert peak(lambda: x + 1, CPU) == pytest.approx(1 << 20, rel=1e-3)
    assert peak(lambda: ((x + 1) * 2) - 3, CPU) == pytest.approx(2 << 20, rel=1e-3)
    assert os.environ.get("KINETO_LOG_LEVEL") == before


def test_the_profiler_is_quiet_where_it_has_not_run_before() -> None:
    """It reads its level once in a process."""
    code = f"import torch; from {peak.__module__} import peak; peak(lambda: torch.ones(9) + 1, torch.device('cpu'))"
    given = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_memory_is_measured_without_a_warning_of_older_profilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch 2.10 to 2.12 warn at every start, unless events of more cycles than one are kept."""
    prepare = torch.profiler.profile.prepare_trace

    def as_in_2_11(self: torch.profiler.profile) -> None:
        prepare(self)
        if not self.acc_events:
            warnings.warn("Profiler clears events at the end of each cycle.", UserWarning)

    monkeypatch.setattr(torch.profiler.profile, "prepare_trace", as_in_2_11)
    x = torch.ones(256, 1024)
    assert peak(lambda: x + 1, CPU) == pytest.approx(1 << 20, rel=1e-3)


def test_a_call_is_costly_that_takes_more_than_twice_the_usual() -> None:
    x = torch.ones(256, 1024)
    wasteful = memory_of(lambda: torch.stack([x] * 8).sum(0), lambda: x + 1, "with plus")
    assert wasteful.fault == "costly"
    assert wasteful.memory == pytest.approx(9.0, rel=1e-3)
    assert wasteful.note == "9.0 times the result in memory; 1.0 with plus"
    assert memory_of(lambda: (x + 1) * 2, lambda: x + 1, "with plus").fault is None


def test_names_are_unique_and_others_are_refused() -> None:
    names = [case.name for case in TORCH_BSR]
    assert len(set(names)) == len(names)
    assert all(case.where and case.tried for case in TORCH_BSR)
    assert [case.name for case in cases_named(TORCH_BSR, ["right", "op-add"])] == ["right", "op-add"]
    with pytest.raises(InvalidInput, match=r"no entry is called 'left'; known: memory-ragged-n, "):
        cases_named(TORCH_BSR, ["left"])


def test_the_command_shows_both_answers(run) -> None:
    result = run("--only", "op-divide,dtype-convert,num-stages", "--device", "cpu")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert f"torch {torch.__version__}, on cpu" in text
    assert "op-divide #181494" in text
    assert "error: RuntimeError: unsupported" in text
    assert "works: error 0.0e+00; no longer fails" in text
    assert "1 of 2 still fail" in text
    assert "No longer fail: dtype-convert." in text
    assert "Not tried, for want of a GPU: num-stages." in text
    assert "SparseK itself fails" not in text


def test_verbose_shows_the_code_and_the_operands(run) -> None:
    result = run("--only", "op-slice,right", "--verbose", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("return o.left @ o.a") == 1  # written alike for both
    assert "return o.a[:64]" in result.stdout
    assert "return o.a.block_row_slice(0, 2)" in result.stdout
    assert "o.a, o.a2 [256, 384]" in result.stdout


def test_json_is_for_machines(run) -> None:
    result = run("--json", "--only", "op-divide,grad-values,out-transposed")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["torch"] == torch.__version__
    entries = {entry["id"]: entry for entry in told["entries"]}
    assert entries["op-divide"]["fails"] is True
    assert entries["op-divide"]["torch"]["status"] == "error"
    assert entries["grad-values"]["fails"] is False
    assert entries["grad-values"]["sparsek"]["error"] <= entries["grad-values"]["sparsek"]["budget"]
    assert entries["op-divide"]["code"] == {"torch": "return o.a / 3", "sparsek": "return o.a / 3"}
    if not torch.cuda.is_available():
        assert entries["out-transposed"]["fails"] is None
        assert told["skipped"] == ["out-transposed"]


def test_a_failure_of_sparsek_is_not_hidden(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Add, "ours", lambda self, o: o.a)
    result = run("--only", "op-add", "--device", "cpu")
    assert result.exit_code == 0
    assert "SparseK itself fails: op-add." in result.stdout
