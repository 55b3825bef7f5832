"""What each test file executed, as definitions with hashes of their sources, and which of these have changed since.

A run is traced (`trace.py`). To the functions that ran belong: constants and classes that they read, device functions
that they launch with all that these read, the other statements of their modules and what ran while these were
imported, and files of data and CUDA C++. Of a class that is read, the names of its members count as far as the code
that ran mentions them, so a new override makes stale what would meet it. Of code under torch.compile, which traces
functions without running them, everything counts that the functions could reach by name.

Choices of kernels count by their outcome: if code that only chooses has changed, every problem of the run is decided
anew for the card of the run.
"""

from __future__ import annotations

import ast
import base64
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from sparsek_bench.engine.definitions import Definition, Tree, digest, dumped
from tests.evidence import trace

PACKAGES = ("sparsek", "sparsek_bench", "tests", "scripts")
# Here a function that ran for one test file fills caches for all: all of a module counts that ran for any file.
SHARED = ("sparsek.engine.launch", "sparsek.core", "sparsek.integrations", "sparsek_bench")
CACHES = ("dict", "set", "list", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "Calls", "local")
TABLE = "sparsek.kernels:KERNELS"  # counts by the rows of the operations that a file planned
TABLES = ("sparsek.products.kernels:KERNELS", "sparsek.attn.kernels:KERNELS")
READS_TABLE = "sparsek.engine.table:"
CHOICE = "choice"
EVERYTHING = "all:sparsek"
# What reads sources, for records and for this: it computes no result.
READERS = ("sparsek_bench.engine.sources", "sparsek_bench.engine.definitions", "tests.evidence.")
ASIDE = ("sparsek_bench", "sparsek.tools.cli")  # of no process that a test of kernels starts
PLAIN = ("file:", "all:")  # keys that are no definitions
# Members that Python calls itself.
SPECIAL = ("__", "_missing_", "_generate_next_value_")


@dataclass
class Ran:
    """What ran under one label: names of definitions, files of data, choices, and what could not be traced."""

    definitions: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    choices: list[dict[str, Any]] = field(default_factory=list)
    untraced: bool = False  # a Python process that it started did not trace itself
    compiled: bool = False


@dataclass
class Code:
    """What one test file depends on: keys of definitions and files, and mentioned members of classes, as a hash."""

    keys: set[str]
    members: str
    choices: list[dict[str, Any]]


def only(path: str) -> Code:
    """Of a test file that has no test for the GPU: the file itself."""
    return Code({f"file:{path}"}, digest(), [])


def read(folder: Path, tree: Tree) -> dict[str, Ran]:
    """What ran, by label, from the files of a trace."""
    modules = {path.relative_to(tree.root).as_posix(): name for name, path in tree.paths.items()}
    found: defaultdict[str, Ran] = defaultdict(Ran)
    started, traced = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for file in sorted(folder.glob("*.trace")):
        for line in file.read_text(encoding="utf-8").splitlines():
            what, label, *rest = line.split("\t")
            here = found[label]
            if what == "ran":
                module = modules.get(rest[0])
                each = module and tree.module(module)
                definition = each.at(int(rest[1])) if each else None
                if definition is not None:
                    here.definitions.add(definition.name)
            elif what == "opened":
                here.files.add(rest[0])
            elif what == "chose":
                choice = json.loads(rest[0])
                if choice not in here.choices:
                    here.choices.append(choice)
            elif what == "compiled":
                here.compiled = True
            elif what == "child":
                started[label, rest[0]] += 1
            else:
                for given in set(rest):
                    traced[label, given] += 1
    for (label, given), count in started.items():
        found[label].untraced |= count > traced[label, given]
    return dict(found)


