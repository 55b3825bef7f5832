"""Plants faults in kernels, schedules, masks and ops, one at a time, and records which of them the tests find.

  plant.py draw --out list.jsonl          a list of faults, drawn by --seed: the same for every state of the code
  plant.py record --out map.json          the lines that each CPU test runs; needs the package `coverage`
  plant.py run list.jsonl --map map.json --out found.jsonl          with the tests that need no GPU
  plant.py run list.jsonl --gpu --workers 16 --seconds 480 --out found.jsonl          with the others, on a GPU
  plant.py compare before.jsonl after.jsonl     faults that were found and are no more; exit status 1 if there are any
  plant.py show ID                        one fault as a diff

scripts/faults.py has the operators. A run works in copies of the repository, with the tests that execute the faulty
lines; on a GPU with the test files that executed the function, by benchmarks/evidence/. Of several GPUs each worker has
one. It appends a line of JSON for each fault, so that it can be cut and continued, and tries what was unfinished again
with a larger --each. Outcomes:

  found      a test failed that passes without the fault
  timeout    a test did not end: found as well
  survived   every test passed
  unfinished the tests passed that fit into the seconds of one fault
  not run    no test here executes it
  gone       this state of the code has no such line in the function, nor in one that was cut out of it
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import importlib
import json
import os
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.faults import COUNT, SEED, Fault, drawn, faults, standing  # noqa: E402

TESTS = ("tests/products", "tests/attn", "tests/ops", "tests/plan", "tests/reference", "tests/nn")
EVIDENCE = "benchmarks/evidence/hopper"
# Left out of the record: machine code of many configs, minutes of compiling that show nothing of results.
COMPILING = ("spill", "compile_to", "it_compiles", "compile_as_well", "scores_compile", "choice_compiles")
FOUND = ("found", "timeout")
BROKEN = 120  # the exit status of a process that could not run pytest
INTERPRETED = "_interpreted.py"
ASIDE = ("build", "dist")  # not copied, as hidden folders and shipped machine code


def leave() -> None:
    """This process imports the repository of its working folder, and nothing of the one that holds this script."""
    own = {str(ROOT), str(ROOT / "scripts")}
    sys.path[:] = [str(Path.cwd()), *(path for path in sys.path if path not in own)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]


class Tests:
    """Which tests execute the lines of a fault: test files with the tests in them, the quickest first."""

    def __init__(self, root: Path, map_file: Path | None) -> None:
        self.lines: dict[str, dict[str, list[int]]] = {}
        self.tests: list[tuple[str, float]] = []
        self.failed, self.absent = set[str](), set[int]()
        self.files: dict[str, tuple[float, set[str]]] = {}
        if map_file:
            held = json.loads(map_file.read_text(encoding="utf-8"))
            self.lines, self.tests, self.failed = held["lines"], held["tests"], set(held["failed"])
            texts = {name.partition("::")[0]: "" for name, _ in self.tests}
            for file in texts:
                texts[file] = (root / file).read_text(encoding="utf-8") if (root / file).exists() else ""
            for at, (name, _) in enumerate(self.tests):
                file, _, test = name.partition("::")
                group, _, test = test.rpartition("::")  # tests of a class may be inherited
                if (f"class {group}" if group else f"def {test}(") not in texts[file]:
                    self.absent.add(at)  # the record is older
            return
        for path in sorted((root / EVIDENCE).glob("*.json")):
            evidence = json.loads(path.read_text(encoding="utf-8"))
            executed = json.loads(zlib.decompress(base64.b85decode(evidence["executed"])))
            keys = list(executed["keys"])
            for file, (bits, *_) in executed["files"].items():
                number = int(bits, 16)
                ran = {key for at, key in enumerate(keys) if number >> at & 1}
                if evidence["files"].get(file, {}).get("ran") and (root / file).exists():
                    self.files[file] = (evidence["files"][file]["seconds"], ran)

    def passed(self, test: str) -> bool:
        """Whether a test is known to pass without a fault."""
        return bool(self.tests) and "::" in test and test not in self.failed

    def of(self, fault: Fault, first: str = "") -> list[tuple[str, list[str]]]:
        """Files and their tests. `first`: the test that is known to find it."""
        chosen: defaultdict[str, list[str]] = defaultdict(list)
        cost: defaultdict[str, float] = defaultdict(float)
        firsts: set[str] = set()
        if self.files:
            function = fault.id.rsplit(":", 2)[0]
            key = f"file:{fault.path}" if fault.path.endswith(".cu") else function
            module = function.partition(":")[0]
            every = {name for _, ran in self.files.values() for name in ran}
            names = {key} if key in every else {name for name in every if name.startswith(f"{module}:")}
            for file, (seconds, ran) in self.files.items():
                if names & ran:
                    chosen[file], cost[file] = [file], seconds
                    if first.partition("::")[0] == file:
                        chosen[file], firsts = [first, file], {file}
        else:
            rows = self.lines.get(fault.path, {})
            found = {test for line in range(fault.line, fault.last + 1) for test in rows.get(str(line), ())}
            known = first.partition("[")[0].partition("::")[2]  # it may stand in another file now
            at_first = {test for test in found if known and self.tests[test][0].endswith(f"::{known}")}
            for test in sorted(
                found - self.absent, key=lambda each: (each not in at_first, self.tests[each][1])
            ):
                name, seconds = self.tests[test]
                file = name.partition("::")[0]
                chosen[file].append(name)
                cost[file] += seconds + 0.05
                firsts |= {file} if test in at_first else set()
        near = words(fault.path) | {"common"}  # where suites of all kernels are

        def order(file: str) -> tuple[bool, int, float]:
            alike = len(near & words(file))
            return file not in firsts, -alike if self.files else 0, cost[file] / (1 + alike)

        return [(file, chosen[file]) for file in sorted(chosen, key=order)]


def words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+\d*|\d+", name))


class Mixed:
    """A plugin of pytest: a test of each function in turn, drawn from its parameters; earlier those that share words
    with the faulty file, later those that take long. What stands together in a test file runs the same kernels.
    """

    def __init__(self, first: str, path: str) -> None:
        self.first, self.near = first, words(path)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from tests.evidence import parts, record

        names = sorted((item.nodeid for item in items), key=lambda name: zlib.crc32(name.encode()))
        turns = parts.known(record.timings(Path(EVIDENCE))).of_each(names)
        taken = Counter[str]()
        for name in names:
            alike = len(self.near & words(name))
            turns[name] = (turns[name] + taken[parts.function_of(name)]) / 4**alike
            taken[parts.function_of(name)] += 1
        items.sort(key=lambda item: (item.nodeid != self.first, turns[item.nodeid]))


class Progress:
    """A plugin of pytest that writes which test runs and which failed."""

    def __init__(self, out: int) -> None:
        self.out = out

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.write(self.out, f"began {nodeid}\n".encode())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.out, f"failed {report.nodeid}\n".encode())

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.out, f"failed {report.nodeid}\n".encode())


def serve() -> None:
    """Runs pytest for each line of JSON that comes, in a fork of this process, which has imported what takes long."""
    import pytest

    if Path("sparsek/attn/__init__.py").exists():
        for name in ("torch", "triton"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    leave()
    for line in sys.stdin:
        given = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(read)
            with Path(given["log"]).open("wb") as log, Path(os.devnull).open("rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            code = BROKEN
            try:
                plugins = [
                    Progress(write),
                    *([Mixed(given["first"], given["path"])] if given["mixed"] else []),
                ]
                code = int(pytest.main(given["arguments"], plugins=plugins))
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        os.close(write)
        print(json.dumps(watched(child, read, given["hang"], given["limit"])), flush=True)


def watched(child: int, read: int, hang: float, limit: float) -> dict[str, Any]:
    """The end of a run of pytest: passed, failed (or died), none (no test ran), hang, or limit; and its test."""
    began = last = time.monotonic()
    test, failed, rest, ended = "", "", b"", ""
    while not ended:
        exited = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        data = os.read(read, 65536) if select.select([read], [], [], 0.1)[0] else b""
        if exited and not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for what, _, name in (line.decode().partition(" ") for line in lines):
            last = time.monotonic()
            test, failed = (name, failed) if what == "began" else (test, failed or name)
        now = time.monotonic()
        start = 0 if test else 60  # what is imported first takes longer on a busy machine
        ended = "hang" if now - last > hang + start else "limit" if now - began > limit + start else ""
    os.close(read)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3 and not test:
        code = BROKEN  # pytest itself had an error
    outcome = "failed" if failed else ended or {0: "passed", 4: "none", 5: "none"}.get(code, "failed")
    return {"outcome": outcome, "test": failed or test, "code": code, "seconds": time.monotonic() - began}


class Slot:
    """A copy of the repository, and the processes that run pytest in it."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.root = run, run.work / str(number)
        self.root.mkdir(parents=True)
        for each in run.root.iterdir():
            if each.name.startswith(".venv"):
                (self.root / each.name).symlink_to(each.resolve())
            elif each.is_dir() and each.name[0] != "." and each.name not in ASIDE:
                shutil.copytree(each, self.root / each.name, ignore=shutil.ignore_patterns("shipped.zip"))
            elif each.is_file():
                shutil.copy2(each, self.root)
        self.number, self.log = number, run.work / f"{number}.log"
        self.servers: dict[bool, subprocess.Popen[str]] = {}
        self.edits = number * 100_000

    def of(self, name: str, fault: Fault) -> dict[str, Any]:
        """The outcome of one fault."""
        first = self.run.known.get(name) or self.run.finders.get(fault.path, "")
        began, files = time.monotonic(), self.run.tests.of(fault, first)
        ran, size, ended, found = 0, 3, "survived" if files else "not run", {"test": ""}
        while ran < len(files) and ended == "survived":
            file = files[ran][0]
            chunk = [
                each
                for each in files[ran : ran + size]
                if each[0].endswith(INTERPRETED) == file.endswith(INTERPRETED)
            ]
            files[ran : ran + size] = chunk + [each for each in files[ran : ran + size] if each not in chunk]
            left = min(self.run.each - (time.monotonic() - began), self.run.left())
            if left <= 0:
                ended = "unfinished"
                break
            with self.planted(fault):
                found = self.pytest([name for _, names in chunk for name in names], left, fault.path)
                if found["code"] == 4:  # a test has another name by now
                    found = self.pytest([file for file, _ in chunk], left, fault.path)
            if found["outcome"] in ("failed", "hang"):
                known = found["test"] in self.run.sound
                if self.sound(found["test"]):
                    ended = "found" if found["outcome"] == "failed" else "timeout"
                    if ended == "found" and self.run.gpu:
                        self.run.finders[fault.path] = found["test"]
                elif known:  # it could not be left out: a file that fails as a whole, say
                    files = [each for each in files if each[0] != found["test"].partition("::")[0]]
                continue  # without that test
            ran, size = ran + len(chunk), size * 2
            if found["outcome"] == "limit":
                ended = "unfinished"
        test = found["test"] or f"exit {found['code']}" if ended in FOUND else ""
        seconds = round(time.monotonic() - began, 1)
        return {
            "id": name,
            "outcome": ended,
            "seconds": seconds,
            "test": test,
            "files": [ran, len(files)],
        }

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The copy has the fault inside. Times of files differ, by which Python keeps compiled code."""
        path = self.root / fault.path
        source, times = path.read_bytes(), path.stat()
        self.edits += 1
        path.write_bytes(fault.planted(source))
        os.utime(path, (1_000_000_000 + self.edits, 1_000_000_000 + self.edits))
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def sound(self, test: str) -> bool:
        """Whether a test, or a file, passes without a fault."""
        if self.run.tests.passed(test):
            return True
        if test not in self.run.sound:
            limit = min(3 * self.run.hang, self.run.left() + 30)
            outcome = self.pytest([test], limit)["outcome"] if test else "passed"
            if outcome == "limit" and self.run.left() <= 0:
                return False  # cut, so nobody knows
            self.run.sound[test] = outcome == "passed"
        return self.run.sound[test]

    def pytest(self, tests: list[str], limit: float, path: str = "") -> dict[str, Any]:
        interpreted = tests[0].partition("::")[0].endswith(INTERPRETED)
        server = self.servers.get(interpreted)
        if server is None or server.poll() is not None:
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(self.root), os.environ.get("PYTHONPATH", "")])
            }
            env |= {
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "SPARSEK_TEST_SEED": str(SEED),
                "PYTEST_XDIST_WORKER": f"gw{self.number}",  # to tests/conftest.py: one of several cards
            }
            env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
            command = [sys.executable, __file__, "serve"]
            server = self.servers[interpreted] = subprocess.Popen(
                command, cwd=self.root, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        broken = [f"--deselect={test}" for test, sound in list(self.run.sound.items()) if not sound]
        marked = "gpu" if self.run.gpu else "not gpu"
        # pytest-benchmark warns where it finds the variable of a worker, and a warning is an error.
        arguments = ["-x", "-q", "-m", marked, "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=line"]
        arguments += [*broken, *tests]
        given = {
            "arguments": arguments,
            "hang": self.run.hang,
            "limit": max(1.0, limit),
            "log": str(self.log),
            "mixed": self.run.gpu,
            "first": tests[0],
            "path": path,
        }
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(given) + "\n")
        server.stdin.flush()
        found = json.loads(server.stdout.readline())
        if found["code"] == BROKEN:
            raise RuntimeError(f"pytest did not run in {self.root}: {self.log.read_text(encoding='utf-8')}")
        return found


class Run:
    """One call of `plant.py run`."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.root, self.gpu, self.each, self.hang = given.root, given.gpu, given.each, given.hang
        self.end = time.monotonic() + given.seconds
        self.tests = Tests(given.root, None if given.gpu else given.map)
        self.out: Path = given.out
        self.sound = dict.fromkeys(self.tests.failed, False)
        self.lock = threading.Lock()
        self.work = Path(tempfile.mkdtemp(prefix="sparsek-plant-"))
        before = results(given.found_by) if given.found_by else {}
        self.finders: dict[str, str] = {}  # the last test that found a fault in a file
        self.known = {name: each["test"] for name, each in before.items() if each["outcome"] in FOUND}
        here, done = faults(given.root), results(self.out)
        done = {
            name: each
            for name, each in done.items()
            if each["outcome"] != "unfinished" or each["seconds"] > self.each - 5
        }
        number, count = map(int, given.shard.split("/"))
        self.todo: queue.SimpleQueue[tuple[str, Fault]] = queue.SimpleQueue()
        for entry in lines(given.list)[number - 1 :: count]:
            name = entry["id"]
            fault = standing(entry, here)
            if name in done or (before and name not in self.known):
                continue
            if fault is None:
                self.write({"id": name, "outcome": "gone", "seconds": 0, "test": ""})
            elif fault.device or not given.device:
                self.todo.put((name, fault))
        self.workers = given.workers

    def all(self) -> None:
        threads = [threading.Thread(target=self.work_on, args=(number,)) for number in range(self.workers)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        shutil.rmtree(self.work, ignore_errors=True)

    def left(self) -> float:
        return self.end - time.monotonic()

    def work_on(self, number: int) -> None:
        slot = Slot(self, number)
        while self.left() > 5:
            try:
                name, fault = self.todo.get_nowait()
            except queue.Empty:
                break
            found = slot.of(name, fault)
            if found["outcome"] != "unfinished" or self.left() > 0:  # else it was cut: another time
                self.write(found)
        for server in slot.servers.values():
            server.kill()

    def write(self, found: dict[str, Any]) -> None:
        with self.lock, self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def results(path: Path) -> dict[str, dict[str, Any]]:
    return {each["id"]: each for each in lines(path)}


def compare(before: Path, after: Path) -> int:
    """Prints what was found before and is not now."""
    old, new = results(before), results(after)
    for path, each in ((before, old), (after, new)):
        print(path, dict(Counter(one["outcome"] for one in each.values())))
    both = [name for name, each in old.items() if each["outcome"] in FOUND and name in new]
    lost = [name for name in both if new[name]["outcome"] not in FOUND]
    for name in lost:
        print(f"{new[name]['outcome']}: {name}, found before by {old[name]['test']}")
    absent = sum(each["outcome"] in FOUND and name not in new for name, each in old.items())
    print(
        f"{len(both)} found before were planted again, {len(lost)} of them not found; {absent} not planted again"
    )
    return 1 if lost else 0


class Recorder:
    """A plugin of pytest by which each test's lines and seconds are recorded."""

    def __init__(self, out: Path) -> None:
        import coverage  # pyright: ignore[reportMissingImports]

        from tests.evidence.trace import empty_caches

        self.empty_caches, self.seconds = empty_caches, defaultdict[str, float](float)
        self.out, self.name, self.failed = out, "", list[str]()
        folders = [str(Path(each).resolve()) for each in ("sparsek/products", "sparsek/attn")]
        self.coverage = coverage.Coverage(data_file=str(out), source=folders, config_file=False)
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = nodeid.partition("[")[0]
        if name != self.name:
            self.empty_caches()
            self.coverage.switch_context(name)
            self.name = name

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[self.name] += report.duration
        self.failed += [report.nodeid] if report.failed else []

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.out.with_suffix(".json").write_text(json.dumps([self.seconds, self.failed]), encoding="utf-8")


def record_session(out: Path) -> int:
    import pytest

    leave()
    names = " and ".join(f"not {each}" for each in COMPILING)
    arguments = ["-q", "-m", "not gpu", "-k", names, "-p", "no:cacheprovider", "--tb=no"]
    return int(pytest.main([*arguments, *filter(os.path.isdir, TESTS)], plugins=[Recorder(out)]))


def record(root: Path, out: Path) -> None:
    """Writes the map: tests with their seconds, and for each line the tests that run it."""
    with tempfile.TemporaryDirectory() as folder:
        halves = [Path(folder, "host.data"), Path(folder, "interpreted.data")]
        for half, interpret in zip(halves, ({}, {"TRITON_INTERPRET": "1"}), strict=True):
            path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
            env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | interpret
            subprocess.run([sys.executable, __file__, "session", str(half)], cwd=root, env=env, check=False)
        out.write_text(json.dumps(mapped(root, halves)), encoding="utf-8")


def mapped(root: Path, halves: list[Path]) -> dict[str, Any]:
    from coverage import CoverageData  # pyright: ignore[reportMissingImports]

    tests, failed = list[tuple[str, float]](), list[str]()
    rows: defaultdict[str, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for half in halves:
        data = CoverageData(str(half))
        seconds, broken = json.loads(half.with_suffix(".json").read_text(encoding="utf-8"))
        failed += broken
        data.read()
        number = {name: at for at, name in enumerate(seconds, len(tests))}
        tests += seconds.items()
        for path in data.measured_files():
            for line, names in data.contexts_by_lineno(path).items():
                ran = [number[name] for name in names if name in number]
                rows[Path(path).relative_to(root).as_posix()][line] += ran
    return {"tests": tests, "lines": rows, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    draw, recorded, run = (commands.add_parser(name) for name in ("draw", "record", "run"))
    for each in (draw, recorded, run):
        each.add_argument("--root", type=Path, default=ROOT, help="the repository, this one by default")
        each.add_argument("--out", type=Path, required=True)
    draw.add_argument("--seed", type=int, default=SEED)
    draw.add_argument("--count", type=int, default=COUNT)
    run.add_argument("list", type=Path)
    run.add_argument("--map", type=Path, help="of record, for tests that need no GPU")
    run.add_argument("--gpu", action="store_true", help="the tests that need a GPU")
    run.add_argument("--device", action="store_true", help="only faults of device code")
    run.add_argument(
        "--found-by", type=Path, help="earlier results: only faults found there, by the same test first"
    )
    run.add_argument("--workers", type=int, default=1)
    run.add_argument("--shard", default="1/1", help="2/3: every third fault, from the second on")
    run.add_argument("--seconds", type=float, default=86400, help="no fault is begun after these")
    run.add_argument("--each", type=float, default=120, help="seconds of one fault")
    run.add_argument(
        "--hang", type=float, default=45, help="seconds of one test, after which it counts as hanging"
    )
    commands.add_parser("serve")
    commands.add_parser("session").add_argument("out", type=Path)
    compared = commands.add_parser("compare")
    compared.add_argument("before", type=Path)
    compared.add_argument("after", type=Path)
    commands.add_parser("show").add_argument("id")
    given = parser.parse_args()
    if given.command == "draw":
        chosen = drawn(given.root, given.seed, given.count)
        texts = [
            json.dumps(
                {"id": each.id, "line": each.line, "code": each.code, "text": each.text, "of": each.share}
            )
            for each in chosen
        ]
        given.out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    elif given.command == "show":
        fault = faults(ROOT)[given.id]
        source = (ROOT / fault.path).read_bytes()
        old, new = (text.decode().splitlines() for text in (source, fault.planted(source)))
        print("\n".join(difflib.unified_diff(old, new, fault.path, given.id, lineterm="", n=2)))
    elif given.command == "record":
        record(given.root.resolve(), given.out)
    elif given.command == "session":
        return record_session(given.out)
    elif given.command == "compare":
        return compare(given.before, given.after)
    elif given.command == "serve":
        serve()
    else:
        if not given.gpu and not given.map:
            parser.error("run needs --map FILE of `plant.py record`, or --gpu")
        given.root = given.root.resolve()
        Run(given).all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
