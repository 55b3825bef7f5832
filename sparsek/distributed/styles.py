"""Tensor parallel styles for sparse layers, beside those of torch in `parallelize_module`."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from sparsek.core import arguments
from sparsek.core.errors import InvalidInput
from sparsek.core.handshake import Facts, agreed
from sparsek.core.tracing import wants_gradient
from sparsek.distributed.experts import spread_experts
from sparsek.nn.agreement import facts_of
from sparsek.nn.experts import packed_names
from sparsek.nn.gated import GatedForward, GatedMLP, fitted_class, gated_forward, joined, pair_of
from sparsek.nn.parallel_linear import (
    ParallelLinear,
    Side,
    Split,
    check_given,
    everywhere,
    is_copied,
    is_last,
    is_split,
    split_layer,
)
from sparsek.nn.regrow import ALIKE
from sparsek.nn.sparse import SparseLinear
from sparsek.nn.sums import copied_products, learn_beside

Sizes: TypeAlias = 'Literal["even", "balanced"] | Sequence[int]'
STEP = {"rows": 16, "columns": 64}  # of a 2:4 matrix, whose parts have 16 whole bytes of values and metadata


class ColwiseSparse(ParallelStyle):
    """Split the output features of a SparseLinear over a mesh, as torch's ColwiseParallel those of an nn.Linear.

    Every storage is split: BSR, 2:4 and BSR24, in FP8 too. The layer has DTensors as Parameters afterwards: make the
    optimizer later, and apply FSDP2 later. Ranks must have layers of one pattern.

    Args:
        input_layouts: The layout of an x that is no DTensor: Replicate by default; Shard(1) for sequence parallel.
        output_layouts: That of y: Shard(-1) by default.
        use_local_output: Whether y is a plain tensor, and no DTensor.
        split: "even": as many features for each rank, whole block rows. "balanced": neighbouring block rows, such that
            the rank with the most stored blocks has as few as possible. Or the number of features of each rank. The
            layer that takes y must be split the same way: see `GatedSparse`.

    Raises:
        InvalidInput: On every rank, where the ranks' layers differ, or one cannot be split so.
    """

    side: Side = "rows"
    layouts: tuple[Placement, Placement] = (Replicate(), Shard(-1))
    leaves_parts = False  # whether y may be the ranks' parts of a sum

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        split: Sizes = "even",
    ) -> None:
        super().__init__()
        self.input_layouts = _layout("input_layouts", input_layouts, self.layouts[0])
        self.output_layouts = _layout("output_layouts", output_layouts, self.layouts[1], self.leaves_parts)
        self.use_local_output = arguments.flag("use_local_output", use_local_output)
        self.split = _wanted(split)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def plan() -> list[tuple[Any, Split]]:
            layer = _splittable(module, type(self).__name__)
            sizes = self._sizes([(layer, self.side)], device_mesh)
            made = Split(
                device_mesh, self.side, sizes, self.input_layouts, self.output_layouts, self.use_local_output
            )
            _check_layouts(made)
            return [(layer, made)]

        _split_all(plan, device_mesh, self.src_data_rank, repr(self))
        return module

    def _sizes(self, parts: Sequence[tuple[Any, Side]], mesh: DeviceMesh) -> tuple[int, ...]:
        """The features of each rank, of layers that are split together."""
        total, *others = found = [_features(*each) for each in parts]
        if any(each != total for each in others):
            raise InvalidInput(
                f"gate, up and down have {', '.join(map(str, found))} features in the middle, which must be one number"
            )
        step = lcm(*(_step(*each) for each in parts))
        weights: Any = sum(_stored(*each, step) for each in parts)
        return _sizes(self.split, mesh.size(), total, weights, step, "features")

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output}, split={self.split!r})"
        )


class RowwiseSparse(ColwiseSparse):
    """Split the input features of a SparseLinear over a mesh, as torch's RowwiseParallel those of an nn.Linear.

    The ranks' products are added up: by an all-reduce for `output_layouts` Replicate, by a reduce-scatter for Shard(1),
    sequence parallel. Bias, activation and residual follow the sum. In FP8 each rank scales its part of x.

    Args:
        input_layouts: The layout of an x that is no DTensor: Shard(-1) by default.
        output_layouts: That of y: Replicate by default; Shard(1) for sequence parallel.
        use_local_output: Whether y is a plain tensor, and no DTensor.
        split: As in `ColwiseSparse`, of input features and block columns.

    Raises:
        InvalidInput: On every rank, where the ranks' layers differ, or one cannot be split so.
    """

    side = "columns"
    layouts = (Shard(-1), Replicate())


class GatedSparse(ColwiseSparse):
    """Split a gated MLP, down(act(gate(x)) * up(x)) of three SparseLinear, over a mesh.

    Gate and up have the features of one rank that down takes there, so they are split together: x is gathered once, and
    the product of gate and up stays fused where it was.

    Args:
        input_layouts: The layout of an x that is no DTensor: Replicate by default; Shard(1) for sequence parallel.
        output_layouts: That of y: Replicate by default; Shard(1) for sequence parallel. With Partial each rank returns
            its part, for the caller to add up, for example while other tokens are computed; down has no bias.
        use_local_output: Whether y is a plain tensor, and no DTensor.
        split: As in `ColwiseSparse`; "balanced" balances the stored blocks of all three.

    Raises:
        InvalidInput: On every rank, for another module, and as `ColwiseSparse`.
    """

    layouts = (Replicate(), Replicate())
    leaves_parts = True

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        split: Sizes = "balanced",
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            output_layouts=output_layouts,
            use_local_output=use_local_output,
            split=split,
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def plan() -> list[tuple[Any, Split]]:
            form = _gated_form(module)
            gate, up, down = (
                _splittable(module._modules.get(name), f"GatedSparse, {name}")
                for name in (form.gate, form.up, *form.tail)
            )
            parts: Any = [(gate, "rows"), (up, "rows"), (down, "columns")]
            sizes = self._sizes(parts, device_mesh)
            middle = Split(device_mesh, "rows", sizes, None, None, True)
            last = Split(device_mesh, "columns", sizes, None, self.output_layouts, self.use_local_output)
            _check_layouts(last)
            if isinstance(last.outputs, Partial) and down.bias is not None:
                raise InvalidInput(
                    "GatedSparse: parts of y with a bias of down would add it once for each rank"
                )
            return [(gate, middle), (up, middle), (down, last)]

        _split_all(plan, device_mesh, self.src_data_rank, repr(self))
        split = Split(device_mesh, "rows", (), self.input_layouts, self.output_layouts, True)
        entry = _Entry(split, _gated_form(module).gate)
        kind, base = getattr(type(module), "_fitted", (None, None))
        if kind is GatedMLP and type(module) is fitted_class(kind, base):
            module.__class__ = fitted_class(SplitGatedMLP, base)
            module.__dict__["_entry"] = entry
        else:  # classes of FSDP2 stay
            module.register_forward_pre_hook(entry, with_kwargs=True)
        module.__dict__["_calls"] = set()
        return module


class ExpertsSparse(ColwiseSparse):
    """Spread packed experts with sparse weights over a mesh: expert parallel.

    The module is as transformers holds experts, with both weights sparse and without biases. Routers stay as they are:
    `top_k_index` counts all experts. With Shard(0) in a layout, each rank sends its tokens to the ranks of their
    experts and adds up what returns, by all-to-all. With two Replicate, every rank computes what its experts make of
    all tokens, and an all-reduce adds that up.

    Args:
        input_layouts: The layout of hidden states [T, D], indices and weights: Replicate by default, or Shard(0).
            Ranks may have unlike numbers of tokens, or none, where both layouts are Shard(0) and the result is plain.
        output_layouts: That of the result: Replicate by default, or Shard(0).
        use_local_output: Whether the result is a plain tensor, and no DTensor.
        split: "even", as many experts for each rank; "balanced" by their stored blocks; or the number of each rank.

    Raises:
        InvalidInput: On every rank, for another module, and as `ColwiseSparse`.
    """

    layouts = (Replicate(), Replicate())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts: Any = module
        names = packed_names(experts)

        def plan() -> list[tuple[Any, Split]]:
            for each in (self.input_layouts, self.output_layouts):
                if each not in (Replicate(), Shard(0)):
                    raise InvalidInput(f"ExpertsSparse takes layouts Replicate() and Shard(0), got {each}")
            if not names or experts.has_bias:
                raise InvalidInput(
                    f"ExpertsSparse takes packed experts without biases, got {type(experts).__name__}"
                )
            layers = [_splittable(getattr(experts, name), f"ExpertsSparse, {name}") for name in names]
            total = experts.num_experts
            weights: Any = sum(_stored(each, "rows", each.out_features // total) for each in layers)
            counts = _sizes(self.split, device_mesh.size(), total, weights, 1, "experts")
            sizes = [tuple(each * (x.out_features // total) for each in counts) for x in layers]
            return [
                (x, Split(device_mesh, "rows", y, None, None, True))
                for x, y in zip(layers, sizes, strict=True)
            ]

        _split_all(plan, device_mesh, self.src_data_rank, repr(self))
        first = experts._modules[names[0]]
        counts = tuple(each * experts.num_experts // first.out_features for each in first._split.sizes)
        layouts = self.input_layouts, self.output_layouts, self.use_local_output
        return spread_experts(experts, Split(device_mesh, "columns", counts, *layouts))


class _Entry:
    """A hook before a forward: x on every rank, whose gradients add up."""

    def __init__(self, split: Split, first: str) -> None:
        self.split, self.first = split, first

    def __call__(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return (everywhere(self.checked(module, given, named), self.split),), {}

    def checked(self, module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The x of a call that all ranks make alike."""
        x, *others = (*given, *named.values(), None)
        why = (
            "" if others == [None] else f"{type(module).__name__}, which GatedSparse has split, takes x only"
        )
        check_given(module, module._modules[self.first].in_features, self.split, x, why=why)
        return x


