"""Faults that scripts/plant.py plants: where the operators apply in Python, in device code and in CUDA C++.

A fault has the name module:function:operator:n, the n-th place in the function where the operator applies, so that
edits elsewhere leave it as it is. Lines keep their numbers.

  bound, offset, extreme    < as <=, + 1 as + 0, min as max
  mask, conjunct, where     a mask of a load dropped, the last of several conditions dropped, both branches swapped
  negated, test, flag       a condition, a comparison or a flag the other way round
  axis, stride, modulus     another axis, a factor of an address dropped
  phase, skipped            a phase bit that stays, a call or an update left out
  scale, epilogue, dtype    a factor dropped, a step of an epilogue left out, a narrower dtype of sums
  transposed, sign, index   an adjoint without its transpose, + as -, rows as columns
"""

from __future__ import annotations

import ast
import bisect
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED, COUNT = 43, 360
FOLDERS = ("sparsek/products", "sparsek/attn")
# Shares of the list, by wing, room and whether the code runs on the device. References are what tests compare with.
SHARES = {
    "products/kernels device": 55,
    "products/kernels cuda": 20,
    "attn/kernels device": 65,
    "attn/kernels cuda": 10,
    "products/kernels host": 30,
    "attn/kernels host": 30,
    "products/formats host": 30,
    "attn/mask host": 40,
    "products/ops host": 25,
    "attn/ops host": 20,
    "products/plan host": 15,
    "attn/plan host": 15,
    "attn/policies host": 20,
}
# Predictions, texts and pictures: a wrong one is no wrong result. Flags that change the time alone, or a refusal.
LEFT_OUT = re.compile(r".*seconds|notes|rank|explain|__(repr|str)__|details|_words|_line|plot")
EQUIVALENT = ("strict", "stable", "is_async")
EXTREMES = "min max, minimum maximum, amin amax, any all, floor ceil, zeros ones, argmin argmax, logical_and logical_or"
NAMES = (
    "row col, rows cols, first last, start end, low high, k v, q k, m n, keys queries, up down, left right"
)


def _both(pairs: str) -> dict[str, str]:
    split = [pair.split() for pair in pairs.split(", ")]
    return dict(split) | {b: a for a, b in split if b not in dict(split)}


SWAPPED, PARTNERS = _both(EXTREMES), _both(NAMES)
COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
TESTED = {
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OTHER_AXIS = {0: "1", 1: "0", -1: "-2", -2: "-1"}
REDUCED = {"expand_dims", "sum", "max", "min", "cumsum", "argmax", "argmin", "softmax", "size", "stride"}
TURNED = {"t", "transpose", "permute", "trans", "swapaxes"}
NARROWER = {"float32": "float16"}
FACTOR = re.compile(r"scale|alpha|inv|factor|slope|weight", re.I)
# CUDA C++: an operator, what it applies to in a line without texts, and the replacement.
CUDA = [
    ("bound", re.compile(r" (<|>=) "), {"<": "<=", ">=": ">"}),
    ("test", re.compile(r" (==|!=) "), {"==": "!=", "!=": "=="}),
    ("offset", re.compile(r" [+-] (1)\b"), {"1": "0"}),
    ("phase", re.compile(r" \^=? (1)\b"), {"1": "0"}),
    ("sign", re.compile(r" ([+-]) (?!1\b)"), {"+": "-", "-": "+"}),
    ("conjunct", re.compile(r" (&&) "), {"&&": "||"}),
    ("extreme", re.compile(r"\b(min|max)\("), {"min": "max", "max": "min"}),
    ("skipped", re.compile(r"^ +(\w+\([^{}]*\);)$"), None),
]
CUDA_FUNCTION = re.compile(r"^(?!#|//|/\*|constexpr|static_assert|struct|typedef)\S.*?(\w+)\(.*\{")


@dataclass(frozen=True)
class Fault:
    """A replacement of bytes of one file."""

    id: str
    path: str
    line: int
    last: int
    start: int
    stop: int
    text: str
    code: str  # the line where it begins
    device: bool

    @property
    def operator(self) -> str:
        return self.id.rsplit(":", 2)[1]

    @property
    def share(self) -> str:
        code = "cuda" if self.path.endswith(".cu") else "device" if self.device else "host"
        return f"{'/'.join(self.path.split('/')[1:3])} {code}"

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]


