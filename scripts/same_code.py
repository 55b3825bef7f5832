"""Keeps the records of kernels whose source has changed since a commit and whose machine code has not.

  same_code.py COMMIT     those that are stale, were fresh at COMMIT, and have the same code get today's hash

A device function may gain a branch that only some configs take: the others have the code that was measured. Every
config that a record has is compiled for sm_90a in both states, without a GPU: to PTX by Triton, to machine code by
NVRTC. Only device functions of the compiled kernel alone may differ, its .cu file, and its config's class as far as no
value of the config does but its texts and the constants that it compiles with. A record whose kernel differs in
anything else, such as a function of a launch before it, or cannot be compiled here, stays as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sparsek.core import env  # noqa: E402
from sparsek.engine import table  # noqa: E402
from sparsek.engine.launch import nvrtc  # noqa: E402
from sparsek_bench.engine import records, sources  # noqa: E402
from sparsek_bench.engine.bench import OPS  # noqa: E402
from tests.engine.launch import hopper_code  # noqa: E402

# Runs in either state: its own kernels, and its own tests' way to compile them. Prints the kernel's function, PTX, and
# the config's fields and properties.
COMPILE = """
import json, sys
from sparsek.engine import table
from sparsek.engine.launch.nvrtc import OPTIONS
from tests.engine.launch import hopper_code
from tests.products.kernels.spmm import hopper_24_code
source, entry = hopper_code.GluonASTSource, []
hopper_code.GluonASTSource = lambda kernel, *more, **named: (entry.append(kernel.fn), source(kernel, *more, **named))[1]
hopper_code._code = lambda kernel, log, reads_sass: kernel.asm["ptx"]
class Forgetful:
    get_file, put = lambda *_: None, lambda *_, **__: None
hopper_code.get_cache_manager = lambda key: Forgetful()
for line in sys.stdin:
    name, fields, dtype = json.loads(line)
    try:
        module = getattr(hopper_code, name.partition(".")[2], None) or sys.modules[type(table.load(name)).__module__]
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        made = module.Config(**given)
        if program := getattr(module, "PROGRAM", None):
            code, _ = hopper_24_code.disassembled(program.source, program.path.name, [*OPTIONS, *made.defines])
            function = f"{module.__name__}:{program.entry}"
        else:
            code = hopper_code.compiled(made, dtype, False)
            function = f"{entry[-1].__module__}:{entry[-1].__qualname__}"
        values = {key: getattr(made, key) for key in dir(made) if not key.startswith("_")}
        values = {key: repr(value) for key, value in values.items() if not callable(value)}
        found = [function, code, values]
    except Exception as error:
        print(f"{name} is not compiled here: {error!r}", file=sys.stderr)
        found = None
    print("found", json.dumps(found), flush=True)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", help="the state in which the records were fresh")
    parser.add_argument("--records", type=Path, default=Path(env.bench_records_dir()), help="their folder")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder)
        archive = ["git", "archive", "--output", f"{folder}/state.tar", given.commit, "sparsek", "tests"]
        subprocess.run(archive, cwd=ROOT, check=True)
        shutil.unpack_archive(before / "state.tar", before)
        for path in sorted(given.records.rglob("*.jsonl")):
            kept = records.read(path)
            count = keep(kept, before)
            if count:
                path.write_text("".join(json.dumps(each, allow_nan=False) + "\n" for each in kept), "utf-8")
                print(f"{path.name}: {count} records have the same machine code")
    return 0


def keep(kept: list[dict[str, Any]], before: Path) -> int:
    """Gives records today's hash where their code is that of the state in `before`; how many they are."""
    wanted = [each for each in kept if may_keep(each, before)]
    jobs = sorted({json.dumps(job) for each in wanted for job in jobs_of(each)})
    if not jobs:
        return 0
    old, new = (compiled(root, jobs) for root in (before, ROOT))
    same = {
        job for job in jobs if job in old and job in new and are_equal(old[job], new[job])
        and is_alone(job, new[job].entry, before)
    }  # fmt: skip
    found = [each for each in wanted if {json.dumps(job) for job in jobs_of(each)} <= same]
    for each in found:
        each["source_hash"] = records.hash_of(each["op"], each["kernel"])
    return len(found)


def may_keep(record: dict[str, Any], before: Path) -> bool:
    """Whether it is stale, was fresh then, and only device functions and configs of its kernels differ since."""
    kind, kernels = OPS[record["op"]], record["kernel"].split(sources.JOINED)
    if kind.hosted or records.is_fresh(record):
        return False
    names, then = sources.JOINED.join((*kernels, *kind.sources)), before / "sparsek"
    if record["source_hash"] != sources.source_hash(names, then):
        return False
    for name in kernels:
        roots, configs = (then, sources.ROOT), configs_of(name)
        old, new = (set(sources.counted(name, root)) for root in roots)
        # Device functions are known by their decorator.
        may_differ = {
            (each.partition(":")[2], text)
            for root in roots
            for each, text in sources.device_code(name, root)[1].items()
            if "attr='jit'" in text or each in configs
        }
        if not {each for each in old ^ new if each[0] not in included(name)} <= may_differ:
            return False
    return True


