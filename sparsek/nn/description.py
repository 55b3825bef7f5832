"""What the sparse layers of a model are, in JSON, and empty layers that a loader fills: for checkpoints.

A description is a dict by the names of layers:

    {"version": 1, "layers": {"mlp.up": {"format": "bsr", "shape": [512, 256], "block": [64, 64], "blocks": 16, ...}}}

A checkpoint has the tensors of each sparse layer, and one more, `<layer>.weight`, its guard (`indices.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsek.core import arguments, dtypes
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.nn.experts import PackedLinear
from sparsek.nn.indices import guard
from sparsek.nn.replace import adopt, is_linear, is_packed, layer_of, weight_of
from sparsek.nn.sparse import SparseLinear
from sparsek.products.formats import two_four
from sparsek.products.formats.bsr24 import BLOCK_STEP
from sparsek.products.formats.pattern import BlockPattern, block_sides, grid_of, matrix_sides
from sparsek.products.formats.quantized import FORMATS, SCALES, Quantized
from sparsek.products.plan import operands

VERSION, METHOD = 1, "sparsek"
FP8 = {short: dtype for dtype, short in dtypes.FP8.items()}


class SavedLayer(NamedTuple):
    """What one sparse layer is.

    Attributes:
        format: "bsr", "semi24" or "bsr24".
        shape: (out_features, in_features).
        value_dtype: Of the values; of a weight in FP8 that of the dense weight before. transformers changes what is
            named `dtype` in config.json.
        bias: Whether it has one.
        activation: Its activation, or None.
        block: The sides (bm, bk) of a block; None without blocks.
        blocks: The number of stored blocks; None without blocks.
        fp8: "e4m3" or "e5m2" for a weight in FP8, else None.
        scale: What shares a scale in FP8: "tensor", "row" or "block"; else None.
        fast_accum: Whether products in FP8 add up fast.
        pruned: The decay of elements that are not stored and learn, see `SparseLinear.keep_pruned`; None without.
    """

    format: str
    shape: tuple[int, int]
    value_dtype: str
    bias: bool
    activation: str | None = None
    block: tuple[int, int] | None = None
    blocks: int | None = None
    fp8: str | None = None
    scale: str | None = None
    fast_accum: bool = False
    pruned: float | None = None

    @classmethod
    def of(cls, layer: Any) -> SavedLayer:
        """What a layer is."""
        codes, blocked = layer._buffers.get("codes"), layer._block is not None
        return cls(
            layer._kind,
            (layer.out_features, layer.in_features),
            dtypes.name(layer._dtype if codes is not None else layer.values.dtype),
            layer.bias is not None,
            layer.activation,
            tuple(layer._block) if blocked else None,
            len(layer.indices) if blocked else None,
            None if codes is None else dtypes.FP8[codes.dtype],
            layer._scaled or None,
            bool(layer._fast_accum),
            layer._decay if layer._parameters.get("pruned") is not None else None,
        )

    @classmethod
    def read(cls, name: str, data: Any) -> SavedLayer:
        """An entry of JSON that others wrote. Raises InvalidInput for any that `of` does not make."""
        where = f"the sparse layer {arguments.shown(name)}"
        if not isinstance(data, Mapping) or not {"format", "shape", "value_dtype", "bias"} <= set(
            data
        ) <= set(cls._fields):
            raise InvalidInput(
                f"{where} is {arguments.shown(data)}; it must be an object of {', '.join(cls._fields)}"
            )
        try:
            return cls(**data)._checked()
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None

    def _checked(self) -> SavedLayer:
        arguments.one_of("format", self.format, tuple(FORMATS))
        shape = arguments.pair("shape", self.shape, 1, INT32_MAX)
        dtypes.parse(arguments.text("value_dtype", self.value_dtype))
        arguments.flag("bias", self.bias)
        arguments.flag("fast_accum", self.fast_accum)
        if self.activation is not None:
            operands.check_activation(arguments.text("activation", self.activation))
        blocked = self.format != "semi24"
        if (self.block is not None, self.blocks is not None) != (blocked, blocked):
            raise InvalidInput(f"{self.format} has {'' if blocked else 'no '}block and blocks")
        block = None
        if blocked:
            step = BLOCK_STEP if self.format == "bsr24" else 16
            block = block_sides(arguments.pair("block", self.block), step)
            rows, columns = grid_of(matrix_sides(shape, block), block)
            arguments.integer("blocks", self.blocks, 0, rows * columns)
        if self.format == "semi24" and shape[1] % two_four.STEP:
            raise InvalidInput(f"2:4 needs a multiple of {two_four.STEP} columns")
        if (self.fp8 is None) != (self.scale is None):
            raise InvalidInput("fp8 and scale go together")
        if self.fp8 is not None:
            arguments.one_of("fp8", self.fp8, tuple(FP8))
            arguments.one_of("scale", self.scale, tuple(SCALES))
            if self.scale == "block" and (not blocked or self.fast_accum):
                raise InvalidInput("a scale per block needs blocks, and fast_accum=False")
        elif self.fast_accum:
            raise InvalidInput("fast_accum is for weights in FP8")
        if self.pruned is not None:
            arguments.number("pruned", self.pruned, 0.0)
            if self.format == "bsr" or self.fp8 is not None:
                raise InvalidInput("pruned is for 2:4 weights that are not in FP8")
        return self._replace(shape=shape, block=block)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without what is as by default."""
        default = self._field_defaults
        found = {
            name: value
            for name, value in self._asdict().items()
            if name not in default or value != default[name]
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def empty(self, dtype: torch.dtype | None = None) -> Any:
        """A layer like this on the meta device, whose tensors a loader replaces.

        Args:
            dtype: Of values and bias, instead of that of the entry.
        """
        dtype = dtypes.parse(self.value_dtype) if dtype is None else dtype
        values, pattern, (rows, _) = self.shape, None, self.shape
        if self.block is not None:
            pattern = first_blocks(self.shape, self.block, self.blocks or 0)
            values = (pattern.nnzb, *self.block)
        half = values if self.format == "bsr" else (*values[:-1], values[-1] // 2)
        stored = torch.empty(half, dtype=dtype if self.fp8 is None else FP8[self.fp8], device="meta")
        parts: list[Any] = [stored] if pattern is None else [pattern, stored]
        if self.format != "bsr":
            parts.append(
                torch.empty((*values[:-1], values[-1] // two_four.STEP), dtype=torch.uint8, device="meta")
            )
        made = FORMATS[self.format].unchecked(*parts)
        if self.scale is not None:
            sizes = {"tensor": (), "row": (rows,), "block": values[:1]}[self.scale]
            scale = torch.empty(sizes, dtype=torch.float32, device="meta")
            made = Quantized.unchecked(made, scale, self.scale, self.fast_accum)
        bias = torch.empty(rows, dtype=dtype, device="meta") if self.bias else None
        layer = SparseLinear.from_matrix(made, bias, activation=self.activation)  # type: ignore[arg-type]
        layer._dtype = dtype
        if self.pruned is not None:
            layer.pruned, layer._decay = nn.Parameter(torch.empty_like(stored)), self.pruned
        return layer


def first_blocks(shape: tuple[int, int], block: tuple[int, int], count: int) -> BlockPattern:
    """The pattern of the first `count` blocks of a matrix, which stands for one to be loaded."""
    rows, columns = grid_of(shape, block)
    indptr = (torch.arange(rows + 1, device="cpu") * columns).clamp(max=count)
    indices = torch.arange(count, device="cpu") % columns
    return BlockPattern(shape, block, indptr.int(), indices.int())


def describe(model: nn.Module) -> dict[str, SavedLayer]:
    """What each sparse layer of a model is, by name."""
    return {
        name: SavedLayer.of(layer)
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, SparseLinear)
    }


def written(layers: Mapping[str, SavedLayer]) -> dict[str, Any]:
    """The description in JSON."""
    return {"version": VERSION, "layers": {name: each.to_dict() for name, each in layers.items()}}


def read(data: Any) -> dict[str, SavedLayer]:
    """The entries of a description that others wrote. Raises InvalidInput for any that `written` does not make."""
    if not isinstance(data, Mapping) or not isinstance(data.get("layers"), Mapping):
        raise InvalidInput(f"the description is {arguments.shown(data)}; it must be an object with layers")
    if data.get("unfinished"):
        raise InvalidInput("the checkpoint was not saved to the end; save it again")
    unknown = data.keys() - {"version", "layers", "quant_method", "ties"}
    if unknown:
        raise InvalidInput(f"the description has no {arguments.shown(min(map(str, unknown)))}")
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        raise InvalidInput(
            f"the description is of version {arguments.shown(data.get('version'))}, and this SparseK reads {VERSION}; "
            "a newer one may read it"
        )
    return {
        arguments.text("the name of a layer", name): SavedLayer.read(name, each)
        for name, each in data["layers"].items()
    }


def guards(layers: Iterable[str], model: nn.Module | None = None) -> dict[str, Tensor]:
    """The guards of layers, by their names in a checkpoint; those of the packed experts of a model have their own."""
    names = [f"{name}.weight" for name in layers]
    if model is not None:
        names += [name for name in layers if is_packed(model, name)]
    return {name: guard() for name in names}


def empty_layers(
    model: nn.Module, layers: Mapping[str, SavedLayer], *, as_model: bool = False
) -> dict[str, nn.Module]:
    """Make empty sparse layers for those of a model, by name, on the meta device.

    Args:
        model: A model whose layers of these names are dense linear layers, or sparse ones like the entries.
        layers: What they are.
        as_model: Whether values take the dtypes of the layers of the model, not those of the entries.

    Raises:
        InvalidInput: For a name that is of no linear layer of the model, or of one of another shape.
    """
    made: dict[str, nn.Module] = {}
    of: dict[int, Any] = {}
    biases: dict[int, Any] = {}
    for name, entry in layers.items():
        old: Any = layer_of(model, name) if name else None
        is_sparse = isinstance(old, SparseLinear)
        if not is_sparse and (old is None or not is_linear(old)):
            kind = "no layer" if old is None else f"a {type(old).__name__}"
            raise InvalidInput(
                f"the checkpoint has a sparse layer {arguments.shown(name)}, and this model has {kind} of that name"
            )
        shape = (old.out_features, old.in_features) if is_sparse else tuple(weight_of(old).shape)
        if shape != entry.shape:
            raise InvalidInput(
                f"{name} is {list(entry.shape)} in the checkpoint and {list(shape)} in this model"
            )
        # That of packed experts lives no longer than this step.
        place = id(old.packed if isinstance(old, PackedLinear) else old)
        if place in of:
            made[name] = of[place]
            continue
        dtype = None
        if as_model:
            dtype = old._dtype if is_sparse else old.weight.dtype
        layer = entry.empty(dtype)
        bias = layer.bias
        if None not in (bias, old.bias):
            bias = biases.setdefault(id(old.bias), bias)  # which layers may share
        adopt(layer, old, None if is_sparse else nn.Linear)
        layer.bias = bias
        if is_sparse and hasattr(old, "_origin"):
            layer._origin = old._origin
        made[name] = of[place] = layer
    return made
