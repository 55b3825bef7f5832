"""Calibrated pruning of a whole model: each block in turn, its layers in the order of their calls."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from sparsek.core import arguments, dtypes, memory
from sparsek.core.arguments import INT32_MAX
from sparsek.core.device import Card, card_of
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.files import StrPath
from sparsek.models import reconstruct as fitting
from sparsek.models import scores, stream
from sparsek.models.auto import Auto, error_of, timed, wanted_card
from sparsek.models.config import (
    AUTO,
    BlockSparse,
    Float8,
    LayerConfig,
    Rules,
    check_rules,
    form_of,
)
from sparsek.models.config import Auto as AutoConfig
from sparsek.models.layer import (
    Live,
    elements_of,
    expected_error,
    joined,
    keep_of,
    masked_sides,
    parts_of,
    pruned,
    round_inputs,
    rounded,
    select,
    sparse_layer,
    targets,
    updated,
    weights_of,
    why_not,
    with_keep,
)
from sparsek.models.passes import (
    Passes,
    Settings,
    TensorPlace,
    evaluated,
    model_facts,
    residuals_of,
    restored,
    tree_facts,
)
from sparsek.models.quality import copied, seconds_of
from sparsek.models.report import LayerRow, Measured, ModelReport, detail_of, picture_of
from sparsek.models.scores import Moments
from sparsek.models.sparsify import check_matches, check_model, layers_of
from sparsek.models.stream import DENSE, PRUNED, Stack, State, Stream, is_in
from sparsek.models.units import free_units
from sparsek.nn.experts import PackedLinear, repacked, routes_of
from sparsek.nn.replace import adopt, is_conv1d, layer_of, shape_of, swap
from sparsek.products.formats.pattern import grid_of
from sparsek.products.ops.choose import Option

PARTS = ("mask", "weight", "bias")  # of a finished layer
Method = Literal["magnitude", "wanda", "exact", "obs"]
Reconstruct = Literal["layer", "block"]
Budget = Literal["uniform", "sensitivity", "owl"]
Progress = Callable[[int, int, str], None]


def prune(
    model: nn.Module,
    config: LayerConfig | AutoConfig | Rules,
    *,
    calibration: Iterable[Any] | None = None,
    method: Method = "obs",
    reconstruct: Reconstruct | None = "layer",
    budget: Budget = "uniform",
    permute: bool = True,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    max_error: float | None = None,
    speedup: float | None = None,
    card: str | None = None,
    tokens: int = 4096,
    device: str | torch.device | None = None,
    folder: StrPath | None = None,
    progress: Progress | None = None,
) -> ModelReport:
    """Prune the linear layers of a model by their inputs on calibration data, and replace them by sparse layers.

    The model is changed in place. Its repeated blocks (the lists of alike modules, such as transformer blocks) are
    pruned one by one, on the inputs that the blocks before, already pruned, give them; layers outside of these stay
    dense unless a glob or predicate chooses them. Tied weights, output embeddings, layers that are never called with
    the calibration, and weights that do not fit the config stay dense too. A model without repeated blocks is one
    block. An error, such as a weight with NaN, leaves the blocks before it sparse, and the others as they were.

    Args:
        model: A torch.nn.Module. Its torch.nn.Linear and transformers' Conv1D layers are pruned, and packed experts,
            each on the tokens that reach it.
        config: BlockSparse, SemiSparse or BlockSemiSparse; Float8 of one, or of None, which is rounded after the
            reconstruction; or "auto", with which the planner picks one for each layer. Or rules, a dict of these by a
            glob of layer names, a type of layers or a predicate (layer, name). The first rule that matches decides;
            None leaves a layer dense.
        calibration: Batches, each a tensor, a tuple of arguments or a dict of keyword arguments of the model. Tokens
            outside a batch's `attention_mask` do not count. Only "magnitude" without reconstruction needs none.
        method: What is dropped: what has the smallest norm ("magnitude"), the smallest W^2 E[x^2] ("wanda",
            arXiv:2306.11695), the smallest output error ("exact"), or the smallest output error once the other weights
            of its row have made up for it ("obs", arXiv:2301.00774 by blocks), which updates these.
        reconstruct: None; "layer": least squares on the stored values and the bias, for the outputs of the dense model
            from the inputs of the pruned one; "block": after that, steps of Adam for the outputs of each whole block.
        budget: How `keep` is spread over layers: the same for each, more for those that lose most output by pruning
            ("sensitivity"), or more for blocks with outliers ("owl", arXiv:2310.05175); all in all as much is stored.
        permute: With "obs" and blocks, drop whole hidden units of MLPs and heads of attention first, those that the
            last layer misses least, and sort the others so that they fill blocks. In the first layers `keep` is then
            the share of the whole weight, and not of each block row. Where units may change places is found by trying.
        filter_fn: filter_fn(layer, name) is false for layers that stay dense.
        max_error: With "auto": the largest relative error of a layer's outputs on the calibration, in the dense model
            and after its reconstruction; the fastest form within it is picked. Layers at work together lose more.
        speedup: With "auto": the predicted speed of the products of these layers, all together, over dense ones; the
            forms that reach it with the least errors are picked.
        card: The name of a card, for example "h200", or "cuda": predict the times of products on it. "auto" takes by
            default the GPU of the model, else that of this machine, else the H200.
        tokens: The number of tokens of the predictions.
        device: Where one block at a time is computed; by default where it is.
        folder: A folder for activations and finished blocks, one file each. A run that was ended goes on there, with
            the same arguments and the dense model, to the same weights. None keeps activations in memory.
        progress: Called with the finished blocks, their number, and the name of the next one.

    Returns:
        The report: kept share, kept norm and output errors of each layer; `str` of it is a table, `html()` a page. On a
        GPU it has the measured times of the repeated blocks, dense and pruned.

    Raises:
        InvalidInput: For arguments that do not fit, a rule that matches no layer, a folder of another run, and a
            `speedup` that no choice reaches.
        InvalidFile: For damaged files in the folder.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        >>> report = sk.prune(model, sk.BlockSparse(block=32, keep=0.5), calibration=[torch.randn(256, 64)])
        >>> [row.kept for row in report.rows], type(model[0]).__name__
        ([0.5, 0.5], 'BlockSparseLinear')
    """
    check_model(model, filter_fn, "prune")
    check_rules(config)
    check_matches(config, layers_of(model))
    arguments.one_of("method", method, scores.METHODS)
    arguments.one_of("budget", budget, scores.BUDGETS)
    if reconstruct not in (None, *get_args(Reconstruct)):
        raise InvalidInput(f"reconstruct is {arguments.shown(reconstruct)}; use layer or block, or None")
    if any(each.is_meta for each in model.parameters()):
        raise InvalidInput(
            "the model is on the meta device, without values to prune by; load its weights first"
        )
    for name, each in model.named_parameters():
        if nn.parameter.is_lazy(each):
            raise InvalidInput(
                f"{name} has no values yet; call the model once, or load its weights, before prune"
            )
        if each.is_inference():
            raise InvalidInput(
                f"{name} was made under torch.inference_mode; make or copy the model outside of it"
            )
    arguments.flag("permute", permute)
    settings = Settings(
        method, reconstruct, budget, permute, None if device is None else arguments.device("device", device)
    )
    needs = method != "magnitude" or reconstruct is not None or budget != "uniform"
    if calibration is None and needs:
        raise InvalidInput(
            f"method {method!r} with reconstruct={reconstruct!r} and budget {budget!r} needs calibration batches; only "
            'method="magnitude", reconstruct=None, budget="uniform" needs none'
        )
    tokens = arguments.integer("tokens", tokens, 1, INT32_MAX)
    target = wanted_card(card)
    planner = Auto.of(config, max_error, speedup, target, tokens, next(model.parameters(), None))
    if planner is not None and budget != "uniform":
        raise InvalidInput(
            f'budget {budget!r} spreads the kept share, and "{AUTO}" picks it; use budget="uniform"'
        )
    batches = None if calibration is None else stream.batches_of(calibration)
    if batches is not None and not any(stream.has_tokens(model, each) for each in batches):
        raise InvalidInput("calibration has no token: its tensors are empty, or all of a mask is 0")
    with evaluated(model), torch.inference_mode(False), torch.no_grad():
        stacks = stream.stacks_of(model)
        configs, skipped = targets(model, config, filter_fn, stacks)
        run = _Run(model, configs, stacks, settings, batches, stream.working_folder(folder), planner)
        run.state.data["skipped"] |= skipped
        if budget != "uniform":
            run.spread(budget)
        if planner is not None:
            run.pick(planner)
        run.prune(progress or (lambda done, total, name: None))
        return run.report(target if planner is None else planner.card, tokens)


class _Run(Passes):
    """One run of `prune` over a model."""

    def __init__(
        self,
        model: nn.Module,
        configs: dict[str, Any],
        stacks: list[Stack],
        settings: Settings,
        batches: list[stream.Batch] | None,
        folder: Path | None,
        planner: Auto | None,
    ) -> None:
        super().__init__(model, configs, settings, batches, folder)
        self.stacks = [stack for stack in stacks if not stack.is_whole and batches and self._layers(stack)]
        self.state = State(folder, "" if folder is None else self._fingerprint(planner))
        self.whys: dict[str, str] = {}  # of picks
        self.rounding: list[RemovableHandle] = []

    def prune(self, progress: Progress) -> None:
        """Prune all blocks of all stacks, and then the layers outside of them."""
        total, done = sum(len(stack.blocks) for stack in self.stacks), 0
        left = set(self.configs)
        lines = [self._stream(stack, str(label)) for label, stack in enumerate(self.stacks)]
        for label, stack in enumerate([*self.stacks, Stack("", {"": self.model})]):
            names = [
                name for name in self._layers(stack) if name in left
            ]  # no layers, which are freed by blocks
            if label == len(lines):
                line = self._stream(stack, str(label)) if names else None
            else:
                line = self._following(lines[label]) if done else lines[label]
            if not names or (line is None and not stack.is_whole):
                continue
            for index, (name, block) in enumerate(stack.blocks.items()):
                progress(done, max(total, done + 1), name or type(block).__name__)
                own = {each: self._layer(each) for each in names if is_in(each, name)}
                if done < self.state.data["finished"]:
                    self._replace(self._read(done, own))
                    if line is not None:
                        line.drop(index)
                else:
                    self._prune_block(line, index, block, name, own, done)
                done += 1
                del own
                memory.trim()
            left -= set(names)
            if line is not None:
                line.close()
        progress(done, done, "")

    def report(self, card: Card | None, tokens: int) -> ModelReport:
        """Return what was done, with predictions for a card."""
        data, device = self.state.data, self.settings.device or stream.device_of(self.model)
        rows: list[LayerRow] = []
        try:
            for each in data["rows"]:
                row = LayerRow(**{**each, "shape": tuple(each["shape"])})
                layer, form = self._layer(row.name), form_of(self.configs[row.name])
                row = replace(row, picture=picture_of(layer.weight), detail=detail_of(layer.weight))
                if card is not None:
                    routes = routes_of(self.model.get_submodule(row.name.rpartition(".")[0]))
                    row = timed(row, layer.weight, layer._dtype, form, card, tokens, routes)
                rows.append(row)
            for name, why in data["skipped"].items():
                rows.append(LayerRow(name, shape_of(self._layer(name)), why_not=why))
            before, after = (float(each) for each in data["measured"])
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidFile(f"{self.state.path}: has rows that are none of a report: {error}") from error
        timing = Measured(before, after, card_of(device).name) if before and after else None
        return ModelReport(
            tuple(rows), "" if card is None else card.name, 0 if card is None else tokens, measured=timing
        )

    def spread(self, budget: str) -> None:
        """Let a budget choose the kept share of each layer, on the dense model."""
        if self.state.data["keep"] is None:

            def worth_of(name: str, part: tuple[Tensor, Tensor | None], moments: Moments) -> float:
                w, h = part[0].float(), moments.h[:-1, :-1]
                if budget == "owl":
                    return float(scores.outlier_share(w, h))
                chosen = select(w, self.configs[name], self.settings.method, moments, None, False)
                return float(scores.lost_share(w, chosen.elements, h))

            whole = self.stacks or [Stack("", {"": self.model})]
            names = [name for name in self.configs if any(stack.has(name) for stack in whole)]
            worth = self.survey("budget", worth_of, [name for name in names if keep_of(self.configs[name])])
            sizes = {name: self._layer(name).weight.numel() for name in worth}
            if budget == "owl":
                for block in (block for stack in whole for block in stack.blocks):
                    own = [name for name in worth if is_in(name, block)]
                    total = sum(sizes[name] for name in own)
                    worth |= dict.fromkeys(
                        own, sum(worth[name] * sizes[name] for name in own) / max(1, total)
                    )
            keeps = [keep_of(self.configs[name]) or 0.0 for name in worth]
            chosen = scores.budgets(keeps, list(worth.values()), list(sizes.values()), scores.SPREADS[budget])
            self.state.data["keep"] = dict(zip(worth, chosen, strict=True))
            self.state.save()
        for name, keep in self.state.data["keep"].items():
            if name not in self.configs:
                raise InvalidFile(f"{self.state.path}: has a kept share of {name}, which is not pruned")
            self.configs[name] = with_keep(self.configs[name], keep)

    def pick(self, planner: Auto) -> None:
        """Let the planner choose the config of each layer of "auto", on the dense model."""
        state, method, follow = self.state.data, self.settings.method, self.settings.reconstruct is not None
        wanted = [name for name, each in self.configs.items() if each == AUTO]

        def options(name: str, part: tuple[Tensor, Tensor | None], moments: Moments | None) -> list[Option]:
            weight, bias = part
            if moments is None:
                error = error_of(weight.detach(), planner.card)
            else:
                error = expected_error(name, weight, bias, method, moments, follow)
            return planner.options(weight.detach(), lambda each: not why_not(weight, each), error)

        if state["picks"] is None:
            if self.batches is None:
                found = {name: options(name, weights_of(self._layer(name)), None) for name in wanted}
            else:
                found = self.survey("auto", options, wanted)
            picks = planner.choose(found) if found else {}
            state["picks"] = {
                name: [None if each.config is None else each.config.to_dict(), each.why]
                for name, each in picks.items()
            }
            self.state.save()
        for name in wanted:
            try:
                config, why = state["picks"].get(name, (None, "is not called with the calibration"))
                chosen = None if config is None else BlockSparse.from_dict(config)
            except ValueError as error:
                raise InvalidFile(f"{self.state.path}: has no pick for {name}: {error}") from error
            if chosen is None:
                del self.configs[name]
                state["skipped"][name] = why
            else:
                self.configs[name], self.whys[name] = chosen, why

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
        state = self.state.data
        with restored(layers.values()) as before, self._computed(block):
            dense = None if line is None else copied(name or "the model", block)
            try:
                if line is None:
                    masks = {each: self._prune_layer(each, own, None, 0.0) for each, own in layers.items()}
                else:
                    masks = self._prune_layers(line, index, dense, block, name, layers)
            finally:
                while self.rounding:
                    self.rounding.pop().remove()
            finished = {
                each: (masks[each], *weights_of(own)) for each, own in layers.items() if each in masks
            }
            self._replace(finished)
            before.clear()
            left = [each for each in layers if each not in masks]
            state["skipped"] |= dict.fromkeys(left, "is not called with the calibration")
            if line is not None and dense is not None and masks and stream.device_of(block).type == "cuda":
                times = seconds_of(dense, block, line.arguments(index, DENSE, 0, stream.device_of(block)))
                state["measured"] = [a + b for a, b in zip(state["measured"], times, strict=True)]
        if self.folder is not None:
            parts = {
                f"{each}.{part}": value.detach().to("cpu").contiguous()
                for each, values in finished.items()
                for part, value in zip(PARTS, values, strict=True)
                if value is not None
            }
            stream.write_tensors(self.folder / _finished(done), parts)
        state["finished"] = done + 1
        self.state.save()
        if line is not None:
            line.drop(index)

    def _prune_layers(
        self, line: Stream, index: int, dense: Any, block: nn.Module, name: str, layers: dict[str, Any]
    ) -> dict[str, Tensor]:
        """Prune the layers of a block in the order of their calls; return their masks."""
        masks: dict[str, Tensor] = {}
        follow = self.settings.reconstruct is not None
        originals = {each: layer_of(dense, _within(each, name)) for each in layers}
        groups = self._groups(line, index, dense, originals)
        residuals: dict[str, TensorPlace] = {}
        if follow and groups:
            residuals = residuals_of(
                dense,
                originals,
                groups,
                lambda: line.call(dense, index, DENSE, line.fullest),
                lambda x: line.real(x, line.fullest),
            )
        units = []
        if self.settings.permute and self.settings.method == "obs":
            units = free_units(line, index, dense, originals, groups, self.configs)
        live: dict[str, Live] = {}
        for group, calls in groups.items():
            began = time.monotonic()
            for own in units:
                if own.makers[0] in group:
                    only = (own.taker,)
                    (behind,) = self._moments(
                        line, index, dense, block, originals, layers, only, groups[only], residuals
                    )
                    if behind is not None:
                        live |= own.sort(originals, layers, self.configs, behind, follow)
                    del behind  # which is large
            moments = self._moments(line, index, dense, block, originals, layers, group, calls, residuals)
            shared = (time.monotonic() - began) / len(group)
            for each in group:
                masks[each] = self._prune_layer(each, layers[each], moments, shared, live.get(each))
        self._advance(line, index, dense, DENSE)
        if self.settings.reconstruct == "block" and masks:
            self._fit(line, index, block, name, {each: layers[each] for each in masks}, masks)
        self._advance(line, index, block, PRUNED)
        return masks

    def _prune_layer(
        self,
        name: str,
        layer: Any,
        moments: Iterable[Moments | None] | None,
        before: float,
        live: Live | None = None,
    ) -> Tensor:
        """Prune one layer in place, as a dense weight; return the mask of its blocks or elements."""
        began = time.monotonic()
        config, (_, bias), parts = self.configs[name], weights_of(layer), parts_of(layer)
        follow = self.settings.reconstruct is not None
        found, lone = [], 0
        for part, each in zip(parts, [None] * len(parts) if moments is None else moments, strict=True):
            lone += each is None
            method = "magnitude" if each is None else self.settings.method
            with dtypes.as_given(part[0].device):
                update = updated(name, *part, config, method, each, follow, live)
                found.append(pruned(name, *part, config, each, update, live))
        made, why = joined(found), self.whys.get(name, "")
        if moments is not None and lone:
            some = f"{lone} of {len(parts)} experts" if isinstance(layer, PackedLinear) else "it"
            why = f"no token of the calibration reaches {some}, pruned by magnitude"
        # Not written in place: a loader may have mapped the old values, and pages that are written stay in memory.
        if bias is not None and made.bias is not None:
            bias.copy_(made.bias)
        if isinstance(layer, PackedLinear):
            layer.packed.data = repacked(layer.experts, made.weight, False).data
        else:
            layer.weight.data = made.weight.T if is_conv1d(layer) else made.weight
            if isinstance(config, Float8):  # for the layers after it, its inputs are rounded too
                self.rounding.append(layer.register_forward_pre_hook(round_inputs, with_kwargs=True))
        row = LayerRow(
            name,
            shape_of(layer),
            form_of(config).name,
            why=why,
            config=config.to_dict(),
            kept=made.kept,
            kept_norm=made.norm,
            error=made.error,
            error_after=made.error_after,
            pruning_seconds=before + time.monotonic() - began,
        )
        found = row.to_dict()
        del found["speed"]
        self.state.data["rows"].append(found)
        return made.mask

    def _fit(
        self,
        line: Stream,
        index: int,
        block: nn.Module,
        name: str,
        layers: dict[str, Any],
        masks: dict[str, Tensor],
    ) -> None:
        """Let the stored values of a block learn the outputs of the dense block."""

        pieces = [[*own] for _, own in groupby(range(len(line)), line.numbers.__getitem__)]

        squares = cache(lambda batch: self._squares(line, index + 1, pieces[batch]))

        loss = lambda batch: (lost(piece, squares(batch)) for piece in pieces[batch])  # noqa: E731

        def lost(piece: int, whole: dict[str, float]) -> Tensor:
            def fill(_: nn.Module, *given: Any) -> Any:  # gradients of weights would be NaN
                return tree_map_only(Tensor, lambda x: line.real(x, piece), given)

            wanted = line.get(index + 1, DENSE, piece)
            hooks = [each.register_forward_pre_hook(fill, with_kwargs=True) for each in filled]
            try:
                found = line.outputs(line.call(block, index, PRUNED, piece), index, piece)
            finally:
                for hook in hooks:
                    hook.remove()
            total = torch.zeros((), dtype=torch.float32, device=stream.device_of(block))
            for at, each in found.items():
                if at in whole and each.requires_grad | (not torch.is_grad_enabled()):
                    other = wanted[at].to(each.device).float()
                    square = line.real(each.float() - other, piece).square().sum()
                    total = total + square / max(whole[at], 1e-30)
            return total

        filled = [each for each in layers.values() if not isinstance(each, PackedLinear)]
        weights, biases = [], []
        for each, layer in layers.items():
            _, bias = weights_of(layer)
            mask, sides = masks[each], masked_sides(self.configs[each])
            if sides is not None:
                mask = elements_of(mask, sides, weights_of(layer)[0].shape)
            if isinstance(layer, PackedLinear):
                weights.append((layer.packed, repacked(layer.experts, mask, False).data))
            else:
                weights.append((layer.weight, mask.T if is_conv1d(layer) else mask))
            biases += [] if bias is None else [bias]

        def finish() -> None:
            for each, layer in layers.items():
                if isinstance(self.configs[each], Float8):
                    for weight, _ in parts_of(layer):
                        weight.copy_(rounded(weight))

        fitting.fit_block(name or type(block).__name__, weights, biases, loss, len(pieces), finish)

    def _read(self, done: int, layers: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        """Mask, weight and bias of the layers of a block that a run before has pruned."""
        assert self.folder is not None
        path = self.folder / _finished(done)
        found, made = stream.read_tensors(path), {}
        for name, layer in layers.items():
            if name in self.state.data["skipped"]:
                continue
            w, bias = weights_of(layer)
            sides = masked_sides(self.configs[name])
            shape = w.shape if sides is None else grid_of((len(w), w.shape[1]), sides)
            wanted = [(torch.bool, torch.Size(shape)), (w.dtype, w.shape)]
            wanted += [] if bias is None else [(bias.dtype, bias.shape)]
            parts: list[Tensor] = []
            for part, (dtype, sides) in zip(PARTS, wanted, strict=False):
                each = found.get(f"{name}.{part}")
                if each is None or (each.dtype, each.shape) != (dtype, sides):
                    raise InvalidFile(
                        f"{path}: {name}.{part} must be {dtype} {list(sides)}; use another folder"
                    )
                parts.append(each.to(w.device))
            made[name] = (parts[0], parts[1], None if bias is None else parts[2])
        return made

    def _replace(self, finished: Mapping[str, tuple[Tensor, Tensor, Tensor | None]]) -> None:
        """Put sparse layers of (mask, weight, bias) in the places of dense ones, all or none."""
        made, biases = {}, []
        for name, (mask, w, bias) in finished.items():
            old = self._layer(name)
            new = sparse_layer(w, mask, None if isinstance(old, PackedLinear) else bias, self.configs[name])
            made[name] = adopt(new, old)
            biases += [] if bias is None else [(weights_of(old)[1], bias)]
        for own, bias in biases:
            if own is not bias:
                own.copy_(bias)
        swap(self.model, made)

    def _fingerprint(self, planner: Auto | None) -> str:
        """What a folder is of: the model, configs, arguments and calibration."""
        weights, data = model_facts(self.model), tree_facts(self.batches)
        configs = {
            name: each if isinstance(each, str) else each.to_dict() for name, each in self.configs.items()
        }
        options: list[Any] = [self.settings.method, self.settings.reconstruct, self.settings.budget]
        options.append(self.settings.permute)
        if planner is not None:
            options += [str((planner.max_error, planner.speedup, planner.card.name, planner.tokens))]
        text = json.dumps([configs, options, weights, data])
        return hashlib.sha256(text.encode()).hexdigest()


def _within(name: str, block: str) -> str:
    return name[len(block) + 1 :] if block else name


def _finished(done: int) -> str:
    return f"finished-{done:05d}.safetensors"
