"""Calibrated pruning of a whole model: each block in turn, its layers in the order of their calls."""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidFile, InvalidInput, first_line
from sparsek.core.files import StrPath
from sparsek.models import reconstruct as fitting
from sparsek.models import scores, stream
from sparsek.models.config import BlockSparse, Config, Rules, SemiSparse, check_rules
from sparsek.models.layer import (
    elements_of,
    keep_of,
    select,
    sparse_layer,
    targets,
    weights_of,
    with_keep,
)
from sparsek.models.scores import Moments
from sparsek.models.stream import DENSE, PRUNED, ActivationStore, Stack, State, Stream, TensorPlace, is_in
from sparsek.nn.replace import adopt, is_conv1d, swap
from sparsek.products.formats.pattern import block_sides, grid_of

Method = Literal["magnitude", "wanda", "exact", "obs"]
Reconstruct = Literal["layer", "block"]
Budget = Literal["uniform", "sensitivity", "owl"]
Progress = Callable[[int, int, str], None]
COLUMNS = ("layer", "kept", "norm", "error", "after", "seconds")


@dataclass(frozen=True)
class PruneRow:
    """What became of one layer.

    Attributes:
        layer: Its name in the model.
        config: Its config, as JSON.
        keep: The share of its elements that is stored.
        norm: The norm of the stored elements over that of all, before any update.
        error: |y - y'| / |y| on the calibration, y of the dense model, y' of the pruned one before weights are updated;
            None without calibration.
        error_after: The same after the update and the reconstruction by layer.
        seconds: The time that it took.
    """

    layer: str
    config: dict[str, Any]
    keep: float
    norm: float
    error: float | None
    error_after: float | None
    seconds: float


@dataclass(frozen=True)
class PruneReport:
    """What `prune` did, as a table when printed.

    Attributes:
        rows: One for each pruned layer, in the order of the work.
        skipped: The layers that stay dense, with the reason.
    """

    rows: tuple[PruneRow, ...]
    skipped: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {"rows": [asdict(row) for row in self.rows], "skipped": dict(self.skipped)}

    def __str__(self) -> str:
        def share(x: float | None) -> str:
            return "-" if x is None else f"{x:.3f}"

        lines = [
            (
                row.layer,
                share(row.keep),
                share(row.norm),
                share(row.error),
                share(row.error_after),
                f"{row.seconds:.1f}",
            )
            for row in self.rows
        ]
        widths = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
        table = [
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in (COLUMNS, *lines)
        ]
        return "\n".join([*table, *(f"{name}: dense, {why}" for name, why in self.skipped.items())])


@dataclass
class Settings:
    """The arguments of a run."""

    method: str
    reconstruct: str | None
    budget: str
    device: torch.device | None


