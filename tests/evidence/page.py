"""docs/gpu-test-log.md, made from evidence and from nothing else: `make readme` writes it, a test compares it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.evidence import record
from tests.evidence.record import Evidence

PAGE = Path("docs", "gpu-test-log.md")
SLOWEST = 10
HEAD = """# The tests on a GPU

`make gpu` runs every test marked `gpu`, in parts, and writes what it found to `benchmarks/evidence/`.
`make readme` writes this page from those files. `make gpu-status` names the test files that executed something which
has changed since, and `make gpu STALE=1` runs them again: the rows "again-1" and so on.
"""


def page(found: list[Evidence]) -> str:
    """The page of one chip's evidence: its parts, then the runs of files that were stale."""
    if not found:
        return f"{HEAD}\nNo evidence yet: run `make gpu` on an H100 or H200.\n"
    return "\n".join([HEAD, *_parts(found), *_failed(found), *_skipped(found), *_files(found)]) + "\n"


def _parts(found: list[Evidence]) -> list[str]:
    lines = [
        "| part | date (UTC) | passed | skipped | failed | not run | seconds | commit | machine |",
        "|---|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for each in found:
        counts = each["counts"]
        numbers = [f"{counts[name]:,}" for name in ("passed", "skipped", "failed", "unrun")]
        cells = [each["part"], each["date"][:16].replace("T", " "), *numbers, f"{each['seconds']:.0f}"]
        lines.append(_row([*cells, each["commit"] or "", _machine(each)]))
    return lines


def _machine(each: Evidence) -> str:
    env = each["env"]
    names = ("python", "torch", "triton", "cuda", "numpy", "transformers")
    versions = [f"{name} {env[name]}" for name in names if env.get(name)]
    return ", ".join([env["gpu"], f"driver {env['driver']}", *versions, f"{env['workers']} workers"])


def _failed(found: list[Evidence]) -> list[str]:
    failed = [[f"`{one['test']}`", one["when"], each["part"]] for each in found for one in each["failed"]]
    failed += [
        [f"`{test}`", "running when the run was cut", each["part"]]
        for each in found
        for test in each["unfinished"]
    ]
    return _table("Failed", ["test", "when", "part"], failed)


def _skipped(found: list[Evidence]) -> list[str]:
    reasons = Counter[str]()
    for each in found:
        reasons.update(each["skipped"])
    rows = sorted(reasons.items(), key=lambda row: (-row[1], row[0]))
    return _table("Skipped", ["tests", "reason"], [[f"{count:,}", reason] for reason, count in rows])


def _files(found: list[Evidence]) -> list[str]:
    newest = record.newest(found)
    files = [
        (path, facts, each["part"])
        for each in found
        for path, facts in each["files"].items()
        if facts["tests"] and newest[path] is each
    ]
    rows = [
        [f"`{path}`", f"{facts['tests']:,}", f"{facts['seconds']:.0f}", part] for path, facts, part in files
    ]
    slow = sorted(((took, test) for each in found for test, took in each["slow"].items()), reverse=True)
    slowest = [[f"`{test}`", f"{took:.0f}"] for took, test in slow[:SLOWEST]]
    return [
        *_table("Files", ["file", "tests", "seconds of all workers", "part"], rows),
        *_table("The slowest tests", ["test", "seconds"], slowest),
    ]


def _table(title: str, heads: list[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    return ["", f"## {title}", "", _row(heads), _row(["---"] * len(heads)), *map(_row, rows)]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
