"""Frozen dataclasses of tensors: torch pytrees that can be made without checks, copied and pickled.

@record(leaves=("values", "meta"), own=("values",))
@dataclass(frozen=True, eq=False, repr=False)
class Semi24(Record): ...
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch.utils import _pytree

from sparsek.core.errors import InvalidInput

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = TypeVar("Kind", bound="Record")


class Record:
    """The methods that `record` adds to a class. Names and defaults are those of the constructor's fields."""

    _fields: ClassVar[dict[str, Any]]  # the default of each, or MISSING
    _made: ClassVar[dict[str, Callable[[], Any]]]  # factories of the fields that every object begins with
    _leaves: ClassVar[tuple[str, ...]]
    _plain: ClassVar[tuple[str, ...]]
    _own: ClassVar[tuple[str, ...]]

    @classmethod
    def unchecked(cls, *parts: Any, **named: Any) -> Self:
        """An object of fields that are known to be right, given as to the constructor: no check, no sync."""
        found = {}
        for at, (name, default) in enumerate(cls._fields.items()):
            found[name] = part = parts[at] if at < len(parts) else named.pop(name, default)
            if part is MISSING:
                raise TypeError(f"{cls.__name__}.unchecked needs {name}")
        if named or len(parts) > len(cls._fields):
            raise TypeError(f"{cls.__name__} has no field {', '.join(named) or len(parts)}")
        return cls.of_fields(found)

    @classmethod
    def of_fields(cls, fields: dict[str, Any]) -> Self:
        """`unchecked` of every field by name, in a third of its time. Takes over the dict."""
        made = object.__new__(cls)
        for name, begin in cls._made.items():
            fields[name] = begin()
        if torch.compiler.is_compiling():  # which traces no change of __dict__
            for name, part in fields.items():
                object.__setattr__(made, name, part)
        else:
            made.__dict__.update(fields)
        return made

    def __copy__(self) -> Self:
        """A new object with the same parts; an object that is never written to returns itself."""
        return self.unchecked(**self._parts()) if self._own else self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies the parts that callers may write to, and shares the rest."""
        if not self._own:
            return self
        copied = {name: deepcopy(getattr(self, name), memo) for name in self._own}
        return self.unchecked(**{**self._parts(), **copied})

    def __reduce__(self) -> Any:
        """By the constructor, which checks what was pickled."""
        return type(self), tuple(self._parts().values())

    def _checked(self) -> Self:
        """The same parts, checked by the constructor."""
        return type(self)(*self._parts().values())

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


def record(
    *, leaves: tuple[str, ...], own: tuple[str, ...] = (), picklable: str = ""
) -> Callable[[type[Kind]], type[Kind]]:
    """Registers a frozen dataclass with torch's pytrees, as "sparsek." and its name.

    leaves: the fields that are tensors, or trees of them; None is left out. own: leaves that callers may write to,
    which deepcopy copies. picklable: why it is not picklable, and what to do instead; "" if its constructor can
    unpickle it.
    """

    def decorate(cls: type[Kind]) -> type[Kind]:
        asked = {each.name: each.default for each in fields(cls) if each.init}  # type: ignore[arg-type]
        cls._fields, cls._leaves, cls._own = asked, leaves, own
        cls._plain = tuple(name for name in asked if name not in leaves)
        cls._made = {each.name: each.default_factory for each in fields(cls) if not each.init}  # type: ignore[arg-type]

        def flatten_with_keys(x: Kind) -> tuple[list[tuple[Any, Any]], Any]:
            there, context = _split(x)
            return [(_pytree.GetAttrKey(name), part) for name, part in there.items()], context

        def flatten(x: Kind) -> tuple[list[Any], Any]:
            there, context = _split(x)
            return list(there.values()), context

        def unflatten(parts: Any, context: Any) -> Kind:
            names, plain = context
            named = dict(zip(names, parts, strict=True))
            absent = {name: None for name in leaves if name not in named}
            return cls.unchecked(**named, **absent, **dict(zip(cls._plain, plain, strict=True)))

        _pytree.register_pytree_node(
            cls,
            flatten,
            unflatten,
            serialized_type_name=f"sparsek.{cls.__name__}",
            flatten_with_keys_fn=flatten_with_keys,
        )
        if picklable:

            def refuse(self: Kind, protocol: Any) -> Any:
                raise InvalidInput(picklable)

            cls.__reduce_ex__ = refuse
        return cls

    return decorate


def _split(x: Record) -> tuple[dict[str, Any], Any]:
    """The leaves that are not None, and the context that rebuilds the object: their names, and the other fields."""
    there = {name: part for name in x._leaves if (part := getattr(x, name)) is not None}
    return there, (tuple(there), tuple(getattr(x, name) for name in x._plain))
