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
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from sparsek.core.errors import InvalidInput
from sparsek.core.memory import carved
from sparsek.core.operations import TAGS
from sparsek.core.tracing import CONSTANT, constant
from sparsek.mask.layout import Kind, kind_of, known_kind, leaves_of, raise_earlier
from sparsek.mask.lists import BlockLists, Sizes

if TYPE_CHECKING:
    from sparsek.mask.mask import BlockMask

Given = ParamSpec("Given")
Made = TypeVar("Made")
_compiling = torch.compiler.is_compiling

# Kinds of arguments as constants. A tensor is its number, an object its class and fields, a float its hexadecimal text;
# anything else is itself. torch.compile hands on objects made in a graph without their fields, and floats as symbols.
TENSOR, SEQUENCE, OBJECT, FLOAT, PLAIN = range(5)
ABSENT = "-"  # a tensor that a mask lacks


class Recipe(NamedTuple):
    """A builder, its arguments with numbers in place of tensors, and the layout of what it makes.

    `args`, `named`: pairs (the tensor's number, None) or (None, value). `length`: int32 elements of the base.
    """

    make: Callable[..., BlockMask]
    args: tuple[tuple[int | None, Any], ...]
    named: dict[str, tuple[int | None, Any]]
    kind: Kind
    length: int

    def run(self, tensors: Sequence[Tensor]) -> BlockMask:
        """The mask of these tensors."""
        args = [value if at is None else tensors[at] for at, value in self.args]
        named = {name: value if at is None else tensors[at] for name, (at, value) in self.named.items()}
        return self.make(*args, **named)


# The class of masks, whose module imports this one.
_MASK: list[type[BlockMask]] = []
_BUILDERS: dict[str, Callable[..., BlockMask]] = {}
_RECIPES: dict[str, Recipe] = {}


def makes(cls: type[BlockMask]) -> None:
    """Let traced builders make masks of this class."""
    _MASK[:] = [cls]


def register(make: Callable[..., BlockMask], made: Callable[..., BlockMask]) -> str:
    """The name under which `node` and `constant_mask` find `made`, the public form of `make`."""
    name = f"{make.__module__}.{make.__qualname__}"
    _BUILDERS[name] = made
    return name


def traceable(make: Callable[Given, BlockMask]) -> Callable[Given, BlockMask]:
    """For builders that read tensors: inside torch.compile they are one node of the graph."""

    @functools.wraps(make)
    def made(*args: Given.args, **kwargs: Given.kwargs) -> BlockMask:
        return node(name, args, kwargs) if _compiling() and not CONSTANT else make(*args, **kwargs)

    name = register(make, made)
    return made


def constant_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockMask:
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