def prune(
    model: nn.Module,
    config: Config | Rules,
    *,
    calibration: Iterable[Any] | None = None,
    method: Method = "obs",
    reconstruct: Reconstruct | None = "layer",
    budget: Budget = "uniform",
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    device: str | torch.device | None = None,
    folder: StrPath | None = None,
    progress: Progress | None = None,
) -> PruneReport:
    """Prune the linear layers of a model by their inputs on calibration data, and replace them by sparse layers.

    The model is changed in place. Its repeated blocks (the lists of alike modules, such as transformer blocks) are
    pruned one by one, on the inputs that the blocks before, already pruned, give them; layers outside of these stay
    dense unless a glob or predicate chooses them. Tied weights, output embeddings, layers that are never called with
    the calibration, and weights that do not fit the config stay dense too. A model without repeated blocks is one
    block.

    Args:
        model: A torch.nn.Module. Its torch.nn.Linear and transformers' Conv1D layers are pruned.
        config: BlockSparse, SemiSparse or BlockSemiSparse; or rules, a dict of them by a glob of layer names, a type of
            layers or a predicate (layer, name). The first rule that matches decides; None leaves a layer dense.
        calibration: Batches, each a tensor, a tuple of arguments or a dict of keyword arguments of the model. Tokens
            outside a batch's `attention_mask` do not count. Only "magnitude" without reconstruction needs none.
        method: What is dropped: what has the smallest norm ("magnitude"), the smallest W^2 E[x^2] ("wanda",
            arXiv:2306.11695), the smallest output error ("exact"), or the smallest output error once the other weights
            of its row have made up for it ("obs", arXiv:2301.00774 by blocks), which updates these.
        reconstruct: None; "layer": least squares on the stored values and the bias, for the outputs of the dense model
            from the inputs of the pruned one; "block": after that, steps of Adam for the outputs of each whole block.
        budget: How `keep` is spread over layers: the same for each, more for those that lose most output by pruning
            ("sensitivity"), or more for blocks with outliers ("owl", arXiv:2310.05175); all in all as much is stored.
        filter_fn: filter_fn(layer, name) is false for layers that stay dense.
        device: Where one block at a time is computed; by default where it is.
        folder: A folder for activations and finished blocks, one file each. A run that was ended goes on there, with
            the same arguments and the dense model, to the same weights. None keeps activations in memory.
        progress: Called with the finished blocks, their number, and the name of the next one.

    Returns:
        A PruneReport: kept share, kept norm and output errors of each layer.

    Raises:
        InvalidInput: For arguments that do not fit, and for a folder of another run.
        InvalidFile: For damaged files in the folder.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> report = sk.prune(model, sk.BlockSparse(block=32, keep=0.5), calibration=[torch.randn(256, 64)])
        >>> [row.keep for row in report.rows], type(model[0]).__name__
        ([0.5, 0.5], 'BlockSparseLinear')
    """
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_rules(config)
    arguments.one_of("method", method, scores.METHODS)
    arguments.one_of("budget", budget, scores.BUDGETS)
    if reconstruct is not None:
        arguments.one_of("reconstruct", reconstruct, get_args(Reconstruct))
    if filter_fn is not None and not callable(filter_fn):
        raise InvalidInput(
            f"filter_fn is {arguments.shown(filter_fn)}; it must be a function of (layer, name)"
        )
    if any(each.is_meta for each in model.parameters()):
        raise InvalidInput(
            "the model is on the meta device, without values to prune by; load its weights first"
        )
    settings = Settings(
        method, reconstruct, budget, None if device is None else arguments.device("device", device)
    )
    needs = method != "magnitude" or reconstruct is not None or budget != "uniform"
    if calibration is None and needs:
        raise InvalidInput(
            f"method {method!r} with reconstruct={reconstruct!r} and budget {budget!r} needs calibration batches; only "
            'method="magnitude", reconstruct=None, budget="uniform" needs none'
        )
    batches = None if calibration is None else stream.batches_of(calibration)
    with stream.evaluated(model), torch.inference_mode(False), torch.no_grad():
        stacks = stream.stacks_of(model)
        configs, skipped = targets(model, config, filter_fn, stacks)
        run = _Run(model, configs, stacks, settings, batches, stream.working_folder(folder))
        run.state.data["skipped"] |= skipped
        if budget != "uniform":
            run.spread(budget)
        run.prune(progress or (lambda done, total, name: None))
        return run.report()