def faults(root: Path) -> dict[str, Fault]:
    """Every fault that the operators make of the code below `root`, by name."""
    found: dict[str, Fault] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            place = path.relative_to(root).as_posix()
            if path.suffix == ".py" and f"{'/'.join(place.split('/')[1:3])} host" in SHARES:
                found.update((each.id, each) for each in python_faults(place, path.read_bytes()))
            elif path.suffix == ".cu":
                found.update((each.id, each) for each in cuda_faults(place, path.read_bytes()))
    return found


def standing(entry: dict[str, Any], every: dict[str, Fault]) -> Fault | None:
    """The fault of a list in this state of the code: by its name, or where its function and line stand now; or the line
    alone, if its file has it once, in what was a part of the function.
    """
    named = every.get(entry["id"])
    if named is not None and named.code == entry["code"]:
        return named
    module, _, place = entry["id"].rpartition(":")[0].partition(":")  # place: function and operator
    operator = place.rpartition(":")[2]
    same = [each for each in every.values() if (each.code, each.text) == (entry["code"], entry["text"])]
    moved = [each for each in same if each.id.rpartition(":")[0].partition(":")[2] == place]
    split = [each for each in same if each.id.startswith(f"{module}:") and each.operator == operator]
    return moved[0] if moved else split[0] if len(split) == 1 else None


def cuda_faults(path: str, source: bytes) -> Iterator[Fault]:
    """The faults of CUDA C++, line by line."""
    counts: defaultdict[str, int] = defaultdict(int)
    at, function = 0, ""
    for number, line in enumerate(source.decode().split("\n"), 1):
        code = line.partition("//")[0]
        if not code[:1].isspace():
            head = CUDA_FUNCTION.match(code)
            function = head[1] if head else "" if code[:1] != "}" else function
        if function and '"' not in code and not code.lstrip().startswith(("#", "static_assert")):
            for operator, pattern, replaced in CUDA:
                for hit in pattern.finditer(code):
                    name = f"{path}:{function}:{operator}"
                    counts[name] += 1
                    start = at + len(line[: hit.start(1)].encode())
                    text = ";" if replaced is None else replaced[hit[1]]
                    stop = start + len(hit[1].encode())
                    place = path, number, number, start, stop, text, line.strip(), True
                    yield Fault(f"{name}:{counts[name]}", *place)
        at += len(line.encode()) + 1


def python_faults(path: str, source: bytes) -> list[Fault]:
    """The faults of a Python file, function by function."""
    return Places(path, source).found


