"""The suite of host times: its cases, its calls against torch, first calls in processes of their own, its table."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsek.core import env
from sparsek.core.device import CPU as CPU_CARD
from sparsek.core.device import H200
from sparsek.engine.plan import host as host_times
from sparsek.testing.budget import Gate
from sparsek_bench.engine import records, report
from sparsek_bench.engine.case import Bar
from sparsek_bench.engine.run import GateError
from sparsek_bench.suites import host
from sparsek_bench.suites.host import HOST, HostCase
from sparsek_bench.suites.host_calls import CALLS, CallPair
from tests.bench.runs import measured

CPU = torch.device("cpu")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"
LAYER = (8, 64, 128)
SMALL = (
    HostCase("A @ B", (64, 96, 32), block=(32, 32), dtype="fp32"),
    HostCase("plan of A @ B", (64, 96, 32), block=(32, 32), dtype="fp32"),
    *(
        HostCase("linear", LAYER, storage, block=(64, 64), density=1.0, dtype="fp32")
        for storage in host.STORAGES
    ),
    HostCase("attention", (2, 128, 32), block=(64, 64), dtype="fp32"),
    HostCase("linear + backward", LAYER, block=(32, 32), dtype="fp32"),
    HostCase("attention + backward", (2, 128, 32), block=(64, 64), dtype="fp32"),
    HostCase("layer", LAYER, block=(32, 32), dtype="fp32"),
    HostCase("layer", LAYER, "semi24", dtype="fp32"),
    HostCase("from_dense", (64, 96), block=(32, 32), dtype="fp32"),
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, one sample a round."""
    for name, value in (("CALLS_EACH", 2), ("CALLS_BACKWARD", 2), ("SAMPLES", 1)):
        monkeypatch.setattr(host, name, value)
    monkeypatch.setattr("sparsek.core.clock.WALL_CALLS", 2)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_every_call_is_checked_and_timed_beside_torchs(case: HostCase, few: None) -> None:
    (record,) = measured(case).records
    assert record["kernel"] == case.module
    ours, torchs = record["ms"]["median"], record["peers"]["torch"]["ms"]["median"]
    assert record["ratio"]["torch"] == pytest.approx(torchs / ours, rel=1e-2, abs=5e-5)  # four decimals
    assert records.case_of(json.loads(json.dumps(record))) == case


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_torchs_call_computes_the_same(case: HostCase) -> None:
    if case.call == "from_dense":
        return
    pair = CALLS[case.call].make(case, CPU)
    ours, torchs = pair.ours(), pair.torchs()
    for mine, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (ours, torchs)), strict=True):
        if mine.shape != theirs.shape:  # the gradient of a BSR is one of its blocks
            continue
        loose = 0.1 if case.storage == "fp8" else 1e-4
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < loose


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_wrong_result_fails_its_gate(case: HostCase) -> None:
    pair = CALLS[case.call].make(case, CPU)
    right = pair.ours()

    def spoiled(x: Any) -> Any:
        if isinstance(x, tuple):
            return (*x[:-1], spoiled(x[-1]))
        if isinstance(x, torch.Tensor):
            x = x.detach().clone()
            x.view(-1)[:3] += x.abs().max()
            return x
        return type(x)(x.pattern, spoiled(x.values))

    assert pair.judge(right).passed
    assert not pair.judge(spoiled(right)).passed


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    wrong = CallPair(lambda: None, lambda: None, lambda out: Gate(1.0, 0.5, False))
    monkeypatch.setitem(host.CALLS, "A @ B", CALLS["A @ B"]._replace(make=lambda case, device: wrong))
    with pytest.raises(GateError, match="A @ B"):
        SMALL[0].run(device=CPU, rounds=1)


def test_first_calls_are_made_in_processes_with_caches_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[tuple[str, bool]] = []
    answers = iter(
        {"seconds": s, "error": 0.1, "budget": 1.0, "passed": True}
        for s in (3.0, 1.0, 0.2, 0.4, 9.0, 0.6, 0.8)
    )

    def process(case: HostCase, device: torch.device, folder: Path, *named: str) -> dict[str, Any]:
        if named:
            return {"ran": ["sparsek.core.clock:Times.of"]}
        folders.append((str(folder), any(folder.iterdir())))
        (folder / "kernel").touch()
        return next(answers)

    monkeypatch.setattr(host, "_in_a_process", process)
    empty = HostCase("A @ B", (64, 96, 32), block=(32, 32), caches="empty")
    (first,) = empty.run(device=CPU, rounds=7).records
    assert first["ms"] == {"median": 2000.0, "min": 1000.0, "max": 3000.0, "rounds": 2}
    assert first["peers"] == {}
    filled = HostCase("A @ B", (64, 96, 32), block=(32, 32), caches="filled")
    (again,) = filled.run(device=CPU, rounds=7).records
    assert again["ms"]["median"] == pytest.approx(300.0)
    # The last process with empty caches has filled them.
    assert [used for _, used in folders] == [False, False, True, True]
    assert len({folder for folder, _ in folders}) == 2
    (alone,) = filled.run(device=CPU, rounds=7).records
    assert alone["ms"]["median"] == pytest.approx(700.0)
    assert [used for _, used in folders[4:]] == [False, True, True]
    assert len({folder for folder, _ in folders}) == 3
    assert not any(Path(folder).exists() for folder, _ in folders)


