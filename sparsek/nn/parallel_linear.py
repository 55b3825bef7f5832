"""A SparseLinear that is split over a mesh: its part of this rank, and how x and y go between ranks.

A split layer keeps its names, its sizes and its pattern, which are of the whole weight on every rank. Its values, FP8
codes, metadata and biases become DTensors, whose shard is what the rank multiplies: the block rows or the block columns
of the rank. Shards of unlike sizes are padded to the largest with zeros, which no product reads, because a DTensor has
shards of one size. Shards of blocks [n, bm, bk] lie beside each other, [n, ranks * bm, bk]: no layer of one process has
tensors of this shape, so no loader takes one for the other. The buffer `parts` has the sizes [ranks, 2] of the
ranks' parts, for those who load a state dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import failed, refuse_transforms
from sparsek.nn.agreement import check_calls
from sparsek.nn.gated import Fitted, fitted_class
from sparsek.nn.indices import unguarded
from sparsek.nn.regrow import SPLIT
from sparsek.nn.sparse import SparseLinear
from sparsek.nn.sums import added, copied, copied_products, learn_beside
from sparsek.products.formats.algebra import cut_rows
from sparsek.products.formats.pattern import BlockPattern, HostPattern
from sparsek.products.ops.linear import linear
from sparsek.products.ops.spmm import finished

Side: TypeAlias = Literal["rows", "columns"]
PARTS = "parts"  # a buffer
SUMMING = ("_FromTorchTensorBackward", "RedistributeBackward")  # add up gradients over the ranks


@dataclass(frozen=True)
class Split:
    """How the weight of a layer lies on a mesh.

    Attributes:
        mesh: One dimension.
        side: Whether ranks have rows or columns of the weight.
        sizes: How many features each rank has of them.
        inputs: The layout of a plain x; None for x that the layer takes as it is, in the middle of an MLP.
        outputs: The layout of y; None for y as the product gives it.
        local: Whether y is a plain tensor.
    """

    mesh: DeviceMesh
    side: Side
    sizes: tuple[int, ...]
    inputs: Placement | None
    outputs: Placement | None
    local: bool

    def __deepcopy__(self, memo: Any) -> Split:
        return self  # process groups have no copies

    def __reduce__(self) -> Any:
        return Split, tuple(getattr(self, each.name) for each in fields(self))  # without the group

    @cached_property
    def rank(self) -> int:
        """The place of this process in the mesh."""
        return self.mesh.get_local_rank()

    @cached_property
    def group(self) -> Any:
        """The process group, which a mesh finds by its name."""
        return self.mesh.get_group()

    @property
    def is_even(self) -> bool:
        """Whether the shards are those of torch's `Shard`."""
        return len(set(self.sizes)) == 1

    def parts(self, layer: Any) -> list[list[int]]:
        """The sizes of the parts of all ranks."""
        rows = self.side == "rows"
        return [[each, layer.in_features] if rows else [layer.out_features, each] for each in self.sizes]

    def bounds(self, rank: int) -> tuple[int, int]:
        """The first feature of a rank, and the one after its last."""
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]


