"""What is noted of a run: in the process of a test, in those that it starts, and where a kernel is chosen."""

import os
import subprocess
import sys

import pytest

from sparsek_bench.engine.definitions import Tree
from tests.evidence import executed, trace
from tests.house.tools import ROOT

# Test files that multiply, start a process, one that is not traced, and one that is forked.
SCRIPT = """
import os, subprocess, sys, tempfile, torch
from pathlib import Path
from tests.evidence import trace
current = trace.begin(Path(sys.argv[1]))
current.to("tests/test_one.py")
import sparsek as sk
from sparsek.core import arguments
from sparsek_bench.engine.case import shape_name
A = sk.random_bsr(32, 32, 16, 0.5)
A @ torch.ones(32, 2)
current.to("tests/test_two.py")
B = sk.BlockMask.causal(256)
shape_name(1, 2, 3)
child = "import sparsek as sk, torch; sk.BSR.from_dense(torch.ones(32, 32), 16, keep=0.5)"
subprocess.run([sys.executable, "-c", child], check=True)
Path(sys.argv[2]).read_text()
current.to("tests/test_three.py")
sk.random_bsr(32, 32, 16, 0.5) @ torch.ones(32, 2)  # what was cached for the first file is chosen again
subprocess.run([sys.executable, "-c", ""], env={}, check=True)
if os.fork() == 0:
    arguments.flag('x', True)
    os._exit(0)
os.wait()
current.decide()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, executed.Ran]:
    folder = tmp_path_factory.mktemp("trace")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    data = ROOT / "sparsek/engine/plan/host.json"
    command = [sys.executable, "-c", SCRIPT, str(folder), str(data)]
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return executed.read(folder, Tree(ROOT, executed.PACKAGES))


def test_each_file_has_what_it_executed(ran: dict[str, executed.Ran]) -> None:
    one, two = (ran[f"tests/test_{name}.py"].definitions for name in ("one", "two"))
    assert "sparsek.products.ops.spmm:multiply" in one
    assert "sparsek.attn.mask.build.structured:causal" not in one
    assert "sparsek.attn.mask.build.structured:causal" in two
    assert "sparsek.attn.mask.build.structured:dilated" not in two


def test_what_measures_counts_too(ran: dict[str, executed.Ran]) -> None:
    assert "sparsek_bench.engine.case:shape_name" in ran["tests/test_two.py"].definitions
    assert "sparsek_bench.engine.case:shape_name" not in ran["tests/test_one.py"].definitions


def test_a_process_that_a_test_starts_counts_for_it(ran: dict[str, executed.Ran]) -> None:
    modules = {name.partition(":")[0] for name in ran["tests/test_two.py"].definitions}
    assert "sparsek.products.formats.convert" in modules
    assert not ran["tests/test_two.py"].untraced


def test_a_forked_process_counts_too(ran: dict[str, executed.Ran]) -> None:
    assert "sparsek.core.arguments:flag" in ran["tests/test_three.py"].definitions


def test_a_process_that_is_not_traced_is_noticed(ran: dict[str, executed.Ran]) -> None:
    assert ran["tests/test_three.py"].untraced


def test_data_files_are_noted(ran: dict[str, executed.Ran]) -> None:
    assert "sparsek/engine/plan/host.json" in ran["tests/test_two.py"].files


def test_what_runs_on_import_belongs_to_the_module(ran: dict[str, executed.Ran]) -> None:
    assert "sparsek.core.record:record" in ran["import:sparsek/products/formats/bsr.py"].definitions
    assert "sparsek.core.record:record" not in ran["tests/test_one.py"].definitions


def test_choices_are_kept_with_their_problems(ran: dict[str, executed.Ran]) -> None:
    for name in ("one", "three"):
        (choice,) = ran[f"tests/test_{name}.py"].choices
        assert choice["op"] == "spmm"
        assert trace.decided(trace.decoded(choice["problem"]), None) == choice
    assert "sparsek.engine.plan.select:select" in ran[executed.CHOICE].definitions
    assert "sparsek.engine.plan.select:select" not in ran["tests/test_one.py"].definitions
