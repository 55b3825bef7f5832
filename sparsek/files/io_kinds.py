"""What `save` can write and `load` can read: each kind of object as a record, which is JSON, and named tensors.

A record read from a file is hostile until its kind has checked it. The names of a kind's tensors hold no dot.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.mask.lists import BlockLists
from sparsek.mask.mask import LISTS, BlockMask
from sparsek.matrix.bsr import BSR, padding_nonzeros
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.pattern import BlockPattern
from sparsek.matrix.quantized import NAMES, SCALES, Matrix, Quantized
from sparsek.matrix.semi24 import Semi24

Record = dict[str, Any]
Tensors = dict[str, Tensor]

TAGS = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FLOAT8_TAGS = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
OTHER_TAGS = FLOAT8_TAGS | {torch.int32: "I32", torch.uint8: "U8"}
QUANTIZED_OF: dict[str, type] = {"bsr": BSR, "semi24": Semi24, "bsr24": BSR24}
LATER = frozenset({"fast_accum"})  # fields that files of earlier versions lack
RULE_RANKS = {"lo": 2, "hi": 2, "rules": 1, "bits": 3}  # of the tensors that a block mask may have or not


class Part(NamedTuple):
    """What a file must hold under a tensor's name: a dtype by the tag of the safetensors format, and its dimensions."""

    tag: str
    rank: int


class Kind(Protocol):
    """How objects of one class are written and read. `fields` are those of a record, beside its kind and checksum."""

    name: str
    of: type
    fields: frozenset[str]

    def taken_apart(self, obj: Any) -> tuple[Record, Tensors]:
        """The record and the tensors of an object: on the CPU and contiguous, in the order of its checksum."""
        ...

    def check(self, where: str, record: Record) -> None:
        """Raises InvalidFile if a field of a record is of the wrong sort."""
        ...

    def parts(self, record: Record) -> dict[str, Part]:
        """The tensors that a record needs, in the order of its checksum."""
        ...

    def made(self, record: Record, tensors: Tensors) -> Any:
        """The object. Its own constructor checks what it is made from, and raises InvalidInput."""
        ...


class BsrKind:
    name = "bsr"
    of = BSR
    fields = frozenset({"shape", "block", "dtype", "transposed"})

    def taken_apart(self, obj: BSR) -> tuple[Record, Tensors]:
        base = obj if obj.order is None else obj.T
        outside = padding_nonzeros(base)
        if outside:
            raise InvalidInput(
                f"{outside} values outside the {base.shape[0]}x{base.shape[1]} matrix are not zero, as writes to "
                "`values` in place can make them, and no file may hold them; call A.zero_padding_() first"
            )
        record = {
            "shape": list(base.shape),
            "block": list(base.block),
            "dtype": dtypes.name(base.dtype),
            "transposed": base is not obj,
        }
        parts = {
            "indptr": base.pattern.indptr,
            "indices": base.pattern.indices,
            "values": base.values.detach(),
        }
        return record, {part: tensor.cpu() for part, tensor in parts.items()}

    def check(self, where: str, record: Record) -> None:
        _check_pairs(where, record, "shape", "block")
        _check_dtype(where, record)
        _check_types(where, record, bool, "transposed")

    def parts(self, record: Record) -> dict[str, Part]:
        values = Part(TAGS[record["dtype"]], 3)
        return {"indptr": Part("I32", 1), "indices": Part("I32", 1), "values": values}

    def made(self, record: Record, tensors: Tensors) -> BSR:
        (m, k), (bm, bk) = record["shape"], record["block"]
        pattern = BlockPattern((m, k), (bm, bk), tensors["indptr"], tensors["indices"])
        matrix = BSR(pattern, tensors["values"])
        return matrix.T if record["transposed"] else matrix


class Semi24Kind:
    name = "semi24"
    of = Semi24
    fields = frozenset({"shape", "dtype"})

    def taken_apart(self, obj: Semi24) -> tuple[Record, Tensors]:
        obj = Semi24(obj.values.detach(), obj.meta)  # checks what was written in place, or never checked
        record = {"shape": list(obj.shape), "dtype": dtypes.name(obj.dtype)}
        return record, {"values": obj.values.cpu(), "meta": obj.meta.cpu()}

    def check(self, where: str, record: Record) -> None:
        _check_pairs(where, record, "shape")
        _check_dtype(where, record)

    def parts(self, record: Record) -> dict[str, Part]:
        return {"values": Part(TAGS[record["dtype"]], 2), "meta": Part("U8", 2)}

    def made(self, record: Record, tensors: Tensors) -> Semi24:
        matrix = Semi24(tensors["values"], tensors["meta"])
        if list(matrix.shape) != record["shape"]:
            raise InvalidInput(
                f"its record says shape {record['shape']}; its values are of shape {matrix.shape}"
            )
        return matrix


