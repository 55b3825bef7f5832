"""Another pattern for a layer in training: stored blocks are pruned and grown, and optimizers keep their state."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional
from torch.optim import Optimizer

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import Facts, agreed
from sparsek.core.tracing import outside_inference, reads_values
from sparsek.nn.parameter import (
    PLAIN,
    begin_anew,
    check_state,
    followed,
    note_carried,
    note_learning,
    owners,
)
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.convert import SCOPES, Rule, Scope, picked
from sparsek.products.formats.padding import tiles_of, zero_outside
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.ops.linear import linear
from sparsek.products.reference.epilogue import ACTIVATIONS

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer] | None
# Of the whole weight, by layer, since `dense_gradients`.
_GRADIENTS: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
_RECORDING: weakref.WeakSet[Any] = weakref.WeakSet()
SPLIT = (
    "this layer is split over a mesh, and a rank has a part of its weight; take layer.gathered(), the layer of one "
    "process, or load sk.distributed.full_state_dict into its model, and apply the style to that afterwards"
)
ALIKE = "load the same state dict on every rank, or give all the same pattern"


class Regrown(nn.Module):
    """A layer whose pattern may change in training."""

    def set_pattern(self, pattern: BlockPattern | Tensor, optimizer: Optimizers = None) -> None:
        """Give the weight another pattern: blocks that stay keep their values, new ones are zeros.

        `values` stays the same Parameter, with another shape, and has no gradient afterwards. The state of optimizers
        for it, for example Adam's moments, is carried block by block: that of new blocks is zero, as at the first step,
        and counters of steps go on. A loss that was computed before refuses its backward pass. A pattern that is equal
        changes nothing. One sync, for the number of blocks. An error changes neither layer nor optimizers.

        In a process group give every rank the same pattern. DistributedDataParallel goes on where there are as many
        blocks as before, and an old loss is not refused then; else its next call raises InvalidInput until it is made
        anew. Under FSDP2 all ranks call this together, with a pattern of as many blocks as before; every rank raises
        InvalidInput where theirs differ.

        Args:
            pattern: A BlockPattern of the same shape and block, or a mask of blocks, bool [Mb, Kb], of what to store.
            optimizer: One optimizer or a list of several, whose state is carried. None: those with state for `values`
                that have made a step or loaded a state dict. With () none is carried; their next step then raises
                InvalidInput, until the state is removed.

        Raises:
            InvalidInput: For a pattern that does not fit, for state that has not one part for each block (LBFGS, states
                in 8 bits), for optimizers without `values`, for another number of blocks under FSDP2, for a layer that
                is split over a mesh, and on the meta device.

        Examples:
            >>> layer = sk.nn.BlockSparseLinear.random(64, 128, 16, 0.25)
            >>> layer.set_pattern(torch.ones(8, 4, dtype=torch.bool))
            >>> layer.weight.nnzb
            32
        """
        change(self, pattern, optimizer)

    def prune_(
        self,
        keep: float,
        by: Literal["magnitude"] = "magnitude",
        optimizer: Optimizers = None,
        *,
        scope: Scope = "row",
    ) -> Any:
        """Remove the stored blocks of smallest Frobenius norm, by `set_pattern`. Return this layer.

        Args:
            keep: The share of all blocks of the weight that stay stored, 0 to 1, as in `from_dense`. At least one,
                unless it is 0. Where no more are stored, they stay.
            by: "magnitude", the norm of a block.
            optimizer: As for `set_pattern`.
            scope: Where `keep` chooses: in each block row ("row"), or in the whole weight ("global"); see
                `BSR.from_dense`.

        Raises:
            InvalidInput: For arguments outside these ranges, and as `set_pattern`.
        """
        keep = arguments.number("keep", keep, 0, 1)
        arguments.one_of("by", by, ("magnitude",))
        arguments.one_of("scope", scope, SCOPES)
        values, pattern = ready(self)
        with torch.no_grad():
            best = picked(_norms(values, pattern), Rule(None, None, keep, scope))
            change(self, best & _mask(pattern), optimizer)
        return self

    def grow_(
        self,
        blocks: float,
        by: Literal["gradient", "random"] = "gradient",
        optimizer: Optimizers = None,
        *,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Store more blocks, which are zeros, by `set_pattern`. Return this layer.

        Args:
            blocks: How many: an int, or as a float their share of all blocks of the weight, 0.0 to 1.0. Where fewer are
                left, all of these.
            by: "gradient": the blocks whose gradient has the largest Frobenius norm, as in RigL (Evci et al. 2020,
                arXiv:1911.11134). `dense_gradients` records it in a forward and backward pass before, and this call
                drops it. "random": any.
            optimizer: As for `set_pattern`.
            generator: A torch.Generator on the device of the values, for "random"; torch's global one by default.
                The ranks of DistributedDataParallel, which all call this, store the blocks that rank 0 draws.

        Raises:
            InvalidInput: For arguments outside these ranges, for "gradient" without a recorded one, or with NaN or Inf
                in it, and as `set_pattern`.
        """
        arguments.one_of("by", by, ("gradient", "random"))
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InvalidInput(
                f"generator is {arguments.shown(generator)}; it must be a torch.Generator or None"
            )
        _, pattern = ready(self)
        cells = pattern.grid[0] * pattern.grid[1]
        if isinstance(blocks, float):
            count = round(arguments.number("blocks", blocks, 0, 1) * cells)
        else:
            count = arguments.integer("blocks", blocks)
        with torch.no_grad():
            stored, scores = _mask(pattern), _scores(self, pattern, by, generator)
            if not bool(_are_finite(scores)):
                raise InvalidInput(
                    "the recorded gradient has NaN or Inf, as that of a step that a GradScaler skips; record that of "
                    "another step"
                )
            change(self, _grown(scores, stored, min(count, cells - pattern.nnzb)), optimizer)
        _GRADIENTS.pop(self, None)
        return self


