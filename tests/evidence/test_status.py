"""What evidence is worth, and what changes that."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.evidence import hashes, page, parts, record, status
from tests.evidence.record import Evidence
from tests.house.tools import ROOT, run

FILES = {
    "sparsek/__init__.py": "",
    "sparsek/core/__init__.py": "X = 1\n",
    "sparsek/kernels/__init__.py": "",
    "sparsek/kernels/hopper/spmm.py": "def host():\n    return 1\n",
    "sparsek/kernels/hopper/semi24.cu": "int x = 1;\n",
    "sparsek/plan/__init__.py": "",
    "sparsek/plan/tuned.json": "{}",
    "sparsek/bench/__init__.py": "X = 1\n",
    "sparsek/bench/spmm.py": "X = 1\n",
    "sparsek/bench/unused.py": "X = 1\n",
    "sparsek/cli/__init__.py": "X = 1\n",
    "sparsek/cli/bench.py": "from sparsek.bench.spmm import X\n",
    "tests/conftest.py": "",
    "tests/bench/test_peers.py": "from sparsek.cli import bench\n@pytest.mark.gpu\ndef test_a(): pass\n",
    "tests/ops/cases.py": "CASES = [1]\n",
    "tests/ops/sanitize.py": "print(1)\n",
    "tests/ops/unused.py": "X = 1\n",
    "tests/ops/test_cpu.py": "def test_c(): pass\n",
    "tests/ops/test_spmm.py": "from tests.ops.cases import CASES\n@pytest.mark.gpu\ndef test_b(): run('sanitize.py')\n",
}
CUTS = ["tests/ops/test_cpu.py"]
RED = ("stale", "red", "fail", "missing")  # what whoever waits for green looks for


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def evidence(tree: Path, part: str, cuts: list[str] = CUTS, marked: int = 3) -> Evidence:
    """Evidence of a green run of today's tree."""
    files = parts.files_of(parts.numbers(part)[0], cuts, parts.test_files(tree))
    held = {
        path: {
            "tests": marked * hashes.may_hold_gpu_tests(path, tree),
            "ran": marked,
            "seconds": 7.5,
            "hash": hashes.test_hash(path, tree),
        }
        for path in files
    }
    env = ("gpu", "driver", "python", "torch", "triton", "cuda", "numpy", "transformers", "workers")
    return {
        "part": part,
        "cuts": cuts,
        "finished": True,
        "date": "2026-11-23T10:20:30+00:00",
        "seconds": 312.4,
        "commit": "0123456789ab",
        "env": dict.fromkeys(env, "1") | {"gpu": "NVIDIA H200"},
        "counts": {"tests": 1234, "passed": 1230, "failed": 0, "skipped": 4, "unrun": 0},
        "ids": "0" * 16,
        "unfinished": [],
        "failed": [],
        "skipped": {"a tool is missing, required and shared | measured": 4},
        "files": held,
        "slow": {"tests/ops/test_spmm.py::test_b": 6.0},
        "sources": hashes.source_hashes(tree),
    }


def both(tree: Path) -> dict[str, Evidence]:
    return {part: evidence(tree, part) for part in ("1/2", "2/2")}


def words(tree: Path, found: dict[str, Evidence]) -> list[str]:
    return [each.word for each in status.statuses(tree, found, 3)]


def test_fresh_parts_print_no_word_of_another_status(tree: Path) -> None:
    found = status.statuses(tree, both(tree), 3)
    text = "\n".join([*(line for each in found for line in each.lines()), status.closing(found)])
    assert text.splitlines() == [
        "1/2   fresh    1,230 passed, 4 skipped          312 s   2026-11-23 10:20 UTC",
        "2/2   fresh    1,230 passed, 4 skipped          312 s   2026-11-23 10:20 UTC",
        "all 2 parts are fresh and green",
    ]
    assert not any(word in text.lower() for word in RED)


