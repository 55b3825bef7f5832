"""Fields of cases that are options of a command: how each is written, parsed and checked."""

import dataclasses
import itertools
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, replace
from typing import Any, TypeVar

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import listed, parse_block
from sparsek.products.formats.pattern import block_sides

Made = TypeVar("Made")
Check = Callable[[str, Any], object]


@dataclass(frozen=True)
class CommandOption:
    """An option of a benchmark's command: a comma list whose values fill fields of cases, or a switch.

    `fields`: those of the case that a value fills, one or several; the option's own name unless given. `off`: of a
    switch, how its opposite is written.
    """

    name: str
    default: str | bool
    help: str
    parse: Callable[[str], Any] = str
    fields: tuple[str, ...] = ()
    off: str = ""

    def filled(self, given: str | bool) -> list[dict[str, Any]]:
        """The fields of a case that each of the given values fills. Raises InvalidInput that names the option."""
        values: list[Any] = [given] if isinstance(given, bool) else listed(self.name, given, self.parse)
        several = len(self.fields) > 1
        return [dict(zip(self.fields, each if several else (each,), strict=True)) for each in values]


def field(
    default: str | bool,
    help: str,
    parse: Callable[[str], Any] = str,
    check: Check | None = None,
    *,
    usual: Any = MISSING,
    **more: Any,
) -> Any:
    """A field of a case that an option of the command fills; `more` are other fields of `CommandOption`.

    `default` is the command's, `usual` the one of the class. `check(name, value)` raises InvalidInput.
    """
    made = CommandOption(more.pop("name", ""), default, help, parse, **more)
    return dataclasses.field(default=usual, metadata={"option": made, "check": check})


def checked(check: Check, usual: Any = MISSING) -> Any:
    """A field of a case without an option of its own."""
    return dataclasses.field(default=usual, metadata={"check": check})


def option_of(of: Field[Any]) -> CommandOption | None:
    """The option that fills a field of a case, if there is one."""
    found = of.metadata.get("option")
    if found is None:
        return None
    return replace(found, name=found.name or of.name.replace("_", "-"), fields=found.fields or (of.name,))


def positive(name: str, value: int) -> None:
    if value < 1:
        raise InvalidInput(f"a benchmark case needs {name} >= 1, got {value}")


def fraction(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        raise InvalidInput(f"{name} is a fraction in (0, 1], got {value}")


def check_choice(what: str, value: str, allowed: Collection[str]) -> None:
    """Raises InvalidInput unless the value is one of those allowed."""
    if value not in allowed:
        raise InvalidInput(f"{what} is one of {', '.join(allowed)}, got {value!r}")


def size(help: str, default: str = "8192", parse: Callable[[str], Any] = int, **more: Any) -> Any:
    """A count, at least 1."""
    return field(default, help, parse, positive, **more)


def share(help: str = "Fraction of blocks that are stored.", default: str = "0.125", **more: Any) -> Any:
    return field(default, help, float, fraction, **more)


def choice(what: str, allowed: Collection[str], default: str = "", **more: Any) -> Any:
    """One of these names; its help lists them after `what`."""
    default = default or next(iter(allowed))
    return field(
        default,
        f"{what}: {', '.join(allowed)}.",
        check=lambda name, value: check_choice(name, value, allowed),
        **more,
    )


def block(**more: Any) -> Any:
    """Blocks of a matrix."""
    given = {"default": "128", "help": "Blocks: 128,64,512x112.", "parse": parse_block} | more
    return field(check=lambda name, block: block is None or block_sides(block), **given)


def dtype() -> Any:
    return field(
        "bf16", "bf16, fp16, fp32, fp64.", check=lambda name, dtype: dtypes.parse(dtype), usual="bf16"
    )


def combined(
    make: Callable[..., Made], options: Sequence[CommandOption], given: Mapping[str, str | bool]
) -> tuple[Made, ...]:
    """A case for every combination of the options' values, the last option varying fastest; equal ones once.

    `given` may leave out options, which then have their defaults.
    """
    lists = [option.filled(given.get(option.name, option.default)) for option in options]
    return tuple(dict.fromkeys(make(**ChainMap(*parts)) for parts in itertools.product(*lists)))
