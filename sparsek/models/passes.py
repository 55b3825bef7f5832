"""Passes of the calibration over a model, one block at a time: which layers run, on which inputs, with what moments."""

from __future__ import annotations

import inspect
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import is_functorch_wrapped_tensor
from sparsek.models import stream
from sparsek.models.config import Float8
from sparsek.models.layer import check_finite, checked, parts_of, weights_of
from sparsek.models.scores import Moments
from sparsek.models.stream import DENSE, PRUNED, ActivationStore, Stack, Stream, is_in, tensors_in
from sparsek.nn.experts import PackedLinear
from sparsek.nn.replace import layer_of

ELEMENTS = 2**28  # of the moments of packed experts that are held at a time
PIECE = 2**23  # inputs, or outputs, of the widest layer in a piece of a batch, unless one sequence has more
SAMPLED = 2**14  # elements of each tensor by which residuals are looked for
# Of transformers' configs: the tokens in whose places the features of images, videos and sound stand.
PLACES = tuple(f"{what}_token_{by}" for what in ("image", "video", "audio") for by in ("id", "index"))


@dataclass
class Settings:
    """The arguments of a run."""

    method: str
    reconstruct: str | None
    budget: str
    permute: bool
    device: torch.device | None


class Passes:
    """A model with the configs of its layers, and the calibration in pieces, which may be None.

    `numbers`: of the calibration batch of each piece.
    """

    stacks: list[Stack]

    def __init__(
        self,
        model: nn.Module,
        configs: dict[str, Any],
        settings: Settings,
        batches: list[stream.Batch] | None,
        folder: Path | None,
    ) -> None:
        self.model, self.configs, self.settings = model, configs, settings
        self.folder, self.store = folder, ActivationStore(folder)
        widest = max((max(parts_of(self._layer(name))[0][0].shape) for name in configs), default=1)
        cut = None
        if batches is not None:
            most, config = PIECE // widest, getattr(model, "config", None)
            places = [each for name in PLACES if isinstance(each := getattr(config, name, None), int)]
            cut = [
                pieces_of(each, stream.named(model, each).get("input_ids"), most, places) for each in batches
            ]
        self.batches = None if cut is None else [piece for pieces in cut for piece in pieces]
        self.numbers = [at for at, pieces in enumerate(cut or ()) for _ in pieces]

    def survey(
        self,
        label: str,
        look: Callable[[str, tuple[Tensor, Tensor | None], Moments], Any],
        names: list[str],
    ) -> dict[str, Any]:
        """look(name, (weight, bias), moments of its inputs) for layers of the dense model, block by block.

        Of packed experts the mean of what is found for each. Raises InvalidInput for NaN and Inf.
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
                            seen = []
                            for part, one in zip(parts_of(layers[each]), moments, strict=True):
                                check_finite(each, *part)
                                seen += [] if one is None else [look(each, part, one)]
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

        None without a token. Those of each packed expert are computed when they are iterated over. Raises InvalidInput
        for NaN and Inf.
        """
        first, sides = group[0], [(dense, originals, DENSE)]
        sides += [] if block is dense else [(block, layers, PRUNED)]
        if isinstance(originals[first], PackedLinear):
            both = [(module, own[first], side) for module, own, side in sides]
            found = self._moments_of_experts(line, index, both, first, calls)
            return (checked(each, line, index, sides) for each in found)
        weights = {name: weights_of(originals[name]) for name in group}
        places = {name: residuals[name] for name in group if name in residuals}
        weight = weights[first][0]
        fp8 = any(isinstance(self.configs[name], Float8 | str) for name in group)
        moments = Moments(weight.shape[1], group, weight.device, fp8=fp8)

        def add(batch: int) -> None:  # which lets go of a batch before the next one runs
            seen = [
                inputs(
                    module, own[first], partial(line.call, module, index, side, batch), calls, places.values()
                )
                for module, own, side in sides
            ]
            (theirs, there), (ours, here) = (
                ([x for x, *_ in found], at) for found, at in (seen[0], seen[-1])
            )
            if [x.shape for x in ours] != [x.shape for x in theirs]:  # routed in another way
                theirs = ours
            for a, b in zip(ours, theirs, strict=True):
                shapes = {name: (*a.shape[:-1], len(weights[name][0])) for name in places}
                lost = {
                    name: _rows(line.real(there[place] - here[place], batch))
                    for name, place in places.items()
                    if block is not dense
                    and all(place in side and side[place].shape == shapes[name] for side in (there, here))
                }
                with dtypes.as_given(a.device):
                    x, y = (_rows(line.real(each, batch)) for each in (a, b))
                    moments.add(x, y, line.rows(a, batch), weights, lost)

        for batch in range(len(line)):
            add(batch)
        return [checked(moments.mean() if moments.count else None, line, index, sides)]

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
                    inputs(module, layer.experts, partial(line.call, module, index, side, batch), calls)[0]
                    for module, layer, side in both
                ]
                if [x.shape for x, *_ in sides[0]] != [x.shape for x, *_ in sides[-1]]:
                    sides = sides[-1:]  # other rounds
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

    def _squares(self, line: Stream, stage: int, pieces: Iterable[int]) -> dict[str, float]:
        """Those of what the dense blocks give to a stage, in all of some pieces."""
        found: dict[str, float] = defaultdict(float)
        for piece in pieces:
            for at, each in line.get(stage, DENSE, piece).items():
                if each.is_floating_point() and each.ndim > 1:
                    found[at] += float(line.real(each.float(), piece).square().sum())
        return found

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
            return Stream(self.model, stack, self.batches, self.numbers, self.store, label)
        except stream.NoSequence:
            for side in (DENSE, PRUNED):
                self.store.drop(f"{label}.arguments.{side}")
            return None

    def _following(self, line: Stream | None) -> Stream | None:
        """A stream after the stacks before its own are pruned; None if the blocks are no sequence now."""
        try:
            if line is not None:
                line.follow(self.model)
        except stream.NoSequence:
            line.forget()  # type: ignore[union-attr]
            return None
        return line

    def _layers(self, stack: Stack) -> dict[str, Any]:
        """The layers to prune in a stack."""
        return {name: self._layer(name) for name in self.configs if stack.has(name)}

    def _layer(self, name: str) -> Any:
        return layer_of(self.model, name)


