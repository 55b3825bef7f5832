"""`save` and `load`: one or several matrices and block masks in one .safetensors file.

A BSR `w` is three tensors: `w.indptr` int32 [Mb+1], `w.indices` int32 [nnzb], `w.values` [nnzb, bm, bk]. A BSR24 has
`w.values` [nnzb, bm, bk/2] and a fourth, `w.meta` uint8 [nnzb, bm, bk/8]. A Semi24 `w` is `w.values` [M, K/2] and
`w.meta` uint8 [M, K/8]. A Quantized `w` has the tensors of the matrix in it, its values in F8_E4M3 or F8_E5M2, and
`w.scale` float32 [], [M] or [nnzb]. A block mask `m` is int32 tensors: `m.full_starts`, `m.full_counts`,
`m.full_indices`, the same three of `partial`, and those of `m.lo`, `m.hi`, `m.rules` and `m.bits` that it has.

The metadata in the header has two entries: `sparsek`, a JSON text with the version and, for every object, its kind,
sizes and the CRC-32 of its bytes; and `sparsek.crc32`, the CRC-32 of that text. So `load` finds damage anywhere. Any
safetensors reader can open the file.
"""

import json
import zlib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.core import arguments, files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.files import StrPath
from sparsek.core.memory import check_free
from sparsek.core.parsing import json_value
from sparsek.core.tracing import outside_inference
from sparsek.files.io_kinds import Kind, Record, kind_of_object, kind_of_record
from sparsek.files.tensor_file import TensorFile, Writer, as_bytes, opened
from sparsek.products.formats.quantized import SparseMatrix

VERSION = 1
SINGLE = "matrix"  # the name of an object that was saved alone, a mask too: the format is older than masks
LARGEST_CRC = 2**32 - 1

Saved: TypeAlias = SparseMatrix | BlockMask
Loaded = TypeVar("Loaded")


def save(obj: Saved | Mapping[str, Saved], path: StrPath) -> None:
    """Save a BSR, Semi24, BSR24, Quantized or BlockMask, or several by name, to a .safetensors file.

    The write is atomic: the data is written beside `path`, flushed to disk, and renamed to it; mode and owner of a file
    that is replaced stay. Each object is copied to the host before it is written, one at a time, so a thread that
    writes to its values meanwhile does no harm to the file. A transposed view is saved as the matrix that it views,
    with a flag.

    Args:
        obj: The object, or a dict of them by name.
        path: The file, by convention with the suffix .safetensors. It is replaced if it exists.

    Raises:
        InvalidInput: For other objects, for a path that is no regular file's, for one that cannot be written, and if
            another thread makes an object wrong while it is saved.

    Examples:
        >>> A = sk.random_bsr(256, 128, block=32, density=0.25)
        >>> sk.save({"up": A, "down": A.T}, "weights.safetensors")
        >>> sk.load("weights.safetensors", "up", kind=sk.BSR)
        BSR(256x128 fp32, block 32x32, 8 of 32 blocks, 25 %, 0.0328 MB, cpu)
    """
    target = files.as_path("path", path)
    single = isinstance(obj, Saved)
    kinds: dict[str, Kind] = {}
    records: dict[str, Record] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, (each, kind) in _checked({SINGLE: obj} if single else obj).items():
        kinds[name] = kind
        record, parts[name] = kind.taken_apart(each)
        records[name] = {"kind": kind.name, **record, "crc32": LARGEST_CRC}
    tensors = {f"{name}.{part}": tensor for name in parts for part, tensor in parts[name].items()}
    longest = _metadata(single, records) | {"sparsek.crc32": str(LARGEST_CRC)}
    with files.replacing(target) as file:
        writer = Writer(file, tensors, longest)
        for name, kind in kinds.items():
            copied = _snapshot(name, kind, records[name], parts[name])
            records[name]["crc32"] = _crc32(copied)
            for part, tensor in copied.items():
                writer.put(f"{name}.{part}", tensor)
        writer.finish(_metadata(single, records))


