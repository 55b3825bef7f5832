"""The structure of the house: `scripts/house.py` prints the numbers of floors, arrows and files in circles, `-v` all.

A room is a folder directly in sparsek/, and sparsek_bench/, scripts/ and benchmarks/. An arrow A -> B: a file of A
imports one of B, at its top, inside a function, by `import_module` of its name, or for type checkers only. A room's
floor is one above the highest room that it imports. Files that import each other in a loop, in these four ways, are in
a circle.
tests/house/test_layers.py holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, BESIDE = "sparsek", ("sparsek_bench", "scripts", "benchmarks")
LOADERS = ("import_module", "function_of", "build")  # that take the names of modules
LIMITS = {"floors": 8, "arrows": 60, "files in circles": 0}

Graph = Mapping[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """The Python files of the house by the names of their modules."""
    paths = (path for top in (PACKAGE, *BESIDE) for path in sorted((root / top).rglob("*.py")))
    return {_module(path.relative_to(root)): path for path in paths}


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, known: Container[str]) -> set[str]:
    """The modules of `known` that a file imports, in any of the four ways; of `from a import b` a.b, or else a."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = [f"{node.module}.{each.name}" for each in node.names]
            found |= {full if full in known else node.module for full in inside}
        elif isinstance(node, ast.Call) and _last(node.func) in LOADERS:
            found |= set(map(_text, node.args))
    return {each for each in found if each in known}


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """A string; of an f-string with a module's name at its end, the package."""
    if isinstance(node, ast.JoinedStr):
        node = node.values[0]
    text = node.value if isinstance(node, ast.Constant) else ""
    return text.rstrip(".") if isinstance(text, str) else ""


def files(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: imports(path.read_text(encoding="utf-8"), found) - {name} for name, path in found.items()}


def rooms(graph: Graph) -> dict[str, set[str]]:
    """The rooms that each room imports. sparsek/__init__.py and __main__.py, which stand beside them, are in none."""

    def room(name: str) -> str:
        first, inner = f"{name}.".split(".")[:2]
        return first if first != PACKAGE else inner.removeprefix("__main__")

    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if here := room(name):
            found.setdefault(here, set()).update({room(each) for each in others} - {here, ""})
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The groups of nodes that reach each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def floors(graph: Graph) -> dict[str, int]:
    """The floor of each room, from 1. Rooms in a circle share one."""
    group = {name: f"{min(each)}..." for each in circles(graph) for name in each}
    joined: dict[str, set[str]] = {}
    for name, others in graph.items():
        here = group.get(name, name)
        joined.setdefault(here, set()).update({group.get(each, each) for each in others} - {here})
    known: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in known:
            known[name] = 1 + max((floor(each) for each in joined.get(name, ())), default=0)
        return known[name]

    return {name: floor(group.get(name, name)) for name in graph}


def numbers(graph: Graph) -> dict[str, int]:
    """What LIMITS limits."""
    between = rooms(graph)
    counts = max(floors(between).values()), sum(map(len, between.values())), sum(map(len, circles(graph)))
    return dict(zip(LIMITS, counts, strict=True))


def lines(graph: Graph) -> Iterable[str]:
    """Every room with its floor and what it imports, every circle."""
    between = rooms(graph)
    at = floors(between)
    for name in sorted(between, key=lambda each: (-at[each], each)):
        yield f"{at[name]:2} {name:13} {' '.join(sorted(between[name], key=lambda each: (-at[each], each)))}"
    for each in circles(graph):
        yield f"circle of {len(each)} files: {' '.join(each)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="rooms, arrows and circles")
    graph = files(modules())
    if parser.parse_args().verbose:
        print(*lines(graph), sep="\n")
    found = numbers(graph)
    print(", ".join(f"{count} {name}" for name, count in found.items()))
    return int(any(found[name] > most for name, most in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
