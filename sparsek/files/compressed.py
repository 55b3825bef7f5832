"""Quantized and compressed checkpoints: which of their tensors are weights, and which are parts of a weight.

FP8 and int8 weights are read times their scales, and 2:4 or sparse weights behind bit masks as dense ones. Packed
values (GPTQ, AWQ, 4 bits) are no weights, nor are scales, zero points and indices: these are passed over, with the
reason.

Tensors of one layer share their names up to the last dot, whatever file they are in. The layouts are those of
compressed-tensors (https://github.com/vllm-project/compressed-tensors), transformers' quantizers, and bitsandbytes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsek.core import files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.parsing import json_value
from sparsek.files.tensor_file import FLOAT8_TAGS, TAGS
from sparsek.files.weights import Entry, WeightFile

CONFIGS = ("config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json")
SECTIONS = ("quantization_config", "compression_config", "quantization")
FP8 = frozenset(FLOAT8_TAGS.values())
# Last parts of names. Those of a weight's companions, and of values that are packed or coded.
COMPANION = re.compile(
    r"(.*[._])?(scales?|scales?_inv|scale_\d|scale_(weight|input|packed)|scaling_factors?|q?zeros?|zero_points?|g_idx|perm"
    r"|absmax|quant_map|scb|codebooks?|row_offsets|bitmask|meta|_scale|_?shift|weight_shape)",
    re.IGNORECASE,
)
PACKED = re.compile(r"(.*[._])?(qweight|packed|blocks|codes|b|w_q|_?q?data|weight)", re.IGNORECASE)
SCALES = ("{}_scale", "{}_scale_inv", "{}.scale", "scale_{}", "{}_scales", "scale", "scales")
POWERS = "F8_E8M0"  # scales that are powers of two
SECOND = ("{}_scale_2", "{}_global_scale")  # a scale of scales
MASKED = ("compressed", "bitmask", "shape", "row_offsets")  # the parts of a weight behind a bit mask
BLOCK_SIDES = (128, 64, 32, 16, 256)
INT8_LARGEST = 127


@dataclass(frozen=True)
class Quantization:
    """What the files beside a checkpoint say: the method, the bits of a weight, the block of a scale, and the faults of
    files that could not be read."""

    method: str = ""
    bits: int | None = None
    block: tuple[int, int] | None = None
    faults: tuple[tuple[Path, str], ...] = ()


def quantization_of(folders: Sequence[Path]) -> Quantization:
    """The first section about quantization in the configs of these folders."""
    faults: list[tuple[Path, str]] = []
    for path in (folder / name for folder in dict.fromkeys(folders) for name in CONFIGS):
        try:
            found = json_value(files.content(path), path) if path.exists() else None
        except (OSError, InvalidFile) as error:
            faults.append((path, str(error).removeprefix(f"{path}: ")))
            continue
        section = _section(found, whole=path.name.startswith("quant"))
        if section:
            return _quantization(section, tuple(faults))
    return Quantization(faults=tuple(faults))


def _section(config: Any, whole: bool) -> Mapping[str, Any]:
    """The part of a config about quantization, of the model or of the model of text in it."""
    if not isinstance(config, dict):
        return {}
    if whole:
        return config
    for each in (config, *config.values()):
        for name in SECTIONS if isinstance(each, dict) else ():
            if isinstance(each.get(name), dict) and each[name]:
                return each[name]
    return {}


def _quantization(section: Mapping[str, Any], faults: tuple[tuple[Path, str], ...]) -> Quantization:
    words = [section.get(key) for key in ("quant_method", "quant_algo", "format")]
    method = next((each for each in words if isinstance(each, str) and each.isprintable()), "")
    bits = next((section[key] for key in ("bits", "w_bit") if type(section.get(key)) is int), None)
    sides: Any = section.get("weight_block_size")
    fits = (
        isinstance(sides, list) and len(sides) == 2 and all(type(each) is int and each > 0 for each in sides)
    )
    return Quantization(files.shortened(method), bits, (sides[0], sides[1]) if fits else None, faults)


@dataclass(frozen=True)
class WeightRecipe:
    """How one weight is made: from its values, by a bit mask if it has one, times a scale if it has one."""

    values: str
    mask: str = ""
    scale: str = ""
    zero: str = ""
    sides: tuple[int, int] = (0, 0)  # rows and columns that share a scale
    factor: float = 1.0  # of the scale


class Decompressed(WeightFile):
    """The weights of a checkpoint, decompressed where that is one step. `passed_over`: names by reason."""

    def __init__(self, file: WeightFile, about: Quantization) -> None:
        self.file, self.about = file, about
        self.recipes: dict[str, WeightRecipe] = {}
        self.passed_over: dict[str, list[str]] = {}
        super().__init__(file.path)

    def described(self) -> str:
        listed = (f"{len(names)} that are {why}" for why, names in self.passed_over.items())
        return "; ".join([super().described(), *listed])

    def read(self, name: str) -> Tensor:
        why = next((why for why, names in self.passed_over.items() if name in names), None)
        if why is not None:
            raise InvalidInput(f"{self.path}: {shown(name)} is no weight; it is one of {why}")
        return super().read(name)

    def _entries(self) -> Iterator[Entry]:
        layers: dict[str, dict[str, Entry]] = {}
        for name, entry in self.file.entries.items():
            layer, _, last = name.rpartition(".")
            if layer.endswith(".weight"):
                layer, last = layer.removesuffix(".weight"), last if last in MASKED else f"weight.{last}"
            layers.setdefault(layer, {})[last] = entry
        for layer, parts in layers.items():
            yield from self._layer(layer, parts)

    def _layer(self, layer: str, parts: dict[str, Entry]) -> Iterator[Entry]:
        used: set[str] = set()  # parts of weights that are decompressed
        made: list[Entry] = []
        for last in parts:
            found = self._masked(layer, parts) if last == "bitmask" else self._scaled(parts, last)
            if found is not None:
                entry, recipe, names = found
                made.append(entry)
                self.recipes[entry.name] = recipe
                used |= names
        packed = {last for last, entry in parts.items() if last not in used and _is_packed(last, entry)}
        misfits = {last for last, each in parts.items() if each.dtype in FP8 and len(each.shape) == 2} - used
        kinds = {entry.name for entry in made}
        for last, entry in parts.items():
            if last in used:
                if entry.name not in kinds:
                    self._pass(
                        "scales, zero points or bit masks of weights that are read decompressed", entry
                    )
            elif last in packed:
                method = f" ({self.about.method})" if self.about.method else ""
                self._pass(f"packed values of a quantized weight{method}, which are not unpacked", entry)
            elif self._belongs(last, parts, bool(packed or used or misfits or "bitmask" in parts)):
                self._pass("scales, zero points or indices of quantized weights", entry)
            elif last in misfits:
                self._pass("FP8 values whose scales do not fit them", entry)
            else:
                yield entry
        yield from made

    def _belongs(self, last: str, parts: Mapping[str, Entry], quantized: bool) -> bool:
        """Whether a part is the companion of a weight that is quantized, here or, by the config, in a missing file."""
        if last == "s":
            return "B" in parts  # Marlin's
        if last == "compressed":
            return "bitmask" in parts
        known = quantized or (bool(self.about.method) and len(parts[last].shape) == 2)
        return known and bool(COMPANION.fullmatch(last))

    def _pass(self, why: str, entry: Entry) -> None:
        self.passed_over.setdefault(why, []).append(entry.name)

    def _masked(self, layer: str, parts: Mapping[str, Entry]) -> tuple[Entry, WeightRecipe, set[str]] | None:
        """A weight behind a bit mask: `bitmask` [N, ceil(K/8)], `compressed` values, `shape`."""
        if not {"compressed", "shape"} <= parts.keys():
            return None
        values, mask, shape = parts["compressed"], parts["bitmask"], parts["shape"]
        if mask.dtype != "U8" or shape.dtype not in ("I64", "I32") or math.prod(shape.shape) != 2:
            return None
        n, k = (int(each) for each in self.file.raw(shape.name).flatten())
        if mask.shape != (n, -(-k // 8)) or k < 0 or not (values.dtype in TAGS or values.dtype in FP8):
            return None
        used = {"compressed", "shape", "bitmask"} | {"row_offsets"} & parts.keys()
        name = f"{layer}.weight" if layer else "weight"
        if values.dtype in TAGS:
            return Entry(name, (n, k), values.dtype), WeightRecipe(values.name, mask.name), used
        scaled = self._scaled({**parts, "weight": Entry(values.name, (n, k), values.dtype)}, "weight")
        if scaled is None:
            return None
        _, recipe, more = scaled
        whole = WeightRecipe(values.name, mask.name, recipe.scale, recipe.zero, recipe.sides, recipe.factor)
        return Entry(name, (n, k), "fp32"), whole, used | more - {"weight"}

    def _scaled(self, parts: Mapping[str, Entry], last: str) -> tuple[Entry, WeightRecipe, set[str]] | None:
        """A weight in FP8 or int8 with its scale; FP8 may have none."""
        entry = parts[last]
        is_fp8 = entry.dtype in FP8
        if len(entry.shape) != 2 or not (is_fp8 or entry.dtype == "I8") or COMPANION.fullmatch(last):
            return None
        if last == "compressed" or any(each.format(last) in parts for each in SECOND):
            return None
        if not is_fp8 and self.about.bits not in (None, 8):
            return None
        codes = "SCB" if "SCB" in parts else f"{last}.SCB"  # bitsandbytes: 127 is the largest of a row
        scale = next((each for form in SCALES if (each := form.format(last)) in parts), codes)
        if scale not in parts:
            return (entry._replace(dtype="fp32"), WeightRecipe(entry.name), {last}) if is_fp8 else None
        sides = _sides(entry.shape, parts[scale].shape, self.about.block)
        if sides is None or not (parts[scale].dtype in TAGS or parts[scale].dtype == POWERS):
            return None
        zero = f"{last}_zero_point"
        if zero in parts and (is_fp8 or parts[zero].shape != parts[scale].shape):
            return None
        recipe = WeightRecipe(
            entry.name,
            "",
            parts[scale].name,
            parts[zero].name if zero in parts else "",
            sides,
            1 / INT8_LARGEST if scale == codes else 1.0,
        )
        return entry._replace(dtype="fp32"), recipe, {last, scale} | {zero} & parts.keys()

    def _matrix(self, entry: Entry) -> Tensor:
        recipe = self.recipes.get(entry.name)
        if recipe is None:
            return self.file.read(entry.name)
        values = self.file.raw(recipe.values)
        if recipe.mask:
            found = behind_mask(values, self.file.raw(recipe.mask), entry.shape[1])
            if isinstance(found, str):
                raise self._fault(f"{shown(entry.name)} {found}")
            values = found[0]
        if entry.dtype != "fp32" or (values.dtype == torch.float32 and not recipe.scale):
            return values
        dense = values.to(torch.float32)
        if recipe.scale:
            zero = self.file.raw(recipe.zero).to(torch.float32) if recipe.zero else None
            _multiply(
                dense, self.file.raw(recipe.scale).to(torch.float32) * recipe.factor, zero, recipe.sides
            )
        return dense


def behind_mask(values: Tensor, mask: Tensor, columns: int) -> tuple[Tensor, Tensor] | str:
    """The dense matrix [N, columns] whose elements with a bit in `mask` [N, ceil(columns / 8)] are the `values`, in
    order, and 0 elsewhere; and these elements, bool. A text for another number of values.
    """
    bits = torch.from_numpy(np.unpackbits(mask.numpy(), axis=-1, count=columns, bitorder="little")).bool()
    stored = int(bits.sum(dtype=torch.int64))
    if stored != values.numel():
        return f"has {stored} bits in its mask for {values.numel()} values"
    dense = torch.zeros(bits.shape, dtype=values.dtype, device="cpu")
    as_stored = torch.uint8 if values.element_size() == 1 else values.dtype
    dense.view(as_stored)[bits] = values.flatten().view(as_stored)
    return dense, bits


def _is_packed(last: str, entry: Entry) -> bool:
    """Whether a part holds values of more than one weight in an element, or codes of them."""
    is_float = entry.dtype in TAGS or entry.dtype in FP8
    return not is_float and len(entry.shape) >= 2 and bool(PACKED.fullmatch(last))


def _sides(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """The rows and columns of a weight that share one of its scales; None if the scales do not fit it."""
    if math.prod(scale) == 1:
        scale = (1, 1)
    elif len(scale) == 1:
        scale = (scale[0], 1) if scale[0] == shape[0] else (0, 0)
    if len(scale) != 2:
        return None
    sides = [
        _side(length, count, block[at] if block else None)
        for at, (length, count) in enumerate(zip(shape, scale, strict=True))
    ]
    return (sides[0], sides[1]) if sides[0] and sides[1] else None


def _side(length: int, count: int, known: int | None) -> int:
    """The length of the blocks where `count` blocks cover a side; 0 if none fits."""
    if not length or not count:
        return 0
    if count in (1, length):
        return max(1, length // count)
    tried = (
        ([known] if known else [])
        + [*BLOCK_SIDES]
        + ([length // count] if count and length % count == 0 else [])
    )
    return next((each for each in tried if each and -(-length // each) == count), 0)


def _multiply(dense: Tensor, scale: Tensor, zero: Tensor | None, sides: tuple[int, int]) -> None:
    """dense = (dense - zero) * scale in place, each scale for its block of rows and columns."""
    rows, columns = sides
    grid = [-(-length // side) for length, side in zip(dense.shape, sides, strict=True)]

    def tall(each: Tensor) -> Tensor:
        return each.reshape(grid).repeat_interleave(rows, dim=0)[: dense.shape[0]]

    factors, zeros = tall(scale), None if zero is None else tall(zero)
    for at in range(grid[1]):
        part = dense[:, at * columns : (at + 1) * columns]
        if zeros is not None:
            part -= zeros[:, at : at + 1]
        part *= factors[:, at : at + 1]
