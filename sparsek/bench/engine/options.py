"""Options of a benchmark's command, and the cases that they give."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sparsek.core.errors import InvalidInput

Made = TypeVar("Made")


@dataclass(frozen=True)
class Option:
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

    def filled(self, value: Any) -> dict[str, Any]:
        """The fields of a case that a value of this option fills."""
        return (
            dict(zip(self.fields, value, strict=True))
            if len(self.fields) > 1
            else {(self.fields or (self.name,))[0]: value}
        )

    def values(self, given: str | bool) -> list[Any]:
        """What was given, parsed. Raises InvalidInput that names the option."""
        return [given] if isinstance(given, bool) else listed(self.name, given, self.parse)


def combined(
    make: Callable[..., Made], options: Sequence[Option], given: Mapping[str, str | bool]
) -> tuple[Made, ...]:
    """A case for every combination of the options' values, the last option varying fastest; equal ones once.

    `given` may leave out options, which then have their defaults.
    """
    lists = [option.values(given.get(option.name, option.default)) for option in options]
    found: list[Made] = []
    for values in itertools.product(*lists):
        fields: dict[str, Any] = {}
        for option, value in zip(options, values, strict=True):
            fields |= option.filled(value)
        found.append(make(**fields))
    return tuple(dict.fromkeys(found))


def by_measure(what: str, measures: Mapping[str, Callable[..., Made]]) -> Callable[..., Made]:
    """A function that makes a case, whose option `measure` is a key of `measures`. `what`: "an MLP"."""

    def make(*, measure: str, **fields: Any) -> Made:
        if measure not in measures:
            raise InvalidInput(f"of {what}, {' or '.join(measures)} is measured, not {measure!r}")
        return measures[measure](**fields)

    return make


def listed(name: str, text: str, parse: Callable[[str], Made]) -> list[Made]:
    """The values of a comma list. Raises InvalidInput that names the option."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"--{name} {text!r}: {error}") from None


def parse_block(text: str) -> tuple[int, int]:
    """ "128" -> (128, 128); "512x112" -> (512, 112)."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.strip().isdigit() for part in parts):
        raise InvalidInput(f"a block is written as 128 or as 512x112, got {text!r}")
    sides = [int(part) for part in parts]
    return sides[0], sides[-1]


BLOCK = Option("block", "128", "Blocks: 128,64,512x112.", parse_block)
DENSITY = Option("density", "0.125", "Fraction of blocks that are stored.", float)
DTYPE = Option("dtype", "bf16", "bf16, fp16, fp32, fp64.")
