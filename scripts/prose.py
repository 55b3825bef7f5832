"""Finds poor wording in docs, docstrings, comments, messages and names, and suggests a better one.

  prose.py [PATHS...]     files or folders; by default everything that the check covers. Exit status 1 on findings

A line with "prose: allow", and the line after it, are exempt: for a quotation, say.
"""

import ast
import io
import re
import sys
import tokenize
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "DESIGN.md", "CONTRIBUTING.md")
FOLDERS = (
    "docs",
    "sparsek",
    "sparsek_bench",
    "scripts",
    "benchmarks/torch_bsr",
    "benchmarks/whole_models",
    "examples",
)
LEFT_OUT = ("docs/gpu-test-log.md", "scripts/prose.py")  # a generated table, this list
LONGEST = 40  # words of a sentence
PERSON = "only persons do this"
# Wording as a regular expression, why it is poor, and what is better.
PATTERNS = [
    (r"says|said|tells|told(?! apart)|hears|wants", PERSON, "specifies, describes, reports, requires"),
    (r"asks|asked", PERSON, "requires, queries, calls, requested"),
    (r"(that|which|they|not|kernels|files|tensors) (say|ask|tell|hear|want)", PERSON, "specify, report, require"),
    (r"(kernel|plan|mask|pattern|matrix|tensor|table|config|product|module|weight|it) knows", PERSON, "has, stores"),
    (r"whoever|everybody who|who (does|gets|multiplies|computes|takes) (what|which)", PERSON, "the part's name"),
    (r"(?<!most )(?<!each )(?<!all )(?<!none )(?<!one )(?<!some )(?<!outside )of which", "a detour", "whose"),
    (r"(?<!so )that (\w+ ){1,7}that (is|are|was|were|has|have|it|they|no)", "nested clauses", "two sentences"),
    (r"in turns", "neither order nor overlap", "interleaved, alternately, round-robin"),
    (r"forth and back", "not an idiom", "in alternating directions"),
    (r"on the wall", "not the term", "wall-clock time"),
    (r"made of", "vague", "derived from, consists of, built from"),
    (r"(all|those|many|what|as \w+) that there (is|are)", "an empty clause", "all, existing"),
    (r"(what|that) (is|are|was|were) (not )?there", "an empty clause", "present, existing, missing, absent"),
    (r"what is (not|no)", "a noun exists", "values that are not stored, any other object"),
    (r"such an?", "its noun is far away", "this plan, a row-major matrix"),
    (r"(lies?|lay) (so|as)", "the noun is layout", "has the layout of, is stored as"),
    (r"dealt|deals? (them|it|out|the|to)", "the noun is schedule", "assigned, distributed"),
    (r"behind (one another|the (last|end|queries|keys|rows|counts))", "a place, not an order", "after, concatenated"),
    (r"takes? over(?= \S+ of K| every|,)", "the noun is promotion", "is promoted to float32"),
    (r"(is|are|be) held (to|against)", "not the term", "compared with, the specification of"),
    (r"twice as well", "not the term", "double backward"),
    (r"unasked|for good|goes? along with", "a rare idiom", "silently; permanently; is part of"),
]  # fmt: skip
# No nouns of the field, in names of modules, classes, fields and parameters of public functions; and better words.
NO_NOUN = "no noun of the field"
NAMES = {
    "again": "recorded, repeated",
    "anew": "replace, repeat",
    "home": "owner, module",
    "wall": "clock",
    "fresh": "new, layout",
    "closed": "banded",
    "accepted": "convert, argument",
    "chosen": "selection, block_map",
    "listed": "lists",
    "survey": "evaluation",
    "told": "shapes_only",
    "said": "key",
    "asked": "requested",
    "held": "register_tile, owners",
    "joined": "a struct with fields",
    "heard": "received",
}
# In names of classes also participles and adverbs.
OF_CLASSES = {
    "dealt": "schedule, split",
    "done": "progress",
    "found": "the noun of its contents",
    "given": "inputs, options",
    "judged": "choice, outcome",
    "kept": "cached, result",
    "known": "cached, card",
    "late": "deferred",
    "later": "deferred, second-order",
    "missed": "miss",
    "named": "its kind, such as kernel",
    "near": "local, window",
    "seen": "visible",
    "served": "report",
}
COMMANDS = ("sparsek_bench/suites/fresh.py",)  # named as users type it
NAME = re.compile(r"[a-z]+|[A-Z][a-z]*")
WHOLE = r"(?<![\w./])({})(?![\w=(])"
COMPILED = [(re.compile(WHOLE.format(words), re.I), *rest) for words, *rest in PATTERNS]
ANY = re.compile(WHOLE.format("|".join(words for words, *_ in PATTERNS)), re.I)
CODE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$|`[^`\n]*`", re.M | re.S)
END = re.compile(r"[.!?;](?=\s+[\w`(\[*\"]|\s*$)|\n\s*\n|\n(?=\s*([-*|>#]|\d+\. ))|:(?=\s*\n)")
ROW = re.compile(r"^(\||    ).*|^.*\S  +\S.*", re.M)
WORD = re.compile(r"[^\W\d_]{2,}|`[^`]*`")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Finding(NamedTuple):
    path: str
    line: int
    words: str
    why: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words!r}: {self.why}; better: {self.better}"


