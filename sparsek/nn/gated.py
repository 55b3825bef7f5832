"""Gated MLPs, act(gate(x)) * up(x), whose two sparse products become one fused gated product.

A module keeps its class, tensors and names; its class gets a subclass, as under FSDP2 or a parametrization. What a
forward computes is found by a call of it with symbols in the place of the module and of x, once for each class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as of_torch
from torch.nn.utils.parametrize import is_parametrized

from sparsek.core import tracing
from sparsek.engine.call import transforms
from sparsek.nn.sparse import SparseLinear
from sparsek.products.ops.linear import Activation, gated
from sparsek.products.reference.epilogue import ACTIVATIONS

FUNCTIONS: dict[Any, Activation] = {
    functional.silu: "silu",
    functional.relu: "relu",
    torch.relu: "relu",
    functional.gelu: "gelu",
}
PLACES = ("torch", "nn", "functional", "F")
MODULES: dict[tuple[str, str], Activation] = {
    (nn.SiLU.__module__, "SiLU"): "silu",
    (nn.ReLU.__module__, "ReLU"): "relu",
    (nn.GELU.__module__, "GELU"): "gelu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
}


class GatedForward(NamedTuple):
    """A forward that is tail(act(gate(x)) * up(x)), by the names of its modules.

    Attributes:
        gate: The linear layer before the activation.
        up: The other one.
        act: The module of the activation; None if a function of torch is it.
        function: The name of that function; None if a module is it.
        tail: The modules that follow, in order, for example ("down_proj",).
    """

    gate: str
    up: str
    act: str | None
    function: Activation | None
    tail: tuple[str, ...]


class Fitted:
    """A module whose class has got a subclass, because of the sparse layers in it."""

    _fitted: ClassVar[tuple[type[Any], type[nn.Module]]]

    def __reduce__(self) -> Any:
        # Objects have __getstate__ since Python 3.11.
        state: Any = getattr(self, "__getstate__", lambda: self.__dict__)()
        return _rebuilt, type(self)._fitted, state


@functools.cache
def fitted_class(kind: type[Any], base: type[nn.Module]) -> type[nn.Module]:
    """The class that is `kind`, a Fitted, over `base`, with its name."""
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    made: Any = type(base.__name__, (kind, base), {**names, "_fitted": (kind, base)})
    made._of, made._form = base.forward, gated_forward(base.forward)
    return made


def _rebuilt(kind: type[Any], base: type[nn.Module]) -> nn.Module:
    made = fitted_class(kind, base)
    return made.__new__(made)


class GatedMLP(Fitted):
    """A module with a gated product of two sparse layers."""

    _of: ClassVar[Any]
    _form: ClassVar[GatedForward]

    @staticmethod
    def fits(module: nn.Module, base: type[nn.Module]) -> bool:
        """Whether the forward of a module of class `base` is a gated product of layers that are both sparse."""
        form = gated_forward(base.forward)
        pair = () if form is None or is_parametrized(module) else (form.gate, form.up)
        return bool(pair) and all(isinstance(module._modules.get(each), SparseLinear) for each in pair)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what the class of the module does; by the fused product where nothing learns or looks at its parts."""
        plain: Any = super().forward  # type: ignore[misc]
        kind = type(self)
        if options or len(args) != 1 or kind._fitted[1].forward is not kind._of:  # which others replace
            return plain(*args, **options)
        found = _parts(self, self._form, args[0])
        if found is None:
            return plain(*args)
        gate, up, act = found
        y = gated(args[0], gate.weight, up.weight, act)
        for name in self._form.tail:
            y = getattr(self, name)(y)
        return y


def pair_of(mlp: GatedMLP, x: Any) -> tuple[Any, Any, Activation] | None:
    """The layers of act(gate(x)) * up(x) and its activation, if modules compute that; also where they learn."""
    kind = type(mlp)
    if kind._fitted[1].forward is not kind._of:
        return None
    with torch.no_grad():
        return _parts(mlp, kind._form, x)


def joined(mlp: GatedMLP, act: Activation, gate: Tensor, up: Tensor) -> Any:
    """What a module makes of the products of its layers."""
    y = ACTIVATIONS[act](gate) * up
    for name in mlp._form.tail:
        y = getattr(mlp, name)(y)
    return y


def _parts(mlp: Any, form: GatedForward, x: Any) -> tuple[Any, Any, Activation] | None:
    """The layers of a fused product and its activation, if it computes what the modules would."""
    modules = mlp._modules
    gate, up = modules.get(form.gate), modules.get(form.up)
    act = form.function if form.act is None else activation_of(modules.get(form.act))
    if act is None or not isinstance(x, Tensor) or not (_is_plain(gate) and _is_plain(up)):
        return None
    if (gate._kind, gate._scaled) != (up._kind, up._scaled) or not may_fuse(x, gate, up):
        return None
    if transforms.active() or _watched():
        return None
    return gate, up, act


