"""The source of a measurement: a hash over the code that ran, without comments, docstrings and layout.

In files with device functions (Triton's and Gluon's) it covers what is compiled: those functions, the constants of
the module and the classes of SETTINGS. So planning around a kernel may change, and its functions may move to
another file, and its times still hold. The same applies to files of Hopper kernels without such functions. Other
files, CUDA C++ among them, count as a whole. SCHEDULES and LAUNCHING name the exceptions.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from sparsek.core.errors import InvalidInput

ROOT = Path(__file__).parents[1]
JOINED = " + "
CUDA_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
CUDA_NAME = re.compile(r"""["'](\w+\.cu)["']""")
LAST_COMMA = re.compile(r",(?=[])}])")
FSTRING_MIDDLE = getattr(tokenize, "FSTRING_MIDDLE", -1)  # of Python 3.12 and newer
DEVICE = ("jit", "constexpr_function", "builtin")
SETTINGS = ("Config", "Tile", "Pipeline")
# Kernels whose schedule is part of what is timed: it determines which sums their CTAs wait for.
SCHEDULES = {"hopper.attention_bwd": "plan.attention_grad_schedule"}
# The launcher determines the host time of a call, not the time of a kernel: benchmarks of host time name it.
LAUNCHING = tuple(f"sparsek.kernels.lang.{name}" for name in ("launch", "recorder", "shipped", "progress"))


def source_files(kernel: str, root: Path = ROOT) -> list[Path]:
    """The kernel's own file; the files of sparsek.kernels that it imports, directly or indirectly, except the
    launcher; its schedule's file; and the CUDA C++ files in the same folders that these name, or include.

    `kernel` is a name of the kernels' table, or a module of sparsek.kernels ("pack.to_bsr") or of sparsek
    ("mask.structured").
    """
    waiting = [_file_of(SCHEDULES[kernel], root)] if kernel in SCHEDULES else []
    waiting.append(_file_of(kernel, root))
    found: list[Path] = []
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.append(file)
        source = file.read_text(encoding="utf-8")
        waiting += [
            file.with_name(name) for name in CUDA_NAME.findall(source) if file.with_name(name).is_file()
        ]
        for module in imports(source) if file.suffix == ".py" else ():
            target = root.parent / (module.replace(".", "/") + ".py")
            followed = module.startswith("sparsek.kernels.") and module not in LAUNCHING
            if followed and target.is_file():
                waiting.append(target)
    return [found[0], *sorted(found[1:])]


def _file_of(name: str, root: Path) -> Path:
    path = _modules(root).get(name, name).replace(".", "/") + ".py"
    found = next((file for file in (root / "kernels" / path, root / path) if file.is_file()), None)
    if found is None:
        raise InvalidInput(f"no source file {root / 'kernels' / path} for a kernel called {name!r}")
    return found


def _modules(root: Path) -> dict[str, str]:
    """From names of kernels to their modules, as in the table of sparsek/kernels/__init__.py, which is not imported."""
    table = root / "kernels/__init__.py"
    tree = ast.parse(table.read_text(encoding="utf-8")) if table.is_file() else ast.Module([], [])
    tables = (node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is not None)
    return {name: module for table in tables for _, name, module, _ in ast.literal_eval(table)}


def source_hash(kernel: str, root: Path = ROOT) -> str:
    """16 hex digits of the SHA-256 over the code of the source files of a kernel, or of several: "a.x + b.y"."""
    files = {file for name in kernel.split(JOINED) for file in source_files(name, root)}
    parts = {part for file in files for part in code_in(file)}
    digest = hashlib.sha256()
    for name, text in sorted(parts):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()[:16]


def files_hash(files: Iterable[Path], root: Path) -> str:
    """16 hex digits of the SHA-256 over whole files, host code too: their paths below `root` and their contents; for
    Python and CUDA C++ without comments, docstrings and layout.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(_whole(file) + b"\0")
    return digest.hexdigest()[:16]


def _whole(file: Path) -> bytes:
    if file.suffix == ".cu":
        return code_in(file)[0][1].encode()
    if file.suffix != ".py":
        return file.read_bytes()
    return _whole_text(file.read_text(encoding="utf-8")).encode()


@lru_cache(maxsize=512)  # many tests need the same files
def _whole_text(source: str) -> str:
    return "\n".join(line for _, line in _logical_lines(source, ast.parse(source)))


def code_in(file: Path) -> list[tuple[str, str]]:
    """Names and texts of the code that counts in a file of Python or CUDA C++."""
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".cu":
        return [(file.name, " ".join(CUDA_COMMENT.sub(" ", source).split()))]
    return code_of(source, for_device=file.stem.startswith("hopper"))


@lru_cache(maxsize=256)  # every record of a page needs the files of its kernel
def code_of(source: str, *, for_device: bool = False) -> list[tuple[str, str]]:
    """Names and texts of the code that counts in Python. `for_device`: it compiles a kernel from another file."""
    tree = ast.parse(source)
    lines = _logical_lines(source, tree)

    def text(first: int, last: int) -> str:
        return "\n".join(line for row, line in lines if first <= row <= last)

    if not for_device and not any(_runs_on_device(node) for node in tree.body):
        return [("", text(1, len(source)))]
    return [
        (name, text(_first_line(node), node.end_lineno or node.lineno))
        for node in tree.body
        if (name := _counted(node))
    ]


def _counted(node: ast.stmt) -> str:
    """The name of a device function, of a constant, or of a class of settings; "" for code that does not count."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        return name if name.isupper() and name not in ("KERNEL", "SOURCE") else ""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (_runs_on_device(node) or node.name in SETTINGS):
        return node.name
    return ""


def _runs_on_device(node: ast.stmt) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    found = (each.func if isinstance(each, ast.Call) else each for each in decorators)
    return any(ast.unparse(each).rpartition(".")[2] in DEVICE for each in found)


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
    return min([node.lineno, *(each.lineno for each in decorators)])


def _logical_lines(source: str, tree: ast.Module) -> list[tuple[int, str]]:
    """Row and text of each logical line: its depth, then its tokens without spaces, whatever its line breaks."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = {node.body[0].lineno for node in nodes if ast.get_docstring(node) is not None}
    lines: list[tuple[int, str]] = []
    depth, row, parts = 0, 0, []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            depth += 1 if token.type == tokenize.INDENT else -1
        elif token.type == tokenize.NEWLINE:
            # Python 3.12 tokenizes inside f-strings, older ones do not; without spaces both read alike.
            text = "".join("".join(parts).split()).replace("{{", "{").replace("}}", "}")
            if row not in docstrings:
                lines.append((row, f"{depth} {LAST_COMMA.sub('', text)}"))
            parts = []
        elif token.type not in (tokenize.COMMENT, tokenize.NL):
            row = row if parts else token.start[0]
            middle = token.type == FSTRING_MIDDLE  # which holds one brace where the source has two
            parts.append(token.string.replace("{", "{{").replace("}", "}}") if middle else token.string)
    return lines


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
