"""Hidden units between layers, those of an MLP and heads of attention: their order is free, so they can fill blocks.

A unit is rows of the layers that make it and columns of the layer that takes it. Dropped as a whole it frees blocks of
all of them, so the other units keep more of theirs than blocks that are chosen layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import dtypes
from sparsek.models.config import LayerConfig, chosen_by
from sparsek.models.layer import Live, check_finite, fitted, keep_of, parts_of, stored_blocks, weights_of
from sparsek.models.obs import choose_columns
from sparsek.models.scores import Moments
from sparsek.models.stream import DENSE, Stream
from sparsek.nn.experts import PackedLinear
from sparsek.nn.replace import is_conv1d
from sparsek.products.formats.pattern import block_sides

TOLERANCE = 1e-3  # of the norm, and 4 eps, for sums in another order
HEAD_STEP, WIDEST = 8, 1024  # the sizes of heads that are tried


@dataclass(frozen=True)
class Units:
    """Hidden units that may be sorted.

    Attributes:
        makers: The layers whose outputs they are, in the order of their calls.
        taker: The layer whose inputs they are, each as many neighbours.
        count: How many there are.
        sections: In each of so many equal parts of a maker's outputs a unit has as many neighbours.
    """

    makers: tuple[str, ...]
    taker: str
    count: int
    sections: int

    def kept(self, layers: Mapping[str, Any], configs: Mapping[str, LayerConfig]) -> int:
        """The fewest units with room for the blocks of each layer, in whole blocks of each; at most all."""
        least, step = 1, 1
        for name in (*self.makers, self.taker):
            weight, inner = weights_of(layers[name])[0], chosen_by(configs[name])
            assert inner is not None
            grid, stored = stored_blocks(inner, weight.shape)
            axis, sections = (1, 1) if name == self.taker else (0, self.sections)
            side = block_sides(inner.block)[axis]  # type: ignore[union-attr]
            each = weight.shape[axis] // (self.count * sections)
            if sections > 1 and weight.shape[axis] // sections % side:
                return self.count
            filled = -(-stored // (grid[1 - axis] * sections)) * side
            least = max(least, -(-filled // each))
            step = math.lcm(step, side // math.gcd(side, each))
        return min(self.count, -(-least // step) * step)

    def sort(
        self,
        dense: Mapping[str, Any],
        layers: Mapping[str, Any],
        configs: Mapping[str, LayerConfig],
        moments: Moments,
        follow: bool,
    ) -> dict[str, Live]:
        """Sort the units in both models, those first that stay by OBS; where the layers may then store blocks.

        `moments`: of the taker, whose inputs come from the makers before they are pruned.
        """
        weight, bias = weights_of(layers[self.taker])
        kept, side = self.kept(layers, configs), weight.shape[1] // self.count
        with dtypes.as_given(weight.device):
            fit = fitted(self.taker, weight.detach(), bias, moments, follow)
            stay = choose_columns(fit.target, fit.h, kept * side, side)[::side]
        order = torch.cat((stay.nonzero()[:, 0], (~stay).nonzero()[:, 0]))
        first = torch.arange(kept, device=weight.device)
        live = {
            self.taker: Live(torch.arange(len(weight), device=weight.device), self.columns(first, weight))
        }
        for name in self.makers:
            made = weights_of(layers[name])[0]
            live[name] = Live(self.rows(first, len(made)), torch.arange(made.shape[1], device=weight.device))
            for side_layers in (dense, layers):
                _reorder(side_layers[name], self.rows(order, len(made)), None)
        for side_layers in (dense, layers):
            _reorder(side_layers[self.taker], None, self.columns(order, weight))
        return live

    def columns(self, units: Tensor, weight: Tensor) -> Tensor:
        """The inputs of the taker, of a weight [M, K], that are units."""
        return _neighbours(units, weight.shape[1] // self.count)

    def rows(self, units: Tensor, outputs: int) -> Tensor:
        """The outputs of a maker, out of so many, that are units."""
        part = outputs // self.sections
        own = _neighbours(units, part // self.count)
        return torch.cat([own + start for start in range(0, outputs, part)])


def free_units(
    line: Stream,
    index: int,
    block: nn.Module,
    layers: Mapping[str, Any],
    groups: Mapping[tuple[str, ...], int],
    configs: Mapping[str, LayerConfig],
) -> list[Units]:
    """The hidden units of a dense block that may be sorted, between layers that store blocks, and not all of them.

    Raises InvalidInput for a weight with NaN or Inf: units are sorted by their taker, whose inputs then have NaN,
    before any maker is looked at.
    """
    for name in (name for group in groups for name in group):
        for part in parts_of(layers[name]):
            check_finite(name, *part)
    found: list[Units] = []
    before: list[tuple[str, ...]] = []
    for group in groups:
        if isinstance(layers[group[0]], PackedLinear):
            continue
        if len(group) == 1 and keep_of(configs[group[0]]):
            trial = _Trial(line, index, block, layers, group[0])
            for makers in _makers(before, layers, configs, trial.width):
                own = next((each for each in trial.units(makers) if trial.passes(each)), None)
                if own is not None:
                    found += [own] if own.kept(layers, configs) < own.count else []
                    break
        before.append(tuple(name for name in group if keep_of(configs[name])))
    return found


def _makers(
    before: list[tuple[str, ...]], layers: Mapping[str, Any], configs: Mapping[str, LayerConfig], width: int
) -> Iterator[tuple[str, ...]]:
    """Layers that may make the inputs of a layer: of one group, or two as in cross-attention; the nearest first."""
    tried: set[tuple[str, ...]] = {()}
    for at in reversed(range(len(before))):
        for names in (before[at], before[at - 1] + before[at] if at else ()):
            rows = {name: len(weights_of(layers[name])[0]) for name in names}
            for wanted in ((width, 2 * width), (width,), tuple(rows.values())):
                makers = tuple(name for name in names if rows[name] in wanted)
                if makers not in tried:
                    tried.add(makers)
                    yield makers


class _Trial:
    """Noise for the outputs of makers, in two orders: what the taker's inputs and the block's outputs make of it."""

    def __init__(
        self, line: Stream, index: int, block: nn.Module, layers: Mapping[str, Any], taker: str
    ) -> None:
        self.line, self.index, self.block, self.layers, self.taker = line, index, block, layers, taker
        self.width = weights_of(layers[taker])[0].shape[1]
        self.plain: dict[tuple[str, ...], tuple[int, list[Tensor], list[Tensor]] | None] = {}

    def units(self, makers: tuple[str, ...]) -> Iterator[Units]:
        """What to try: single units, and heads of all sizes; only odd numbers of heads once two halves are not free."""
        sizes = [1, self.width // 2] if self.width % 2 == 0 else [1]
        sizes += range(HEAD_STEP, min(WIDEST, self.width // 2) + 1, HEAD_STEP)
        rows = [len(weights_of(self.layers[name])[0]) for name in makers]
        parts = {1, rows[0] // self.width} if len(rows) == 1 and rows[0] % self.width == 0 else {1}
        for sections in sorted(parts, reverse=True):
            halves = True
            for size in dict.fromkeys(sizes):
                count = self.width // size
                if self.width % size or any(each % (count * sections) for each in rows):
                    continue
                own = Units(makers, self.taker, count, sections)
                if size == self.width // 2 > 1:
                    halves = self.passes(own)
                elif halves or count % 2:
                    yield own
            if halves and self.width % 2 == 0:
                yield Units(makers, self.taker, 2, sections)

    def passes(self, units: Units) -> bool:
        """Whether the order of units is of no effect: the taker's inputs follow it, the block's outputs stay."""
        makers = units.makers
        if makers not in self.plain:
            runs = ((at, *self._run(makers, None, at)) for at in range(len(self.line)))
            self.plain[makers] = next((run for run in runs if run[1] and self._shows(*run[:2])), None)
        plain = self.plain[makers]
        if plain is None:
            return False
        at, taken, outputs = plain
        cycle = torch.randperm(units.count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        order = torch.empty_like(cycle)
        order[cycle] = cycle.roll(1)  # no unit stays in its place
        moved, others = self._run(makers, (units, order), at)
        columns = _neighbours(order, self.width // units.count)
        return _near([*moved, *others], [*(x[..., columns.to(x.device)] for x in taken), *outputs])

    def _shows(self, batch: int, taken: list[Tensor]) -> bool:
        """Whether a sequence has two tokens that count: attention over one does not show its heads."""
        tokens = (self.line.rows(x, batch).view(x.shape[:-1]).sum(-1) for x in taken if x.ndim > 2)
        return all(bool((each > 1).any()) for each in tokens)

    def _run(
        self, makers: tuple[str, ...], moved: tuple[Units, Tensor] | None, batch: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The inputs of the taker and the outputs of the block."""
        draw = torch.Generator("cpu").manual_seed(1)
        taken: list[Tensor] = []
        layer = self.layers[self.taker]

        def make(made: Any, args: Any, found: Tensor) -> Tensor:
            noise = torch.randn(found.shape, generator=draw, dtype=torch.float32, device="cpu")
            if moved is not None:
                noise = noise[..., moved[0].rows(moved[1], found.shape[-1])]
            return noise.to(found)

        def take(_: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            taken.append(self.line.real(x.clone(), batch))  # or written to later

        hooks: list[Any] = [self.layers[name].register_forward_hook(make) for name in makers]
        hooks.append(layer.register_forward_pre_hook(take, with_kwargs=True))
        kept = layer.weight.data
        if moved is not None:
            _reorder(layer, None, _neighbours(moved[1], self.width // moved[0].count))
        try:
            found = self.line.outputs(self.line.call(self.block, self.index, DENSE, batch), self.index, batch)
        finally:
            layer.weight.data = kept
            for hook in hooks:
                hook.remove()
        floats = (each for each in found.values() if each.is_floating_point())
        return taken, [self.line.real(each, batch) for each in floats]


def _near(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether tensors differ by no more than sums in another order do."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return False
    return all(
        bool(_norm(a - b) <= (TOLERANCE + 4 * torch.finfo(b.dtype).eps) * _norm(b))
        for a, b in zip(found, wanted, strict=True)
    )


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))


def _neighbours(units: Tensor, each: int) -> Tensor:
    """The indices of units that have so many neighbours each."""
    return (units[:, None] * each + torch.arange(each, device=units.device)).flatten()


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