@contextmanager
def dense_gradients(model: nn.Module) -> Iterator[None]:
    """Record the gradients of all blocks of the weights of a model, stored or not, for `grow_`.

    They are those of the calls in this context, and add up over their backward passes, which may come later. Each takes
    the memory of a dense weight, in float32 for bf16 and fp16, until `grow_` or the next such context drops it.
    Compiled layers are not recorded. Every rank of a distributed run records its own, and `grow_` adds up those of the
    ranks of DistributedDataParallel or FSDP2.

    Args:
        model: A BlockSparseLinear, or a module with some.

    Raises:
        InvalidInput: For a model without a BlockSparseLinear.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {arguments.shown(model)}; it must be a torch.nn.Module")
    layers = [x for x in model.modules() if isinstance(x, Regrown)]
    if not layers:
        raise InvalidInput(
            f"{type(model).__name__} has no BlockSparseLinear whose gradients could be recorded"
        )
    for layer in layers:
        _refuse_split(layer)
        _GRADIENTS.pop(layer, None)
    layers = [x for x in layers if x not in _RECORDING]
    _RECORDING.update(layers)
    handles = [x.register_forward_hook(_before_gradient, with_kwargs=True) for x in layers]
    try:
        yield
    finally:
        _RECORDING.difference_update(layers)
        for handle in handles:
            handle.remove()


def is_recorded(layer: Any) -> bool:
    """Whether the gradient of all blocks of a layer is recorded."""
    return layer in _GRADIENTS


def _before_gradient(layer: Any, given: tuple[Any, ...], named: dict[str, Any], y: Any) -> None:
    """After a call of a layer: let the gradient of y record that of the whole weight."""
    record(layer, given[0] if given else named.get("x", named.get("input")), y)


def record(layer: Any, x: Any, y: Any, first: int = 0) -> None:
    """Let the gradient of y = x @ W.T record that of W, which are rows of the weight of a layer, from `first` on."""
    if layer not in _RECORDING or torch.compiler.is_compiling():
        return
    if isinstance(y, Tensor) and y.requires_grad:
        note_learning(layer)
        ref, x = weakref.ref(layer), x.detach()
        y.register_hook(lambda dy: _record(ref(), x, dy.detach(), first))


@torch.no_grad()
def _record(layer: Any, x: Tensor, dy: Tensor, first: int) -> None:
    """Add dz.T @ x, where dz is the gradient before the activation, to what is recorded."""
    if layer is None:
        return
    dz = dy
    if layer.activation is not None:
        values, bias = layer.values.detach(), layer.bias
        z = linear(x.to(values.dtype), BSR.unchecked(layer.pattern, values), bias)
        with torch.enable_grad():
            (dz,) = torch.autograd.grad(ACTIVATIONS[layer.activation](z.requires_grad_()), z, dy.to(z.dtype))
    dense = dz.reshape(-1, dz.shape[-1]).T @ x.reshape(-1, x.shape[-1]).to(dz.dtype)
    dense = dense.to(torch.promote_types(dense.dtype, torch.float32))
    known = _GRADIENTS.get(layer)
    if known is None and len(dense) < layer.out_features:
        known = dense.new_zeros(layer.out_features, layer.in_features)
    if known is not None:
        known[first : first + len(dense)] += dense
    _GRADIENTS[layer] = dense if known is None else known


def swap(
    layer: Any, count: int, new: int | None, by: str, optimizer: Optimizers, generator: torch.Generator | None
) -> None:
    """Store `count` blocks: those of largest norm, and `new` ones by `grow_`, which may be of those left out.

    `new` None: `count` of largest norm, and the `count` of largest gradients. Where gradients have NaN or Inf, those of
    largest norm alone.
    """
    values, pattern = ready(layer)
    with torch.no_grad():
        cells = pattern.grid[0] * pattern.grid[1]
        norms = _norms(values, pattern).view(1, -1)
        stored = _largest(norms, min(count, pattern.nnzb)).view(pattern.grid)
        if new != 0:
            scores = _scores(layer, pattern, by, generator)
            if new is None:
                grown = stored | _grown(scores, torch.zeros_like(stored), count)
            else:
                kept = min(count - new, pattern.nnzb)
                grown = _grown(scores, _largest(norms, kept).view(pattern.grid), min(new, cells - kept))
            stored = torch.where(_are_finite(scores), grown, stored)
        change(layer, stored, optimizer)
    _GRADIENTS.pop(layer, None)


def _norms(values: Tensor, pattern: BlockPattern) -> Tensor:
    """The Frobenius norms of the stored blocks, [Mb, Kb], and -1 for others. No sync."""
    blocks = zero_outside(pattern, unsharded(values))
    norms = BSR.unchecked(pattern, blocks).block_norms(dtype=torch.promote_types(values.dtype, torch.float32))
    grid = norms.new_full((pattern.grid[0] * pattern.grid[1],), -1)
    return grid.index_copy_(0, _cells(pattern), norms).view(pattern.grid)


def _scores(layer: Any, pattern: BlockPattern, by: str, generator: torch.Generator | None) -> Tensor:
    """What decides which blocks are stored next, the largest first: see `Regrown.grow_`. [Mb * Kb]. No sync.

    Under DistributedDataParallel and FSDP2 all ranks have those of rank 0, of the sum of their gradients.
    """
    ranks = ranks_of(layer)
    if by == "random":
        cells = pattern.grid[0] * pattern.grid[1]
        scores = torch.rand(cells, dtype=torch.float32, device=pattern.device, generator=generator)
    else:
        gradient = _GRADIENTS.get(layer)
        if gradient is None and ranks:  # the backward pass of this rank had no part of it
            kind = torch.promote_types(layer.values.dtype, torch.float32)
            gradient = torch.zeros(pattern.shape, dtype=kind, device=pattern.device)
        if gradient is None:
            raise InvalidInput(
                "no gradient of all blocks of this layer is recorded; compute a loss and its backward pass under "
                '`with sk.nn.dense_gradients(model):`, not compiled, or grow by="random"'
            )
        gradient = gradient.to(pattern.device)
        for group in ranks:
            dist.reduce(gradient, group=group, group_dst=0)
        scores = _block_norms(gradient, pattern)
    of_first(scores, ranks)
    return scores


def _are_finite(scores: Tensor) -> Tensor:
    """Whether scores are of finite gradients. No sync."""
    return scores.isfinite().all()


def _grown(scores: Tensor, stored: Tensor, count: int) -> Tensor:
    """A mask of the stored blocks and of the `count` others of largest scores. No sync."""
    free = scores.view(1, -1).masked_fill(stored.view(1, -1), -1)
    return _largest(free, count).view(stored.shape) | stored


def _block_norms(dense: Tensor, pattern: BlockPattern) -> Tensor:
    """The Frobenius norms of all blocks of a dense matrix, [Mb * Kb]."""
    return torch.linalg.vector_norm(tiles_of(dense, pattern.block), dim=(1, 3)).view(-1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Bool: the `count` largest of each row of scores, of equal ones the first. No sync."""
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)


