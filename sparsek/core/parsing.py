"""Text of other people: names, lists and blocks of a command line, and JSON."""

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from sparsek.core.errors import InvalidFile, InvalidInput, SparseKError

Made = TypeVar("Made")
MOST_LISTED = 16  # names


def json_value(
    text: str | bytes, where: object, kind: type[SparseKError] = InvalidFile, *, once: bool = False
) -> Any:
    """The value of a JSON text that others wrote. Raises `kind`, with `where`, for any other text, and for one that is
    nested more deeply than Python's parser follows. `once`: also for an object that has a name twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once if once else None)
    except RecursionError:
        fault = "its lists or objects are nested too deeply"
    except ValueError as error:
        fault = str(error)
    raise kind(f"{where}: not JSON: {fault}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"an object has a name twice among {reprlib.repr([name for name, _ in pairs])}")
    return found


def unknown(what: str, name: str, known: Iterable[str]) -> InvalidInput:
    """The error for a name that is not known, with near ones, and all of them unless they are many."""
    known = tuple(known)
    near = get_close_matches(name, known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    if not near or len(known) <= MOST_LISTED:
        hint += f"{' Known' if near else '; known'}: {', '.join(known)}"
    return InvalidInput(f"no {what} is called {name!r:.80}{hint}")


def named(known: Mapping[str, Made], name: str, what: str = "suite") -> Made:
    """The one of that name. Raises InvalidInput that lists the known names."""
    if name not in known:
        raise unknown(what, name, known)
    return known[name]


def listed(name: str, text: str, parse: Callable[[str], Made]) -> list[Made]:
    """The values of a comma list. Raises InvalidInput that names the option."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"--{name} {text!r}: {error}") from None


def is_count(text: str) -> bool:
    """Whether a text is a number of at most nine digits: int() takes neither superscripts nor thousands of digits."""
    return text.isascii() and text.isdigit() and len(text) < 10


def parse_block(text: str) -> tuple[int, int]:
    """ "128" -> (128, 128); "512x112" -> (512, 112)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(is_count(part.strip()) for part in parts):
        raise InvalidInput(f"a block is written as 128 or as 512x112, got {text!r}")
    sides = [int(part) for part in parts]
    return sides[0], sides[-1]
