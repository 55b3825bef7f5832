"""The source of a measurement: a hash over the code that ran, without imports, comments, docstrings and layout.

Of a kernel in Triton, Gluon or CUDA C++ only what is compiled counts: the device functions that its host code
reaches, what these read, the constants of the functions that launch them, and the classes of SETTINGS. Planning and
predictions may change, and everything may move to other files, and its times still hold. Of other kernels it is their
host code in folders of kernels and of reference; of another module ("plan.matches"), the whole module.

Of a call whose host time is measured it is what one call executes (`executed_by`).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import sparsek
from sparsek.core.errors import InvalidInput
from sparsek_bench.engine.definitions import Definition, Tree, digest, dumped

ROOT = Path(sparsek.__file__).parent
RENAMED = {
    "matrix": ("formats",),
    "lang": ("launch",),
    "mask": ("build", "convert"),
}  # rooms, in records of before
JOINED = " + "
SETTINGS = ("Config", "Tile", "Pipeline")
# Kernels whose schedule is part of what is timed: it determines which sums their CTAs wait for.
SCHEDULES = {"hopper.attention_bwd": "sparsek.attn.plan.attention_grad_schedule"}
# The tables of kernels, whose modules stand beside them.
TABLES = ("products/kernels/__init__.py", "attn/kernels/__init__.py")
# Folders of kernels, and those whose host code is followed to device functions, and counts for kernels without any.
KERNELS = {"kernels", "launch"}
FOLLOWED = KERNELS | {"reference"}
# The launcher determines the host time of a call, not the time of a kernel: benchmarks of host time name it.
LAUNCHING = tuple(f"sparsek.engine.launch.{name}" for name in ("launch", "recorder", "shipped", "progress"))
# Members of a kernel that plan, and run before the time is taken.
PLANNING = ("why_not", "default", "configs", "seconds", "rank", "notes", "prepare")
COMPILED = ("hopper", "portable")
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_cooperative_grid", "launch_pdl")


def source_hash(kernel: str, root: Path = ROOT) -> str:
    """16 hex digits over the code of a kernel of the table, of a module by its last two names ("plan.matches",
    "pack.to_bsr"), or of several: "a.x + b.y". Raises InvalidInput for a name without a file.
    """
    return _own_hash(kernel) if root == ROOT else _hash(kernel, root)


def _hash(kernel: str, root: Path) -> str:
    parts = {part for name in kernel.split(JOINED) for part in counted(name, root)}
    return digest(*(f"{name}\0{text}" for name, text in sorted(parts)))


@lru_cache(maxsize=512)  # a page has many rows of one kernel
def _own_hash(kernel: str) -> str:
    return _hash(kernel, ROOT)


def counted(name: str, root: Path = ROOT) -> list[tuple[str, str]]:
    """Local names and texts of what counts for a kernel or module."""
    tree = _tree(root)
    module = _module_of(name, tree, root)
    if not KERNELS.intersection(module.split(".")[:-1]):
        return _whole(tree, module)
    work = _followed(tree, module)
    schedule = _whole(tree, SCHEDULES[name]) if name in SCHEDULES else []
    stem = module.rpartition(".")[2]
    if work.device or stem.startswith(COMPILED):
        return [*work.texts(), *schedule]
    return [*work.texts(), *work.host_texts()]


def device_code(name: str, root: Path) -> tuple[Tree, dict[str, str]]:
    """The tree of the sources, and by full name the texts of all that is compiled for a kernel of the table."""
    tree = _tree(root)
    work = _followed(tree, _module_of(name, tree, root))
    return tree, {each: tree.text(each) or "" for each in work.device}


def _followed(tree: Tree, module: str) -> _Followed:
    work = _Followed(tree)
    for each in _definitions(tree, module):
        work.host(each)
    work.finish()
    return work


def _tree(root: Path) -> Tree:
    return _own_tree() if root == ROOT else Tree(root.parent, (root.name,))


@lru_cache(maxsize=1)
def _own_tree() -> Tree:
    return Tree(ROOT.parent, (ROOT.name,))


def _module_of(name: str, tree: Tree, root: Path) -> str:
    place = _modules(root).get(name, "")
    if place in tree.paths:
        return place
    room, _, module = name.rpartition(".")
    ends = tuple(f".{each}.{module}" for each in (room, *RENAMED.get(room, ())))
    found = sorted((each for each in tree.paths if each.endswith(ends)), key=len)
    if not found:
        raise InvalidInput(f"no source file in {root} for a kernel called {name!r}")
    return found[0]


def _modules(root: Path) -> dict[str, str]:
    """From names of kernels to their modules, as in their tables, which are not imported."""
    found: dict[str, str] = {}
    for table in (root / path for path in TABLES):
        room = ".".join(table.parent.relative_to(root.parent).parts)
        tree = ast.parse(table.read_text(encoding="utf-8")) if table.is_file() else ast.Module([], [])
        for rows in (each.value for each in tree.body if isinstance(each, ast.AnnAssign) and each.value):
            found |= {name: f"{room}.{module}" for _, name, module, _ in ast.literal_eval(rows)}
    return found


def _definitions(tree: Tree, module: str) -> list[Definition]:
    found = tree.module(module)
    return list(found.definitions.values()) if found else []


def _whole(tree: Tree, module: str) -> list[tuple[str, str]]:
    return [(each.local, tree.text(each.name) or "") for each in _definitions(tree, module)]


class _Followed:
    """The host code that a kernel reaches, and what is compiled."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.seen: dict[str, Definition] = {}
        self.device: dict[str, Definition] = {}
        self.files: set[str] = set()
        self.options: set[tuple[str, str]] = set()  # of launches: warps, stages
        self.mentioned: set[str] = set()  # attributes, by what is compiled and what launches it

    def host(self, each: Definition) -> None:
        """Follows host code, and compiles what it launches, with its own constants."""
        if each.name in self.seen or each.local.rpartition(".")[2] in PLANNING:
            return
        if each.device:
            self.compile(each)
            return
        self.seen[each.name] = each
        files = self.tree.files(each)
        self.files |= files
        targets = list(self._targets(each))
        launches = bool(files) or any(one.device or one.module in LAUNCHING for one in targets)
        if launches:
            self.mentioned |= each.mentioned
            self.options |= {(each.local, text) for text in _options(each)}
        if files:  # CUDA C++, compiled with the `defines` of the config beside it
            self.mentioned.add("defines")
        settings = {self.tree.resolve(each.module, name) for name in SETTINGS} - {""}
        for config in filter(None, map(self.tree.definition, sorted(settings))):
            self.compile(config)
        if each.kind == "class":
            for member in self._members(each):
                self.host(member)
        for target in targets:
            if target.device or (launches and target.kind == "constant"):
                self.compile(target)
            if FOLLOWED.intersection(target.module.split(".")[:-1]) and target.module not in LAUNCHING:
                self.host(target)

    def compile(self, each: Definition) -> None:
        """Counts what is compiled: a device function or a constant, and everything that it reads."""
        if each.name in self.device or each.local == "KERNEL":
            return
        self.device[each.name] = each
        self.files |= self.tree.files(each)
        self.mentioned |= each.mentioned
        for target in self._targets(each):
            if target.module not in LAUNCHING:
                self.compile(target)

    def finish(self) -> None:
        """Compiles the properties of settings that are mentioned: they are constants of the kernel."""
        known = -1
        while len(self.mentioned) != known:
            known = len(self.mentioned)
            for each in [one for one in self.device.values() if one.kind == "class"]:
                for member in self._members(each):
                    if member.local.rpartition(".")[2] in self.mentioned - set(PLANNING):
                        self.compile(member)

    def _members(self, each: Definition) -> list[Definition]:
        module = self.tree.module(each.module)
        members = sorted(module.members(each.local)) if module else []
        return [module.definitions[f"{each.local}.{name}"] for name in members] if module else []

    def _targets(self, each: Definition) -> Iterator[Definition]:
        for name in sorted(self.tree.references(each)):
            target = self.tree.definition(name)
            if target is not None:
                yield target

    def texts(self) -> list[tuple[str, str]]:
        """What is compiled."""
        files = [(Path(path).name, self.tree.text_of_file(path)) for path in self.files]
        outside = sorted({name for each in self.device.values() for name in self.tree.outside(each)})
        own = [(each.local, self.tree.text(name) or "") for name, each in self.device.items()]
        return [*own, *files, *self.options, *[("libraries", " ".join(outside))] * bool(outside)]

    def host_texts(self) -> list[tuple[str, str]]:
        """The host code that was followed."""
        return [(each.local, self.tree.text(name) or "") for name, each in self.seen.items()]