class Closure:
    """From what ran to what it depends on, in one tree."""

    def __init__(self, tree: Tree, ran: Mapping[str, Ran]) -> None:
        self.tree, self.ran = tree, ran
        self.by_module: defaultdict[str, set[str]] = defaultdict(set)
        for each in ran.values():
            for name in each.definitions:
                self.by_module[name.partition(":")[0]].add(name)

    def of(self, label: str) -> Code:
        """What a test file, or the choice of kernels, depends on."""
        own = self.ran.get(label, Ran())
        work = _Work(self, own.compiled)
        work.files |= own.files
        if label != CHOICE:
            work.files.add(label)
            work.add(self._of_file(label))
        work.add(own.definitions)
        work.finish()
        if own.choices:  # a kernel's reasons are no prediction: tests read them
            reasons = _Work(self, compiled=True)
            reasons.add(self._reasons({choice["op"] for choice in own.choices}))
            reasons.finish()
            work.found |= reasons.found
            work.files |= reasons.files
        keys = work.found | {f"file:{path}" for path in work.files}
        if any(key.startswith(READS_TABLE) for key in keys):
            # A choice is made again, and its outcome compared.
            ops = {choice["op"] for choice in own.choices}
            keys |= {f"{TABLE}#{op}" for op in ops or ([] if label == CHOICE else [""])}
        if own.untraced:
            keys.add(EVERYTHING)
        return Code(keys, members(self.tree, keys), own.choices)

    def _of_file(self, path: str) -> set[str]:
        """What a test file reads itself, and the conftest.py files above it."""
        modules = [path]
        for folder in Path(path).parents:
            modules.append((folder / "conftest.py").as_posix())
        names = {file.relative_to(self.tree.root).as_posix(): name for name, file in self.tree.paths.items()}
        found: set[str] = set()
        for each in modules:
            module = self.tree.module(names[each]) if each in names else None
            if module:
                found |= {one.name for one in module.definitions.values()}
        return found

    def _reasons(self, ops: set[str]) -> set[str]:
        """The `why_not` of the kernels that were asked, of these operations."""
        of_op = {
            f"{room}.{ast.literal_eval(row)[2]}"
            for room, row in _rows(self.tree)
            if ast.literal_eval(row)[0] in ops
        }
        asked = self.ran.get(CHOICE, Ran()).definitions
        return {name for name in asked if name.endswith("why_not") and name.partition(":")[0] in of_op}

    @cached_property
    def shared(self) -> set[str]:
        """The modules whose caches outlive a test file."""
        found = {name for name in self.by_module if name.startswith(SHARED)}
        for name in self.by_module.keys() - found:
            module = self.tree.module(name)
            values = [
                getattr(node, "value", None)
                for each in (module.definitions.values() if module else ())
                if each.kind == "constant" and "." not in each.local
                for node in each.nodes
            ]
            if any(map(_is_cache, values)):
                found.add(name)
        return found


def _is_cache(value: ast.expr | None) -> bool:
    """Whether a constant begins empty, so that calls fill it."""
    if isinstance(value, ast.Call) and not value.args:
        name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return name in CACHES
    return (isinstance(value, ast.Dict) and not value.keys) or (
        isinstance(value, ast.List) and not value.elts
    )


class _Work:
    """The growing set of what one label depends on."""

    def __init__(self, closure: Closure, compiled: bool) -> None:
        self.closure, self.tree, self.compiled = closure, closure.tree, compiled
        self.found: set[str] = set()
        self.done: set[str] = set()
        self.classes: set[str] = set()
        self.mentioned: set[str] = set()
        self.files: set[str] = set()
        self.modules: set[str] = set()
        self.waiting: list[str] = []

    def add(self, names: Iterable[str]) -> None:
        self.waiting += [name for name in names if name not in self.done]

    def finish(self) -> None:
        """Follows everything, until no member of a class is mentioned anew."""
        known = -1
        while self.waiting or len(self.mentioned) != known:
            known = len(self.mentioned)
            while self.waiting:
                self._follow(self.waiting.pop())
            for name in self.classes:
                module, members = self._members(name)
                for member in members & self.mentioned if module else ():
                    each = module.definitions[f"{name.partition(':')[2]}.{member}"]
                    if each.kind == "constant" or self.compiled:
                        self.add([each.name])

    def _members(self, name: str) -> tuple[Any, set[str]]:
        module = self.tree.module(name.partition(":")[0])
        return module, module.members(name.partition(":")[2]) if module else set()

    def _follow(self, name: str) -> None:
        each = self.tree.definition(name)
        if each is None or name in self.done or name.startswith(READERS):
            return
        self.done.add(name)
        self.found.add(name)
        self._touch(each)
        self.mentioned |= each.mentioned
        self.files |= self.tree.files(each)
        owner = name.rpartition(".")[0] if "." in each.local else ""
        if owner and (above := self.tree.definition(owner)) and above.kind == "class":
            self.add([owner])
        if each.kind == "class":
            self.classes.add(name)
        for other in self.tree.references(each):
            target = self.tree.definition(other)
            if target and (target.kind in ("class", "constant") or target.device or self.compiled):
                self.add([other])

    def _touch(self, each: Definition) -> None:
        """Adds what ran when the module was imported, its other statements, and what shares its caches."""
        if each.module in self.modules:
            return
        self.modules.add(each.module)
        path = self.tree.paths[each.module].relative_to(self.tree.root).as_posix()
        imported = self.closure.ran.get(f"import:{path}", Ran())
        self.files |= imported.files
        self.add(imported.definitions)
        self.found.add(f"{each.module}:")
        self.add([f"{each.module}:"] if self.tree.definition(f"{each.module}:") else [])
        if each.module in self.closure.shared:
            self.add(self.closure.by_module[each.module])


