"""`sparsify_` makes layers of a model sparse, in place, by a config or by rules; `densify_` undoes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import INT32_MAX
from sparsek.core.device import Card, card_named, card_of
from sparsek.core.errors import InvalidInput, Unsupported
from sparsek.core.tracing import outside_inference, saveable
from sparsek.models.config import (
    Config,
    Float8,
    LayerConfig,
    Rules,
    check_rules,
    config_for,
    matches,
)
from sparsek.models.report import LayerRow, SparsifyReport
from sparsek.nn.replace import Facts, Origin, adopt, is_conv1d, is_linear, swap, weight_of
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats.base import check_finite
from sparsek.products.formats.pattern import block_sides, grid_of
from sparsek.products.formats.quantized import Quantized
from sparsek.products.ops.weight_formats import FP8, WeightFormat, predict, stored_fraction

# The fewest blocks in a column and in a row of a weight: pruning fewer removes all of some outputs or inputs.
LEAST_BLOCKS = 2


@torch.no_grad()
@outside_inference
def sparsify_(
    model: nn.Module,
    config: LayerConfig | Rules,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    *,
    card: str | None = None,
    tokens: int = 4096,
    skip_slower: bool = False,
) -> SparsifyReport:
    """Make the linear layers of a model sparse, in place.

    Takes torch.nn.Linear and transformers' Conv1D. Names, training mode, requires_grad, forward and backward hooks,
    device and dtype stay; biases stay the same Parameters, and weights become new ones: make the optimizer afterwards,
    and wrap the model, for example in DistributedDataParallel, afterwards. Stored values are those of largest norm or
    magnitude. Until the last layer is made, the dense layers are in memory too. An error leaves the model as it was.

    The report has a row for every layer with a weight matrix, and why layers were skipped: tied weights, the output
    embedding unless a rule names it, weights with fewer than 2x2 blocks, and layers of any other kind.

    Layers on the meta device get a random pattern, with as many blocks in each row, and no values: load a state dict,
    which has the pattern too.

    Args:
        model: The model.
        config: BlockSparse, SemiSparse, BlockSemiSparse or Float8; or rules, a dict of these by a glob of names
            ("*.mlp.*"), a type of module, or a predicate (module, name) -> bool. The first rule that matches a layer
            counts; None leaves it dense, and so do rules none of which matches.
        filter_fn: Called with a layer and its name; False leaves it dense.
        card: The name of a card, for example "h200": predict the times of products on it.
        tokens: The number of tokens of the predictions.
        skip_slower: Skip layers that are predicted to be slower than dense ones: on the `card`, by default the GPU of
            the weight, or the H200 for a weight elsewhere.

    Returns:
        The report; `str` of it is a table.

    Raises:
        InvalidInput: For a wrong config, a rule that matches no layer, and weights with NaN or Inf.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
        >>> report = sk.sparsify_(model, sk.BlockSparse(block=32, keep=0.25))
        >>> [(row.name, row.format) for row in report.replaced]
        [('0', 'BSR 32 25 %')]
        >>> report.skipped[0].why_not
        'has 1x8 blocks of 32x32; at least 2x2 are needed'
    """
    _check_model(model, filter_fn, "sparsify_")
    check_rules(config, get_args(LayerConfig))
    arguments.flag("skip_slower", skip_slower)
    tokens = arguments.integer("tokens", tokens, 1, INT32_MAX)
    target = None if card is None else card_named(card)
    layers = dict(_layers(model))
    wanted = {name: config_for(config, name, layer) for name, layer in layers.items() if is_linear(layer)}
    if isinstance(config, Mapping):
        for rule in config:
            by_place = isinstance(rule, (str, type))  # predicates are called with linear layers only
            if not any(matches(rule, name, layers[name]) for name in (layers if by_place else wanted)):
                shown = repr(rule) if isinstance(rule, str) else arguments.shown(rule)
                raise InvalidInput(f"the rule for {shown} matches no layer; layers are {_some(layers)}")
    facts, rows, made = Facts(model), [], {}
    for name, layer in layers.items():
        choice, is_named = wanted.get(name, (None, False))
        why = facts.why_not(name, layer, is_named)
        if name in wanted and choice is None:
            ruled = isinstance(config, Mapping) and any(matches(rule, name, layer) for rule in config)
            why = "is left dense by its rule" if ruled else "no rule matches it"
        elif not why and filter_fn is not None and not filter_fn(layer, name):
            why = "is left dense by filter_fn"
        row = LayerRow(name, _shape(layer), why_not=why)
        if choice is not None and not why:
            row, new = _replacement(row, layer, choice, target, tokens, skip_slower)
            if new is not None:
                made[name] = adopt(new, layer)
        rows.append(row)
    swap(model, made)
    return SparsifyReport(tuple(rows), "" if target is None else target.name, tokens if target else 0)


@torch.no_grad()
@outside_inference
def densify_(model: nn.Module, filter_fn: Callable[[nn.Module, str], bool] | None = None) -> list[str]:
    """Put dense layers with the stored values, and zeros elsewhere, in the place of sparse ones.

    A layer becomes a torch.nn.Linear, or the Conv1D that it was. What `sparsify_` keeps, stays here too. An error
    leaves the model as it was.

    Args:
        model: The model.
        filter_fn: Called with a sparse layer and its name; False leaves it sparse.

    Returns:
        The names of the layers that became dense.

    Raises:
        InvalidInput: For a layer with an activation of its own, which dense layers have not.

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
    _check_model(model, filter_fn, "densify_")
    made: dict[str, nn.Module] = {}
    of_layer: dict[int, nn.Module] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        if not isinstance(layer, SparseLinear) or (filter_fn is not None and not filter_fn(layer, name)):
            continue
        if id(layer) not in of_layer:
            of_layer[id(layer)] = dense_of(name, layer)
        made[name] = of_layer[id(layer)]
    swap(model, made)
    return list(made)