def node(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockMask:
    """The mask of a builder of tensors, for torch.compile to trace."""
    if not _compiling() or CONSTANT:  # a graph ended here, because of an error
        return _BUILDERS[name](*args, **kwargs)
    tensors: list[Tensor] = []
    spec = _spec(args, kwargs, tensors)
    metas = tuple((_ints(x.shape), _ints(x.stride()), x.dtype, x.device) for x in tensors)
    found = _prepared(name, spec, metas).split("\n", 5)
    if len(found) == 1:
        raise InvalidInput(found[0])
    recipe, sizes, parts, numbers, pure, label = found
    base = torch.ops.sparsek.mask([x.detach() for x in tensors], recipe)
    pieces = base.split_with_sizes(_numbers(sizes))
    leaves: list[Any] = []
    for part in parts.split(" "):
        if part == ABSENT:
            leaves.append(None)
        else:
            at, *shape = _numbers(part)
            leaves.append(pieces[at].view(shape) if shape else pieces[at])
    q_len, kv_len, bq, bk, batch, heads, stored, partial, longest, exact = _numbers(numbers)
    mask = _MASK[0].unchecked(
        q_len=q_len, kv_len=kv_len, block=(bq, bk), batch=batch, heads=heads,
        full=BlockLists(leaves[0], leaves[1], leaves[2]), partial=BlockLists(leaves[3], leaves[4], leaves[5]),
        lo=leaves[6], hi=leaves[7], rules=leaves[8], bits=leaves[9],
        sizes=Sizes(stored, partial, longest, exact == 1), pure=pure == "True", label=label,
    )  # fmt: skip
    object.__setattr__(mask, "_base", base)  # for the attention op, which recognizes masks of one kind by it
    return mask


def _ints(values: Any) -> tuple[int, ...]:
    """Plain ints: torch.compile then has no symbols in their place."""
    return tuple([operator.index(each) for each in values])


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


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
def constant_mask(name: str, spec: tuple[Any, Any]) -> BlockMask:
    """A mask of options alone, made while torch.compile traces; the text of an error, if there is one."""
    args, named = spec
    return _BUILDERS[name](*map(decoded, args), **{key: decoded(code) for key, code in named})


@constant
@_or_message
def _prepared(name: str, spec: tuple[Any, Any], metas: tuple[Any, ...]) -> str:
    """The recipe of a builder with these options for such tensors, and its layout; or an error in one line.

    As text: torch.compile makes symbols of other ints, and torch 2.11 cannot iterate over some constant tuples. The
    lines are the name of the recipe, the sizes of the pieces of the base, for each tensor the piece and the shape in
    which it is seen, the numbers of the mask, `pure`, and the label.
    """
    key = f"{name.rpartition('.')[2]}-{hashlib.sha256(repr((name, spec, metas)).encode()).hexdigest()[:24]}"
    known = _RECIPES.get(key)
    if known is None:
        args, named = tuple(map(_opened, spec[0])), {each: _opened(code) for each, code in spec[1]}
        kind, length = _layout(_BUILDERS[name], args, named, metas)
        known = _RECIPES[key] = Recipe(_BUILDERS[name], args, named, kind, length)
    plain = known.kind.plain
    sizes: Sizes = plain["sizes"]
    numbers = (
        plain["q_len"],
        plain["kv_len"],
        *plain["block"],
        plain["batch"],
        plain["heads"],
        *map(int, sizes),
    )
    parts = [ABSENT if part is None else _text((part.at, *(part.shape or ()))) for part in known.kind.parts]
    lines = key, _text(known.kind.sizes), " ".join(parts), _text(numbers), plain["pure"], plain["label"]
    return "\n".join(map(str, lines))


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _layout(
    make: Callable[..., BlockMask], args: Any, named: Any, metas: tuple[Any, ...]
) -> tuple[Kind, int]:
    """What all masks of a recipe have in common, and the elements of their base: from a run without values."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
    )

    unreadable = DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            fakes = [
                torch.empty_strided(shape, step, dtype=kind, device=at) for shape, step, kind, at in metas
            ]
            mask: Any = Recipe(make, args, named, *[None] * 2).run(fakes)  # type: ignore[arg-type]
            fresh = mask._memo.get("fresh")
            if fresh is None:
                mask, base = _carved(mask)
            else:
                base = fresh.base
            kind = kind_of(mask, base)
    except unreadable as error:
        raise InvalidInput(
            f"a block mask is made inside torch.compile of values that only the run knows ({error}); make it outside "
            "and pass it to the compiled function"
        ) from error
    assert kind is not None
    return kind, base.numel()


def _carved(mask: BlockMask) -> tuple[BlockMask, Tensor]:
    """A mask like this one in one new allocation."""
    leaves = leaves_of(mask)
    base, views = carved([None if x is None else tuple(x.shape) for x in leaves], mask.device)
    made = mask.unchecked(
        q_len=mask.q_len, kv_len=mask.kv_len, block=mask.block, batch=mask.batch, heads=mask.heads,
        full=BlockLists(*views[:3]), partial=BlockLists(*views[3:6]), lo=views[6], hi=views[7], rules=views[8],
        bits=views[9], sizes=mask.sizes, pure=mask.pure, label=mask.label,
    )  # fmt: skip
    return made, base


@torch.library.custom_op(
    "sparsek::mask", mutates_args=(), schema="(Tensor[] tensors, str recipe) -> Tensor", tags=TAGS
)
def mask_op(tensors: Sequence[Tensor], recipe: str) -> Tensor:
    """The base of the mask that the builder makes of these tensors, int32 [n].

    Raises InvalidInput as the builder does: on a GPU, for a fault that the device found, at a later call.
    """
    known = _known(recipe)
    raise_earlier(known.kind)
    with torch.no_grad():
        mask = known.run(tensors)
    return _in_layout(mask, known)


@mask_op.register_fake
def _(tensors: Sequence[Tensor], recipe: str) -> Tensor:
    return tensors[0].new_empty(_known(recipe).length, dtype=torch.int32)


def _known(recipe: str) -> Recipe:
    known = _RECIPES.get(recipe)
    if known is None:
        raise InvalidInput(f"mask recipe {recipe} is of another process; compile the function in this one")
    return known


def _in_layout(mask: BlockMask, known: Recipe) -> Tensor:
    """The tensors of a mask in one, in the layout of its recipe: as they are if the builder has made them so."""
    fresh = mask._memo.get("fresh")
    if fresh is not None and fresh.base.numel() == known.length:
        kind = known_kind(mask)
        if kind is not None and (kind.sizes, kind.parts) == (known.kind.sizes, known.kind.parts):
            return fresh.base
    base = torch.zeros(known.length, dtype=torch.int32, device=mask.device)
    for part, place in zip(leaves_of(mask), known.kind.leaves(base), strict=True):
        if part is not None and place is not None:
            place.flatten()[: part.numel()].copy_(part.flatten())
    return base
