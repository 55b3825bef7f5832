"""One layer to prune: which layers of a model they are, what one keeps, and the sparse layer that replaces it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.models import obs, scores
from sparsek.models.auto import NO_EXPERTS
from sparsek.models.config import (
    AUTO,
    BlockSemiSparse,
    BlockSparse,
    Float8,
    LayerConfig,
    SemiSparse,
    asked,
    chosen_by,
    config_for,
    form_of,
    is_meant,
    matches,
)
from sparsek.models.reconstruct import Quadratic, least_squares, quadratic, relative_error
from sparsek.models.scores import Moments
from sparsek.models.stream import PRUNED, Stack, Stop, Stream, tensors_in
from sparsek.nn import SparseLinear
from sparsek.nn.experts import PackedLinear, why_no_packed_fit
from sparsek.nn.replace import Facts, is_conv1d, linear_layers
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.convert import Rule
from sparsek.products.formats.padding import tiles_of
from sparsek.products.formats.pattern import block_sides, grid_of
from sparsek.products.formats.quantized import quantize
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.two_four import STEP

SAMPLE, BLOCK_ROWS = 512, 128  # rows of a weight for its expected error


class WeightMask(NamedTuple):
    """What a layer keeps.

    Attributes:
        mask: bool, of blocks [Mb, Kb] where blocks are stored whole, else of elements.
        elements: bool [M, K].
        weight: [M, K]; what is outside of the mask does not count.
    """

    mask: Tensor
    elements: Tensor
    weight: Tensor


class Live(NamedTuple):
    """The rows and columns of a weight in which blocks may be stored, indices that fill whole blocks."""

    rows: Tensor
    columns: Tensor


class PrunedLayer(NamedTuple):
    """What a layer becomes: its mask, weight and bias; the kept share and norm; errors without and with the update."""

    mask: Tensor
    weight: Tensor
    bias: Tensor | None
    kept: float
    norm: float
    error: float | None
    error_after: float | None
    square: float = 0.0  # |weight|^2
    energy: float = 0.0  # |y|^2 over the calibration


def joined(parts: Sequence[PrunedLayer]) -> PrunedLayer:
    """What packed experts become: expert after expert. Errors are of those that the calibration reached."""
    if len(parts) == 1:
        return parts[0]

    def mean(name: str, sizes: str) -> float | None:
        known = [each for each in parts if getattr(each, name) is not None]
        whole = sum(getattr(each, sizes) for each in known)
        squares = sum(getattr(each, name) ** 2 * getattr(each, sizes) for each in known)
        return math.sqrt(squares / whole) if whole else None

    return PrunedLayer(
        torch.cat([each.mask for each in parts]),
        torch.cat([each.weight for each in parts]),
        None if parts[0].bias is None else torch.stack([each.bias for each in parts]),  # type: ignore[misc]
        sum(each.kept for each in parts) / len(parts),
        mean("norm", "square") or 0.0,
        mean("error", "energy"),
        mean("error_after", "energy"),
    )


def updated(
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    config: LayerConfig,
    method: str,
    moments: Moments | None,
    follow: bool,
    live: Live | None = None,
) -> tuple[WeightMask, Quadratic | None]:
    """What a weight [M, K] keeps, the new weight before any rounding, and its error as a quadratic if it was updated.

    `follow`: fit the outputs of the dense model. `live`: where blocks may be stored, for "obs". Raises InvalidInput
    for NaN and Inf.
    """
    w = weight.detach()
    wide = w.to(scores.solver_dtype(w.shape[1]))
    fit = None
    if moments is not None and (follow or method == "obs"):
        fit = fitted(name, wide, bias, moments, follow)
    else:
        check_finite(name, w, bias)
    if live is None or fit is None:
        return select(wide, config, method, moments, fit, follow), fit
    rows, columns = live
    part = wide[rows][:, columns]
    (high, across), _ = stored_blocks(config, part.shape)
    share = min(1.0, stored_blocks(config, w.shape)[1] / (high * across))
    made = select(part, with_keep(config, share), method, None, fit.part(rows, columns), follow)
    elements = _spread(made.elements, live, w.shape)
    sides = masked_sides(config)
    mask = elements if sides is None else tiles_of(elements, sides).any(3).any(1)
    return WeightMask(mask, elements, _spread(made.weight, live, w.shape)), fit


def fitted(name: str, w: Tensor, bias: Tensor | None, moments: Moments, follow: bool) -> Quadratic:
    """The error of a layer as a quadratic; raises InvalidInput for NaN and Inf."""
    check_finite(name, w, bias)
    return quadratic(w.to(scores.solver_dtype(w.shape[1])), bias, moments, name, follow)


def check_finite(name: str, w: Tensor, bias: Tensor | None) -> None:
    """InvalidInput for NaN and Inf in a layer's weight or bias."""
    for what, each in (("weight", w), ("bias", bias)):
        if each is not None and not bool(each.isfinite().all()):
            raise InvalidInput(f"{name}: its {what} has NaN or Inf")


