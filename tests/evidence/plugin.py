"""A pytest plugin that writes evidence of the run it is loaded into (`-p tests.evidence.plugin`, see scripts/gpu.py),
and hands units of tests to xdist's workers, longest first. All of it happens in the process that starts the workers.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparsek_bench.engine.definitions import Tree
from tests.evidence import executed, parts, record, trace

ROOT = Path(__file__).resolve().parents[2]
# Tests that take longer are kept by name, for balancing.
SLOW = 2.0
# Seconds between two writes.
EVERY = 5.0
FAILURES_WITH_TEXT = 100
LETTERS = 4000
END = "SPARSEK_EVIDENCE_END"  # time.time() after which no test begins, for the workers
MODEL = re.compile(r"\b[A-Z]{1,2}\d{2,4}\w*\b")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("evidence")
    group.addoption("--evidence", metavar="FOLDER", help="where evidence goes: FOLDER/<chip>/<part>.json")
    group.addoption("--part", default="selected", metavar="N/M", help="the part that the files are")
    group.addoption("--cuts", default="", help="the first file of each later part, joined by commas")
    group.addoption(
        "--seconds", type=float, metavar="S", help="begin no test after these; cut files are left out"
    )
    group.addoption("--known", metavar="FOLDER", help="earlier evidence, for the seconds of tests")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config))
        config.pluginmanager.register(Deadline())
        config.pluginmanager.register(Context())
        if trace.current:
            config.pluginmanager.register(Traced(trace.current))
            sys.path.insert(
                0, str(trace.CHILD)
            )  # xdist sets the path; torch passes it on to processes of its own
    elif config.getoption("--evidence"):
        recorder = Recorder(config)
        config.pluginmanager.register(recorder)
        if not getattr(config.option, "numprocesses", None):
            config.pluginmanager.register(Deadline())
            config.pluginmanager.register(Traced(trace.begin(recorder.trace, ROOT)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # a plain run needs no xdist

    class LongestFirst(LoadScopeScheduling):
        """Units of tests go to the workers as wholes, in the order of `parts.units`."""

        def schedule(self) -> None:
            collections = list(self.registered_collections.values())
            if self.collection is None and all(each == collections[0] for each in collections):
                folder = config.getoption("--known")
                found = record.timings(Path(folder)) if folder else []
                units = parts.units(collections[0], parts.known(found))
                self.unit_of = {test: str(number) for number, unit in enumerate(units) for test in unit}
                for number in range(len(units)):  # the scheduler fills its queue without changing this order
                    self.workqueue[str(number)] = {}
            again = self.collection is not None
            super().schedule()
            if again:  # a new worker gets two units, as at first: a test waits until the next one is known
                super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return self.unit_of[nodeid]

        def remove_node(self, node: Any) -> str | None:
            """xdist's own gives a test that killed its worker to the next worker, and to the next."""
            crashed = next(
                (
                    test
                    for unit in self.assigned_work[node].values()
                    for test, done in unit.items()
                    if not done
                ),
                None,
            )
            if crashed is None:
                return super().remove_node(node)
            for name, unit in self.assigned_work.pop(node).items():
                if crashed in unit:
                    unit[crashed] = True
                if not all(unit.values()):
                    self.workqueue[name] = unit
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return LongestFirst(config, log)


def chip_of(gpu: str) -> str:
    """The folder of a card's evidence: "hopper" of "NVIDIA H200" and "NVIDIA H100", which run the same machine code."""
    found = MODEL.search(gpu)
    name = (found[0] if found else re.sub(r"\W+", "-", gpu)).lower()
    return "hopper" if name in ("h100", "h200") else name


def software(workers: int) -> dict[str, Any]:
    """The `env` object of evidence."""
    import torch  # which workers of tiny projects need not load

    from sparsek.core.machine import version_of
    from sparsek_bench.engine import records

    facts = records.environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    del facts["power_limit_w"]
    others = {name: version_of(name) for name in ("numpy", "transformers")}
    return {**facts, "python": platform.python_version(), **others, "workers": workers}


def commit_of(root: Path) -> str | None:
    """The commit that is checked out, with a "+" behind it if files differ from it; None without git."""
    try:
        head = _git(root, "rev-parse", "HEAD")
        return head[:12] + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True
    )
    return done.stdout.strip()


