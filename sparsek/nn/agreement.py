"""Whether the ranks of a process group have the same sparse layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.nn.sparse import SparseLinear

ALIKE = "load the same state dict on every rank, or give all the same pattern"
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
    with ranks_agree("check_patterns", group) as told:
        told.update({name or "the model": facts_of(each, elements=True) for name, each in layers.items()})


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
    ranks, group = mesh.size(), mesh.get_group()
    if ranks == 1 or (mesh.device_type != "cpu" and (facts in calls or (why and calls))):
        if why:
            raise InvalidInput(why)
        return
    words = ", ".join(map(str, facts))
    own = torch.tensor([crc32((why or words).encode())], dtype=torch.int64, device=mesh.device_type)
    found = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(found, own, group)
    if why or bool((torch.cat(found) != own).any()):
        with ranks_agree(what, group, UNLIKE) as told:
            if why:
                raise InvalidInput(why)
            told["x"] = words, words
    calls.add(facts)


@contextmanager
def ranks_agree(what: str, group: Any, cure: str = ALIKE) -> Iterator[dict[str, tuple[str, str]]]:
    """InvalidInput on every rank of a group where one raises it in this context, or notes other facts than the first.

    The context notes by name what must be equal: a checksum, and in words. One collective, at its end.

    Args:
        what: The call, which all ranks make.
        group: A process group; None for all processes.
        cure: What to do where facts differ.
    """
    told: dict[str, tuple[str, str]] = {}
    fault: Exception | None = None
    try:
        yield told
    except Exception as error:  # the other ranks must not wait
        fault = error
    why = "" if fault is None else str(fault) or type(fault).__name__
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (what, why, told), group=group)
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    failed = [(rank, text) for rank, (_, text, _) in zip(ranks, found, strict=True) if text]
    if fault is not None and not isinstance(fault, InvalidInput):
        raise fault
    if failed:
        rank, text = failed[0]
        also = "" if len(failed) == 1 else f" (and {len(failed) - 1} other ranks)"
        raise InvalidInput(text if len(failed) == len(ranks) else f"on rank {rank}{also}: {text}")
    first, _, known = found[0]
    for rank, (call, _, other) in zip(ranks, found, strict=True):
        if call != first:
            raise InvalidInput(
                f"rank {ranks[0]} calls {first}, and rank {rank} {call}; all must call the same"
            )
        names = [name for name in {**known, **other} if known.get(name) != other.get(name)]
        if not names:
            continue
        here, there = (each.get(names[0], ("", "no such layer"))[1] for each in (known, other))
        more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
        raise InvalidInput(
            f"{what}: {names[0]!r}{more} differ between ranks: rank {ranks[0]} has {here}, rank {rank} {there}"
            f"{', of another pattern' if here == there else ''}; {cure}"
        )


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
