"""Tables of measured configs: the one in the package, and the user's own file, which takes precedence.

`sparsek tune` writes the user's file. An entry is for one card, one version of a kernel (a hash of its source) and
one kind of problem: sizes are rounded to the nearest half power of two. `select` uses its config instead of the
kernel's heuristic choice. A config must be among the kernel's legal ones for the problem, so a file cannot add
others.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sparsek.core import env, files
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.parsing import json_value
from sparsek.plan.sources import source_hash

FORMAT = "sparsek tuning table"
VERSION = 1
SHIPPED = Path(__file__).with_name("tuned_h200.json")
# Numbers up to this are exact in a key, as are all fields named here.
EXACT_UP_TO = 16
EXACT = ("block", "a_block", "b_block", "dim", "v_dim", "q_heads", "kv_heads")
# A longest row of more than so many times the mean length is another kind of problem.
UNEVEN = 3
LEFT_OUT = ("card", "row_max", "touches_all_columns", "gapless")
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Entry:
    """The best config of a kernel for a kind of problem on a card.

    `source`: hash of the kernel's source. `seconds`: measured; `default_seconds`: of the kernel's own choice, in the
    same rounds; `predicted`: of that choice by the kernel's model. `date`: ISO, to the second.
    """

    card: str
    kernel: str
    source: str
    problem: str
    config: Mapping[str, Any]
    seconds: float
    default_seconds: float
    predicted: float
    date: str

    @property
    def key(self) -> Key:
        return self.card, self.kernel, self.problem


class Tuned(NamedTuple):
    """A config from a table, its time over that of the kernel's own choice, and the name of the table."""

    config: Any
    gain: float
    origin: str


Entries = dict[Key, Entry]


def key_of(p: Any) -> str:
    """A problem as text, without its card: "spmm a.dtype=bf16 a.block=128x128 a.nnzb=128 ... m=4096 k=4096 n=5793".

    Fields at their default are left out. Sizes above 16 are rounded to the nearest half power of two. The longest row
    enters only as far longer than the mean, or not.
    """
    parts = [p.op, *_words(p, "")]
    if getattr(p, "row_max", 0) and p.row_max * p.grid[0] > UNEVEN * p.nnzb:
        parts.append("uneven")
    return " ".join(parts)


def _words(p: Any, prefix: str) -> Iterator[str]:
    """The fields of a problem and of its parts, as text."""
    for each in fields(p):
        value = getattr(p, each.name)
        if each.name in LEFT_OUT or (each.default is not MISSING and value == each.default):
            continue
        if is_dataclass(value):
            yield from _words(value, prefix if each.name == "blocks" else f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}={_rounded(value, each.name in EXACT)}"


def _rounded(value: Any, exact: bool) -> str:
    if isinstance(value, tuple):
        return "x".join(_rounded(each, exact) for each in value) or "none"
    if isinstance(value, bool) or not isinstance(value, int) or exact or value <= EXACT_UP_TO:
        return str(value)
    return str(round(2.0 ** (round(2 * math.log2(value)) / 2)))


def as_json(config: Any) -> dict[str, Any]:
    """A kernel's frozen config as JSON; types that JSON lacks become text."""
    if not is_dataclass(config) or isinstance(config, type):
        return {"config": str(config)}
    return json.loads(json.dumps(asdict(config), default=str))


def matching(configs: Iterable[Any], wanted: Mapping[str, Any], paced: Sequence[str] = ()) -> Any:
    """The config that a file names; None if there is none. `paced`: fields that follow the problem, whose sizes are
    rounded in a key; these may differ.
    """
    near = None
    for config in configs:
        stated = as_json(config)
        if stated == wanted:
            return config
        if near is None and _without(stated, paced) == _without(wanted, paced):
            near = config
    return near


def _without(stated: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in stated.items() if name not in names}


def tuned(p: Any, kernel: Any, default: Any) -> Tuned | None:
    """The table's config for a problem that the kernel can run; None if there is none. `default`: its own choice."""
    if not env.tuning_file():
        return None
    for origin, entries in _tables():
        if not entries:
            continue
        entry = entries.get((p.card.name, kernel.name, key_of(p)))
        if entry is None or entry.source != _hash_of(kernel.name):
            continue
        config = matching([default, *kernel.configs(p)], entry.config, getattr(kernel, "paced", ()))
        if config is not None:
            gain = entry.seconds / entry.default_seconds
            said = (
                "the kernel's own choice was kept"
                if gain == 1
                else f"{gain:.2f}x the time of the kernel's own choice"
            )
            return Tuned(config, gain, f"{origin}, {entry.date[:10]}: {said}")
    return None