class Bsr24Kind:
    name = "bsr24"
    of = BSR24
    fields = frozenset({"shape", "block", "dtype"})

    def taken_apart(self, obj: BSR24) -> tuple[Record, Tensors]:
        obj = BSR24(
            obj.pattern, obj.values.detach(), obj.meta
        )  # checks what was written in place, or never checked
        record = {"shape": list(obj.shape), "block": list(obj.block), "dtype": dtypes.name(obj.dtype)}
        parts = {
            "indptr": obj.pattern.indptr,
            "indices": obj.pattern.indices,
            "values": obj.values,
            "meta": obj.meta,
        }
        return record, {part: tensor.cpu() for part, tensor in parts.items()}

    def check(self, where: str, record: Record) -> None:
        _check_pairs(where, record, "shape", "block")
        _check_dtype(where, record)

    def parts(self, record: Record) -> dict[str, Part]:
        values = Part(TAGS[record["dtype"]], 3)
        return {"indptr": Part("I32", 1), "indices": Part("I32", 1), "values": values, "meta": Part("U8", 3)}

    def made(self, record: Record, tensors: Tensors) -> BSR24:
        (m, k), (bm, bk) = record["shape"], record["block"]
        pattern = BlockPattern((m, k), (bm, bk), tensors["indptr"], tensors["indices"])
        return BSR24(pattern, tensors["values"], tensors["meta"])


class QuantizedKind:
    name = "scaled"
    of = Quantized
    fields = frozenset({"of", "shape", "block", "dtype", "transposed", "scale", "fast_accum"})

    def taken_apart(self, obj: Quantized) -> tuple[Record, Tensors]:
        base = obj.T if isinstance(obj.matrix, BSR) and obj.matrix.order is not None else obj
        # Checks what was written in place, or never checked.
        base = Quantized(base.matrix, base.scale, base.kind, base.fast_accum)
        matrix = base.matrix
        record: Record = {
            "of": next(name for name, of in QUANTIZED_OF.items() if isinstance(matrix, of)),
            "shape": list(base.shape),
            "block": None if isinstance(matrix, Semi24) else list(matrix.block),
            "dtype": NAMES[base.dtype],
            "transposed": matrix is not obj.matrix,
            "scale": base.kind,
            "fast_accum": base.fast_accum,
        }
        parts: Tensors = {}
        if not isinstance(matrix, Semi24):
            parts |= {"indptr": matrix.pattern.indptr, "indices": matrix.pattern.indices}
        parts["values"] = matrix.values.detach()
        if not isinstance(matrix, BSR):
            parts["meta"] = matrix.meta
        parts["scale"] = base.scale.detach()
        return record, {part: tensor.cpu() for part, tensor in parts.items()}

    def check(self, where: str, record: Record) -> None:
        _check_one_of(where, record, "of", QUANTIZED_OF)
        _check_one_of(where, record, "dtype", NAMES.values())
        _check_one_of(where, record, "scale", SCALES)
        _check_pairs(where, record, "shape")
        _check_types(where, record, bool, "transposed", *LATER & record.keys())
        if record["of"] != "semi24":
            _check_pairs(where, record, "block")
        elif record["block"] is not None:
            raise InvalidFile(
                f"{where}: a semi24 has no block; its record says {reprlib.repr(record['block'])}"
            )

    def parts(self, record: Record) -> dict[str, Part]:
        rank = 2 if record["of"] == "semi24" else 3
        tag = next(FLOAT8_TAGS[dtype] for dtype, name in NAMES.items() if name == record["dtype"])
        parts = {"indptr": Part("I32", 1), "indices": Part("I32", 1)} if rank == 3 else {}
        parts["values"] = Part(tag, rank)
        if record["of"] != "bsr":
            parts["meta"] = Part("U8", rank)
        return parts | {"scale": Part("F32", 0 if record["scale"] == "tensor" else 1)}

    def made(self, record: Record, tensors: Tensors) -> Quantized:
        fast_accum = record.get("fast_accum", False)
        made = Quantized(_quantized_matrix(record, tensors), tensors["scale"], record["scale"], fast_accum)
        if list(made.shape) != record["shape"]:
            raise InvalidInput(
                f"its record says shape {record['shape']}; its values are of shape {made.shape}"
            )
        return made.T if record["transposed"] else made


def _quantized_matrix(record: Record, tensors: Tensors) -> Matrix:
    """The matrix of FP8 values; its parts are not checked."""
    values = tensors["values"]
    if record["of"] == "semi24":
        return Semi24.unchecked(values, tensors["meta"])
    (m, k), (bm, bk) = record["shape"], record["block"]
    pattern = BlockPattern((m, k), (bm, bk), tensors["indptr"], tensors["indices"])
    if record["of"] == "bsr":
        return BSR.unchecked(pattern, values)
    return BSR24.unchecked(pattern, values, tensors["meta"])


