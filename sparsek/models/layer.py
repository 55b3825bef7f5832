"""One layer to prune: which layers of a model they are, what one keeps, and the sparse layer that replaces it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsek.core import dtypes
from sparsek.core.errors import InvalidInput
from sparsek.models import obs, scores
from sparsek.models.config import BlockSparse, Config, Rules, SemiSparse, config_for
from sparsek.models.reconstruct import Quadratic, least_squares
from sparsek.models.scores import Moments
from sparsek.models.stream import Stack
from sparsek.nn import SparseLinear
from sparsek.nn.replace import Facts, is_conv1d, is_linear
from sparsek.products.formats.bsr import BSR
from sparsek.products.formats.bsr24 import BSR24
from sparsek.products.formats.pattern import block_sides
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.formats.two_four import STEP


class WeightMask(NamedTuple):
    """What a layer keeps.

    Attributes:
        mask: bool, of blocks [Mb, Kb] for BlockSparse, else of elements.
        elements: bool [M, K].
        weight: [M, K]; what is outside of the mask does not count.
    """

    mask: Tensor
    elements: Tensor
    weight: Tensor


def select(
    w: Tensor, config: Config, method: str, moments: Moments | None, fit: Quadratic | None, refit: bool
) -> WeightMask:
    """Choose what a weight w [M, K] keeps, and compute the new weight if there is a `fit`.

    `refit`: by least squares on the mask; otherwise 2:4 of "obs" has the weights of its sweep.
    """
    h = None if moments is None else moments.h[:-1, :-1].to(w.dtype)
    by_obs = fit is not None and method == "obs"
    if isinstance(config, SemiSparse):
        if fit is not None and by_obs:
            new, mask = obs.sweep_pairs(fit.target, fit.h)
        else:
            new, mask = w, scores.kept_of_pairs(scores.pair_costs(w, scores.pair_matrices(method, h, w)))
    else:
        sides = block_sides(config.block)
        cells = select_blocks(w, config, method, moments, fit)
        rows = rows_of(cells, sides, w.shape[1])
        whole = elements_of(cells, sides, w.shape)
        new = w if fit is None else least_squares(fit.target, fit.h, rows, sides[0])
        if isinstance(config, BlockSparse):
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
    w: Tensor, config: Config, method: str, moments: Moments | None, fit: Quadratic | None = None
) -> Tensor:
    """The blocks to store, bool [Mb, Kb]."""
    assert not isinstance(config, SemiSparse)
    sides = block_sides(config.block)
    if method == "obs" and fit is not None:
        return obs.choose_by_obs(fit.target, fit.h, sides, config.keep, config.scope)
    h = None if moments is None else moments.h[:-1, :-1].to(w.dtype)
    if method == "obs" and h is not None:
        h = scores.damped(h)
    return scores.choose_blocks(scores.block_scores(w, sides, method, h), config.keep, config.scope)


def keep_of(config: Config) -> float:
    """The kept share of blocks."""
    assert not isinstance(config, SemiSparse)
    return config.keep


def with_keep(config: Config, keep: float) -> Config:
    """A config of blocks with another kept share."""
    return config if isinstance(config, SemiSparse) else replace(config, keep=keep)


def sparse_layer(w: Tensor, mask: Tensor, bias: Tensor | None, config: Config) -> nn.Module:
    """The sparse layer of a weight w [M, K] on the mask of its blocks or elements."""
    w, bias = w.detach(), None if bias is None else bias.detach().clone()
    if isinstance(config, BlockSparse):
        return SparseLinear.from_matrix(BSR.from_dense(w, config.block, mask=mask), bias)
    if isinstance(config, SemiSparse):
        return SparseLinear.from_matrix(Semi24.from_dense(w, mask), bias)
    return SparseLinear.from_matrix(BSR24.from_dense(w, config.block, mask=mask), bias)


def targets(
    model: nn.Module,
    config: Config | Rules,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    stacks: list[Stack],
) -> tuple[dict[str, Config], dict[str, str]]:
    """The config of each layer to prune, and why others stay dense."""
    facts = Facts(model)
    configs: dict[str, Config] = {}
    skipped: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not is_linear(layer):
            continue
        wanted, explicit = config_for(config, name, layer)
        if wanted is None or (filter_fn is not None and not filter_fn(layer, name)):
            continue
        why = (
            facts.why_not(name, layer, explicit) if name else "is the model itself, which cannot be replaced"
        )
        if not why and not explicit and not any(stack.has(name) for stack in stacks):
            why = "is outside of the repeated blocks; a rule by its name prunes it"
        why = why or why_not(weights_of(layer)[0], wanted)
        if why:
            skipped[name] = why
        else:
            configs[name] = wanted
    if not configs:
        raise InvalidInput(
            "the model has no layer to prune"
            + "".join(f"; {name or 'it'} {why}" for name, why in [*skipped.items()][:3])
        )
    return configs, skipped


def why_not(w: Tensor, config: Config) -> str:
    """Why a weight [M, K] does not fit a config; "" if it does."""
    if w.dtype not in dtypes.FLOATS:
        return f"is of {w.dtype}"
    if not isinstance(config, SemiSparse):
        sides = block_sides(config.block)
        if any(side < step for side, step in zip(w.shape, sides, strict=True)):
            return f"is {w.shape[0]}x{w.shape[1]}, less than a block of {sides[0]}x{sides[1]}"
    if not isinstance(config, BlockSparse) and w.shape[1] % STEP:
        return f"has {w.shape[1]} columns, no multiple of {STEP}"
    return ""


def weights_of(layer: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [M, K] of a layer, a view, and its bias."""
    return (layer.weight.T if is_conv1d(layer) else layer.weight), layer.bias


def rows_of(cells: Tensor, sides: tuple[int, int], columns: int) -> Tensor:
    """The mask [Mb, K] of the rows of each block row."""
    return cells.repeat_interleave(sides[1], 1)[:, :columns]


def elements_of(cells: Tensor, sides: tuple[int, int], shape: torch.Size) -> Tensor:
    """The mask [M, K] of elements."""
    return rows_of(cells, sides, shape[1]).repeat_interleave(sides[0], 0)[: shape[0]]