def checked(
    moments: Moments | None,
    line: Stream,
    index: int,
    sides: Sequence[tuple[nn.Module, Mapping[str, Any], str]],
) -> Moments | None:
    """Return the moments of a group of layers, if they are finite.

    Raises InvalidInput with the first layer of the block that has NaN or Inf in its inputs, or in its residual, and
    with their source. `sides`: the block, its layers by name, and DENSE or PRUNED.
    """
    parts = () if moments is None else (moments.h, moments.g, *moments.shift.values())
    if moments is None or all(bool(each.isfinite().all()) for each in parts):
        return moments
    broken = [name for name, each in moments.shift.items() if not bool(each.isfinite().all())]
    for block, layers, side in sides:
        faults = [_first_fault(line, index, block, layers, side, batch) for batch in range(len(line))]
        found = [
            (*each, at)
            for each, at in zip(faults, line.numbers, strict=True)
            if each[1] or (broken and each[2])
        ]
        if found:
            _, name, source, batch = min(found, key=lambda each: each[0])
            own, what, verb = (name, "inputs", "have") if name else (broken[0], "residual", "has")
            where = "in the pruned model " if side == PRUNED else ""
            raise InvalidInput(
                f"{own}: its {what} on calibration batch {batch} {where}{verb} NaN or Inf; {source}"
            )
    name = next(iter(moments.energy))
    raise InvalidInput(
        f"{name}: squares of its inputs on the calibration are not finite in float32; give smaller inputs, or leave it "
        "dense by a rule"
    )