def is_fresh(entry: Entry) -> bool:
    """Whether the kernel's source has not changed since the measurement."""
    return entry.source == _hash_of(entry.kernel)


@cache
def _hash_of(kernel: str) -> str:
    try:
        return source_hash(kernel)
    except (InvalidInput, OSError):
        return ""


class _Read(NamedTuple):
    """The tables as read: the path of the user's file, and the number of this read."""

    path: str
    tables: tuple[tuple[str, Entries], ...]


_read: _Read | None = None
_generation = 0


def _tables() -> tuple[tuple[str, Entries], ...]:
    """The user's table and the shipped one, with their names. Read once; again if the path has changed."""
    global _read, _generation
    path = env.tuning_file()
    if _read is None or _read.path != path:
        own = _lenient(Path(path))
        _read = _Read(path, ((f"tuned: {path}", own), ("tuned: the table that ships", _lenient(SHIPPED))))
        _generation += 1
    return _read.tables


def generation() -> int:
    """A number that changes when tables are read again: choices from older ones may differ."""
    if env.tuning_file():
        _tables()
    return _generation


def forget() -> None:
    """Makes the next choice read the tables again."""
    global _read
    _read = None


def _lenient(path: Path) -> Entries:
    """The entries of a file; none, with a warning that names it, if it is unusable. None if there is no file."""
    try:
        return read(path) if path.exists() else {}
    except InvalidFile as error:
        warnings.warn(f"tuned configs are ignored: {error}", stacklevel=2)
    except OSError:
        pass
    return {}


def read(path: Path) -> Entries:
    """The entries of a table file. Raises InvalidFile with the fault of any other file."""
    try:
        text = files.content(path)
    except OSError as error:
        raise InvalidFile(f"{path}: cannot be read: {error}") from None
    found = json_value(text, path)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InvalidFile(f"{path}: is not a {FORMAT}")
    if found.get("version") != VERSION:
        raise InvalidFile(f"{path}: is of version {found.get('version')!r}, this is {VERSION}; tune again")
    listed = found.get("entries")
    if not isinstance(listed, list):
        raise InvalidFile(f"{path}: its entries are not a list")
    entries: Entries = {}
    for at, each in enumerate(listed):
        entry = _entry(each)
        if entry is None:
            raise InvalidFile(f"{path}: entry {at} is malformed")
        entries[entry.key] = entry
    return entries


def _entry(found: Any) -> Entry | None:
    if not isinstance(found, dict) or set(found) != {each.name for each in fields(Entry)}:
        return None
    for each in fields(Entry):
        value: Any = found[each.name]
        if each.type == "str" and not (isinstance(value, str) and value):
            return None
        if each.type == "float" and not _is_positive(value):
            return None
    return Entry(**found) if isinstance(found["config"], dict) else None


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max  # an int of JSON may be too large for a float


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Writes a table atomically: to a temporary file, which then replaces it. Makes missing folders. Raises
    InvalidInput if the path cannot be a regular file.
    """
    listed = [asdict(each) for each in sorted(entries, key=lambda each: each.key)]
    lines = ",\n".join("  " + json.dumps(each, allow_nan=False) for each in listed)
    body = f"\n{lines}\n" if lines else ""
    text = f'{{"format": {json.dumps(FORMAT)}, "version": {VERSION}, "entries": [{body}]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as file:
        file.write(text.encode())


def add(path: Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a table, replacing older ones of the same keys. Processes that add to one table take turns.

    Raises InvalidFile for any other file, which stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.turn_in(path.parent):
        write(path, {**extensible(path), **{each.key: each for each in entries}}.values())
    forget()


def extensible(path: Path) -> Entries:
    """The entries of a table that `add` may extend; none if there is no file. Raises InvalidFile for any other file."""
    try:
        return read(path) if path.exists() else {}
    except InvalidFile as error:
        raise InvalidFile(f"{error}; it is not overwritten: remove it, or name another file") from None


def is_table(path: Path) -> bool:
    """Whether a file begins as a table does, of any version and even if it is damaged further on."""
    return files.content(path).startswith(f'{{"format": {json.dumps(FORMAT)},'.encode())
