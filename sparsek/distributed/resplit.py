"""Tokens of a sequence from one split over the ranks of a mesh to another: one exchange along each dim of the mesh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sparsek.distributed.exchange import Exchange, exchanged
from sparsek.distributed.plan import MeshPlan


def coordinates(plan: MeshPlan, owner: np.ndarray) -> list[np.ndarray]:
    """The rank along each dim of the plan's mesh, of ranks in its order."""
    if len(plan._groups) == 1:
        return [owner]
    columns = dist.get_world_size(plan._groups[1])
    return [owner // columns, owner % columns]


def exchanges(
    plan: MeshPlan,
    source: Sequence[np.ndarray],
    target: Sequence[np.ndarray],
    device: torch.device,
    what: str,
    placed: tuple[np.ndarray, int] | None = None,
) -> list[Exchange]:
    """How tokens come from one split to another; none if all stay where they are.

    Args:
        plan: The plan, for its mesh.
        source: For each dim of its mesh the rank of each token, int64 [tokens]. A rank has its tokens in order.
        target: The same afterwards.
        device: Where the tokens are.
        what: What is exchanged, for messages.
        placed: The row of each token on the rank that it comes to, and the rows of this rank; others are 0. None: in
            order, without gaps.
    """
    groups, tokens = plan._groups, source[0].size
    here = [dist.get_rank(group) for group in groups]
    if placed is None and all(np.array_equal(a, b) for a, b in zip(source, target, strict=True)):
        return []
    found, held = [], np.ones(tokens, bool)  # tokens that are exchanged within this rank's group
    if len(groups) == 2:
        held = source[1] == here[1]
    for at, group in enumerate(groups):
        given, wanted = source[at][held], target[at][held]
        leaving, arriving = wanted[given == here[at]], given[wanted == here[at]]
        send = [np.flatnonzero(leaving == rank) for rank in range(dist.get_world_size(group))]
        place = [np.flatnonzero(arriving == rank) for rank in range(dist.get_world_size(group))]
        rows = arriving.size
        if placed is not None and at == len(groups) - 1:
            row, rows = placed[0][held][wanted == here[at]], placed[1]
            place = [row[each] for each in place]
        found.append(Exchange.of(here[at], send, place, (leaving.size, rows), group, device, what))
        held = target[0] == here[0]
    return found


def resplit(given: list[Tensor], ways: Sequence[Exchange], dim: int) -> list[Tensor]:
    """Tensors of one dtype with this rank's tokens along `dim`, after these exchanges; with gradients."""
    if not ways:
        return given
    tails = [x.movedim(dim, 0).shape[1:] for x in given]
    rows = [
        x.movedim(dim, 0).reshape(x.shape[dim], tail.numel()) for x, tail in zip(given, tails, strict=True)
    ]
    for each in ways:
        rows = list(exchanged(each, *rows))
    return [x.view(x.shape[0], *tail).movedim(0, dim) for x, tail in zip(rows, tails, strict=True)]