class ParallelLinear(Fitted):
    """A SparseLinear that is split over a mesh. `weight` is the part of this rank."""

    _split: Split

    @property
    def weight(self) -> Any:
        """The rows or columns of the weight that this rank multiplies, differentiable."""
        own: Any = self
        split, pattern, parts = own._split, own.pattern, own._buffers[PARTS]
        self._derived("parts", parts, lambda: _check_parts(own, parts))
        part = None if pattern is None else _part(pattern, split, split.rank)
        values = self._mine(own._stored, own._parameters.get("values"), part)
        local = None if part is None else part[0]
        scale = own._buffers.get("scale")
        if scale is not None:
            scale = self._derived("scale", scale, lambda: _scale_part(own, scale, part))
        return own._matrix(local, values, scale, self._mine("metadata", None, None))

    def _mine(self, name: str, learns: Any, part: Any) -> Any:
        """The tensor of this rank, without what pads it. `part`: that of the pattern, whose blocks it has."""
        own: Any = self
        whole: Any = own._buffers.get(name) if learns is None else learns
        if whole is None:
            return None
        if part is None:
            dim, _, counts = _shares(own, name)
            count = counts[own._split.rank]
        else:
            dim, count = 0, part[0].nnzb
        if learns is not None:
            local = whole.to_local()
            return local if local.shape[dim] == count else local.narrow(dim, 0, count).contiguous()
        # The same in every call, because a 2:4 weight has its plans by its metadata.
        local = whole._local_tensor
        if local.shape[dim] == count:
            return local
        return self._derived(name, local, lambda: local.narrow(dim, 0, count).contiguous())

    def _derived(self, name: str, of: Tensor, make: Any) -> Tensor:
        """A tensor derived from a buffer, until that is another or was written to: not counted in inference mode."""
        if of.is_inference():
            return make()
        kept: dict[str, Any] = self.__dict__.setdefault("_kept", {})
        found = kept.get(name)
        if found is None or found[0] is not of or found[1] != of._version:
            found = kept[name] = of, of._version, make()
        return found[2]

    @torch._disable_dynamo  # DTensors of several ranks, between two graphs
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Return y in the layout of the style.

        Args:
            x: [..., in_features], of the input layout, or a DTensor of any.
            residual: [..., out_features], of the output layout, added after the activation.
        """
        own: Any = self
        split: Split = own._split
        act, bias = own.activation, own._parameters.get("bias")
        if split.inputs is not None:
            kind = "no" if residual is None else "a DTensor as" if is_split(residual) else "a"
            other = kind == "a DTensor as" and residual.device_mesh != split.mesh  # type: ignore[union-attr]
            why = "residual is a DTensor of another mesh than the layer" if other else ""
            check_given(own, own.in_features, split, x, f"{kind} residual", why=why)
        if split.side == "rows":
            weight = self.weight
            bias = None if bias is None else bias.to_local()[: split.sizes[split.rank]]
            stays = split.outputs is None or is_last(split.outputs, x.ndim)
            fused = residual if stays and not isinstance(residual, DTensor) else None
            plain = bias is None and not act and fused is None
            if plain and is_copied(x, split) and learn_beside(x, weight):
                (y,) = copied_products(x, [weight], split.group)
            else:
                y = linear(x if split.inputs is None else everywhere(x, split), weight, bias, act, fused)
            if split.outputs is None:
                return y
            sizes = (*y.shape[:-1], own.out_features)
            y = y if stays else _spread_output(y, split)
            return _finished(y, split, "", residual if fused is None else None, sizes)
        x = x if split.inputs is None else _own_columns(x, split)
        y = linear(x, self.weight)
        assert split.outputs is not None
        sizes = (*y.shape,)
        y = summed(y, split, local=True)
        if bias is not None:
            y = y + _replicated(bias, split, y)
        return _finished(y, split, act or "", residual, sizes)

    def gathered(self) -> Any:
        """Return the SparseLinear of one process, with the tensors of all ranks. Every rank must call this."""
        own: Any = self
        tensors = {**own._parameters, **own._buffers}
        with torch.no_grad():
            parts = {x: whole_of(own, x, full(each)) for x, each in tensors.items() if is_split(each)}
            scale = own._buffers.get("scale")
            values = parts[own._stored]
            weight = own._matrix(own.pattern, values, scale, parts.get("metadata"))
            bias = parts.get("bias")
        made = SparseLinear.from_matrix(weight, bias, activation=own.activation)
        made._dtype = own._dtype
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(own._parameters[name].requires_grad)
        return made.train(own.training)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InvalidInput(SPLIT)

    to_dense = to_linear = keep_pruned = choose_again = reset_parameters = _refuse

    def extra_repr(self) -> str:
        """Return what the layer without a mesh does, and how it is split."""
        split = self._split
        return f"{super().extra_repr()}, {split.side} of {list(split.sizes)} over {split.mesh.size()} ranks"  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Load the tensors of this layer, split alike, or those of one process, of the same pattern."""
        own: Any = self
        made = dict(unguarded(state_dict, prefix))
        try:
            parts = made.get(prefix + PARTS)
            if parts is None:
                made[prefix + PARTS] = _parts_of(own, "cpu")
            else:
                _check_parts(own, parts)
            for name, now in {**own._parameters, **own._buffers}.items():
                given = made.get(prefix + name)
                if isinstance(given, Tensor) and now is not None:
                    made[prefix + name] = _loadable(own, name, now, given, parts is None)
        except InvalidInput as error:
            rest[-1].append(f"{prefix or type(self).__name__}: {error}")  # its messages of errors
            return
        nn.Module._load_from_state_dict(own, made, prefix, *rest)


