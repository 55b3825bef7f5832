"""Runs of tiny projects, without a GPU: what the plugin writes about them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.evidence import plugin, record
from tests.house.tools import ROOT

GREEN = """
import pytest, time
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(3))
def test_quick(n): pass
@pytest.mark.gpu
def test_slow(): time.sleep(0.3)
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(2))
def test_tool(n): pytest.skip("no sanitizer here")
@pytest.mark.gpu
@pytest.mark.xfail(reason="a known limit")
def test_limit(): assert False
def test_on_the_cpu(): pass
"""
RED = """
import os, pytest
@pytest.fixture
def broken():
    yield
    raise RuntimeError("after the test")
@pytest.mark.gpu
def test_fails(): assert 1 + 1 == 3, "x" * 9000
@pytest.mark.gpu
def test_fails_late(broken): pass
@pytest.mark.gpu
def test_kills_its_worker(): os._exit(1)
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(4))
def test_others(n): pass
"""
HANGS = """
import pytest, time
@pytest.mark.gpu
def test_first(): pass
@pytest.mark.gpu
def test_hangs(): time.sleep(300)
@pytest.mark.gpu
def test_never_reached(): pass
"""
ORDER = """
import pathlib, pytest
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a", "b", "long", "c"])
def test_one(name):
    with open(pathlib.Path(__file__).with_name("ran"), "a") as file: print(name, file=file)
"""
# Few seconds to wait, and stand-ins for what takes seconds: importing torch, and hashes of the sources.
CONFTEST = """
from tests.evidence import plugin
plugin.SLOW, plugin.EVERY = 0.3, 0.2
plugin.software = lambda workers: {"gpu": "cpu", "workers": workers}
plugin.executed_by = lambda folder, files, ran: " ".join(sorted(ran))
"""


def project(folder: Path, **files: str) -> Path:
    (folder / "tests").mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers = gpu: needs a GPU\naddopts = --import-mode=importlib\n"
    )
    for name, text in files.items():
        (folder / "tests" / f"test_{name}.py").write_text(text)
    return folder


def start(folder: Path, *arguments: str, workers: int = 1) -> "subprocess.Popen[bytes]":
    plugins = ["-p", "xdist", "-p", "tests.evidence.plugin", "-n", str(workers)]
    part = [
        "--evidence",
        "out",
        "--part",
        "1/2",
        "--cuts",
        "tests/test_z.py",
        "--continue-on-collection-errors",
    ]
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "pytest", *plugins, *part, "-m", "gpu", *arguments, "tests"]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "cpu" / "1-of-2.json").read_text())


def test_a_green_run_that_starts_its_longest_tests_first(tmp_path: Path) -> None:
    folder = project(
        tmp_path,
        green=GREEN,
        order=ORDER,
        whole="import pytest\npytest.skip('no library', allow_module_level=True)\n",
    )
    known = {"tests/test_order.py::test_one[long]": 50.0, "tests/test_order.py::test_one[c]": 30.0}
    evidence = dict.fromkeys(record.FIELDS) | {
        "part": "1/1",
        "date": "2026-11-22",
        "files": {"tests/test_order.py": {"tests": 4, "ran": 4, "seconds": 82.0}},
        "slow": known,
    }
    record.write(folder / "known" / "1-of-1.json", evidence)
    output = start(folder, "--known", "known").communicate()[0].decode()
    found = written(folder)
    assert found["finished"], output
    assert (folder / "tests" / "ran").read_text().split() == ["long", "c", "a", "b"]
    assert found["counts"] == {"tests": 11, "passed": 8, "failed": 0, "skipped": 4, "unrun": 0}
    assert found["skipped"] == {"no sanitizer here": 2, "xfail: a known limit": 1, "file: no library": 1}
    assert found["failed"] == found["unfinished"] == []
    assert found["part"] == "1/2"
    assert found["cuts"] == ["tests/test_z.py"]
    file = found["files"]["tests/test_green.py"]
    assert (file["tests"], file["ran"]) == (7, 7)
    assert 0.3 <= file["seconds"] <= found["seconds"]
    assert list(found["slow"]) == ["tests/test_green.py::test_slow"]
    assert found["env"] == {"gpu": "cpu", "workers": 1}
    assert found["executed"].split() == ["tests/test_green.py", "tests/test_order.py"]
    assert set(record.FIELDS) == set(found)
    assert [path.name for path in (folder / "out" / "cpu").iterdir()] == ["1-of-2.json"]


def test_the_software_of_a_run_is_named() -> None:
    found = plugin.software(3)
    assert found["torch"] == torch.__version__
    assert {found["gpu"], found["workers"]} == {"cpu", 3} or torch.cuda.is_available()
    assert found["python"]


def test_a_red_run(tmp_path: Path) -> None:
    """A test that kills its worker fails once; a file that cannot be collected fails beside the others' results."""
    folder = project(tmp_path, red=RED, broken="import no_such_module\n")
    output = start(folder).communicate()[0].decode()
    found = written(folder)
    assert found["finished"], output
    assert found["counts"] == {"tests": 7, "passed": 4, "failed": 4, "skipped": 0, "unrun": 0}, output
    failed = {each["test"]: each for each in found["failed"]}
    assert sorted(failed) == [
        "tests/test_broken.py",
        "tests/test_red.py::test_fails",
        "tests/test_red.py::test_fails_late",
        "tests/test_red.py::test_kills_its_worker",
    ]
    assert failed["tests/test_broken.py"]["when"] == "collect"
    assert "no_such_module" in failed["tests/test_broken.py"]["text"]
    assert failed["tests/test_red.py::test_fails_late"]["when"] == "teardown"
    assert "after the test" in failed["tests/test_red.py::test_fails_late"]["text"]
    assert len(failed["tests/test_red.py::test_fails"]["text"]) == 4000