def test_without_evidence_every_part_is_missing(tree: Path) -> None:
    assert words(tree, {}) == ["missing"] * 3
    only = {"2/2": evidence(tree, "2/2")}
    assert words(tree, only) == ["missing", "fresh"]
    assert (
        status.closing(status.statuses(tree, only, 3)) == "1 of 2 parts are not fresh and green: 1/2 missing"
    )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"failed": [{"test": "tests/a.py::b", "when": "call"}]}, "failed: tests/a.py::b (call)"),
        (
            {"finished": False, "unfinished": ["tests/a.py::c"]},
            "cut with 7 tests to go; running then: tests/a.py::c",
        ),
        ({"counts": {"passed": 0, "failed": 0, "skipped": 9, "unrun": 7}}, "no test passed"),
        ({"skipped": {status.NO_GPU: 900}}, "900 tests saw no GPU"),
    ],
    ids=["failed", "cut", "all skipped", "workers without a GPU"],
)
def test_a_red_part(tree: Path, changed: Evidence, line: str) -> None:
    found = both(tree)
    found["2/2"]["counts"]["unrun"] = 7
    found["2/2"] |= changed
    assert words(tree, found) == ["fresh", "red"]
    assert line in status.statuses(tree, found, 3)[1].why


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sparsek/kernels/hopper/spmm.py", "def host():\n    return 2\n", ["stale", "stale"]),
        ("sparsek/kernels/hopper/semi24.cu", "int x = 2;\n", ["stale", "stale"]),
        ("sparsek/kernels/hopper/new.py", "", ["stale", "stale"]),
        ("sparsek/plan/tuned.json", "{ }", ["stale", "stale"]),
        (
            "sparsek/kernels/hopper/spmm.py",
            '"""Text."""\n\ndef host():\n    return (1)  # one\n',
            ["stale", "stale"],
        ),
        (
            "sparsek/kernels/hopper/spmm.py",
            '"""Text."""\n\n\ndef host():  # now\n    return 1\n',
            ["fresh", "fresh"],
        ),
        ("sparsek/cli/__init__.py", "X = 2\n", ["fresh", "fresh"]),
        ("sparsek/bench/spmm.py", "X = 2\n", ["stale", "fresh"]),
        ("sparsek/bench/unused.py", "X = 2\n", ["fresh", "fresh"]),
        ("tests/conftest.py", "X = 2\n", ["stale", "stale"]),
        ("tests/ops/test_spmm.py", FILES["tests/ops/test_spmm.py"] + "X = 1\n", ["fresh", "stale"]),
        ("tests/ops/cases.py", "CASES = [2]\n", ["fresh", "stale"]),
        ("tests/ops/sanitize.py", "print(2)\n", ["fresh", "stale"]),
        ("tests/ops/unused.py", "X = 2\n", ["fresh", "fresh"]),
        ("tests/ops/test_cpu.py", "def test_d(): pass\n", ["fresh", "fresh"]),
        ("tests/ops/test_cpu.py", "def test_d(device): pass\n", ["fresh", "stale"]),
        ("tests/formats/test_new.py", "def test_e(): pass\n", ["fresh", "fresh"]),
        ("tests/formats/test_new.py", "@pytest.mark.gpu\ndef test_e(): pass\n", ["stale", "fresh"]),
    ],
)
def test_what_a_change_makes_of_the_parts(tree: Path, name: str, text: str, expected: list[str]) -> None:
    """tests/bench and what is new in tests/formats are of the first part, tests/ops is the second."""
    found = both(tree)
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(text)
    assert words(tree, found) == expected


def test_a_test_file_that_is_gone_makes_its_part_stale(tree: Path) -> None:
    found = both(tree)
    (tree / "tests/bench/test_peers.py").unlink()
    assert words(tree, found) == ["stale", "fresh"]