def _options(each: Definition) -> Iterator[str]:
    """The options of launches in host code: num_warps=4."""
    calls = (one for node in each.nodes for one in ast.walk(node) if isinstance(one, ast.Call))
    for keyword in (one for call in calls for one in call.keywords):
        if keyword.arg in OPTIONS:
            yield f"{keyword.arg}={dumped(keyword.value)}"


def files_hash(files: Iterable[Path], root: Path) -> str:
    """16 hex digits of the SHA-256 over whole files, host code too: their paths below `root` and their contents; for
    Python and CUDA C++ without comments, docstrings and layout.
    """
    tree = Tree(root, ())
    short = (file.relative_to(root).as_posix() for file in sorted(files))
    return digest(*(f"{path}\0{tree.text_of_file(path)}" for path in short))


def executed_by(call: Callable[[], Any]) -> list[str]:
    """The names of the functions of sparsek that begin during a call, sorted.

    In threads of autograd's engine they are seen from Python 3.12 on.
    """
    codes: set[tuple[str, int]] = set()
    with _noting(lambda code: codes.add((code.co_filename, code.co_firstlineno))):
        call()
    tree = _own_tree()
    modules = {str(path): name for name, path in tree.paths.items()}
    found = set()
    for path, row in codes:
        module = tree.module(modules[path]) if path in modules else None
        each = module.at(row) if module else None
        found |= {each.name} if each and each.kind == "function" else set()
    return sorted(found)


