"""Hidden units between layers, such as those of an MLP: their order is free, so those that stay can fill whole blocks.

A unit is a row of the layers that make it and a column of the layer that takes it. Dropped as a whole it frees blocks
of both, so the others keep more of theirs than blocks that are chosen layer by layer, in whatever block the units are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import dtypes
from sparsek.models.config import LayerConfig, chosen_by
from sparsek.models.layer import Live, fitted, keep_of, stored_blocks, weights_of
from sparsek.models.obs import choose_columns
from sparsek.models.scores import Moments
from sparsek.models.stream import DENSE, Stream
from sparsek.nn.experts import PackedLinear
from sparsek.nn.replace import is_conv1d
from sparsek.products.formats.pattern import block_sides

TOLERANCE = 1e-3  # of the norm, and 4 eps, for sums in another order


@dataclass(frozen=True)
class Units:
    """Hidden units that may be sorted, and how many of them stay.

    Attributes:
        makers: The layers whose outputs they are: each has a row for a unit, or one in each half of its rows.
        taker: The layer whose inputs they are.
        count: How many stay.
    """

    makers: tuple[str, ...]
    taker: str
    count: int

    def sort(
        self, dense: Mapping[str, Any], layers: Mapping[str, Any], moments: Moments, follow: bool
    ) -> dict[str, Live]:
        """Sort the units in both models, those first that stay by OBS; where the layers may then store blocks.

        `moments`: of the taker, whose inputs come from the makers before they are pruned.
        """
        weight, bias = weights_of(layers[self.taker])
        with dtypes.as_given(weight.device):
            fit = fitted(self.taker, weight.detach(), bias, moments, follow)
            stay = choose_columns(fit.target, fit.h, self.count)
        order = torch.cat((stay.nonzero()[:, 0], (~stay).nonzero()[:, 0]))
        first = torch.arange(self.count, device=weight.device)
        live = {self.taker: Live(torch.arange(len(weight), device=weight.device), first)}
        for name in self.makers:
            rows, columns = weights_of(layers[name])[0].shape
            every = torch.arange(columns, device=weight.device)
            live[name] = Live(_outputs_of(first, rows, len(order)), every)
            for side in (dense, layers):
                _reorder(side[name], _outputs_of(order, rows, len(order)), None)
        for side in (dense, layers):
            _reorder(side[self.taker], None, order)
        return live


def free_units(
    line: Stream,
    index: int,
    block: nn.Module,
    layers: Mapping[str, Any],
    groups: Mapping[tuple[str, ...], int],
    configs: Mapping[str, LayerConfig],
) -> list[Units]:
    """The hidden units of a dense block that may be sorted, between layers that store blocks, and not all of them."""
    found: list[Units] = []
    before: list[tuple[str, ...]] = []
    for group in groups:
        if isinstance(layers[group[0]], PackedLinear):
            continue
        taker, width = group[0], weights_of(layers[group[0]])[0].shape[1]
        for earlier in reversed(before) if len(group) == 1 and keep_of(configs[taker]) else ():
            makers = tuple(
                name
                for name in earlier
                if len(weights_of(layers[name])[0]) in (width, 2 * width) and keep_of(configs[name])
            )
            if not 0 < len(makers) <= 2:  # queries, keys and values are three
                continue
            count = _kept_units(makers, taker, layers, configs)
            if count < width and _is_free(line, index, block, layers, makers, taker):
                found.append(Units(makers, taker, count))
                break
        before.append(group)
    return found


def _kept_units(
    makers: tuple[str, ...], taker: str, layers: Mapping[str, Any], configs: Mapping[str, LayerConfig]
) -> int:
    """The fewest units with room for what each layer stores, in whole blocks of each."""
    width = weights_of(layers[taker])[0].shape[1]
    least, steps = 0, list[int]()
    for name in (*makers, taker):
        weight, inner = weights_of(layers[name])[0], chosen_by(configs[name])
        assert inner is not None
        grid, count = stored_blocks(inner, weight.shape)
        axis = int(name == taker)
        step = block_sides(inner.block)[axis]  # type: ignore[union-attr]
        halves = weight.shape[axis] // width
        if halves > 1 and width % step:
            return width
        least = max(least, -(-count // (grid[1 - axis] * halves)) * step)
        steps.append(step)
    step = math.lcm(*steps)
    return -(-least // step) * step


def _is_free(
    line: Stream, index: int, block: nn.Module, layers: Mapping[str, Any], makers: tuple[str, ...], taker: str
) -> bool:
    """Whether the order of the units is of no effect on the taker's inputs and on the block, with noise for units."""
    width = weights_of(layers[taker])[0].shape[1]
    draw = torch.Generator("cpu").manual_seed(0)
    order = torch.randperm(width, generator=draw, device="cpu")

    def tried(order: Tensor, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        draw = torch.Generator("cpu").manual_seed(1)
        taken: list[Tensor] = []

        def make(layer: Any, args: Any, found: Tensor) -> Tensor:
            noise = torch.randn(found.shape, generator=draw, dtype=torch.float32, device="cpu")
            return noise[..., _outputs_of(order, found.shape[-1], width)].to(found)

        def take(layer: Any, args: Any, kwargs: Any) -> None:
            taken.append(args[0] if args else next(iter(kwargs.values())))

        hooks = [layers[name].register_forward_hook(make) for name in makers]
        hooks.append(layers[taker].register_forward_pre_hook(take, with_kwargs=True))
        kept = layers[taker].weight.data
        _reorder(layers[taker], None, order)
        try:
            found = line.outputs(line.call(block, index, DENSE, batch), index, batch)
        finally:
            layers[taker].weight.data = kept
            for hook in hooks:
                hook.remove()
        return taken, [each for each in found.values() if each.is_floating_point()]

    for batch in range(len(line)):
        taken, outputs = tried(torch.arange(width, device="cpu"), batch)
        if taken:
            moved, others = tried(order, batch)
            return _near([*moved, *others], [*(x[..., order.to(x.device)] for x in taken), *outputs])
    return False


def _near(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether tensors differ by no more than sums in another order do."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return False
    return all(
        bool((a.float() - b.float()).norm() <= (TOLERANCE + 4 * torch.finfo(b.dtype).eps) * b.float().norm())
        for a, b in zip(found, wanted, strict=True)
    )


def _outputs_of(units: Tensor, outputs: int, width: int) -> Tensor:
    """The outputs of a maker that belong to units: one of each `width` outputs."""
    return torch.cat([units + start for start in range(0, outputs, width)])


def _reorder(layer: Any, rows: Tensor | None, columns: Tensor | None) -> None:
    """Put outputs and inputs of a layer in another order. Not in place: a loader may have mapped the old values."""
    weight, bias = weights_of(layer)
    if rows is not None:
        weight = weight[rows.to(weight.device)]
        if bias is not None:
            layer.bias.data = bias[rows.to(bias.device)]
    if columns is not None:
        weight = weight[:, columns.to(weight.device)]
    layer.weight.data = (weight.T if is_conv1d(layer) else weight).contiguous()
