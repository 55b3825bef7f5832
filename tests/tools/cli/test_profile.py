"""`sparsek profile`: predictions, ncu's CSV, the breakdown of a call, and the programs that it starts."""

import json
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsek.core.device import H200
from sparsek.engine.table import rows
from sparsek.products.ops.spmm import plan_spmm
from sparsek_bench.benches import BENCHES
from sparsek_bench.commands import profile, profile_run
from sparsek_bench.commands.kernel_names import OF_BENCH, kernel_named, kernels_of
from sparsek_bench.profile import ncu
from sparsek_bench.profile.breakdown import Breakdown, broken_down, on_gpu
from sparsek_bench.suites import product
from sparsek_bench.suites.spmm import SpmmCase

SMALL = ["--m", "512", "--k", "512", "--n", "64"]
# As ncu prints `--page raw --csv --print-units base`: names, units, a row for each launch; metrics that a chip lacks
# are empty or "n/a". Its own lines begin with "==".
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = [
    *(
        "ID",
        "Process ID",
        "Process Name",
        "Host Name",
        "Kernel Name",
        "Context",
        "Stream",
        "Block Size",
        "Grid Size",
    ),
    *("Device", "CC", ncu.SECONDS, ncu.TENSOR[0], ncu.L2_TO_SM, ncu.L2, ncu.DRAM),
    *(STALLED.format(reason) for reason in ("barrier", "long_scoreboard", "selected", "gmma")),
]
UNITS = ["", "", "", "", "", "", "", "", "", "", "", "ns", "%", "byte", "byte", "byte", "", "", "", "inst"]
FIRST = [
    "0",
    "7",
    "python",
    "host",
    "multiply(const *, int)",
    "1",
    "7",
    "(384, 1, 1)",
    "(132, 1, 1)",
    "0",
    "9.0",
]
FIRST += ["300,000", "80.0", "1,610,000,000", "2000000000", "204000000", "3.00", "0.5", "1.0", "1.5"]
SECOND = ["1", "7", "python", "host", "add_parts", "1", "7", "(128, 1, 1)", "(64, 1, 1)", "0", "9.0"]
SECOND += ["100000", "n/a", "10000000", "20000000", "96000000", "1.00", "4.5", "1.0", "n/a"]


def csv_of(*rows: list[str]) -> str:
    lines = [",".join(f'"{cell}"' for cell in row) for row in rows]
    return "\n".join(
        ["==PROF== Connected to process 7", "a line of the program", *lines, "==PROF== Disconnected", ""]
    )


SAMPLE = csv_of(COLUMNS, UNITS, FIRST, SECOND)


def test_the_csv_of_ncu_becomes_launches_in_seconds_bytes_and_shares() -> None:
    first, second = ncu.parse(SAMPLE)
    assert (first.kernel, second.kernel) == ("multiply(const *, int)", "add_parts")
    assert first.seconds == pytest.approx(3e-4)
    assert first.tensor == pytest.approx(0.8)
    assert second.tensor is None
    assert first.counters[ncu.L2_TO_SM] == 1.61e9
    assert first.stalls == {"barrier": 3.0, "long_scoreboard": 0.5, "gmma": 1.5}
    assert second.stalls == {"barrier": 1.0, "long_scoreboard": 4.5}


def test_units_that_ncu_scales_are_read_too() -> None:
    units = [*UNITS[:11], "usecond", "%", "Gbyte", "Mbyte", "Kbyte", *UNITS[16:]]
    row = [*FIRST[:11], "300", "80", "1.61", "2000", "204000", *FIRST[16:]]
    (launch,) = ncu.parse(csv_of(COLUMNS, units, row))
    assert launch.seconds == pytest.approx(3e-4)
    assert launch.counters[ncu.L2_TO_SM] == pytest.approx(1.61e9)
    assert launch.counters[ncu.DRAM] == pytest.approx(204e6)


