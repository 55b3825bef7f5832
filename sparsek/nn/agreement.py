"""Whether the ranks of a process group have the same sparse layers."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import Facts, agreed
from sparsek.nn.regrow import ALIKE
from sparsek.nn.sparse import SparseLinear

UNLIKE = (
    "give every rank as many tokens, and gradients on all or none; parts of unlike sizes must be DTensors, as of "
    "torch.distributed.tensor.distribute_tensor"
)


def check_patterns(model: nn.Module, group: Any = None) -> None:
    """Check that all ranks have the same patterns, also of 2:4, in the sparse layers of a model. Synchronizes.

    Every rank of the group must call this, for example after each rank has called `set_pattern`, `prune_` or `grow_`.

    Args:
        model: A SparseLinear, or a module with some.
        group: A process group, or a DeviceMesh of one dimension; by default all processes.

    Raises:
        InvalidInput: For another group, and on every rank if patterns differ. The message names layers and ranks.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module")
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "check_patterns compares processes; call torch.distributed.init_process_group first"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh) and group.ndim == 1:
        group = group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise InvalidInput(
            f"group is {arguments.shown(group)}; it must be a process group that this rank is in, a DeviceMesh of one "
            "dimension, or None"
        )
    layers = {name: each for name, each in model.named_modules() if isinstance(each, SparseLinear)}

    def check() -> Facts:
        return {name or "the model": facts_of(each, elements=True) for name, each in layers.items()}

    agreed("check_patterns", [group], check, ALIKE)


def check_calls(calls: set[Any], mesh: Any, what: str, facts: tuple[Any, ...], why: str) -> None:
    """InvalidInput where the ranks of a mesh call a module unlike, whose collectives would wait for each other.

    On CPUs all calls are compared, by an exchange of a checksum, and every rank raises. On GPUs, where that waits for
    the device, those whose facts are new in this process: the first call, and those of other sizes.

    Args:
        calls: The facts of former calls of the module.
        mesh: A DeviceMesh of one dimension.
        what: The module.
        facts: What must be equal.
        why: What is wrong on this rank, or "".
    """
    facts = (*facts, "gradients" if torch.is_grad_enabled() else "no gradients")
    if (mesh.device_type != "cpu" and (facts in calls or (why and calls))) or mesh.size() == 1:
        if why:
            raise InvalidInput(why)
        return

    def check() -> Facts:
        if why:
            raise InvalidInput(why)
        return {"x": ((words := ", ".join(map(str, facts))), words)}

    agreed(what, [mesh.get_group()], check, UNLIKE)
    calls.add(facts)


def facts_of(layer: Any, elements: bool = False) -> tuple[str, str]:
    """What must be equal on all ranks: a checksum of it, and in words."""
    pattern, meta = layer.pattern, layer._buffers.get("metadata")
    parts = [] if pattern is None else [each.tobytes() for each in pattern.host]
    if elements and meta is not None:
        whole = meta.full_tensor() if hasattr(meta, "full_tensor") and not hasattr(layer, "_split") else meta
        if type(whole) is torch.Tensor and not whole.is_meta:
            parts.append(whole.cpu().numpy().tobytes())
    facts = (
        (layer.out_features, layer.in_features, layer._block, layer._kind, layer._scaled),
        (layer.activation, layer._parameters.get("bias") is not None, str(layer._dtype)),
    )
    words = f"{layer.out_features}x{layer.in_features}"
    words += "" if pattern is None else f" with {pattern.nnzb} blocks"
    return hashlib.sha256(b"".join([repr(facts).encode(), *parts])).hexdigest(), words