def _cells(pattern: BlockPattern) -> Tensor:
    """The positions of the stored blocks in the grid, row by row, int64 [nnzb]. No sync."""
    return pattern.block_rows.long() * pattern.grid[1] + pattern.indices


def _mask(pattern: BlockPattern) -> Tensor:
    """The stored blocks as a mask, bool [Mb, Kb], which nobody writes to. No sync."""

    def made() -> Tensor:
        mask = torch.zeros(pattern.grid[0] * pattern.grid[1], dtype=torch.bool, device=pattern.device)
        return mask.index_fill_(0, _cells(pattern), True).view(pattern.grid)

    return pattern.derived("mask", made)


def ready(layer: Any) -> tuple[nn.Parameter, BlockPattern]:
    """The values and the pattern of a layer, if it can take another pattern."""
    values = layer._parameters.get("values")
    _refuse_split(layer)
    if values is None:
        raise InvalidInput(
            "values of this BlockSparseLinear are not its Parameter, as under torch.nn.utils.prune; make them plain "
            "first, for example by torch.nn.utils.prune.remove"
        )
    if type(values) in PLAIN and layer._history.shard is not None:
        raise InvalidInput(
            "values of this BlockSparseLinear are gathered by FSDP2; before the pattern changes call .reshard() of the "
            "module that fully_shard had"
        )
    if type(values) not in PLAIN and not is_sharded(values):
        raise InvalidInput(
            f"values of this BlockSparseLinear are sharded, a {type(values).__name__}, otherwise than by FSDP2; "
            "change the pattern of the plain model, and shard it afterwards"
        )
    if is_functorch_wrapped_tensor(values):
        raise InvalidInput("the pattern of a layer cannot change inside torch.func; change it outside")
    if values.is_meta:
        raise InvalidInput(
            "values of this BlockSparseLinear are on the meta device; call .to_empty(device=...) and load them first, "
            "or make the layer of the pattern that it is to have"
        )
    pattern: BlockPattern = layer.pattern
    if values.device != pattern.device or len(values) != pattern.nnzb:
        raise InvalidInput(
            f"values of this BlockSparseLinear are {len(values)} blocks on {values.device}, and its pattern has "
            f"{pattern.nnzb} on {pattern.device}; load or move the whole layer"
        )
    others = sum(x is not layer for x in owners(values))
    if others:
        raise InvalidInput(
            f"{others} other BlockSparseLinear share the values of this one and would keep the old pattern; give each "
            "layer its own values"
        )
    return values, pattern