def is_split(x: Any) -> bool:
    return isinstance(x, DTensor)


def _parts_of(layer: Any, device: Any) -> Tensor:
    return torch.tensor(layer._split.parts(layer), dtype=torch.int64, device=device)


def _check_parts(layer: Any, parts: Tensor) -> Tensor:
    """InvalidInput if tensors of a state dict, with these parts, are not split as this layer is."""
    expected = layer._split.parts(layer)
    if not parts.is_meta and parts.tolist() != expected:
        raise InvalidInput(
            f"the tensors are of a layer whose ranks have parts of {parts.tolist()}, and this one has {expected}; "
            "split it alike, or load those of layer.gathered(), which any layer takes"
        )
    return parts


def _loadable(layer: Any, name: str, now: Any, given: Tensor, whole: bool) -> Tensor:
    """A tensor of a state dict, of one process if `whole`, as this layer has it."""
    if name in ("indptr", "indices"):
        if not np.array_equal(given.numpy(force=True), getattr(layer.pattern.host, name)):
            raise InvalidInput(
                f"{name} of the state dict are of another pattern; load it into the layer before it is split"
            )
        return given
    if not is_split(now):
        return given
    if not whole:
        _check_sizes(name, given, [*now.shape])
        if is_split(given):
            return given
        if now.placements[-1].is_replicate():
            return _sharded(layer, given.detach(), Replicate())
        _, along, counts = _shares(layer, name)
        return _sharded(layer, given.detach().chunk(len(counts), along)[layer._split.rank], Shard(along))
    if is_split(given):
        raise InvalidInput(f"{name} are sharded, and of no split layer; load {name}.full_tensor()")
    return shard_like(layer, name, given, now)


def _check_sizes(name: str, given: Tensor, sizes: list[int]) -> None:
    if [*given.shape] != sizes:
        raise InvalidInput(f"{name} are {list(given.shape)}; this layer takes {sizes}")


def shard_like(layer: Any, name: str, whole: Tensor, like: Any) -> Any:
    """The DTensor of a tensor of one process, in the layout of `like`, which FSDP2 may have sharded too."""
    dim, along, counts = _shares(layer, name)
    sizes = [*like.shape]
    if along != dim:
        sizes[along] //= len(counts)
    sizes[dim] = sum(counts)
    _check_sizes(name, whole, sizes)
    made, mesh = _distributed(layer, name, whole.detach()), like.device_mesh
    if mesh.ndim == 1:
        return made
    if mesh.ndim > 2:
        raise InvalidInput(f"{name} lie on {mesh}; there may be one dimension beside that of the split")
    parts, rank = made.to_local().chunk(mesh.size(0)), mesh.get_local_rank(0)
    own = parts[rank] if rank < len(parts) else parts[0][:0]
    return wrapped(own.contiguous(), mesh, like.placements, like.shape)


@torch.no_grad()
def split_layer(layer: Any, split: Split, source: int | None) -> None:
    tensors = {x: y for x, y in (*layer._parameters.items(), *layer._buffers.items()) if y is not None}
    if source is not None:
        for name, each in tensors.items():
            if name not in ("indptr", "indices") and not each.is_meta:
                raw = each.detach()
                raw = raw.view(torch.uint8) if raw.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else raw
                dist.broadcast(raw, group=split.mesh.get_group(), group_src=source)
    learns = {name: each.requires_grad for name, each in layer._parameters.items() if each is not None}
    layer.__class__ = fitted_class(ParallelLinear, type(layer))
    layer.__dict__.update(_split=split, _calls=set())
    for name, each in tensors.items():
        if name in ("indptr", "indices", "scale"):
            continue
        made = _distributed(layer, name, each.detach())
        if name in learns:
            layer._parameters[name] = nn.Parameter(made, learns[name])
        else:
            layer._buffers[name] = made
    layer.register_buffer(PARTS, _parts_of(layer, tensors[layer._stored].device))
    _ = layer.pattern  # notes the new Parameter