class Recorder:
    """Counts what the tests report, and keeps the evidence's file up to date."""

    def __init__(self, config: pytest.Config) -> None:
        self.root = config.rootpath
        self.part = str(config.getoption("--part"))
        self.cuts = [path for path in str(config.getoption("--cuts")).split(",") if path]
        self.started = time.monotonic()
        self.writing = False
        self.ids: list[str] = []
        self.outcome: dict[str, str] = {}
        self.began: dict[str, None] = {}
        self.ended: set[str] = set()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: list[dict[str, Any]] = []
        self.skipped: dict[str, str] = {}
        self.finished = False
        self.env = software(int(getattr(config.option, "numprocesses", None) or 0))
        self.path = Path(
            str(config.getoption("--evidence")), chip_of(self.env["gpu"]), record.name_of(self.part)
        )
        self.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.commit = commit_of(ROOT)
        self.paths = _files(config.args, self.root)
        self.trace = trace_of(self.path.resolve())
        shutil.rmtree(self.trace, ignore_errors=True)
        self.trace.mkdir(parents=True)
        os.environ.update(trace.environment(self.trace))  # for the workers, and what they start
        os.environ.pop(END, None)  # that of a run which started this one
        if seconds := config.getoption("--seconds"):
            os.environ[END] = str(time.time() + seconds)
        self.executed = ""
        self.write()
        # By a timer, not as tests report: the last test to begin may be the one that hangs.
        signal.signal(signal.SIGALRM, lambda *_: self.write())
        signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.ids = self.ids or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        self.ids = self.ids or list(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and report.nodeid not in self.outcome:
            self.outcome[report.nodeid] = "failed"
            self._keep_failure(report.nodeid, "collect", 0.0, report.longreprtext)
        elif report.skipped:
            self._collection_skipped(report.nodeid, _reason(report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        for nodeid, reason in (getattr(node, "workeroutput", None) or {}).get("skipped_files", {}).items():
            self._collection_skipped(nodeid, reason)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.began[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.ended.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.seconds[test] += report.duration
        if report.failed:
            self.outcome[test] = "failed"
            self._keep_failure(test, report.when or "", report.duration, report.longreprtext)
            if report.when not in ("setup", "call", "teardown"):  # its worker died with it
                self.ended.add(test)
        elif report.skipped:
            self.outcome.setdefault(test, "skipped")
            self.skipped[test] = _reason(report)
        elif report.when == "call":
            self.outcome.setdefault(test, "passed")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if Deadline().passed():
            self._leave_out_cut_files()
        self.finished = exitstatus in (0, 1, 5) and self.ended.issuperset(self.ids)
        if trace.current:
            trace.current.decide()
        self.executed = executed_by(self.trace, self.paths, {parts.file_of(test) for test in self.ended})
        self.write()
        shutil.rmtree(self.trace, ignore_errors=True)

    def _leave_out_cut_files(self) -> None:
        """Files whose tests did not all begin say nothing, unless one failed: earlier evidence of them stands."""
        red = {parts.file_of(each["test"]) for each in self.failed}
        cut = {parts.file_of(test) for test in set(self.ids) - self.ended} - red
        self.paths = [path for path in self.paths if path not in cut]
        self.ids = [test for test in self.ids if parts.file_of(test) not in cut]
        self.ended = {test for test in self.ended if parts.file_of(test) not in cut}
        for by_test in (self.outcome, self.seconds, self.began):
            for test in [test for test in by_test if parts.file_of(test) in cut]:
                del by_test[test]

    def _collection_skipped(self, nodeid: str, reason: str) -> None:
        if self.outcome.setdefault(nodeid, "skipped") == "skipped":
            self.skipped[nodeid] = f"file: {reason}"

    def _keep_failure(self, test: str, when: str, seconds: float, text: str) -> None:
        for folder in (str(ROOT), sys.prefix, sys.base_prefix, str(Path.home())):  # no paths of one machine
            text = text.replace(f"{folder}{os.sep}", "")
        kept = text[-LETTERS:] if len(self.failed) < FAILURES_WITH_TEXT else ""
        self.failed.append({"test": test, "when": when, "seconds": round(seconds, 2), "text": kept})

    def write(self) -> None:
        if not self.writing:  # the timer may come while this writes
            self.writing = True
            record.write(self.path, self.evidence())
            self.writing = False

    def evidence(self) -> record.Evidence:
        counts = Counter(self.outcome.values())
        named = [test for test in self.seconds if self.seconds[test] >= SLOW]
        return {
            "part": self.part,
            "cuts": self.cuts,
            "finished": self.finished,
            "date": self.date,
            "seconds": round(time.monotonic() - self.started, 1),
            "commit": self.commit,
            "env": self.env,
            "counts": {
                "tests": len(self.ids),
                **{name: counts[name] for name in ("passed", "failed", "skipped")},
                "unrun": len(set(self.ids) - self.ended),
            },
            "ids": hashlib.sha256("\n".join(sorted(self.ids)).encode()).hexdigest()[:16],
            "unfinished": [test for test in self.began if test not in self.ended],
            "failed": self.failed,
            "skipped": dict(Counter(self.skipped.values()).most_common()),
            "files": self._files(),
            "slow": {
                test: round(self.seconds[test], 1)
                for test in sorted(named, key=self.seconds.__getitem__, reverse=True)
            },
            "executed": self.executed,
        }

    def _files(self) -> dict[str, dict[str, Any]]:
        tests = Counter(parts.file_of(test) for test in self.ids)
        ran = Counter(parts.file_of(test) for test in self.ended)
        seconds: defaultdict[str, float] = defaultdict(float)
        for test, took in self.seconds.items():
            seconds[parts.file_of(test)] += took
        return {
            path: {"tests": tests[path], "ran": ran[path], "seconds": round(seconds[path], 2)}
            for path in self.paths
        }


def trace_of(path: Path) -> Path:
    """Where a run's trace is while it runs, and stays if it is killed: beside its evidence."""
    return path.with_suffix(".trace")


def recover(path: Path) -> None:
    """Completes the evidence of a run that was killed, of its files that ran whole or failed, by its trace.

    In the tree that it ran in, or one with the same sources. What had ended in other files is taken off what passed.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    red = {parts.file_of(each["test"]) for each in found["failed"]}
    kept = {
        name: each for name, each in found["files"].items() if each["ran"] == each["tests"] or name in red
    }
    tests, ran = (sum(each[name] for each in kept.values()) for name in ("tests", "ran"))
    others = sum(each["ran"] for name, each in found["files"].items() if name not in kept)
    found |= {"files": kept, "unfinished": [], "finished": tests == ran}
    passed = found["counts"]["passed"] - others
    found["counts"] |= {"tests": tests, "passed": passed, "unrun": tests - ran}
    found["executed"] = executed_by(trace_of(path), list(kept), {name for name in kept if kept[name]["ran"]})
    record.write(path, found)
    shutil.rmtree(trace_of(path), ignore_errors=True)


def executed_by(folder: Path, files: Sequence[str], ran: set[str]) -> str:
    """The `executed` text of evidence: what test files ran, from the trace in a folder; of others just the file."""
    tree = Tree(ROOT, executed.PACKAGES)
    closure = executed.Closure(tree, executed.read(folder, tree))
    codes = {path: closure.of(path) if path in ran else executed.only(path) for path in files}
    return executed.pack(tree, codes, closure.of(executed.CHOICE))


class Deadline:
    """Passes over tests that would begin too late, so that the run ends as any other."""

    def passed(self) -> bool:
        return END in os.environ and time.time() > float(os.environ[END])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if self.passed() else None


class Context:
    """Ends a worker whose CUDA context is lost, so that the test which lost it is red and those after it are not."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        done = yield
        if lost():
            os._exit(1)
        return done


def lost() -> bool:
    """Whether a kernel's fault has ended this process' CUDA context: every call then raises, not the next one alone."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    for _ in range(2):
        try:
            torch.cuda.synchronize()
            return False
        except RuntimeError:
            pass
    return True


class Traced:
    """Names the test file to the trace of the process that runs it."""

    def __init__(self, current: trace.Trace) -> None:
        self.trace = current

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.trace.to(parts.file_of(item.nodeid))
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self.trace.decide()


class Worker:
    """Tells the process that started this one which files were skipped as a whole."""

    def __init__(self, config: pytest.Config) -> None:
        given = config.workeroutput  # pyright: ignore[reportAttributeAccessIssue]
        self.output: dict[str, str] = given.setdefault("skipped_files", {})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self.output[report.nodeid] = _reason(report)


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"xfail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    return text.removeprefix("Skipped: ")


def _files(arguments: Sequence[str], root: Path) -> list[str]:
    """The test files that pytest's arguments name, as paths from `root`."""
    found: set[Path] = set()
    for argument in arguments:
        path = root / argument.partition("::")[0]
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())