def module_of(kernel: str) -> Any:
    """The module that has a kernel's Config, and its PROGRAM if it is CUDA C++; None if it is not compiled here."""
    found = getattr(hopper_code, kernel.partition(".")[2], None)
    if found is None:
        found = sys.modules[type(table.load(kernel)).__module__]
        return found if hasattr(found, "PROGRAM") else None
    return found


def included(kernel: str) -> set[str]:
    """The names of the .cu files that a kernel is compiled from."""
    program = getattr(module_of(kernel), "PROGRAM", None)
    if program is None:
        return set()
    return {program.path.name, *nvrtc.INCLUDE.findall(program.path.read_text("utf-8"))}


def configs_of(kernel: str) -> set[str]:
    """The classes of a kernel's config and their properties, by module and name; none of kernels that are not compiled
    here.
    """
    module = module_of(kernel)
    classes = {} if module is None else {f"{c.__module__}:{c.__qualname__}": c for c in module.Config.__mro__}
    properties = {
        f"{name}.{key}"
        for name, each in classes.items()
        for key, member in vars(each).items()
        if isinstance(member, property)
    }
    return properties | classes.keys()


def are_equal(old: Compiled, new: Compiled) -> bool:
    """Whether two states compile one function to the same code, from configs without a value that differs.

    What reads a value that only one of them has is compiled, or is text that must not differ. Texts describe a config,
    and what `defines` has is compiled.
    """
    both = old.values.keys() & new.values.keys() - {"texts", "defines"}
    return (old.entry, old.code) == (new.entry, new.code) and all(
        old.values[each] == new.values[each] for each in both
    )


def jobs_of(record: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    """(kernel, config, dtype) of all that a record's call launches."""
    config, dtype = record["config"], record["case"]["dtype"]
    kernels = record["kernel"].split(sources.JOINED)
    if len(kernels) == 1:
        return [(kernels[0], config, dtype)]
    by_pass = {"attention_fwd": "forward", "attention_bwd": "backward"}
    return [(name, config.get(by_pass.get(name.partition(".")[2], name), {}), dtype) for name in kernels]


def is_alone(job: str, entry: str, before: Path) -> bool:
    """Whether what has changed of a kernel is compiled into its function `entry`, and into no other launch of it."""
    name = json.loads(job)[0]
    states = [sources.device_code(name, root) for root in (before / "sparsek", sources.ROOT)]
    texts = [each for _, each in states]
    configs = configs_of(name)  # whose values are compared
    changed = {
        each
        for each in {*texts[0], *texts[1]}
        if texts[0].get(each) != texts[1].get(each) and each not in configs
    }
    for tree, there in states:
        inside = reached(tree, entry)
        others = set[str]().union(*(reached(tree, each) for each in there if each not in inside))
        if not changed.intersection(there) <= inside or changed & others:
            return False
    return True


def reached(tree: Any, name: str) -> set[str]:
    """A definition and all that it refers to, directly or not."""
    found, todo = set[str](), [name]
    while todo:
        each = tree.definition(todo.pop())
        if each is not None and each.name not in found:
            found.add(each.name)
            todo += tree.references(each)
    return found


class Compiled(NamedTuple):
    """The function of a kernel, a hash of its code, and the values of its config."""

    entry: str
    code: str
    values: dict[str, str]


def compiled(root: Path, jobs: Sequence[str]) -> dict[str, Compiled]:
    """By job; without those that fail."""
    with tempfile.TemporaryDirectory() as cache:
        place = {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], cwd=root, input="\n".join(jobs), text=True, stdout=subprocess.PIPE,
            env=os.environ | place, check=True,
        )  # fmt: skip
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("found ")]
    pairs = zip(jobs, map(json.loads, lines), strict=True)
    return {job: Compiled(each[0], code_hash(each[1]), each[2]) for job, each in pairs if each is not None}


def code_hash(text: str) -> str:
    """A hash of PTX or of disassembled code: of PTX without comments, debug sections, and the lines of its source."""
    is_ptx = ".entry" in text
    lines = (
        line.split("//")[0].rstrip() for line in (text.split(".section")[0] if is_ptx else text).splitlines()
    )
    kept = [line for line in lines if line and not re.match(r"\s*\.(loc|file)\b|\s*\$L__tmp\d+:", line)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