class Places:
    """Where the operators apply in a Python file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.rows = [0]
        for line in source.splitlines(keepends=True):
            self.rows.append(self.rows[-1] + len(line))
        self.found: list[Fault] = []
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.definitions(ast.parse(source).body, "", device=False)

    def definitions(self, body: Iterable[ast.stmt], prefix: str, *, device: bool) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                self.definitions(node.body, f"{prefix}{node.name}.", device=device)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not LEFT_OUT.fullmatch(
                node.name
            ):
                marks = " ".join(map(ast.unparse, node.decorator_list))
                if "overload" in marks:
                    continue
                self.function = f"{self.module}:{prefix}{node.name}"
                self.device = device or "jit" in marks or "constexpr_function" in marks
                self.bound = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                self.bound |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
                inner: list[ast.stmt] = []
                for each in node.body:
                    self.statement(each, inner)
                self.definitions(inner, f"{prefix}{node.name}.", device=self.device)

    def statement(self, node: ast.stmt, inner: list[ast.stmt]) -> None:
        """The faults of one statement and of those in it; definitions in it go to `inner`."""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner.append(node)
            return
        if isinstance(node, (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        self.lines = (node.lineno, node.end_lineno or node.lineno)
        blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
        if any(blocks):  # the head alone
            self.lines = (node.lineno, max(node.lineno, blocks[0][0].lineno - 1))
        self.whole(node)
        for field, value in ast.iter_fields(node):
            if field not in ("body", "orelse", "finalbody", "handlers", "annotation", "type_comment"):
                for each in value if isinstance(value, list) else [value]:
                    if isinstance(each, ast.AST):
                        self.expression(each)
        for block in [*blocks, *(each.body for each in getattr(node, "handlers", []))]:
            for each in block:
                self.statement(each, inner)

    def whole(self, node: ast.stmt) -> None:
        """Operators on whole statements."""
        if isinstance(node, ast.AugAssign):
            self.add("phase" if isinstance(node.op, ast.BitXor) else "skipped", node, "(0)")
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self.add("skipped", node, "(0)")
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
            if any(isinstance(each, ast.Name) and each.id == name for each in node.value.args):
                self.add("epilogue", node.value, name)
        elif isinstance(node, ast.If):
            self.add("negated", node.test, f"(not ({self.text(node.test)}))")

    def expression(self, node: ast.AST) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Lambda)):
            return
        operators = getattr(self, f"of_{type(node).__name__.lower()}", None)
        if operators:
            operators(node)
        for each in ast.iter_child_nodes(node):
            self.expression(each)

    def of_compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            kind: Any = type(node.ops[0])
            operator = "bound" if kind in COMPARED else "test"
            self.gap(operator, node.left, node.comparators[0], *(COMPARED | TESTED)[kind])

    def of_boolop(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        self.add("conjunct", node, word.join(f"({self.text(each)})" for each in node.values[:-1]))

    def of_unaryop(self, node: ast.UnaryOp) -> None:
        kind = "sign" if isinstance(node.op, ast.USub) else "negated"
        self.add(kind, node, self.text(node.operand))

    def of_ifexp(self, node: ast.IfExp) -> None:
        self.add("negated", node.test, f"(not ({self.text(node.test)}))")

    def of_binop(self, node: ast.BinOp) -> None:
        left, right, op = node.left, node.right, node.op
        if any(
            isinstance(each, (ast.JoinedStr, ast.List, ast.Tuple)) or _is(each, str) for each in (left, right)
        ):
            return
        if isinstance(op, (ast.BitAnd, ast.BitOr)):
            self.add("conjunct", node, self.text(left))
        elif isinstance(op, ast.BitXor):
            self.add("phase", node, self.text(left))
        elif isinstance(op, (ast.Add, ast.Sub)):
            if _is(right, int) and ast.literal_eval(right) == 1:
                self.add("offset", right, "0")
            else:
                self.gap("sign", left, right, *(("+", "-") if isinstance(op, ast.Add) else ("-", "+")))
        elif isinstance(op, ast.Mult):
            if FACTOR.search(self.text(left)) and not FACTOR.search(self.text(right)):
                self.add("scale", node, self.text(right))
            else:
                self.add("scale" if FACTOR.search(self.text(right)) else "stride", node, self.text(left))
        elif isinstance(op, ast.FloorDiv):
            self.add("ceil", node, f"(-(-({self.text(left)}) // ({self.text(right)})))")
        elif isinstance(op, ast.Mod):
            self.add("modulus", node, self.text(left))

    def of_call(self, node: ast.Call) -> None:
        called, args = node.func, node.args
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in SWAPPED:
            stop = self.place(called)[1]
            self.replace("extreme", stop - len(name), stop, SWAPPED[name])
        elif name == "where" and len(args) == 3:
            first, second = args[1:]
            self.replace(
                "where",
                self.place(first)[0],
                self.place(second)[1],
                f"{self.text(second)}, {self.text(first)}",
            )
        elif name == "cdiv" and len(args) == 2:
            self.add("ceil", node, f"(({self.text(args[0])}) // ({self.text(args[1])}))")
        elif name in ("range", "static_range") and args:
            end = args[min(1, len(args) - 1)]
            self.add("bound", end, f"(({self.text(end)}) - 1)")
        elif name == "wait" and len(args) >= 2:
            self.add("phase", args[1], f"(({self.text(args[1])}) ^ 1)")
        elif name in TURNED and isinstance(called, ast.Attribute):
            inner = (
                args[0]
                if isinstance(called.value, ast.Name) and called.value.id in ("tl", "gl")
                else called.value
            )
            self.add("transposed", node, self.text(inner))
        if name in REDUCED and args and _axis(args[-1]) is not None:
            self.add("axis", args[-1], OTHER_AXIS[_axis(args[-1])])
        for each in node.keywords:
            if each.arg in ("axis", "dim") and _axis(each.value) is not None:
                self.add("axis", each.value, OTHER_AXIS[_axis(each.value)])
            elif each.arg == "mask" and name in ("load", "store"):
                self.add("mask", each.value, f"({self.text(each.value)}) | True")
            elif _is(each.value, bool) and each.arg not in EQUIVALENT:
                self.add("flag", each.value, str(not ast.literal_eval(each.value)))

    def of_attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("T", "mT"):
            self.add("transposed", node, self.text(node.value))
        elif node.attr in NARROWER and isinstance(node.value, ast.Name):
            stop = self.place(node)[1]
            self.replace("dtype", stop - len(node.attr), stop, NARROWER[node.attr])

    def of_subscript(self, node: ast.Subscript) -> None:
        index = node.slice
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape" and _axis(index) is not None:
            self.add("axis", index, OTHER_AXIS[_axis(index)])
        elif isinstance(index, ast.Tuple) and len(index.elts) == 2:
            texts = [self.text(each) for each in index.elts]
            if sorted(texts) == [":", "None"]:
                first, last = index.elts
                self.replace("axis", self.place(first)[0], self.place(last)[1], ", ".join(texts[::-1]))
        elif isinstance(index, ast.Slice) and index.lower is not None and _is(index.lower, int):
            self.add("offset", index.lower, str(ast.literal_eval(index.lower) - 1 or 0))

    def of_name(self, node: ast.Name) -> None:
        other = PARTNERS.get(node.id)
        if other in self.bound and isinstance(node.ctx, ast.Load):
            self.replace("index", *self.place(node), other)

    def place(self, node: Any) -> tuple[int, int]:
        return self.rows[node.lineno - 1] + node.col_offset, self.rows[
            node.end_lineno - 1
        ] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, stop = self.place(node)
        return self.source[start:stop].decode()

    def gap(self, operator: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replaces the operator between two operands."""
        start, stop = self.place(left)[1], self.place(right)[0]
        at = self.source.find(old.encode(), start, stop)
        if at >= 0:
            self.replace(operator, at, at + len(old), new)

    def add(self, operator: str, node: ast.AST, text: str) -> None:
        start, stop = self.place(node)
        simple = re.fullmatch(r"[-\w.]+|\(.*\)", text, re.S)
        self.replace(operator, start, stop, text if simple else f"({text})")

    def replace(self, operator: str, start: int, stop: int, text: str) -> None:
        """Adds a fault. Lines that the text lacks are added between its brackets."""
        lacking = self.source.count(b"\n", start, stop) - text.count("\n")
        if lacking:
            text = f"({text}" + "\n" * lacking + ")"
        name = f"{self.function}:{operator}"
        self.counts[name] += 1
        id = f"{name}:{self.counts[name]}"
        row = bisect.bisect(self.rows, start)
        code = self.source[self.rows[row - 1] : self.rows[row]].decode().strip()
        self.found.append(Fault(id, self.path, *self.lines, start, stop, text, code, self.device))


