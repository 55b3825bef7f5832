"""`sparsify_` makes layers of a model sparse, in place, by a config or by rules; `densify_` undoes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import INT32_MAX
from sparsek.core.device import Card, card_named, card_of
from sparsek.core.errors import InvalidInput
from sparsek.core.tracing import outside_inference
from sparsek.models import auto, quality
from sparsek.models.auto import Auto, timed, wanted_card
from sparsek.models.config import (
    AUTO,
    LayerConfig,
    Rules,
    asked,
    check_rules,
    chosen_by,
    config_for,
    form_of,
    matches,
)
from sparsek.models.config import Auto as AutoConfig
from sparsek.models.report import LayerRow, Measured, ModelReport, detail_of, picture_of
from sparsek.models.stream import Batch, batches_of, device_of
from sparsek.nn.experts import PackedLinear, packed_names, repacked, routes_of, why_no_packed_fit
from sparsek.nn.replace import (
    Facts,
    adopt,
    dense_of,
    has_own_forward,
    is_linear,
    is_packed,
    layer_of,
    note,
    shape_of,
    swap,
    weight_of,
)
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats.base import check_finite
from sparsek.products.formats.pattern import block_sides, grid_of
from sparsek.products.formats.quantized import Quantized
from sparsek.products.ops.weight_formats import FP8, WeightFormat, stored_fraction

# The fewest blocks in a column and in a row of a weight: pruning fewer removes all of some outputs or inputs.
LEAST_BLOCKS = 2


@torch.no_grad()
@outside_inference
def sparsify_(
    model: nn.Module,
    config: LayerConfig | AutoConfig | Rules,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    card: str | None = None,
    tokens: int = 4096,
    skip_slower: bool = False,
    max_error: float | None = None,
    speedup: float | None = None,
    measure: Any = None,
) -> ModelReport:
    """Make the linear layers of a model sparse, in place.

    Takes torch.nn.Linear, transformers' Conv1D, and packed experts, whose weights are one Parameter. Names, training
    mode, requires_grad, hooks of layers, attributes, device and dtype stay; biases stay the same Parameters, weights
    become new ones: make the optimizer afterwards, and wrap the model, for example in DistributedDataParallel,
    afterwards. Stored values are those of largest norm or magnitude. Until the last layer is made, the dense layers are
    in memory too. An error leaves the model as it was.

    The report has a row for every layer with a weight matrix, and for each Parameter of packed experts. Skipped are
    tied weights and those with hooks, the output embedding and adapters such as LoRA's unless a rule names them,
    weights with fewer than 2x2 blocks, and layers of any other kind; their rows have the reason.

    A gated MLP, act(gate(x)) * up(x), computes both layers in one fused product if both are sparse, while nothing
    learns and no hook looks at its parts.

    Layers on the meta device get a random pattern, with as many blocks in each row, and no values: load a state dict,
    which has the pattern too.

    Args:
        model: The model.
        config: BlockSparse, SemiSparse, BlockSemiSparse, Float8, or "auto", with which the planner picks one of these
            for each layer; or rules, a dict of these by a glob of names ("*.mlp.*"), a type of module, or a predicate
            (module, name) -> bool. The first rule that matches a layer counts; None leaves it dense, and so do rules
            none of which matches.
        filter_fn: Called with a layer and its name; False leaves it dense.
        card: The name of a card, for example "h200", or "cuda": predict the times of products on it. "auto" takes by
            default the GPU of the model, else that of this machine, else the H200.
        tokens: The number of tokens of the predictions.
        skip_slower: Skip layers that are predicted to be slower than dense ones: on the `card`, by default the GPU of
            the weight, or the H200 for a weight elsewhere.
        max_error: With "auto": the largest relative error of a layer's outputs for normally distributed inputs; the
            fastest form within it is picked. Real inputs may do better or worse: see `sparsek.prune`.
        speedup: With "auto": the predicted speed of the products of these layers, all together, over dense ones; the
            forms that reach it with the least errors are picked.
        measure: A batch of the model: a tensor, a tuple of arguments or a dict of keyword arguments, on the model's
            device. The whole model is timed on it, dense and sparse in interleaved rounds, and so is each sparse layer
            on inputs of the same shape: "measured" in the report.

    Returns:
        The report; `str` of it is a table.

    Raises:
        InvalidInput: For a wrong config, a rule that matches no layer, weights with NaN or Inf, "auto" without a bound
            or on the meta device, a `speedup` that no choice reaches, and a batch that the model does not take.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> report = sk.sparsify_(model, sk.BlockSparse(block=32, keep=0.25))
        >>> [(row.name, row.format) for row in report.replaced]
        [('0', 'BSR 32 25 %')]
        >>> report.skipped[0].why_not
        'has 1x8 blocks of 32x32; at least 2x2 are needed'
    """
    check_model(model, filter_fn, "sparsify_")
    check_rules(config)
    arguments.flag("skip_slower", skip_slower)
    tokens = arguments.integer("tokens", tokens, 1, INT32_MAX)
    (batch,) = [((), {})] if measure is None else batches_of([measure], "measure")
    target = wanted_card(card)
    layers = layers_of(model)
    check_matches(config, layers)
    wanted = {name: config_for(config, name, layer) for name, layer in layers.items() if is_linear(layer)}
    planner = Auto.of(config, max_error, speedup, target, tokens, next(model.parameters(), None))
    target = target if planner is None else planner.card
    facts, rows, configs = Facts(model), [], {}
    for name, layer in layers.items():
        choice, is_named = wanted.get(name, (None, False))
        why = facts.why_not(name, layer, is_named)
        if name in wanted and choice is None:
            ruled = isinstance(config, Mapping) and any(matches(rule, name, layer) for rule in config)
            why = "is left dense by its rule" if ruled else "no rule matches it"
        elif not why and filter_fn is not None and not asked("filter_fn", filter_fn, layer, name):
            why = "is left dense by filter_fn"
        if choice == AUTO and not why and isinstance(layer, PackedLinear):
            why = auto.NO_EXPERTS
        if choice is not None and not why:
            configs[name] = choice
        rows.append(LayerRow(name, shape_of(layer), _format_of(layer), why_not=why))
    automatic = {name: layers[name] for name, each in configs.items() if each == AUTO}
    picks = {} if planner is None else _picks(planner, automatic)
    made: dict[str, Any] = {}
    for at, row in enumerate(rows):
        choice = configs.get(row.name)
        if row.name in picks:
            choice, why, error = picks[row.name]
            rows[at] = row = replace(
                row, **({"why_not": why} if choice is None else {"why": why, "error": error})
            )
        if choice is not None:
            rows[at], new = _replacement(row, layers[row.name], choice, target, tokens, skip_slower)
            if new is not None:
                made[row.name] = adopt(new, layers[row.name])
    report = ModelReport(tuple(rows), "" if target is None else target.name, tokens if target else 0)
    if measure is None or not made:
        swap(model, made)
        return report
    return _measured(report, model, made, batch)


def _measured(report: ModelReport, model: nn.Module, made: Mapping[str, Any], batch: Batch) -> ModelReport:
    """Swap the layers of a model, and add its measured times and theirs. An error leaves the model as it was."""
    card, dense = card_of(device_of(model)), quality.copied("the model", model, shared=True)
    old = {name: layer_of(dense, name) for name in made}
    single = {name: layer for name, layer in old.items() if not isinstance(layer, PackedLinear)}
    with quality.evaluated(dense):
        x = quality.inputs_of(dense, single, batch)
    before = swap(model, made)
    try:
        with quality.evaluated(dense, compiled=True), quality.evaluated(model, compiled=True):
            times = quality.seconds_of(dense, model, batch)
            found = {
                name: quality.seconds_of(old[name], made[name], ((each,), {})) for name, each in x.items()
            }
    except BaseException:
        swap(model, before)
        raise
    speeds = {name: dense / sparse for name, (dense, sparse) in found.items()}
    rows = tuple(replace(row, measured_speed=speeds.get(row.name)) for row in report.rows)
    return replace(report, rows=rows, measured=Measured(*times, card.name, "the model takes"))


def _picks(planner: Auto, layers: Mapping[str, Any]) -> dict[str, auto.Pick]:
    """What "auto" picks for layers."""
    options = {}
    for name, layer in layers.items():
        weight = weight_of(layer)
        if weight.is_meta:
            raise InvalidInput(
                f'{name} is on the meta device; "{AUTO}" needs the values of a weight, for its errors'
            )
        if weight.dtype in dtypes.FLOATS:
            with _about(name):
                check_finite("its weight", weight)
        errors = auto.error_of(weight, planner.card)
        options[name] = planner.options(weight, lambda each, w=weight: not why_no_fit(w, each), errors)
    return planner.choose(options) if options else {}


@torch.no_grad()
@outside_inference
def densify_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> list[str]:
    """Put dense layers with the stored values, and zeros elsewhere, in the place of sparse ones.

    A layer becomes a torch.nn.Linear, or the Conv1D or the Parameter of packed experts that it was. What `sparsify_`
    keeps, stays here too. An error leaves the model as it was.

    Args:
        model: The model.
        filter_fn: Called with a sparse layer and its name; False leaves it sparse.

    Returns:
        The names of the layers that became dense.

    Raises:
        InvalidInput: For a layer with an activation of its own, which dense layers have not, and inside a
            DistributedDataParallel.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256))
        >>> report = sk.sparsify_(model, sk.BlockSparse(block=32, keep=0.25))
        >>> sk.densify_(model)
        ['0']
        >>> model
        Sequential(
          (0): Linear(in_features=128, out_features=256, bias=True)
        )
    """
    check_model(model, filter_fn, "densify_")
    made: dict[str, Any] = {}
    of_layer: dict[int, Any] = {}
    learning = [each.requires_grad for each in model.parameters()]
    is_frozen = bool(learning) and not any(learning)
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, SparseLinear):
            continue
        if filter_fn is not None and not asked("filter_fn", filter_fn, layer, name):
            continue
        if id(layer) not in of_layer:
            if has_own_forward(layer):
                raise InvalidInput(
                    f"{name} has a forward of its own, as accelerate sets it: load the model without offloading, or "
                    "call accelerate.hooks.remove_hook_from_submodules(model) if all of it is in memory"
                )
            if layer._history.ranks() is not None:
                raise InvalidInput(
                    f"{name} is in a DistributedDataParallel, which keeps its old parameters: delete that first, or "
                    "densify_ a copy, copy.deepcopy(model)"
                )
            dense: Any = dense_of(name, layer, is_frozen)
            if is_packed(model, name):
                weight, holder = dense.weight, model.get_submodule(name.rpartition(".")[0])
                dense = repacked(holder, weight.detach(), weight.requires_grad)
                note(dense, weight)
            of_layer[id(layer)] = dense
        made[name] = of_layer[id(layer)]
    swap(model, made)
    return list(made)


def why_no_fit(weight: Tensor, config: LayerConfig) -> str:
    """Why a weight [M, K] does not fit a config; "" if it does."""
    if weight.dtype not in dtypes.FLOATS:
        return f"is of {weight.dtype}"
    if not weight.numel():
        return "is empty"
    block = getattr(chosen_by(config), "block", None)
    if block is not None:
        sides = block_sides(block)
        rows, columns = grid_of((weight.shape[0], weight.shape[1]), sides)
        if min(rows, columns) < LEAST_BLOCKS:
            least = f"{LEAST_BLOCKS}x{LEAST_BLOCKS}"
            return f"has {rows}x{columns} blocks of {sides[0]}x{sides[1]}; at least {least} are needed"
    return "; ".join(form_of(config).why_not(weight))


def _format_of(layer: Any) -> str:
    """The format of a layer that is sparse already; "" of others."""
    if not isinstance(layer, SparseLinear):
        return ""
    keep = 1.0
    if layer._block is not None:
        keep = len(layer.indices) / math.prod(grid_of((layer.out_features, layer.in_features), layer._block))
    return WeightFormat(layer._kind + FP8 * bool(layer._scaled), layer._block or 0, keep).name


def _replacement(
    row: LayerRow, old: Any, config: LayerConfig, card: Card | None, tokens: int, skip_slower: bool
) -> tuple[LayerRow, Any]:
    """The row of a layer, and the sparse layer; None with the reason against it."""
    dense, form = weight_of(old), form_of(config)
    of_one = dense[: old.out_features] if isinstance(old, PackedLinear) else dense
    why = why_no_fit(of_one, config)
    if not why and isinstance(old, PackedLinear):
        why = why_no_packed_fit(old, form)
    if why:
        return replace(row, why_not=why), None
    with _about(row.name):
        if not dense.is_meta:
            check_finite("its weight", dense)
        new = SparseLinear.from_dense(old, config)
    weight = new.weight
    kept = kept_share(weight)
    norm = None if dense.is_meta else kept_norm(weight, dense)
    found = replace(
        row,
        format=form.name,
        config=config.to_dict(),
        kept=kept,
        kept_norm=norm,
        picture=picture_of(weight),
        detail=detail_of(weight),
    )
    if skip_slower and card is None:
        card = card_of(dense.device) if dense.is_cuda else card_named("h200")
    if card is None:
        return found, new
    routes = routes_of(old.experts) if isinstance(old, PackedLinear) else 1
    found = timed(found, weight, dense.dtype, form, card, tokens, routes)
    if skip_slower and (found.speed or 0.0) < 1:
        why = f"with {tokens} tokens, {found.why}"
        if found.speed is not None:
            why = f"is predicted at {found.speed:.2f}x the speed of a dense one in {found.dtype}"
            why += f", with {tokens} tokens on {card.name}"
        times = {"seconds": found.seconds, "dense_seconds": found.dense_seconds, "dtype": found.dtype}
        return replace(row, why_not=why, why="", **times), None
    return found, new


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Errors with the name of the layer."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from None


def kept_share(weight: Any) -> float:
    """The share of a weight's values that is stored, without what blocks hold beyond its edge. At most one sync.

    On the meta device, where no pattern is known, all blocks count as whole.
    """
    inner = weight.matrix if isinstance(weight, Quantized) else weight
    pattern, share = getattr(inner, "pattern", None), stored_fraction(weight)
    if pattern is None or not pattern.is_ragged or not pattern.nnzb or inner.device.type == "meta":
        return min(1.0, share)
    places = pattern.block_rows, pattern.indices
    sides = [
        (n - at.long() * b).clamp(max=b)
        for n, at, b in zip(pattern.shape, places, pattern.block, strict=True)
    ]
    inside = float((sides[0] * sides[1]).sum()) / (pattern.nnzb * math.prod(pattern.block))
    return share * inside


def kept_norm(weight: Any, dense: Tensor) -> float:
    """The share of the norm that a sparse weight keeps, with FP8 values as they are."""
    kept = (weight.dequantize() if isinstance(weight, Quantized) else weight).kept_norm(dense)
    return min(1.0, kept)  # FP8 may round up


def check_matches(config: Any, layers: Mapping[str, Any]) -> None:
    """InvalidInput for a rule that matches no layer."""
    for rule in config if isinstance(config, Mapping) else ():
        by_place = isinstance(rule, (str, type))  # predicates are called with linear layers only
        if not any(matches(rule, name, x) for name, x in layers.items() if by_place or is_linear(x)):
            if isinstance(rule, str):  # those whose names are most alike first
                known = {name: x for name, x in layers.items() if not isinstance(x, nn.Embedding)} or layers
                alike = {name: -SequenceMatcher(None, rule, name).ratio() for name in known}
                shown, layers = repr(rule), dict(sorted(known.items(), key=lambda each: alike[each[0]]))
            else:
                shown = arguments.shown(rule)
            raise InvalidInput(f"the rule for {shown} matches no layer; layers are {_some(layers)}")


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The modules that have a weight matrix of their own, by name."""
    return dict(_layers(model))


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, layer in model.named_modules(remove_duplicate=False):
        packed = packed_names(layer)
        if packed:
            for own in packed:
                if own in layer._parameters:
                    yield f"{name}.{own}" if name else own, PackedLinear(layer, own)
            continue
        own = [each for each in layer._parameters.values() if each is not None]
        has_matrix = any(not nn.parameter.is_lazy(each) and each.ndim > 1 for each in own)
        if has_matrix or is_linear(layer) or isinstance(layer, SparseLinear):
            yield name, layer


def check_model(model: Any, filter_fn: Any, verb: str) -> None:
    """InvalidInput for anything whose layers cannot be replaced, and for a filter that is no function."""
    if filter_fn is not None and not callable(filter_fn):
        raise InvalidInput(
            f"filter_fn is {arguments.shown(filter_fn)}; it is called as filter_fn(module, name)"
        )
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"model is {arguments.shown(model)}; {verb} takes a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidInput(f"model is a torch.jit.ScriptModule; {verb} the model before it is compiled")
    if any(isinstance(each, nn.parallel.DistributedDataParallel) for each in model.modules()):
        raise InvalidInput(
            f"model is in a DistributedDataParallel, which keeps its old parameters: {verb} the model before, and wrap "
            "it afterwards"
        )
    if is_linear(model) or isinstance(model, SparseLinear):
        raise InvalidInput(
            f"model is itself a {type(model).__name__}, which cannot be replaced inside of it; see sk.nn"
        )


def _some(layers: Mapping[str, Any]) -> str:
    names = list(layers)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} others" if len(names) > 5 else "") or "none"