def _refuse_split(layer: Any) -> None:
    """InvalidInput for a layer that is split over a mesh."""
    if hasattr(layer, "_split"):
        raise InvalidInput(SPLIT)


def is_sharded(x: Any) -> bool:
    """Whether it is a DTensor of blocks as FSDP2 makes it of values; the first of two dimensions replicates."""
    *first, last = getattr(x, "placements", (None,))
    return last is not None and last.is_shard(0) and all(each.is_replicate() for each in first)


def ranks_of(layer: Any) -> list[Any]:
    """The process groups of FSDP2's mesh, one for each dimension, or of the DistributedDataParallel; or none."""
    values = layer._parameters.get("values")
    if is_sharded(values):
        return [values.device_mesh.get_group(dim) for dim in range(values.device_mesh.ndim)]
    return [each for each in [layer._history.ranks()] if each is not None]


def of_first(x: Tensor, groups: list[Any]) -> None:
    """Make x that of the first rank."""
    for group in reversed(groups):
        dist.broadcast(x, group=group, group_src=0)


def unsharded(x: Tensor) -> Tensor:
    """All blocks, on every rank."""
    return x.detach().full_tensor() if is_sharded(x) else x.detach()  # type: ignore[attr-defined]


def sharded_like(blocks: Tensor, like: Any) -> Tensor:
    """Blocks, which every rank has, as those of another tensor lie."""
    if not is_sharded(like):
        return blocks
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(blocks, like.device_mesh, like.placements, src_data_rank=None)


