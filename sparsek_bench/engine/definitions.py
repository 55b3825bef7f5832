"""The definitions of a tree of Python sources: their text without comments, docstrings, annotations' effect on names
and layout, and what they refer to. `sparsek_bench/engine/sources.py` hashes the code that a record timed with it, and
tests/evidence the code that a test executed.

A definition is a function, a method, a class without its methods ("sparsek.products.formats.bsr:BSR"), a constant of a
module or an alias in a class, or the other statements of a module ("sparsek.products.ops.spmm:"), such as
registrations. Its name does not change with the lines around it, and its text is the same under every Python.
"""

from __future__ import annotations

import ast
import os.path
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path

DEVICE = ("jit", "constexpr_function", "builtin")
DATA = re.compile(r"[\w./-]+\.(?:cu|cuh|h|json|jsonl|csv|txt|npz)")
CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
INCLUDED = re.compile(r'#include\s+"([^"]+)"')
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLOSED = {
    "typing",
    "typing_extensions",
    "abc",
    "enum",
    "collections",
}  # whose classes call no members of others
ALIASES = ("classmethod", "staticmethod", "property")


def digest(*texts: str) -> str:
    """16 hex digits of the SHA-256 of texts."""
    return sha256("\0".join(texts).encode()).hexdigest()[:16]


@dataclass
class Definition:
    """One definition. `names` are what it reads of its module, with their attributes: "BLOCK", "banded.causal"."""

    name: str
    kind: str  # "function", "class", "constant" or "body"
    rows: list[tuple[int, int]]
    nodes: list[ast.stmt] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)  # attributes of anything, and strings that may be names
    data: set[str] = field(default_factory=set)  # strings that may name a file
    device: bool = False

    @property
    def module(self) -> str:
        return self.name.partition(":")[0]

    @property
    def local(self) -> str:
        """The name in its module."""
        return self.name.partition(":")[2]