def _part(pattern: BlockPattern, split: Split, rank: int) -> tuple[BlockPattern, Tensor]:
    """The pattern of a rank, and which blocks of the whole they are, int64 on its device."""
    start, stop = split.bounds(rank)

    def rows() -> tuple[BlockPattern, Tensor]:
        bm = pattern.block[0]
        first, last = start // bm, -(-stop // bm)
        made = cut_rows(pattern, first, last)
        at = pattern.host.indptr
        return made, torch.arange(int(at[first]), int(at[last]), device=pattern.device)

    def columns() -> tuple[BlockPattern, Tensor]:
        bk, (indptr, indices) = pattern.block[1], pattern.host
        inside = (indices >= start // bk) & (indices < -(-stop // bk))
        ends = np.concatenate(([0], np.cumsum(inside)))[indptr].astype(np.int32)
        own = HostPattern(ends, (indices[inside] - start // bk).astype(np.int32))
        made = BlockPattern.from_host((pattern.shape[0], stop - start), pattern.block, own, pattern.device)
        return made, torch.from_numpy(np.flatnonzero(inside)).to(pattern.device)

    return pattern.derived((split.side, start, stop), rows if split.side == "rows" else columns)


def _shares(layer: Any, name: str) -> tuple[int, int, list[int]]:
    """The dim in which ranks have shares of a tensor, that in which their shards are joined, and how much each has."""
    split: Split = layer._split
    if name == "bias":
        replicated = split.side == "columns"
        return 0, 0, [layer.out_features] if replicated else list(split.sizes)
    if layer._block is None:
        per = {"rows": 1, "columns": 8 if name == "metadata" else 2}[split.side]
        dim = int(split.side == "columns")
        return dim, dim, [each // per for each in split.sizes]
    return 0, 1, [_part(layer.pattern, split, rank)[0].nnzb for rank in range(len(split.sizes))]


def _distributed(layer: Any, name: str, whole: Tensor) -> Any:
    """The DTensor of a tensor of one process, which has it whole on each rank."""
    split: Split = layer._split
    if name == "bias" and split.side == "columns":
        return _sharded(layer, whole, Replicate())
    dim, along, counts = _shares(layer, name)
    if along != dim:
        part = _taken(whole, _part(layer.pattern, split, split.rank)[1].to(whole.device))
    else:
        part = whole.narrow(dim, sum(counts[: split.rank]), counts[split.rank])
    sizes = [*part.shape]
    sizes[dim] = max(counts)
    local = torch.zeros(sizes, dtype=part.dtype, device=part.device)
    local.narrow(dim, 0, part.shape[dim]).copy_(part)
    return DTensor.from_local(local, split.mesh, [Shard(along)], run_check=False)


def _sharded(layer: Any, local: Tensor, layout: Placement) -> Any:
    """A DTensor of the shard of this rank, in memory of its own."""
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format), layer._split.mesh, [layout], run_check=False
    )


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of x, in FP8 too."""
    raw = x.view(torch.uint8) if x.element_size() == 1 else x
    return raw.index_select(0, rows).view(x.dtype)


def full(x: Any) -> Tensor:
    """The whole of a DTensor, in FP8 too, which gloo does not know."""
    if x.element_size() > 1:
        return x.full_tensor()
    raw = wrapped(x._local_tensor.view(torch.uint8), x.device_mesh, x.placements, x.shape)
    return raw.full_tensor().view(x.dtype)


def whole_of(layer: Any, name: str, whole: Tensor) -> Tensor:
    """The tensor of one process, of the shards of all ranks beside each other."""
    split: Split = layer._split
    held = layer._buffers.get(name) if name in layer._buffers else layer._parameters[name]
    _check_sizes(name, whole, [*held.shape])
    if name == "bias" and split.side == "columns":
        return whole.clone()
    dim, along, counts = _shares(layer, name)
    shards = whole.chunk(len(counts), along)
    joined = torch.cat(
        [each.narrow(dim, 0, count) for each, count in zip(shards, counts, strict=True)], dim
    ).contiguous()
    if along == dim:
        return joined
    order = torch.cat([_part(layer.pattern, split, at)[1] for at in range(len(counts))])
    return _taken(joined, order.argsort().to(whole.device))


def _scale_part(layer: Any, scale: Tensor, part: Any) -> Tensor:
    """The scales of what a rank has."""
    split: Split = layer._split
    if layer._scaled == "block":
        return scale.index_select(0, part[1])
    if layer._scaled == "row" and split.side == "rows":
        start, stop = split.bounds(split.rank)
        return scale[start:stop].clone()
    return scale


def is_last(layout: Placement | None, ndim: int | None) -> bool:
    """Whether a layout splits the features."""
    return isinstance(layout, Shard) and (layout.dim == -1 or (ndim is not None and layout.dim == ndim - 1))


@torch._disable_dynamo
def check_given(
    module: Any, features: int, split: Split, x: Any, *beside: Any, why: str = "", any_rows: bool = False
) -> None:
    """InvalidInput for an x that a split module does not take, on every rank of a mesh where calls are compared.

    Args:
        module: The module, whose `_calls` are the facts of former ones; see `check_calls`.
        features: Those of the whole x.
        split: How x and y lie.
        x: What this rank is called with.
        *beside: Other facts of the call, which must be equal on all ranks.
        why: What else is wrong on this rank, or "".
        any_rows: Whether ranks may have unlike numbers of rows of x.
    """
    if getattr(x, "is_meta", False):
        return
    why, known = _why_not_given(x, split, features) or why, ()
    if isinstance(x, Tensor):
        sizes: list[Any] = [*x.shape]
        if any_rows:
            sizes[:1] = ["any"]
        if not is_split(x) and is_last(split.inputs, x.ndim):
            sizes[-1:] = [features]
        learns = "learns" if x.requires_grad else "fixed"
        known = ((*sizes,), x.dtype, learns, *getattr(x, "placements", ()))
    check_calls(module._calls, split.mesh, type(module).__name__, (*known, *beside), why)


def _why_not_given(x: Any, split: Split, features: int) -> str:
    try:
        refuse_transforms("a module that is split over a mesh")
        if not is_split(x):
            arguments.dense("x", x)
    except InvalidInput as error:
        return str(error)
    if is_split(x) and x.device_mesh != split.mesh:
        return f"x is a DTensor of {x.device_mesh}, and the layer is split over {split.mesh}"
    for layout in () if is_split(x) else (split.inputs, split.outputs):
        if isinstance(layout, Shard) and not -x.ndim <= layout.dim < x.ndim:
            return f"x has {x.ndim} dims, and a layout of the style is {layout}"
    ranks, last = split.mesh.size(), not is_split(x) and is_last(split.inputs, x.ndim)
    wanted = (
        features if not last else split.sizes[split.rank] if split.side == "columns" else features // ranks
    )
    if x.ndim and x.shape[-1] == wanted and (not last or split.side == "columns" or features % ranks == 0):
        return ""
    return (
        f"x is {list(x.shape)} on rank {split.rank} of the mesh, where the layer takes {wanted} features; see the "
        "input layout of its style"
    )


def laid_out(x: Any, split: Split) -> Any:
    """x as a DTensor of the mesh, without parts to be added up."""
    if not is_split(x):
        assert split.inputs is not None
        return DTensor.from_local(x, split.mesh, [split.inputs], run_check=False)
    return moved(x, Replicate()) if x.placements[0].is_partial() else x


def moved(x: Any, layout: Placement | None) -> Any:
    """A DTensor in another layout. MeshError if the collective fails."""
    try:
        return x.redistribute(placements=[layout])
    except RuntimeError as error:
        if type(error) is not RuntimeError and not isinstance(error, dist.DistError):  # such as one of memory
            raise
        what = f"the exchange of {[*x.shape]}, {x.placements[0]} to {layout},"
        raise failed(what, x.device_mesh.get_group(), error) from error


def is_copied(x: Any, split: Split) -> bool:
    """Whether x is a plain tensor that every rank has."""
    return not is_split(x) and split.inputs == Replicate()


def everywhere(x: Any, split: Split) -> Tensor:
    """The whole x. Each rank has a part of its gradients."""
    if is_copied(x, split):  # without the host's time of DTensors
        return copied(x, split.group)
    x = laid_out(x, split)
    # What made x adds up the gradients of all layers that read it; other tensors have no gradients in parts.
    if type(x.grad_fn).__name__ not in SUMMING or not x.placements[0].is_replicate():
        x = moved(x, Replicate())
    return x.to_local(grad_placements=[Partial()])


def _own_columns(x: Any, split: Split) -> Tensor:
    """The features of x that this rank has columns for."""
    assert split.inputs is not None
    if not is_split(x) and is_last(split.inputs, x.ndim):
        return x
    x = laid_out(x, split)
    if split.is_even:
        return moved(x, Shard(x.ndim - 1)).to_local()
    if is_last(x.placements[0], x.ndim):
        x = moved(x, Replicate())
    most = max(split.sizes)
    parts = [functional.pad(each, (0, most - each.shape[-1])) for each in x.to_local().split(split.sizes, -1)]
    sizes = (*x.shape[:-1], most * len(split.sizes))
    wide = wrapped(torch.cat(parts, -1), split.mesh, x.placements, sizes)
    mine = moved(wide, Shard(x.ndim - 1)).to_local()
    return mine[..., : split.sizes[split.rank]].contiguous()


def _spread_output(y: Tensor, split: Split) -> Tensor:
    """The local part of y in the output layout, of the features that each rank has."""
    most, count = max(split.sizes), len(split.sizes)
    sizes = (*y.shape[:-1], most * count)
    wide = wrapped(functional.pad(y, (0, most - y.shape[-1])), split.mesh, [Shard(y.ndim - 1)], sizes)
    y = moved(wide, split.outputs).to_local()
    if split.is_even:
        return y
    return torch.cat(
        [part[..., :size] for part, size in zip(y.split(most, -1), split.sizes, strict=True)], -1
    )


def wrapped(x: Tensor, mesh: DeviceMesh, layouts: Sequence[Placement], sizes: Sequence[int]) -> Any:
    """A DTensor of a local part and of the sizes of the whole."""
    stride = torch.empty(tuple(sizes), dtype=x.dtype, device="meta").stride()
    return DTensor.from_local(x, mesh, layouts, run_check=False, shape=torch.Size(sizes), stride=stride)


def summed(y: Tensor, split: Split, local: bool = False) -> Any:
    """The sum of the ranks' y in the output layout, perhaps in the memory of y. A plain tensor if `local`."""
    local = local or split.local
    if local and isinstance(split.outputs, Partial):
        return y
    if local and split.outputs == Replicate():
        return added(y, split.group)
    whole = moved(DTensor.from_local(y, split.mesh, [Partial()], run_check=False), split.outputs)
    return whole.to_local() if local else whole


def _replicated(bias: Any, split: Split, y: Tensor) -> Tensor:
    """The part of a bias that belongs to a local y. Its gradients on the ranks add up, where each has a part of y."""
    if not isinstance(split.outputs, Shard):
        return bias.to_local(grad_placements=[Replicate()])
    local = everywhere(bias, split)
    if not is_last(split.outputs, y.ndim):
        return local
    parts = local.chunk(split.mesh.size())
    return parts[split.rank] if split.rank < len(parts) else local[:0]


def _finished(y: Tensor, split: Split, act: str, residual: Any, sizes: tuple[int, ...]) -> Any:
    """act(y) + residual in the output layout, as a DTensor of these sizes if that is wanted."""
    assert split.outputs is not None
    if is_split(residual):
        residual = moved(residual, split.outputs).to_local()
    y = finished(y, act, residual)
    return y if split.local else wrapped(y, split.mesh, [split.outputs], sizes)
