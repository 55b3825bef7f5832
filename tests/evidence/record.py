"""Evidence: what a run of one part of the tests marked `gpu` found, one JSON file for each part, in a folder for each
chip: benchmarks/evidence/hopper/1-of-3.json. The run writes it by itself, from its start on, so that a run that is
cut leaves evidence that says so.

{part "1/3", cuts [first file of each later part], finished, date, seconds, commit,
 env{gpu, driver, python, torch, triton, cuda, numpy, transformers, workers},
 counts{tests, passed, failed, skipped, unrun}, ids (a hash of the tests' names), unfinished [tests that had begun],
 failed[{test, when, seconds, text}], skipped{reason: how many},
 files{path: {tests, ran, seconds, hash}}, slow{test: seconds},
 sources{floor: hash}}

The hash of a test file is also of what it needs of tests/ and of sparsek/bench. `sources` has every folder of sparsek/
but bench and cli.

changed.json is of the part "changed": the files of all parts that had changed while the sources had not, run again.
"""

from __future__ import annotations

import json
import os
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
    "sources",
)


# Test files of any part that were run again because they, or what they need, had changed.
CHANGED = "changed"


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


def read(folder: Path) -> dict[str, Evidence]:
    """The evidence in a card's folder by part, "1/3". Raises NotEvidence for another file there."""
    paths = [path for path in sorted(folder.glob("*.json")) if path.name != name_of(CHANGED)]
    return {evidence["part"]: evidence for evidence in map(_read, paths)}


def read_changed(folder: Path) -> Evidence | None:
    """The evidence of the files that were run again, if there is any."""
    path = folder / name_of(CHANGED)
    return _read(path) if path.exists() else None


def _read(path: Path) -> Evidence:
    try:
        evidence = json.loads(path.read_text(encoding="utf-8"))
        part, lacking = evidence["part"], [name for name in FIELDS if name not in evidence]
    except (ValueError, KeyError, TypeError) as error:
        raise NotEvidence(
            f"{path}: not evidence of a part: {error!r}; delete it and run the part again"
        ) from None
    known = part == CHANGED or PART.fullmatch(part)
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