class BlockMaskKind:
    name = "block_mask"
    of = BlockMask
    fields = frozenset({"lengths", "block", "batch", "heads", "pure", "label", "rule"})

    def taken_apart(self, obj: BlockMask) -> tuple[Record, Tensors]:
        obj.verify(wait=True)
        if not obj.label.isprintable():
            raise InvalidInput(f"the label {shown(obj.label)} holds characters that cannot be printed")
        rule = [name for name in RULE_RANKS if getattr(obj, name) is not None]
        record = {
            "lengths": [obj.q_len, obj.kv_len],
            "block": list(obj.block),
            "batch": obj.batch,
            "heads": obj.heads,
            "pure": obj.pure,
            "label": obj.label,
            "rule": rule,
        }
        parts = {
            f"{name}_{part}": tensor
            for name in LISTS
            for part, tensor in getattr(obj, name)._asdict().items()
        }
        parts |= {name: getattr(obj, name) for name in rule}
        return record, {part: tensor.cpu().contiguous() for part, tensor in parts.items()}

    def check(self, where: str, record: Record) -> None:
        _check_pairs(where, record, "lengths", "block")
        _check_types(where, record, int, "batch", "heads")
        _check_types(where, record, bool, "pure")
        _check_types(where, record, str, "label")
        if not record["label"].isprintable():
            raise InvalidFile(f"{where}: its label holds characters that cannot be printed")
        rule = record["rule"]
        if not isinstance(rule, list) or rule != [name for name in RULE_RANKS if name in rule]:
            raise InvalidFile(
                f"{where}: rule must list some of {', '.join(RULE_RANKS)}, not {reprlib.repr(rule)}"
            )

    def parts(self, record: Record) -> dict[str, Part]:
        lists = {f"{name}_{part}": Part("I32", 1) for name in LISTS for part in BlockLists._fields}
        return lists | {name: Part("I32", RULE_RANKS[name]) for name in record["rule"]}

    def made(self, record: Record, tensors: Tensors) -> BlockMask:
        fields: dict[str, Any] = {name: record[name] for name in ("batch", "heads", "pure", "label")}
        for name in LISTS:
            fields[name] = BlockLists(*(tensors[f"{name}_{part}"] for part in BlockLists._fields))
        fields |= {name: tensors[name] for name in record["rule"]}
        (q_len, kv_len), (bq, bk) = record["lengths"], record["block"]
        return BlockMask(q_len=q_len, kv_len=kv_len, block=(bq, bk), **fields)


KINDS: tuple[Kind, ...] = (BsrKind(), Semi24Kind(), Bsr24Kind(), QuantizedKind(), BlockMaskKind())


def kind_of_object(obj: Any) -> Kind | None:
    """The kind of an object; None for one that `save` cannot write."""
    return next((kind for kind in KINDS if isinstance(obj, kind.of)), None)


def kind_of_record(where: str, record: Any) -> Kind:
    """The kind of a record from a file, with the fields of that kind, checked. Raises InvalidFile."""
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        raise InvalidFile(f"{where}: its record must be an object with a kind")
    kind = next((kind for kind in KINDS if kind.name == record["kind"]), None)
    if kind is None:
        known = ", ".join(repr(kind.name) for kind in KINDS)
        raise InvalidFile(f"{where}: of unknown kind {reprlib.repr(record['kind'])}; known: {known}")
    wanted = kind.fields | {"kind", "crc32"}
    if not wanted - LATER <= set(record) <= wanted:
        raise InvalidFile(f"{where}: its record must be an object of {', '.join(sorted(wanted))}")
    _check_types(where, record, int, "crc32")
    kind.check(where, record)
    return kind


def _check_pairs(where: str, record: Record, *names: str) -> None:
    for name in names:
        pair = record[name]
        if not isinstance(pair, list) or len(pair) != 2 or any(type(side) is not int for side in pair):
            raise InvalidFile(f"{where}: {name} must be two integers, not {reprlib.repr(pair)}")


def _check_dtype(where: str, record: Record) -> None:
    _check_one_of(where, record, "dtype", TAGS)


def _check_one_of(where: str, record: Record, name: str, known: Iterable[str]) -> None:
    found, words = record[name], list(known)
    if not isinstance(found, str) or found not in words:
        raise InvalidFile(f"{where}: {name} must be one of {', '.join(words)}, not {reprlib.repr(found)}")


def _check_types(where: str, record: Record, wanted: type, *names: str) -> None:
    words = {bool: "true or false", int: "an integer", str: "a text"}
    for name in names:
        if type(record[name]) is not wanted:
            raise InvalidFile(f"{where}: {name} must be {words[wanted]}, not {reprlib.repr(record[name])}")
