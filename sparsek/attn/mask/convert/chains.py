"""Chains of attributes that the bytecode of a function reads, from globals, closures and the object of a method."""

from __future__ import annotations

import dis
from collections.abc import Iterable
from types import CodeType
from typing import NamedTuple

from sparsek.core.plan_owner import drop_oldest

CODES = 1024  # whose chains are kept


def words(*lines: str) -> frozenset[str]:
    """The words of some lines."""
    return frozenset(" ".join(lines).split())


# Attributes through which code reads what no chain shows.
UNSEEN = words(
    "__class__ __dict__ __globals__ __closure__ __code__ __self__ __func__ __subclasses__ __builtins__ f_back",
    "f_globals f_locals format format_map grad grad_fn",
)
UNSEEN_STEPS = words(
    "IMPORT_NAME IMPORT_STAR LOAD_BUILD_CLASS MATCH_CLASS LOAD_LOCALS FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC"
)


class Unknown(Exception):
    """A rule reads something that is not followed."""


class Chain(NamedTuple):
    """Attributes that code reads, from a global, a free variable or its first argument."""

    root: str  # LOAD_GLOBAL, LOAD_DEREF or LOAD_FAST
    name: str
    attributes: tuple[str, ...]


_CHAINS: dict[int, tuple[CodeType, tuple[Chain, ...] | None]] = {}  # by the id of code that is kept


def chains_of(code: CodeType) -> tuple[Chain, ...]:
    """What code and the functions in it read. `Unknown` if bytecode does not show it."""
    known = _CHAINS.get(id(code))
    if known is None:
        try:
            known = code, tuple(dict.fromkeys(_read_in(code, code.co_varnames[: code.co_argcount][:1])))
        except Unknown:
            known = code, None
        _CHAINS[id(code)] = known
        if len(_CHAINS) > CODES:
            drop_oldest(_CHAINS)
    if known[1] is None:
        raise Unknown
    return known[1]


def _read_in(code: CodeType, first: tuple[str, ...]) -> Iterable[Chain]:
    """`first`: the name of the first argument."""
    root: tuple[str, str] | None = None
    attributes: list[str] = []
    for step in (*dis.get_instructions(code), None):
        name = "" if step is None else step.opname
        if name in ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP"):
            continue
        if name in UNSEEN_STEPS or (
            step is not None and step.opcode in dis.hasname and step.argval in UNSEEN
        ):
            raise Unknown
        if root is not None and step is not None and name in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.append(step.argval)
            continue
        if root is not None:
            yield Chain(*root, tuple(attributes))
        root, attributes = None, []
        if step is None:
            break
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            root = "LOAD_GLOBAL", step.argval
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            root = ("LOAD_FAST" if (step.argval,) == first else "LOAD_DEREF"), step.argval
        elif "LOAD_FAST" in name:
            names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            for each in names:
                if (each,) == first:
                    if root is not None:
                        yield Chain(*root, ())
                    root = "LOAD_FAST", each
            if root is not None and names[-1] != root[1]:
                yield Chain(*root, ())
                root = None
    for each in code.co_consts:
        if type(each) is str and "%" in each:  # formats, as f"" does
            raise Unknown
        if isinstance(each, CodeType):
            own = each.co_varnames[: each.co_argcount + each.co_kwonlyargcount]
            hidden = bool(first) and (first[0] in own or first[0] not in each.co_freevars)
            yield from _read_in(each, () if hidden else first)
