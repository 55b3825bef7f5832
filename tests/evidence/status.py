"""What evidence is worth today: `make gpu-status`.

missing  the part has no evidence
red      a test failed or saw no GPU, none passed, or the run was cut before its last test
stale    the sources or the tests have changed since, or the parts were cut elsewhere
fresh    neither, but for test files that have been run again since (`gpu.py run --changed`)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.evidence import hashes, parts, record
from tests.evidence.record import Evidence

SHOWN = 5
NO_GPU = "needs an NVIDIA GPU"  # why tests/conftest.py skips; each worker asks for itself


@dataclass(frozen=True)
class Status:
    """One part: its word, the facts of its run, and why it is not fresh."""

    part: str
    word: str
    facts: str = ""
    why: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        return [
            f"{self.part:6}{self.word:9}{self.facts}".rstrip(),
            *(f"      {reason}" for reason in self.why),
        ]


def statuses(
    root: Path, found: dict[str, Evidence], expected: int, changed: Evidence | None = None
) -> list[Status]:
    """The status of every part, of `expected` parts if there is no evidence, and of evidence of another cut.

    `changed`: the evidence of files that were run again.
    """
    count = record.number_of_parts(found) or expected
    cuts = record.cuts_for(count, found) or []
    wanted = [f"{number}/{count}" for number in range(1, count + 1)]
    again = hashes_again(changed, root)
    result = [_status(part, found.get(part), cuts, root, again) for part in wanted]
    others = sorted(set(found) - set(wanted))
    return [
        *result,
        *(Status(part, "stale", "", (f"the parts are of {count} now: delete it",)) for part in others),
    ]


def _status(
    part: str, evidence: Evidence | None, cuts: list[str], root: Path, again: dict[str, str]
) -> Status:
    if evidence is None:
        return Status(part, "missing", "", (f"run `make gpu PART={part}` on the GPU",))
    red, stale = failures(evidence), changes(evidence, cuts, root, again)
    word = "red" if red else "stale" if stale else "fresh"
    return Status(part, word, facts(evidence), (*red, *stale))


def facts(evidence: Evidence) -> str:
    """Counts, seconds and date of a run, in one line."""
    counts = evidence["counts"]
    parts_of_line = [f"{counts['passed']:,} passed"]
    parts_of_line += [f"{counts[name]:,} {name}" for name in ("skipped", "failed", "unrun") if counts[name]]
    date = evidence["date"][:16].replace("T", " ")
    return f"{', '.join(parts_of_line):30} {evidence['seconds']:5.0f} s   {date} UTC"


def failures(evidence: Evidence) -> list[str]:
    """What makes a run red, one line each; [] for a green one."""
    lines = [f"failed: {each['test']} ({each['when']})" for each in evidence["failed"][:SHOWN]]
    if len(evidence["failed"]) > SHOWN:
        lines.append(f"and {len(evidence['failed']) - SHOWN} more")
    if not evidence["finished"]:
        running = ", ".join(evidence["unfinished"][:SHOWN]) or "none"
        lines.append(f"cut with {evidence['counts']['unrun']} tests to go; running then: {running}")
    elif not evidence["counts"]["passed"]:
        lines.append("no test passed")
    unseen = evidence["skipped"].get(NO_GPU, 0)
    if unseen:
        lines.append(f"{unseen} tests saw no GPU")
    return lines


def hashes_again(changed: Evidence | None, root: Path) -> dict[str, str]:
    """The hashes of the files that were run again and were green, if the sources are still those of that run."""
    if changed is None or failures(changed) or changed["sources"] != hashes.source_hashes(root):
        return {}
    return {path: facts["hash"] for path, facts in changed["files"].items()}


def changed_files(root: Path, found: dict[str, Evidence]) -> list[str]:
    """The test files that have changed since their part was run. ValueError if the parts must be run instead."""
    files: list[str] = []
    for part, evidence in found.items():
        sources, moved, differing = _changes(evidence, evidence["cuts"], root, {})
        if sources or moved or failures(evidence):
            raise ValueError(f"part {part} must be run: {', '.join((*sources, *moved, *failures(evidence)))}")
        files += [path for path in differing if (root / path).exists()]
    return files


def changes(evidence: Evidence, cuts: list[str], root: Path, again: dict[str, str]) -> list[str]:
    """What has changed since a run, one line each; [] for a fresh one. `cuts`: those of the newest evidence.

    `again`: the hashes of files that were run again.
    """
    sources, moved, differing = _changes(evidence, cuts, root, again)
    lines = [*moved, *sources]
    lines += [f"{path} has changed, or what it needs" for path in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"and {len(differing) - SHOWN} more test files")
    return lines


def _changes(
    evidence: Evidence, cuts: list[str], root: Path, again: dict[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """Lines about sources, lines about cuts, and the test files that differ."""
    moved = []
    if evidence["cuts"] != cuts:
        moved.append("the parts were cut elsewhere then")
    today = hashes.source_hashes(root)
    sources = [f"sparsek/{name} has changed" for name in _differing(evidence["sources"], today)]
    held = {path: facts["hash"] for path, facts in evidence["files"].items() if facts["tests"]}
    number = parts.numbers(evidence["part"])[0]
    there = parts.files_of(number, cuts, parts.test_files(root))
    # Of a file that had no test marked `gpu`, only a change that may have brought one counts.
    unmarked = {path for path in there if path not in held and not hashes.may_hold_gpu_tests(path, root)}
    ran = {path: facts["hash"] for path, facts in evidence["files"].items() if path not in unmarked}
    now = {path: hashes.test_hash(path, root) for path in there if path not in unmarked}
    differing = [path for path in _differing(ran, now) if path not in now or again.get(path) != now[path]]
    return sources, moved, differing


def _differing(then: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(name for name in {*then, *now} if then.get(name) != now.get(name))


def closing(found: Iterable[Status]) -> str:
    """The last line. Without a word of another status than fresh where all parts are."""
    found = list(found)
    wrong = [each for each in found if each.word != "fresh"]
    if not wrong:
        return f"all {len(found)} parts are fresh and green"
    words = ", ".join(f"{each.part} {each.word}" for each in wrong)
    return f"{len(wrong)} of {len(found)} parts are not fresh and green: {words}"