def _is(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is kind


def _axis(node: ast.AST) -> Any:
    """0, 1, -1 or -2, if the node is one of these."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return value if type(value) is int and value in OTHER_AXIS else None


def drawn(root: Path, seed: int, count: int) -> list[Fault]:
    """`count` faults: of each room its share, of each operator in a room alike many, in an order that mixes all."""

    def order(name: str) -> str:
        return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    every, chosen = faults(root), list[Fault]()
    for share, weight in SHARES.items():
        kinds: defaultdict[str, list[Fault]] = defaultdict(list)
        for each in sorted(
            (each for each in every.values() if each.share == share), key=lambda each: order(each.id)
        ):
            kinds[each.operator].append(each)
        wanted = round(weight * count / sum(SHARES.values()))
        taken: list[Fault] = []
        while len(taken) < wanted and any(kinds.values()):
            for kind in sorted(kinds, key=order):
                while kinds[kind]:
                    each = kinds[kind].pop(0)
                    if compiles(each, root):
                        taken.append(each)
                        break
        chosen += taken[:wanted]
    return sorted(chosen, key=lambda each: order(each.id))


def compiles(fault: Fault, root: Path) -> bool:
    """Whether the file is Python with the fault, and another one than without."""
    source = (root / fault.path).read_bytes()
    if fault.path.endswith(".cu"):
        return True
    try:
        return ast.dump(ast.parse(fault.planted(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False