def test_counters_of_a_call_add_bytes_and_weigh_shares_by_time() -> None:
    counted = ncu.CallCounters.of(ncu.parse(SAMPLE))
    assert counted.seconds == pytest.approx(4e-4)
    assert counted.tensor == pytest.approx(0.8 * 3 / 4)
    assert counted.l2_to_sm == 1.62e9
    assert counted.dram == 3e8
    assert counted.stalls["barrier"] == pytest.approx((3 * 3 + 1) / 4)
    assert counted.bound_by(H200) == "the tensor pipe"
    shares = counted.shares(H200)
    assert shares["L2 to SM"] == pytest.approx(1.62e9 / 4e-4 / H200.fabric)
    sentence = counted.sentence(H200)
    assert (
        "400.0 us with cold caches; the tensor pipe is active in 60 % of the cycles; L2 to SM moves 1620 MB"
        in sentence
    )
    assert "Warps that wait at each issue: barrier 2.50, long scoreboard 1.50, gmma 1.12." in sentence
    assert sentence.endswith("Bound by the tensor pipe.")
    json.dumps(counted.as_json(H200))


@pytest.mark.parametrize(
    ("changed", "bound"),
    [
        ({11: "300000", 12: "20", 15: "1200000000"}, "DRAM"),
        ({11: "300000", 12: "20", 13: "3000000000"}, "L2 to SM"),
        ({11: "300000", 12: "20", 13: "1000", 15: "1000"}, "latency"),
        ({12: "n/a", 13: "n/a", 15: ""}, "latency"),
    ],
)
def test_the_busiest_unit_bounds_a_call_if_it_is_half_busy(changed: dict[int, str], bound: str) -> None:
    row = [changed.get(at, cell) for at, cell in enumerate(FIRST)]
    assert ncu.CallCounters.of(ncu.parse(csv_of(COLUMNS, UNITS, row))).bound_by(H200) == bound


def test_text_without_launches_gives_none_and_the_error_of_ncu() -> None:
    text = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user has no permission\n==ERROR== more\n"
    assert ncu.parse(text) == []
    assert ncu.parse(csv_of(COLUMNS, UNITS)) == []
    assert ncu.refusal(text) == "ERR_NVGPUCTRPERM - The user has no permission"
    assert ncu.refusal(SAMPLE) == ""


def test_the_gpus_share_of_a_trace_is_that_of_kernels_and_copies() -> None:
    events = [
        {"cat": "kernel", "name": "multiply", "dur": 20.0},
        {"cat": "kernel", "name": "multiply", "dur": 22.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 3.0},
        {"cat": "cpu_op", "name": "aten::mm", "dur": 99.0},
        {"name": "process_name", "ph": "M"},
    ]
    found = on_gpu({"traceEvents": events})
    assert found == {"multiply": pytest.approx(42e-6), "Memcpy DtoD": pytest.approx(3e-6)}


@pytest.mark.parametrize(
    ("wall", "kernels", "host", "said"),
    [
        (30e-6, 10e-6, 29e-6, "gaps 20.0 us; the host is busy for 29.0 us. The GPU waits for the host"),
        (30e-6, 29e-6, 12e-6, "gaps 1.0 us; the host is busy for 12.0 us. The host is ahead of the GPU."),
        (30e-6, 31e-6, 12e-6, "gaps 0.0 us"),
    ],
)
def test_a_breakdown_says_who_waits(wall: float, kernels: float, host: float, said: str) -> None:
    assert said in Breakdown(wall, kernels, host, {}).sentence