class SplitGatedMLP(GatedMLP):
    """A gated MLP whose layers are split over a mesh."""

    _entry: _Entry

    @torch._disable_dynamo  # DTensors of several ranks, between two graphs, as in calls of the layers
    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what the class of the module does, of this rank's features."""
        x, split = self._entry.checked(self, args, options), self._entry.split
        found = pair_of(self, x) if is_copied(x, split) and wants_gradient(x) else None
        if found is not None:
            gate, up, act = found
            weights = gate.weight, up.weight
            if learn_beside(x, *weights):
                return joined(self, act, *copied_products(x, weights, split.group))
        return super().forward(everywhere(x, split))


def _gated_form(module: Any) -> GatedForward:
    base = getattr(type(module), "_fitted", (None, type(module)))[1]
    form = gated_forward(base.forward)
    if form is None or len(form.tail) != 1:
        raise InvalidInput(
            f"GatedSparse takes a module whose forward is down(act(gate(x)) * up(x)), got {type(module).__name__}; use "
            "ColwiseSparse and RowwiseSparse on its layers"
        )
    return form


def _layout(name: str, given: Any, default: Placement, parts: bool = False) -> Placement:
    found = default if given is None else given
    if not (isinstance(found, (Replicate, Shard)) or (parts and found == Partial())):
        kinds = "Replicate(), Partial()" if parts else "Replicate()"
        raise InvalidInput(
            f"{name} is {arguments.shown(given)}; it must be {kinds} or Shard(dim) of torch.distributed.tensor"
        )
    return found


