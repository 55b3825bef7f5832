"""State dicts of one process, of models whose layers are split or sharded over ranks: they fit any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.nn.parallel_linear import PARTS, ParallelLinear, full, is_split, shard_like, whole_of

Change: TypeAlias = Callable[
    [Any, str, Any, Any], Any
]  # of a tensor, its name in a layer, the layer, and one like it


@torch.no_grad()
def full_state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return the tensors of a model and its optimizer as those of one process, on the CPU. Every rank must call this.

    Every rank gets all of them, layer by layer. `load_state_dict` of the same model in one process takes
    `state["model"]`, and `load_full_state_dict` both, on any number of ranks and with any split. Models may be split by
    styles of torch and of `sk.distributed`, and sharded by FSDP2.

    Args:
        model: A module, on every rank.
        optimizer: One for its Parameters; None for none.

    Returns:
        {"model": ..., "optimizer": ...}, the second only with an optimizer: its state by the names of Parameters, as of
        `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.

    Raises:
        InvalidInput: For another model or optimizer.
    """
    _check(model, optimizer)

    def whole(x: Any, name: str, layer: Any, _: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        made = full(x) if is_split(x) else x.detach()
        made = whole_of(layer, name, made) if is_split(x) and layer is not None else made
        return made.detach().to("cpu", copy=True)

    state = {name: x for name, x in get_model_state_dict(model).items() if name.rpartition(".")[2] != PARTS}
    made = {"model": _mapped(model, whole, state)}
    if optimizer is not None:
        made["optimizer"] = _mapped_optimizer(model, whole, get_optimizer_state_dict(model, optimizer))
    return made


@torch.no_grad()
def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None
) -> None:
    """Load what `full_state_dict` returned into a model, and into its optimizer. Every rank must call this.

    Layers take their parts. A layer that is split must have the pattern of the state.

    Args:
        model: The same model, split and sharded in any way.
        state: What `full_state_dict` returned, on every rank.
        optimizer: An optimizer of the same class for its Parameters; None for none.

    Raises:
        InvalidInput: For another model, optimizer or state, and for tensors that do not fit.
        RuntimeError: As of load_state_dict, for missing or unknown names, and other patterns and sizes.
    """
    _check(model, optimizer)
    _check_state(state, optimizer is not None)

    def part(x: Any, name: str, layer: Any, like: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if not is_split(like):
            return x.clone()  # optimizers go on with the tensors that they are given
        if layer is not None:
            return shard_like(layer, name, x, like)
        return distribute_tensor(
            x.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
        )

    now = get_model_state_dict(model)
    given = {**state["model"], **{name: x for name, x in now.items() if name.rpartition(".")[2] == PARTS}}
    set_model_state_dict(model, _mapped(model, part, given, now))
    if optimizer is not None:
        now = get_optimizer_state_dict(model, optimizer)
        set_optimizer_state_dict(model, optimizer, _mapped_optimizer(model, part, state["optimizer"], now))


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module")
    for name, each in chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(each):
            raise InvalidInput(f"{name} has no values yet; call the model once")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidInput(
            f"optimizer is {arguments.shown(optimizer)}; it must be a torch.optim.Optimizer or None"
        )


def _check_state(state: Any, trains: bool) -> None:
    found = state if isinstance(state, Mapping) else {}
    of_optimizer = found.get("optimizer", None if trains else {"state": {}})
    parts = of_optimizer.get("state") if isinstance(of_optimizer, Mapping) else None
    known = isinstance(parts, Mapping) and all(isinstance(each, Mapping) for each in parts.values())
    if not isinstance(found.get("model"), Mapping) or not known:
        raise InvalidInput(
            f"state is {arguments.shown(state)}; it must be what full_state_dict returns, with model"
            f"{' and optimizer' if trains else ''}"
        )


def _split_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that styles have split, by the names that state dicts have for them."""
    found = ((name, each) for name, each in model.named_modules() if isinstance(each, ParallelLinear))
    return {name.replace("_orig_mod.", ""): each for name, each in found}


def _mapped(model: nn.Module, change: Change, state: Any, like: Any = None) -> dict[str, Any]:
    """The state dict of a model with every tensor changed. `like`: one whose tensors are in the same places."""
    layers, others = _split_layers(model), like or {}
    made = {}
    for path, x in state.items():
        above, _, name = path.rpartition(".")
        made[path] = change(x, name, layers.get(above), others.get(path))
    return made


def _mapped_optimizer(model: nn.Module, change: Change, state: Any, like: Any = None) -> dict[str, Any]:
    """The same of an optimizer's, with several tensors for each Parameter."""
    layers, others, made = _split_layers(model), (like or {}).get("state", {}), {}
    for path, parts in state["state"].items():
        above, _, name = path.rpartition(".")
        beside = others.get(path, {})
        made[path] = {key: change(x, name, layers.get(above), beside.get(key)) for key, x in parts.items()}
    return {**state, "state": made}
