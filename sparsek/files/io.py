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
import os
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsek.core import arguments, dtypes, files
from sparsek.core.arguments import shown
from sparsek.core.errors import InvalidFile, InvalidInput
from sparsek.core.files import StrPath
from sparsek.core.tracing import outside_inference
from sparsek.files.io_kinds import OTHER_TAGS, TAGS, Kind, Record, kind_of_object, kind_of_record
from sparsek.mask.mask import BlockMask
from sparsek.matrix.bsr import BSR
from sparsek.matrix.bsr24 import BSR24
from sparsek.matrix.quantized import Quantized
from sparsek.matrix.semi24 import Semi24

VERSION = 1
SINGLE = "matrix"  # the name of an object that was saved alone, a mask too: the format is older than masks
HEADER_LIMIT = 100_000_000  # the limit of the safetensors format
ALIGNMENT = 64
ZIP = b"PK\x03\x04"  # the first bytes of a zip
LONGEST_FAULT = 300

Saved: TypeAlias = BSR | Semi24 | BSR24 | Quantized | BlockMask
Loaded = TypeVar("Loaded")


def save(obj: Saved | Mapping[str, Saved], path: StrPath) -> None:
    """Save a BSR, Semi24, BSR24, Quantized or BlockMask, or several by name, to a .safetensors file.

    The write is atomic: the data is written beside `path`, flushed to disk, and renamed to it. Tensors on a GPU are
    copied to the host. A transposed view is saved as the matrix that it views, with a flag.

    Args:
        obj: The object, or a dict of them by name.
        path: The file, by convention with the suffix .safetensors. It is replaced if it exists.

    Raises:
        InvalidInput: For other objects, for a path that is no regular file's, and for one that cannot be written.

    Examples:
        >>> A = sk.random_bsr(256, 128, block=32, density=0.25)
        >>> sk.save({"up": A, "down": A.T}, "weights.safetensors")
        >>> sk.load("weights.safetensors", "up", kind=sk.BSR)
        BSR(256x128 fp32, block 32x32, 8 of 32 blocks, 25 %, 0.0328 MB, cpu)
    """
    target = files.as_path("path", path)
    single = isinstance(obj, Saved)
    tensors: dict[str, Tensor] = {}
    records: dict[str, Record] = {}
    for name, (each, kind) in _checked({SINGLE: obj} if single else obj).items():
        record, parts = kind.taken_apart(each)
        records[name] = {"kind": kind.name, **record, "crc32": _crc32(parts)}
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    about = json.dumps({"version": VERSION, "single": single, "matrices": records})
    with files.replacing(target) as file:
        _write(file, tensors, {"sparsek": about, "sparsek.crc32": str(zlib.crc32(about.encode()))})


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

    Everything is checked, checksums included.

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
        arguments.text("name", name)
    if kind is not None and not isinstance(kind, type):
        raise InvalidInput(f"kind is {shown(kind)}; it must be a class, like sparsek.BSR")
    with opened(path) as file:
        single, records, kinds = _about(path, file.metadata())
        expected = {f"{each}.{part}" for each, kind in kinds.items() for part in kind.parts(records[each])}
        _check_tensors(path, set(file.keys()), expected)
        if name is not None and name not in records:
            raise unknown_name(path, name, records)
        chosen = records if name is None else {name: records[name]}
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


@contextmanager
def faults(path: StrPath, *errors: type[Exception]) -> Iterator[None]:
    """Convert `errors`, which a parser raises on bad bytes, to an InvalidFile that names the file."""
    try:
        yield
    except InvalidFile:
        raise
    except errors as error:
        raise InvalidFile(f"{path}: {shortened(str(error) or type(error).__name__)}") from error


