"""Packed experts that are spread over a mesh: tokens go to the ranks of their experts, and results come back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from sparsek.core import arguments
from sparsek.core.handshake import failed
from sparsek.distributed.exchange import Exchange, Exchanged, exchanged
from sparsek.distributed.plan import once
from sparsek.nn.experts import packed_names, weighted_sum
from sparsek.nn.gated import Fitted, fitted_class
from sparsek.nn.parallel_linear import (
    Split,
    check_given,
    everywhere,
    is_split,
    laid_out,
    moved,
    summed,
    wrapped,
)

WHAT = "the tokens of experts"


def spread_experts(experts: Any, split: Split) -> Any:
    """Packed experts whose weights are split, with those of this rank; `split.sizes` are their numbers."""
    experts.__class__ = fitted_class(ParallelExperts, type(experts))
    experts.all_experts, experts.num_experts = sum(split.sizes), split.sizes[split.rank]
    experts.__dict__.update(_split=split, _calls=set(), _places={})
    return experts


class ParallelExperts(Fitted):
    """Packed experts in groups, one for each rank of a mesh."""

    @torch._disable_dynamo  # numbers of tokens are no constants of a graph
    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        """Return what `SparseExperts.forward` does, in the layout of the style.

        Args:
            hidden_states: [T, D], of the input layout, or a DTensor of another.
            top_k_index: [T, k], the experts of each token, of all ranks; laid out alike.
            top_k_weights: [T, k], laid out alike.
        """
        own: Any = self
        split: Split = own._split
        self._check(hidden_states, top_k_index, top_k_weights)
        index = top_k_index.long()  # backends know few dtypes
        x, index, weights = given = [laid_out(z, split) for z in (hidden_states, index, top_k_weights)]
        if x.placements[0] == split.outputs == Replicate():
            x, index, weights = (everywhere(each, split) for each in given)
            y = weighted_sum(self, x, self._mine(index), weights)
            return summed(y, split)
        y = self._exchanged(*(moved(each, Shard(0)).to_local() for each in given))
        if split.local and split.outputs == Shard(0):  # of any number of tokens
            return y
        y = moved(wrapped(y, split.mesh, [Shard(0)], x.shape), split.outputs)
        return y.to_local() if split.local else y

    def _exchanged(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The result of the tokens of this rank. Waits for the device once, for the numbers of tokens."""
        own: Any = self
        split: Split = own._split
        (tokens, top), ranks, row = index.shape, len(split.sizes), 1 + max(split.sizes)
        made = once(
            own._places, index.device, lambda: torch.tensor(_places(split.sizes), device=index.device)
        )
        ids = torch.where((index < 0) | (index > own.all_experts), own.all_experts, index)
        places = made[ids]
        to = places // row
        # A token goes to a rank once, as the first of its pairs with an expert there.
        again = (to.unsqueeze(2) == to.unsqueeze(1)).tril(-1).any(2)
        to = to.masked_fill(again, ranks).flatten()
        counted = torch.cat((places.flatten(), to * row))
        sent = counted.new_zeros(ranks * row + 1).scatter_add_(0, counted, torch.ones_like(counted))
        counts = torch.stack((sent[:-1], torch.empty_like(sent[:-1])))
        group = split.mesh.get_group()
        try:
            dist.all_to_all_single(counts[1], counts[0], group=group)
        except RuntimeError as error:
            raise failed(f"the exchange of the numbers of {WHAT}", group, error) from error
        sends, arrives = counts.view(2, ranks, row).tolist()  # waits for the device
        send_counts, receive_counts = (tuple(each[0] for each in rows) for rows in (sends, arrives))
        pairs, many = to.argsort(stable=True)[: sum(send_counts)], sum(receive_counts)
        every = torch.arange(many, device=x.device)
        there = Exchange(pairs // top, send_counts, every, receive_counts, many, tokens, group, WHAT)
        back = Exchange(every, receive_counts, pairs, send_counts, tokens * top, many, group, WHAT)
        under_way = [there.start(each) for each in (x, weights, ids)]
        (x,), (weights,) = Exchanged.apply(under_way[0], x), Exchanged.apply(under_way[1], weights)
        (index,) = under_way[2].placed()
        per_expert = [sum(each) for each in zip(*arrives, strict=True)][1 : 1 + own.num_experts]
        y = weighted_sum(self, x, self._mine(index), weights, per_expert)
        (y,) = exchanged(back, y)
        return y.view(tokens, top, y.shape[1]).sum(1)

    def _mine(self, index: Tensor) -> Tensor:
        """The indices among the experts of this rank; their number for those of other ranks."""
        own: Any = self
        index = index - sum(own._split.sizes[: own._split.rank])
        return index.masked_fill((index < 0) | (index >= own.num_experts), own.num_experts)

    def _layers(self) -> list[Any]:
        own: Any = self
        return [own._modules[name] for name in packed_names(own)]

    def _check(self, *given: Any) -> None:
        """InvalidInput on every rank, where one has operands that are wrong or unlike. See `check_given`."""
        own: Any = self
        split: Split = own._split
        whole, why = [_whole(each, split) for each in given], ""
        if None in whole or whole[1] != whole[2] or whole[0][0] != whole[1][0]:  # type: ignore[index]
            texts = "; ".join(map(arguments.shown, given))
            why = f"hidden_states, top_k_index, top_k_weights are {texts}; they must be [T, D], [T, k] and [T, k]"
        elif given[1].is_floating_point() or not given[2].is_floating_point():
            why = f"top_k_index is {given[1].dtype} and top_k_weights {given[2].dtype}; take int64 and floats"
        x, *others = given
        free = split.inputs == split.outputs == Shard(0) and split.local and not is_split(x)
        beside = () if why else [(z.dtype, z.shape[free:], z.requires_grad) for z in others]
        check_given(own, self._layers()[0].in_features, split, x, *beside, why=why, any_rows=free)


def _whole(x: Any, split: Split) -> tuple[int, int] | None:
    """The sizes of a matrix of all ranks, if each has as many rows as this one; None for anything else."""
    if not isinstance(x, Tensor) or x.ndim != 2:
        return None
    many = split.mesh.size() if split.inputs == Shard(0) and not is_split(x) else 1
    return x.shape[0] * many, x.shape[1]


def _places(sizes: tuple[int, ...]) -> list[int]:
    """Where the tokens of each expert are counted, in rows of ranks that begin with the number of its tokens."""
    row = 1 + max(sizes)
    return [rank * row + 1 + at for rank, size in enumerate(sizes) for at in range(size)] + [len(sizes) * row]
