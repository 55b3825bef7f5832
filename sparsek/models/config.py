"""What a layer of a model becomes: BlockSparse, SemiSparse, BlockSemiSparse, Float8, "auto"; and rules by layer."""

from __future__ import annotations

import fnmatch
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from sparsek.core import arguments, doors
from sparsek.core.errors import InvalidInput
from sparsek.core.parsing import named
from sparsek.nn.experts import PackedLinear
from sparsek.products.formats.bsr24 import BLOCK_STEP
from sparsek.products.formats.convert import SCOPES, Scope
from sparsek.products.formats.pattern import block_sides
from sparsek.products.ops.weight_formats import FP8, WeightFormat


class _Config:
    """What all configs share: a JSON form, whose "format" is the name of the storage."""

    format = ""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make a config, which torchao knows from now on, if it is loaded."""
        if "torchao.quantization.transform_module" in sys.modules:
            doors.enter("torchao")
        return super().__new__(cls)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: "format", and every field."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]
        return {"format": self.format} | {name: _plain(value) for name, value in values.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Any:
        """Return the config of a JSON form, of the class that its format names.

        Args:
            data: What `to_dict` returned.

        Raises:
            InvalidInput: For an unknown format or field, and for values out of range.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("format"), str):
            raise InvalidInput(f"a config is {arguments.shown(data)}; it must be an object with a format")
        kind = named({each.format: each for each in get_args(LayerConfig)}, data["format"], "config")
        known = {each.name for each in fields(kind)}
        for name in data:
            if name != "format" and name not in known:
                raise InvalidInput(
                    f"{kind.__name__} has no field {arguments.shown(name)}; known: {', '.join(sorted(known))}"
                )
        return kind(**{name: _read(value) for name, value in data.items() if name != "format"})


