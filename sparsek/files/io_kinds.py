"""The kinds of objects that `save` writes and `load` reads: each as a JSON record and named tensors.

A record from a file is hostile until its kind has checked it. The names of tensors contain no dot.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sparsek.attn.mask.data import LISTS
from sparsek.attn.mask.lists import BlockLists, Members
from sparsek.attn.mask.mask import BlockMask
from sparsek.core import dtypes
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.files.tensor_file import FLOAT8_TAGS, TAGS
from sparsek.products.formats.bsr import BSR, padding_nonzeros
from sparsek.products.formats.pattern import BlockPattern
from sparsek.products.formats.quantized import FORMATS, NAMES, SCALES, Matrix, Quantized
from sparsek.products.formats.semi24 import Semi24

Record = dict[str, Any]
Tensors = dict[str, Tensor]

LATER = frozenset({"fast_accum", "members"})  # fields that files of earlier versions lack
RULE_RANKS = {"lo": 2, "hi": 2, "rules": 1, "bits": 3}  # dimensions of the optional tensors of a block mask


class TensorPart(NamedTuple):
    """A tensor that a file must contain: its dtype, by the tag of the safetensors format, and number of dimensions."""

    tag: str
    rank: int


class Kind(Protocol):
    """How objects of one class are written and read. `fields` are those of a record, besides its kind and checksum."""

    name: str
    of: type
    fields: frozenset[str]

    def taken_apart(self, obj: Any) -> tuple[Record, Tensors]:
        """Return the record of an object and its own tensors, in the order of the checksum."""
        ...

    def check(self, where: str, record: Record) -> None:
        """Raise InvalidFile if a field of a record is of the wrong type."""
        ...

    def parts(self, record: Record) -> dict[str, TensorPart]:
        """Return the tensors that a record needs, in the order of the checksum."""
        ...

    def made(self, record: Record, tensors: Tensors) -> Any:
        """Return the object. Its constructor checks the parts, and raises InvalidInput."""
        ...


class MatrixKind:
    """A BSR, Semi24 or BSR24."""

    def __init__(self, name: str) -> None:
        self.name, self.of = name, FORMATS[name]
        self.of_blocks, self.views = name != "semi24", name == "bsr"
        self.fields = frozenset({"shape", "dtype", *["block"] * self.of_blocks, *["transposed"] * self.views})

    def taken_apart(self, obj: Any) -> tuple[Record, Tensors]:
        base = _as_stored(obj)
        record: Record = {"shape": list(base.shape)}
        if self.of_blocks:
            record["block"] = list(base.block)
        record["dtype"] = dtypes.name(base.dtype)
        if self.views:
            record["transposed"] = base is not obj
        # Checks what was written in place, or never checked.
        if isinstance(base, BSR):
            _check_padding(base)
        else:
            base.detach()._checked()
        return record, _stored(base)

    def check(self, where: str, record: Record) -> None:
        _check_pairs(where, record, "shape", *["block"] * self.of_blocks)
        _check_one_of(where, record, "dtype", TAGS)
        _check_types(where, record, bool, *["transposed"] * self.views)

    def parts(self, record: Record) -> dict[str, TensorPart]:
        return _needed(self.name, TAGS[record["dtype"]])

    def made(self, record: Record, tensors: Tensors) -> Any:
        matrix = _of_shape(_joined(self.of, record, tensors), record)
        return matrix.T if self.views and record["transposed"] else matrix


class QuantizedKind:
    """A Quantized. Its kind in files is called "scaled"."""

    name = "scaled"
    of = Quantized
    fields = frozenset({"of", "shape", "block", "dtype", "transposed", "scale", "fast_accum"})

    def taken_apart(self, obj: Quantized) -> tuple[Record, Tensors]:
        # Checks what was written in place, or never checked.
        base = (obj if _as_stored(obj.matrix) is obj.matrix else obj.T)._checked()
        matrix = base.matrix
        record: Record = {
            "of": next(name for name, of in FORMATS.items() if isinstance(matrix, of)),
            "shape": list(base.shape),
            "block": None if isinstance(matrix, Semi24) else list(matrix.block),
            "dtype": NAMES[base.dtype],
            "transposed": matrix is not obj.matrix,
            "scale": base.kind,
            "fast_accum": base.fast_accum,
        }
        return record, _stored(matrix) | {"scale": base.scale.detach()}

    def check(self, where: str, record: Record) -> None:
        _check_one_of(where, record, "of", FORMATS)
        _check_one_of(where, record, "dtype", NAMES.values())
        _check_one_of(where, record, "scale", SCALES)
        _check_pairs(where, record, "shape")
        _check_types(where, record, bool, "transposed", *LATER & record.keys())
        if record["of"] != "semi24":
            _check_pairs(where, record, "block")
        elif record["block"] is not None:
            raise InvalidFile(
                f"{where}: a semi24 has no block; that of its record is {reprlib.repr(record['block'])}"
            )

    def parts(self, record: Record) -> dict[str, TensorPart]:
        tag = next(FLOAT8_TAGS[dtype] for dtype, name in NAMES.items() if name == record["dtype"])
        scale = TensorPart("F32", 0 if record["scale"] == "tensor" else 1)
        return _needed(record["of"], tag) | {"scale": scale}

    def made(self, record: Record, tensors: Tensors) -> Quantized:
        matrix = _joined(FORMATS[record["of"]].unchecked, record, tensors)
        fast_accum = record.get("fast_accum", False)
        made = _of_shape(Quantized(matrix, tensors["scale"], record["scale"], fast_accum), record)
        return made.T if record["transposed"] else made


def _as_stored(a: Matrix) -> Any:
    """The matrix that a transposed view views, or else the matrix itself."""
    return a.T if isinstance(a, BSR) and a.order is not None else a


def _check_padding(a: BSR) -> None:
    outside = padding_nonzeros(a)
    if outside:
        raise InvalidInput(
            f"{outside} values outside the {a.shape[0]}x{a.shape[1]} matrix are not zero, as writes to "
            "`values` in place can make them, and no file may hold them; call A.zero_padding_() first"
        )


def _stored(a: Matrix) -> Tensors:
    """The tensors of a matrix, in the order of its checksum."""
    parts = {} if isinstance(a, Semi24) else {"indptr": a.pattern.indptr, "indices": a.pattern.indices}
    parts["values"] = a.values.detach()
    return parts if isinstance(a, BSR) else parts | {"meta": a.meta}


def _needed(of: str, tag: str) -> dict[str, TensorPart]:
    """The tensors that a file must contain for a matrix, with values of that tag."""
    rank = 2 if of == "semi24" else 3
    parts = {"indptr": TensorPart("I32", 1), "indices": TensorPart("I32", 1)} if rank == 3 else {}
    parts["values"] = TensorPart(tag, rank)
    return parts if of == "bsr" else parts | {"meta": TensorPart("U8", rank)}


def _joined(make: Callable[..., Matrix], record: Record, tensors: Tensors) -> Matrix:
    """Call `make`, a class or its `unchecked`, with the tensors."""
    stored: list[Any] = [tensors[part] for part in ("values", "meta") if part in tensors]
    if "indptr" in tensors:
        (m, k), (bm, bk) = record["shape"], record["block"]
        stored.insert(0, BlockPattern((m, k), (bm, bk), tensors["indptr"], tensors["indices"]))
    return make(*stored)


def _of_shape(matrix: Any, record: Record) -> Any:
    if list(matrix.shape) != record["shape"]:
        raise InvalidInput(f"its record has shape {record['shape']}; its values are of shape {matrix.shape}")
    return matrix


class BlockMaskKind:
    name = "block_mask"
    of = BlockMask
    fields = frozenset({"lengths", "block", "batch", "heads", "pure", "label", "rule", "members"})

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
        if obj.members is not None:
            record["members"] = list(obj.members)
        parts = {
            f"{name}_{part}": tensor
            for name in LISTS
            for part, tensor in getattr(obj, name)._asdict().items()
        }
        parts |= {name: getattr(obj, name) for name in rule}
        return record, parts

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

        members = record.get("members", [1, 0, 0])
        if not isinstance(members, list) or len(members) != 3 or any(type(x) is not int for x in members):
            raise InvalidFile(f"{where}: members must be three integers, not {reprlib.repr(members)}")

    def parts(self, record: Record) -> dict[str, TensorPart]:
        lists = {f"{name}_{part}": TensorPart("I32", 1) for name in LISTS for part in BlockLists._fields}
        return lists | {name: TensorPart("I32", RULE_RANKS[name]) for name in record["rule"]}

    def made(self, record: Record, tensors: Tensors) -> BlockMask:
        fields: dict[str, Any] = {name: record[name] for name in ("batch", "heads", "pure", "label")}
        for name in LISTS:
            fields[name] = BlockLists(*(tensors[f"{name}_{part}"] for part in BlockLists._fields))
        fields |= {name: tensors[name] for name in record["rule"]}
        if "members" in record:
            fields["members"] = Members(*record["members"])
        (q_len, kv_len), (bq, bk) = record["lengths"], record["block"]
        return BlockMask(q_len=q_len, kv_len=kv_len, block=(bq, bk), **fields)


KINDS: tuple[Kind, ...] = (*map(MatrixKind, FORMATS), QuantizedKind(), BlockMaskKind())


def kind_of_object(obj: Any) -> Kind | None:
    """Return the kind of an object; None for one that `save` cannot write."""
    return next((kind for kind in KINDS if isinstance(obj, kind.of)), None)


def kind_of_record(where: str, record: Any) -> Kind:
    """Return the kind of a record from a file, after checking its fields. Raises InvalidFile."""
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


def _check_one_of(where: str, record: Record, name: str, known: Iterable[str]) -> None:
    found, words = record[name], list(known)
    if not isinstance(found, str) or found not in words:
        raise InvalidFile(f"{where}: {name} must be one of {', '.join(words)}, not {reprlib.repr(found)}")


def _check_types(where: str, record: Record, wanted: type, *names: str) -> None:
    words = {bool: "true or false", int: "an integer", str: "a text"}
    for name in names:
        if type(record[name]) is not wanted:
            raise InvalidFile(f"{where}: {name} must be {words[wanted]}, not {reprlib.repr(record[name])}")
