"""Evidence: what a run of one part of the tests marked `gpu` found, one JSON file for each part, in a folder for each
chip: benchmarks/evidence/hopper/1-of-3.json. The run writes it by itself, from its start on, so that a run that is
cut leaves evidence that says so.

{part "1/3", cuts [first file of each later part], finished, date, seconds, commit,
 env{gpu, driver, python, torch, triton, cuda, numpy, transformers, workers},
 counts{tests, passed, failed, skipped, unrun}, ids (a hash of the tests' names), unfinished [tests that had begun],
 failed[{test, when, seconds, text}], skipped{reason: how many},
 files{path: {tests, ran, seconds}}, slow{test: seconds},
 executed (what each file ran, with hashes: `executed.py`)}

again-1.json, again-2.json, ... are of files that were stale when they were run again. Of a file that several hold, the
newest counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.evidence.parts import PART

Evidence = dict[str, Any]
FIELDS = (
    "part",
    "cuts",
    "finished",
    "date",
    "seconds",
    "commit",
    "env",
    "counts",
    "ids",
    "unfinished",
    "failed",
    "skipped",
    "files",
    "slow",
    "executed",
)


AGAIN = re.compile(r"again-[1-9]\d*")


class NotEvidence(ValueError):
    """A file among the evidence that is none."""


def name_of(part: str) -> str:
    """The file name of a part's evidence."""
    return f"{part.replace('/', '-of-')}.json"


def write(path: Path, evidence: Evidence) -> None:
    """Writes evidence at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def read(folder: Path) -> list[Evidence]:
    """The evidence in a card's folder: parts in their order, then files that were run again, by date.

    Raises NotEvidence for another file there.
    """
    found = [_read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda each: (_place(each["part"]), each["date"]))


def timings(folder: Path) -> list[Evidence]:
    """Earlier runs in a folder, of any version, as far as they have the seconds of tests."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [each for each in found if {"date", "files", "slow"} <= each.keys()]


def _place(part: str) -> tuple[int, ...]:
    found = PART.fullmatch(part)
    return (0, int(found[2]), int(found[1])) if found else (1,)


def parts_in(found: Iterable[Evidence]) -> dict[str, Evidence]:
    """The evidence of parts, by part, "1/3"."""
    return {each["part"]: each for each in found if PART.fullmatch(each["part"])}


def next_again(found: Iterable[Evidence]) -> str:
    """The name of the next run of stale files."""
    numbers = [int(each["part"].partition("-")[2]) for each in found if AGAIN.fullmatch(each["part"])]
    return f"again-{max(numbers, default=0) + 1}"


def newest(found: Iterable[Evidence]) -> dict[str, Evidence]:
    """By test file, the newest evidence that it was collected in."""
    held: dict[str, Evidence] = {}
    for each in sorted(found, key=lambda each: each["date"]):
        held |= dict.fromkeys(each["files"], each)
    return held


def _read(path: Path) -> Evidence:
    try:
        evidence = json.loads(path.read_text(encoding="utf-8"))
        part, lacking = evidence["part"], [name for name in FIELDS if name not in evidence]
    except (ValueError, KeyError, TypeError) as error:
        raise NotEvidence(
            f"{path}: not evidence of a part: {error!r}; delete it and run the part again"
        ) from None
    known = PART.fullmatch(part) or AGAIN.fullmatch(part)
    if lacking or path.name != name_of(part) or not known:
        raise NotEvidence(
            f"{path}: is of part {part!r} and lacks {lacking}; delete it and run the part again"
        )
    return evidence


def cuts_for(parts: int, found: dict[str, Evidence]) -> list[str] | None:
    """Where the newest evidence of so many parts cut the files, so that another part fits to it; None without any."""
    same = [each for part, each in found.items() if part.endswith(f"/{parts}")]
    return max(same, key=lambda each: each["date"])["cuts"] if same else None


def number_of_parts(found: dict[str, Evidence]) -> int | None:
    """How many parts the newest evidence is of."""
    newest = max(found.values(), key=lambda each: each["date"], default=None)
    return None if newest is None else int(newest["part"].partition("/")[2])
