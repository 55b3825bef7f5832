"""The arguments of layers: dense layers, names of formats, and placeholders on the meta device."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes
from sparsek.core.errors import InvalidInput
from sparsek.products.formats import two_four
from sparsek.products.formats.convert import SCOPES, Rule
from sparsek.products.formats.pattern import block_sides, grid_of
from sparsek.products.formats.quantized import FORMATS as CLASSES
from sparsek.products.formats.quantized import Quantized
from sparsek.products.formats.random import even_pattern
from sparsek.products.formats.semi24 import Semi24
from sparsek.products.ops.weight_formats import DENSE_BLOCK, FORMATS, FP8, WeightFormat
from sparsek.products.plan import operands


def weight_and_bias(dense: Any) -> tuple[Tensor, Tensor | None]:
    """The weight [out_features, in_features] of a torch.nn.Linear, of transformers' Conv1D, or a weight itself."""
    conv = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    if isinstance(dense, Tensor):
        weight, bias = dense, None
    elif isinstance(dense, nn.Linear):
        weight, bias = getattr(dense, "weight", None), getattr(dense, "bias", None)
    elif conv is not None and isinstance(dense, conv):
        weight, bias = dense.weight.mT, dense.bias
    else:
        raise InvalidInput(
            "from_dense takes a torch.nn.Linear or its weight [out_features, in_features], or transformers' Conv1D, "
            f"got {type(dense).__name__}"
        )
    weight = arguments.dense("weight", weight)
    arguments.dtype("the dtype of the weight", weight.dtype, dtypes.FLOATS)
    if weight.dim() != 2:
        raise InvalidInput(f"weight is {list(weight.shape)}; it must be [out_features, in_features]")
    return weight.detach(), bias


def check_bias(bias: Any, count: int, dtype: torch.dtype | None, device: torch.device) -> None:
    """InvalidInput unless `bias` is None, or fits a weight of `count` rows. `dtype` None: of one in FP8."""
    if bias is None:
        return
    arguments.dense("bias", bias)
    allowed = operands.OUT_DTYPES if dtype is None else (dtype,)
    if tuple(bias.shape) != (count,) or bias.dtype not in allowed or bias.device != device:
        raise InvalidInput(
            f"bias is {bias.dtype} {list(bias.shape)} on {bias.device}; it must be {' or '.join(map(str, allowed))} "
            f"[{count}] on {device}, or None"
        )


def wanted_format(config: Any, block: Any, keep: Any, scope: Any) -> WeightFormat:
    """The format that a config or a name with its options describes."""
    if not isinstance(config, str):
        if block is not None or keep is not None:
            raise InvalidInput("block= and keep= belong to the name of a format; this config has its own")
        inner = getattr(config, "of", None)
        if hasattr(config, "of"):
            made = WeightFormat("dense") if inner is None else wanted_format(inner, None, None, scope)
            return replace(made, format=made.base + FP8)
        name: Any = getattr(config, "format", None)
        block = getattr(config, "block", 0)
        keep, scope = getattr(config, "keep", 1.0), getattr(config, "scope", scope)
    else:
        name = config
    blocked = isinstance(name, str) and name.startswith("bsr")
    if not isinstance(name, str) or name not in FORMATS or name == "dense":
        raise InvalidInput(
            f"config is {arguments.shown(config)}; it must be {', '.join(x for x in FORMATS if x != 'dense')}, or a "
            "config with one of these as .format"
        )
    if isinstance(config, str) and (blocked != (block is not None) or blocked != (keep is not None)):
        raise InvalidInput(
            f"{name} needs block= and keep="
            if blocked
            else f"block= and keep= are for formats with blocks, not {name}"
        )
    if not blocked:
        return WeightFormat(name)
    known: Any = None if scope is None else arguments.one_of("scope", scope, SCOPES)
    return WeightFormat(name, block_sides(block), arguments.number("keep", keep, 0, 1), known)


def placeholder(weight: Tensor, form: WeightFormat) -> Any:
    """A matrix on the meta device in a format, with a pattern that stands for one to be loaded."""
    rows, columns = weight.shape
    block, keep = (DENSE_BLOCK, 1.0) if form.base == "dense" else (form.block, form.keep)
    dtype = torch.float8_e4m3fn if form.is_fp8 else weight.dtype
    shape, pattern = (rows, columns), None
    if form.base != "semi24":
        grid = grid_of((rows, columns), block_sides(block))
        pattern = even_pattern(
            rows, columns, block, Rule(None, None, keep, form.scope).count(math.prod(grid))
        )
        shape = (pattern.nnzb, *pattern.block)
    half = shape if form.base in ("bsr", "dense") else (*shape[:-1], shape[-1] // 2)
    values = torch.empty(half, dtype=dtype, device="meta")
    parts = [x for x in (pattern, values) if x is not None]
    if half != shape:
        parts.append(torch.empty((*shape[:-1], shape[-1] // two_four.STEP), dtype=torch.uint8, device="meta"))
    made = CLASSES["bsr" if form.base == "dense" else form.base].unchecked(*parts)
    if not form.is_fp8:
        return made
    return Quantized.unchecked(made, torch.empty(rows, dtype=torch.float32, device="meta"), "row")


def any_meta(like: Tensor) -> Tensor:
    """Metadata of a random 2:4 pattern, the same at every call, for a layer that was on the meta device."""
    draw_from = torch.Generator("cpu").manual_seed(0)
    nibbles = torch.tensor([4, 8, 12, 9, 13, 14], dtype=torch.uint8, device="cpu")
    two = nibbles[torch.randint(6, (2, *like.shape), generator=draw_from, device="cpu")]
    return two[0] | two[1] << 4


def inside(matrix: Any, values: Tensor) -> Tensor:
    """Values, or what broadcasts to them, with 0 outside the matrix."""
    if isinstance(matrix, Semi24) or not matrix.pattern.is_ragged:
        return values
    whole = values.expand(matrix.values.shape).contiguous()
    return matrix._zero_outside(whole)
