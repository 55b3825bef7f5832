"""What a rule, a function that was written elsewhere, can read: so that its mask may be used again.

Where a chain of attributes (`chains`) ends, the object itself is used, and everything in it counts. Only kinds that are
known here are followed. After an unknown one, such as a C object with state of its own, or too many parts, nothing is
kept.
"""

from __future__ import annotations

import abc
import array
import builtins
import collections
import enum
import functools
import gc
import math
import operator
import types
import weakref
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from sparsek.attn.mask.convert.chains import Unknown, chains_of, words
from sparsek.core.streams import Contents

MOST = 2000  # parts that are followed
BYTES = 1 << 16  # of a string, a buffer or an array

# Marks between parts.
AGAIN, METHOD, MISSING = (type(name, (), {}) for name in ("Again", "Method", "Missing"))

TENSORS = (Tensor, nn.Parameter)
# Compared by type and value.
VALUES = (
    *(type(None), bool, int, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
PURE_TYPES = {
    *(bool, bytes, complex, dict, enumerate, filter, float, frozenset, int, list, map, range, reversed, set, slice),
    *(tuple, zip, Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device, collections.deque),
}  # fmt: skip


PURE_BUILTINS = words(
    "abs all any bool callable chr divmod isinstance issubclass iter len max min next ord pow round sorted sum"
)
C: Any = torch._C
PURE_OPS = frozenset(dir(C._VariableFunctions))
# Beginnings of the names of torch's functions that read settings, draw numbers or run other code.
IMPURE = tuple(
    words(
        "_ alpha_dropout bernoulli binomial compile dropout empty feature_ from_file get_ gumbel is_ load multinomial",
        "native_dropout normal poisson rand rrelu seed set_",
    )
)
TORCH_CODE = words(
    "torch.functional torch.nn.functional torch._jit_internal torch.nn.attention.flex_attention"
)
# Of classes: methods that no rule runs, or that dataclasses write, and data that describes the class.
OF_CLASSES = words(
    "__init__ __new__ __init_subclass__ __class_getitem__ __repr__ __str__ __format__ __setattr__ __delattr__",
    "__reduce__ __reduce_ex__ __getstate__ __setstate__ __getnewargs__ __getnewargs_ex__ __del__ __copy__",
    "__deepcopy__ __post_init__ __replace__ __dir__ __sizeof__ __module__ __doc__ __dict__ __weakref__ __slots__",
    "__annotations__ __match_args__ __dataclass_fields__ __dataclass_params__ __orig_bases__ __parameters__",
    "__abstractmethods__ __static_attributes__ __firstlineno__ __qualname__ __annotate__ __annotate_func__",
    "__annotations_cache__ __type_params__ __constants__ __classdictcell__ _abc_impl extra_repr reset_parameters",
)
OF_DATACLASSES = words("__eq__ __hash__ __lt__ __le__ __gt__ __ge__")
OF_MODULES = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers", "_modules"}
FOR_C = (types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType)
CLASS_MAKERS = (type, abc.ABCMeta, enum.EnumMeta)


class TensorState(NamedTuple):
    """A tensor as a rule saw it."""

    tensor: weakref.ref[Tensor]
    shape: torch.Size
    strides: tuple[int, ...]
    contents: Contents

    def is_same(self, x: Any) -> bool:
        """Whether this is the tensor, unchanged."""
        return (
            self.tensor() is x
            and x.shape == self.shape
            and x.stride() == self.strides
            and self.contents.are_of(x)
        )


class RuleState:
    """The parts of what rules read, in the order in which they are met, without a reference to an object."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = [*map(_kept, parts)]

    @classmethod
    def of(cls, parts: list[Any] | None) -> RuleState | None:
        """None if parts are unknown, or cannot be kept."""
        try:
            return None if parts is None else cls(parts)
        except Unknown:
            return None

    def is_same(self, parts: list[Any]) -> bool:
        """Whether the same parts were read again, unchanged."""
        if len(self.parts) != len(parts):
            return False
        for known, x in zip(self.parts, parts, strict=True):
            if known is x:
                continue
            kind = type(known)
            if kind is weakref.ref:
                if known() is not x:
                    return False
            elif kind is TensorState:
                if not known.is_same(x):
                    return False
            elif kind is not type(x) or known != x:
                return False
        return True


def _kept(x: Any) -> Any:
    """A part that does not keep an object alive."""
    kind = type(x)
    if kind in TENSORS:
        if x.layout != torch.strided or is_functorch_wrapped_tensor(x) or (held := Contents.of(x)) is None:
            raise Unknown
        return TensorState(weakref.ref(x), x.shape, x.stride(), held)
    if kind in VALUES or kind in (str, bytes, np.ufunc, *FOR_C) or kind is BuiltinFunctionType:
        return x
    try:
        return weakref.ref(x)
    except TypeError:
        raise Unknown from None


def read_by(*given: Any) -> list[Any] | None:
    """The parts of the given values and of all that functions among them read; None if something is unknown."""
    reader = _Reader()
    try:
        for each in given:
            reader.whole(each)
    except Exception:  # Unknown, RecursionError, and what odd classes raise
        return None
    return [*reader.parts, torch.get_default_dtype()]  # by which integers times a float are rounded


def _is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


@functools.lru_cache(1024)
def _is_pure(module: ModuleType, attributes: tuple[str, ...]) -> bool:
    """Whether attributes of torch, math or operator are constants and functions without state."""
    found: Any = module
    for name in attributes:
        if not isinstance(found, ModuleType):
            return type(found) in (*VALUES, float) or (isinstance(found, type) and found in PURE_TYPES)
        found = vars(found).get(name, MISSING)
    return type(found) in (*VALUES, float) or _is_pure_callable(found)


def _is_pure_callable(x: Any) -> bool:
    kind = type(x)
    if isinstance(x, type):
        return x in PURE_TYPES or issubclass(x, np.generic)
    if kind is np.ufunc or (kind in FOR_C and x.__objclass__ in (*PURE_TYPES, str, C.TensorBase)):
        return True
    name = getattr(x, "__name__", "")
    if kind is BuiltinFunctionType:
        owner = x.__self__
        if owner is builtins:
            return name in PURE_BUILTINS
        if owner is math or owner is operator or x.__module__ in ("math", "_operator"):
            return True
        of_torch = name in PURE_OPS and getattr(C._VariableFunctions, name) == x
        return (of_torch or owner in (C._special, C._linalg)) and not name.startswith(IMPURE)
    return (
        kind is FunctionType and x.__globals__.get("__name__") in TORCH_CODE and not name.startswith(IMPURE)
    )


def _found(kind: type, name: str) -> Any:
    """An attribute of a class, unbound."""
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return MISSING


class _Reader:
    """Follows what rules read."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.seen: dict[Any, int] = {}

    def whole(self, x: Any) -> None:
        """Notes everything in an object."""
        kind = type(x)
        if kind in TENSORS:
            self.parts.append(x)
            if x.__dict__:
                self.whole(x.__dict__)
        elif kind in VALUES:
            self.parts.append(x)
        else:
            if kind not in (str, float) and self._is_again(id(x)):
                return
            _OF_KINDS.get(kind, _Reader._other)(self, x)

    def _is_again(self, key: Any) -> bool:
        at = self.seen.get(key)
        if at is not None:
            self.parts += (AGAIN, at)
            return True
        if len(self.parts) > MOST:
            raise Unknown
        self.seen[key] = len(self.seen)
        return False

    def each(self, *parts: Any) -> None:
        """Notes everything in several objects."""
        for part in parts:
            self.whole(part)

    def _float(self, x: float) -> None:
        self.parts += (float, x.hex())  # NaN equals itself, and -0 is not 0

    def _text(self, x: str | bytes) -> None:
        if len(x) > BYTES:
            raise Unknown
        self.parts.append(x)

    def _shown(self, x: Any) -> None:
        self.parts += (type(x), repr(x))

    def _items(self, x: Any) -> None:
        if len(x) > MOST:
            raise Unknown
        self.parts += (type(x), len(x))
        for each in list(x):
            self.whole(each)

    def _dict(self, x: dict[Any, Any]) -> None:
        if len(x) > MOST:
            raise Unknown
        self.parts += (type(x), len(x))
        for key, value in list(dict.items(x)):
            self.whole(key)
            self.whole(value)
        if type(x) is collections.defaultdict:
            self.whole(x.default_factory)

    def _array(self, x: np.ndarray | np.generic) -> None:
        if x.dtype.hasobject or x.nbytes > BYTES:
            raise Unknown
        self.parts += (type(x), x.dtype.str, str(x.shape), x.tobytes())

    def _buffer(self, x: Any) -> None:
        if len(x) > BYTES:
            raise Unknown
        self.parts += (type(x), getattr(x, "typecode", ""), bytes(x))

    def _function(self, x: FunctionType, owner: Any = MISSING) -> None:
        """`owner`: of a method, its object."""
        self.parts.append(x.__code__)
        if x.__defaults__:
            self.whole(x.__defaults__)
        if x.__kwdefaults__:
            self.whole(x.__kwdefaults__)
        if x.__dict__:
            self.whole(x.__dict__)
        of_torch = _is_torch(str(x.__globals__.get("__name__")))
        if of_torch and not _is_pure_callable(x) and "<locals>" not in x.__qualname__:
            raise Unknown
        if owner is not MISSING and not x.__code__.co_argcount:  # it is in *args
            self.whole(owner)
        names = x.__code__.co_freevars
        for root, name, attributes in chains_of(x.__code__):
            if root == "LOAD_GLOBAL":
                if not of_torch:
                    self._chain(self._global(x, name), attributes)
            elif name in names:
                try:
                    found = x.__closure__[names.index(name)].cell_contents  # type: ignore[index]
                except ValueError:
                    found = MISSING
                self._chain(found, attributes)
            elif root == "LOAD_FAST" and owner is not MISSING:
                self._chain(owner, attributes)

    def _global(self, x: FunctionType, name: str) -> Any:
        found = x.__globals__.get(name, MISSING)
        return found if found is not MISSING else vars(builtins).get(name, MISSING)

    def _code_of(self, x: Any, owner: Any = MISSING) -> None:
        """Notes what a method reads if it is called on its object."""
        if type(x) is not FunctionType:
            self.whole(x)
            if owner is not MISSING:
                self.whole(owner)
        elif not self._is_again((id(x), id(owner))):
            self.parts.append(METHOD)
            self._function(x, owner)

    def _method(self, x: MethodType) -> None:
        self._code_of(x.__func__, x.__self__)

    def _chain(self, x: Any, attributes: tuple[str, ...]) -> None:
        """Notes what a chain of attributes leads to."""
        for at, name in enumerate(attributes):
            if issubclass(type(x), ModuleType):
                if _is_torch(x.__name__) or x is math or x is operator:
                    self.parts.append(x)
                    if not _is_pure(x, attributes[at:]):
                        raise Unknown
                    return
                x = vars(x).get(name, MISSING) if type(x) is ModuleType else MISSING
                if x is MISSING:
                    raise Unknown
            elif type(x) in TENSORS or type(x) in VALUES or (type(x) in _OF_KINDS and type(x) is not type):
                break
            else:
                found = (_of_class if issubclass(type(x), type) else _of_instance)(x, name)
                if type(found) is _Method:
                    self._code_of(*found)
                    return
                if found is MISSING:
                    break
                x = found
        self.whole(x)

    def _type(self, x: type) -> None:
        if x is not MISSING and not _is_pure_callable(x):
            raise Unknown
        self.parts.append(x)

    def _callable(self, x: Any) -> None:
        if not _is_pure_callable(x):
            raise Unknown
        self.parts.append(x)

    def _pieces(self, x: Any) -> None:
        self.parts.append(type(x))
        for name in PIECES[type(x)]:
            self.whole(getattr(x, name))

    def _proxy(self, x: Any) -> None:
        self.parts.append(type(x))
        self.each(*gc.get_referents(x))

    def _other(self, x: Any) -> None:
        """An object of a class in Python, its value and its class; else it is unknown."""
        kind = type(x)  # `isinstance` calls code of the object, which may lie
        if issubclass(kind, type):
            self._type(x)
        elif issubclass(kind, np.generic):
            self._array(x)
        elif issubclass(kind, enum.Enum):
            self.parts.append(kind)
            self._class(kind)
            self.each(x._name_, x._value_)
            self._dict({name: value for name, value in x.__dict__.items() if not name.startswith("_")})
        else:
            self.parts.append(kind)
            self._class(kind)
            for base in (dict, *CONTAINERS):
                if issubclass(kind, base):
                    elements: Any = base.items if base is dict else base.__iter__
                    self._items(tuple(elements(x)))
            for each in kind.__mro__:
                for found in vars(each).values():
                    if type(found) is types.MemberDescriptorType:
                        self.whole(_of_slot(found, x))
            if issubclass(kind, nn.Module):
                self._module(x)
            elif kind.__dictoffset__:
                self.whole(object.__getattribute__(x, "__dict__"))

    def _module(self, x: nn.Module) -> None:
        state = x.__dict__
        hooks = (name for name in OF_MODULES if "hooks" in name and state.get(name))
        if "Dropout" in type(x).__name__ or next(hooks, None) is not None:
            raise Unknown
        self._dict({name: value for name, value in state.items() if name not in OF_MODULES})

    def _class(self, kind: type) -> None:
        """Notes what code of a class reads, and the data that its objects share."""
        if type(kind) not in CLASS_MAKERS:
            raise Unknown
        of_enum = issubclass(kind, enum.Enum)
        for each in kind.__mro__:
            of_layers = each.__module__.startswith("torch.nn.") and issubclass(each, nn.Module)
            if of_layers or each.__module__ in TORCH_CODE:  # such as a mask of FlexAttention
                continue
            if each in BASES or (of_enum and (each.__module__ == "enum" or each in (int, str))):
                continue
            if _is_torch(each.__module__):
                raise Unknown
            if self._is_again((id(each), 0)):
                continue
            data = dict(vars(each))
            for name, x in data.items():
                made_by = type(x)
                if made_by in (*FOR_C, types.GetSetDescriptorType) and x.__objclass__ is each:
                    if name not in ("__dict__", "__weakref__"):
                        raise Unknown  # a class in C, whose state has no names
                elif not (
                    name in OF_CLASSES
                    or made_by is types.MemberDescriptorType
                    or (of_enum and (name.startswith("_") or name in kind._member_map_))
                    or ("_fields" in data and (name in OF_TUPLES or made_by.__name__ == "_tuplegetter"))
                    or ("__dataclass_fields__" in data and name in OF_DATACLASSES and _is_generated(x))
                ):
                    for part in _parts_of(x):
                        self._code_of(part, kind if made_by is classmethod else MISSING)


PIECES = {
    Fraction: ("numerator", "denominator"),
    range: ("start", "stop", "step"),
    slice: ("start", "stop", "step"),
    functools.partial: ("func", "args", "keywords", "__dict__"),
    types.SimpleNamespace: ("__dict__",),
}
CONTAINERS = list, tuple, set, frozenset, collections.deque
OF_TUPLES = ("_make", "_replace", "_asdict", "_fields", "_field_defaults")
BASES = {
    *(object, dict, collections.OrderedDict, collections.defaultdict, nn.Module, types.SimpleNamespace),
    *(*CONTAINERS, Generic, abc.ABC, enum.Enum),
}


class _Method(NamedTuple):
    """Code that an attribute runs or is, and its object."""

    code: Any
    owner: Any = MISSING


def _is_generated(x: Any) -> bool:
    """Whether `dataclass` wrote a method."""
    if type(x) is not FunctionType:
        return x is None
    return x.__code__.co_filename == "<string>" or x.__globals__.get("__name__") in ("dataclasses", "reprlib")


def _parts_of(x: Any) -> tuple[Any, ...]:
    """The functions in what a class holds."""
    if type(x) is property:
        return tuple(each for each in (x.fget, x.fset) if each is not None)
    if type(x) in (staticmethod, classmethod):
        return (x.__func__,)
    return (x.func,) if type(x) is functools.cached_property else (x,)


def _of_slot(slot: Any, x: Any) -> Any:
    try:
        return slot.__get__(x)
    except AttributeError:
        return MISSING


def _of_class(x: type, name: str) -> Any:
    """A class's attribute, or what runs for it."""
    if type(x) is enum.EnumMeta and name in x._member_map_:
        return x._member_map_[name]
    found = _found(x, name) if type(x) in (*CLASS_MAKERS, type(Tensor)) else MISSING
    if found is MISSING or _is_pure_callable(found):
        return found
    if type(found) in (staticmethod, classmethod, FunctionType):
        return _Method(getattr(found, "__func__", found), x if type(found) is classmethod else MISSING)
    return MISSING if hasattr(type(found), "__get__") else found


def _of_instance(x: Any, name: str) -> Any:
    """An object's attribute, or what runs for it. MISSING if only the whole object can say."""
    kind = type(x)
    if _found(kind, "__getattribute__") is not vars(object)["__getattribute__"]:
        return MISSING
    found = _found(kind, name)
    if type(found) is property:
        return _Method(found.fget, x)
    if type(found) is types.MemberDescriptorType:
        return _of_slot(found, x)
    if hasattr(type(found), "__set__") or hasattr(type(found), "__delete__"):
        return MISSING
    own = object.__getattribute__(x, "__dict__") if kind.__dictoffset__ else {}
    if name in own:
        return own[name]
    if issubclass(kind, nn.Module):
        for part in ("_parameters", "_buffers", "_modules"):
            if name in own.get(part, ()):
                return own[part][name]
    if type(found) is FunctionType:
        return _Method(found, x)
    if type(found) in (staticmethod, classmethod):
        return _Method(found.__func__, kind if type(found) is classmethod else MISSING)
    if type(found) is functools.cached_property:
        return _Method(found.func, x)
    return MISSING if hasattr(type(found), "__get__") else found


_OF_KINDS: dict[type, Callable[[_Reader, Any], None]] = {
    float: _Reader._float,
    str: _Reader._text,
    bytes: _Reader._text,
    complex: _Reader._shown,
    Decimal: _Reader._shown,
    **dict.fromkeys(PIECES, _Reader._pieces),
    **dict.fromkeys((*CONTAINERS, torch.Size), _Reader._items),
    **dict.fromkeys(
        (dict, collections.OrderedDict, collections.defaultdict, collections.Counter), _Reader._dict
    ),
    np.ndarray: _Reader._array,
    **dict.fromkeys((bytearray, array.array), _Reader._buffer),
    FunctionType: _Reader._function,
    MethodType: _Reader._method,
    **dict.fromkeys((BuiltinFunctionType, np.ufunc, *FOR_C), _Reader._callable),
    type: _Reader._type,
    types.MappingProxyType: _Reader._proxy,
}