def _wanted(split: Any) -> Any:
    if isinstance(split, str):
        return arguments.one_of("split", split, ("even", "balanced"))
    if not isinstance(split, Sequence) or not split:
        raise InvalidInput(
            f"split is {arguments.shown(split)}; it must be 'even', 'balanced' or the features of each rank"
        )
    return tuple(arguments.integer(f"split[{at}]", each, 1) for at, each in enumerate(split))


def _splittable(layer: Any, style: str) -> Any:
    """The layer, if a style can split it."""
    if not isinstance(layer, SparseLinear):
        raise InvalidInput(
            f"{style} takes a SparseLinear, got {type(layer).__name__}; sk.sparsify_ makes one, and "
            "torch.distributed.tensor.parallel has styles for dense layers"
        )
    if isinstance(layer, ParallelLinear):
        raise InvalidInput(f"{style}: this layer is split over a mesh already: {layer._split.mesh}")
    if type(layer).forward is not SparseLinear.forward or "forward" in layer.__dict__:
        raise InvalidInput(f"{style}: {type(layer).__name__} has a forward of its own, which would not run")
    if layer._parameters.get("pruned") is not None:
        raise InvalidInput(f"{style}: a layer with pruned elements (keep_pruned) cannot be split")
    for name, each in (*layer.named_parameters(), *layer.named_buffers()):
        if is_split(each):
            raise InvalidInput(
                f"{style}: {name} is a DTensor already; apply tensor parallel styles before FSDP2"
            )
    return layer


