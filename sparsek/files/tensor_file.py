"""The safetensors format: tensors by name behind a header in JSON. https://github.com/huggingface/safetensors#format

Files are read, not mapped into memory: a mapped file that another process cuts ends this process by SIGBUS, and a short
read is an error that names the file. All sizes that a header declares are checked against the length of the file, and
against the free memory before a tensor is allocated.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeGuard

import torch
from torch import Tensor

from sparsek.core import dtypes, files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.memory import check_free, out_of_memory
from sparsek.core.parsing import json_value

HEADER_LIMIT = 100_000_000  # bytes, the limit of the format
MOST = 2**63 - 1
ALIGNMENT = 64
ZIP = b"PK\x03\x04"  # the first bytes of a zip
TAGS = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FLOAT8_TAGS = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
OTHER_TAGS = FLOAT8_TAGS | {torch.int32: "I32", torch.uint8: "U8"}
# Dtypes of the format that can be read here, and all others with their bits.
DTYPES = {tag: dtypes.parse(name) for name, tag in TAGS.items()} | {tag: of for of, tag in OTHER_TAGS.items()}
DTYPES |= {
    "F8_E8M0": torch.float8_e8m0fnu,
    "BOOL": torch.bool,
    "I8": torch.int8,
    "I16": torch.int16,
    "I64": torch.int64,
}
TAG_OF = {dtype: tag for tag, dtype in DTYPES.items()}
BITS = {tag: dtype.itemsize * 8 for tag, dtype in DTYPES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64}


class StoredTensor(NamedTuple):
    """A tensor of a file: its dtype by the tag of the format, its shape, and where its bytes begin and end."""

    tag: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open file whose header has been checked: `metadata`, and `tensors` by name, in the order of the names."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.metadata, self.tensors = _header(path, file)

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own. Raises InvalidFile if the file has become shorter, for a dtype that torch
        lacks, and where there is no memory.
        """
        found = self.tensors[name]
        what, size = f"{shown(name)} of shape {shown(list(found.shape))}", found.end - found.start
        if found.tag not in DTYPES:
            raise InvalidFile(f"{self.path}: {what} is {found.tag}, which is not read")
        check_free(self.path, what, size)
        try:
            flat = torch.empty(size, dtype=torch.uint8, device="cpu")
        except (MemoryError, RuntimeError) as error:
            if out_of_memory(error) is None:
                raise
            raise InvalidFile(f"{self.path}: {what} takes {size / 1e9:.3g} GB, which are not free") from None
        view, done = flat.numpy().data, 0
        self.file.seek(found.start)
        while done < size:
            count = self.file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise InvalidFile(
                    f"{self.path}: ends after {done} of the {size} bytes of {shown(name)}: it was cut while it was read"
                )
            done += count
        with files.faults(self.path, RuntimeError):
            return flat.view(DTYPES[found.tag]).view(found.shape)


@contextmanager
def opened(path: Path) -> Iterator[TensorFile]:
    """A .safetensors file, opened for reading. Raises InvalidFile for any other file, with the fault."""
    with files.regular(path) as file:
        yield TensorFile(path, file)


def _header(path: Path, file: BinaryIO) -> tuple[dict[str, str], dict[str, StoredTensor]]:
    head, size = file.read(8), os.fstat(file.fileno()).st_size
    length = int.from_bytes(head, "little")
    if head.startswith(ZIP) and (length > size - 8 or length > HEADER_LIMIT):
        raise InvalidFile(
            f"{path}: no .safetensors file but a zip, as torch.save writes; read it by torch.load"
        )
    if len(head) < 8 or length > size - 8:
        raise InvalidFile(f"{path}: no .safetensors file: {size} bytes; its header needs {8 + length}")
    if length > HEADER_LIMIT:
        raise InvalidFile(f"{path}: a header of {length} bytes is over the limit of {HEADER_LIMIT}")
    text = file.read(length)
    if len(text) < length:
        raise InvalidFile(
            f"{path}: ends after {len(text)} of the {length} bytes of its header: it was cut while it was read"
        )
    with files.faults(path, ValueError):
        header = json_value(text.decode(), f"{path}: its header", once=True)
    if not isinstance(header, dict):
        raise InvalidFile(f"{path}: its header must be a JSON object")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(map(_is_text, [*metadata, *metadata.values()])):
        raise InvalidFile(f"{path}: its __metadata__ must have texts by name")
    tensors = {name: _stored(path, name, each, 8 + length) for name, each in sorted(header.items())}
    _check_places(path, tensors, 8 + length, size)
    return metadata, tensors