class Module:
    """The definitions of one file, by their names in it, and what it imports."""

    def __init__(self, name: str, source: str, package: bool) -> None:
        self.name, self.package = name, package
        self.definitions: dict[str, Definition] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name: module, and the name there or ""
        self.stars: list[str] = []
        self.modules: set[str] = set()  # that it imports, and what may be some
        self.tree = ast.parse(source)
        self.bound: set[str] = set()  # names that other statements bind, as those under an `if`
        self._texts: dict[str, str] = {}
        self._collect_imports()
        for node in self.tree.body:
            self._add(node)

    def text(self, name: str) -> str:
        """The text of a definition. That of a class is without methods and aliases, which are definitions too."""
        if name not in self._texts:
            each = self.definitions[name]
            inner = self.members(name) if each.kind == "class" else set()
            own = {id(node) for member in inner for node in self.definitions[f"{name}.{member}"].nodes}
            self._texts[name] = "\n".join(dumped(node, own) for node in each.nodes)
        return self._texts[name]

    def at(self, row: int) -> Definition | None:
        """The smallest definition that a row belongs to."""
        found = [
            (last - first, each)
            for each in self.definitions.values()
            for first, last in each.rows
            if first <= row <= last
        ]
        return min(found, key=lambda pair: pair[0], default=(0, None))[1]

    def members(self, name: str) -> set[str]:
        """The names of the methods and aliases of a class."""
        return {each.rpartition(".")[2] for each in self.definitions if each.rpartition(".")[0] == name}

    def _collect_imports(self) -> None:
        for node in _without_type_checking(self.tree):
            if isinstance(node, ast.Import):
                self.modules |= {alias.name for alias in node.names}
                for alias in node.names:
                    if alias.asname:
                        self.imported[alias.asname] = alias.name, ""
                    else:
                        first = alias.name.partition(".")[0]
                        self.imported.setdefault(first, (first, ""))
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                self.modules |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(module)
                    else:
                        self.imported[alias.asname or alias.name] = module, alias.name

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        above = parts[: len(parts) - node.level + self.package]
        return ".".join([*above, *([node.module] if node.module else [])])

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, FUNCTIONS):
            if not any(_last(each) == "overload" for each in node.decorator_list):
                self._define(node.name, "function", node)
        elif isinstance(node, ast.ClassDef):
            self._add_class(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)) or _is_docstring(node) or _is_type_checking(node):
            pass
        elif names := _targets(node):
            for name in names:
                self._define(name, "constant", node)
        else:
            self._define("", "body", node)
            self.bound |= {
                one.id
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
            self.bound |= {one.name for one in ast.walk(node) if isinstance(one, (*FUNCTIONS, ast.ClassDef))}

    def _add_class(self, node: ast.ClassDef) -> None:
        self._define(node.name, "class", node, [*node.bases, *node.keywords, *node.decorator_list])
        for each in node.body:
            if isinstance(each, FUNCTIONS):
                if not any(_last(one) == "overload" for one in each.decorator_list):
                    self._define(f"{node.name}.{each.name}", "function", each)
            elif isinstance(each, ast.Assign) and _is_alias(each.value) and (names := _targets(each)):
                for name in names:
                    self._define(f"{node.name}.{name}", "constant", each)
            elif not _is_docstring(each):
                self._refer(self.definitions[node.name], [each])

    def _define(self, name: str, kind: str, node: ast.stmt, parts: Iterable[ast.AST] | None = None) -> None:
        found = self.definitions.setdefault(name, Definition(f"{self.name}:{name}", kind, []))
        found.kind = kind
        found.nodes.append(node)
        found.rows.append((_first_line(node), node.end_lineno or node.lineno))
        found.device |= isinstance(node, FUNCTIONS) and any(_last(d) in DEVICE for d in node.decorator_list)
        self._refer(found, [node] if parts is None else parts)

    @staticmethod
    def _refer(found: Definition, nodes: Iterable[ast.AST]) -> None:
        """Notes the names, attributes and strings of nodes. Annotations run nothing, so their names do not count."""
        for node in _evaluated(nodes):
            if isinstance(node, ast.Name):
                found.names.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.mentioned.add(node.attr)
                if chain := _chain(node):
                    found.names.add(chain)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node.value.isidentifier():
                    found.mentioned.add(node.value)
                elif DATA.fullmatch(node.value):
                    found.data.add(node.value)


class Tree:
    """The definitions of packages below `root`, parsed when they are needed."""

    def __init__(self, root: Path, packages: tuple[str, ...] = ("sparsek",)) -> None:
        self.root, self.packages = root, packages
        self.paths: dict[str, Path] = {}
        for package in packages:
            for path in sorted((root / package).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self._resolved: dict[tuple[str, str], str] = {}

    def module(self, name: str) -> Module | None:
        """The module of that name, or None."""
        path = self.paths.get(name)
        if path is None:
            return None
        return _module(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")

    def text(self, name: str) -> str | None:
        """The text of the definition of that name, or None."""
        module, _, local = name.partition(":")
        found = self.module(module)
        return None if found is None or local not in found.definitions else found.text(local)

    def definition(self, name: str) -> Definition | None:
        """The definition of that name, or None."""
        module, _, local = name.partition(":")
        found = self.module(module)
        return None if found is None else found.definitions.get(local)

    def resolve(self, module: str, name: str) -> str:
        """What a dotted name means in a module: the name of a definition, of a module, "~math.exp" of a name of another
        library, or "".
        """
        key = module, name
        if key not in self._resolved:
            self._resolved[key] = ""  # of names that import each other
            self._resolved[key] = self._resolve(module, name)
        return self._resolved[key]

    def _resolve(self, module: str, name: str) -> str:
        first, _, rest = name.partition(".")
        here = self.module(module)
        if here is None:
            return ""
        if first in here.definitions:
            if rest and f"{first}.{rest.partition('.')[0]}" in here.definitions:
                return f"{module}:{first}.{rest.partition('.')[0]}"
            return f"{module}:{first}"
        if first in here.imported:
            other, theirs = here.imported[first]
            if other.partition(".")[0] not in self.packages:
                return "~" + ".".join(filter(None, (other, theirs, rest)))
            found = other if not theirs else self._member(other, theirs)
        elif first in here.bound:
            return f"{module}:"
        elif f"{module}.{first}" in self.paths and here.package:
            found = f"{module}.{first}"
        else:
            found = next((each for star in here.stars if (each := self.resolve(star, first))), "")
            found = found or self._lazy(here, first)
        while found and rest:
            first, _, rest = rest.partition(".")
            if ":" in found:
                module, _, local = found.partition(":")
                return self.resolve(module, f"{local}.{first}")
            found = self._member(found, first)
        return found

    def _member(self, module: str, name: str) -> str:
        if f"{module}.{name}" in self.paths and name not in self._names(module):
            return f"{module}.{name}"
        return self.resolve(module, name) if module in self.paths else ""

    def _names(self, module: str) -> Iterable[str]:
        here = self.module(module)
        return here.definitions if here else ()

    def _lazy(self, here: Module, name: str) -> str:
        """A public name of `sparsek`, which its __getattr__ imports from the module in _HOMES."""
        if here.name != "sparsek":
            return ""
        home = next((home for each, home in _homes(here) if each == name), "")
        return home if home == f"sparsek.{name}" else self.resolve(home, name)

    def references(self, each: Definition) -> set[str]:
        """The definitions that one refers to."""
        return {name for name in self._meant(each) if ":" in name and name != each.name}

    def outside(self, each: Definition) -> set[str]:
        """The names of other libraries that a definition refers to: "math.exp"."""
        return {name[1:] for name in self._meant(each) if name.startswith("~")}

    def _meant(self, each: Definition) -> set[str]:
        return {self.resolve(each.module, name) for name in each.names}

    def imported_bodies(self, module: str) -> set[str]:
        """The last names of the modules that one imports and that do more than define: registrations, for example."""
        here = self.module(module)
        bodies = {name: self.module(name) for name in (here.modules if here else ())}
        return {name.rpartition(".")[2] for name, body in bodies.items() if body and "" in body.definitions}

    def is_open(self, name: str) -> bool:
        """Whether a class has a base of another library, which may call any of its members."""
        each = self.definition(name)
        if each is None or each.kind != "class":
            return False
        bases = [base for node in each.nodes if isinstance(node, ast.ClassDef) for base in node.bases]
        meant = {self.resolve(each.module, _dotted(base)) for base in bases}
        outer = {base[1:].partition(".")[0] for base in meant if base.startswith("~")} - CLOSED
        return bool(outer) or any(self.is_open(base) for base in meant if ":" in base and base != name)

    def files(self, each: Definition) -> set[str]:
        """The data and CUDA C++ files that a definition names, from the root, with those that these include."""
        beside = self.paths[each.module].parent
        waiting = [path for name in each.data for path in (beside / name, self.root / name)]
        found: set[str] = set()
        while waiting:
            path = waiting.pop()
            if not path.is_file() or not path.resolve().is_relative_to(self.root.resolve()):
                continue
            short = path.relative_to(self.root).as_posix()
            if short not in found:
                found.add(short)
                if path.suffix in (".cu", ".cuh", ".h"):
                    text = path.read_text(encoding="utf-8")
                    named = (os.path.normpath(path.parent / name) for name in INCLUDED.findall(text))
                    waiting += map(Path, named)
        return found

    def text_of_file(self, path: str) -> str:
        """The contents of a file that counts; of CUDA C++ without comments and layout. "" if it is gone."""
        file = self.root / path
        if not file.is_file():
            return ""
        if file.suffix in (".cu", ".cuh", ".h"):
            return " ".join(CUDA_COMMENT.sub(" ", file.read_text(encoding="utf-8")).split())
        if file.suffix == ".py":
            return whole_text(file.read_text(encoding="utf-8"))
        return sha256(file.read_bytes()).hexdigest()

    @cached_property
    def by_text(self) -> dict[tuple[str, str], list[str]]:
        """The names of all definitions by their local name and text: where one that moved stands now."""
        found: dict[tuple[str, str], list[str]] = {}
        for name in self.paths:
            module = self.module(name)
            if module is None:
                continue
            for local in module.definitions:
                found.setdefault((local, digest(module.text(local))), []).append(f"{name}:{local}")
        return found


@lru_cache(maxsize=2048)
def _module(name: str, source: str, package: bool) -> Module:
    return Module(name, source, package)


@lru_cache(maxsize=8)
def _homes(module: Module) -> tuple[tuple[str, str], ...]:
    for node in module.tree.body:
        if "_HOMES" in _targets(node) and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            return tuple(ast.literal_eval(node.value).items())
    return ()


def _targets(node: ast.stmt) -> list[str]:
    """The names that an assignment gives values to; [] for another statement, or for parts of other objects."""
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif type(node).__name__ == "TypeAlias":
        targets = [node.name]  # pyright: ignore[reportAttributeAccessIssue]
    else:
        return []
    each = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return (
        [one.id for one in each if isinstance(one, ast.Name)]
        if all(isinstance(e, ast.Name) for e in each)
        else []
    )


def _is_alias(value: ast.expr) -> bool:
    """Whether a class takes something that stands elsewhere: classmethod(banded.causal), or another method."""
    if isinstance(value, ast.Call):
        return _last(value.func) in ALIASES
    return isinstance(value, (ast.Name, ast.Attribute))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _last(node.test) == "TYPE_CHECKING"


def _last(node: ast.expr) -> str:
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _chain(node: ast.Attribute) -> str:
    parts, at = [node.attr], node.value
    while isinstance(at, ast.Attribute):
        parts.append(at.attr)
        at = at.value
    return ".".join([at.id, *reversed(parts)]) if isinstance(at, ast.Name) else ""


def _dotted(node: ast.expr) -> str:
    """The name of a base: "nn.Module", also of "Operation[C, P]"."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return _chain(node) if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _without_type_checking(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield child
            yield from _without_type_checking(child)


def _evaluated(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes and those below, without annotations, docstrings and what is for type checkers."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if _is_type_checking(node) or (isinstance(node, ast.stmt) and _is_docstring(node)):
            continue
        yield node
        skipped: list[ast.AST | None] = []
        if isinstance(node, FUNCTIONS):
            skipped.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            skipped.append(node.annotation)
        waiting += [child for child in ast.iter_child_nodes(node) if child not in skipped]


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


@lru_cache(maxsize=512)  # many tests need the same files
def whole_text(source: str) -> str:
    """A source without comments, docstrings and layout."""
    return dumped(ast.parse(source))


def dumped(node: ast.AST, left_out: Container[int] = ()) -> str:
    """A syntax tree as text, the same under every Python, without docstrings and the nodes of these ids."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    parts = [type(node).__name__]
    documented = (
        isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        and ast.get_docstring(node, clean=False) is not None
    )
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            items = value[documented and name == "body" :]
            if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty texts in it
                items = [one for one in items if not isinstance(one, ast.Constant) or one.value]
            inner = [_dumped(one, left_out) for one in items if id(one) not in left_out]
            parts += [f"{name}=[{','.join(inner)}]"] if inner else []
        elif value is not None and not isinstance(value, ast.expr_context) and name != "type_comment":
            parts.append(f"{name}={_dumped(value, left_out)}")
    return f"({' '.join(parts)})"


def _dumped(value: object, left_out: Container[int]) -> str:
    return dumped(value, left_out) if isinstance(value, ast.AST) else repr(value)
