"""Which layers of a model can be replaced, and how one takes the place of another."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import saveable
from sparsek.nn.experts import PackedLinear, SparseExperts, packed_names, why_not_packed
from sparsek.nn.gated import GatedMLP, fitted_class
from sparsek.nn.parameter import PLAIN
from sparsek.nn.sparse import SparseLinear

HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
# Attributes of linear layers, dense and sparse ones; all others are their users'.
OWN = {*HOOKS, *nn.Module().__dict__, "_compiled_call_impl", "in_features", "out_features", "nf", "nx"} | {
    *("activation", "_origin", "_kind", "_stored", "_scaled", "_fast_accum", "_block", "_dtype", "_decay"),
    *("_seen", "_history", "_checked"),
}
TENSORS = {"values", "codes", "scale", "metadata", "indptr", "indices", "pruned"}  # of sparse layers


class Origin(NamedTuple):
    """What a sparse layer was: its class, torch.nn.Linear or Conv1D, and whether its weight and bias learned."""

    kind: type[nn.Module]
    learns: bool
    bias: bool = False


class Facts:
    """What decides over all layers of a model whether one may be replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.owners: dict[int, list[tuple[str, Any]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(_memory(parameter)[0], []).append((name, parameter))
        self.heads = {id(each) for each in output_embeddings(model)}

    def why_not(self, name: str, layer: Any, is_named: bool) -> str:
        """Why a layer may not be replaced, whatever the config; "" if it may."""
        if isinstance(layer, SparseLinear):
            return "is sparse already; sk.densify_ makes it dense"
        kind = type(layer).__name__
        if not is_linear(layer):
            return f"is no linear layer, but of {kind}"
        if isinstance(layer, PackedLinear):
            return why_not_packed(layer) or self._why_not_weight(name, layer.packed)
        if not _is_plain_forward(layer):
            return f"is of {kind} with a forward of its own"
        if any(getattr(type(layer), each) is not getattr(nn.Module, each) for each in CALLS) or (
            layer.__dict__.keys() & set(CALLS)
        ):
            return f"is of {kind} with a call of its own"
        weight = layer._parameters.get("weight")
        others = layer._parameters.keys() - {"weight", "bias"} or layer._modules or layer._buffers
        if weight is None or others or "bias" not in layer._parameters:
            return "computes its weight from other tensors; remove the parametrization first"
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            return f"has a weight of class {type(weight).__name__}"
        for each in layer.__dict__.keys() - OWN - {"forward"}:
            if each in TENSORS or hasattr(SparseLinear.form_of_bsr, each):
                return f"has an attribute {each!r} of its own, a name that sparse layers use"
        why = self._why_not_weight(f"{name}.weight", weight)
        if why:
            return why
        if id(layer) in self.heads and not is_named:
            return "is the output embedding; a rule by its name takes it"
        if is_adapter(self.model, name) and not is_named:
            return "belongs to an adapter, whose layer is its base_layer; a rule by its name takes it"
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return "has a weight that torch.nn.MultiheadAttention reads without a call"
        return ""

    def sharing(self, name: str, parameter: Tensor | None) -> list[str]:
        """The names of the other Parameters that are this one, or are in its memory."""
        if parameter is None:
            return []
        storage, begin, end = _memory(parameter)
        others = ((each, _memory(other)) for each, other in self.owners.get(storage, ()) if each != name)
        return [each for each, (_, first, last) in others if first < end and begin < last]

    def _why_not_weight(self, name: str, weight: Any) -> str:
        """Why a Parameter cannot give way to a sparse weight; "" if it can."""
        shared = self.sharing(name, weight)
        if shared:
            return f"shares its weight with {shared[0].removesuffix('.weight')}"
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            return "has a weight with hooks, which see its dense gradient; remove them first"
        parts = [each for each, part in _noted(weight).items() if isinstance(part, Tensor)]
        return f"has a weight with a tensor as its attribute {parts[0]!r}" if parts else ""

    def of_bias(self, name: str, layer: Any) -> list[str]:
        """What else has the bias of a layer: the names of modules whose bias it is, and of other Parameters."""
        is_packed = isinstance(layer, PackedLinear)
        own, bias = (f"{name}_bias", layer.biases) if is_packed else (f"{name}.bias", layer.bias)
        return [each.removesuffix(".bias") for each in self.sharing(own, bias)]


def output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """The heads of a model that computes words."""
    for module in model.modules():
        get = getattr(module, "get_output_embeddings", None)
        try:
            head = get() if callable(get) else None
        except (AttributeError, NotImplementedError):  # a model without one
            continue
        if isinstance(head, nn.Module):
            yield head


def adopt(new: Any, old: Any, origin: type[nn.Module] | None = nn.Linear) -> Any:
    """Give a layer the bias, mode and hooks of the one whose place it takes, and what its users added to it."""
    if old.bias is not None:
        new.bias = old.bias
    if origin is not None:
        learns = old.weight.requires_grad
        kind: Any = _conv1d() if is_conv1d(old) else origin
        new._origin = Origin(kind, learns, old.bias is not None and old.bias.requires_grad)
        for name, parameter in new.named_parameters():
            if name != "bias":
                parameter.requires_grad_(learns)
    for name in HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]  # the same dict: handles of hooks still remove them
    if not isinstance(old, PackedLinear):
        for name, each in old.__dict__.items():
            if name not in OWN and (name != "forward" or has_own_forward(old)):
                bound = isinstance(each, MethodType) and each.__self__ is old
                new.__dict__[name] = MethodType(each.__func__, new) if bound else each
    note(stored_in(new), stored_in(old))
    return new.train(old.training)


def dense_of(name: str, layer: Any, is_frozen: bool) -> nn.Module:
    """The dense layer of a sparse one. A weight in FP8 learns if it did, unless its bias or the model was frozen."""
    if layer.activation is not None:
        raise InvalidInput(
            f"{name or 'the layer'} applies {layer.activation!r}, and dense layers have no activation: set its "
            "activation to None, and call it after the layer"
        )
    values = layer._parameters.get("values")
    kind, learns, bias = getattr(layer, "_origin", Origin(nn.Linear, True))
    if values is not None:
        learns = values.requires_grad
    elif is_frozen or (bias and layer.bias is not None and not layer.bias.requires_grad):
        learns = False
    sizes = (layer.in_features, layer.out_features)
    if any(each.is_meta for each in (*layer.parameters(), *layer.buffers())):
        like = layer.values if values is not None else layer.to_dense()
        weight = torch.empty(sizes[::-1], dtype=like.dtype, device="meta")
    else:
        weight = layer.to_dense()
    if kind is nn.Linear:
        made: Any = nn.Linear(*sizes, bias=layer.bias is not None, device="meta")
    else:
        with torch.device("meta"):
            made = kind(*sizes[::-1])
        weight = weight.T.contiguous()
    made.weight = nn.Parameter(saveable(weight.detach()), learns)
    return adopt(made, layer, None)


def swap(model: nn.Module, made: Mapping[str, nn.Module | nn.Parameter]) -> dict[str, Any]:
    """Put layers, or packed Parameters, in their places by name, all or none. Return those before.

    The modules that hold them then fit them; see `Fitted`.
    """
    done: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, layer in made.items():
            parent, _, own = name.rpartition(".")
            holder = model.get_submodule(parent)
            old = holder._parameters.get(own)
            done.append((holder, own, holder.get_submodule(own) if old is None else old))
            if old is not None and not isinstance(layer, nn.Parameter):
                del holder._parameters[own]
            setattr(holder, own, layer)
        for holder, _, _ in done:
            _fit(holder)
    except BaseException:
        for holder, own, layer in done:
            places: Any = (holder._parameters, holder._modules)
            here, other = places if isinstance(layer, nn.Parameter) else places[::-1]
            other.pop(own, None)
            here[own] = layer
        for holder, _, _ in done:
            _fit(holder)
        raise
    for layer in made.values():
        for hook in () if isinstance(layer, nn.Parameter) else layer._load_state_dict_pre_hooks.values():
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(layer)
    cast_inputs(model, made)
    return {name: old for name, (_, _, old) in zip(made, done, strict=True)}


def cast_inputs(model: Any, names: Iterable[str]) -> None:
    """Let sparse layers that a model of transformers keeps in float32, while it is in half precision itself, cast x.
    Its code casts x for a dense weight alone.
    """
    lists = (getattr(model, f"_keep_in_fp32_modules{end}", None) or () for end in ("", "_strict"))
    kept = matching([each for some in lists for each in some], names)
    if not kept or all(each.dtype not in dtypes.LOW for each in model.parameters()):
        return
    for name in kept:
        layer: Any = model.get_submodule(name)
        if isinstance(layer, SparseLinear) and _to_float32 not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_to_float32)


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The names that have a pattern of transformers in them."""
    found = "|".join(each.replace("*", ".*") for each in patterns)
    return [name for name in names if found and re.search(found, name)]


def _to_float32(layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a layer in float32, for one in half precision."""
    dtype = layer._dtype if isinstance(layer, SparseLinear) and layer._scaled else stored_in(layer).dtype
    cast = dtype == torch.float32 and args and isinstance(args[0], Tensor) and args[0].dtype in dtypes.LOW
    return (args[0].float(), *args[1:]) if cast else args