def test_parts_of_another_cut_are_stale(tree: Path) -> None:
    found = both(tree)
    found["2/2"]["cuts"] = ["tests/ops/test_spmm.py"]
    found["1/2"]["date"] = "2026-11-24T00:00:00+00:00"
    assert words(tree, found) == ["fresh", "stale"]
    found["1/3"] = evidence(tree, "1/3") | {"date": "2026-11-20T00:00:00+00:00"}
    assert words(tree, found) == ["fresh", "stale", "stale"]


def again(tree: Path, files: list[str]) -> Evidence:
    """Evidence of a green run of these files of today's tree."""
    of_all = {path: facts for part in both(tree).values() for path, facts in part["files"].items()}
    held = {path: of_all[path] for path in files}
    return evidence(tree, "2/2") | {"part": record.CHANGED, "cuts": [], "files": held}


def test_changed_files_can_be_run_again_alone(tree: Path) -> None:
    found = both(tree)
    (tree / "tests/ops/cases.py").write_text("CASES = [2]\n")
    (tree / "sparsek/bench/spmm.py").write_text("X = 2\n")
    changed = ["tests/bench/test_peers.py", "tests/ops/test_spmm.py"]
    assert sorted(status.changed_files(tree, found)) == changed

    def words_with(run: Evidence) -> list[str]:
        return [each.word for each in status.statuses(tree, found, 3, run)]

    assert words_with(again(tree, changed)) == ["fresh", "fresh"]
    assert words_with(again(tree, changed[:1])) == ["fresh", "stale"]
    red = again(tree, changed) | {"failed": [{"test": "tests/ops/test_spmm.py::test_b", "when": "call"}]}
    assert words_with(red) == ["stale", "stale"]
    cut = again(tree, changed) | {"finished": False}
    assert words_with(cut) == ["stale", "stale"]
    before = again(tree, changed)
    (tree / "tests/ops/cases.py").write_text("CASES = [3]\n")
    assert words_with(before) == ["fresh", "stale"]


def test_a_run_of_changed_files_stands_for_no_change_of_the_sources(tree: Path) -> None:
    found = both(tree)
    before = again(tree, ["tests/bench/test_peers.py", "tests/ops/test_spmm.py"])
    (tree / "sparsek/core/__init__.py").write_text("X = 2\n")
    with pytest.raises(ValueError, match="part 1/2 must be run: sparsek/core has changed"):
        status.changed_files(tree, found)
    assert [each.word for each in status.statuses(tree, found, 3, before)] == ["stale", "stale"]


def test_a_new_test_file_is_among_the_changed_ones(tree: Path) -> None:
    found = both(tree)
    (tree / "tests/ops/test_z.py").write_text("@pytest.mark.gpu\ndef test_e(): pass\n")
    assert status.changed_files(tree, found) == ["tests/ops/test_z.py"]
    (tree / "tests/ops/test_spmm.py").unlink()
    assert status.changed_files(tree, found) == ["tests/ops/test_z.py"]
    assert words(tree, found) == ["fresh", "stale"]


def test_the_hash_of_the_tree_follows_kernels_and_not_the_command_line(tmp_path: Path) -> None:
    """The same in this tree, whose kernels have device code and CUDA C++."""
    shutil.copytree(ROOT / "sparsek", tmp_path / "sparsek", ignore=shutil.ignore_patterns("__pycache__"))
    before = hashes.source_hashes(tmp_path)
    assert {
        "core",
        "matrix",
        "mask",
        "reference",
        "plan",
        "kernels",
        "ops",
        "nn",
        "testing",
        "integrations",
    } <= set(before)
    assert not {"cli", "bench"} & set(before)
    with (tmp_path / "sparsek/cli/doctor.py").open("a") as file:
        file.write("X = 1\n")
    (tmp_path / "sparsek/kernels/shipped.zip").write_bytes(b"compiled of the same sources")
    assert hashes.source_hashes(tmp_path) == before
    with (tmp_path / "sparsek/kernels/spmm/hopper.py").open("a") as file:
        file.write("def host_code():\n    return 1\n")
    after = hashes.source_hashes(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"kernels"}


