"""Which layers of a model can be replaced, and how one takes the place of another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

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
)


class Origin(NamedTuple):
    """What a sparse layer was: its class, torch.nn.Linear or Conv1D, and whether its weight learns."""

    kind: type[nn.Module]
    learns: bool


class Facts:
    """What decides over all layers of a model whether one may be replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.owners: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(parameter), []).append(name)
        self.heads: set[int] = set()
        for module in model.modules():
            get = getattr(module, "get_output_embeddings", None)
            try:
                self.heads.add(id(get() if callable(get) else None))
            except (AttributeError, NotImplementedError):  # a model without one
                continue

    def why_not(self, name: str, layer: Any, is_named: bool) -> str:
        """Why a layer may not be replaced, whatever the config; "" if it may."""
        if isinstance(layer, SparseLinear):
            return "is sparse already; sk.densify_ makes it dense"
        kind = type(layer).__name__
        if not is_linear(layer):
            return f"is no linear layer, but of {kind}"
        if not _is_plain_forward(layer):
            return f"is of {kind} with a forward of its own"
        weight = layer._parameters.get("weight")
        others = layer._parameters.keys() - {"weight", "bias"} or layer._modules or layer._buffers
        if weight is None or others or "bias" not in layer._parameters:
            return "computes its weight from other tensors; remove the parametrization first"
        if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
            return f"has a weight of class {type(weight).__name__}"
        shared = [each for each in self.owners[id(weight)] if each != f"{name}.weight"]
        if shared:
            return f"shares its weight with {shared[0].removesuffix('.weight')}"
        if id(layer) in self.heads and not is_named:
            return "is the output embedding; a rule by its name takes it"
        parent = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention):
            return "has a weight that torch.nn.MultiheadAttention reads without a call"
        return ""


def adopt(new: Any, old: Any, origin: type[nn.Module] | None = nn.Linear) -> Any:
    """Give a layer the bias, mode and hooks of the one whose place it takes."""
    if old.bias is not None:
        new.bias = old.bias
    if origin is not None:
        learns = old.weight.requires_grad
        new._origin = Origin(_conv1d() if is_conv1d(old) else origin, learns)  # type: ignore[arg-type]
        for name, parameter in new.named_parameters():
            if name != "bias":
                parameter.requires_grad_(learns)
    for name in HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]  # the same dict: handles of hooks still remove them
    return new.train(old.training)


def swap(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """Put layers in their places by name, all or none."""
    done: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for name, layer in made.items():
            parent, _, own = name.rpartition(".")
            holder = model.get_submodule(parent)
            done.append((holder, own, holder.get_submodule(own)))
            setattr(holder, own, layer)
    except BaseException:
        for holder, own, layer in done:
            holder._modules[own] = layer
        raise


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is a dense linear one."""
    return isinstance(layer, nn.Linear) or is_conv1d(layer)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is transformers' Conv1D, whose weight is [K, M]."""
    kind = _conv1d()
    return kind is not None and isinstance(layer, kind)


def _conv1d() -> type[nn.Module] | None:
    return getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)


def weight_of(layer: Any) -> Tensor:
    """The weight [M, K] of a dense layer, a view outside autograd."""
    weight = layer.weight.detach()
    return weight.T if is_conv1d(layer) else weight


def _is_plain_forward(layer: nn.Module) -> bool:
    kind: Any = _conv1d() if is_conv1d(layer) else nn.Linear
    return type(layer).forward is kind.forward and "forward" not in layer.__dict__
