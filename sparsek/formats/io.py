"""Saving and loading: one or several matrices in one .safetensors file.

A matrix `w` is three tensors: `w.indptr` int32 [Mb+1], `w.indices` int32 [nnzb], `w.values` [nnzb, bm, bk].
The metadata in the header holds what tensors cannot: `sparsek`, a JSON text with the version and for every
matrix its kind, shape, block, dtype and the CRC-32 of its bytes; and `sparsek.crc32`, the CRC-32 of that
text. So damage anywhere is found on load. Any safetensors reader can open such a file.
"""

import json
import os
import reprlib
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsek.core import dtypes
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.formats.bsr import BSR
from sparsek.formats.pattern import BlockPattern

VERSION = 1
SINGLE = "matrix"
TAGS = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FIELDS = {"kind", "shape", "block", "dtype", "transposed", "crc32"}
PARTS = ("indptr", "indices", "values")
HEADER_LIMIT = 100_000_000  # the limit of the safetensors format
ALIGNMENT = 64

StrPath = str | os.PathLike[str]


def save(obj: BSR | Mapping[str, BSR], path: StrPath) -> None:
    """Write a BSR, or a dict of them by name, to `path` in the safetensors format.

    The file appears whole or not at all: it is written beside `path`, flushed to disk and renamed over it.
    A matrix on a GPU is copied to the host first. A `.T` view is written as the matrix that it views, with a
    flag: no value is moved, and `load` gives the view back. Raises InvalidInput for anything else than a BSR
    or a dict of them by name.
    """
    single = isinstance(obj, BSR)
    matrices = _checked({SINGLE: obj} if single else obj)
    tensors: dict[str, Tensor] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, matrix in matrices.items():
        base = matrix if matrix.order is None else matrix.T
        parts = {
            "indptr": base.pattern.indptr.cpu(),
            "indices": base.pattern.indices.cpu(),
            "values": base.values.detach().cpu(),
        }
        records[name] = {
            "kind": "bsr",
            "shape": list(base.shape),
            "block": list(base.block),
            "dtype": dtypes.name(base.dtype),
            "transposed": base is not matrix,
            "crc32": _crc32(parts),
        }
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    about = json.dumps({"version": VERSION, "single": single, "matrices": records})
    with _replacing(path) as file:
        _write(file, tensors, {"sparsek": about, "sparsek.crc32": str(zlib.crc32(about.encode()))})


@overload
def load(path: StrPath, name: str, device: torch.device | str = "cpu") -> BSR: ...
@overload
def load(path: StrPath, name: None = None, device: torch.device | str = "cpu") -> BSR | dict[str, BSR]: ...
def load(path: StrPath, name: str | None = None, device: torch.device | str = "cpu") -> BSR | dict[str, BSR]:
    """Read what `save` wrote: a BSR or a dict of them, as it was; with `name`, that one matrix of the dict.

    Everything read is checked. Raises InvalidFile, which names the file and the fault, for a file that is
    damaged, hostile or not SparseK's; InvalidInput, which lists near matches, for a name that is not there.
    """
    with opened(path) as file:
        single, records = _about(path, file.metadata())
        _check_tensors(path, file.keys(), records)
        if name is not None and name not in records:
            raise unknown_name(path, name, records)
        chosen = records if name is None else {name: records[name]}
        loaded = {each: _read(path, file, each, record).to(device) for each, record in chosen.items()}
    if single:
        name = SINGLE
    return loaded if name is None else loaded[name]


@contextmanager
def faults(path: StrPath, *errors: type[Exception]) -> Iterator[None]:
    """Turn `errors`, what a parser raises on bad bytes, into InvalidFile that names the file."""
    try:
        yield
    except InvalidFile:
        raise
    except errors as error:
        raise InvalidFile(f"{path}: {str(error) or type(error).__name__}") from error


@contextmanager
def opened(path: StrPath) -> Iterator[Any]:
    """A .safetensors file, opened by the safetensors library, which holds no hole, overlap or byte too many.

    Raises InvalidFile for bad bytes, here and while it is open, and OSError if there is no such file.
    """
    with Path(path).open("rb") as file:
        head, size = file.read(8), os.fstat(file.fileno()).st_size
    header = int.from_bytes(head, "little")
    if len(head) < 8 or header > size - 8:
        raise InvalidFile(f"{path}: no .safetensors file: {size} bytes; its header needs {8 + header}")
    if header > HEADER_LIMIT:
        raise InvalidFile(f"{path}: a header of {header} bytes is over the limit of {HEADER_LIMIT}")
    with faults(path, SafetensorError), safe_open(os.fspath(path), framework="pt") as file:
        yield file


def unknown_name(path: StrPath, name: str, names: Mapping[str, Any]) -> InvalidInput:
    """The error for a `name` that a file does not hold; it lists near names, or else the first few."""
    near = get_close_matches(name, names, n=5, cutoff=0.5)
    if near:
        hint = f"did you mean {', '.join(map(repr, near))}?"
    elif names:
        few = list(names)[:5]
        hint = f"it holds {', '.join(map(repr, few))}{', ...' if len(names) > len(few) else ''}"
    else:
        hint = "it holds none"
    return InvalidInput(f"{path}: no matrix named {name!r}; {hint}")


def _checked(matrices: Any) -> dict[str, BSR]:
    if not isinstance(matrices, Mapping):
        raise InvalidInput(f"save takes a BSR or a dict of them by name, not {type(matrices).__name__}")
    for name, matrix in matrices.items():
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"the name of a matrix must be a text that is not empty, not {name!r}")
        if not name.isprintable():
            raise InvalidInput(f"the name {name!r} holds characters that cannot be printed")
        if not isinstance(matrix, BSR):
            raise InvalidInput(f"{name!r} is {type(matrix).__name__}; save takes BSR matrices")
    return dict(matrices)


