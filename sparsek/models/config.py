"""What a layer of a model becomes: BlockSparse, SemiSparse or BlockSemiSparse; and rules that choose one by layer."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, get_args

from torch import nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import named
from sparsek.products.formats.bsr24 import BLOCK_STEP
from sparsek.products.formats.convert import SCOPES, Scope
from sparsek.products.formats.pattern import block_sides


class _Config:
    """What all configs share: a JSON form, whose "format" is the name of the storage."""

    format: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: "format", and every field."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {"format": self.format} | {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Config:
        """Return the config of a JSON form.

        Args:
            data: What `to_dict` returned.

        Raises:
            InvalidInput: For an unknown format or field, and for values out of range.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("format"), str):
            raise InvalidInput(f"a config is {arguments.shown(data)}; it must be an object with a format")
        kind = named({each.format: each for each in get_args(Config)}, data["format"], "config")
        known = {each.name for each in fields(kind)}
        for name in data:
            if name != "format" and name not in known:
                raise InvalidInput(
                    f"{kind.__name__} has no field {name!r}; known: {', '.join(sorted(known))}"
                )
        values = {name: value for name, value in data.items() if name != "format"}
        return kind(
            **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )


@dataclass(frozen=True)
class BlockSparse(_Config):
    """A weight of which a share of the blocks is stored, a BSR.

    Attributes:
        block: The sides (bm, bk) of a block, or one side of a square one: multiples of 16 from 16 to 512.
        keep: The share of the blocks to store, over 0 and up to 1.
        scope: Where `keep` chooses: in each block row ("row"), or in the whole weight ("global").

    Raises:
        InvalidInput: For an argument outside these ranges.

    Examples:
        >>> sk.BlockSparse(block=32, keep=0.25)
        BlockSparse(block=32, keep=0.25, scope='row')
    """

    block: int | tuple[int, int] = 64
    keep: float = 0.5
    scope: Scope = "row"
    format: ClassVar[str] = "bsr"

    def __post_init__(self) -> None:
        _check_blocks(self, 16)


@dataclass(frozen=True)
class SemiSparse(_Config):
    """A 2:4 semi-structured weight, a Semi24: two values of every four neighbours in a row.

    Examples:
        >>> sk.SemiSparse()
        SemiSparse()
    """

    format: ClassVar[str] = "semi24"


@dataclass(frozen=True)
class BlockSemiSparse(_Config):
    """A weight of which a share of the blocks is stored, and these are 2:4: a BSR24.

    Attributes:
        block: The sides (bm, bk) of a block, or one side of a square one: multiples of 64 from 64 to 512.
        keep: The share of the blocks to store, over 0 and up to 1.
        scope: Where `keep` chooses: in each block row ("row"), or in the whole weight ("global").

    Raises:
        InvalidInput: For an argument outside these ranges.

    Examples:
        >>> sk.BlockSemiSparse(block=128, keep=0.5)
        BlockSemiSparse(block=128, keep=0.5, scope='row')
    """

    block: int | tuple[int, int] = 64
    keep: float = 0.5
    scope: Scope = "row"
    format: ClassVar[str] = "bsr24"

    def __post_init__(self) -> None:
        _check_blocks(self, BLOCK_STEP)


Config: TypeAlias = BlockSparse | SemiSparse | BlockSemiSparse
Rules: TypeAlias = Mapping[str | type[nn.Module] | Callable[[nn.Module, str], bool], Config | None]


def _check_blocks(config: BlockSparse | BlockSemiSparse, step: int) -> None:
    rows, columns = block_sides(config.block, step)
    keep = arguments.number("keep", config.keep, 0, 1)
    if not keep:
        raise InvalidInput("keep is 0; a layer without blocks computes nothing: take it out of the rules")
    arguments.one_of("scope", config.scope, SCOPES)
    object.__setattr__(config, "block", rows if rows == columns else (rows, columns))
    object.__setattr__(config, "keep", keep)


def check_rules(config: Any) -> None:
    """Raise InvalidInput unless `config` is a config or a mapping of rules."""
    if isinstance(config, get_args(Config)):
        return
    if not isinstance(config, Mapping) or not config:
        raise InvalidInput(
            f"config is {arguments.shown(config)}; it must be a config such as BlockSparse(block=64, keep=0.5), or a "
            "dict of them by a glob of layer names, a type or a predicate"
        )
    for key, value in config.items():
        if not isinstance(key, (str, type)) and not callable(key):
            raise InvalidInput(f"a rule is for {arguments.shown(key)}; use a glob, a type or a predicate")
        if value is not None and not isinstance(value, get_args(Config)):
            raise InvalidInput(
                f"the rule for {arguments.shown(key)} is {arguments.shown(value)}; use a config or None"
            )


def config_for(config: Config | Rules, name: str, layer: nn.Module) -> tuple[Config | None, bool]:
    """The config of a layer by the first rule that matches, None to leave it dense; and whether a rule names it.

    A glob matches the whole name; a predicate is called with the layer and its name.
    """
    if not isinstance(config, Mapping):
        return config, False
    for key, value in config.items():
        if isinstance(key, str):
            hit = fnmatch.fnmatchcase(name, key)
        elif isinstance(key, type):
            hit = isinstance(layer, key)
        else:
            hit = key(layer, name)
        if hit:
            return value, not isinstance(key, type)
    return None, False
