"""What evidence is worth, and what changes that: a small tree is traced, changed, and its test files judged."""

import sys
from pathlib import Path

import pytest

from sparsek_bench.engine.definitions import Tree
from tests.evidence import executed, page, parts, record, status
from tests.evidence.executed import Ran
from tests.evidence.record import Evidence
from tests.house.tools import ROOT, run

FILES = {
    "sparsek/__init__.py": "",
    "sparsek/core.py": """
LEAST = 1
UNREAD = 1

def flag(x):
    '''Checks.'''
    return x > LEAST
""",
    "sparsek/banded.py": """
from sparsek.core import flag

def causal(n):
    return flag(n)

def dilated(n):
    return flag(n)
""",
    "sparsek/mask.py": """
from sparsek import banded

class Base:
    def size(self):
        return self.sides()

    def sides(self):
        return 1

class BlockMask(Base):
    causal = classmethod(banded.causal)
    dilated = classmethod(banded.dilated)

class Other(Base):
    pass
""",
    "sparsek/kernel.py": """
import triton

STEP = 2
PRICE = 3.0
PROGRAM = "kernel.cu"

@triton.jit
def inner(a):
    return a * STEP

@triton.jit
def entry(a):
    return inner(a)

def launch(a):
    return entry, PROGRAM

def seconds():
    return PRICE
""",
    "sparsek/kernel.cu": "int x = 1;\n",
    "sparsek/registry.py": """
TABLE = {}

def register(f):
    TABLE[f] = f

def find(f):
    return TABLE[f]
""",
    "sparsek/ops.py": """
from sparsek.registry import find, register

def verb(f):
    return find(f)

register(verb)
""",
    "sparsek/layer.py": """
from math import floor
from torch import nn

if floor(1):
    STEP = 1

class Layer(nn.Module):
    def forward(self, x):
        return getattr(self, "on_" + x)(floor(x) + STEP)
""",
    "sparsek/patch.py": "import sparsek\n\nsparsek.x = 1\n",
    "tests/conftest.py": "LIMIT = 1\n",
    "tests/ops/cases.py": """
CASES = [1]
OTHERS = [1]

def helper():
    return CASES
""",
    "tests/ops/unused.py": "X = 1\n",
    "tests/ops/data.json": "{}",
    "tests/bench/test_launch.py": "@GPU\ndef test_a(): launch(1)\n",
    "tests/ops/test_banded.py": """
from sparsek.mask import BlockMask
@GPU
def test_b(): BlockMask.causal(1).size()
""",
    "tests/ops/test_cpu.py": "def test_c(): pass\n",
    "tests/ops/test_verb.py": """
from tests.ops.cases import helper
@GPU
def test_d(): verb(helper())
""",
}
LAUNCH, BANDED, VERB = "tests/bench/test_launch.py", "tests/ops/test_banded.py", "tests/ops/test_verb.py"
# What a trace of these tests gives.
RAN = {
    LAUNCH: Ran({"sparsek.kernel:launch"}),
    BANDED: Ran(
        {
            "sparsek.layer:Layer.forward",
            "sparsek.banded:causal",
            "sparsek.core:flag",
            "sparsek.mask:Base.size",
            "sparsek.mask:Base.sides",
        }
    ),
    VERB: Ran(
        {"sparsek.ops:verb", "sparsek.registry:find", "tests.ops.cases:helper"}, files={"tests/ops/data.json"}
    ),
    "import:sparsek/ops.py": Ran({"sparsek.registry:register"}),
}
CUTS = [BANDED]
RED = ("stale", "red", "fail", "missing")  # what whoever waits for green looks for


def written(text: str) -> str:
    """A file of the tree. This file has no test for the GPU, and must not look as if."""
    return text.replace("@GPU", "@pytest.mark." + "gpu").replace("DEVICE", "device")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(written(text))
    return tmp_path