def _crc32(parts: Mapping[str, Tensor]) -> int:
    checksum = 0
    for part in PARTS:
        checksum = zlib.crc32(_bytes(parts[part]), checksum)
    return checksum


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous tensor of 0 or 1 elements has any stride
    return flat.view(torch.uint8).numpy().data


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Header length, header, bytes. Values come first: their sizes are multiples of 512 bytes, so that every
    block of a file that is mapped into memory is aligned."""
    header: dict[str, Any] = {"__metadata__": metadata}
    order = sorted(tensors, key=lambda name: not name.endswith(".values"))
    end = 0
    for name in order:
        tensor = tensors[name]
        tag = "I32" if tensor.dtype is torch.int32 else TAGS[dtypes.name(tensor.dtype)]
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise InvalidInput(f"{len(tensors)} tensors need a header of {len(text)} bytes, over {HEADER_LIMIT}")
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(_bytes(tensors[name]))


@contextmanager
def _replacing(path: StrPath) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when all of it is on disk, and vanishes if writing fails."""
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".sparsek-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _about(path: StrPath, metadata: Mapping[str, str] | None) -> tuple[bool, dict[str, dict[str, Any]]]:
    """(was a single matrix saved, record by name) of a file's metadata."""
    if not metadata or "sparsek" not in metadata or "sparsek.crc32" not in metadata:
        raise InvalidFile(f"{path}: not saved by SparseK: its metadata has no 'sparsek' and 'sparsek.crc32'")
    text = metadata["sparsek"]
    if metadata["sparsek.crc32"] != str(zlib.crc32(text.encode())):
        raise InvalidFile(f"{path}: its metadata is damaged: the checksum does not match")
    with faults(path, ValueError, RecursionError):
        about = json.loads(text, object_pairs_hook=lambda pairs: _unique(path, pairs))
    if not isinstance(about, dict) or type(about.get("version")) is not int:
        raise InvalidFile(f"{path}: its metadata has no version")
    if about["version"] != VERSION:
        raise InvalidFile(f"{path}: format version {about['version']}; this SparseK reads version {VERSION}")
    single, records = about.get("single"), about.get("matrices")
    if type(single) is not bool or not isinstance(records, dict) or len(about) != 3:
        raise InvalidFile(f"{path}: its metadata must be an object of version, single and matrices")
    if single and list(records) != [SINGLE]:
        raise InvalidFile(f"{path}: it says that it holds a single matrix, but names {len(records)}")
    for name, record in records.items():
        _check_record(f"{path}: {name!r}", record)
    return single, records


def _unique(path: StrPath, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = reprlib.repr([key for key, _ in pairs])
        raise InvalidFile(f"{path}: its metadata has a name twice among {names}")
    return out


def _check_record(where: str, record: Any) -> None:
    if not isinstance(record, dict) or set(record) != FIELDS:
        raise InvalidFile(f"{where}: its record must be an object of {', '.join(sorted(FIELDS))}")
    if record["kind"] != "bsr":
        raise InvalidFile(f"{where}: of unknown kind {reprlib.repr(record['kind'])}; known: 'bsr'")
    for field in ("shape", "block"):
        pair = record[field]
        if not isinstance(pair, list) or len(pair) != 2 or any(type(side) is not int for side in pair):
            raise InvalidFile(f"{where}: {field} must be two integers, not {reprlib.repr(pair)}")
    if not isinstance(record["dtype"], str) or record["dtype"] not in TAGS:
        word = reprlib.repr(record["dtype"])
        raise InvalidFile(f"{where}: dtype must be one of {', '.join(TAGS)}, not {word}")
    if type(record["transposed"]) is not bool or type(record["crc32"]) is not int:
        raise InvalidFile(f"{where}: transposed must be true or false, and crc32 an integer")


def _check_tensors(path: StrPath, found: list[str], records: Mapping[str, Any]) -> None:
    expected = {f"{name}.{part}" for name in records for part in PARTS}
    for fault, names in (("lacks", expected - set(found)), ("also has", set(found) - expected)):
        if names:
            raise InvalidFile(f"{path}: {fault} {len(names)} tensors: {', '.join(sorted(names))[:200]}")


def _read(path: StrPath, file: Any, name: str, record: Mapping[str, Any]) -> BSR:
    """The matrix of one record, on the CPU, in memory of its own: the file may change or vanish later."""
    tags = {"indptr": "I32", "indices": "I32", "values": TAGS[record["dtype"]]}
    ranks = {"indptr": 1, "indices": 1, "values": 3}
    parts: dict[str, Tensor] = {}
    for part in PARTS:
        view = file.get_slice(f"{name}.{part}")
        tag, shape = view.get_dtype(), view.get_shape()
        if tag != tags[part] or len(shape) != ranks[part]:
            must = f"{tags[part]} of {ranks[part]} dimensions"
            raise InvalidFile(f"{path}: '{name}.{part}' is {tag} of {len(shape)} dimensions; must be {must}")
        parts[part] = file.get_tensor(f"{name}.{part}").clone()
    if _crc32(parts) != record["crc32"]:
        raise InvalidFile(f"{path}: {name!r} is damaged: its checksum does not match")
    (m, k), (bm, bk) = record["shape"], record["block"]
    with faults(f"{path}: {name!r}", InvalidInput):
        matrix = BSR(BlockPattern((m, k), (bm, bk), parts["indptr"], parts["indices"]), parts["values"])
    return matrix.T if record["transposed"] else matrix