def members(tree: Tree, keys: Iterable[str], places: Mapping[str, str] | None = None) -> str:
    """A hash of those members of the classes among the keys that the other keys mention, or that Python calls.

    `places`: where definitions stand now that have moved.
    """
    mentioned: set[str] = set()
    classes: list[str] = []
    for key in keys:
        name = (places or {}).get(key, key)
        each = None if key.startswith(PLAIN) or "#" in key else tree.definition(name)
        if each is not None:
            mentioned |= each.mentioned
            classes += [name] if each.kind == "class" else []
    prefixes = tuple(
        each for each in mentioned if each.endswith("_") and len(each) > 2
    )  # of getattr(self, "on_" + x)
    rows = []
    for name in classes:
        module, _, local = name.partition(":")
        here = tree.module(module)
        every = tree.is_open(name)  # torch calls _apply of a module, and vmap of a function
        kept = sorted(
            each
            for each in (here.members(local) if here else ())
            if every or each in mentioned or each.startswith((*SPECIAL, *prefixes))
        )
        rows.append(f"{local} {' '.join(kept)}")
    return digest(*sorted(rows))


class Hashes:
    """The hashes of keys in one tree. `names`: the names that definitions had before they moved."""

    def __init__(self, tree: Tree, names: Mapping[str, str] | None = None) -> None:
        self.tree, self.names = tree, names or {}
        self.places = {old: new for new, old in self.names.items()}
        self.kept: dict[str, str] = {}

    def __call__(self, key: str) -> str:
        """16 hex digits, 8 of the text and 8 of what it refers to; "" for a key that is gone."""
        if key not in self.kept:
            self.kept[key] = self._of(key)
        return self.kept[key]

    def _of(self, key: str) -> str:
        if key.startswith("file:"):
            text = self.tree.text_of_file(key.removeprefix("file:"))
            return digest(text) if text else ""
        if key == EVERYTHING:
            names = (name for name in self.tree.paths if name.startswith("sparsek"))
            counted = sorted(name for name in names if not name.startswith((*READERS, *ASIDE)))
            paths = [self.tree.paths[name] for name in counted]
            return digest(
                *(self.tree.text_of_file(path.relative_to(self.tree.root).as_posix()) for path in paths)
            )
        if key.startswith(f"{TABLE}#"):
            return digest(*self._rows(key.partition("#")[2]))
        place = self.places.get(key, key)
        text, each = self.tree.text(place), self.tree.definition(place)
        if place.endswith(":"):  # a module that only defines may get its first other statement
            module = place[:-1]
            if module not in self.tree.paths:
                return ""
            text = " ".join([*sorted(self.tree.imported_bodies(module)), text or ""])
        if text is None:
            return ""
        referred = sorted(self.names.get(name, name) for name in self.tree.references(each)) if each else []
        outside = sorted(self.tree.outside(each)) if each else []
        return digest(text)[:8] + digest(*referred, *outside)[:8]

    def _rows(self, op: str) -> list[str]:
        """The rows of the kernels' table for one operation; the whole table for ""."""
        rows = [row for _, row in _rows(self.tree)]
        return [dumped(row) for row in rows if not op or dumped(row.elts[0]) == repr(op)]


def _rows(tree: Tree) -> list[tuple[str, Any]]:
    """The rows of the kernels' tables, each with the package of its kernel's module."""
    found = []
    for each in filter(None, map(tree.definition, TABLES)):
        room = (
            each.module if tree.paths[each.module].name == "__init__.py" else each.module.rpartition(".")[0]
        )
        for node in each.nodes:
            found += [(room, row) for row in getattr(getattr(node, "value", None), "elts", ())]
    return found


