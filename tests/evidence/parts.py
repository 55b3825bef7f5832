"""How the tests marked `gpu` are cut into parts, and in which order a part's tests are handed to its workers.

A part is a stretch of test files in the order of their paths: a changed test file makes one part stale, and most files
that depend on sparsek_bench, those of tests/bench, stand together. A cut is the first file of the next part. Inside a
part, units of a few tests of one function, which share compiled kernels, are handed out longest first. Standard
library only: scripts/gpu.py runs this where nothing is installed.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Seconds of a test that no evidence knows. Those of the bench compile and time several peers each.
UNKNOWN = 2.0
UNKNOWN_IN = {
    "tests/bench/": 30.0,
    "tests/tools/cli/": 10.0,
    "tests/ops/test_strides.py": 20.0,
    "tests/ops/test_attention_fuzz.py": 60.0,
}
# Tests of one function go to a worker together until they take this long.
UNIT_SECONDS = 10.0
PART = re.compile(r"([1-9]\d*)/([1-9]\d*)")


@dataclass(frozen=True)
class Known:
    """Seconds that tests took in earlier evidence: of each file the tests that ran and their seconds together, and of
    slow tests their own.
    """

    files: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    slow: Mapping[str, float] = field(default_factory=dict)

    def of_file(self, path: str, tests: int) -> float:
        """The seconds that `tests` tests of a file should take."""
        if path not in self.files:
            return tests * _unknown(path)
        ran, seconds = self.files[path]
        return seconds / ran * tests

    def of_each(self, ids: Iterable[str]) -> dict[str, float]:
        """The seconds that each test should take: its own; for one that was not drawn before, what its function's slow
        tests took, spread over all that it has now, or the mean of its file's tests that are not slow.
        """
        ids = list(ids)
        slow: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.slow.items():
            slow[file_of(name)].append(seconds)
        quick: dict[str, float] = {}
        for path, (ran, seconds) in self.files.items():
            others = ran - len(slow[path])
            quick[path] = max(seconds - sum(slow[path]), 0.0) / others if others > 0 else _unknown(path)
        drawn: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.slow.items():
            drawn[function_of(name)].append(seconds)
        counts = Counter(map(function_of, ids))

        def guess(name: str) -> float:
            known = drawn[function_of(name)]
            spread = sum(known) / max(len(known), counts[function_of(name)])
            return max(spread, quick.get(file_of(name), _unknown(name)))

        return {name: self.slow[name] if name in self.slow else guess(name) for name in ids}


def known(evidence: Iterable[Mapping[str, Any]]) -> Known:
    """What evidence tells of seconds; of a file that several hold, the newest."""
    files: dict[str, tuple[int, float]] = {}
    slow: dict[str, dict[str, float]] = {}
    for each in sorted(evidence, key=lambda each: each["date"]):
        for path, facts in each["files"].items():
            if facts["ran"]:
                files[path] = facts["ran"], facts["seconds"]
                slow[path] = {}
        for name, seconds in each["slow"].items():
            slow.setdefault(file_of(name), {})[name] = seconds  # a file may have run in part only
    return Known(files, {name: seconds for of_file in slow.values() for name, seconds in of_file.items()})


def _unknown(path: str) -> float:
    return next((seconds for start, seconds in UNKNOWN_IN.items() if path.startswith(start)), UNKNOWN)


def file_of(test: str) -> str:
    """The file of a test's id."""
    return test.partition("::")[0]


def function_of(test: str) -> str:
    """A test's id without its parameters."""
    return test.partition("[")[0]


def test_files(root: Path) -> list[str]:
    """Every test file below tests/, as paths from `root` in their order."""
    return sorted(path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py"))


def numbers(part: str) -> tuple[int, int]:
    """n and m of "n/m". Raises ValueError for anything else."""
    found = PART.fullmatch(part)
    if found is None or int(found[1]) > int(found[2]):
        raise ValueError(f"a part is n/m with 1 <= n <= m, as 2/3, got {part!r}")
    return int(found[1]), int(found[2])


def cut(seconds: Mapping[str, float], parts: int) -> list[str]:
    """The first files of parts 2 to `parts`, such that the parts take about the same time.

    `seconds` of each file; files without tests may be left out. The sum of the squares of the parts' seconds is the
    smallest there is. Raises ValueError for more parts than files.
    """
    files = sorted(seconds)
    count = len(files)
    if parts > count:
        raise ValueError(f"{count} files with tests cannot be cut into {parts} parts")
    before = [0.0, *itertools.accumulate(seconds[path] for path in files)]
    # best[stop]: the smallest sum for the first `stop` files, and the starts of the parts that it is of.
    best: list[tuple[float, list[int]]] = [(before[stop] ** 2, [0]) for stop in range(count + 1)]
    for part in range(2, parts + 1):
        best = [
            min(
                (
                    (best[start][0] + (before[stop] - before[start]) ** 2, [*best[start][1], start])
                    for start in range(part - 1, stop)
                ),
                default=(float("inf"), []),
            )
            for stop in range(count + 1)
        ]
    return [files[start] for start in best[count][1][1:]]


def files_of(part: int, cuts: Sequence[str], files: Iterable[str]) -> list[str]:
    """The files of part 1, 2, ... . A file that is new since the cut belongs to the part in whose stretch it lies."""
    first = cuts[part - 2] if part > 1 else ""
    return sorted(path for path in files if first <= path and (part > len(cuts) or path < cuts[part - 1]))


def units(ids: Iterable[str], of: Known) -> list[list[str]]:
    """Tests that go to one worker together, longest first. Of units as long, first the first of every function: what
    it compiles is there for the others.
    """
    ids = list(ids)
    seconds = of.of_each(ids)
    found: list[tuple[float, int, list[str]]] = []
    for _, tests in itertools.groupby(ids, key=function_of):
        unit: list[str] = []
        place = 0
        for test in tests:
            if unit and sum(seconds[each] for each in unit) + seconds[test] > UNIT_SECONDS:
                found.append((sum(seconds[each] for each in unit), place, unit))
                unit, place = [], place + 1
            unit.append(test)
        found.append((sum(seconds[each] for each in unit), place, unit))
    return [unit for _, _, unit in sorted(found, key=lambda each: (-each[0], each[1]))]
