"""Passes of the calibration over a model, one block at a time: which layers run, on which inputs, with what moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsek.core import dtypes
from sparsek.models import stream
from sparsek.models.config import Float8
from sparsek.models.layer import parts_of, weights_of
from sparsek.models.scores import Moments
from sparsek.models.stream import DENSE, PRUNED, ActivationStore, Stack, Stream, TensorPlace, is_in
from sparsek.nn.experts import PackedLinear
from sparsek.nn.replace import layer_of

ELEMENTS = 2**28  # of the moments of packed experts that are held at a time


@dataclass
class Settings:
    """The arguments of a run."""

    method: str
    reconstruct: str | None
    budget: str
    device: torch.device | None


class Passes:
    """A model with the configs of its layers, and the calibration, which may be None."""

    stacks: list[Stack]

    def __init__(
        self,
        model: nn.Module,
        configs: dict[str, Any],
        settings: Settings,
        batches: list[stream.Batch] | None,
        folder: Path | None,
    ) -> None:
        self.model, self.configs, self.settings, self.batches = model, configs, settings, batches
        self.folder, self.store = folder, ActivationStore(folder)

    def survey(
        self,
        label: str,
        look: Callable[[str, tuple[Tensor, Tensor | None], Moments], Any],
        names: list[str],
    ) -> dict[str, Any]:
        """look(name, (weight, bias), moments of its inputs) for layers of the dense model, block by block.

        Of packed experts the mean of what is found for each.
        """
        found: dict[str, Any] = {}
        for at, stack in enumerate([*self.stacks, Stack("", {"": self.model})]):
            left = [name for name in names if name not in found and stack.has(name)]
            line = self._stream(stack, f"{label}-{at}") if left else None
            if line is None:
                continue
            for index, (name, block) in enumerate(stack.blocks.items()):
                layers = {each: self._layer(each) for each in left if is_in(each, name)}
                with self._computed(block):
                    for group, calls in self._groups(line, index, block, layers).items():
                        moments = self._moments(line, index, block, block, layers, layers, group, calls, {})
                        for each in group:
                            parts = zip(parts_of(layers[each]), moments, strict=True)
                            seen = [look(each, part, one) for part, one in parts if one is not None]
                            if seen:
                                found[each] = seen[0] if len(seen) == 1 else sum(seen) / len(seen)
                    if index + 1 < len(stack.blocks):
                        self._advance(line, index, block, DENSE)
                line.drop(index)
            line.close()
        return found

    def _groups(
        self, line: Stream, index: int, block: nn.Module, layers: dict[str, Any]
    ) -> dict[tuple[str, ...], int]:
        """The layers of a block in the order of their calls, those with one input together, and calls of each."""
        found: dict[tuple[str, ...], int] = {}
        left = dict(layers)
        for batch in range(len(line)):
            if left:
                more = groups_of(left, lambda batch=batch: line.call(block, index, DENSE, batch))
                found |= more
                left = {
                    name: layer for name, layer in left.items() if not any(name in group for group in more)
                }
        return found

    def _moments(
        self,
        line: Stream,
        index: int,
        dense: nn.Module,
        block: nn.Module,
        originals: dict[str, Any],
        layers: dict[str, Any],
        group: tuple[str, ...],
        calls: int,
        residuals: Mapping[str, TensorPlace],
    ) -> Iterable[Moments | None]:
        """The moments of the inputs of a group of layers, of the dense block and of the pruned one.

        Those of each packed expert, or None, are computed when they are iterated over.
        """
        first = group[0]
        if isinstance(originals[first], PackedLinear):
            both = [(dense, originals[first], DENSE)]
            both += [] if block is dense else [(block, layers[first], PRUNED)]
            return self._moments_of_experts(line, index, both, first, calls)
        weights = {name: weights_of(originals[name]) for name in group}
        places = {name: residuals[name] for name in group if name in residuals}
        weight = weights[first][0]
        fp8 = any(isinstance(self.configs[name], Float8 | str) for name in group)
        moments = Moments(weight.shape[1], group, weight.device, fp8=fp8)
        for batch in range(len(line)):
            sides = [
                stream.inputs(
                    module, own[first], partial(line.call, module, index, side, batch), calls, places.values()
                )
                for module, own, side in ((dense, originals, DENSE), (block, layers, PRUNED))
                if side == DENSE or block is not dense
            ]
            (theirs, there), (ours, here) = (
                ([x for x, *_ in found], at) for found, at in (sides[0], sides[-1])
            )
            if [x.shape for x in ours] != [x.shape for x in theirs]:  # routed in another way
                theirs = ours
            lost = {
                name: (there[place] - here[place]).flatten(0, -2)
                for name, place in places.items()
                if block is not dense and there[place].shape == here[place].shape
            }
            for a, b in zip(ours, theirs, strict=True):
                with dtypes.as_given(a.device):
                    moments.add(a.flatten(0, -2), b.flatten(0, -2), line.rows(a, batch), weights, lost)
        return [moments.mean()]

    def _moments_of_experts(
        self,
        line: Stream,
        index: int,
        both: list[tuple[nn.Module, PackedLinear, str]],
        name: str,
        calls: int,
    ) -> Iterator[Moments | None]:
        """Those of each expert on the tokens that reach it in the pruned model; None without a token."""
        theirs, ours = both[0][1], both[-1][1]
        dense, fp8 = theirs.parts, isinstance(self.configs[name], Float8)
        at_once = max(1, ELEMENTS // (ours.in_features + 1) ** 2)
        experts = range(len(dense))
        for own in (experts[at : at + at_once] for at in experts[::at_once]):
            found = {each: Moments(ours.in_features, (name,), ours.packed.device, fp8=fp8) for each in own}
            for batch in range(len(line)):
                sides = [
                    stream.inputs(
                        module, layer.experts, partial(line.call, module, index, side, batch), calls
                    )[0]
                    for module, layer, side in both
                ]
                for (x, *_), (y, ids, *_) in zip(sides[0], sides[-1], strict=True):
                    real = line.rows(y, batch)
                    for expert, moments in found.items():
                        at = ((ids == expert).any(-1) & (real > 0)).nonzero()[:, 0]
                        if len(at):
                            with dtypes.as_given(y.device):
                                a, b = ours.inputs(y[at], expert), theirs.inputs(x[at], expert)
                                moments.add(a, b, real[at], {name: dense[expert]}, {})
            yield from (each.mean() if each.count else None for each in found.values())

    def _advance(self, line: Stream, index: int, block: nn.Module, side: str) -> None:
        """Compute what a block gives to the next one."""
        for batch in range(len(line)):
            line.put(index + 1, side, batch, line.outputs(line.call(block, index, side, batch), index, batch))

    @contextmanager
    def _computed(self, block: nn.Module) -> Iterator[None]:
        """A block on the device of the run; afterwards where it was."""
        home, device = stream.device_of(block), self.settings.device
        if device is None or device == home:
            yield
            return
        block.to(device)
        try:
            yield
        finally:
            block.to(home)

    def _stream(self, stack: Stack, label: str) -> Stream | None:
        """The calibration on its way through a stack; None without calibration, and if the blocks are no sequence."""
        if self.batches is None:
            return None
        try:
            return Stream(self.model, stack, self.batches, self.store, label)
        except stream.NoSequence:
            self.store.drop(f"{label}.arguments")
            return None

    def _layers(self, stack: Stack) -> dict[str, Any]:
        """The layers to prune in a stack."""
        return {name: self._layer(name) for name in self.configs if stack.has(name)}

    def _layer(self, name: str) -> Any:
        return layer_of(self.model, name)


def groups_of(layers: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[tuple[str, ...], int]:
    """The layers that `run` calls, in order, those with the same input together; and how often they are called."""
    calls: list[tuple[str, Tensor | None]] = []

    def look(name: str, layer: Any) -> RemovableHandle:
        alone = isinstance(layer, PackedLinear)  # whose two weights have other inputs

        def see(_: Any, args: Any, kwargs: Any) -> None:
            calls.append((name, None if alone else args[0] if args else next(iter(kwargs.values()))))

        return (layer.experts if alone else layer).register_forward_pre_hook(see, with_kwargs=True)

    hooks = [look(name, layer) for name, layer in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    counts: dict[str, int] = {}
    groups: list[tuple[list[str], Tensor | None]] = []
    for name, x in calls:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            continue
        if groups and x is not None and groups[-1][1] is x:
            groups[-1][0].append(name)
        else:
            groups.append(([name], x))
    parts: dict[tuple[str, ...], int] = {}
    for names, _ in groups:
        for count in dict.fromkeys(counts[name] for name in names):
            parts[tuple(name for name in names if counts[name] == count)] = count
    return parts


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model in eval mode, without a cache of keys; afterwards as it was, by the names of its modules."""
    modes = {name: module.training for name, module in model.named_modules()}
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        if cached:
            config.use_cache = cached  # type: ignore[union-attr]
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