class Move(NamedTuple):
    """From where the blocks of a new pattern come: int64 [nnzb] of the old ones, unless `new`, bool [nnzb]."""

    source: Tensor
    new: Tensor

    def __call__(self, blocks: Tensor, fresh: Any = 0) -> Tensor:
        """The blocks of the new pattern; `fresh` where there was none. No sync, if they are on the device of these."""
        if not len(blocks):
            return blocks.new_zeros((len(self.source), *blocks.shape[1:])).fill_(fresh)
        new = self.new.to(blocks.device).view(-1, *(1 for _ in blocks.shape[1:]))
        return blocks.index_select(0, self.source.to(blocks.device)).masked_fill_(new, fresh)


def _requested(given: Any, old: BlockPattern) -> tuple[BlockPattern, Move] | None:
    """The new pattern on the device of the old one, and what moves; None if it is equal. One sync."""
    before = _mask(old)
    if isinstance(given, BlockPattern):
        if (given.shape, given.block) != (old.shape, old.block):
            raise InvalidInput(
                f"pattern is {given.shape[0]}x{given.shape[1]} in blocks of {given.block[0]}x{given.block[1]}; this "
                f"layer has {old.shape[0]}x{old.shape[1]} in blocks of {old.block[0]}x{old.block[1]}"
            )
        pattern = given.to(old.device)
        if pattern is old or (pattern.nnzb == old.nnzb and torch.equal(_mask(pattern), before)):
            return None
        cells = _cells(pattern)
    else:
        mask = arguments.tensor("pattern", given, (torch.bool,), ndim=2)
        if tuple(mask.shape) != old.grid:
            raise InvalidInput(
                f"pattern has shape {tuple(mask.shape)}; a mask of the blocks of this layer is bool {old.grid}"
            )
        mask = mask.detach().to(old.device)
        count, differs = torch.stack((mask.sum(), (mask != before).sum())).tolist()
        if not differs:
            return None
        ends = mask.reshape(-1).cumsum(0)
        cells = torch.searchsorted(ends, torch.arange(1, count + 1, device=old.device))
        indptr = functional.pad(ends.view(old.grid)[:, -1], (1, 0)).int()
        pattern = BlockPattern.unchecked(old.shape, old.block, indptr, cells.remainder(old.grid[1]).int())
        pattern.derived("mask", mask.clone)
    flat = before.view(-1)
    source = flat.cumsum(0).sub_(1).clamp_(min=0).index_select(0, cells)
    return pattern, Move(source, flat.logical_not().index_select(0, cells))


@torch._disable_dynamo
@outside_inference
@torch.no_grad()
@reads_values("set_pattern reads patterns", "call it outside")
def change(layer: Any, given: Any, optimizer: Optimizers) -> None:
    """Give a layer another pattern: see `Regrown.set_pattern`. What can fail comes first."""
    asked: Any = ()

    def check() -> Facts:
        nonlocal asked
        asked = _asked(layer, given, optimizer)
        return {"the pattern": _facts(*asked)}

    if is_sharded(layer._parameters.get("values")):
        agreed("set_pattern", ranks_of(layer), check, ALIKE)
    else:
        asked = _asked(layer, given, optimizer)
    values, _, found, optimizers = asked
    if found is None:
        return
    pattern, move = found
    states = [(x.state[values], _carried(x, values, move)) for x in optimizers if _has_state(x, values)]
    blocks = sharded_like(zero_outside(pattern, move(unsharded(values))), values)
    buffers = pattern.indptr.clone(), pattern.indices.clone()
    for state, parts in states:
        state.update(parts)
    begin_anew(values, pattern, blocks)
    layer.indptr, layer.indices = buffers
    note_carried(layer, values, pattern, optimizers)
    if is_sharded(values):  # the gathered ones of before had the old pattern
        layer._history.patterns = {id(values): pattern}
    layer._see(*buffers, pattern)