@overload
def load(
    path: StrPath, name: str | None = None, device: torch.device | str = "cpu", *, kind: type[Loaded]
) -> Loaded: ...
@overload
def load(
    path: StrPath, name: str | None = None, device: torch.device | str = "cpu", *, kind: None = None
) -> Any: ...
@outside_inference
def load(
    path: StrPath, name: str | None = None, device: torch.device | str = "cpu", *, kind: type | None = None
) -> Any:
    """Load what `save` wrote: a matrix, a mask, or a dict of them.

    Everything is checked, checksums included. Objects go to another device one at a time, so the host needs memory for
    the largest, and for all only where they stay on the CPU.

    Args:
        path: The file.
        name: Load only the object of that name.
        device: Where to put the tensors.
        kind: The class that the result must have, for example `sk.BSR`, or dict; type checkers then know it.

    Returns:
        The object that was saved, or the dict of objects; with `name`, one object.

    Raises:
        InvalidFile: For a file that is damaged, hostile, not written by `save`, or no regular file.
        InvalidInput: For a name that is not in the file, with similar ones in the message; and for an object of another
            class than `kind`.
        FileNotFoundError: If there is no file.
    """
    path, device = files.as_path("path", path), arguments.device("device", device)
    if name is not None:
        arguments.encodable("name", name)
    if kind is not None and not isinstance(kind, type):
        raise InvalidInput(f"kind is {shown(kind)}; it must be a class, like sparsek.BSR")
    with opened(path) as file:
        single, records, kinds = _about(path, file.metadata)
        expected = {f"{each}.{part}" for each, kind in kinds.items() for part in kind.parts(records[each])}
        _check_tensors(path, set(file.tensors), expected)
        if name is not None and name not in records:
            raise unknown_name(path, name, records)
        chosen = records if name is None else {name: records[name]}
        sizes = {each: _size(file, each, kinds[each].parts(record)) for each, record in chosen.items()}
        what, takes = "all of it" if name is None else shown(name), sum(sizes.values())
        if device.type != "cpu" and len(sizes) > 1:  # they go there one at a time
            largest = max(sizes, key=lambda each: sizes[each])
            what, takes = shown(largest), sizes[largest]
        check_free(path, what, takes)
        loaded = {
            each: _read(path, file, each, kinds[each], record).to(device) for each, record in chosen.items()
        }
    if single:
        name = SINGLE
    found = loaded if name is None else loaded[name]
    if kind is not None and not isinstance(found, kind):
        right = [each for each in loaded if name is None and isinstance(loaded[each], kind)]
        cure = f"; pass name={shown(right[0])}, one of {_few(right)}" if right else ""
        raise InvalidInput(f"{path}: it holds a {type(found).__name__}, not a {kind.__name__}{cure}")
    return found


def _few(names: Iterable[str]) -> str:
    """The first names, for a message."""
    names = list(names)
    few = names[:5]
    return f"{', '.join(map(shown, few))}{', ...' if len(names) > len(few) else ''}"


def unknown_name(path: StrPath, name: Any, names: Mapping[str, Any]) -> InvalidInput:
    """The error for a `name` that is not in a file; it lists similar names, or else the first few."""
    near = get_close_matches(name, names, n=5, cutoff=0.5) if isinstance(name, str) else []
    if near:
        hint = f"did you mean {', '.join(map(shown, near))}?"
    elif names:
        hint = f"it holds {_few(names)}"
    else:
        hint = "it holds none"
    return InvalidInput(f"{path}: no matrix named {shown(name)}; {hint}")


def _checked(objects: Any) -> dict[str, tuple[Saved, Kind]]:
    if not isinstance(objects, Mapping):
        found = arguments.shown(objects)
        raise InvalidInput(
            f"save takes a BSR, Semi24, BSR24, Quantized, BlockMask or a dict of them by name, not {found}"
        )
    checked: dict[str, tuple[Saved, Kind]] = {}
    for name, each in objects.items():
        if not isinstance(name, str) or not name:
            raise InvalidInput(
                f"the name of a matrix or mask must be a text that is not empty, not {shown(name)}"
            )
        if not name.isprintable():
            raise InvalidInput(f"the name {shown(name)} holds characters that cannot be printed")
        kind = kind_of_object(each)
        if kind is None:
            raise InvalidInput(
                f"{shown(name)} is {shown(each)}; save takes BSR, Semi24, BSR24, Quantized and BlockMask"
            )
        checked[name] = each, kind
    return checked