def _plain(value: Any) -> Any:
    """A field in JSON."""
    if isinstance(value, _Config):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _read(value: Any) -> Any:
    """A field of JSON."""
    if isinstance(value, Mapping):
        return _Config.from_dict(value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class BlockSparse(_Config):
    """A weight that stores a share of its blocks, a BSR.

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
    format = "bsr"  # not a field

    def __post_init__(self) -> None:
        _check_blocks(self, 16)


@dataclass(frozen=True)
class SemiSparse(_Config):
    """A 2:4 semi-structured weight, a Semi24: two values of every four neighbours in a row.

    Examples:
        >>> sk.SemiSparse()
        SemiSparse()
    """

    format = "semi24"  # not a field


@dataclass(frozen=True)
class BlockSemiSparse(_Config):
    """A weight that stores a share of its blocks, each of them 2:4: a BSR24.

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
    format = "bsr24"  # not a field

    def __post_init__(self) -> None:
        _check_blocks(self, BLOCK_STEP)


@dataclass(frozen=True)
class Float8(_Config):
    """A weight in FP8 E4M3, with a scale for each row.

    Attributes:
        of: The storage whose values are in FP8: BlockSparse, SemiSparse or BlockSemiSparse; None for a dense weight.

    Raises:
        InvalidInput: For another config.

    Examples:
        >>> sk.Float8(sk.SemiSparse())
        Float8(of=SemiSparse())
    """

    of: Config | None = None
    format = "float8"  # not a field

    def __post_init__(self) -> None:
        if self.of is not None and not isinstance(self.of, get_args(Config)):
            raise InvalidInput(
                f"of is {arguments.shown(self.of)}; it must be BlockSparse, SemiSparse, BlockSemiSparse or None"
            )


AUTO = "auto"  # the planner chooses, see `auto.py`
Config: TypeAlias = BlockSparse | SemiSparse | BlockSemiSparse  # by which values are chosen
LayerConfig: TypeAlias = Config | Float8
Auto: TypeAlias = Literal["auto"]
Rule: TypeAlias = str | type[nn.Module] | Callable[[nn.Module, str], bool]
Rules: TypeAlias = Mapping[
    Any, LayerConfig | Auto | None
]  # by Rule, in which a Mapping of type checkers is invariant


def chosen_by(config: LayerConfig) -> Config | None:
    """The config by which values are chosen, that inside of a Float8; None for a dense weight in FP8."""
    return config.of if isinstance(config, Float8) else config


def form_of(config: LayerConfig) -> WeightFormat:
    """The format of a config."""
    inner = chosen_by(config)
    name = ("dense" if inner is None else inner.format) + (FP8 if isinstance(config, Float8) else "")
    if inner is None or isinstance(inner, SemiSparse):
        return WeightFormat(name)
    return WeightFormat(name, inner.block, inner.keep, inner.scope)


def _check_blocks(config: BlockSparse | BlockSemiSparse, step: int) -> None:
    rows, columns = block_sides(config.block, step)
    keep = arguments.number("keep", config.keep, 0, 1)
    if not keep:
        raise InvalidInput("keep is 0; a layer without blocks computes nothing: take it out of the rules")
    arguments.one_of("scope", config.scope, SCOPES)
    object.__setattr__(config, "block", rows if rows == columns else (rows, columns))
    object.__setattr__(config, "keep", keep)


def check_rules(config: Any) -> None:
    """Raise InvalidInput unless `config` is a config, "auto", or a mapping of rules to these."""

    def is_config(value: Any) -> bool:
        return isinstance(value, get_args(LayerConfig)) or (isinstance(value, str) and value == AUTO)

    if is_config(config):
        return
    names = ", ".join(each.__name__ for each in get_args(LayerConfig)) + f' or "{AUTO}"'
    if not isinstance(config, Mapping) or not config:
        raise InvalidInput(
            f"config is {arguments.shown(config)}; it must be one of {names}, such as BlockSparse(block=64, keep=0.5), "
            "or a dict of them by a glob of layer names, a type or a predicate"
        )
    for key, value in config.items():
        if not isinstance(key, (str, type)) and not callable(key):
            raise InvalidInput(f"a rule is for {arguments.shown(key)}; use a glob, a type or a predicate")
        if value is not None and not is_config(value):
            raise InvalidInput(
                f"the rule for {arguments.shown(key)} is {arguments.shown(value)}; use one of {names}, or None"
            )


def asked(what: str, function: Any, layer: nn.Module, name: str) -> bool:
    """What a function of a layer and its name returns, as a bool. Its own errors pass."""
    try:
        fits = inspect.signature(function, follow_wrapped=False).bind(layer, name)
    except TypeError:
        fits = None
    except ValueError:  # of a builtin without a signature
        fits = True
    if fits is None or isinstance(function, type):
        raise InvalidInput(
            f"{what} is {arguments.shown(function)}; it must be a function of two arguments, (module, name)"
        )
    found = function(layer, name)
    try:
        return bool(found)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(
            f"{what} returned {arguments.shown(found)} for {name!r}; it must return True or False"
        ) from None


def matches(rule: Rule, name: str, layer: nn.Module) -> bool:
    """Whether a glob matches the whole name of a layer, or it is of the type, or the predicate is true of it.

    Packed experts are also of the type of the module that holds them.
    """
    if isinstance(rule, str):
        return fnmatch.fnmatchcase(name, rule)
    if not isinstance(rule, type):
        return asked("a predicate", rule, layer, name)
    return isinstance(layer, rule) or (isinstance(layer, PackedLinear) and isinstance(layer.experts, rule))


def config_for(config: Any, name: str, layer: nn.Module) -> tuple[Any, bool]:
    """The config of a layer by the first rule that matches, None to leave it dense; and whether a rule names it.

    A rule names it by a predicate, and by a glob whose last part is more than a star.
    """
    if not isinstance(config, Mapping):
        return config, False
    for key, value in config.items():
        if matches(key, name, layer):
            return value, _is_name(key) or not isinstance(key, (str, type))
    return None, False


def is_meant(config: Any, name: str, layer: nn.Module) -> bool:
    """Whether a rule with a config names a layer, or its class, that is not linear: predicates are for linear ones."""
    rules = config.items() if isinstance(config, Mapping) else ()
    named = ((key, value) for key, value in rules if _is_name(key) or isinstance(key, type))
    return next((value is not None for key, value in named if matches(key, name, layer)), False)


def _is_name(rule: Any) -> bool:
    """Whether a rule is a glob whose last part is more than a star."""
    return isinstance(rule, str) and bool(rule.rpartition(".")[2].strip("*?"))
