"""Checks for every commit, in about two minutes. ruff, layers, prose and text rules on the whole tree; pyright and
tests on the changes since the last commit, or, in a clean tree, on those of that commit.

  check.py [--workers N]

Tests run if they have changed, import or name a changed file, or carry its name, as tests/ops/test_spmm_compiled.py
carries that of sparsek/products/ops/spmm.py. They are stopped once the check has taken SECONDS. `make test` runs the
others.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.evidence.needed import imports, needed  # noqa: E402
from tests.evidence.parts import test_files  # noqa: E402

SECONDS = 110
LEAST = 15  # seconds in which pytest has begun to run tests
CODE = ("sparsek", "sparsek_bench", "tests", "scripts", "benchmarks", "examples")
LAYERS = "from importlinter.cli import lint_imports_command as c; c(['--no-cache'])"
INTERPRETED = "_interpreted.py"
# The text rules, without those that the other steps check.
TEXT_TESTS = ("tests/house/test_lint.py", "tests/house/test_prose.py")
RULES = [*TEXT_TESTS, "-k", "not ruff and not formatted and not types"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, help="processes for the tests")
    workers = parser.parse_args().workers
    start = time.monotonic()
    changed = changes()
    python = (sys.executable, "-m")
    typed = [
        path
        for path in changed
        if path.endswith(".py")
        and path.startswith(("sparsek/", "sparsek_bench/", "tests/", "benchmarks/", "examples/"))
    ]
    steps = [
        (f"types of {len(typed)} files", [*python, "pyright", "--pythonpath", sys.executable, *typed]),
        ("ruff", [*python, "ruff", "check", "--quiet", *CODE]),
        ("format", [*python, "ruff", "format", "--check", "--quiet", *CODE]),
        ("layers", [sys.executable, "-c", LAYERS]),
        ("rules about text", [*python, "pytest", "-q", "-p", "no:cacheprovider", *RULES]),
    ]
    steps = steps if typed else steps[1:]
    with ThreadPoolExecutor(workers) as pool:
        passed = pool.map(lambda step: passes(*step), steps)
        failed = [name for (name, _), fine in zip(steps, passed, strict=True) if not fine]
    tests = affected(changed, ROOT)
    interpreted = [path for path in tests if path.endswith(INTERPRETED)]
    # Those in the interpreter come first and take half of the time at most.
    for some, interpret, share in ((interpreted, "1", 0.5), (sorted(set(tests) - set(interpreted)), "0", 1)):
        left = (start + SECONDS - time.monotonic()) * share
        if some and left < LEAST:
            print(f"no time is left for tests of {len(some)} files", flush=True)
        elif some and not tests_pass(some, workers, left, interpret):
            failed.append("tests")
    print(f"check: {', '.join(failed)} failed" if failed else "check: all passed", flush=True)
    return 1 if failed else 0


def changes() -> "list[str]":
    """Files that differ from the last commit, or else those that it changed, as paths from the root."""
    for question in (["diff", "HEAD"], ["diff", "HEAD~1", "HEAD"]):
        found = {
            *_git(*question, "--name-only", "--diff-filter=d"),
            *_git("ls-files", "-o", "--exclude-standard"),
        }
        if found:
            return sorted(found)
    return []


def _git(*arguments: str) -> "list[str]":
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def affected(changed: Iterable[str], root: Path) -> "list[str]":
    """The test files that the changes concern. A conftest.py concerns all tests below it; those run in `make test`."""
    files = {
        path for path in changed if path.endswith((".py", ".cu", ".h")) and not path.endswith("conftest.py")
    }
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    stems = {Path(path).stem for path in files if path.startswith("sparsek/")}
    found, known = [], {}
    others = (root / "tests").rglob(f"*{INTERPRETED}")
    for test in (*test_files(root), *sorted(path.relative_to(root).as_posix() for path in others)):
        source = (root / test).read_text(encoding="utf-8")
        named = any(f"_{stem}_" in f"{test[:-3].rpartition('/')[2]}_" for stem in stems)
        here = {path.relative_to(root).as_posix() for path in needed(root / test, root, known)}
        if named or files & here or modules.intersection(imports(source)):
            found.append(test)
    return found


def passes(name: str, command: "list[str]") -> bool:
    """Runs one step; prints its name, its seconds and, if it fails, its output."""
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    passed = done.returncode == 0
    print(f"{name:24} {'passed' if passed else 'FAILED'} {time.monotonic() - start:5.0f} s", flush=True)
    if not passed:
        print(done.stdout, flush=True)
    return passed


def tests_pass(tests: "list[str]", workers: int, seconds: float, interpret: str) -> bool:
    """Whether no test fails within `seconds`. Prints pytest's output. `interpret`: TRITON_INTERPRET."""
    print(f"tests of {len(tests)} files, {seconds:.0f} s at most", flush=True)
    spread = ["-n", str(workers), "--dist", "worksteal", "-m", "not gpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--maxfail=5", *spread, *tests]
    failed = ran = False
    # When interrupted, pytest still reports the failures so far; a shell's background jobs ignore that signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    env = os.environ | {"TRITON_INTERPRET": interpret}
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE) as process:
        limit = threading.Timer(seconds, process.send_signal, [signal.SIGINT])
        limit.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
            failed = failed or line.startswith(("FAILED ", "ERROR "))
            ran = ran or " passed" in line
        limit.cancel()
    stopped = process.returncode == 2 and ran and not failed
    if stopped:
        print("stopped; nothing had failed until then", flush=True)
    return stopped or process.returncode in (0, 5)


if __name__ == "__main__":
    sys.exit(main())