def test_a_trace_is_written(tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    found = broken_down(lambda: x @ x, torch.device("cpu"), tmp_path / "trace.json", rounds=1)
    assert found.wall > 0
    assert found.kernels == 0
    names = {each.get("name") for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert "aten::mm" in names


def test_every_kernel_belongs_to_a_benchmark_and_every_operation_has_a_line_of_help() -> None:
    assert {name for _, name, *_ in rows()} == {name for bench in OF_BENCH for name in kernels_of(bench)}
    assert set(profile.OPERATIONS) == set(OF_BENCH)
    named = kernel_named("hopper.bsr24")
    assert named is not None
    assert (named.bench, named.defaults["block"]) == ("semi24", "128")
    assert kernel_named("hopper.spm") is None


def test_a_prediction_is_that_of_a_plan_for_the_card() -> None:
    a, b = SpmmCase(512, 512, 64, (64, 64), 0.5).make(torch.device("cpu"))
    here = plan_spmm(a, b)
    for name in (None, "portable.spmm"):
        there, known = profile_run.predicted(here, "h200", name), plan_spmm(a, b, device="h200", kernel=name)
        assert (there.problem, there.kernel, there.seconds) == (known.problem, known.kernel, known.seconds)
        assert there.explain() == known.explain()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("hopper.spmm", SMALL),
        ("hopper.bsr24", SMALL),
        ("hopper.semi24_fp8", SMALL),
        ("sddmm", SMALL),
        ("hopper.attention_bwd", ["--seq", "512", "--heads", "1", "--dim", "64"]),
    ],
)
def test_profile_predicts_the_roofline_of_a_case(run, name: str, more: list[str]) -> None:
    result = run("profile", name, *more, "--device", "h200", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["card"] == "NVIDIA H200"
    assert found["kernel"] == name if "." in name else found["kernel"].endswith(".sddmm")
    assert found["predicted"]["seconds"] >= found["predicted"]["roofline_seconds"] > 0
    assert found["predicted"]["bound_by"] in ("arithmetic", "memory")
    assert (found["measured"], found["calls"], found["counters"]) == (None, None, None)


def test_profile_prints_the_plan_and_its_roofline(run) -> None:
    result = run("profile", "hopper.spmm", *SMALL, "--device", "h100")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "on NVIDIA H100 80GB HBM3" in text
    assert "Predicted: hopper.spmm takes" in text
    assert "There is no measurement" in text


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`profile` measures on the CPU, and finds only the programs that a test writes."""
    monkeypatch.setattr(profile_run, "place", lambda device: (torch.device("cpu"), None))
    monkeypatch.setattr("sparsek_bench.engine.data.MAX_SETS", 2)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def program(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return program


CASE = ["--m", "64", "--k", "64", "--n", "16", "--block", "16", "--dtype", "fp32"]


def measured(run, tmp_path: Path) -> dict[str, Any]:
    result = run("profile", "spmm", *CASE, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_profile_measures_and_says_which_programs_it_lacks(run, on_the_cpu, tmp_path: Path) -> None:
    found = measured(run, tmp_path)
    assert found["kernel"] == "cpu.spmm"
    assert found["measured"]["median"] > 0
    assert found["calls"]["wall"] > 0
    assert found["counters"] is None
    assert found["notes"] == ["ncu is not on PATH: no counters.", "nsys is not on PATH: no timeline."]
    assert found["files"] == [str(tmp_path / "out" / "trace.json")]


def test_calls_in_a_row_are_those_that_users_repeat(run, on_the_cpu, tmp_path: Path, monkeypatch) -> None:
    """A stand-in for the verb, whose first calls of each operand set plan and record, as on a GPU."""
    seen: dict[int, int] = {}

    def call(a: Any, b: Any, *, kernel: str) -> None:
        assert kernel == "cpu.spmm"
        seen[id(b)] = seen.get(id(b), 0) + 1
        if seen[id(b)] < 3:
            time.sleep(0.05)

    monkeypatch.setattr(product, "spmm", call)
    found = measured(run, tmp_path)
    assert len(seen) == 2
    assert found["calls"]["host"] < 1e-3
    assert found["calls"]["wall"] < 1e-3


TINY = {
    "m": "128",
    "k": "128",
    "n": "64",
    "tokens": "64",
    "block": "64",
    "seq": "256",
    "heads": "2",
    "dim": "64",
}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("spmm", {"form": "B@A.T"}),
        ("spmm", {}),
        ("semi24", {"block": "none"}),
        ("fp8", {}),
        ("linear", {"epilogue": "bias+gelu+residual"}),
        ("sddmm", {}),
        ("spgemm", {"result": "bsr"}),
        ("attention", {"mask": "causal"}),
        ("attention-fp8", {"mask": "causal", "block": "128"}),
        ("attention-backward", {"mask": "causal"}),
        ("serving", {"seq": "1x256", "heads": "2:1", "page": "64"}),
    ],
    ids=str,
)
def test_the_call_that_users_write_gives_the_result_of_the_plan(name: str, given: dict[str, str]) -> None:
    one = BENCHES[name]
    default = {each.name: TINY.get(each.name, each.default) for each in one.options}
    (case,) = one.cases(default | given)
    made = case.operands(torch.device("cpu"))[0]
    assert made.judge(made.eager(made.plan(None))()).passed


def test_profile_runs_ncu_and_nsys_on_itself(run, on_the_cpu, tmp_path: Path) -> None:
    (tmp_path / "sample.csv").write_text(SAMPLE)
    words = f'for word in "$@"; do echo "$word"; done > {tmp_path}'
    on_the_cpu("ncu", f"{words}/ncu.txt\n/bin/cp {tmp_path}/sample.csv {tmp_path}/out/ncu.csv")
    on_the_cpu("nsys", f"{words}/nsys.txt\n: > {tmp_path}/out/timeline.nsys-rep")
    found = measured(run, tmp_path)
    assert found["counters"]["dram_bytes"] == 3e8
    assert [each["kernel"] for each in found["counters"]["launches"]] == [
        "multiply(const *, int)",
        "add_parts",
    ]
    assert [Path(path).name for path in found["files"]] == ["trace.json", "ncu.csv", "timeline.nsys-rep"]
    assert found["notes"] == []
    said = (tmp_path / "ncu.txt").read_text().splitlines()
    assert said[said.index("--clock-control") + 1] == "none"
    assert said[said.index("--profile-from-start") + 1] == "off"
    assert set(ncu.METRICS) == set(said[said.index("--metrics") + 1].split(","))
    child = said[said.index("-m") + 1 :]
    assert child[:3] == ["sparsek", "profile", "spmm"]
    assert [child[child.index(f"--{name}") + 1] for name in ("m", "block", "dtype", "kernel", "child")] == [
        *("64", "16", "fp32", "cpu.spmm", "1")
    ]
    assert (tmp_path / "nsys.txt").read_text().splitlines()[-2:] == ["--child", "20"]


def test_profile_asks_again_without_a_metric_that_the_card_lacks(run, on_the_cpu, tmp_path: Path) -> None:
    (tmp_path / "sample.csv").write_text(SAMPLE)
    log = f"{tmp_path}/out/ncu.csv"
    refuse = f'echo "==ERROR== Failed to find metric {ncu.TENSOR[1]}" > {log}'
    on_the_cpu(
        "ncu", f'case "$*" in *{ncu.TENSOR[1]}*) {refuse};; *) /bin/cp {tmp_path}/sample.csv {log};; esac'
    )
    assert measured(run, tmp_path)["counters"]["tensor_pipe"] == pytest.approx(0.6)


def test_profile_says_why_ncu_gave_nothing(run, on_the_cpu, tmp_path: Path) -> None:
    on_the_cpu("ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1")
    found = measured(run, tmp_path)
    assert found["counters"] is None
    assert found["notes"][0] == "ncu gave no counters: ERR_NVGPUCTRPERM - no permission"


@pytest.mark.gpu
def test_profile_measures_on_a_gpu(run, tmp_path: Path) -> None:
    result = run(
        "profile", "hopper.spmm", "--m", "2048", "--k", "2048", "--n", "2048", "--out", tmp_path, "--json"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert 0 < found["measured"]["median"] < 10
    assert 0 < found["calls"]["kernels"] < found["calls"]["wall"] * 1.2
    assert found["calls"]["host"] > 0
    assert found["counters"] is not None or any("ncu" in line for line in found["notes"])
    assert (tmp_path / "trace.json").exists()