LOSES = """
import os, pytest
@pytest.mark.gpu
@pytest.mark.parametrize("n", range(6))
def test_in_order(n):
    assert "LOST" not in os.environ
    if n == 2: os.environ["LOST"] = "1"
"""


def test_a_worker_that_lost_its_context_ends_with_its_test(tmp_path: Path) -> None:
    folder = project(tmp_path, loses=LOSES)
    with (folder / "conftest.py").open("a") as file:
        file.write("import os\nplugin.lost = lambda: 'LOST' in os.environ\n")
    output = start(folder).communicate()[0].decode()
    found = written(folder)
    assert found["counts"] == {"tests": 6, "passed": 5, "failed": 1, "skipped": 0, "unrun": 0}, output
    assert {each["test"] for each in found["failed"]} == {"tests/test_loses.py::test_in_order[2]"}


def test_a_context_is_lost_where_calls_keep_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [RuntimeError("of a launch before")]

    def synchronize() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert not plugin.lost()  # no context
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not plugin.lost()
    failures += [RuntimeError("an illegal memory access was encountered")] * 2
    assert plugin.lost()


def test_files_that_time_cuts_are_left_out_and_others_are_evidence(tmp_path: Path) -> None:
    cut = "import pathlib, pytest\npytestmark = pytest.mark.gpu\n"
    cut += "def test_first(): pathlib.Path('late').touch()\ndef test_second(): raise AssertionError\n"
    never = "import pytest\n@pytest.mark.gpu\ndef test_third(): raise AssertionError\n"
    folder = project(tmp_path, early=ORDER, late=cut, later=never)
    with (folder / "conftest.py").open("a") as conftest:  # a clock that a test moves on
        conftest.write("import os, time, types\nclock = lambda: 1e6 * os.path.exists('late')\n")
        conftest.write("plugin.time = types.SimpleNamespace(time=clock, monotonic=time.monotonic)\n")
    output = start(folder, "--seconds", "5").communicate()[0].decode()
    found = written(folder)
    assert found["finished"], output
    assert list(found["files"]) == ["tests/test_early.py"]
    assert found["counts"] == {"tests": 4, "passed": 4, "failed": 0, "skipped": 0, "unrun": 0}
    assert found["executed"].split() == ["tests/test_early.py"]
    assert found["unfinished"] == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_cut_says_so_and_keeps_the_files_that_ran_whole(
    tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path, early=ORDER, hangs=HANGS)
    process = start(folder)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            path = folder / "out" / "cpu" / "1-of-2.json"
            if path.exists() and written(folder)["unfinished"] == ["tests/test_hangs.py::test_hangs"]:
                break
            time.sleep(0.1)
        found = written(folder)
        assert found["unfinished"] == ["tests/test_hangs.py::test_hangs"]
    finally:
        os.killpg(process.pid, how)
        process.communicate()
    found = written(folder)
    assert not found["finished"]
    assert found["unfinished"] == ["tests/test_hangs.py::test_hangs"]
    assert found["counts"] == {"tests": 7, "passed": 5, "failed": 0, "skipped": 0, "unrun": 2}
    path = folder / "out" / "cpu" / "1-of-2.json"
    assert [*plugin.trace_of(path).iterdir()]

    def executed_by(trace: Path, files: list[str], ran: set[str]) -> str:
        assert trace.is_dir()
        return " ".join(sorted(ran))

    monkeypatch.setattr(plugin, "executed_by", executed_by)
    plugin.recover(path)
    kept = written(folder)
    assert [*kept["files"]] == kept["executed"].split() == ["tests/test_early.py"]
    assert kept["finished"]
    assert kept["unfinished"] == []
    assert kept["counts"] == {"tests": 4, "passed": 4, "failed": 0, "skipped": 0, "unrun": 0}
    assert [each.name for each in path.parent.iterdir()] == ["1-of-2.json"]