def _fit(module: Any) -> None:
    """Let the class of a module be one that knows the sparse layers in it, or the one it was."""
    now = type(module)
    kind, base = getattr(now, "_fitted", (None, now))
    if (kind is not None and now is not fitted_class(kind, base)) or "forward" in module.__dict__:
        return  # of FSDP2, whose classes stay
    wanted = next((each for each in (GatedMLP, SparseExperts) if each.fits(module, base)), None)
    if wanted is kind or (wanted is not None and kind is not None and issubclass(kind, wanted)):
        return
    try:
        module.__class__ = base if wanted is None else fitted_class(wanted, base)
    except Exception as error:  # of a class that takes no subclass, or no other class for its objects
        if wanted is SparseExperts:  # a gated MLP computes the same as it is
            raise InvalidInput(f"experts of {base.__name__} cannot be sparse: {error}") from error


def layer_of(model: nn.Module, name: str) -> Any:
    """The layer of a name, which packed experts have for each Parameter of theirs too; None if there is none."""
    parent, _, own = name.rpartition(".")
    try:
        holder = model.get_submodule(parent)
    except AttributeError:
        return None
    if own in packed_names(holder) and own in holder._parameters:
        return PackedLinear(holder, own)
    return holder._modules.get(own) if own else model


def linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The dense linear layers of a model by name, and the weights of packed experts."""
    for name, layer in model.named_modules():
        for own in packed_names(layer):
            if own in layer._parameters:
                yield f"{name}.{own}" if name else own, PackedLinear(layer, own)
        if is_linear(layer):
            yield name, layer


def is_adapter(model: nn.Module, name: str) -> bool:
    """Whether a layer is a part of a module that adds to its `base_layer`, as those of peft do, and is not in that."""
    module: Any = model
    for own in name.split("."):
        if "base_layer" in module._modules and own != "base_layer":
            return True
        module = module._modules[own]
    return False


def is_packed(model: nn.Module, name: str) -> bool:
    """Whether a name is that of a weight of packed experts."""
    parent, _, own = name.rpartition(".")
    return own in packed_names(model.get_submodule(parent))


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a dense linear one."""
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D, whose weight is [K, M]."""
    kind = _conv1d()
    return kind is not None and isinstance(layer, kind)


def _conv1d() -> type[nn.Module] | None:
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def shape_of(layer: Any) -> tuple[int, ...]:
    """(out_features, in_features), of packed experts with their number before, or that of the largest parameter."""
    if isinstance(layer, PackedLinear):
        return layer.shape
    if isinstance(layer, nn.Linear | SparseLinear):
        return layer.out_features, layer.in_features
    if is_conv1d(layer):
        return tuple(layer.weight.shape[::-1])
    return tuple(max((each.shape for each in layer._parameters.values() if each is not None), key=len))


def stored_in(layer: Any) -> Any:
    """The tensor with the stored values of a layer."""
    if isinstance(layer, PackedLinear):
        return layer.packed
    return getattr(layer, layer._stored) if isinstance(layer, SparseLinear) else layer.weight


def note(new: Any, old: Any) -> None:
    """Give a weight the attributes that users added to another one, for example for an optimizer."""
    new.__dict__.update(_noted(old))


def _noted(weight: Any) -> dict[str, Any]:
    own = weight.__dict__ if type(weight) in PLAIN else {}
    return {name: each for name, each in own.items() if not name.startswith("_dynamo")}


def _memory(x: Any) -> tuple[int, int, int]:
    """What identifies the storage of a Parameter, and where in it begins and ends what it has, in bytes."""
    plain = type(x) in PLAIN and type(x.data) is Tensor and x.layout is torch.strided
    storage = x.untyped_storage().data_ptr() if plain else 0
    if not storage or not x.numel():
        return id(x), 0, 1
    begin = x.data_ptr() - storage
    return storage, begin, begin + (x.numel() * x.element_size() if x.is_contiguous() else 1)


def weight_of(layer: Any) -> Tensor:
    """The weight [M, K] of a dense layer, a view outside autograd."""
    weight = layer.weight.detach()
    return weight.T if is_conv1d(layer) else weight


def _is_plain_forward(layer: nn.Module) -> bool:
    kind: Any = _conv1d() if is_conv1d(layer) else nn.Linear
    return type(layer).forward is kind.forward and not has_own_forward(layer)


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a layer has another forward than its class. accelerate sets one, and leaves that of the class behind."""
    own = layer.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(layer).forward