def _is_text(value: Any) -> bool:
    """Whether it is a text that UTF-8 can hold; JSON can spell others."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _stored(path: Path, name: str, found: Any, start: int) -> StoredTensor:
    """The entry of one tensor; its offsets count from `start`."""
    if not _is_text(name):
        raise InvalidFile(f"{path}: a tensor has the name {shown(name)}, which is no text")
    about = found if isinstance(found, dict) else {}
    tag, shape, offsets = (about.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(tag, str) and _are_sizes(shape) and _are_sizes(offsets)):
        raise InvalidFile(f"{path}: {shown(name)} must have a dtype, a shape and data_offsets")
    if tag not in BITS:
        raise InvalidFile(f"{path}: {shown(name)} is of unknown dtype {shown(tag)}")
    bits = math.prod(shape) * BITS[tag]
    if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != bits:
        what = f"{shown(name)}, {tag} of shape {shown(shape)}"
        raise InvalidFile(
            f"{path}: {what}, needs {-(-bits // 8)} bytes; its data_offsets are {shown(offsets)}"
        )
    return StoredTensor(tag, tuple(shape), start + offsets[0], start + offsets[1])


def _are_sizes(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(each) is int and 0 <= each <= MOST for each in found)


def _check_places(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    """Raise InvalidFile unless the tensors fill the file behind its header, without holes and overlaps."""
    for name, each in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if each.start != start:
            fault = "overlaps another tensor" if each.start < start else "leaves a hole before it"
            raise InvalidFile(f"{path}: {shown(name)} {fault}: it begins at byte {each.start}, not {start}")
        start = each.end
    if start != size:
        fault = f"is cut off: {size} of {start} bytes" if size < start else f"goes on after its {start} bytes"
        raise InvalidFile(f"{path}: {fault}")


class Writer:
    """Writes a file whose header is known last: its length is that of `metadata` with the longest texts.

    Values of blocks come first: their sizes are multiples of 256 bytes, so every block of a file that is mapped into
    memory is aligned. Tensors of single bytes come last, because they may have any size.
    """

    def __init__(self, file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.file, self.header = file, {}
        end = 0
        for name in sorted(tensors, key=lambda name: _rank(name, tensors[name])):
            tensor = tensors[name]
            tag = TAG_OF.get(tensor.dtype)
            if tag is None:
                raise InvalidInput(f"{shown(name)} is {tensor.dtype}, which .safetensors files do not have")
            start, end = end, end + tensor.nbytes
            self.header[name] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [start, end]}
        length = len(self._text(metadata))
        self.length = length + -(8 + length) % ALIGNMENT
        if self.length > HEADER_LIMIT:
            raise InvalidInput(
                f"{len(tensors)} tensors need a header of {self.length} bytes, over {HEADER_LIMIT}"
            )

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor, contiguous and on the CPU, at its place."""
        self.file.seek(8 + self.length + self.header[name]["data_offsets"][0])
        self.file.write(as_bytes(tensor))

    def finish(self, metadata: Mapping[str, str]) -> None:
        self.file.seek(0)
        self.file.write(self.length.to_bytes(8, "little") + self._text(metadata).ljust(self.length))

    def _text(self, metadata: Mapping[str, str]) -> bytes:
        return json.dumps({"__metadata__": metadata, **self.header}, separators=(",", ":")).encode()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous tensor of 0 or 1 elements has any stride
    return flat.view(torch.uint8).numpy().data


def _rank(name: str, tensor: Tensor) -> int:
    """The place of a tensor in a file: values of blocks, of whole matrices, integers and scales, single bytes."""
    values = name.endswith(".values")
    if values and tensor.ndim == 3:
        return 0
    if tensor.element_size() == 1:
        return 3
    return 1 if values else 2