@pytest.fixture
def with_this_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the bytecode that this one has, because a folder of its own takes ten seconds to fill."""
    given = env.with_caches_in

    def kept(folder: Path, bytecode: Path) -> dict[str, str]:
        return given(folder, bytecode) | {"PYTHONPYCACHEPREFIX": ""}

    monkeypatch.setattr(host, "_bytecode", lambda: SimpleNamespace(name="unused"))
    monkeypatch.setattr(env, "with_caches_in", kept)


@pytest.mark.usefixtures("with_this_bytecode")
def test_a_first_call_runs_in_a_fresh_process() -> None:
    case = HostCase("A @ B", (64, 96, 32), block=(32, 32), dtype="fp32", caches="empty")
    (record,) = case.run(device=CPU, rounds=1).records
    assert records.faults(record) == []
    assert 0 < record["ms"]["median"] < 6e4


def test_a_first_call_wants_the_machine_code_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(host.shipped, "store", lambda: None)
    case = HostCase("A @ B", (64, 96, 32), caches="filled")
    outcome = case.run(device=torch.device("cuda", 0), rounds=1)
    assert outcome.records == ()
    assert "make cubins" in outcome.unavailable[case.module][0]


@pytest.mark.usefixtures("with_this_bytecode")
def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "CHILD", "sparsek.gone")
    with pytest.raises(GateError, match="No module named"):
        host._in_a_process(SMALL[0], CPU, tmp_path)


def test_a_process_before_the_first_leaves_the_bytecode_of_every_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(host, "_child", lambda given, env: ran.append((given, env)))
    folder = host._bytecode.__wrapped__()
    ((given, found),) = ran
    assert given == ["-c", host.IMPORTS]
    assert found["PYTHONPYCACHEPREFIX"] == folder.name
    folder.cleanup()
    exec(host.IMPORTS, {})


def test_caches_of_a_process_lie_in_its_folder(tmp_path: Path) -> None:
    found = env.with_caches_in(tmp_path, tmp_path / "bytecode")
    for name in ("TRITON_CACHE_DIR", "SPARSEK_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(found[name]).parent == tmp_path
    assert found["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")
    assert found["PYTHONDONTWRITEBYTECODE"] == ""


def test_the_suite_has_every_row_of_the_issue_with_its_bars() -> None:
    cases = [entry.case for entry in HOST]
    assert len(dict.fromkeys(cases)) == len({case.name for case in cases}) == len(cases) == 21
    assert all(case.bar is not None for case in cases)
    assert {case.storage for case in cases if case.call == "linear"} == set(host.STORAGES)
    assert [case.sides[0] for case in cases if case.call == "layer"] == [1, 16, 64, 16]
    assert sum(case.is_first for case in cases) == 8


@pytest.mark.parametrize(("ratio", "verdict"), [(1.7, "missed"), (1.6, "met"), (0.5, "met")])
def test_a_bar_whose_aim_is_lower_is_a_limit(ratio: float, verdict: str) -> None:
    assert Bar("torch", 1.6, 1.1).verdict(ratio) == verdict


def test_the_table_shows_times_limits_and_verdicts(make_record: Callable[..., records.Record]) -> None:
    nulls = {"tflops": None, "gbps": None, "roofline": None}
    ms = {"median": 0.03, "min": 0.029, "max": 0.031, "rounds": 21}
    peers = {"torch": {"ms": ms | {"median": 0.02, "min": 0.02}, "tflops": None}}
    cached = make_record(HOST[0].case, ms=ms, peers=peers, ratio={"torch": 0.6667}, **nulls)
    case = HostCase("from_dense", (4096, 4096), caches="empty")
    first = make_record(
        case, "matrix.bsr", ms=ms | {"median": 700.0, "max": 800.0}, peers={}, ratio={}, **nulls
    )
    assert records.faults(cached) == records.faults(first) == []
    missed = cached | {"ms": ms | {"median": 0.03202}}
    assert "| 1.601 | 1.6, missed |" in report.markdown([missed], "host")
    lines = report.markdown([first, cached], "host").splitlines()
    assert lines[0] == "| case | time | torch's time | over torch's | target, at most |"
    assert lines[2] == "| A @ B, 1024³ block 64 25 % | 30.0 us | 20.0 us | 1.50 | 1.6, met |"
    assert lines[3] == (
        "| first call, empty caches: from_dense, 4096×4096 block 128 25 % | 0.7 s |  |  | 0.5 s, missed |"
    )
    on_cpu = [each | {"env": each["env"] | {"gpu": CPU_CARD.name}} for each in (first, missed)]
    lines = report.markdown(on_cpu, "host").splitlines()
    assert lines[2].endswith(" | 32.0 us | 20.0 us | 1.60 |  |")
    assert lines[3].endswith(" | 0.7 s |  |  |  |")


def test_one_figure_says_what_an_eager_call_costs(
    make_record: Callable[..., records.Record], tmp_path: Path
) -> None:
    """The record, the package's table and the pages agree; `advise` and the planner read the table."""
    found = records.read(RESULTS)
    told = host.host_table(found)
    assert not told or Path(host_times.FILE).read_text(encoding="utf-8") == told
    assert host_times.eager_seconds(H200) == host_times.table()[H200.name]["seconds"] > 0
    assert host_times.eager_seconds(CPU_CARD) == 0.0
    assert host_times.eager_seconds(replace(H200, name="NVIDIA H100")) == host_times.eager_seconds(H200)


def test_no_other_figure_of_an_eager_call_stands_in_the_code() -> None:
    root = Path(host_times.__file__).parents[2]
    found = [path.name for path in root.rglob("*.py") if "EAGER_CALL" in path.read_text(encoding="utf-8")]
    assert found == []