def shortened(text: str) -> str:
    """A text of a parser or of a file, cut to a length for a message: it may quote the file at any length."""
    return text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}..."


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a .safetensors file with the safetensors library, which refuses holes, overlaps and extra bytes.

    Raises InvalidFile for bad bytes, here and while it is open, and as `files.regular` does.
    """
    with files.regular(path) as file:
        head, size = file.read(8), os.fstat(file.fileno()).st_size
        header = int.from_bytes(head, "little")
        if head.startswith(ZIP) and (header > size - 8 or header > HEADER_LIMIT):
            raise InvalidFile(
                f"{path}: no .safetensors file but a zip, as torch.save writes; read it by torch.load"
            )
        if len(head) < 8 or header > size - 8:
            raise InvalidFile(f"{path}: no .safetensors file: {size} bytes; its header needs {8 + header}")
        if header > HEADER_LIMIT:
            raise InvalidFile(f"{path}: a header of {header} bytes is over the limit of {HEADER_LIMIT}")
        again = Path(
            f"/dev/fd/{file.fileno()}"
        )  # the file that was checked, even if `path` is another one by now
        where = again if again.exists() else path
        with faults(path, SafetensorError), safe_open(os.fspath(where), framework="pt") as parsed:
            yield parsed


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
        checksum = zlib.crc32(_bytes(tensor), checksum)
    return checksum


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous tensor of 0 or 1 elements has any stride
    return flat.view(torch.uint8).numpy().data


def _write(file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write header length, header and data.

    Values of blocks come first: their sizes are multiples of 256 bytes, so every block of a file that is mapped into
    memory is aligned. Tensors of single bytes come last, because they may have any size.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    order = sorted(tensors, key=lambda name: _rank(name, tensors[name]))
    end = 0
    for name in order:
        tensor = tensors[name]
        tag = OTHER_TAGS.get(tensor.dtype) or TAGS[dtypes.name(tensor.dtype)]
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tag,
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        raise InvalidInput(f"{len(tensors)} tensors need a header of {len(text)} bytes, over {HEADER_LIMIT}")
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        file.write(_bytes(tensors[name]))


def _rank(name: str, tensor: Tensor) -> int:
    """The place of a tensor in a file: values of blocks, of whole matrices, integers and scales, single bytes."""
    values = name.endswith(".values")
    if values and tensor.ndim == 3:
        return 0
    if tensor.element_size() == 1:
        return 3
    return 1 if values else 2


def _about(
    path: StrPath, metadata: Mapping[str, str] | None
) -> tuple[bool, dict[str, Record], dict[str, Kind]]:
    """Whether a single object was saved, the records by name, and the kinds by name, from the metadata of a file."""
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


def _unique(path: StrPath, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        names = reprlib.repr([key for key, _ in pairs])
        raise InvalidFile(f"{path}: its metadata has a name twice among {names}")
    return out


def _check_tensors(path: StrPath, found: set[str], expected: set[str]) -> None:
    for fault, names in (("lacks", expected - found), ("also has", found - expected)):
        if names:
            raise InvalidFile(f"{path}: {fault} {len(names)} tensors: {', '.join(sorted(names))[:200]}")


def _read(path: StrPath, file: Any, name: str, kind: Kind, record: Record) -> Any:
    """The object of one record, on the CPU, in its own memory: the file may change or vanish later."""
    tensors: dict[str, Tensor] = {}
    for part, (tag, rank) in kind.parts(record).items():
        view = file.get_slice(f"{name}.{part}")
        found, shape = view.get_dtype(), view.get_shape()
        if found != tag or len(shape) != rank:
            must = f"{tag} of {rank} dimensions"
            raise InvalidFile(
                f"{path}: {shown(f'{name}.{part}')} is {found} of {len(shape)} dimensions; must be {must}"
            )
        tensors[part] = file.get_tensor(f"{name}.{part}").clone()
    if _crc32(tensors) != record["crc32"]:
        raise InvalidFile(f"{path}: {shown(name)} is damaged: its checksum does not match")
    with faults(f"{path}: {shown(name)}", InvalidInput):
        return kind.made(record, tensors)
