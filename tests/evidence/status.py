"""What evidence is worth today: `make gpu-status`.

missing  no run has the part, or the test file, which is new
red      a test failed or saw no GPU, none passed, or the run was cut before its last test
stale    something that a test file executed has changed since (`executed.py`), or the file itself
fresh    neither

Of a test file that several runs hold, the newest counts: `gpu.py run --stale` runs only those that are not fresh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparsek_bench.engine.definitions import Tree
from tests.evidence import executed, parts, record
from tests.evidence.record import Evidence

SHOWN = 12
REASONS = 2
NO_GPU = "needs an NVIDIA GPU"  # why tests/conftest.py skips; each worker asks for itself
# Only such a file can hold tests marked `gpu`: by the mark, or by the fixture `device`.
MARKED = re.compile(r"mark\.gpu\b|[(,]\s*device\b\s*[:,)]|^\s+device: ", re.MULTILINE)


@dataclass(frozen=True)
class File:
    """One test file: its word, and why it is not fresh."""

    path: str
    word: str
    why: tuple[str, ...] = ()

    def line(self) -> str:
        """The file with its first reasons."""
        more = f", and {len(self.why) - REASONS} more" if len(self.why) > REASONS else ""
        return f"{self.path}: {'; '.join(self.why[:REASONS])}{more}"


@dataclass(frozen=True)
class Status:
    """One part: its word, the facts of its run, and why it is not fresh."""

    part: str
    word: str
    facts: str = ""
    why: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [
            f"{self.part:8}{self.word:9}{self.facts}".rstrip(),
            *(f"      {reason}" for reason in self.why),
        ]


def files(root: Path, found: list[Evidence]) -> list[File]:
    """The status of every test file that has tests marked `gpu`, or had when it ran. None of one that is gone: nothing
    could make it fresh.
    """
    tree = Tree(root, executed.PACKAGES)
    newest = record.newest(found)
    changes = {  # a run that was killed has not told what it executed
        id(each): executed.Executed(each["executed"]).changes(tree) if each["executed"] else {}
        for each in _distinct(newest.values())
    }
    result = []
    for path in parts.test_files(root):
        marked = MARKED.search((root / path).read_text(encoding="utf-8")) is not None
        each = newest.get(path)
        if each is None:
            result += [File(path, "missing", ("is new",))] if marked else []
            continue
        held = each["files"][path]
        if not held["tests"] and not marked:
            continue
        red = tuple(failures(path, each))
        stale = tuple(changes[id(each)].get(path, ["nothing shows what it executed"]))
        result.append(File(path, "red" if red else "stale" if stale else "fresh", (*red, *stale)))
    return result


def _distinct(found: Iterable[Evidence]) -> list[Evidence]:
    return list({id(each): each for each in found}.values())


def failures(path: str, each: Evidence) -> list[str]:
    """What makes a test file red in a run, one line each; [] if it is green."""
    lines = [
        f"failed: {one['test']} ({one['when']})"
        for one in each["failed"]
        if parts.file_of(one["test"]) == path
    ]
    if not each["finished"] and each["files"][path]["ran"] < each["files"][path]["tests"]:
        lines.append("its run was cut before its last test")
    if NO_GPU in each["skipped"]:
        lines.append("its run saw no GPU")
    return lines


def statuses(root: Path, found: list[Evidence], expected: int) -> list[Status]:
    """The status of every part, of `expected` parts if there is no evidence, and of the runs of stale files."""
    of_parts = record.parts_in(found)
    count = record.number_of_parts(of_parts) or expected
    cuts = record.cuts_for(count, of_parts) or []
    known = files(root, found) if of_parts else []
    result = []
    for number in range(1, count + 1):
        part = f"{number}/{count}"
        evidence = of_parts.get(part)
        if evidence is None:
            result.append(Status(part, "missing", "", (f"run `make gpu PART={part}` on the GPU",)))
            continue
        stretch = set(parts.files_of(number, cuts, [each.path for each in known]))
        inside = [each for each in known if each.path in stretch]
        result.append(_status(part, evidence, [each for each in inside if each.word != "fresh"], known, cuts))
    others = sorted(set(of_parts) - {each.part for each in result})
    result += [Status(part, "stale", "", (f"the parts are of {count} now: delete it",)) for part in others]
    again = [each for each in found if each["part"] not in of_parts]
    return [*result, *(_status(each["part"], each, [], known, each["cuts"]) for each in again)]


def _status(part: str, evidence: Evidence, worse: list[File], known: list[File], cuts: list[str]) -> Status:
    """A run with its files that are not fresh; what another run has repeated since is not its fault any more."""
    lines = [] if evidence["counts"]["passed"] else ["no test passed"]
    if evidence["cuts"] != cuts:
        lines.append("the parts were cut elsewhere then")
    order = [word for word in ("red", "stale", "missing") if any(each.word == word for each in worse)]
    word = (
        "red" if lines[:1] == ["no test passed"] or "red" in order else "stale" if order or lines else "fresh"
    )
    for each in order:
        lines += [f"{each}: {one.line()}" for one in worse if one.word == each]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return Status(part, word, facts(evidence, word), (*lines[:SHOWN], *more))


def facts(evidence: Evidence, word: str) -> str:
    """Counts, seconds and date of a run, in one line; of a fresh one without what another run has repeated since."""
    counts = evidence["counts"]
    parts_of_line = [f"{counts['passed']:,} passed"]
    others = ("skipped",) if word == "fresh" else ("skipped", "failed", "unrun")
    parts_of_line += [f"{counts[name]:,} {name}" for name in others if counts[name]]
    date = evidence["date"][:16].replace("T", " ")
    return f"{', '.join(parts_of_line):30} {evidence['seconds']:5.0f} s   {date} UTC"


def to_run(root: Path, found: list[Evidence]) -> list[str]:
    """The test files that are not fresh."""
    return [each.path for each in files(root, found) if each.word != "fresh"]


def closing(found: Iterable[Status]) -> str:
    """The last line. Without a word of another status than fresh where all parts are."""
    found = list(found)
    wrong = [each for each in found if each.word != "fresh"]
    if not wrong:
        return f"all {len(found)} parts are fresh and green"
    words = ", ".join(f"{each.part} {each.word}" for each in wrong)
    return f"{len(wrong)} of {len(found)} parts are not fresh and green: {words}"
