"""Builders inside torch.compile: masks of options are constants of the graph, masks of tensors come from one op.

    base = torch.ops.sparsek.mask(tensors, recipe)    one node: runs the builder, and returns one int32 tensor
    mask = BlockMask of views of `base`

A `Recipe` is a builder with its options. Where the lists are in `base` follows from these and from the shapes of the
tensors. While torch.compile traces, the builder runs once on fake tensors, which have no values, to find it. So a new
option or shape compiles again, and new values do not.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sparsek.attn.mask.data import MaskData, leaves_of
from sparsek.attn.mask.layout import MaskLayout
from sparsek.attn.mask.lists import BlockLists
from sparsek.attn.mask.readback import raise_earlier
from sparsek.core.errors import InvalidInput
from sparsek.core.operations import TAGS
from sparsek.core.tracing import CONSTANT, constant

Given = ParamSpec("Given")
Made = TypeVar("Made")
_compiling = torch.compiler.is_compiling

# Kinds of arguments as constants. A tensor is its number, an object its class and fields, a float its hexadecimal text;
# anything else is itself. torch.compile hands on objects made in a graph without their fields, and floats as symbols.
TENSOR, SEQUENCE, OBJECT, FLOAT, PLAIN = range(5)


class Recipe(NamedTuple):
    """A builder, and its arguments, where tensors have numbers: pairs (a tensor's number, None) or (None, value)."""

    make: Callable[..., MaskData]
    args: tuple[tuple[int | None, Any], ...]
    named: dict[str, tuple[int | None, Any]]

    def run(self, tensors: Sequence[Tensor]) -> MaskData:
        """The mask of these tensors."""
        args = [value if at is None else tensors[at] for at, value in self.args]
        named = {name: value if at is None else tensors[at] for name, (at, value) in self.named.items()}
        return self.make(*args, **named)


# The class of masks, whose module imports this one.
_MASK: list[type[MaskData]] = []
_BUILDERS: dict[str, Callable[..., Any]] = {}
_RECIPES: dict[str, tuple[Recipe, MaskLayout]] = {}


def makes(cls: type[MaskData]) -> None:
    """Let traced builders make masks of this class."""
    _MASK[:] = [cls]


def register(make: Callable[..., Any], made: Callable[..., Any]) -> str:
    """The name under which `node` and `constant_mask` find `made`, the public form of `make`."""
    name = f"{make.__module__}.{make.__qualname__}"
    _BUILDERS[name] = made
    return name


def traceable(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """For builders that read tensors: inside torch.compile they are one node of the graph."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        return node(name, args, kwargs) if _compiling() and not CONSTANT else make(*args, **kwargs)

    name = register(make, made)
    return made


def constant_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask of a builder that reads no tensor: a constant of the graph."""
    tensors: list[Tensor] = []
    spec = _spec(args, kwargs, tensors)
    if tensors:
        raise InvalidInput(
            "a block mask is made inside torch.compile of the values of a tensor; give a list or ints, or make it "
            "outside and pass it to the compiled function"
        )
    found = constant_mask(name, spec)
    if isinstance(found, str):
        raise InvalidInput(found)
    return found


def node(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask of a builder of tensors, for torch.compile to trace."""
    if not _compiling() or CONSTANT:  # a graph ended here, because of an error
        return _BUILDERS[name](*args, **kwargs)
    tensors: list[Tensor] = []
    spec = _spec(args, kwargs, tensors)
    metas = tuple((_ints(x.shape), _ints(x.stride()), x.dtype, x.device) for x in tensors)
    recipe, _, text = _prepared(name, spec, metas).partition("\n")
    if not text:
        raise InvalidInput(recipe)
    layout = MaskLayout.of_text(text)
    base = torch.ops.sparsek.mask([x.detach() for x in tensors], recipe)
    leaves = layout.leaves(base)
    mask = _MASK[0].unchecked(
        full=BlockLists(leaves[0], leaves[1], leaves[2]), partial=BlockLists(leaves[3], leaves[4], leaves[5]),
        lo=leaves[6], hi=leaves[7], rules=leaves[8], bits=leaves[9], **layout.fields,
    )  # fmt: skip
    object.__setattr__(mask, "_layout", layout)
    object.__setattr__(mask, "_base", base)
    return mask


def _ints(values: Any) -> tuple[int, ...]:
    """Plain ints: torch.compile then has no symbols in their place."""
    return tuple([operator.index(each) for each in values])


def _spec(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, Any]:
    """Arguments as constants; their tensors are added to `tensors`."""
    named = tuple([(name, encoded(value, tensors)) for name, value in kwargs.items()])
    return tuple([encoded(value, tensors) for value in args]), named


def encoded(value: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    """An argument of a builder as a constant."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR, len(tensors) - 1
    if isinstance(value, bool):
        return PLAIN, value
    if isinstance(value, int):
        return PLAIN, operator.index(value)
    if isinstance(value, float):
        return FLOAT, value.hex()
    if isinstance(value, (tuple, list)):
        return SEQUENCE, tuple([encoded(each, tensors) for each in value])
    kind: Any = type(value)
    if getattr(kind, "of_fields", False) and hasattr(kind, "__match_args__"):
        return OBJECT, kind, tuple([encoded(getattr(value, name), tensors) for name in kind.__match_args__])
    return PLAIN, value


def decoded(code: tuple[Any, ...]) -> Any:
    """The argument that `encoded` has made this of; no tensor."""
    kind, value = code[0], code[1]
    if kind == FLOAT:
        return float.fromhex(value)
    if kind == SEQUENCE:
        return tuple(decoded(each) for each in value)
    if kind == OBJECT:
        return value(*(decoded(each) for each in code[2]))
    return value


def _opened(code: tuple[Any, ...]) -> tuple[int | None, Any]:
    return (code[1], None) if code[0] == TENSOR else (None, decoded(code))


def _or_message(make: Callable[Given, Made]) -> Callable[Given, Made | str]:
    """`make`, with the text of InvalidInput in its place: the traced code raises it, and a graph may end there."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> Made | str:
        try:
            return make(*args, **kwargs)
        except InvalidInput as error:
            return " ".join(str(error).split())

    return made


@constant
@_or_message
def constant_mask(name: str, spec: tuple[Any, Any]) -> MaskData:
    """A mask of options alone, made while torch.compile traces; the text of an error, if there is one."""
    args, named = spec
    return _BUILDERS[name](*map(decoded, args), **{key: decoded(code) for key, code in named})


@constant
@_or_message
def _prepared(name: str, spec: tuple[Any, Any], metas: tuple[Any, ...]) -> str:
    """The name of the recipe of a builder with these options for such tensors, and in the next line the text of the
    layout; or an error in one line.
    """
    key = f"{name.rpartition('.')[2]}-{hashlib.sha256(repr((name, spec, metas)).encode()).hexdigest()[:24]}"
    known = _RECIPES.get(key)
    if known is None:
        args, named = tuple(map(_opened, spec[0])), {each: _opened(code) for each, code in spec[1]}
        recipe = Recipe(_BUILDERS[name], args, named)
        known = _RECIPES[key] = recipe, _layout_of(recipe, metas)
    return f"{key}\n{known[1].text()}"


def _layout_of(recipe: Recipe, metas: tuple[Any, ...]) -> MaskLayout:
    """The layout of all masks of a recipe, from a run without values."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
    )

    unreadable = DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException
    try:
        # torch.export has a fake mode of its own around the call.
        with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            mask = recipe.run(
                [torch.empty_strided(shape, step, dtype=kind, device=at) for shape, step, kind, at in metas]
            )
    except unreadable as error:
        raise InvalidInput(
            f"a block mask is made inside torch.compile of values that only the run knows ({error}); make it outside "
            "and pass it to the compiled function"
        ) from error
    return mask._layout or MaskLayout.like(mask, leaves_of(mask))


@torch.library.custom_op(
    "sparsek::mask", mutates_args=(), schema="(Tensor[] tensors, str recipe) -> Tensor", tags=TAGS
)
def mask_op(tensors: Sequence[Tensor], recipe: str) -> Tensor:
    """The base of the mask that the builder makes of these tensors, int32 [n].

    Raises InvalidInput as the builder does: on a GPU, for a fault that the device found, at a later call.
    """
    known, layout = _known(recipe)
    raise_earlier(layout)
    with torch.no_grad():
        mask = known.run(tensors)
    if mask._base is not None and mask._layout is not None and mask._layout.shapes == layout.shapes:
        return mask._base
    base = torch.zeros(layout.length, dtype=torch.int32, device=mask.device)
    for part, place in zip(leaves_of(mask), layout.leaves(base), strict=True):
        if part is not None and place is not None:
            place.flatten()[: part.numel()].copy_(part.flatten())
    return base


@mask_op.register_fake
def _(tensors: Sequence[Tensor], recipe: str) -> Tensor:
    return tensors[0].new_empty(_known(recipe)[1].length, dtype=torch.int32)


def _known(recipe: str) -> tuple[Recipe, MaskLayout]:
    known = _RECIPES.get(recipe)
    if known is None:
        raise InvalidInput(f"mask recipe {recipe} is of another process; compile the function in this one")
    return known