def pack(tree: Tree, codes: Mapping[str, Code], choosing: Code) -> str:
    """The `executed` text of evidence."""
    hashes = Hashes(tree)
    used = set().union(choosing.keys, *(code.keys for code in codes.values()))
    referred = {
        other
        for key in used
        if not key.startswith(PLAIN) and (each := tree.definition(key)) is not None
        for other in tree.references(each)
    }
    keys = sorted(used | referred)
    choices = {json.dumps(each, sort_keys=True): None for code in codes.values() for each in code.choices}
    place = {text: number for number, text in enumerate(choices)}
    number = {key: index for index, key in enumerate(keys)}

    def row(code: Code) -> list[Any]:
        bits = sum(1 << number[key] for key in code.keys)
        chosen = sorted({place[json.dumps(each, sort_keys=True)] for each in code.choices})
        return [format(bits, "x"), code.members, chosen]

    held = {
        "keys": {key: hashes(key) for key in keys},
        "choices": list(choices),
        "files": {path: row(code) for path, code in codes.items()},
        "choosing": row(choosing),
    }
    return base64.b85encode(zlib.compress(json.dumps(held).encode(), 9)).decode()


class Executed:
    """What the test files of one run executed, and what has changed since."""

    def __init__(self, text: str) -> None:
        held = json.loads(zlib.decompress(base64.b85decode(text)))
        self.hashes: dict[str, str] = held["keys"]
        self.choices: list[dict[str, Any]] = [json.loads(each) for each in held["choices"]]
        self.rows: dict[str, list[Any]] = held["files"]
        self.choosing: list[Any] = held["choosing"]
        self.keys = list(self.hashes)

    def keys_of(self, row: list[Any]) -> Iterator[str]:
        """The keys of a file's row."""
        bits = int(row[0], 16)
        for number, key in enumerate(self.keys):
            if bits >> number & 1:
                yield key

    def changes(self, tree: Tree) -> dict[str, list[str]]:
        """By test file, why it is stale in this tree; [] for a fresh one."""
        hashes = Hashes(tree, self._moved(tree))
        changed = {key for key in self.keys if hashes(key) != self.hashes[key]}
        planned: dict[int, str] | None = None
        found: dict[str, list[str]] = {}
        for path, row in self.rows.items():
            keys = list(self.keys_of(row))
            lines = [_line(key, hashes(key)) for key in keys if key in changed]
            if not lines and members(tree, keys, hashes.places) != row[1]:
                lines = ["a class that it uses has other members that it calls"]
            if not lines and row[2]:
                if planned is None:
                    planned = self._planned(changed, hashes)
                lines = [planned[number] for number in row[2] if number in planned]
            found[path] = lines
        return found

    def _moved(self, tree: Tree) -> dict[str, str]:
        """Of definitions that stand elsewhere now with the same text: their name today, and then."""
        found: dict[str, str] = {}
        homes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for key, then in self.hashes.items():
            if key.startswith(PLAIN) or "#" in key or key.endswith(":") or tree.definition(key) is not None:
                continue
            local = key.partition(":")[2]
            same = [
                name
                for (known, text), names in tree.by_text.items()
                if known == local and text[:8] == then[:8]
                for name in names
                if name not in self.hashes
            ]
            if len(same) == 1:
                found[same[0]] = key
                homes[key.partition(":")[0]][same[0].partition(":")[0]] += 1
        for module, places in homes.items():
            if module not in tree.paths and f"{module}:" in self.hashes:
                found[f"{places.most_common(1)[0][0]}:"] = f"{module}:"
        return found

    def _planned(self, changed: set[str], hashes: Hashes) -> dict[int, str]:
        """The choices that differ today, if code that chooses has changed."""
        if not any(key in changed for key in self.keys_of(self.choosing)) and not any(
            key.startswith(f"{TABLE}#") for key in changed
        ):
            return {}
        homes = {old: new for new, old in hashes.names.items()}
        found: dict[int, str] = {}
        for number, choice in enumerate(self.choices):
            then = choice["outcome"]
            try:
                problem = trace.decoded(choice["problem"], lambda name: homes.get(name, name))
                now = trace.decided(problem, choice["only"])["outcome"]
            except Exception as error:  # of a problem with other fields, or of a card that is gone
                found[number] = f"a problem of it cannot be posed any more: {error!r}"
                continue
            if now != then:
                before, after = (" ".join(each) if each else "no kernel" for each in (then, now))
                found[number] = (
                    f"{choice['problem'].get('$class', '').rpartition(':')[2]}: {before} is {after} now"
                )
        return found


def _line(key: str, now: str) -> str:
    if key == EVERYTHING:
        return "a process that it started was not traced, and sparsek has changed"
    name = key.removeprefix("file:")
    return f"{name} {'has changed' if now else 'is gone'}"
