"""Shards of tensors along the sequence, as attention over a mesh takes them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import agreed, refuse_transforms
from sparsek.core.tracing import untraced
from sparsek.distributed.dtensors import check_split, check_whole_or_split, redistributed
from sparsek.distributed.exchange import Exchange, exchanged
from sparsek.distributed.plan import MeshPlan, once

PARTS = ("queries", "keys")


def positions(plan: MeshPlan, of: str = "queries", *, device: str | torch.device | None = None) -> Tensor:
    """Return the places of this rank's tokens in the sequence, int64, ascending: the position ids of its shard.

    Args:
        plan: What `sk.distributed.plan` returned.
        of: "queries" or "keys"; they differ only where the mask has other numbers of both.
        device: Where the result is made; the CPU for None.

    Raises:
        InvalidInput: For a plan without processes.
    """
    _checked(plan, of)._here  # noqa: B018  # InvalidInput without processes
    return _places(plan, of, arguments.device("device", "cpu" if device is None else device)).clone()


def shard_sequence(x: Tensor, plan: MeshPlan, dim: int = 2, of: str = "queries") -> Tensor:
    """Return this rank's shard of a tensor that every rank has: its tokens along `dim`. No communication.

    Its gradient is that of this rank's tokens, 0 for others.

    Args:
        x: A tensor with the whole sequence along `dim`. A DTensor, with Replicate along the plan's mesh, gives one with
            Shard(dim) there, in torch's split and not the plan's, as `attention` takes DTensors; all ranks must run its
            backward pass. One with Shard(dim) is returned.
        plan: What `sk.distributed.plan` returned.
        dim: The dim of the sequence: 2 of q, k and v [B, H, S, D], 1 of hidden states [B, S, E] or tokens [B, S].
        of: "queries" or "keys".

    Raises:
        InvalidInput: For another length, a plan without processes, and a dtype that torch selects no tokens in, such
            as FP8 under torch.func.
    """
    length = _checked(plan, of)._parts.deal(of).length
    if isinstance(x, DTensor):
        return _sharded(x, plan, dim, of)
    dim = _check_length(x, dim, length)
    try:
        return x.index_select(dim, _places(plan, of, x.device))
    except NotImplementedError as error:  # of FP8 under torch.func, for one
        raise InvalidInput(
            f"torch selects no tokens of {x.dtype} here ({error}); convert x to bfloat16"
        ) from error


@untraced("sk.distributed.shard_sequence of a DTensor communicates", "leave fullgraph=True out")
def _sharded(x: DTensor, plan: MeshPlan, dim: int, of: str) -> DTensor:
    plan._here  # noqa: B018  # InvalidInput without processes
    dim = check_whole_or_split(x, plan, dim, of)
    return redistributed(x, plan, dim, Shard(dim))


@untraced("sk.distributed.unshard_sequence communicates", "leave fullgraph=True out")
def unshard_sequence(
    x: Tensor, plan: MeshPlan, dim: int = 2, of: str = "queries", *, check: bool = True
) -> Tensor:
    """Return the whole tensor of shards, on every rank. All ranks must call it.

    Its gradient for a shard is the sum over the ranks, each of which has the whole result.

    Args:
        x: This rank's shard. A DTensor with Shard(dim) along the plan's mesh gives one with Replicate there, and its
            gradient is that of the one whole result.
        plan: What `sk.distributed.plan` returned.
        dim: The dim of the sequence.
        of: "queries" or "keys".
        check: Whether ranks compare their calls first, as in `attention`.

    Raises:
        InvalidInput: For a shard of another length, and a plan without processes; on every rank.
        MeshError: If a rank ended, or did not call it within the timeout of its process group.
    """
    if not isinstance(plan, MeshPlan):
        _checked(plan, of)
    plan._here  # noqa: B018  # without processes there is nobody to agree with

    def checks() -> str:
        nonlocal dim
        _checked(plan, of)
        arguments.flag("check", check)
        refuse_transforms("sk.distributed.unshard_sequence")
        if isinstance(x, DTensor):
            dim = check_split(x, plan, dim, of)
            return f"a DTensor {list(x.shape)} in {x.dtype} along {dim}, {of} of {plan._text}"
        dim = _check_length(x, dim, int(plan._parts.deal(of).tokens[plan._here]))
        shape = [*x.shape[:dim], "S", *x.shape[dim + 1 :]]
        learns = torch.is_grad_enabled() and x.requires_grad
        return f"{of} {shape} in {x.dtype}, gradient {learns}, of {plan._text}"

    if check is not False:
        agreed("sk.distributed.unshard_sequence", plan._groups, checks)
    else:
        checks()
    if isinstance(x, DTensor):
        return redistributed(x, plan, dim, Replicate())
    return unsharded(x, plan, dim, of)


def unsharded(x: Tensor, plan: MeshPlan, dim: int, of: str, side: int = 1) -> Tensor:
    """The whole tensor, with gradients; `side`: of tokens that an entry along `dim` stands for. Not checked."""
    parts = plan._parts
    if parts.heads is not None and parts.sequence is not None:
        return unsharded(unsharded(x, parts.heads, dim, of, side), parts.sequence, dim, of, side)
    deal, rank = parts.deal(of).by(side), plan._here
    rows = x.movedim(dim, 0)

    def make() -> Exchange:
        mine = np.arange(deal.tokens[rank])
        places = [deal.positions(other) for other in range(deal.ranks)]
        sizes = mine.size, deal.length
        return Exchange.of(
            rank, [mine] * deal.ranks, places, sizes, parts.group, x.device, "shards of a sequence"
        )

    exchange = once(parts.kept, ("unshard", of, side, x.device), make)
    (whole,) = exchanged(exchange, rows.reshape(rows.shape[0], int(np.prod(rows.shape[1:]))))
    return whole.reshape(deal.length, *rows.shape[1:]).movedim(0, dim)


def _places(plan: MeshPlan, of: str, device: torch.device) -> Tensor:
    """The positions of this rank's tokens, made once for a device."""

    def make() -> Tensor:
        return torch.from_numpy(plan._parts.deal(of).positions(plan._here).astype(np.int64)).to(device)

    return once(plan._parts.kept, ("positions", of, device), make)


def _checked(plan: MeshPlan, of: str) -> MeshPlan:
    if not isinstance(plan, MeshPlan):
        raise InvalidInput(f"plan is {arguments.shown(plan)}; it must come from sk.distributed.plan")
    arguments.one_of("of", of, PARTS)
    return plan


def _check_length(x: Tensor, dim: int, length: int) -> int:
    """The dim, from 0."""
    arguments.tensor("x", x)
    dim = arguments.integer("dim", dim, -max(x.dim(), 1), max(x.dim(), 1) - 1) % max(x.dim(), 1)
    if not x.dim() or x.shape[dim] != length:
        raise InvalidInput(f"x is {list(x.shape)}; the plan needs {length} tokens along dim {dim}")
    return dim