def _asked(
    layer: Any, given: Any, optimizer: Optimizers
) -> tuple[nn.Parameter, BlockPattern, tuple[BlockPattern, Move] | None, list[Optimizer]]:
    """The values and the pattern of a layer, the new pattern with what moves, and the optimizers to follow it."""
    values, old = ready(layer)
    optimizers = _named(optimizer, values)
    found = _requested(given, old)
    if found is not None and is_sharded(values) and found[0].nnzb != old.nnzb:
        raise InvalidInput(
            f"FSDP2 keeps room for the {old.nnzb} blocks that were sharded, and the new pattern has {found[0].nnzb}; "
            "give one of as many blocks, or load sk.distributed.full_state_dict into a model of one process, change "
            "its pattern, and shard that"
        )
    return values, old, found, followed(values) if optimizers is None else optimizers


def _facts(
    values: nn.Parameter,
    old: BlockPattern,
    found: tuple[BlockPattern, Move] | None,
    optimizers: list[Optimizer],
) -> tuple[str, str]:
    """What must be equal on the ranks that change a pattern, also the parts of states, which are gathered."""
    pattern = old if found is None else found[0]
    host = [each.tobytes() for each in (*old.host, *pattern.host)]
    carried = [x for x in optimizers if found is not None and _has_state(x, values)]
    names = [
        f"{type(x).__name__} {[*x.state[values]] if x in carried else 'without state'}" for x in optimizers
    ]
    return sha256(b"".join([*host, repr(names).encode()])).hexdigest(), f"{pattern.nnzb} blocks, {names}"


def _named(optimizer: Any, values: nn.Parameter) -> list[Optimizer] | None:
    """The given optimizers that have `values`; None for None."""
    if optimizer is None:
        return None
    given = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        if not isinstance(each, Optimizer):
            raise InvalidInput(
                f"optimizer is {arguments.shown(each)}; it must be a torch.optim.Optimizer, a list of several, or None"
            )
    having = [x for x in given if any(p is values for group in x.param_groups for p in group["params"])]
    if given and not having:
        raise InvalidInput(
            f"{' and '.join(type(x).__name__ for x in given)} has no values of this layer; give the optimizer that has "
            "them, or () if none has"
        )
    return having


def _has_state(optimizer: Optimizer, values: nn.Parameter) -> bool:
    """Whether an optimizer has state for `values`, which is checked to be of their blocks."""
    check_state(optimizer, values)
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise _refusal(optimizer, "its history, which is of all its Parameters together")
    return bool(optimizer.state.get(values))


def _carried(optimizer: Optimizer, values: nn.Parameter, move: Move) -> dict[Any, Tensor]:
    """The parts of a state with one entry for each block, for the blocks of a new pattern."""
    (count, *sides), made = values.shape, {}
    rests = {(a, b) for a in (1, sides[0]) for b in (1, sides[1])} | {(sides[0],), (sides[1],), ()}
    for name, part in optimizer.state[values].items():
        if not isinstance(part, Tensor):
            if part is not None and not isinstance(part, (bool, int, float, str)):
                raise _refusal(optimizer, f"{name!r}, a {type(part).__name__}")
        elif part.ndim:  # else a counter
            given, part = part, unsharded(part)
            plain = type(part) in PLAIN and part.layout == torch.strided and part.is_floating_point()
            if not plain or part.shape[0] != count or tuple(part.shape[1:]) not in rests:
                kind = str(part.dtype) if type(part) in PLAIN else f"{type(part).__name__} {part.dtype}"
                raise _refusal(optimizer, f"{name!r}, {kind} {list(part.shape)}")
            made[name] = sharded_like(move(part, _fresh(optimizer, values, name)), given)
    return made


def _fresh(optimizer: Optimizer, values: nn.Parameter, name: str) -> Any:
    """What a part of a state begins with: 0, but for two optimizers."""
    group = next(x for x in optimizer.param_groups if any(p is values for p in x["params"]))
    if isinstance(optimizer, torch.optim.Adagrad) and name == "sum":
        return group.get("initial_accumulator_value", 0)
    return group["lr"] if isinstance(optimizer, torch.optim.Rprop) and name == "step_size" else 0


def _refusal(optimizer: Optimizer, part: str) -> InvalidInput:
    return InvalidInput(
        f"the state of {type(optimizer).__name__} cannot be carried to another pattern: {part}, is not one float part "
        "for each block; give optimizer=() to leave it behind, and make a new optimizer"
    )
