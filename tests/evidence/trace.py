"""What test files execute: functions, data files, and the problems for which a kernel was chosen.

Every process of a run writes lines to a file of its own, at once, so that one that is killed loses nothing:

  ran <label> <file> <row>    a function began; row: the first of its source
  opened <label> <file>       a file that is no Python source was opened for reading
  child <label> <arguments>   a Python process was started
  traced <label> <arguments> <arguments but the first>   one has begun to trace
  compiled <label>            torch.compile traced something, of which no function begins
  chose <label> <json>        a problem, the kernel that was named or null, and the choice of kernel and config

The label is a test file; "import:<file>" while that module is imported; "choice" while a kernel is chosen, since a
choice counts by its outcome. Only files below the root count. Standard library only, as children load this first.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import shutil
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

FOLDER, LABEL = "SPARSEK_TRACE", "SPARSEK_TRACE_LABEL"
ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).resolve().parent / "child"
FOLLOWED = ("sparsek/", "sparsek_bench/", "tests/", "scripts/")
OWN = "tests/evidence/"  # this tool
CHOOSES = ("sparsek/engine/planning.py", "_decide")
DYNAMO = "/torch/_dynamo/convert_frame.py"
# Made from sources that are traced, or written by the run itself.
DERIVED = (".py", ".pyc", ".so", ".json.new", ".zip", ".lock", ".tmp")
UNUSED = ("build/", ".", "benchmarks/evidence/", "tests/evidence/")
# Caches of these rooms hold compiled code and handles; what fills them is attributed by `executed.py`.
KEPT = ("sparsek.engine.launch", "sparsek.core", "sparsek.integrations", "sparsek_bench")
TOOL = 4


class Trace:
    """The tracing of this process."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder, self.root = folder, f"{root}{os.sep}"
        self.label = os.environ.get(LABEL, "")
        self.seen: set[tuple[str, str, int]] = set()
        self.shorts: dict[str, str] = {}
        self.stacks: dict[int, list[tuple[CodeType, str]]] = {}
        self.choices: list[tuple[str, Any, str | None]] = []
        self.pid = self.out = -1
        self.paused = False

    def start(self) -> None:
        """Begins. Children of this process trace too."""
        os.environ.update(environment(self.folder))
        sys.addaudithook(self._audit)
        if sys.version_info >= (3, 12):
            tool = sys.monitoring
            tool.use_tool_id(TOOL, "sparsek evidence")
            tool.register_callback(TOOL, tool.events.PY_START, self._monitored)
            tool.register_callback(TOOL, tool.events.PY_RETURN, self._ended)
            tool.register_callback(TOOL, tool.events.PY_UNWIND, self._ended)
            tool.set_events(TOOL, tool.events.PY_START)
        else:
            threading.setprofile(self._profiled)
            sys.setprofile(self._profiled)

    def arrived(self) -> None:
        """Says that this process, which another started, is traced."""
        # A script's own line names the interpreter before it.
        self._write("traced", self.label, shown(sys.orig_argv[1:]), shown(sys.orig_argv[2:]))

    def to(self, label: str) -> None:
        """What begins from here on belongs to this label. Caches are emptied, so that it runs what it depends on."""
        if label == self.label:
            return
        self.decide()
        self.label = os.environ[LABEL] = label
        empty_caches()
        self._again()

    def decide(self) -> None:
        """Writes the choices so far, made again: a choice depends on nothing else."""
        made, self.choices, self.paused = self.choices, [], True
        try:
            for label, problem, only in dict.fromkeys(made):
                self._write("chose", label, json.dumps(decided(problem, only), sort_keys=True))
        finally:
            self.paused = False

    def _monitored(self, code: CodeType, offset: int) -> Any:
        if not self._short(code.co_filename):
            return sys.monitoring.DISABLE  # pyright: ignore[reportAttributeAccessIssue]
        special = self._began(code)
        return None if special else sys.monitoring.DISABLE  # pyright: ignore[reportAttributeAccessIssue]

    def _profiled(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call" and self._short(frame.f_code.co_filename):
            self._began(frame.f_code)
        elif event == "return":
            self._ended(frame.f_code)

    def _began(self, code: CodeType) -> bool:
        """Notes that a function began. Returns whether a module is imported or a kernel chosen.

        Its frame is read for a choice alone: frames that were read live longer, and so do the tensors in them.
        """
        short = self._short(code.co_filename)
        stack = self.stacks.get(threading.get_ident())
        if self.paused:
            return True
        if short == DYNAMO:
            self._once("compiled", self.label, 0)
            return bool(stack)
        if code.co_name == "<module>":
            self._enter(code, f"import:{short}")
            return True
        if (short, code.co_name) == CHOOSES:
            self._enter(code, "choice")
            found = sys._getframe(2).f_locals
            if found.get("config") is None:
                self.choices.append((self.label, found["p"], found["only"]))
            stack = self.stacks[threading.get_ident()]
        self._once(short, stack[-1][1] if stack else self.label, code.co_firstlineno)
        return bool(stack)

    def _enter(self, code: CodeType, label: str) -> None:
        self.stacks.setdefault(threading.get_ident(), []).append((code, label))
        if sys.version_info >= (3, 12):
            tool = sys.monitoring
            tool.set_local_events(TOOL, code, tool.events.PY_RETURN)
            tool.set_events(TOOL, tool.events.PY_START | tool.events.PY_UNWIND)
        self._again()  # functions that began before under another label

    def _ended(self, code: CodeType, *_: Any) -> None:
        stack = self.stacks.get(threading.get_ident())
        if stack and stack[-1][0] is code:
            stack.pop()
            if not any(self.stacks.values()) and sys.version_info >= (3, 12):
                sys.monitoring.set_events(TOOL, sys.monitoring.events.PY_START)

    @staticmethod
    def _again() -> None:
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()

    def _short(self, path: str) -> str:
        """The path from the root of a file that counts, or ""."""
        found = self.shorts.get(path)
        if found is None:
            found = path[len(self.root) :] if path.startswith(self.root) else ""
            found = found.replace(os.sep, "/")
            found = found if found.startswith(FOLLOWED) and not found.startswith(OWN) else ""
            found = DYNAMO if path.endswith(DYNAMO) else found
            self.shorts[path] = found
        return found

    def _once(self, short: str, label: str, row: int) -> None:
        key = label, short, row
        if label and key not in self.seen:
            self.seen.add(key)
            if short in ("compiled", "child"):
                self._write(short, label)
            else:
                self._write("ran" if row else "opened", label, short, *([str(row)] if row else []))

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[0], str) and given[1] in ("r", "rb", None):
            path = given[0]
            if path.startswith(self.root) and not path.endswith(DERIVED) and not self.paused:
                short = path[len(self.root) :].replace(os.sep, "/")
                if not short.startswith(UNUSED) and "__pycache__" not in short:
                    stack = self.stacks.get(threading.get_ident())
                    self._once(short, stack[-1][1] if stack else self.label, 0)
        elif event == "subprocess.Popen" and is_python(given[0]):
            self._write("child", self.label, shown(given[1][1:]))

    def _write(self, *words: str) -> None:
        if self.pid != os.getpid():  # also in a process that was forked
            self.pid = os.getpid()
            path = self.folder / f"{self.pid}.trace"
            self.out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self.out, ("\t".join(words) + "\n").encode())