def _crc32(parts: Mapping[str, Tensor]) -> int:
    checksum = 0
    for tensor in parts.values():
        checksum = zlib.crc32(as_bytes(tensor), checksum)
    return checksum


def _metadata(single: bool, records: Mapping[str, Record]) -> dict[str, str]:
    about = json.dumps({"version": VERSION, "single": single, "matrices": records})
    return {"sparsek": about, "sparsek.crc32": str(zlib.crc32(about.encode()))}


def _snapshot(name: str, kind: Kind, record: Record, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors of an object, on the CPU, which `load` accepts: another thread may write to the originals.

    Raises InvalidInput if that has made them wrong since they were checked.
    """
    copied = {part: tensor.to("cpu", copy=True).contiguous() for part, tensor in parts.items()}
    try:
        kind.made(record, copied)
    except InvalidInput as error:
        raise InvalidInput(f"{shown(name)} was changed while it was saved: {error}") from error
    return copied


def _about(
    path: StrPath, metadata: Mapping[str, str] | None
) -> tuple[bool, dict[str, Record], dict[str, Kind]]:
    """Whether a single object was saved, the records by name, and the kinds by name, from the metadata of a file."""
    if not metadata or "sparsek" not in metadata or "sparsek.crc32" not in metadata:
        raise InvalidFile(f"{path}: not saved by SparseK: its metadata has no 'sparsek' and 'sparsek.crc32'")
    text = metadata["sparsek"]
    if metadata["sparsek.crc32"] != str(zlib.crc32(text.encode())):
        raise InvalidFile(f"{path}: its metadata is damaged: the checksum does not match")
    about = json_value(text, f"{path}: its metadata", once=True)
    if not isinstance(about, dict) or type(about.get("version")) is not int:
        raise InvalidFile(f"{path}: its metadata has no version")
    if about["version"] != VERSION:
        raise InvalidFile(
            f"{path}: format version {shown(about['version'])}; this SparseK reads version {VERSION}"
        )
    single, records = about.get("single"), about.get("matrices")
    if type(single) is not bool or not isinstance(records, dict) or len(about) != 3:
        raise InvalidFile(f"{path}: its metadata must be an object of version, single and matrices")
    if single and list(records) != [SINGLE]:
        raise InvalidFile(f"{path}: its metadata has `single`, but names {len(records)} objects")
    kinds = {name: kind_of_record(f"{path}: {shown(name)}", record) for name, record in records.items()}
    return single, records, kinds


def _check_tensors(path: StrPath, found: set[str], expected: set[str]) -> None:
    for fault, names in (("lacks", expected - found), ("also has", found - expected)):
        if names:
            raise InvalidFile(f"{path}: {fault} {len(names)} tensors: {', '.join(sorted(names))[:200]}")


def _size(file: TensorFile, name: str, parts: Iterable[str]) -> int:
    """The bytes of the tensors of an object."""
    spans = (file.tensors[f"{name}.{part}"] for part in parts)
    return sum(span.end - span.start for span in spans)


def _read(path: StrPath, file: TensorFile, name: str, kind: Kind, record: Record) -> Any:
    """The object of one record, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for part, (tag, rank) in kind.parts(record).items():
        found, shape, *_ = file.tensors[f"{name}.{part}"]
        if found != tag or len(shape) != rank:
            must = f"{tag} of {rank} dimensions"
            raise InvalidFile(
                f"{path}: {shown(f'{name}.{part}')} is {found} of {len(shape)} dimensions; must be {must}"
            )
        tensors[part] = file.read(f"{name}.{part}")
    if _crc32(tensors) != record["crc32"]:
        raise InvalidFile(f"{path}: {shown(name)} is damaged: its checksum does not match")
    with files.faults(f"{path}: {shown(name)}", InvalidInput):
        return kind.made(record, tensors)