def pieces_of(batch: stream.Batch, ids: Any, most: int, places: Iterable[Any] = ()) -> list[stream.Batch]:
    """Sequences of a batch of token ids with `most` tokens each, or one: a device holds the activations of a piece.

    Tensors with a row for each sequence are cut; those of one row, or of one value for each position, all pieces get. A
    batch with others, with lists or objects, or without ids [sequences, tokens], stays whole: the first dim of a tensor
    without a name may be that of tokens. So does a batch of as many tokens as sequences. `ids`: its input_ids.

    `places`: ids in whose places features of images or sound stand. As many images as sequences may be two of one and
    none of another, so with such features a batch is cut only if each sequence has such ids: then each has one image.
    """
    (args, kwargs), whole = batch, [batch]
    leaves, given = [*args, *kwargs.values()], tensors_in(batch)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.is_complex():
        return whole
    count, tokens = ids.shape
    each = max(1, most // max(1, tokens))
    if count <= each or not all(isinstance(leaf, (Tensor, *stream.PLAIN)) for leaf in leaves):
        return whole
    shared = {id(x) for x in given if x.ndim == 0 or len(x) == 1 or (x.ndim == 1 and len(x) == tokens)}
    if any((id(x) not in shared and len(x) != count) or (x.ndim > 1 and x.shape[1] == count) for x in given):
        return whole
    features = [x for x in given if x.ndim > 2 and x.is_floating_point() and not _is_mask(x, tokens)]
    if features:
        having = [found for found in ((ids == each).any(1) for each in places) if bool(found.any())]
        if (
            not having
            or not all(bool(found.all()) for found in having)
            or any(id(x) in shared for x in features)
        ):
            return whole

    def part(leaf: Any, at: int) -> Any:
        return leaf[at : at + each] if isinstance(leaf, Tensor) and id(leaf) not in shared else leaf

    return [
        (tuple(part(leaf, at) for leaf in args), {name: part(leaf, at) for name, leaf in kwargs.items()})
        for at in range(0, count, each)
    ]


def _is_mask(x: Tensor, tokens: int) -> bool:
    """Whether a tensor has a number for each pair of so many positions, or for each position."""
    return x.shape[-1] == tokens and x.shape[-2] in (1, tokens)


def groups_of(layers: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[tuple[str, ...], int]:
    """The layers that `run` calls, in order, those with the same input together; and how often they are called."""
    calls: list[tuple[str, Tensor | None, int]] = []

    def look(name: str, layer: Any) -> RemovableHandle:
        alone = isinstance(layer, PackedLinear)  # whose two weights have other inputs

        def see(_: Any, args: Any, kwargs: Any) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            if is_functorch_wrapped_tensor(x):
                raise InvalidInput(f"{name} is called in a transform of torch.func; leave it dense by a rule")
            uncounted = alone or x.is_inference()  # whose writes are not counted
            calls.append((name, None if uncounted else x, 0 if uncounted else stream.version_of(x)))

        return (layer.experts if alone else layer).register_forward_pre_hook(see, with_kwargs=True)

    hooks = [look(name, layer) for name, layer in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    counts: dict[str, int] = {}
    groups: list[tuple[list[str], Tensor | None, int]] = []
    for name, x, version in calls:
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            continue
        if groups and x is not None and groups[-1][1] is x and groups[-1][2] == version:
            groups[-1][0].append(name)
        else:
            groups.append(([name], x, version))
    parts: dict[tuple[str, ...], int] = {}
    for names, *_ in groups:
        for count in dict.fromkeys(counts[name] for name in names):
            parts[tuple(name for name in names if counts[name] == count)] = count
    return parts


class TensorPlace(NamedTuple):
    """Where a tensor passes in a block: argument or result number `index` of a module, and whether it is a result."""

    module: str
    result: bool
    index: int


def watch(module: nn.Module, see: Callable[[bool, list[Tensor]], None]) -> list[RemovableHandle]:
    """Hooks that call see(False, arguments) and see(True, results) with the tensors of each call of a module."""
    return [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: see(False, tensors_in((args, kwargs))), with_kwargs=True
        ),
        module.register_forward_hook(lambda _, args, found: see(True, tensors_in(found))),
    ]


def inputs(
    block: nn.Module, layer: nn.Module, run: Callable[[], Any], calls: int, places: Iterable[TensorPlace] = ()
) -> tuple[list[list[Tensor]], dict[TensorPlace, Tensor]]:
    """The inputs of a layer called once by `run`, which then ends, or in all its calls; and tensors at places before.

    Layers of a block that is called in rounds are called several times, in each batch as often as it needs.
    """
    found: list[list[Tensor]] = []
    passed: dict[TensorPlace, Tensor] = {}

    def enter(result: bool, tensors: list[Tensor]) -> None:
        if not result:
            if calls == 1:
                found.append(tensors)
                raise stream.Stop
            found.append([each.clone() for each in tensors])  # what follows may write to them

    def note(place: TensorPlace) -> Callable[[bool, list[Tensor]], None]:
        def see(result: bool, tensors: list[Tensor]) -> None:
            if result == place.result and place.index < len(tensors):
                passed.setdefault(place, tensors[place.index])

        return see

    hooks = [hook for place in places for hook in watch(block.get_submodule(place.module), note(place))]
    hooks += watch(layer, enter)
    try:
        run()
    except stream.Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found, passed


def residuals_of(
    block: nn.Module,
    layers: Mapping[str, nn.Module],
    groups: Iterable[tuple[str, ...]],
    run: Callable[[], Any],
    real: Callable[[Tensor], Tensor] = lambda x: x,
) -> dict[str, TensorPlace]:
    """Where the residual of each layer passes: a tensor before it whose sum with its output is a tensor after it.

    Found by value, of what is `real` in them: layers called once, whose sums pass into a module, or out of the block.
    The residual passes before the group of the layer is called. Tensors that are written to after they pass are none.
    `run` runs twice, so that few tensors are held: at first some elements of each, then the candidates.
    """
    names = {id(module): name for name, module in block.named_modules()}
    widths = {len(weights_of(x)[0]) for x in layers.values() if not isinstance(x, PackedLinear)}
    samples = _passing(block, run, lambda _, x: _sample(x, real) if _may_be_added(x, widths) else None)
    sums: dict[str, list[tuple[int, int, int]]] = {}
    for name, first in ((name, group[0]) for group in groups for name in group):
        own, start = (
            [at for at, (place, _) in enumerate(samples) if place == (names.get(id(layers[each])), result, 0)]
            for each, result in ((name, True), (first, False))
        )  # none of a weight of packed experts
        y = samples[own[0]][1] if len(own) == 1 and start else None
        if y is not None:
            alike = [at for at, (_, x) in enumerate(samples) if x is not None and x.shape == y.shape]
            before, after = ([at for at in alike if at <= start[0]], [at for at in alike if at > own[0]])
            sums[name] = [
                (own[0], r, z)
                for z in after
                for r in before
                if _is_sum(y.values, samples[r][1].values, samples[z][1].values)
            ]
    held = {at for found in sums.values() for each in found for at in each}
    if not held:
        return {}
    passed = _passing(block, run, lambda at, x: (x, stream.version_of(x)) if at in held else None)
    if [place for place, _ in passed] != [place for place, _ in samples]:
        return {}

    def are_sum(each: tuple[int, int, int]) -> bool:
        (y, *_), (r, *_), (z, *_) = parts = [passed[at][1] for at in each]
        if r is y or z is y or any(stream.version_of(x) != version for x, version in parts):
            return False
        y, r, z = (real(x) for x in (y, r, z))
        return _is_sum(y, r, z) and bool((y.abs() > _room(y, r, z)).any())

    found = ((name, next(filter(are_sum, each), None)) for name, each in sums.items())
    return {name: passed[each[1]][0] for name, each in found if each is not None}


class _Sample(NamedTuple):
    """A tensor's shape with its device, and some of its elements."""

    shape: tuple[Any, ...]
    values: Tensor


def _may_be_added(x: Tensor, widths: set[int]) -> bool:
    """Whether x may be a part of a sum with an output of so many features: not a mask, nor sparse or nested."""
    plain = x.layout == torch.strided and not x.is_nested and x.is_floating_point() and x.element_size() > 1
    return plain and x.ndim > 0 and x.shape[-1] in widths and x.numel() > 0


def _sample(x: Tensor, real: Callable[[Tensor], Tensor]) -> _Sample:
    values = real(x).reshape(-1)
    step = len(values) // SAMPLED | 1  # odd, so that it goes through the columns
    at = torch.arange(0, len(values), step, device=x.device)
    return _Sample((x.shape, x.device), values[at])


def _passing(
    block: nn.Module, run: Callable[[], Any], keep: Callable[[int, Tensor], Any]
) -> list[tuple[TensorPlace, Any]]:
    """keep(number, tensor) of each tensor that passes in a block, in order, and its place."""
    passed: list[tuple[TensorPlace, Any]] = []

    def note(module: str) -> Callable[[bool, list[Tensor]], None]:
        def see(result: bool, tensors: list[Tensor]) -> None:
            for at, each in enumerate(tensors):
                passed.append((TensorPlace(module, result, at), keep(len(passed), each)))

        return see

    hooks = [hook for name, module in block.named_modules() for hook in watch(module, note(name))]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return passed


def _is_sum(y: Tensor, r: Tensor, z: Tensor) -> bool:
    """Whether z = y + r, in each element, but for rounding."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return bool(((z.to(wide) - y - r.to(wide)).abs() <= _room(y, r, z)).all())


def _room(y: Tensor, r: Tensor, z: Tensor) -> Tensor:
    """What rounding may change in a sum z = y + r."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return 4 * max(torch.finfo(x.dtype).eps for x in (y, r, z)) * (z.to(wide).abs() + r.to(wide).abs())


def _rows(x: Tensor) -> Tensor:
    """The rows [n, K] of inputs [..., K]."""
    return torch.atleast_2d(x).flatten(0, -2)


@contextmanager
def restored(layers: Iterable[Any]) -> Iterator[list[Any]]:
    """The weights and biases of layers are what they were if an error, or the user, ends what is done to them.

    Weights get other tensors, and biases are written to. Yields what is kept: once it is cleared, nothing is restored.
    """
    kept = []
    for layer in layers:
        is_packed = isinstance(layer, PackedLinear)
        owner = layer.experts if is_packed else layer
        names = (layer.name, f"{layer.name}_bias") if is_packed else ("weight", "bias")
        weight, bias = (owner._parameters.get(name) for name in names)
        kept.append((owner, names[0], weight.data, None))
        if bias is not None:
            kept.append((owner, names[1], bias.data, bias.data.clone()))
    try:
        yield kept
    except BaseException:
        for owner, name, data, values in kept:
            owner._parameters[name].data = data if values is None else data.copy_(values)
        raise


@contextmanager
def evaluated(model: nn.Module, *, compiled: bool = False) -> Iterator[None]:
    """The model in eval mode, without a cache of keys; afterwards as it was, by the names of its modules.

    What is compiled runs as it is written, because compiled blocks call no hooks; or `compiled`, to be timed.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    config = getattr(model, "config", None)
    cached = getattr(config, "use_cache", None)
    model.eval()
    if cached:
        config.use_cache = False  # type: ignore[union-attr]
    try:
        with nullcontext() if compiled else torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if cached:
            config.use_cache = cached  # type: ignore[union-attr]
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


def model_facts(model: nn.Module) -> list[Any]:
    """What a model is known by, as JSON: its tensors, and the classes and numbers of its modules."""
    named = {**model.state_dict(), **dict(model.named_buffers())}
    kinds = [
        [name, type(each).__module__, type(each).__qualname__, _attributes(each)]
        for name, each in model.named_modules()
    ]
    return [[*named], tree_facts([*named.values()]), kinds]


def tree_facts(tree: Any) -> list[Any]:
    """What a tree of arguments is known by, as JSON: its form, its tensors, and its plain leaves."""
    leaves, form = tree_flatten(tree)
    others = [_plain(each) for each in leaves if not isinstance(each, Tensor)]
    return [str(form), stream.checksum(each for each in leaves if isinstance(each, Tensor)), others]


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The numbers, texts and functions that a module has."""
    own = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    return {
        name: _plain(each)
        for name, each in own.items()
        if name != "training"
        and (isinstance(each, (bool, int, float, str, tuple)) or inspect.isroutine(each))
    }


def _plain(value: Any) -> Any:
    """A value that is no tensor, as JSON: as far as it is the same in each process."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, (*stream.PLAIN, complex, bytes, torch.dtype, torch.device)):
        return repr(value)
    if hasattr(value, "tobytes"):  # arrays of NumPy
        return zlib.crc32(value.tobytes())
    return getattr(value, "__qualname__", type(value).__qualname__)