def _first_fault(
    line: Stream, index: int, block: nn.Module, layers: Mapping[str, Any], side: str, batch: int
) -> tuple[int, str, str]:
    """The first layer of a block with NaN or Inf in its inputs, or "": what runs before it, its name, their source."""
    owners = (
        (name, each.experts if isinstance(each, PackedLinear) else each) for name, each in layers.items()
    )
    names = {id(each): name for name, each in reversed([*owners])}  # of one module the first
    count, found, sources, places = 0, "", [], [*line.stack.blocks]

    def faults(tree: Any) -> Tensor:
        plain = (x for x in tensors_in(tree) if x.is_floating_point() and x.layout == torch.strided)
        real = (line.real(x.detach(), batch).float().flatten() for x in plain)
        return torch.cat(
            [x[~x.isfinite()].cpu() for x in real] or [torch.empty(0, device="cpu", dtype=torch.float32)]
        )

    def see(name: str, result: bool, module: nn.Module, *given: Any) -> None:
        nonlocal count, found
        count += 1
        values = faults(given[-1] if result else given)
        if bool((values != -math.inf).any()):  # which masks have
            sources.append((name, result))
        if len(values) and not result and id(module) in names:
            found = names[id(module)]
            raise Stop

    hooks: list[Any] = []
    for name, each in block.named_modules():
        enter, leave = (functools.partial(see, name, result) for result in (False, True))
        hooks.append(each.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(each.register_forward_hook(leave))
    try:
        line.call(block, index, side, batch)
    except Stop:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    args, kwargs = line.batches[batch]
    if not found and not sources:
        return count, "", ""
    if len(faults((args, [each for name, each in kwargs.items() if not name.endswith("mask")]))):
        return count, found, "the batch has them itself"
    name, result = sources[0] if sources else (found.removeprefix(places[index]).strip("."), False)
    if not name and not result and index:
        return count, found, f"{places[index - 1]} returns them"
    name = ".".join(filter(None, (places[index], name))) or type(block).__name__
    return count, found, f"{name} returns them" if result else f"what runs before {name} makes them"


def _spread(part: Tensor, live: Live, shape: torch.Size) -> Tensor:
    whole = part.new_zeros(shape)
    whole[live.rows[:, None], live.columns] = part
    return whole


def pruned(
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    config: LayerConfig,
    moments: Moments | None,
    update: tuple[WeightMask, Quadratic | None],
    live: Live | None = None,
) -> PrunedLayer:
    """A layer of the weight [M, K] after an `updated`; in FP8 the new weight is rounded. Errors are of live rows."""
    w, fp8, ((mask, elements, new), fit) = weight.detach(), isinstance(config, Float8), update
    cut, new = w.masked_fill(~elements, 0), new.masked_fill(~elements, 0)
    stored = new.to(w.dtype)
    if fp8:
        new = rounded(stored).to(new.dtype)
        stored = new.to(w.dtype)
    new_bias = bias if fit is None else fit.bias_for(new)
    if bias is not None and new_bias is not None:
        new_bias = new_bias.to(bias.dtype)
    error, after, energy = None, None, 0.0
    if moments is not None:
        energy = float(moments.energy[name].sum() * moments.count)
        rows, last = None if live is None else live.rows, new if fp8 else stored
        error = float(relative_error(cut, bias, w, bias, moments, name, rows=rows))
        after = float(relative_error(last, new_bias, w, bias, moments, name, fp8, rows))
    wide = w.to(new.dtype)
    whole = wide.norm().clamp(min=torch.finfo(wide.dtype).tiny)
    norm = float(wide.masked_fill(~elements, 0).norm() / whole)
    kept = float(elements.to(torch.float64).mean())
    return PrunedLayer(mask, stored, new_bias, kept, norm, error, after, float(wide.square().sum()), energy)


def expected_error(
    name: str, weight: Tensor, bias: Tensor | None, method: str, moments: Moments, follow: bool
) -> Callable[[LayerConfig], float]:
    """The error of a layer of the dense model after its update, by config, from some of its rows."""
    at = some_rows(len(weight), weight.device)
    w, bias = weight.detach()[at], None if bias is None else bias.detach()[at]
    moments = moments.of_rows(name, w, bias)
    method = "wanda" if method == "obs" else method  # which is as good with a reconstruction, and quick

    @functools.cache
    def update(config: LayerConfig) -> tuple[WeightMask, Quadratic | None]:
        return updated(name, w, bias, config, method, moments, follow)

    def error(config: LayerConfig) -> float:
        return pruned(name, w, bias, config, moments, update(chosen_by(config) or config)).error_after or 0.0

    return error


def some_rows(count: int, device: torch.device) -> Tensor:
    """At most SAMPLE rows of a weight, in whole block rows of the largest block, evenly spread."""
    blocks = -(-count // BLOCK_ROWS)
    taken = min(blocks, SAMPLE // BLOCK_ROWS)
    starts = torch.arange(taken, device=device) * blocks // taken * BLOCK_ROWS
    rows = (starts[:, None] + torch.arange(BLOCK_ROWS, device=device)).flatten()
    return rows[rows < count]


def rounded(x: Tensor) -> Tensor:
    """Rows [..., K] rounded to FP8, as weights are stored and inputs are multiplied, in float32. Zeros stay zeros."""
    return quantize(x.detach().contiguous(), check=False).dequantize()


def round_inputs(layer: nn.Module, *given: Any) -> Any:
    """A hook that rounds the inputs of a layer as a product in FP8 does; gradients pass through."""
    return tree_map_only(Tensor, lambda x: x + (rounded(x).to(x.dtype) - x).detach(), given)


def select(
    w: Tensor, config: LayerConfig, method: str, moments: Moments | None, fit: Quadratic | None, refit: bool
) -> WeightMask:
    """Choose what a weight w [M, K] keeps, and compute the new weight if there is a `fit`.

    `refit`: by least squares on the mask; otherwise 2:4 of "obs" has the weights of its sweep.
    """
    inner = chosen_by(config)
    if inner is None:
        whole = torch.ones_like(w, dtype=torch.bool)
        return WeightMask(whole, whole, w if fit is None else fit.target)
    h = None if moments is None else moments.h[:-1, :-1].to(w.dtype)
    by_obs = fit is not None and method == "obs"
    if isinstance(inner, SemiSparse):
        if fit is not None and by_obs:
            new, mask = obs.sweep_pairs(fit.target, fit.h)
        else:
            new, mask = w, scores.kept_of_pairs(scores.pair_costs(w, scores.pair_matrices(method, h, w)))
    else:
        sides = block_sides(inner.block)
        cells = select_blocks(w, inner, method, moments, fit)
        rows = rows_of(cells, sides, w.shape[1])
        whole = elements_of(cells, sides, w.shape)
        new = w if fit is None else least_squares(fit.target, fit.h, rows, sides[0])
        if isinstance(inner, BlockSparse):
            return WeightMask(cells, whole, new)
        if fit is not None and by_obs:
            mask = torch.zeros_like(whole)
            for at, columns in enumerate(rows):
                own = slice(at * sides[0], (at + 1) * sides[0])
                part, stored = obs.sweep_pairs(new[own][:, columns], fit.h[columns][:, columns])
                new[own, columns], mask[own, columns] = part, stored
        else:
            mask = whole & scores.kept_of_pairs(scores.pair_costs(w, scores.pair_matrices(method, h, w)))
    if fit is not None and refit:
        new = least_squares(fit.target, fit.h, mask, 1)
    return WeightMask(mask, mask, new)


def select_blocks(
    w: Tensor, config: LayerConfig, method: str, moments: Moments | None, fit: Quadratic | None = None
) -> Tensor:
    """The blocks to store, bool [Mb, Kb]."""
    assert not isinstance(config, (SemiSparse, Float8))
    sides = block_sides(config.block)
    if method == "obs" and fit is not None:
        return obs.choose_by_obs(fit.target, fit.h, sides, config.keep, config.scope)
    h = None if moments is None else moments.h[:-1, :-1].to(w.dtype)
    if method == "obs" and h is not None:
        h = scores.damped(h)
    return scores.choose_blocks(scores.block_scores(w, sides, method, h), config.keep, config.scope)


def keep_of(config: LayerConfig) -> float | None:
    """The kept share of blocks; None without blocks."""
    return getattr(chosen_by(config), "keep", None)


def with_keep(config: LayerConfig, keep: float) -> LayerConfig:
    """A config of blocks with another kept share."""
    made: Any = replace(chosen_by(config), keep=keep)  # type: ignore[type-var]
    return Float8(made) if isinstance(config, Float8) else made


def stored_blocks(config: LayerConfig, shape: torch.Size) -> tuple[tuple[int, int], int]:
    """The grid (Mb, Kb) of a weight of a shape [M, K] by a config of blocks, and how many of them it stores."""
    inner: Any = chosen_by(config)
    grid = grid_of((shape[0], shape[1]), block_sides(inner.block))
    return grid, Rule(None, None, inner.keep, inner.scope).count(grid[0] * grid[1])


def masked_sides(config: LayerConfig) -> tuple[int, int] | None:
    """The sides of the blocks of a layer's mask; None for a mask of elements."""
    inner = chosen_by(config)
    return block_sides(inner.block) if isinstance(inner, BlockSparse) else None


def sparse_layer(w: Tensor, mask: Tensor, bias: Tensor | None, config: LayerConfig) -> nn.Module:
    """The sparse layer of a weight w [M, K] on the mask of its blocks or elements."""
    w, bias, inner = w.detach(), None if bias is None else bias.detach().clone(), chosen_by(config)
    if inner is None:
        made: Any = form_of(config).convert(w)
    elif isinstance(inner, SemiSparse):
        made = Semi24.from_dense(w, mask)
    else:
        kind = BSR if isinstance(inner, BlockSparse) else BSR24
        made = kind.from_dense(w, inner.block, mask=mask)
    if inner is not None and isinstance(config, Float8):
        made = quantize(made, check=False)
    layer = SparseLinear.from_matrix(made, bias)
    layer._dtype = w.dtype
    return layer


def targets(
    model: nn.Module,
    config: Any,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    stacks: list[Stack],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The config of each layer to prune, or "auto", and why others stay dense."""
    facts = Facts(model)
    configs: dict[str, Any] = {}
    others = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Embedding)}
    skipped = {
        name: facts.why_not(name, layer, True)
        for name, layer in others.items()
        if is_meant(config, name, layer)
    }
    for name, layer in linear_layers(model):
        wanted, explicit = config_for(config, name, layer)
        why = (
            facts.why_not(name, layer, explicit) if name else "is the model itself, which cannot be replaced"
        )
        if wanted is None:
            ruled = any(matches(rule, name, layer) for rule in config)
            why = "is left dense by its rule" if ruled else "no rule matches it"
        elif not why and filter_fn is not None and not asked("filter_fn", filter_fn, layer, name):
            why = "is left dense by filter_fn"
        if not why and not explicit and not any(stack.has(name) for stack in stacks):
            why = "is outside of the repeated blocks; a rule by its name prunes it"
        if not why:
            why = next((f"shares its bias with {each}" for each in facts.of_bias(name, layer)), "")
        if not why and wanted == AUTO and isinstance(layer, PackedLinear):
            why = NO_EXPERTS
        if not why and wanted is not None and wanted != AUTO:
            why = why_not(parts_of(layer)[0][0], wanted)
            if not why and isinstance(layer, PackedLinear):
                why = why_no_packed_fit(layer, form_of(wanted))
        if why:
            skipped[name] = why
        else:
            configs[name] = wanted
    if not configs:
        done = sum(isinstance(each, SparseLinear) for each in model.modules())
        raise InvalidInput(
            f"the model has no {'more ' * bool(done)}layer to prune"
            + f"; {done} are sparse already, and sk.densify_ makes them dense" * bool(done)
            + "".join(f"; {name or 'it'} {why}" for name, why in [*skipped.items()][:3])
        )
    return configs, skipped


def why_not(w: Tensor, config: LayerConfig) -> str:
    """Why a weight [M, K] does not fit a config; "" if it does."""
    inner = chosen_by(config)
    if w.dtype not in dtypes.FLOATS:
        return f"is of {w.dtype}"
    if isinstance(inner, BlockSparse | BlockSemiSparse):
        sides = block_sides(inner.block)
        if any(side < step for side, step in zip(w.shape, sides, strict=True)):
            return f"is {w.shape[0]}x{w.shape[1]}, less than a block of {sides[0]}x{sides[1]}"
    if isinstance(inner, SemiSparse | BlockSemiSparse) and w.shape[1] % STEP:
        return f"has {w.shape[1]} columns, no multiple of {STEP}"
    return "; ".join(form_of(config).why_not(w)) if isinstance(config, Float8) else ""


def weights_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [M, K] of a layer, a view, and its bias. Of packed experts all weights, and biases [E, M]."""
    if isinstance(layer, PackedLinear):
        return layer.weight, layer.biases
    return (layer.weight.T if is_conv1d(layer) else layer.weight), layer.bias


def parts_of(layer: Any) -> list[tuple[Tensor, Tensor | None]]:
    """The weights [M, K], views, and biases that are pruned one by one: of a layer, or of each packed expert."""
    return layer.parts if isinstance(layer, PackedLinear) else [weights_of(layer)]


def rows_of(cells: Tensor, sides: tuple[int, int], columns: int) -> Tensor:
    """The mask [Mb, K] of the rows of each block row."""
    return cells.repeat_interleave(sides[1], 1)[:, :columns]


def elements_of(cells: Tensor, sides: tuple[int, int], shape: torch.Size) -> Tensor:
    """The mask [M, K] of elements."""
    return rows_of(cells, sides, shape[1]).repeat_interleave(sides[0], 0)[: shape[0]]
