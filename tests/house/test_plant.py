"""scripts/plant.py: where faults are planted, and what becomes of them in a small repository."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import faults, plant

SOURCE = b'''
def kept(rows, cols, scale):
    """A docstring with a < b."""
    if rows < cols and scale:
        raise ValueError(f"{rows < cols}")
    first = (rows +
             1)
    return first * scale


@triton.jit
def kernel(x, phase, mask):
    phase ^= 1
    return tl.load(x, mask=mask & x, other=0).T
'''
EXPECTED = {
    "kept:negated:1": "if (not (rows < cols and scale)):",
    "kept:conjunct:1": "if (rows < cols):",
    "kept:bound:1": "if rows <= cols and scale:",
    "kept:index:1": "if cols < cols and scale:",
    "kept:index:2": "if rows < rows and scale:",
    "kept:index:3": "first = (cols +",
    "kept:offset:1": "0)",
    "kept:scale:1": "return first",
    "kernel:phase:1": "(0)",
    "kernel:mask:1": "return tl.load(x, mask=((mask & x) | True), other=0).T",
    "kernel:conjunct:1": "return tl.load(x, mask=mask, other=0).T",
    "kernel:transposed:1": "return (tl.load(x, mask=mask & x, other=0))",
}


def test_the_operators_of_python() -> None:
    found = {each.id: each for each in faults.python_faults("sparsek/attn/a.py", SOURCE)}
    assert {name.partition(":")[2] for name in found} == set(EXPECTED)
    for name, fault in found.items():
        planted = fault.planted(SOURCE)
        lines = [
            new.strip()
            for new, old in zip(*(text.split(b"\n") for text in (planted, SOURCE)), strict=True)
            if new != old
        ]
        assert lines == [EXPECTED[name.partition(":")[2]].encode()]
        ast.parse(planted)
        assert fault.device == ("kernel" in name)


def test_edits_elsewhere_leave_names_as_they_are() -> None:
    before = faults.python_faults("a.py", SOURCE)
    after = faults.python_faults("a.py", b"def new(rows):\n    return rows < 1\n" + SOURCE)
    assert [each.id for each in before] == [each.id for each in after if ":new:" not in each.id]


def test_a_fault_is_found_where_its_function_stands_now() -> None:
    before = {each.id: each for each in faults.python_faults("a.py", SOURCE)}
    moved = {
        each.id: each
        for each in faults.python_faults("b/c.py", SOURCE.replace(b"first = (", b"a = 1 + 1\n    first = ("))
    }
    entries = [{"id": each.id, "code": each.code, "text": each.text} for each in before.values()]
    found = [faults.standing(each, moved) for each in entries]
    assert [each and (each.code, each.text) for each in found] == [
        (each["code"], each["text"]) for each in entries
    ]
    assert faults.standing(entries[0] | {"code": "if rows > cols:"}, before) is None
    split = SOURCE.replace(
        b"    phase ^= 1", b"    turn(phase)\n\n\n@triton.jit\ndef turn(phase):\n    phase ^= 1"
    )
    parted = {each.id: each for each in faults.python_faults("a.py", split.replace(b".T", b""))}
    phase, turned = entries[-4], entries[-1]
    assert phase["code"] == "phase ^= 1"
    assert faults.standing(phase, parted) is parted["a:turn:phase:1"]
    assert faults.standing(turned, parted) is None


def test_the_operators_of_cuda() -> None:
    source = b"""PTX int last(int n) {
  for (int i = 0; i < n + 1; i++) {}  // i < n
  asm volatile("a < b");
}
constexpr int A = 1 + 2;
"""
    found = {each.id: each.planted(source) for each in faults.cuda_faults("a.cu", source)}
    assert found == {
        "a.cu:last:bound:1": source.replace(b"i < n +", b"i <= n +"),
        "a.cu:last:offset:1": source.replace(b"n + 1", b"n + 0"),
    }


ROOMS = ("attn/policies host", "products/kernels host", "products/kernels device")


def test_a_seed_draws_the_same_list_of_every_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FOLDERS", ("sparsek/attn/policies", "sparsek/products/kernels/pack"))
    one, again, other = (faults.drawn(plant.ROOT, seed, 90) for seed in (1, 1, 2))
    assert one == again
    assert {each.share for each in one} == set(ROOMS)
    assert len({each.id for each in one}) == len(one)
    assert {each.id for each in one} != {each.id for each in other}


def test_faults_are_found_or_survive_and_a_lost_one_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = tmp_path / "sparsek/products/formats/sides.py"
    code.parent.mkdir(parents=True)
    code.write_text(
        "def inside(n, end):\n    return n < end\n\n\ndef following(n):\n    return n + 1\n\n\n"
        "def waiting(n):\n    while n > 0 and not __import__('time').sleep(0.01):\n        n -= 1\n    return n\n"
    )
    for folder in (code.parent, *list(code.parent.parents)[:2]):
        (folder / "__init__.py").touch()
    tests = tmp_path / "tests/products/test_sides.py"
    tests.parent.mkdir(parents=True)
    imported = "import os\nfrom sparsek.products.formats.sides import following, inside, waiting\n"
    good = "def test_inside():\n    assert inside(1, 2) and not inside(2, 2)\n"
    good += (
        "    assert os.environ['PYTEST_XDIST_WORKER'] == 'gw0'\n"  # of several cards conftest.py gives it one
    )
    rest = "def test_rest():\n    assert following(1) > 0\n    assert waiting(1) == 0\n"
    tests.write_text(imported + good + rest)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu"]\n')
    places = {
        "inside:bound:1": ("return n < end", "<="),
        "following:offset:1": ("return n + 1", "0"),
        "waiting:skipped:1": ("n -= 1", "(0)"),
        "gone:bound:1": ("return n < last", "<="),
    }
    names, planned, known = list(places), tmp_path / "list.jsonl", tmp_path / "map.json"
    for name, (line, text) in places.items():
        with planned.open("a") as file:
            entry = {"id": f"sparsek.products.formats.sides:{name}", "code": line, "text": text}
            file.write(json.dumps(entry) + "\n")
    lines = {"sparsek/products/formats/sides.py": {"2": [0], "6": [1], "10": [1], "11": [1]}}
    seconds = [
        ["tests/products/test_sides.py::test_inside", 0.01],
        ["tests/products/test_sides.py::test_rest", 0.01],
    ]
    known.write_text(json.dumps({"tests": seconds, "lines": lines, "failed": []}))

    def run(out: str) -> dict[str, str]:
        options = ["--root", str(tmp_path), "--map", str(known), "--out", str(tmp_path / out), "--hang", "10"]
        subprocess.run([sys.executable, plant.__file__, "run", str(planned), *options], check=True)
        return {
            name.split(":", 1)[1]: each["outcome"] for name, each in plant.results(tmp_path / out).items()
        }

    assert run("old.jsonl") == dict(zip(names, ["found", "survived", "timeout", "gone"], strict=True))
    assert code.read_text().startswith("def inside(n, end):\n    return n < end\n")
    tests.write_text(imported + "def test_inside():\n    assert inside(1, 2)\n" + rest)
    assert run("new.jsonl")["inside:bound:1"] == "survived"
    assert plant.compare(tmp_path / "old.jsonl", tmp_path / "new.jsonl") == 1
    assert (
        "survived: sparsek.products.formats.sides:inside:bound:1, found before by" in capsys.readouterr().out
    )


def test_a_gpu_runs_a_test_of_each_function_in_turn_and_the_known_one_first() -> None:
    kinds = [f"tests/a.py::test_{of}[{at}]" for of, count in (("many", 9), ("few", 2)) for at in range(count)]
    names = [*kinds, *(f"tests/a.py::test_alike[fp8-{at}]" for at in range(3))]
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    plant.Mixed(names[4], "sparsek/multiply_fp8.py").pytest_collection_modifyitems(items)
    found = [each.nodeid for each in items]
    assert sorted(found) == sorted(names)
    assert found[0] == names[4]
    assert set(found[1:4]) == set(names[11:])
    assert set(names[9:11]) < set(found[4:8])
    assert [name for name in found if "many" in name] != names[:9]


@pytest.mark.parametrize(("status", "code"), [(3, plant.BROKEN), (1, 1)])
def test_a_session_that_pytest_ends_before_a_test_finds_no_fault(status: int, code: int) -> None:
    """Slot.pytest stops the run then. What a fault breaks on import ends with another status."""
    read, write = os.pipe()
    ended = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"], start_new_session=True)
    os.close(write)
    assert plant.watched(ended.pid, read, 60, 60)["code"] == code
    ended.wait()
