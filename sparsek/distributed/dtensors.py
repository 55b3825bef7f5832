"""DTensors of whole sequences: their rows to the shards of a plan, and back.

A DTensor is a whole tensor, whose tokens torch splits in order, into chunks of one length. A plan gives a rank other
tokens. So rows are exchanged between both splits; none are where the splits are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sparsek.attn.mask.operands import check_shapes
from sparsek.attn.mask.token_lists import TokenLists
from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import failed, refuse_transforms
from sparsek.distributed.exchange import Exchange
from sparsek.distributed.plan import MeshPlan, once
from sparsek.distributed.resplit import coordinates, exchanges, resplit

WHOLE = (
    "sk.distributed.shard_sequence(x, plan) places a whole DTensor, and .to_local() and .full_tensor() end it"
)
OF = ("queries", "keys", "keys")  # q, k and v


@dataclass(frozen=True, eq=False)
class PlacedOperands:
    """q, k and v as DTensors over the mesh of a plan, checked.

    Attributes:
        q, k, v: [B, H, S, D] of whole sequences.
        plan: The plan whose shards attention takes.
        lists: TokenLists of the rank's own queries in torch's split, or any other mask.
    """

    q: DTensor
    k: DTensor
    v: DTensor
    plan: MeshPlan
    lists: Any

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, plan: MeshPlan, mask: Any) -> PlacedOperands:
        """InvalidInput for operands that are not split along the sequence by the plan's mesh, or not alike."""
        refuse_transforms("sk.distributed.attention")
        for name, x, of in zip("qkv", (q, k, v), OF, strict=True):
            if not isinstance(x, DTensor):
                raise InvalidInput(
                    f"{name} is a {type(x).__name__} and others are DTensors; {arguments.LOCAL}"
                )
            if x.dim() != 4:
                raise InvalidInput(
                    f"{name} is {x.dim()}-D {list(x.shape)}; it must be [B, heads, tokens, head dim]"
                )
            _check_split(name, x, plan, 2, of)
            if (x.dtype, x.device_mesh, x.placements) != (q.dtype, q.device_mesh, q.placements):
                raise InvalidInput(
                    f"q is {q.dtype} with {_shown(q.placements)} and {name} {x.dtype} with {_shown(x.placements)}; "
                    "both must be alike, over one mesh"
                )
        if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
            raise InvalidInput(
                f"q is {q.dtype}; over a mesh operands are bfloat16, float16, float32 or float64"
            )
        check_shapes(q.shape, k.shape, v.shape)
        _check_others(q, k, plan)
        queries = q.to_local().shape[2]
        if isinstance(mask, TokenLists) and mask.indices.shape[2] != queries:
            raise InvalidInput(
                f"indices is {list(mask.indices.shape)}; q has {queries} queries on this rank, which need as many lists"
            )
        return cls(q, k, v, plan, mask)

    @property
    def text(self) -> str:
        """The operands in words, alike on all ranks."""
        shapes = [list(x.shape) for x in (self.q, self.k, self.v)]
        lists = "" if not isinstance(self.lists, TokenLists) else f" by {self.lists.label}"
        return (
            f"DTensors {shapes} in {self.q.dtype}, {_shown(self.q.placements)},{lists} of {self.plan._text}"
        )

    def shards(self) -> tuple[Tensor, Tensor, Tensor, Any]:
        """q, k and v of this rank's tokens by the plan, and the mask."""
        q, k, v = (x.to_local() for x in (self.q, self.k, self.v))
        (q,) = moved([q], self.plan, 2, "queries")
        k, v = moved([k, v], self.plan, 2, "keys")
        if not isinstance(self.lists, TokenLists):
            return q, k, v, self.lists
        indices, counts = self.lists.indices, self.lists.counts
        (indices,) = moved([indices], self.plan, 2, "queries")
        if counts is not None:
            (counts,) = moved([counts], self.plan, 2, "queries")
        return q, k, v, replace(self.lists, indices=indices, counts=counts)

    def placed(self, x: Tensor) -> DTensor:
        """A result [B, Hq, tokens of the plan's shard, ...] as a DTensor like q."""
        sizes = [*self.q.shape[:3], *x.shape[3:]]
        (x,) = moved([x], self.plan, 2, "queries", back=True)
        stride = torch.empty(sizes, dtype=x.dtype, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(),
            self.q.device_mesh,
            self.q.placements,
            run_check=False,
            shape=torch.Size(sizes),
            stride=stride,
        )


def redistributed(x: DTensor, plan: MeshPlan, dim: int, wanted: Placement) -> DTensor:
    """x with this placement along the plan's mesh. All ranks must call it if x is split and shall not be."""
    found = list(x.placements)
    for at in _dims_of(x, plan, dim):
        found[at] = wanted
    try:
        return x.redistribute(placements=found)
    except RuntimeError as error:
        raise failed("the redistribution of a DTensor", plan._groups[0], error) from error


def check_whole_or_split(x: DTensor, plan: MeshPlan, dim: int, of: str) -> int:
    """The dim, from 0. InvalidInput unless x is whole on each rank of the plan's mesh, or split along `dim`."""
    dim = arguments.integer("dim", dim, -max(x.dim(), 1), max(x.dim(), 1) - 1) % max(x.dim(), 1)
    if all(type(x.placements[at]) is Replicate for at in _dims_of(x, plan, dim)):
        _check_length(x, plan, dim, of)
    else:
        _check_split("x", x, plan, dim, of)
    return dim