@contextmanager
def _noting(note: Callable[[CodeType], Any]) -> Iterator[None]:
    if sys.version_info < (3, 12):
        before = sys.getprofile()
        sys.setprofile(lambda frame, event, _: note(frame.f_code) if event == "call" else None)
        try:
            yield
        finally:
            sys.setprofile(before)
        return
    tool, begin = sys.monitoring, sys.monitoring.events.PY_START

    def began(code: CodeType, _: int) -> Any:
        note(code)
        return tool.DISABLE

    tool.use_tool_id(tool.PROFILER_ID, "sparsek")
    try:
        tool.register_callback(tool.PROFILER_ID, begin, began)
        tool.restart_events()
        tool.set_events(tool.PROFILER_ID, begin)
        yield
    finally:
        tool.set_events(tool.PROFILER_ID, 0)
        tool.free_tool_id(tool.PROFILER_ID)


def names_hash(names: Iterable[str], root: Path = ROOT) -> str:
    """16 hex digits over functions by name, and the constants that they read. A function that has moved is found by
    its local name; one that is gone raises InvalidInput.
    """
    tree = _tree(root)
    parts = set()
    for name in names:
        each = tree.definition(name) or _moved(tree, name)
        if each is None:
            raise InvalidInput(f"{name} is gone")
        parts.add((each.local, tree.text(each.name) or ""))
        targets = (tree.definition(other) for other in tree.references(each))
        parts |= {(one.local, tree.text(one.name) or "") for one in targets if one and one.kind == "constant"}
    return digest(*(f"{name}\0{text}" for name, text in sorted(parts)))


def _moved(tree: Tree, name: str) -> Definition | None:
    """The one definition with this local name."""
    local = name.partition(":")[2]
    same = [names for (known, _), names in tree.by_text.items() if known == local]
    flat = [each for names in same for each in names]
    return tree.definition(flat[0]) if len(flat) == 1 else None


@lru_cache(maxsize=256)
def imports(source: str) -> list[str]:
    """Dotted names that a source file imports; `from a import b` gives both a and a.b."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