def evidence(root: Path, part: str, files: list[str] | None = None, ran: dict[str, Ran] = RAN) -> Evidence:
    """Evidence of a green run of today's tree."""
    whole = parts.PART.fullmatch(part)
    if files is None:
        files = parts.files_of(parts.numbers(part)[0], CUTS, parts.test_files(root))
    tree = Tree(root, executed.PACKAGES)
    closure = executed.Closure(tree, ran)
    codes = {path: closure.of(path) if path in ran else executed.only(path) for path in files}
    env = ("gpu", "driver", "python", "torch", "triton", "cuda", "numpy", "transformers", "workers")
    return {
        "part": part,
        "cuts": CUTS if whole else [],
        "finished": True,
        "date": "2026-11-23T10:20:30+00:00" if whole else "2026-11-24T10:20:30+00:00",
        "seconds": 312.4,
        "commit": "0123456789ab",
        "env": dict.fromkeys(env, "1") | {"gpu": "NVIDIA H200"},
        "counts": {"tests": 1234, "passed": 1230, "failed": 0, "skipped": 4, "unrun": 0},
        "ids": "0" * 16,
        "unfinished": [],
        "failed": [],
        "skipped": {"a tool is missing, required and shared | measured": 4},
        "files": {
            path: {"tests": 3 * (path in ran), "ran": 3 * (path in ran), "seconds": 7.5} for path in files
        },
        "slow": {f"{VERB}::test_d": 6.0},
        "executed": executed.pack(tree, codes, closure.of(executed.CHOICE)),
    }


def both(root: Path) -> list[Evidence]:
    return [evidence(root, part) for part in ("1/2", "2/2")]


def words(root: Path, found: list[Evidence]) -> list[str]:
    return [each.word for each in status.statuses(root, found, 3)]


def test_fresh_parts_print_no_word_of_another_status(tree: Path) -> None:
    found = status.statuses(tree, both(tree), 3)
    text = "\n".join([*(line for each in found for line in each.lines()), status.closing(found)])
    assert text.splitlines() == [
        "1/2     fresh    1,230 passed, 4 skipped          312 s   2026-11-23 10:20 UTC",
        "2/2     fresh    1,230 passed, 4 skipped          312 s   2026-11-23 10:20 UTC",
        "all 2 parts are fresh and green",
    ]
    assert not any(word in text.lower() for word in RED)


def test_without_evidence_every_part_is_missing(tree: Path) -> None:
    assert words(tree, []) == ["missing"] * 3
    only = [evidence(tree, "2/2")]
    assert words(tree, only) == ["missing", "fresh"]
    closing = status.closing(status.statuses(tree, only, 3))
    assert closing == "1 of 2 parts are not fresh and green: 1/2 missing"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"failed": [{"test": f"{VERB}::test_d", "when": "call"}]},
            f"red: {VERB}: failed: {VERB}::test_d (call)",
        ),
        (
            {"finished": False, "files": {VERB: {"tests": 3, "ran": 1}}},
            f"red: {VERB}: its run was cut before its last test",
        ),
        ({"counts": {"passed": 0, "failed": 0, "skipped": 9, "unrun": 7}}, "no test passed"),
        ({"skipped": {status.NO_GPU: 900}}, f"red: {VERB}: its run saw no GPU"),
    ],
    ids=["failed", "cut", "all skipped", "workers without a GPU"],
)
def test_a_red_part(tree: Path, changed: Evidence, line: str) -> None:
    found = both(tree)
    changed = changed | ({"files": found[1]["files"] | changed["files"]} if "files" in changed else {})
    found[1] |= changed
    assert words(tree, found) == ["fresh", "red"]
    assert line in status.statuses(tree, found, 3)[1].why