def texts(path: Path, source: str, tree: ast.Module | None) -> Iterator[tuple[int, str, bool]]:
    """First line and text of a page, of each docstring, comment and message; and whether its sentences are counted."""
    if path.suffix == ".md":
        yield 1, source, True
    elif path.suffix == ".cu":
        for line, text in enumerate(source.split("\n"), 1):
            yield line, text.partition("//")[2], False
    elif tree:
        yield from _comments(source)
        yield from _strings(tree)


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    if not ANY.search(" ".join(source.replace("#", " ").split())):
        return
    block, first, last = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield first, "\n".join(block), False
                block, first = [], token.start[0]
            block.append(token.string.lstrip("#"))
            last = token.start[0]
    yield first, "\n".join(block), False


def _strings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    seen: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False):
            doc = node.body[0]
            seen.update(map(id, ast.walk(doc)))
            yield doc.lineno, ast.get_docstring(node) or "", True
        elif isinstance(node, ast.JoinedStr):
            seen.update(id(part) for part in node.values)
            parts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            yield node.lineno, "".join(map(str, parts)), False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in seen:
            yield node.lineno, node.value, False


def names(tree: ast.Module, place: str) -> Iterator[tuple[int, str]]:
    """Lines and names of a module, its classes and, where it is for users, fields and parameters of functions."""
    if place in COMMANDS:
        return
    path = Path(place)
    yield 1, path.parent.name if path.stem == "__init__" else path.stem
    public = not {"kernels", "tools", "sparsek_bench", "scripts", "tests"}.intersection(path.parts)
    bodies = [tree.body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef):
                yield node.lineno, node.name
                bodies.append(node.body)
                fields = (each for each in node.body if isinstance(each, ast.AnnAssign) and public)
                yield from ((each.lineno, ast.unparse(each.target)) for each in fields)
            elif isinstance(node, ast.FunctionDef) and public and not node.name.startswith("_"):
                given = node.args
                yield from ((a.lineno, a.arg) for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def findings(path: Path, root: Path = ROOT) -> list[Finding]:
    """Every finding in a file, in the order of its lines."""
    source = path.read_text(encoding="utf-8")
    name, lines = path.relative_to(root).as_posix(), source.splitlines()
    tree = ast.parse(source) if path.suffix == ".py" else None
    found: list[Finding] = []
    for first, text, counted in texts(path, source, tree):
        plain = CODE.sub(lambda code: "`x`" + "\n" * code[0].count("\n"), text)
        rows = [row.strip() for row in plain.split("\n")]
        flat, begins = " ".join(rows), list(accumulate((len(row) + 1 for row in rows), initial=0))
        for pattern, why, better in COMPILED if ANY.search(flat) else ():
            for hit in pattern.finditer(flat):
                found.append(Finding(name, first + bisect(begins, hit.start()) - 1, hit[0], why, better))
        found += _long_sentences(name, first, plain) if counted else []
    if tree:
        for line, identifier in names(tree, name):
            better = NAMES | OF_CLASSES if identifier.lstrip("_")[:1].isupper() else NAMES
            words = (word for word in map(str.lower, NAME.findall(identifier)) if word in better)
            found += [Finding(name, line, identifier, NO_NOUN, better[word]) for word in words]
    return sorted(
        each for each in found if "prose: allow" not in str(lines[max(0, each.line - 2) : each.line])
    )


def _long_sentences(name: str, first: int, text: str) -> Iterator[Finding]:
    """Sentences of more than LONGEST words; rows of tables and of pictures are no sentences."""
    begin = 0
    for end in [*(hit.end() for hit in END.finditer(text)), len(text)]:
        sentence = text[begin:end]
        words = WORD.findall(ROW.sub("", sentence))
        if len(words) > LONGEST:
            line = first + text.count("\n", 0, end - len(sentence.lstrip()))
            opening = " ".join(words[:6])
            yield Finding(name, line, f"{opening} ...", f"{len(words)} words", "one idea a sentence")
        begin = end


def files(root: Path = ROOT) -> list[Path]:
    """Every file that the check covers."""
    found = [root / name for name in PAGES]
    for folder in FOLDERS:
        found += [path for path in (root / folder).rglob("*") if path.suffix in (".py", ".cu", ".md")]
    return sorted(path for path in found if not path.relative_to(root).as_posix().startswith(LEFT_OUT))


if __name__ == "__main__":
    given = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]
    all_found = [each for path in files() if any(map(path.is_relative_to, given)) for each in findings(path)]
    print(*all_found, sep="\n")
    sys.exit(bool(all_found))