def test_evidence_is_read_as_it_was_written(tree: Path) -> None:
    found = both(tree)
    for part, each in found.items():
        record.write(tree / "evidence" / record.name_of(part), each)
    assert record.read(tree / "evidence") == found
    assert record.cuts_for(2, found) == CUTS
    assert record.cuts_for(3, found) is None
    assert record.number_of_parts(found) == 2
    assert record.number_of_parts({}) is None
    assert record.read_changed(tree / "evidence") is None
    some = again(tree, ["tests/ops/test_spmm.py"])
    record.write(tree / "evidence" / record.name_of(record.CHANGED), some)
    assert record.read_changed(tree / "evidence") == some
    assert record.read(tree / "evidence") == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"part": "1/2"}', '{"part": "selected"}'])
def test_another_file_among_the_evidence_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "1-of-2.json").write_text(text)
    with pytest.raises(record.NotEvidence, match=r"1-of-2\.json"):
        record.read(tmp_path)


def test_the_page_shows_counts_skips_and_failures(tree: Path) -> None:
    found = both(tree)
    found["2/2"]["failed"] = [{"test": "tests/ops/test_spmm.py::test_b[x|y]", "when": "setup"}]
    lines = page.page(found).splitlines()
    assert (
        "| 1/2 | 2026-11-23 10:20 | 1,230 | 4 | 0 | 0 | 312 | 0123456789ab | NVIDIA H200, driver 1, python 1, torch 1, "
        "triton 1, cuda 1, numpy 1, transformers 1, 1 workers |"
    ) in lines
    assert "| 8 | a tool is missing, required and shared \\| measured |" in lines
    assert "| `tests/ops/test_spmm.py::test_b[x\\|y]` | setup | 2/2 |" in lines
    assert "| `tests/ops/test_spmm.py` | 3 | 8 | 2/2 |" in lines
    assert "No evidence yet" in page.page({})
    with_changed = page.page(found, again(tree, ["tests/ops/test_spmm.py"])).splitlines()
    assert any(line.startswith("| changed | 2026-11-23") for line in with_changed)
    assert "| `tests/ops/test_spmm.py` | 3 | 8 | changed |" in with_changed


def test_the_page_is_what_the_evidence_gives() -> None:
    folder = ROOT / "benchmarks" / "evidence" / "hopper"
    wanted = page.page(record.read(folder), record.read_changed(folder))
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == wanted, "run `make readme`"


def test_no_evidence_holds_a_failure() -> None:
    """Of evidence in the tree. That sources have changed since fails nothing here: `make gpu-status` shows it."""
    folder = ROOT / "benchmarks" / "evidence" / "hopper"
    found, changed = record.read(folder), record.read_changed(folder)
    found |= {record.CHANGED: changed} if changed else {}
    assert {part: lines for part, each in found.items() if (lines := status.failures(each))} == {}


def test_the_command_line_says_what_is_wrong() -> None:
    script = str(ROOT / "scripts" / "gpu.py")
    assert (
        "a part is n/m with 1 <= n <= m, as 2/3, got '4/3'"
        in run(sys.executable, script, "run", "4/3").stderr
    )
    some = run(sys.executable, script, "run", "1/1", "--out", "nowhere", "--", "-k", "gradient")
    assert "a part runs whole" in some.stderr
    assert "one part at a time" in run(sys.executable, script, "run", "1/2", "2/2", "--out", "nowhere").stderr
    assert (
        "--changed names the test files itself"
        in run(sys.executable, script, "run", "1/2", "--changed").stderr
    )
    without = run(sys.executable, script, "run", "1/1", env={"PATH": ""})
    assert without.returncode == 2
    assert "no NVIDIA GPU here" in without.stderr