def replaced(name: str, old: str, new: str) -> tuple[str, str]:
    assert old in FILES[name]
    return name, FILES[name].replace(old, new)


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        (replaced("sparsek/banded.py", "def dilated(n):", "def dilated(m):"), []),
        (replaced("sparsek/banded.py", "def causal(n):", "def causal(n, m=1):"), [BANDED]),
        (replaced("sparsek/core.py", "'''Checks.'''", "'''Says.'''\n    # now"), []),
        (replaced("sparsek/core.py", "LEAST = 1", "LEAST = 2"), [BANDED]),
        (replaced("sparsek/core.py", "UNREAD = 1", "UNREAD = 2"), []),
        # An override that would be met; one of a class that nothing made; a member that nothing mentions.
        (
            replaced(
                "sparsek/mask.py",
                "class BlockMask(Base):\n",
                "class BlockMask(Base):\n    def sides(self): return 2\n",
            ),
            [BANDED],
        ),
        (replaced("sparsek/mask.py", "    pass\n", "    def sides(self): return 2\n"), []),
        (
            replaced(
                "sparsek/mask.py",
                "class BlockMask(Base):\n",
                "class BlockMask(Base):\n    def strided(self): return 2\n",
            ),
            [],
        ),
        (
            replaced(
                "sparsek/mask.py",
                "class BlockMask(Base):\n",
                "class BlockMask(Base):\n    def __getattr__(self, n): return 2\n",
            ),
            [BANDED],
        ),
        # What is launched, with what it reads; what is only predicted; CUDA C++.
        (replaced("sparsek/kernel.py", "STEP = 2", "STEP = 3"), [LAUNCH]),
        (replaced("sparsek/kernel.py", "inner(a)\n", "inner(a + 1)\n"), [LAUNCH]),
        (replaced("sparsek/kernel.py", "PRICE = 3.0", "PRICE = 4.0"), []),
        (replaced("sparsek/kernel.cu", "1", "2"), [LAUNCH]),
        (("sparsek/kernel.cu", "// one\nint x  = 1;\n"), []),
        # Registrations, the code that runs on import, and another function under an imported name.
        (replaced("sparsek/ops.py", "register(verb)\n", "register(verb)\nregister(find)\n"), [VERB]),
        (replaced("sparsek/registry.py", "TABLE[f] = f", "TABLE[f] = None"), [VERB]),
        (
            replaced("sparsek/banded.py", "from sparsek.core import flag", "from sparsek.other import flag"),
            [BANDED],
        ),
        # Other libraries: another function of one, what one calls itself, what is called by a made name.
        (replaced("sparsek/layer.py", "import floor", "import ceil as floor"), [BANDED]),
        (
            replaced(
                "sparsek/layer.py",
                "    def forward",
                "    def _apply(self, fn): return self\n    def forward",
            ),
            [BANDED],
        ),
        (replaced("sparsek/layer.py", "STEP = 1", "STEP = 2"), [BANDED]),
        (
            replaced("sparsek/mask.py", "class Base:\n", "class Base:\n    def on_two(self): return 2\n"),
            [BANDED],
        ),
        # Modules that begin to do more than define, or import one that does.
        (("sparsek/core.py", FILES["sparsek/core.py"] + "\nLEAST.bit_length()\n"), [BANDED]),
        (("sparsek/banded.py", "import sparsek.patch\n" + FILES["sparsek/banded.py"]), [BANDED]),
        # Helpers, fixtures, data, the files themselves.
        (replaced("tests/ops/cases.py", "CASES = [1]", "CASES = [2]"), [VERB]),
        (replaced("tests/ops/cases.py", "OTHERS = [1]", "OTHERS = [2]"), []),
        (("tests/ops/unused.py", "X = 2\n"), []),
        (("tests/ops/data.json", "[]"), [VERB]),
        (("tests/conftest.py", "LIMIT = 2\n"), [LAUNCH, BANDED, VERB]),
        (replaced(VERB, "test_d", "test_e"), [VERB]),
        (("tests/ops/test_cpu.py", "def test_d(): pass\n"), []),
        (("tests/ops/test_cpu.py", "def test_d(DEVICE): pass\n"), ["tests/ops/test_cpu.py"]),
        (("tests/formats/test_new.py", "def test_e(): pass\n"), []),
        (
            ("tests/formats/test_new.py", "@GPU\ndef test_e(): pass\n"),
            ["tests/formats/test_new.py"],
        ),
    ],
)
def test_a_change_makes_stale_what_ran_it(tree: Path, change: tuple[str, str], stale: list[str]) -> None:
    found = both(tree)
    (tree / "sparsek/other.py").write_text("def flag(x):\n    return x\n")
    name, text = change
    (tree / name).parent.mkdir(exist_ok=True)
    (tree / name).write_text(written(text))
    assert status.to_run(tree, found) == stale
    assert all(each.why for each in status.files(tree, found) if each.word != "fresh")


def test_everything_may_move(tree: Path) -> None:
    found = both(tree)
    (tree / "sparsek/engine").mkdir()
    for name in ("core", "registry"):
        text = (tree / f"sparsek/{name}.py").read_text()
        (tree / f"sparsek/{name}.py").unlink()
        (tree / f"sparsek/engine/{name}.py").write_text(text)
    for file in tree.rglob("*.py"):
        text = file.read_text()
        file.write_text(
            text.replace("sparsek.core", "sparsek.engine.core").replace(
                "sparsek.registry", "sparsek.engine.registry"
            )
        )
    assert status.to_run(tree, found) == []
    core = tree / "sparsek/engine/core.py"
    core.write_text(core.read_text().replace("LEAST = 1", "LEAST = 2"))
    assert status.to_run(tree, found) == [BANDED]


