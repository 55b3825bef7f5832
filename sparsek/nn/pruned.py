"""The elements of a 2:4 weight that are not stored: how they learn, and how others are chosen to be stored.

SR-STE: Zhou et al. 2021, arXiv:2102.04010.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import agreed
from sparsek.core.tracing import saveable
from sparsek.engine.call import transforms
from sparsek.nn.forms import weight_and_bias
from sparsek.nn.regrow import is_sharded, of_first, ranks_of, sharded_like, unsharded
from sparsek.products.formats import two_four
from sparsek.products.formats.padding import tiles_of
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.gradients import dense_product
from sparsek.products.plan.spmm import tokens


class StraightThrough(torch.autograd.Function):
    """z = x @ W.T + bias, given, with the gradients of the stored and of the pruned elements of W.

    The dense gradient is computed once. x and the bias get their gradients through z.
    """

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, x: Tensor, values: Tensor, pruned: Tensor, weight: Any, decay: float
    ) -> Tensor:
        ctx.save_for_backward(x, pruned, weight.meta)
        ctx.weight, ctx.decay = weight, decay
        return z.detach()  # not a view, which nobody may change in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (dz,) = grads
        x, pruned, meta = ctx.saved_tensors
        left, right = tokens(dz).mT, tokens(x).to(dz.dtype)
        if isinstance(ctx.weight, Semi24):
            dense = dense_product(left, right)
        else:
            pattern = ctx.weight.pattern
            sizes = [*pattern.shape, *pattern.block]
            dense = transforms.call("sddmm", left, right, pattern.indptr, pattern.indices, sizes, None)
        both = meta, two_four.complement(meta)
        of_values, of_pruned = (two_four.stored(dense, each).to(pruned.dtype) for each in both)
        return dz, None, of_values, of_pruned + ctx.decay * pruned, None, None


def keep_pruned(layer: Any, dense: Any, decay: float) -> None:
    """Make the elements that are not stored the Parameter `pruned`: see `SparseLinear.keep_pruned`."""
    weight = _two_four(layer, "keep_pruned")
    pruned = torch.zeros_like(weight.values)
    if dense is not None:
        whole, _ = weight_and_bias(dense)
        if whole.is_meta and not pruned.is_meta:
            raise InvalidInput(
                f"dense is on meta and the layer on {pruned.device}; load the dense weight first"
            )
        pruned = two_four.stored(_cells(layer, whole), two_four.complement(weight.meta)).to(pruned)
    layer._decay = arguments.number("decay", decay, 0)
    layer.pruned = nn.Parameter(saveable(pruned.detach()))


def choose_again(layer: Any, scores: Tensor | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Choose what is stored anew: see `SparseLinear.choose_again`."""
    transforms.refuse("choose_again")
    ranks = ranks_of(layer)
    parts: dict[str, list[Tensor | None]] = {}
    cells: Tensor | None = None

    def check() -> str:
        nonlocal cells
        parts.update(_movable(layer, optimizer))
        if scores is not None:
            cells = _cells(layer, arguments.tensor("scores", scores, dtypes.FLOATS))
        return f"{[*parts]}, {'no ' * (scores is None)}scores"

    if is_sharded(layer._parameters.get("values")):
        agreed("choose_again", ranks, check, "give all scores or none, and optimizers with the same state")
    else:
        check()
    old = layer.metadata.clone()
    kept, pruned = parts["values"]
    wanted, mask = (_elements(kept, pruned, old), None) if cells is None else (cells, _best_two(cells))
    new = two_four.pack(wanted, mask)[1].to(old.device)
    of_first(new, ranks)
    for kept, pruned in parts.values():
        every = _elements(kept, pruned, old)
        for part, meta in ((kept, new), (pruned, two_four.complement(new))):
            if part is not None:
                part.copy_(sharded_like(two_four.stored(every, meta), part))
    layer.metadata.copy_(new)


def _movable(layer: Any, optimizer: Any) -> dict[str, list[Tensor | None]]:
    """What moves with the elements, by names: the parts of `values` and of `pruned`, one of them at least."""
    _two_four(layer, "choose_again")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput(
            f"optimizer is {arguments.shown(optimizer)}; it must be a torch.optim.Optimizer or None"
        )
    learned = [layer.values, layer._parameters.get("pruned")]
    groups = [] if optimizer is None else optimizer.param_groups
    if groups and not any(x is each for group in groups for x in group["params"] for each in learned):
        raise InvalidInput(
            f"{type(optimizer).__name__} has no values of this layer; give the optimizer that has them, and under "
            "FSDP2 call .reshard() of the module first"
        )
    states = [{} if optimizer is None or x is None else optimizer.state.get(x, {}) for x in learned]
    found: dict[str, list[Any]] = {
        "values": learned,
        "gradients": [None if x is None else x.grad for x in learned],
    }
    found |= {f"of {name}": [x.get(name) for x in states] for name in {**states[0], **states[1]}}
    fits = {
        name: [x if isinstance(x, Tensor) and x.shape == layer.values.shape else None for x in both]
        for name, both in found.items()
    }
    return {name: both for name, both in fits.items() if any(x is not None for x in both)}


def _two_four(layer: Any, what: str) -> Any:
    if layer._scaled or layer._kind == "bsr":
        raise InvalidInput(f"{what} is for a 2:4 weight whose values learn, not for a BSR and not in FP8")
    values = layer._parameters.get("values")
    if hasattr(values, "device_mesh") and (what == "keep_pruned" or not is_sharded(values)):
        raise InvalidInput(
            f"{what}: values of this layer are sharded; call keep_pruned before fully_shard, and choose_again under "
            "no other sharding than that of FSDP2"
        )
    return layer.weight.detach()


def _cells(layer: Any, dense: Any) -> Tensor:
    """The elements of a dense [out_features, in_features] in the rows of four of the weight."""
    shape = layer.out_features, layer.in_features
    if not isinstance(dense, Tensor) or tuple(dense.shape) != shape:
        raise InvalidInput(f"it is {arguments.shown(dense)}; it must be dense [{shape[0]}, {shape[1]}]")
    pattern = layer.pattern
    if pattern is None:
        return dense
    tiles = tiles_of(dense, pattern.block).transpose(1, 2)
    return tiles[pattern.block_rows.long(), pattern.indices.long()]


def _best_two(scores: Tensor) -> Tensor:
    """The mask of the two largest of every four neighbours; of equal ones, and of NaN, the lower columns. No sync."""
    by_group = two_four.groups(scores)
    best = by_group.argsort(dim=-1, descending=True, stable=True)[..., :2]
    return torch.zeros_like(by_group, dtype=torch.bool).scatter(-1, best, True).flatten(-2)


def _elements(kept: Tensor | None, pruned: Tensor | None, meta: Tensor) -> Tensor:
    """All elements in rows of four, of those that `meta` stores and of the others; 0 for absent ones."""
    both = (kept, meta), (pruned, two_four.complement(meta))
    return functools.reduce(torch.add, [two_four.unpack(unsharded(x), of) for x, of in both if x is not None])