class _Run:
    """One run of `prune` over a model."""

    def __init__(
        self,
        model: nn.Module,
        configs: dict[str, Config],
        stacks: list[Stack],
        settings: Settings,
        batches: list[stream.Batch] | None,
        folder: Path | None,
    ) -> None:
        self.model, self.configs, self.settings, self.batches = model, configs, settings, batches
        self.folder, self.store = folder, ActivationStore(folder)
        self.stacks = [stack for stack in stacks if stack.name and batches and self._layers(stack)]
        self.state = State(folder, "" if folder is None else self._fingerprint())

    def prune(self, progress: Progress) -> None:
        """Prune all blocks of all stacks, and then the layers outside of them."""
        total, done = sum(len(stack.blocks) for stack in self.stacks), 0
        left = dict(self.configs)
        for label, stack in enumerate([*self.stacks, Stack("", {"": self.model})]):
            layers = {name: layer for name, layer in self._layers(stack).items() if name in left}
            line = self._stream(stack, str(label)) if layers else None
            if not layers or (line is None and stack.name):
                continue
            for index, (name, block) in enumerate(stack.blocks.items()):
                progress(done, max(total, done + 1), name or type(block).__name__)
                own = {each: layer for each, layer in layers.items() if is_in(each, name)}
                if done < self.state.data["finished"]:
                    self._restore(done, own)
                    if line is not None:
                        line.drop(index)
                else:
                    self._prune_block(line, index, block, name, own, done)
                done += 1
            for name in layers:
                del left[name]
            if line is not None:
                line.close()
        progress(done, done, "")

    def report(self) -> PruneReport:
        """Return what was done."""
        try:
            rows = tuple(PruneRow(**row) for row in self.state.data["rows"])
        except TypeError as error:
            raise InvalidFile(f"{self.state.path}: has rows that are none of a report: {error}") from error
        return PruneReport(rows, dict(self.state.data["skipped"]))

    def spread(self, budget: str) -> None:
        """Let a budget choose the kept share of each layer, on the dense model."""
        if self.state.data["keep"] is None:
            worth: dict[str, float] = {}
            for label, stack in enumerate(self.stacks or [Stack("", {"": self.model})]):
                line = self._stream(stack, f"budget-{label}")
                if line is not None:
                    for index, (name, block) in enumerate(stack.blocks.items()):
                        worth |= self._worth(line, index, block, name, budget)
                    line.close()
            keeps = [keep_of(self.configs[name]) for name in worth]
            sizes = [self._layer(name).weight.numel() for name in worth]
            chosen = scores.budgets(keeps, list(worth.values()), sizes, scores.SPREADS[budget])
            self.state.data["keep"] = dict(zip(worth, chosen, strict=True))
            self.state.save()
        for name, keep in self.state.data["keep"].items():
            if name not in self.configs:
                raise InvalidFile(f"{self.state.path}: has a kept share of {name}, which is not pruned")
            self.configs[name] = with_keep(self.configs[name], keep)

    def _worth(self, line: Stream, index: int, block: nn.Module, name: str, budget: str) -> dict[str, float]:
        """How much a layer of a block needs its weights, and the dense outputs of the block for the next one."""
        layers = {each: layer for each, layer in self._layers(line.stack).items() if is_in(each, name)}
        layers = {
            each: layer for each, layer in layers.items() if not isinstance(self.configs[each], SemiSparse)
        }
        found: dict[str, Tensor] = {}
        with self._computed(block):
            for group, calls in self._groups(line, index, block, layers).items():
                moments = self._moments(line, index, block, block, layers, layers, group, calls, {})
                for each in group:
                    w, h = weights_of(layers[each])[0].float(), moments.h[:-1, :-1]
                    if budget == "owl":
                        found[each] = scores.outlier_share(w, h)
                    else:
                        chosen = select(w, self.configs[each], self.settings.method, moments, None, False)
                        found[each] = scores.lost_share(w, chosen.elements, h)
            self._advance(line, index, block, DENSE)
        line.drop(index)
        values = {each: float(value) for each, value in found.items()}
        if budget == "owl" and values:
            sizes = {each: layers[each].weight.numel() for each in values}
            whole = sum(values[each] * sizes[each] for each in values) / sum(sizes.values())
            return dict.fromkeys(values, whole)
        return values

    def _prune_block(
        self,
        line: Stream | None,
        index: int,
        block: nn.Module,
        name: str,
        layers: dict[str, Any],
        done: int,
    ) -> None:
        """Prune the layers of one block, replace them, and save what was done."""
        finished: dict[str, Tensor] = {}
        state = self.state.data
        with self._computed(block):
            masks: dict[str, Tensor] = {}
            if line is None:
                for each, layer in layers.items():
                    masks[each] = self._prune_layer(each, layer, None)
            else:
                dense = _copied(name, block)
                originals = {each: dense.get_submodule(_within(each, name)) for each in layers}
                groups = self._groups(line, index, dense, originals)
                residuals: dict[str, TensorPlace] = {}
                if self.settings.reconstruct is not None and groups:
                    residuals = stream.residuals_of(
                        dense, originals, lambda: line.call(dense, index, DENSE, 0)
                    )
                for group, calls in groups.items():
                    began = time.monotonic()
                    moments = self._moments(
                        line, index, dense, block, originals, layers, group, calls, residuals
                    )
                    shared = (time.monotonic() - began) / len(group)
                    for each in group:
                        with dtypes.as_given(moments.h.device):
                            masks[each] = self._prune_layer(each, layers[each], moments, shared)
                self._advance(line, index, dense, DENSE)
                if self.settings.reconstruct == "block" and masks:
                    self._fit(line, index, block, {each: layers[each] for each in masks}, masks)
                self._advance(line, index, block, PRUNED)
                del dense
            for each in layers:
                if each not in masks:
                    state["skipped"][each] = "is not called with the calibration"
                    continue
                w, bias = weights_of(layers[each])
                finished[f"{each}.weight"], finished[f"{each}.mask"] = w, masks[each]
                if bias is not None:
                    finished[f"{each}.bias"] = bias
                self._replace(each, w, masks[each], bias)
        if self.folder is not None:
            parts = {each: part.detach().to("cpu").contiguous() for each, part in finished.items()}
            stream.write_tensors(self.folder / _finished(done), parts)
        state["finished"] = done + 1
        self.state.save()
        if line is not None:
            line.drop(index)

    def _prune_layer(
        self, name: str, layer: nn.Module, moments: Moments | None, before: float = 0.0
    ) -> Tensor:
        """Prune one layer in place, as a dense weight; return the mask of its blocks or elements."""
        began = time.monotonic()
        config, (weight, bias) = self.configs[name], weights_of(layer)
        method, follow = self.settings.method, self.settings.reconstruct is not None
        w = weight.detach().clone()
        if not bool(w.isfinite().all() & (moments is None or moments.h.isfinite().all())):
            raise InvalidInput(f"{name}: its weight, or its inputs on the calibration, have NaN or Inf")
        wide = w.to(scores.solver_dtype(w.shape[1]))
        fit = None
        if moments is not None and (follow or method == "obs"):
            fit = fitting.quadratic(wide, bias, moments, name, follow)
        mask, elements, new = select(wide, config, method, moments, fit, follow)
        pruned, new = w.masked_fill(~elements, 0), new.masked_fill(~elements, 0)
        new_bias = bias if fit is None else fit.bias_for(new)
        weight.copy_(new)
        if bias is not None and new_bias is not None:
            new_bias = new_bias.to(bias.dtype)
        error = after = None
        if moments is not None:
            error, after = (
                float(fitting.relative_error(a, b, w, bias, moments, name))
                for a, b in ((pruned, bias), (weight, new_bias))
            )
        if bias is not None and new_bias is not None:
            bias.copy_(new_bias)
        whole = wide.norm().clamp(min=torch.finfo(wide.dtype).tiny)
        norm = float(wide.masked_fill(~elements, 0).norm() / whole)
        seconds = before + time.monotonic() - began
        kept = float(elements.to(torch.float64).mean())
        row = PruneRow(name, config.to_dict(), kept, norm, error, after, seconds)
        self.state.data["rows"].append(asdict(row))
        return mask

    def _fit(
        self,
        line: Stream,
        index: int,
        block: nn.Module,
        layers: dict[str, Any],
        masks: dict[str, Tensor],
    ) -> None:
        """Let the stored values of a block learn the outputs of the dense block."""

        def loss(batch: int) -> Tensor:
            wanted = line.get(index + 1, DENSE, batch)
            found = line.outputs(line.call(block, index, PRUNED, batch), index, batch)
            total = torch.zeros((), dtype=torch.float32, device=stream.device_of(block))
            for at, each in found.items():
                if (
                    each.is_floating_point()
                    and each.requires_grad | (not torch.is_grad_enabled())
                    and each.ndim > 1
                ):
                    other = wanted[at].to(each.device).float()
                    rows = line.rows(each, batch).view(*each.shape[:-1], 1)
                    lost = (each.float() - other).square() * rows
                    total = total + lost.sum() / (other.square() * rows).sum().clamp(min=1e-30)
            return total

        weights, biases = [], []
        for name, layer in layers.items():
            _, bias = weights_of(layer)
            mask, config = masks[name], self.configs[name]
            if isinstance(config, BlockSparse):
                mask = elements_of(mask, block_sides(config.block), weights_of(layer)[0].shape)
            weights.append((layer.weight, mask.T if is_conv1d(layer) else mask))
            biases += [] if bias is None else [layer.bias]
        fitting.fit_block(weights, biases, loss, len(line))

    def _groups(
        self, line: Stream, index: int, block: nn.Module, layers: dict[str, Any]
    ) -> dict[tuple[str, ...], int]:
        """The layers of a block in the order of their calls, those with one input together, and calls of each."""
        found: dict[tuple[str, ...], int] = {}
        left = dict(layers)
        for batch in range(len(line)):
            if left:
                more = stream.groups_of(left, lambda batch=batch: line.call(block, index, DENSE, batch))
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
    ) -> Moments:
        """The moments of the inputs of a group of layers, of the dense block and of the pruned one."""
        first = group[0]
        weights = {name: weights_of(originals[name]) for name in group}
        places = {name: residuals[name] for name in group if name in residuals}
        weight = weights[first][0]
        moments = Moments(weight.shape[1], group, weight.device)
        for batch in range(len(line)):
            sides = [
                stream.inputs(
                    module, own[first], partial(line.call, module, index, side, batch), calls, places.values()
                )
                for module, own, side in ((dense, originals, DENSE), (block, layers, PRUNED))
                if side == DENSE or block is not dense
            ]
            (theirs, there), (ours, here) = sides[0], sides[-1]
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
        return moments.mean()

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
        return self.model.get_submodule(name)

    def _restore(self, done: int, layers: dict[str, Any]) -> None:
        """Replace the layers of a block by those of a run before."""
        assert self.folder is not None
        path = self.folder / _finished(done)
        found = stream.read_tensors(path)
        for name, layer in layers.items():
            if name in self.state.data["skipped"]:
                continue
            w, bias = weights_of(layer)
            config = self.configs[name]
            shape = (
                w.shape
                if not isinstance(config, BlockSparse)
                else grid_of((len(w), w.shape[1]), block_sides(config.block))
            )
            wanted = {"weight": (w.dtype, w.shape), "mask": (torch.bool, torch.Size(shape))}
            wanted |= {} if bias is None else {"bias": (bias.dtype, bias.shape)}
            parts: dict[str, Tensor] = {}
            for part, (dtype, sides) in wanted.items():
                each = found.get(f"{name}.{part}")
                if each is None or (each.dtype, each.shape) != (dtype, sides):
                    raise InvalidFile(
                        f"{path}: {name}.{part} must be {dtype} {list(sides)}; use another folder"
                    )
                parts[part] = each.to(w.device)
            self._replace(name, parts["weight"], parts["mask"], parts.get("bias"))

    def _replace(self, name: str, w: Tensor, mask: Tensor, bias: Tensor | None) -> None:
        """Put a sparse layer in the place of a dense one."""
        old = self._layer(name)
        made = sparse_layer(w, mask, bias, self.configs[name])
        if bias is not None and bias is not old.bias:
            old.bias.copy_(bias)
        swap(self.model, {name: adopt(made, old)})

    def _fingerprint(self) -> str:
        """What a folder is of: weights, configs, arguments and calibration."""
        weights = stream.checksum(self._layer(name).weight for name in self.configs)
        leaves = tree_leaves(self.batches)
        data = stream.checksum(each for each in leaves if isinstance(each, Tensor))
        configs = {name: config.to_dict() for name, config in self.configs.items()}
        text = json.dumps(
            [configs, self.settings.method, self.settings.reconstruct, self.settings.budget, weights, data]
        )
        return hashlib.sha256(text.encode()).hexdigest()


def _copied(name: str, block: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(block)
    except (RuntimeError, TypeError) as error:  # weights that old parametrizations compute, locks, files
        raise InvalidInput(f"{name or 'the model'} cannot be copied: {first_line(error)}") from error


def _within(name: str, block: str) -> str:
    return name[len(block) + 1 :] if block else name


def _finished(done: int) -> str:
    return f"finished-{done:05d}.safetensors"