def test_a_function_that_is_gone_is_named(tree: Path) -> None:
    found = both(tree)
    (tree / "sparsek/banded.py").write_text("")
    why = next(each.why for each in status.files(tree, found) if each.path == BANDED)
    assert "sparsek.banded:causal is gone" in why


def test_a_process_that_was_not_traced_counts_for_everything(tree: Path) -> None:
    ran = RAN | {LAUNCH: Ran({"sparsek.kernel:launch"}, untraced=True)}
    found = [evidence(tree, "1/2", ran=ran), evidence(tree, "2/2", ran=ran)]
    assert status.to_run(tree, found) == []
    (tree / "sparsek/core.py").write_text(FILES["sparsek/core.py"].replace("LEAST = 1", "LEAST = 2"))
    assert status.to_run(tree, found) == [LAUNCH, BANDED]


def test_what_is_compiled_counts_as_far_as_its_names_reach(tree: Path) -> None:
    ran = RAN | {BANDED: Ran({"sparsek.mask:Base.size"}, compiled=True)}
    found = [evidence(tree, "1/2", ran=ran), evidence(tree, "2/2", ran=ran)]
    (tree / "sparsek/banded.py").write_text(
        FILES["sparsek/banded.py"].replace("def causal(n):", "def causal(m):")
    )
    assert status.to_run(tree, found) == [BANDED]


def choice(m: int) -> dict[str, object]:
    from sparsek.core.device import H200
    from tests.evidence import trace
    from tests.problems import spmm_problem

    return trace.decided(spmm_problem(m, 512, 512, (64, 64), 16, "bf16", H200), None)


def test_predictions_make_stale_the_plans_that_they_change() -> None:
    """Recomputed for the card of the run: here as if the run had chosen another kernel."""
    same, other = choice(512), choice(1024)
    assert same["outcome"]
    other["outcome"] = ["reference.spmm", "None"]
    chooses = "sparsek.engine.plan.ring:norm"
    ran = {
        "tests/ops/test_a.py": Ran(choices=[same]),
        "tests/ops/test_b.py": Ran(choices=[same, other]),
        executed.CHOICE: Ran({chooses}),
    }
    tree = Tree(ROOT, executed.PACKAGES)
    closure = executed.Closure(tree, ran)
    text = executed.pack(
        tree, {path: closure.of(path) for path in ran if path != executed.CHOICE}, closure.of(executed.CHOICE)
    )
    held = executed.Executed(text)
    assert held.changes(tree) == {"tests/ops/test_a.py": [], "tests/ops/test_b.py": []}
    held.hashes[chooses] = "another"
    found = held.changes(tree)
    assert found["tests/ops/test_a.py"] == []
    assert "SpmmProblem: reference.spmm None is " in found["tests/ops/test_b.py"][0]


def test_a_run_that_was_killed_makes_its_files_stale(tree: Path) -> None:
    killed = evidence(tree, "again-1", [VERB]) | {"finished": False, "executed": ""}
    found = status.statuses(tree, [*both(tree), killed], 3)
    assert f"stale: {VERB}: nothing shows what it executed" in found[1].why
    assert status.to_run(tree, [*both(tree), killed]) == [VERB]


def test_parts_of_another_cut_are_stale(tree: Path) -> None:
    found = both(tree)
    found[1]["cuts"] = [VERB]
    found[0]["date"] = "2026-11-24T00:00:00+00:00"
    assert words(tree, found) == ["fresh", "stale"]
    found.append(evidence(tree, "1/2") | {"part": "1/3", "date": "2026-11-20T00:00:00+00:00"})
    assert words(tree, found) == ["fresh", "stale", "stale"]