current: Trace | None = None


def begin(folder: Path, root: Path = ROOT) -> Trace:
    """Starts the tracing of this process."""
    global current
    current = Trace(folder, root)
    current.start()
    return current


def begin_child() -> None:
    """Starts the tracing of a process that a traced one started."""
    folder = os.environ.get(FOLDER)
    if folder and Path(folder).is_dir() and current is None:
        begin(Path(folder)).arrived()


def environment(folder: Path) -> dict[str, str]:
    """The variables by which processes that are started trace themselves."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [each for each in paths if each and each not in (str(CHILD), str(ROOT))]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join([str(CHILD), str(ROOT), *kept])}


def is_python(program: Any) -> bool:
    """Whether a program is Python, or a script of Python."""
    path = Path(os.fsdecode(program or ""))
    if "python" in path.name:
        return True
    found = path if path.is_absolute() else Path(shutil.which(path) or "")
    try:
        with found.open("rb") as file:
            first = file.readline(200)
    except OSError:
        return False
    return first.startswith(b"#!") and b"python" in first


def shown(arguments: Any) -> str:
    """A name for the arguments of a process, in one word."""
    return format(zlib.crc32("\0".join(os.fsdecode(each) for each in arguments).encode()), "x")


def empty_caches() -> None:
    """Empties functools' caches of the package's modules but those of KEPT, and recorded calls that a module keeps."""
    for name, module in list(sys.modules.items()):
        if name.startswith("sparsek.") and not name.startswith(KEPT):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
                elif type(value).__name__ == "Calls":
                    value.known.clear()
                    value.recent.clear()


def decided(problem: Any, only: str | None) -> dict[str, Any]:
    """A problem, and the kernel and config that are chosen for it; null if no kernel can run it."""
    from sparsek.core.errors import SparseKError
    from sparsek.engine.planning import choose

    try:
        choice = choose(problem, only)
        outcome = [choice.kernel.name, repr(choice.config)]
    except SparseKError:
        outcome = None
    return {"op": problem.op, "problem": encoded(problem), "only": only, "outcome": outcome}


def encoded(value: Any) -> Any:
    """A frozen dataclass of numbers, texts and tuples as JSON. A card is its name."""
    if hasattr(value, "__dataclass_fields__"):
        kind = type(value)
        if kind.__name__ == "Card":
            return {"$card": value.name}
        parts = {
            name: encoded(getattr(value, name)) for name in (each.name for each in dataclasses.fields(value))
        }
        return {"$class": f"{kind.__module__}:{kind.__qualname__}", **parts}
    if isinstance(value, (tuple, list)):
        name = f"{type(value).__module__}:{type(value).__qualname__}" if hasattr(value, "_fields") else ""
        return {"$tuple": [encoded(each) for each in value], **({"$class": name} if name else {})}
    if isinstance(value, (frozenset, set)):
        return {"$set": sorted(encoded(each) for each in value)}
    if isinstance(value, float):
        return {"$float": value.hex()}
    return value


def decoded(value: Any, homes: Callable[[str], str] = lambda name: name) -> Any:
    """The value of its JSON. `homes` gives the name under which a class stands now."""
    if not isinstance(value, dict):
        return value
    if "$card" in value:
        from sparsek.core import device

        cards = (device.CPU, *device.CARDS.values())
        return next(each for each in cards if each.name == value["$card"])
    if "$float" in value:
        return float.fromhex(value["$float"])
    if "$set" in value:
        return frozenset(value["$set"])
    kind = None
    if "$class" in value:
        module, _, name = homes(value["$class"]).partition(":")
        kind = getattr(importlib.import_module(module), name)
    if "$tuple" in value:
        parts = tuple(decoded(each, homes) for each in value["$tuple"])
        return parts if kind is None else kind(*parts)
    assert kind is not None
    return kind(**{name: decoded(each, homes) for name, each in value.items() if name != "$class"})