def dense_of(name: str, layer: Any) -> nn.Module:
    """The dense layer of a sparse one."""
    if layer.activation is not None:
        raise InvalidInput(
            f"{name or 'the layer'} applies {layer.activation!r}, and dense layers have no activation: set its "
            "activation to None, and call it after the layer"
        )
    values = layer._parameters.get("values")
    kind, learns = getattr(layer, "_origin", Origin(nn.Linear, True))
    learns = learns if values is None else values.requires_grad
    sizes = (layer.in_features, layer.out_features)
    if any(each.is_meta for each in (*layer.parameters(), *layer.buffers())):
        like = layer.values if values is not None else layer.to_dense()
        weight = torch.empty(sizes[::-1], dtype=like.dtype, device="meta")
    else:
        weight = layer.to_dense()
    if kind is nn.Linear:
        made: Any = nn.Linear(*sizes, bias=layer.bias is not None, device="meta")
    else:
        with torch.device("meta"):
            made = kind(*sizes[::-1])
        weight = weight.T.contiguous()
    made.weight = nn.Parameter(saveable(weight.detach()), learns)
    return adopt(made, layer, None)


def why_no_fit(weight: Tensor, config: LayerConfig) -> str:
    """Why a weight [M, K] does not fit a config; "" if it does."""
    if weight.dtype not in dtypes.FLOATS:
        return f"is of {weight.dtype}"
    if not weight.numel():
        return "is empty"
    inner = config.of if isinstance(config, Float8) else config
    block = getattr(inner, "block", None)
    if block is not None:
        sides = block_sides(block)
        rows, columns = grid_of((weight.shape[0], weight.shape[1]), sides)
        if min(rows, columns) < LEAST_BLOCKS:
            least = f"{LEAST_BLOCKS}x{LEAST_BLOCKS}"
            return f"has {rows}x{columns} blocks of {sides[0]}x{sides[1]}; at least {least} are needed"
    return "; ".join(form_of(config).why_not(weight))


def form_of(config: LayerConfig) -> WeightFormat:
    """The format of a config."""
    inner: Config | None = config.of if isinstance(config, Float8) else config
    name = ("dense" if inner is None else inner.format) + (FP8 if isinstance(config, Float8) else "")
    if inner is None or not hasattr(inner, "block"):
        return WeightFormat(name)
    return WeightFormat(name, inner.block, inner.keep, inner.scope)  # type: ignore[union-attr]


def _replacement(
    row: LayerRow, old: Any, config: LayerConfig, card: Card | None, tokens: int, skip_slower: bool
) -> tuple[LayerRow, Any]:
    """The row of a layer, and the sparse layer; None with the reason against it."""
    dense, form = weight_of(old), form_of(config)
    why = why_no_fit(dense, config)
    if why:
        return replace(row, why_not=why), None
    try:
        if not dense.is_meta:
            check_finite("its weight", dense)
        new = SparseLinear.from_dense(old, config)
    except InvalidInput as error:
        raise InvalidInput(f"{row.name}: {error}") from None
    weight = new.weight
    kept = min(1.0, stored_fraction(weight))
    norm = None if dense.is_meta else kept_norm(weight, dense)
    found = replace(row, format=form.name, kept=kept, kept_norm=norm)
    if skip_slower and card is None:
        card = card_of(dense.device) if dense.is_cuda else card_named("h200")
    if card is None:
        return found, new
    of_dense = predict(dense, tokens, dense.dtype, card).seconds
    try:
        seconds = predict(weight, tokens, dense.dtype, card, form.kernel).seconds
        speed, why = of_dense / seconds, f"is predicted at {of_dense / seconds:.2f}x the speed of a dense one"
    except Unsupported:
        seconds, speed, why = None, 0.0, "has no kernel"
    times = {"seconds": seconds, "dense_seconds": of_dense}
    if skip_slower and speed < 1:
        return replace(row, why_not=f"{why}, with {tokens} tokens on {card.name}", **times), None
    return replace(found, **times), new


def kept_norm(weight: Any, dense: Tensor) -> float:
    """The share of the norm that a sparse weight keeps, with FP8 values as they are."""
    kept = (weight.dequantize() if isinstance(weight, Quantized) else weight).kept_norm(dense)
    return min(1.0, kept)  # FP8 may round up


def _layers(model: nn.Module) -> Any:
    """The names and modules that have a weight matrix of their own."""
    for name, layer in model.named_modules(remove_duplicate=False):
        own = [each for each in layer._parameters.values() if each is not None]
        has_matrix = any(not nn.parameter.is_lazy(each) and each.ndim > 1 for each in own)
        if has_matrix or is_linear(layer) or isinstance(layer, SparseLinear):
            yield name, layer


def _shape(layer: Any) -> tuple[int, ...]:
    if isinstance(layer, (nn.Linear, SparseLinear)):
        return layer.out_features, layer.in_features
    if is_conv1d(layer):
        return tuple(layer.weight.shape[::-1])
    return tuple(max((each.shape for each in layer._parameters.values() if each is not None), key=len))


def _check_model(model: Any, filter_fn: Any, verb: str) -> None:
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