def may_fuse(x: Tensor, *layers: Any) -> bool:
    """Whether a fused product of layers pays: nothing learns, and a fast kernel has the activation, also in FP8."""
    stored = [
        each._buffers.get("codes") if each._scaled else each._parameters.get("values") for each in layers
    ]
    slow = x.dtype is torch.float32 and x.is_cuda and any(each._scaled for each in layers)
    return not slow and not tracing.wants_gradient(x, *stored)


def _is_plain(layer: Any) -> bool:
    """Whether a call of a layer is its product and nothing else."""
    return (
        isinstance(layer, SparseLinear)
        and (type(layer).forward is SparseLinear.forward or _is_middle(layer))
        and layer.activation is None
        and layer._parameters.get("bias") is None
        and layer._parameters.get("pruned") is None
        and not hooked(layer)
    )


def _is_middle(layer: Any) -> bool:
    """Whether it is a part of a layer that is split over a mesh, and takes and gives plain tensors of this rank."""
    split = layer.__dict__.get("_split")
    return split is not None and split.outputs is None


def hooked(layer: Any) -> bool:
    """Whether hooks, or a forward of its own, belong to a module."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
    )


def _watched() -> bool:
    """Whether hooks of all modules are there, or torch.jit.trace, which layers refuse."""
    return not torch.compiler.is_compiling() and bool(
        of_torch._has_any_global_hook() or torch._C._is_tracing()
    )


def activation_of(module: Any) -> Activation | None:
    """The name of the activation that a module is; None if it is none that products have."""
    if module is None or hooked(module):
        return None
    found = MODULES.get((type(module).__module__, type(module).__name__))
    if found is None or found == "gelu":
        exact = found == "gelu" and getattr(module, "act", functional.gelu) is functional.gelu
        tanh = getattr(module, "approximate", "none") == "tanh"
        return None if not exact else "gelu_tanh" if tanh else "gelu"
    python = found == "gelu_tanh" and not isinstance(module.act, functools.partial)
    return None if python else found


class _Symbol:
    """What a forward computes, as nested tuples: ("self",), ("x",), ("of", name), ("call", f, x), ("mul", a, b)."""

    def __init__(self, term: tuple[Any, ...]) -> None:
        object.__setattr__(self, "term", term)

    def __setattr__(self, name: str, value: Any) -> None:
        raise TypeError

    def __getattr__(self, name: str) -> _Symbol:
        if object.__getattribute__(self, "term") != ("self",):
            raise AttributeError(name)
        return _Symbol(("of", name))

    def __call__(self, *args: Any) -> _Symbol:
        (x,) = args
        return _Symbol(("call", self.term, x.term))

    def __mul__(self, other: Any) -> _Symbol:
        return _Symbol(("mul", self.term, other.term))

    def __bool__(self) -> bool:
        raise TypeError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Symbol:
        (x,) = args
        if kwargs and any(kwargs.values()):  # inplace=False is passed on
            raise TypeError
        return _Symbol(("call", ("function", FUNCTIONS[function]), x.term))


def _others(forward: Any, form: GatedForward) -> set[str]:
    """The names in a forward that are no part of its gated product: of side effects, such as a counter."""
    names = {*forward.__code__.co_names, *forward.__code__.co_freevars} - {form.gate, form.up, *form.tail}
    return names - ({form.act} if form.function is None else {form.function, *PLACES})


@functools.cache
def gated_forward(forward: Callable[..., Any]) -> GatedForward | None:
    """The gated product that a forward of a class computes of one tensor, whatever its module holds; None otherwise."""
    try:
        term = forward(_Symbol(("self",)), _Symbol(("x",))).term
    except Exception:  # of code that takes tensors only
        return None
    tail: list[str] = []
    while term[0] == "call" and term[1][0] == "of":
        tail.insert(0, term[1][1])
        term = term[2]
    if term[0] != "mul":
        return None
    for left, right in (term[1:], term[:0:-1]):
        match left, right:
            case (
                ("call", (kind, act), ("call", ("of", gate), ("x",))),
                ("call", ("of", up), ("x",)),
            ) if up != gate:
                named = (act, None) if kind == "of" else (None, act)
                found = GatedForward(gate, up, *named, tuple(tail))
                return found if not _others(forward, found) else None
    return None