def check_split(x: DTensor, plan: MeshPlan, dim: int, of: str) -> int:
    """The dim, from 0. InvalidInput unless x is split along `dim` by the plan's mesh."""
    dim = arguments.integer("dim", dim, -max(x.dim(), 1), max(x.dim(), 1) - 1) % max(x.dim(), 1)
    _check_split("x", x, plan, dim, of)
    return dim


def _check_length(x: DTensor, plan: MeshPlan, dim: int, of: str) -> None:
    length = plan._parts.deal(of).length
    if not x.dim() or x.shape[dim] != length:
        raise InvalidInput(
            f"a DTensor is {list(x.shape)}; the plan needs all {length} tokens along dim {dim}"
        )


def _check_split(name: str, x: DTensor, plan: MeshPlan, dim: int, of: str) -> None:
    """InvalidInput unless the plan's mesh splits x along `dim`, and nothing else does, as torch splits tensors."""
    dims = _dims_of(x, plan, dim)
    for at, each in enumerate(x.placements):
        along = type(each) is Shard and each.dim == dim
        if along != (at in dims) and (x.device_mesh.size(at) > 1 or at in dims):
            raise InvalidInput(
                f"{name} is a DTensor with {_shown(x.placements)}; along the mesh of the plan, dim "
                f"{', '.join(map(str, dims))} of its mesh, it must have Shard({dim}), and nowhere else; {WHOLE}"
            )
    _check_length(x, plan, dim, of)
    mine = _split_of(plan, of)[1]
    if x.to_local().shape[dim] != mine:
        raise InvalidInput(
            f"{name} has {x.to_local().shape[dim]} tokens on this rank, and torch splits {x.shape[dim]} so that it has "
            f"{mine}; pass shards of a plan as plain tensors, for a DTensor has its tokens in order"
        )


def _check_others(q: DTensor, k: DTensor, plan: MeshPlan) -> None:
    """InvalidInput where other dims of the mesh split q and k so that parts are no attention of their own."""
    for at, each in enumerate(q.placements):
        ranks = q.device_mesh.size(at)
        if at in _dims_of(q, plan, 2) or ranks == 1:
            continue
        if type(each) is Replicate or (type(each) is Shard and each.dim == 0 and plan.mask.batch == 1):
            continue
        heads = q.shape[1], k.shape[1]
        if (
            type(each) is Shard
            and each.dim == 1
            and plan.mask.heads == 1
            and not any(n % ranks for n in heads)
        ):
            continue
        raise InvalidInput(
            f"q is a DTensor with {_shown(q.placements)}; beside the sequence {ranks} ranks may split batch items, "
            f"and heads if they divide {heads[0]} and {heads[1]}, where the mask is one for all of these; the "
            f"mask has batch {plan.mask.batch} and heads {plan.mask.heads}; {arguments.LOCAL}"
        )


def _dims_of(x: DTensor, plan: MeshPlan, dim: int) -> tuple[int, ...]:
    """The dims of x's mesh that are the plan's, ascending. InvalidInput if there are none."""
    mesh, found = x.device_mesh, []
    for group in plan._groups:
        ranks = dist.get_process_group_ranks(group)
        same = [at for at in range(mesh.ndim) if at not in found and _ranks_along(mesh, at) == ranks]
        # Of dims of one rank each any is right.
        same.sort(key=lambda at: not x.placements[at].is_shard(dim))
        found += same[:1]
    if len(found) != len(plan._groups) or found != sorted(found):
        raise InvalidInput(
            f"a DTensor is over {mesh}, whose dims do not have the ranks of the plan's mesh, "
            f"{[dist.get_process_group_ranks(group) for group in plan._groups]}, in this order; {WHOLE}"
        )
    return tuple(found)


def _ranks_along(mesh: Any, dim: int) -> list[int]:
    """The ranks along one dim of a mesh, in order, which this process is among; none for another process."""
    here = mesh.get_coordinate()
    return [] if here is None else mesh.mesh[(*here[:dim], slice(None), *here[dim + 1 :])].tolist()


def _shown(placements: Sequence[Placement]) -> str:
    return f"placements {', '.join(map(repr, placements))}"


def moved(given: list[Tensor], plan: MeshPlan, dim: int, of: str, *, back: bool = False) -> list[Tensor]:
    """Tensors of one dtype with tokens along `dim`, from torch's split to the plan's, or back; with gradients."""
    ways = once(
        plan._parts.kept, ("moved", of, given[0].device), lambda: _exchanges(plan, of, given[0].device)
    )
    if back:
        ways = [each.reversed for each in reversed(ways)]
    return resplit(given, ways, dim)


def _split_of(plan: MeshPlan, of: str) -> tuple[list[np.ndarray], int]:
    """The rank of each token along each dim of the plan's mesh, as torch splits, and the tokens of this rank."""
    length, sizes = plan._parts.deal(of).length, [dist.get_world_size(group) for group in plan._groups]
    start, size = np.zeros(length, np.int64), np.full(length, length)  # of the chunk of a token
    places, tokens = [], np.arange(length)
    for ranks in sizes:
        chunk = np.maximum(-(-size // ranks), 1)
        places.append((tokens - start) // chunk)
        start, size = start + places[-1] * chunk, np.minimum(chunk, size - places[-1] * chunk)
    here = [dist.get_rank(group) for group in plan._groups]
    mine = functools.reduce(np.logical_and, [at == place for at, place in zip(places, here, strict=True)])
    return places, int(mine.sum())


def _exchanges(plan: MeshPlan, of: str, device: torch.device) -> list[Exchange]:
    """From torch's split to the plan's shards."""
    deal = plan._parts.deal(of)
    target = coordinates(plan, np.repeat(deal.owner, deal.unit_tokens))
    return exchanges(plan, _split_of(plan, of)[0], target, device, "tokens of DTensors")
