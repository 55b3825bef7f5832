"""Runs the tests marked `gpu` in parts, and reports the state of their evidence.

  gpu.py run            every part, one after the other
  gpu.py run 2/3        one part; its evidence goes to benchmarks/evidence/<chip>/2-of-3.json
  gpu.py run --stale    the test files that are not fresh: what they executed has changed, or they are new or red
  gpu.py run PATHS...   these test files; arguments after `--` go to pytest; evidence only with --out
  gpu.py status         each part: fresh, stale, red or missing, and its files that are not fresh; exit status 0 if
                        all are fresh
  gpu.py page           writes docs/gpu-test-log.md from the evidence
  gpu.py recover FILE   completes the evidence of a run that was killed, of the files that ran whole, by the folder
                        of its trace beside it, in the same sources

The machine with the GPU needs pytest and xdist as well as sparsek's own requirements, and neither .venv nor .git.
Environment: SPARSEK_EVIDENCE, the folder for evidence, as --out.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.evidence import page, parts, record  # noqa: E402

EVIDENCE = ROOT / "benchmarks" / "evidence"
# The chip whose evidence counts.
CHIP = "hopper"
# Number of parts without evidence: each should end within nine minutes.
PARTS = 3
WORKERS = max(1, min(14, (os.cpu_count() or 1) - 2))


def main() -> int:
    arguments, rest = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run tests")
    run.add_argument("what", nargs="*", help="n/m, or test files; nothing for all parts")
    run.add_argument("--python", default=sys.executable, help="the Python that runs pytest")
    run.add_argument("--workers", type=int, default=WORKERS, help=f"processes, {WORKERS} here by default")
    run.add_argument("--out", help="folder for evidence, benchmarks/evidence by default")
    run.add_argument("--recut", action="store_true", help="cut anew, by the seconds of the evidence there is")
    run.add_argument(
        "--seconds", type=float, help="begin no test after these: evidence is of files that ran whole"
    )
    run.add_argument("--stale", action="store_true", help="only test files that are not fresh")
    commands.add_parser("status", help="what the evidence is worth")
    commands.add_parser("page", help="write docs/gpu-test-log.md")
    recover = commands.add_parser(
        "recover", help="complete the evidence of a run that was killed, by its trace"
    )
    recover.add_argument("evidence", type=Path, help="again-7.json, with the folder again-7.trace beside it")
    given = parser.parse_args(arguments)
    try:
        if given.command == "status":
            return status()
        if given.command == "page":
            (ROOT / page.PAGE).write_text(page.page(record.read(EVIDENCE / CHIP)), encoding="utf-8")
            return 0
        if given.command == "recover":
            from tests.evidence import plugin  # needs pytest

            plugin.recover(given.evidence)
            return 0
        return Run(given, rest).all()
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2


def _split(arguments: "list[str]") -> "tuple[list[str], list[str]]":
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def status() -> int:
    from tests.evidence import status  # needs sparsek, and so torch

    found = status.statuses(ROOT, record.read(EVIDENCE / CHIP), PARTS)
    for each in found:
        print("\n".join(each.lines()))
    print(status.closing(found))
    return 0 if all(each.word == "fresh" for each in found) else 1


class Run:
    """One call of `gpu.py run`."""

    def __init__(self, given: argparse.Namespace, rest: "list[str]") -> None:
        self.given = given
        self.rest = rest
        self.out = given.out or os.environ.get("SPARSEK_EVIDENCE")
        self.found = record.read(EVIDENCE / CHIP)
        self.known = record.parts_in(self.found)

    def all(self) -> int:
        what = self.given.what
        if shutil.which("nvidia-smi"):  # shipped kernels are tested, if this Triton can launch them
            path = os.environ | {"PYTHONPATH": str(ROOT)}
            subprocess.run([self.given.python, "scripts/cubins.py"], check=False, cwd=ROOT, env=path)
        if self.given.stale:
            return self.again()
        if not what:
            count = record.number_of_parts(self.known) or PARTS
            cuts = self.cuts(count)
            codes = [self.part(number, count, cuts) for number in range(1, count + 1)]
            return 1 if any(codes) else 0  # a code below 0: killed by a signal
        absent = [each for each in what if not (ROOT / each.split("::")[0]).exists()]
        if absent:
            parts.numbers(absent[0])  # raises, with an explanation of parts, for all but parts
        if parts.PART.fullmatch(what[0]):
            if what[1:]:
                raise ValueError(f"one part at a time, or all of them: {' '.join(what)}")
            number, count = parts.numbers(what[0])
            return self.part(number, count, self.cuts(count))
        out = ["--evidence", str(Path(self.out).resolve())] if self.out else []
        return self.pytest([*out, *what])

    def again(self) -> int:
        from tests.evidence import status  # needs sparsek, and so torch

        if self.given.what or self.rest:
            raise ValueError("--stale names the test files itself")
        files = status.to_run(ROOT, self.found)
        if not files:
            print("every test file is fresh")
            return 0
        print(f"{len(files)} files: {files[0]} to {files[-1]}", flush=True)
        return self.with_evidence(record.next_again(self.found), [], files)

    def part(self, number: int, count: int, cuts: "list[str]") -> int:
        files = parts.files_of(number, cuts, parts.test_files(ROOT))
        if self.rest:
            raise ValueError(f"a part runs whole, so its evidence can hold: leave {' '.join(self.rest)} away")
        print(f"part {number}/{count}: {files[0]} to {files[-1]}", flush=True)
        return self.with_evidence(f"{number}/{count}", cuts, files)

    def with_evidence(self, part: str, cuts: "list[str]", files: "list[str]") -> int:
        if not self.out and shutil.which("nvidia-smi") is None:
            raise ValueError(
                "no NVIDIA GPU here, so every test would be skipped; --out FOLDER does that all the same"
            )
        out = Path(self.out or EVIDENCE).resolve()
        of_part = ["--evidence", str(out), "--part", part, "--cuts", ",".join(cuts)]
        of_part += ["--seconds", str(self.given.seconds)] if self.given.seconds else []
        # A file that cannot be collected is a failure in addition to the others' results, not in their place.
        return self.pytest([*of_part, "--continue-on-collection-errors", *files])

    def pytest(self, arguments: "list[str]") -> int:
        # In batches: a worker that is given a 60th of all at the start may hold a minute's test back to the end.
        spread = ["-n", str(self.given.workers), "--maxschedchunk", "8"]
        of_run = ["-p", "xdist", "-p", "tests.evidence.plugin", *spread]
        return self._call([*of_run, "--known", str(EVIDENCE / CHIP), *arguments, *self.rest]).returncode

    def cuts(self, count: int) -> "list[str]":
        """The first files of parts 2 to `count`: as in the newest evidence, else by measured or assumed seconds.

        They are computed anew once a file that began a part has moved or been removed.
        """
        held = record.cuts_for(count, self.known)
        stands = held is not None and all((ROOT / path).exists() for path in held)
        if held is not None and stands and not self.given.recut:
            return held
        if count == 1:
            return []
        found = self._call(["-p", "xdist", "--collect-only", "-q", "tests"], capture=True).stdout
        tests = Counter(
            parts.file_of(line) for line in found.splitlines() if line.startswith("tests/") and "::" in line
        )
        known = parts.known(self.found)
        return parts.cut({path: known.of_file(path, number) for path, number in tests.items()}, count)

    def _call(self, arguments: "list[str]", *, capture: bool = False) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Plugins that happen to be installed are not used.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
        command = [self.given.python, "-m", "pytest", "-m", "gpu", *arguments]
        return subprocess.run(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE if capture else None
        )


if __name__ == "__main__":
    sys.exit(main())