def test_stale_files_are_run_again_alone(tree: Path) -> None:
    found = both(tree)
    (tree / "sparsek/core.py").write_text(FILES["sparsek/core.py"].replace("LEAST = 1", "LEAST = 2"))
    (tree / "tests/ops/cases.py").write_text(
        FILES["tests/ops/cases.py"].replace("CASES = [1]", "CASES = [2]")
    )
    assert words(tree, found) == ["fresh", "stale"]
    assert record.next_again(found) == "again-1"
    one = evidence(tree, "again-1", [BANDED])
    assert words(tree, [*found, one]) == ["fresh", "stale", "fresh"]
    assert record.next_again([*found, one]) == "again-2"
    two = evidence(tree, "again-2", [VERB])
    assert words(tree, [*found, one, two]) == ["fresh", "fresh", "fresh", "fresh"]
    red = two | {"failed": [{"test": f"{VERB}::test_d", "when": "call"}]}
    assert words(tree, [*found, one, red])[:2] == ["fresh", "red"]
    (tree / VERB).unlink()
    assert status.to_run(tree, [*found, one, red]) == []
    assert words(tree, [*found, one, red])[:2] == ["fresh", "fresh"], "nothing could make them fresh"


def test_evidence_is_read_as_it_was_written(tree: Path) -> None:
    found = [*both(tree), evidence(tree, "again-1", [VERB]), evidence(tree, "again-2", [BANDED])]
    for each in reversed(found):
        record.write(tree / "evidence" / record.name_of(each["part"]), each)
    assert record.read(tree / "evidence") == found
    of_parts = record.parts_in(found)
    assert list(of_parts) == ["1/2", "2/2"]
    assert record.cuts_for(2, of_parts) == CUTS
    assert record.cuts_for(3, of_parts) is None
    assert record.number_of_parts(of_parts) == 2
    assert record.number_of_parts({}) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"part": "1/2"}', '{"part": "selected"}'])
def test_another_file_among_the_evidence_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "1-of-2.json").write_text(text)
    with pytest.raises(record.NotEvidence, match=r"1-of-2\.json"):
        record.read(tmp_path)


def test_the_page_shows_counts_skips_and_failures(tree: Path) -> None:
    found = both(tree)
    found[1]["failed"] = [{"test": f"{VERB}::test_d[x|y]", "when": "setup"}]
    lines = page.page(found).splitlines()
    assert (
        "| 1/2 | 2026-11-23 10:20 | 1,230 | 4 | 0 | 0 | 312 | 0123456789ab | NVIDIA H200, driver 1, python 1, torch 1, "
        "triton 1, cuda 1, numpy 1, transformers 1, 1 workers |"
    ) in lines
    assert "| 8 | a tool is missing, required and shared \\| measured |" in lines
    assert f"| `{VERB}::test_d[x\\|y]` | setup | 2/2 |" in lines
    assert f"| `{VERB}` | 3 | 8 | 2/2 |" in lines
    assert "No evidence yet" in page.page([])
    again = page.page([*found, evidence(tree, "again-1", [VERB])]).splitlines()
    assert any(line.startswith("| again-1 | 2026-11-24") for line in again)
    assert f"| `{VERB}` | 3 | 8 | again-1 |" in again
    assert f"| `{VERB}` | 3 | 8 | 2/2 |" not in again


def test_the_page_is_what_the_evidence_gives() -> None:
    wanted = page.page(record.read(ROOT / "benchmarks" / "evidence" / "hopper"))
    assert (ROOT / page.PAGE).read_text(encoding="utf-8") == wanted, "run `make readme`"


def test_no_evidence_holds_a_failure() -> None:
    """Of evidence in the tree. That sources have changed since fails nothing here: `make gpu-status` shows it."""
    found = record.read(ROOT / "benchmarks" / "evidence" / "hopper")
    assert {
        path: lines for path, each in record.newest(found).items() if (lines := status.failures(path, each))
    } == {}


def test_the_command_line_says_what_is_wrong() -> None:
    script = str(ROOT / "scripts" / "gpu.py")
    wrong = run(sys.executable, script, "run", "4/3").stderr
    assert "a part is n/m with 1 <= n <= m, as 2/3, got '4/3'" in wrong
    some = run(sys.executable, script, "run", "1/1", "--out", "nowhere", "--", "-k", "gradient")
    assert "a part runs whole" in some.stderr
    assert "one part at a time" in run(sys.executable, script, "run", "1/2", "2/2", "--out", "nowhere").stderr
    assert (
        "--stale names the test files itself" in run(sys.executable, script, "run", "1/2", "--stale").stderr
    )
    without = run(sys.executable, script, "run", "1/1", env={"PATH": ""})
    assert without.returncode == 2
    assert "no NVIDIA GPU here" in without.stderr