def _step(layer: Any, side: Side) -> int:
    """The features that stay together on a side."""
    return STEP[side] if layer._block is None else layer._block[side == "columns"]


def _features(layer: Any, side: Side) -> int:
    return layer.out_features if side == "rows" else layer.in_features


def _sizes(split: Any, ranks: int, total: int, weights: np.ndarray, step: int, of: str) -> tuple[int, ...]:
    """How much of a total each rank has, in whole steps. InvalidInput where one would have none.

    `weights`: the stored elements of each step.
    """
    steps = f"{total} {of}" if step == 1 else f"{total} {of}, {total / step:g} steps of {step},"
    if len(weights) < ranks:
        raise InvalidInput(f"{steps} are fewer than {ranks} ranks; use a smaller mesh")
    if split == "even":
        if total % (step * ranks):
            raise InvalidInput(
                f'{steps} do not divide by {ranks} ranks; use split="balanced", or a mesh that divides them'
            )
        return (total // ranks,) * ranks
    if split == "balanced":
        ends = np.cumsum([0, *balanced(weights, ranks)]) * step
        return tuple(np.diff(np.minimum(ends, total)).tolist())
    if len(split) != ranks or sum(split) != total or any(each % step for each in split[:-1]):
        raise InvalidInput(
            f"split is {list(split)}; it must be {ranks} numbers, one for each rank, that add up to {total} {of}, and "
            f"all but the last multiples of {step}"
        )
    return split


def _stored(layer: Any, side: Side, step: int) -> np.ndarray:
    """The stored elements in each step of features, int64."""
    units = -(-_features(layer, side) // step)
    if layer._block is None:
        return np.full(units, step * _features(layer, "columns" if side == "rows" else "rows") // 2)
    pattern = layer.pattern
    counts = (
        np.diff(pattern.host.indptr)
        if side == "rows"
        else np.bincount(pattern.host.indices, minlength=pattern.grid[1])
    ).astype(np.int64)
    many = max(1, step // _step(layer, side))
    padded = np.zeros(units * many, np.int64)
    padded[: len(counts)] = counts
    return padded.reshape(units, many).sum(1) * (layer._block[0] * layer._block[1])


def balanced(weights: Sequence[int] | np.ndarray, parts: int) -> list[int]:
    """How many neighbours each of `parts` groups has, none empty, such that the heaviest is as light as possible."""
    items = [int(each) for each in weights]

    def groups(most: int) -> list[int]:
        counts, load = [0], 0
        for at, each in enumerate(items):
            left = parts - len(counts)
            if counts[-1] and left and (load + each > most or len(items) - at <= left):
                counts.append(0)
                load = 0
            counts[-1] += 1
            load += each
        return counts

    def fits(most: int) -> bool:
        counts, at = groups(most), 0
        for count in counts:
            if sum(items[at : at + count]) > most:
                return False
            at += count
        return True

    low, high = max(items), sum(items)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return groups(low)


def _check_layouts(split: Split) -> None:
    uneven = not split.is_even and split.side == "rows"
    if uneven and not split.local and split.outputs is not None and is_last(split.outputs, None):
        raise InvalidInput(
            f"a DTensor with Shard(-1) has shards of one size, and split gives {list(split.sizes)}; use "
            'use_local_output=True, another output layout, or split="even"'
        )


def _split_all(plan: Any, mesh: Any, source: int | None, style: str) -> None:
    """Split layers by `plan`, if it and the layers are the same on every rank."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise InvalidInput(
            f"{style} needs a DeviceMesh of one dimension, such as mesh['tp'], got {arguments.shown(mesh)}"
        )
    if mesh.get_coordinate() is None:
        raise InvalidInput(f"{style}: this process, rank {dist.get_rank()}, is not in {mesh}")
    found: list[tuple[Any, Split]] = []

    def check() -> Facts:
        found.extend(plan())
        return {f"layer {at}": facts_of(layer) for at, (layer, _) in enumerate(found)}

    agreed(style, [mesh.get_group()], check, ALIKE)
    for layer, split in found:
        split_layer(layer, split, source)
